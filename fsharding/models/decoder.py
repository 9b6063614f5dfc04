"""A decoder-only language model: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied head.

In: a `DecoderConfig`, then `{"tokens", "targets"}` of int64[B, T]. Out: the sum of token losses in nats, and how many.
Pre-norm blocks as in Llama (Touvron et al. 2023). Shapes: B batch, T positions, D model, H query heads, K key heads,
E head dim, F hidden, V vocabulary. Targets of -100 do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from fsharding import random
from fsharding.errors import ConfigError, message
from fsharding.models.base import Model
from fsharding.tree import Tree

__all__ = ["DecoderConfig", "decoder"]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder.

    Attributes:
        vocab: V, number of tokens.
        dim: D.
        layers: number of blocks.
        heads: H; divides `dim`.
        kv_heads: K; divides `heads`.
        hidden: F.
        tied: the head uses the embedding table.
        rope_base: base of the rotary frequencies.
        eps: of RMSNorm.
    """

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 384
    tied: bool = False
    rope_base: float = 10_000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        wrong: list[str] = []
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            wrong.append(f"dim {self.dim} over {self.heads} heads is not an even head dim")
        if self.heads % self.kv_heads:
            wrong.append(f"{self.heads} heads are not a multiple of {self.kv_heads} kv_heads")
        if wrong:
            raise ConfigError(message("DecoderConfig", "has sizes that do not fit.", wrong))

    @property
    def head_dim(self) -> int:
        """E, the size of a head."""
        return self.dim // self.heads


def decoder(config: DecoderConfig) -> Model:
    """The model of a config."""

    def embed(params: Tree, batch: Tree) -> Tensor:
        return F.embedding(batch["tokens"], params["table"])

    def block(params: Tree, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + _attention(config, params, _norm(config, params["norm1"], x_BTD))
        return x_BTD + _mlp(params, _norm(config, params["norm2"], x_BTD))

    def head(params: Tree, x_BTD: Tensor, batch: Tree) -> tuple[Tensor, Tensor]:
        x_BTD = _norm(config, params["norm"], x_BTD)
        logits_BTV = F.linear(x_BTD, params["unembed"]).float()
        targets = batch["targets"]
        total = F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
        return total, (targets != -100).sum()

    tied = (("unembed", "embed.table"),) if config.tied else ()
    return Model(lambda key: _init(config, key), embed, block, head, _names(config), tied)


def _init(c: DecoderConfig, key: Tensor) -> Tree:
    """Normal weights of std 0.02; those that write to the residual stream over sqrt(2 layers) (Radford et al. 2019)."""
    keys = iter(random.split(key, 16).unbind(0))
    narrow = 0.02 / (2 * c.layers) ** 0.5
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

    def weight(*shape: int, std: float = 0.02) -> random.Draw:
        return random.normal(next(keys), shape, std=std)

    blocks = {
        "norm1": random.ones((c.layers, c.dim)),
        "wq": weight(c.layers, q, c.dim),
        "wk": weight(c.layers, kv, c.dim),
        "wv": weight(c.layers, kv, c.dim),
        "wo": weight(c.layers, q, c.dim, std=narrow),
        "norm2": random.ones((c.layers, c.dim)),
        "gate": weight(c.layers, c.hidden, c.dim),
        "up": weight(c.layers, c.hidden, c.dim),
        "down": weight(c.layers, c.hidden, c.dim, std=narrow),
    }
    head = {"norm": random.ones((c.dim,))}
    if not c.tied:
        head["unembed"] = weight(c.vocab, c.dim)
    return {"embed": {"table": weight(c.vocab, c.dim)}, "blocks": blocks, "head": head}


def _names(c: DecoderConfig) -> Tree:
    blocks = {
        "norm1": ("layers", "embed"),
        "wq": ("layers", "heads", "embed"),
        "wk": ("layers", "kv_heads", "embed"),
        "wv": ("layers", "kv_heads", "embed"),
        "wo": ("layers", "heads", "embed"),
        "norm2": ("layers", "embed"),
        "gate": ("layers", "mlp", "embed"),
        "up": ("layers", "mlp", "embed"),
        "down": ("layers", "mlp", "embed"),
    }
    head: dict[str, Any] = {"norm": ("embed",)}
    if not c.tied:
        head["unembed"] = ("vocab", "embed")
    return {"embed": {"table": ("vocab", "embed")}, "blocks": blocks, "head": head}


def _norm(c: DecoderConfig, scale_D: Tensor, x_BTD: Tensor) -> Tensor:
    return F.rms_norm(x_BTD, (c.dim,), scale_D, c.eps)


def _attention(c: DecoderConfig, params: Tree, x_BTD: Tensor) -> Tensor:
    q_BHTE = rearrange(F.linear(x_BTD, params["wq"]), "b t (h e) -> b h t e", h=c.heads)
    k_BKTE = rearrange(F.linear(x_BTD, params["wk"]), "b t (k e) -> b k t e", k=c.kv_heads)
    v_BKTE = rearrange(F.linear(x_BTD, params["wv"]), "b t (k e) -> b k t e", k=c.kv_heads)
    cos, sin = _rotations(c, x_BTD.shape[1], x_BTD.device)
    q_BHTE, k_BKTE = _rotate(q_BHTE, cos, sin), _rotate(k_BKTE, cos, sin)
    group = c.heads // c.kv_heads
    k_BHTE, v_BHTE = (repeat(y, "b k t e -> b (k g) t e", g=group) for y in (k_BKTE, v_BKTE))
    out_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
    return rearrange(out_BHTE, "b h t e -> b t (h e)") @ params["wo"]


def _mlp(params: Tree, x_BTD: Tensor) -> Tensor:
    hidden_BTF = F.silu(F.linear(x_BTD, params["gate"])) * F.linear(x_BTD, params["up"])
    return hidden_BTF @ params["down"]


def _rotations(c: DecoderConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions (Su et al. 2021): float32[T, E/2]."""
    powers = torch.arange(0, c.head_dim, 2, dtype=torch.float32, device=device) / c.head_dim
    angles_TE = torch.outer(torch.arange(positions, device=device).float(), c.rope_base**-powers)
    return angles_TE.cos(), angles_TE.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (first half, second half) of the last dim."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
