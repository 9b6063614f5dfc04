"""A decoder-only language model: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts, a head.

In: a `DecoderConfig`, then `{"tokens", "targets"}` of int64[B, T]. Out: the sum of token losses in nats, and how many.
Pre-norm blocks as in Llama (Touvron et al. 2023). Shapes: B batch, T positions, D model, H query heads, K key heads,
E head dim, F hidden, V vocabulary. Targets of -100 do not count. What routers add to the loss travels with activations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from fsharding import ops, random
from fsharding.errors import ConfigError, message
from fsharding.mesh import Mesh, abstract, axis_index, axis_size
from fsharding.models.base import Model
from fsharding.models.experts import Experts, expert_draws, expert_names, mixture, uncut
from fsharding.ops.attention import Kind
from fsharding.precision import wide
from fsharding.spec import AxisRules
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
        experts: of every block, in the place of its MLP; None for a dense decoder.
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
    experts: Experts | None = None

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


def decoder(config: DecoderConfig, *, sequence: bool = False, attention: Kind = "ring") -> Model:
    """The model of a config.

    Args:
        config: sizes.
        sequence: cut activations along the sequence over `tp` outside of attention, MLP and head (Korthikanti et al.
            2022). It needs rules that put `tp` on heads, mlp and vocab.
        attention: how queries meet the keys of other ranks on a mesh with `cp`; see `ops.attention`. There each rank
            gets the tokens, targets and documents of its part of the sequence, which `ops.cut_sequence` cuts out.
    """
    cut, experts = 1 if sequence else None, config.experts

    def embed(params: Tree, batch: Tree) -> Tensor | _Flow:
        x_BTD = ops.embedding(batch["tokens"], params["table"], vocab=config.vocab, sequence_dim=cut)
        return x_BTD if experts is None else _Flow(x_BTD, x_BTD.new_zeros((), dtype=wide(x_BTD.dtype)))

    def block(params: Tree, flow: Tensor | _Flow) -> Tensor | _Flow:
        x_BTD = flow.x_BTD if isinstance(flow, _Flow) else flow
        x_BTD = x_BTD + _attention(config, params, _norm(config, params["norm1"], x_BTD, cut), cut, attention)
        y_BTD = _norm(config, params["norm2"], x_BTD, cut)
        if experts is None or not isinstance(flow, _Flow):
            return x_BTD + _mlp(config, params, y_BTD, cut)
        y_BTD, extra = mixture(experts, params["experts"], y_BTD, sequence_dim=cut)
        return _Flow(x_BTD + y_BTD, flow.extra + extra)

    def head(params: Tree, flow: Tensor | _Flow, batch: Tree) -> tuple[Tensor, Tensor]:
        x_BTD, extra = flow if isinstance(flow, _Flow) else (flow, 0.0)
        x_BTD = _norm(config, params["norm"], x_BTD, cut)
        targets, whole = batch["targets"], params["unembed"].shape[0] == config.vocab
        (logits_BTV,) = _columns(x_BTD, [params["unembed"]], whole=whole, cut=cut)
        losses_BT = ops.cross_entropy(logits_BTV, targets, vocab=config.vocab)
        return losses_BT.sum() + extra, (targets != -100).sum()

    tied = (("unembed", "embed.table"),) if config.tied else ()
    check = functools.partial(_check, config, sequence, attention)
    balanced = () if experts is None or experts.bias_rate is None else (("blocks.experts.bias", experts.bias_rate),)
    names = _names(config)
    return Model(lambda key: _init(config, key), embed, block, head, names, tied, ("cp", "tp"), check, balanced)


class _Flow(NamedTuple):
    """What goes from block to block where there are experts.

    Attributes:
        x_BTD: activations.
        extra: what the routers so far add to the sum of these tokens' losses (0-d).
    """

    x_BTD: Tensor
    extra: Tensor


def _check(c: DecoderConfig, sequence: bool, kind: Kind, mesh: Mesh, rules: AxisRules) -> None:
    """Refuses a mesh whose `tp` and `cp` cannot cut this decoder as the rules and options ask."""
    size, parts, wrong = abstract(mesh).axis_size("tp"), abstract(mesh).axis_size("cp"), list[str]()
    cut = {name for name in ("heads", "kv_heads", "mlp", "vocab") if size > 1 and "tp" in rules.get(name, ())}
    heads = c.heads // size if "heads" in cut else c.heads
    if kind == "ulysses" and heads % parts:
        wrong.append(f"{heads} heads a rank: no multiple of cp={parts}, as attention='ulysses' needs")
    if size > 1:
        wrong += _uncut(c, sequence, cut, size)
    wrong += uncut(c.experts, mesh, rules) if c.experts is not None else []
    if wrong:
        mend = "Choose another mesh, another model or kind of attention, or rules that leave these dims whole."
        raise ConfigError(message("models.decoder", f"cannot be cut over the mesh {abstract(mesh)}.", wrong, mend))


def _uncut(c: DecoderConfig, sequence: bool, cut: set[str], size: int) -> list[str]:
    """What `tp` cannot cut in the way that the rules ask."""
    wrong: list[str] = []
    if "heads" in cut and c.heads % size:
        wrong.append(f"{c.heads} heads: no multiple of {size}")
    elif "heads" in cut and (each := c.heads // size) % (group := c.heads // c.kv_heads) and group % each:
        wrong.append(f"{each} heads a rank: neither whole groups of {group}, which share a key head, nor a part of one")
    if "kv_heads" in cut and "heads" not in cut:
        wrong.append(f"{c.kv_heads} kv_heads: cut over tp, but the heads are not")
    wrong += [f"{name} of size {n}: less than 2" for name, n in (("mlp", c.hidden), ("vocab", c.vocab)) if n < 2]
    if sequence and (whole := {"heads", "mlp", "vocab"} - cut):
        wrong.append(f"sequence=True: tp does not cut {', '.join(sorted(whole))}")
    return wrong


def _init(c: DecoderConfig, key: Tensor) -> Tree:
    """Normal weights of std 0.02; those that write to the residual stream over sqrt(2 layers) (Radford et al. 2019)."""
    keys = iter(random.split(key, 16).unbind(0))
    narrow = 0.02 / (2 * c.layers) ** 0.5
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

    def weight(*shape: int, std: float = 0.02) -> random.Draw:
        return random.normal(next(keys), shape, std=std)

    blocks: dict[str, Tree] = {
        "norm1": random.ones((c.layers, c.dim)),
        "wq": weight(c.layers, q, c.dim),
        "wk": weight(c.layers, kv, c.dim),
        "wv": weight(c.layers, kv, c.dim),
        "wo": weight(c.layers, q, c.dim, std=narrow),
        "norm2": random.ones((c.layers, c.dim)),
    }
    if c.experts is not None:
        blocks["experts"] = expert_draws(c.experts, c.layers, c.dim, weight, narrow)
    else:
        blocks["gate"] = weight(c.layers, c.hidden, c.dim)
        blocks["up"] = weight(c.layers, c.hidden, c.dim)
        blocks["down"] = weight(c.layers, c.hidden, c.dim, std=narrow)
    head = {"norm": random.ones((c.dim,))}
    if not c.tied:
        head["unembed"] = weight(c.vocab, c.dim)
    return {"embed": {"table": weight(c.vocab, c.dim)}, "blocks": blocks, "head": head}


def _names(c: DecoderConfig) -> Tree:
    blocks: dict[str, Any] = {
        "norm1": ("layers", "embed"),
        "wq": ("layers", "heads", "embed"),
        "wk": ("layers", "kv_heads", "embed"),
        "wv": ("layers", "kv_heads", "embed"),
        "wo": ("layers", "heads", "embed"),
        "norm2": ("layers", "embed"),
    }
    if c.experts is not None:
        blocks["experts"] = expert_names(c.experts)
    else:
        blocks.update(dict.fromkeys(("gate", "up", "down"), ("layers", "mlp", "embed")))
    head: dict[str, Any] = {"norm": ("embed",)}
    if not c.tied:
        head["unembed"] = ("vocab", "embed")
    return {"embed": {"table": ("vocab", "embed")}, "blocks": blocks, "head": head}


def _norm(c: DecoderConfig, scale_D: Tensor, x_BTD: Tensor, cut: int | None) -> Tensor:
    return ops.rms_norm(x_BTD, scale_D, eps=c.eps, over="tp" if cut is not None else ())


def _columns(x_BTD: Tensor, weights: Sequence[Tensor], *, whole: bool, cut: int | None) -> Sequence[Tensor]:
    """Products with weights whose rows `tp` cuts, or does not where the rules say so: then all ranks do the same."""
    if whole:
        return [F.linear(x_BTD, w) for w in weights]
    return ops.column_linear(x_BTD, *weights, sequence_dim=cut)


def _rows(x_BTF: Tensor, weight_FD: Tensor, *, whole: bool, cut: int | None) -> Tensor:
    return x_BTF @ weight_FD if whole else ops.row_linear(x_BTF, weight_FD, sequence_dim=cut)


def _attention(c: DecoderConfig, params: Tree, x_BTD: Tensor, cut: int | None, kind: Kind) -> Tensor:
    heads = params["wq"].shape[0] // c.head_dim
    whole = heads == c.heads
    kv = [_kv_rows(c, params[name], heads) for name in ("wk", "wv")]
    q_BTX, k_BTX, v_BTX = _columns(x_BTD, [params["wq"], *kv], whole=whole, cut=cut)
    q_BHTE, k_BKTE, v_BKTE = (rearrange(y, "b t (h e) -> b h t e", e=c.head_dim) for y in (q_BTX, k_BTX, v_BTX))
    at_T = ops.positions(q_BHTE.shape[2] * axis_size("cp"), device=x_BTD.device)
    q_BHTE, k_BKTE = (ops.rotary(y, at_T, base=c.rope_base) for y in (q_BHTE, k_BKTE))
    out_BHTE = ops.attention(q_BHTE, k_BKTE, v_BKTE, kind=kind)
    return _rows(rearrange(out_BHTE, "b h t e -> b t (h e)"), params["wo"], whole=whole, cut=cut)


def _kv_rows(c: DecoderConfig, weight: Tensor, heads: int) -> Tensor:
    """The rows of the key heads that this rank's query heads need; the query heads of several ranks may share one."""
    size, rows = c.heads // heads, c.kv_heads * c.head_dim
    if size == 1 or (c.kv_heads % size == 0 and weight.shape[0] < rows):
        return weight
    weight = ops.vary(weight, "tp") if weight.shape[0] == rows else ops.gather(weight, "tp", dim=0, size=rows)
    group = c.heads // c.kv_heads
    first = axis_index("tp") * heads
    return weight[first // group * c.head_dim : ((first + heads - 1) // group + 1) * c.head_dim]


def _mlp(c: DecoderConfig, params: Tree, x_BTD: Tensor, cut: int | None) -> Tensor:
    whole = params["gate"].shape[0] == c.hidden
    gate_BTF, up_BTF = _columns(x_BTD, [params["gate"], params["up"]], whole=whole, cut=cut)
    return _rows(F.silu(gate_BTF) * up_BTF, params["down"], whole=whole, cut=cut)
