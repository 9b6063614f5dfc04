"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, sec. 2.1; DeepSeek-V3, arXiv:2412.19437, eq. 1 to 11)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from fsharding import ops
from fsharding.base.errors import ConfigError, message
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.formats.quantized import dequantize
from fsharding.models.block_parts import BlockSettings, Init, MeshRules, Stream, norm, positions_of, rows, scale_of
from fsharding.models.cache import attend, has_earlier, store
from fsharding.ops.rotary import Scaling
from fsharding.sharding.partition_spec import DimName
from fsharding.sharding.random import LazyTensor

__all__ = ["MLA"]


@dataclass(frozen=True)
class MLA:
    """Sizes of multi-head latent attention.

    Attributes:
        heads: H, the number of heads.
        q_rank: Width of the query latent.
        kv_rank: Width of the latent that keys and values share.
        plain_dim: Part of the query and key head dim without rotary positions.
        rotary_dim: Part of the head dim with rotary positions, even; all heads share this part of a key.
        value_dim: Head dim of the values.
        rope_base: Base of the rotary frequencies.
        rope_scaling: Scaling of these frequencies for a longer context, or None.

    Example:
        >>> attention = fs.models.MLA(heads=4, q_rank=48, kv_rank=32, plain_dim=16, rotary_dim=16, value_dim=24)
        >>> attention.head_dim
        32
        >>> config = fs.models.DecoderConfig(dim=64, layers=2, intermediate_size=192, attention=attention)
        >>> fs.models.decoder(config).init(fs.random.key(0))["blocks"]["wo"].shape
        (2, 96, 64)
    """

    heads: int
    q_rank: int
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    rope_base: float = 10_000.0
    rope_scaling: Scaling | None = None

    @public
    def __post_init__(self) -> None:
        if self.rotary_dim % 2:
            wrong = [f"rotary_dim {self.rotary_dim} is not even"]
            raise ConfigError(message("has sizes that do not fit.", wrong, f"Use rotary_dim={self.rotary_dim + 1}."))

    @property
    def head_dim(self) -> int:
        """Head dim of queries and keys: `plain_dim + rotary_dim`."""
        return self.plain_dim + self.rotary_dim

    def init(self, dim: int, values: Init) -> dict[str, LazyTensor]:
        """Create the initial values of a stack of blocks of width `dim`."""
        return {
            "q_down": values.normal(self.q_rank, dim),
            "q_norm": values.ones(self.q_rank),
            "q_up": values.normal(self.heads * self.head_dim, self.q_rank),
            "kv_down": values.normal(self.kv_rank + self.rotary_dim, dim),
            "kv_norm": values.ones(self.kv_rank),
            "kv_up": values.normal(self.heads * (self.plain_dim + self.value_dim), self.kv_rank),
            "wo": values.into_stream(self.heads * self.value_dim, dim),
        }

    def names(self) -> dict[str, tuple[DimName, ...]]:
        """Return the dim names of the leaves, "layers" first."""
        return {
            "q_down": ("layers", None, "embed"),
            "q_norm": ("layers", None),
            "q_up": ("layers", "heads", None),
            "kv_down": ("layers", None, "embed"),
            "kv_norm": ("layers", None),
            "kv_up": ("layers", "heads", None),
            "wo": ("layers", "heads", "embed"),
        }

    def apply(self, params: Tree, x_BTD: Tensor, stream: Stream, settings: BlockSettings) -> Tensor:
        """Compute what attention adds to the residual stream, from the normalized stream [B, T, D]."""
        heads = params["q_up"].shape[0] // self.head_dim
        full = heads == self.heads
        q_BTR, kv_BTR, turning_BTE = self._narrow(params, x_BTD, full, settings)
        q_BHTE = rearrange(ops.scaled_matmul(q_BTR, params["q_up"], 1), "b t (h e) -> b h t e", h=heads)
        at = positions_of(stream, q_BHTE.shape[2])
        turned = functools.partial(ops.rotary, positions_T=at, base=self.rope_base, scaling=self.rope_scaling)
        q_plain, q_turning = q_BHTE.split((self.plain_dim, self.rotary_dim), -1)
        q_turned = turned(q_turning)
        k_turned = turned(turning_BTE[:, None])
        scale = scale_of(self.head_dim, self.rope_scaling)
        if stream.cache is not None:
            store(stream.cache["latents"], torch.cat((kv_BTR, k_turned[:, 0]), -1), at)
        if stream.cache is not None and has_earlier(stream.cache, q_BHTE.shape[2]):
            out_BHTE = self._cached(params["kv_up"], q_plain, q_turned, stream.cache["latents"], at, scale)
        else:
            kv_BHTE = rearrange(ops.scaled_matmul(kv_BTR, params["kv_up"], 1), "b t (h e) -> b h t e", h=heads)
            k_plain, v_BHTE = kv_BHTE.split((self.plain_dim, self.value_dim), -1)
            q_BHTE = torch.cat((q_plain, q_turned), -1)
            k_BHTE = torch.cat((k_plain, k_turned.expand(-1, heads, -1, -1)), -1)
            out_BHTE = ops.attention(
                q_BHTE, k_BHTE, v_BHTE, documents=stream.documents, kind=settings.kind, scale=scale
            )
        return rows(rearrange(out_BHTE, "b h t e -> b t (h e)"), params["wo"], full=full, settings=settings)

    def prepared(self, params: Tree) -> Tree:
        """Return the leaves unchanged: each rank stores the heads that it computes."""
        return params

    def cache(self, params: Tree, rows: int, length: int) -> dict[str, Tensor]:
        """Allocate the key-value latents and rotated key parts, which all heads share."""
        return {"latents": params["wo"].new_zeros(rows, length, self.kv_rank + self.rotary_dim)}

    def _cached(
        self, kv_up: Tensor, q_plain: Tensor, q_turned: Tensor, latents_BSR: Tensor, at: Tensor, scale: float
    ) -> Tensor:
        """Attend in the latent space, without computing keys and values of earlier tokens."""
        # The score of a plain query and a key, `q (W c)`, equals `(q W) c`, and a sum of values `W c` equals W times
        # the sum of c (DeepSeek-V2, sec. 2.1.2): multiply the few queries by W instead of all cached latents.
        sizes = self.plain_dim, self.value_dim
        up_k, up_v = dequantize(kv_up).unflatten(0, (-1, sum(sizes))).split(sizes, 1)
        q_BHTR = torch.cat((torch.einsum("bhte,her->bhtr", q_plain, up_k), q_turned), -1)
        keys_B1SR = latents_BSR[:, None]
        out_BHTR = attend(q_BHTR, keys_B1SR, keys_B1SR[..., : self.kv_rank], at, scale)
        return torch.einsum("bhtr,her->bhte", out_BHTR, up_v)

    def _narrow(self, params: Tree, x_BTD: Tensor, full: bool, settings: BlockSettings) -> tuple[Tensor, ...]:
        """Compute the normalized latents and the rotary part of keys, as inputs of the heads."""
        q_down = params["q_down"]
        kv_down = params["kv_down"]
        # Under sequence parallelism ranks of `tp` have different tokens: sum the gradients of replicated weights.
        if settings.sequence is not None:
            q_down, kv_down = (ops.pvary(dequantize(w), "tp") for w in (q_down, kv_down))
        sizes = (self.q_rank, self.kv_rank, self.rotary_dim)
        kv_BTR, turning_BTE = ops.scaled_matmul(x_BTD, kv_down, 1).split(sizes[1:], -1)
        q_BTR = norm(params["q_norm"], ops.scaled_matmul(x_BTD, q_down, 1), settings)
        narrow = torch.cat((q_BTR, norm(params["kv_norm"], kv_BTR, settings), turning_BTE), -1)
        return (narrow if full else ops.copy_to_tp(narrow, sequence_dim=settings.sequence)).split(sizes, -1)

    def objections(self, over: MeshRules) -> list[str]:
        """Explain why the mesh can't shard the heads as the rules require."""
        return over.misfit_heads(self.heads)
