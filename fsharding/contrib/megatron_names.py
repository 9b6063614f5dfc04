"""Map leaves of the decoder to the tensors of a Megatron checkpoint, which they tile but for padding rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fsharding.base.errors import ConfigError, message
from fsharding.foreign.name_map import Piece, Transposed
from fsharding.interop.hf.naming import pieces_of
from fsharding.models.decoder import DecoderConfig

__all__ = [
    "EMBEDDING", "HEAD", "Dialect", "dialect_of", "extra_states", "megatron_pieces", "refuse_others", "written_norms",
]  # fmt: skip

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"


@dataclass(frozen=True)
class Dialect:
    """How a checkpoint is written."""

    format: str  # "torch_dist" or "fsdp_dtensor"
    stacked: bool  # equal layers are one tensor with a first dim of layers, in torch_dist alone
    norms: tuple[str, str]  # names inside a layer of the norms before attention and before the feed-forward part
    rows: int  # of the embedding, with those that pad it


def dialect_of(names: Collection[str], format: str, rows: int) -> Dialect:
    """The dialect in which tensors are named."""
    stacked = any(name.startswith("decoder.layers.self_attention.") for name in names)
    first, second = (
        next((one for one in known if any(name.endswith(f".{one}") for name in names)), known[0]) for known in _NORMS
    )
    return Dialect(format, stacked, (first, second), rows)


def written_norms(config: DecoderConfig, format: str, transformer_impl: str) -> tuple[str, str]:
    """Return the names of norms that Megatron loads."""
    # The layers of Megatron Core rename their norms in torch_dist. Transformer Engine fuses a norm with the projection
    # that follows it, but not with a router.
    fused, apart = zip(*_NORMS, strict=True)
    if transformer_impl == "transformer_engine":
        return fused if config.experts is None else (fused[0], apart[1])
    return fused if format == "torch_dist" else apart


_NORMS = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
)
"""Names of the norm before attention, and of the one before the feed-forward part."""


def extra_states(config: DecoderConfig) -> list[str]:
    """Yield paths of the extra states, all empty, that modules of Megatron Core and Transformer Engine load."""
    layers = config.layers
    experts = config.experts
    modules = ["self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention"]
    modules += ["self_attention.q_layernorm", "self_attention.k_layernorm"] if config.qk_norm else []
    modules += ["mlp.linear_fc1", "mlp.linear_fc2"] if experts is None else ["pre_mlp_layernorm"]
    result = [f"decoder.layers.{name}._extra_state/shard_{i}_{layers}" for name in modules for i in range(layers)]
    result.append("decoder.final_layernorm._extra_state/shard_0_1")
    if experts is not None:
        places = [f"shard_{i}.{j}_{layers}.{experts.count}" for i in range(layers) for j in range(experts.count)]
        for name in ("linear_fc1", "linear_fc2"):
            result += [f"decoder.layers.mlp.experts.experts.{name}._extra_state/{place}" for place in places]
    return result


def refuse_others(config: DecoderConfig) -> None:
    """Refuses a decoder that has parts which no table here names."""
    experts = config.experts
    rows = ["it has stacks of unlike blocks"] if config.stacks else []
    rows += ["it has another attention than the grouped-query one"] if config.attention is not None else []
    rows += ["it has shared experts"] if experts is not None and experts.shared else []
    rows += ["its router has biases"] if experts is not None and experts.bias_rate is not None else []
    if rows:
        mend = "Give a decoder of equal blocks with grouped-query attention, dense or with routed experts."
        raise ConfigError(message("has no names for this decoder in Megatron.", rows, mend))


class _Run(NamedTuple):
    """Indices of our leaf along a dim that are others there: they begin at `there` in a tensor of `total`."""

    start: int
    stop: int
    there: int
    total: int


def megatron_pieces(
    config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]], how: Dialect
) -> dict[str, list[Piece]]:
    """The pieces of every leaf."""
    return {path: list(_leaf(config, path.removeprefix("blocks."), shape, how)) for path, shape in shapes.items()}


def _leaf(config: DecoderConfig, leaf: str, shape: tuple[int, ...], how: Dialect) -> Iterator[Piece]:
    layer = "decoder.layers." if how.stacked else "decoder.layers.{i}."
    if leaf in ("embed.table", "head.unembed"):
        yield from _runs(EMBEDDING if leaf == "embed.table" else HEAD, shape, -2, [_Run(0, shape[0], 0, how.rows)])
    elif leaf in _PLAIN:
        yield from pieces_of(_PLAIN[leaf].replace("decoder.layers.", layer), shape)
    elif leaf in _TURNED:
        yield from pieces_of(Transposed(_TURNED[leaf].replace("decoder.layers.", layer)), shape)
    elif leaf in ("norm1", "norm2"):
        yield from pieces_of(layer + how.norms[leaf == "norm2"], shape)
    elif leaf in ("wq", "wk", "wv", "wqkv", "q_bias", "k_bias", "v_bias", "qkv_bias"):
        bias = leaf.endswith("_bias")
        name = f"{layer}self_attention.linear_qkv.{'bias' if bias else 'weight'}"
        yield from _runs(name, shape, -1 if bias else -2, _heads(config, leaf.removesuffix("_bias").removeprefix("w")))
    elif leaf in ("gate", "up", "gate_up"):
        yield from _gated(f"{layer}mlp.linear_fc1.weight", leaf, shape, how)
    elif how.format == "torch_dist":
        yield from _experts(f"{layer}mlp.experts.experts.", leaf.removeprefix("experts."), shape, how, "weight")
    else:
        yield from _experts(f"{layer}mlp.experts.", leaf.removeprefix("experts."), shape, how, "weight{j}")


_PLAIN = {
    "head.norm": "decoder.final_layernorm.weight",
    "q_norm": "decoder.layers.self_attention.q_layernorm.weight",
    "k_norm": "decoder.layers.self_attention.k_layernorm.weight",
    "experts.router": "decoder.layers.mlp.router.weight",
}
_TURNED = {"wo": "decoder.layers.self_attention.linear_proj.weight", "down": "decoder.layers.mlp.linear_fc2.weight"}


def _heads(config: DecoderConfig, which: str) -> list[_Run]:
    """Where heads are: there the queries of a group, then its key, then its value; here all queries, keys, values."""
    size = config.head_dim
    groups = config.kv_heads
    queries = config.heads // groups * size
    width = queries + 2 * size
    result = list[_Run]()
    first = 0
    for part, length, offset in (("q", queries, 0), ("k", size, queries), ("v", size, queries + size)):
        if part in which:
            for group in range(groups):
                start = first + group * length
                result.append(_Run(start, start + length, group * width + offset, groups * width))
            first += groups * length
    return result


def _gated(name: str, leaf: str, shape: tuple[int, ...], how: Dialect) -> Iterator[Piece]:
    """Gate and up: two halves of a tensor, or two tensors."""
    size = shape[-2] // 2 if leaf == "gate_up" else shape[-2]
    halves = [half for half, part in enumerate(("gate", "up")) if part in leaf]
    for place, half in enumerate(halves):
        start = place * size
        if how.format == "torch_dist":
            run = _Run(start, start + size, half * size, 2 * size)
            there = name
        else:
            run = _Run(start, start + size, 0, size)
            there = f"{name}{('_w', '_v')[half]}"
        yield from _runs(there, shape, -2, [run])


def _experts(layer: str, leaf: str, shape: tuple[int, ...], how: Dialect, weight: str) -> Iterator[Piece]:
    if leaf == "down":
        yield from pieces_of(Transposed(f"{layer}linear_fc2.{weight}"), shape)
    else:
        yield from _gated(f"{layer}linear_fc1.{weight}", leaf, shape, how)


def _runs(name: str, shape: tuple[int, ...], dim: int, runs: list[_Run]) -> Iterator[Piece]:
    """Yield the pieces of a leaf with a different order along a dim."""
    at = len(shape) + dim
    for run in runs:
        whole = (*shape[:at], run.total, *shape[at + 1 :])
        for piece in pieces_of(name, whole):
            box = (*piece.box[:at], (run.start, run.stop), *piece.box[at + 1 :])
            yield piece._replace(box=box, dim=at, shift=run.there - run.start)
