"""Grouped-query attention: several query heads share a key head (Ainslie et al. 2023, arXiv:2305.13245)."""

from __future__ import annotations

from dataclasses import dataclass

from einops import rearrange
from torch import Tensor

from fsharding import ops
from fsharding.base.errors import ConfigError, message
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.formats.quantized import dequantize
from fsharding.mesh.device_mesh import axis_index
from fsharding.models.block_parts import BlockSettings, Init, MeshRules, Stream, columns, positions_of, rows, scale_of
from fsharding.models.cache import attend, has_earlier, store
from fsharding.ops.rotary import Scaling
from fsharding.sharding.partition_spec import DimName, Fused
from fsharding.sharding.random import LazyTensor

__all__ = ["GQA"]


@dataclass(frozen=True)
class GQA:
    """Sizes of grouped-query attention.

    Attributes:
        heads: H, the number of query heads.
        kv_heads: K, the number of key and value heads; a divisor of `heads`.
        head_dim: E, an even number.
        bias: Whether the query, key and value projections have a bias.
        rope_base: Base of the rotary frequencies.
        rope_scaling: Scaling of these frequencies for a longer context, or None.
        qk_norm: Whether each query and key head gets an RMSNorm before its rotation; all heads of a layer share one
            scale [E].
        fused: Whether queries, keys and values are one leaf, `wqkv`, and one matmul; likewise the bias, `qkv_bias`.

    Example:
        >>> attention = fs.models.GQA(heads=8, kv_heads=2, head_dim=16, qk_norm=True)
        >>> config = fs.models.DecoderConfig(dim=64, layers=2, intermediate_size=192, attention=attention)
        >>> fs.models.decoder(config).init(fs.random.key(0))["blocks"]["wk"].shape
        (2, 32, 64)
    """

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    rope_base: float = 10_000.0
    rope_scaling: Scaling | None = None
    qk_norm: bool = False
    fused: bool = False

    @public
    def __post_init__(self) -> None:
        wrong = [f"head_dim {self.head_dim} is not even"] if self.head_dim % 2 or self.head_dim < 1 else []
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads}
        wrong += [f"{name}={size}: at least 1" for name, size in sizes.items() if size < 1]
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            wrong.append(f"{self.heads} heads are not a multiple of {self.kv_heads} kv_heads")
        if wrong:
            mend = "Write, for example, fs.models.GQA(heads=8, kv_heads=2, head_dim=16)."
            raise ConfigError(message("has sizes that do not fit.", wrong, mend))

    @property
    def value_dim(self) -> int:
        """Head dim of the values; MLA's may differ from `head_dim`."""
        return self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Output dims of the query, key and value projections."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    def init(self, dim: int, values: Init) -> dict[str, LazyTensor]:
        """Create the initial values of a stack of blocks of width `dim`."""
        sizes = {"qkv": sum(self.sizes)} if self.fused else dict(zip("qkv", self.sizes, strict=True))
        biases = {f"{x}_bias": size for x, size in sizes.items()} if self.bias else {}
        return {
            **{f"w{x}": values.normal(size, dim) for x, size in sizes.items()},
            "wo": values.into_stream(self.sizes[0], dim),
            **{name: values.zeros(size) for name, size in biases.items()},
            **({name: values.ones(self.head_dim) for name in ("q_norm", "k_norm")} if self.qk_norm else {}),
        }

    def names(self) -> dict[str, tuple[DimName, ...]]:
        """Return the dim names of the leaves, "layers" first."""
        apart: dict[str, DimName] = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
        of = {"qkv": Fused("heads", self.sizes)} if self.fused else apart
        matrices = {f"w{x}": ("layers", name, "embed") for x, name in of.items()}
        biases = {f"{x}_bias": ("layers", name) for x, name in of.items()} if self.bias else {}
        norms = dict.fromkeys(("q_norm", "k_norm"), ("layers", None)) if self.qk_norm else {}
        return {**matrices, "wo": ("layers", "heads", "embed"), **biases, **norms}

    def apply(self, params: Tree, x_BTD: Tensor, stream: Stream, settings: BlockSettings) -> Tensor:
        """Compute what attention adds to the residual stream, from the normalized stream [B, T, D]."""
        # Fewer heads than the config's mean that `tp` shards them.
        heads = params["wo"].shape[0] // self.head_dim
        full = heads == self.heads
        result = columns(x_BTD, self._rows(params, "w{}", heads), full=full, settings=settings)
        if self.bias:
            result = [y + bias for y, bias in zip(result, self._rows(params, "{}_bias", heads), strict=True)]
        result = ops.split_fused(result[0], self.sizes) if self.fused else result
        q_BHTE, k_BKTE, v_BKTE = (rearrange(y, "b t (h e) -> b h t e", e=self.head_dim) for y in result)
        if self.qk_norm:
            over = () if full else "tp"
            q_BHTE = ops.rms_norm(q_BHTE, params["q_norm"], eps=settings.eps, over=over)
            k_BKTE = ops.rms_norm(k_BKTE, params["k_norm"], eps=settings.eps, over=over)
        at = positions_of(stream, q_BHTE.shape[2])
        q_BHTE, k_BKTE = (ops.rotary(y, at, base=self.rope_base, scaling=self.rope_scaling) for y in (q_BHTE, k_BKTE))
        scale = scale_of(self.head_dim, self.rope_scaling)
        if stream.cache is not None:
            for name, y_BKTE in (("k", k_BKTE), ("v", v_BKTE)):
                store(stream.cache[name], y_BKTE.transpose(1, 2), at)
        # The prompts attend to themselves through `ops.attention`; only later tokens read the cache.
        if stream.cache is not None and has_earlier(stream.cache, q_BHTE.shape[2]):
            k_BKSE, v_BKSE = (stream.cache[name].transpose(1, 2) for name in "kv")
            out_BHTE = attend(q_BHTE, k_BKSE, v_BKSE, at, scale)
        else:
            out_BHTE = ops.attention(
                q_BHTE, k_BKTE, v_BKTE, documents=stream.documents, kind=settings.kind, scale=scale
            )
        return rows(rearrange(out_BHTE, "b h t e -> b t (h e)"), params["wo"], full=full, settings=settings)

    def prepared(self, params: Tree) -> Tree:
        """Gather the key and value rows that this rank needs once, instead of once per token."""
        if self.fused:
            return params
        names = [name for x in "kv" for name in (f"w{x}", f"{x}_bias") if name in params]
        heads = params["wo"].shape[0] // self.head_dim
        return {**params, **{name: self._kv_rows(params[name], heads) for name in names}}

    def cache(self, params: Tree, rows: int, length: int) -> dict[str, Tensor]:
        """Allocate the keys and values of the key heads that this rank needs."""
        first, last = self._key_heads(params["wo"].shape[0] // self.head_dim)
        return {name: params["wo"].new_zeros(rows, length, last - first, self.head_dim) for name in "kv"}

    def _key_heads(self, heads: int) -> tuple[int, int]:
        """Return the range of key heads that this rank's query heads use: the first, and one past the last."""
        group = self.heads // self.kv_heads
        first = axis_index("tp") * heads if heads < self.heads else 0
        return first // group, (first + heads - 1) // group + 1

    def _rows(self, params: Tree, name: str, heads: int) -> list[Tensor]:
        """Return this rank's rows of the query, key and value leaves, or of the fused one."""
        if self.fused:
            return [params[name.format("qkv")]]
        return [params[name.format("q")], *(self._kv_rows(params[name.format(x)], heads) for x in "kv")]

    def _kv_rows(self, weight: Tensor, heads: int) -> Tensor:
        """Return the rows of the key heads that this rank's query heads use."""
        size = self.heads // heads
        count = self.kv_heads * self.head_dim
        if size == 1 or (self.kv_heads % size == 0 and weight.shape[0] < count):
            return weight  # `tp` shards key heads along with the query heads that use them
        first, last = self._key_heads(heads)
        # Rows that `prepared` has gathered: ranks that share a key head store less than one head each.
        if weight.shape[0] == (last - first) * self.head_dim < count:
            return weight
        weight = dequantize(weight)
        full = weight.shape[0] == count
        weight = ops.pvary(weight, "tp") if full else ops.all_gather(weight, "tp", dim=0, size=count)
        return weight[first * self.head_dim : last * self.head_dim]

    def objections(self, over: MeshRules) -> list[str]:
        """Explain why the mesh can't shard the heads as the rules require."""
        wrong = over.misfit_heads(self.heads)
        if not over.shards("heads"):
            if not self.fused and over.shards("kv_heads"):
                wrong.append(f"{self.kv_heads} kv_heads: sharded over tp, but the heads are not")
            return wrong
        each = self.heads // over.tp
        group = self.heads // self.kv_heads
        if self.heads % over.tp == 0 and each % group and group % each:
            wrong.append(f"{each} heads per rank: neither a multiple nor a divisor of {group}, the heads per kv head")
        if self.fused and self.kv_heads % over.tp:
            wrong.append(f"{self.kv_heads} kv_heads, in one leaf with the queries: not a multiple of tp={over.tp}")
        return wrong
