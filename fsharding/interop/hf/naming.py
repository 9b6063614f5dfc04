"""Map leaves to boxes of the tensors of a Hugging Face directory, which may be transposed, split or fused.

Guarantee: the pieces of a leaf tile it; all pieces together tile every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, cast

from fsharding.base.public import public
from fsharding.foreign.name_map import Name as SimpleName
from fsharding.foreign.name_map import Piece, Rows, Transposed, parts
from fsharding.interop.hf.config_tables import decoder_config
from fsharding.sharding import boxes
from fsharding.sharding.layout import Layout
from fsharding.sharding.leaf_plan import LeafLayout
from fsharding.sharding.partition_spec import Fused

__all__ = [
    "EXPERTS", "Joined", "Name", "Names", "Rows", "Section", "Transposed", "names_of", "pieces_by_leaf", "pieces_of",
    "renumbered", "untiled",
]  # fmt: skip


class Joined(NamedTuple):
    """Names of several tensors that are fused into one leaf, such as q, k and v.

    Attributes:
        names: Names of the parts, in the order of the leaf's `Fused` dim, which sets their sizes.
        dim: Negative index of the dim along which the parts have equal sizes, if the leaf has no `Fused` dim.

    Example:
        >>> layout = fs.plan_layout({"qk": torch.zeros(4, 2)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.shard({"qk": torch.ones(4, 2)}, layout)
        >>> names = {"qk": fs.hf.Joined(("q.weight", "k.weight"), dim=-2)}
        >>> saved = fs.hf.save("out", params, {"model_type": "mine"}, layout, names=names)
        >>> sorted(fs.foreign.open_weights(saved.path).leaves)
        ['k.weight', 'q.weight']
    """

    names: tuple[SimpleName, ...]
    dim: int | None = None


class Section(NamedTuple):
    """Name of a fused tensor of which the leaf is one part, such as the gate of a fused gate and up.

    Attributes:
        name: Name of the fused tensor.
        index: Index of the part.
        sizes: Sizes of all parts along `dim`.
        dim: Negative index of the leaf's dim.

    Example:
        >>> experts = fs.models.Experts(count=4, active=2, intermediate_size=16)
        >>> config = fs.models.DecoderConfig(dim=8, heads=2, experts=experts)
        >>> fs.hf.names_of(config, stacked_experts=True)["blocks.experts.up"]
        Section(name='model.layers.{i}.mlp.experts.gate_up_proj', index=1, sizes=(16, 16), dim=-2)
    """

    name: SimpleName
    index: int
    sizes: tuple[int, ...]
    dim: int = -2


Name: TypeAlias = SimpleName | Joined | Section
"""The tensors of a leaf: one, or one per `{i}` and `{j}`; several fused tensors; or a part of one."""

Names: TypeAlias = Mapping[str, Name]
"""The tensors of each leaf, by the leaf's dotted path."""


def renumbered(name: Name, keys: tuple[int | str, ...]) -> Name:
    """Convert the name of a stack with rows 0, 1, 2 to one with the given row keys."""
    if isinstance(name, Joined):
        return name._replace(names=tuple(_rows(part, keys) for part in name.names))
    return name._replace(name=_rows(name.name, keys)) if isinstance(name, Section) else _rows(name, keys)


def _rows(name: SimpleName, keys: tuple[int | str, ...]) -> Rows:
    return Rows(name.name if isinstance(name, Rows) else name, keys)


Declared: TypeAlias = tuple[int, tuple[int, ...]] | None
"""The fused dim of a leaf, and the sizes of its parts."""


def pieces_by_leaf(
    names: Names, shapes: Mapping[str, Sequence[int]], layout: Layout | None, most: int | None = None
) -> tuple[dict[str, list[Piece]], list[str]]:
    """Find the pieces of each leaf; add a row for each name without leaf, leaf without name, and name that misfits."""
    fused = {} if layout is None else {leaf.path: _declared(leaf) for leaf in layout.leaves}
    rows = [f"{path} matches no leaf; its name is {name!r}" for path, name in names.items() if path not in shapes]
    result: dict[str, list[Piece]] = {}
    for path, shape in shapes.items():
        if path not in names:
            rows.append(f"{path} has no name")
            continue
        pieces = pieces_of(names[path], shape, fused.get(path))
        try:
            # Lazily, and one more than the files have tensors: a config may claim a million layers.
            result[path] = list(islice(pieces, None if most is None else most + 1))
            if next(pieces, None) is not None:
                rows.append(f"{path} has more tensors than the {most:,} of the files")
        except ValueError as error:
            rows.append(f"{path}: {error}")
    return result, rows


def _declared(leaf: LeafLayout) -> Declared:
    """Find the `Fused` dim of a leaf and the sizes of its parts; None if it has none or several."""
    result = [(dim, name.sizes) for dim, name in enumerate(leaf.names or ()) if isinstance(name, Fused)]
    return result[0] if len(result) == 1 else None


def pieces_of(name: Name, shape: Sequence[int], fused: Declared = None) -> Iterator[Piece]:
    """Yield the pieces of a leaf."""
    if isinstance(name, Joined):
        yield from _joined(name, tuple(shape), fused)
    elif isinstance(name, Section):
        yield from _section(name, tuple(shape))
    else:
        yield from parts(name, shape)


def _joined(name: Joined, shape: tuple[int, ...], fused: Declared) -> Iterator[Piece]:
    if fused is None and name.dim is not None and -len(shape) <= name.dim < 0:
        size, rest = divmod(shape[name.dim], len(name.names))
        fused = (len(shape) + name.dim, (size,) * len(name.names)) if not rest else None
    if fused is None or len(fused[1]) != len(name.names):
        declared = "none" if fused is None else f"{len(fused[1])} parts"
        raise ValueError(f"Joined has {len(name.names)} names, and the layout {declared}: name a dim fs.Fused(...)")
    # Each name is a tensor with the size of one part along the dim; index `start` of the leaf is index 0 there.
    dim, sizes = fused
    for number, (part, size) in enumerate(zip(name.names, sizes, strict=True)):
        start = sum(sizes[:number])
        yield from _shifted(part, shape, dim, size, (start, start + size), -start)


def _section(name: Section, shape: tuple[int, ...]) -> Iterator[Piece]:
    dim = len(shape) + name.dim
    has = shape[dim] if -len(shape) <= name.dim < 0 else "no such dim"
    wants = name.sizes[name.index]
    if has != wants:
        raise ValueError(f"{name.name!r}: part {name.index} has {wants} along dim {name.dim}, ours {has}")
    yield from _shifted(name.name, shape, dim, sum(name.sizes), (0, wants), sum(name.sizes[: name.index]))


def _shifted(
    name: SimpleName, shape: tuple[int, ...], dim: int, size: int, ours: tuple[int, int], shift: int
) -> Iterator[Piece]:
    """Yield the pieces in tensors that differ from the leaf in the size and the offset along a dim."""
    for piece in parts(name, (*shape[:dim], size, *shape[dim + 1 :])):
        if piece.lead > dim:
            raise ValueError(f"{name!r}: an index replaces the dim that has several parts")
        yield piece._replace(box=(*piece.box[:dim], ours, *piece.box[dim + 1 :]), dim=dim, shift=shift)


def untiled(pieces: Mapping[str, Sequence[Piece]]) -> list[str]:
    """List the tensors that their pieces don't tile, one row each."""
    rows: list[str] = []
    for name, result in pieces.items():
        shape = result[0].shape
        held = [piece.there(piece.box) for piece in result]
        if any(piece.shape != shape for piece in result):
            rows.append(f"{name} has several shapes: {', '.join(sorted({str([*p.shape]) for p in result}))}")
        elif not boxes.is_tiling(held, shape):
            count = sum(map(boxes.volume, held))
            rows.append(f"{name} has {math.prod(shape)} elements; its leaves have {count}, or overlap")
    return rows


# ------------------------------------------------------------------------------------------------ tables of the decoder
_LAYER = "model.layers.{i}."
_ATTENTION: dict[str, Name] = {
    "norm1": f"{_LAYER}input_layernorm.weight",
    "norm2": f"{_LAYER}post_attention_layernorm.weight",
    "wq": f"{_LAYER}self_attn.q_proj.weight",
    "wk": f"{_LAYER}self_attn.k_proj.weight",
    "wv": f"{_LAYER}self_attn.v_proj.weight",
    "wo": Transposed(f"{_LAYER}self_attn.o_proj.weight"),
}
_BIASES: dict[str, Name] = {f"{x}_bias": f"{_LAYER}self_attn.{x}_proj.bias" for x in "qkv"}
_HEAD_NORMS: dict[str, Name] = {f"{x}_norm": f"{_LAYER}self_attn.{x}_norm.weight" for x in "qk"}
_DENSE: dict[str, Name] = {
    "gate": f"{_LAYER}mlp.gate_proj.weight",
    "up": f"{_LAYER}mlp.up_proj.weight",
    "down": Transposed(f"{_LAYER}mlp.down_proj.weight"),
}
_SPARSE = f"{_LAYER}block_sparse_moe."
_ROUTED = f"{_LAYER}mlp.experts.{{j}}."
EXPERTS: dict[str, tuple[str, str, str, str]] = {
    "mixtral": (
        f"{_SPARSE}gate.weight", f"{_SPARSE}experts.{{j}}.w1.weight", f"{_SPARSE}experts.{{j}}.w3.weight",
        f"{_SPARSE}experts.{{j}}.w2.weight",
    ),
    "qwen3_moe": (
        f"{_LAYER}mlp.gate.weight", f"{_ROUTED}gate_proj.weight", f"{_ROUTED}up_proj.weight",
        f"{_ROUTED}down_proj.weight",
    ),
}  # fmt: skip
"""Names of router, gate, up and down in files of families with experts."""


def _fused(names: dict[str, Name]) -> dict[str, Name]:
    """Join the names of queries, keys and values, of their biases, and of gate and up."""
    joined = {"wqkv": ("wq", "wk", "wv"), "qkv_bias": ("q_bias", "k_bias", "v_bias"), "gate_up": ("gate", "up")}
    result = dict[str, Name]()
    left = dict(names)
    for leaf, apart in joined.items():
        if apart[0] in left:
            result[leaf] = Joined(tuple(cast("SimpleName", left.pop(name)) for name in apart))
    return {**left, **result}


@public
def names_of(config: Any, *, stacked_experts: bool = False) -> dict[str, Name]:
    """Map each leaf of `models.decoder(config)` to its tensors in a Hugging Face directory.

    Args:
        config: `DecoderConfig` of a supported family, or a recipe.
        stacked_experts: Whether all experts of a layer are in one tensor, with gate and up fused, as in transformers'
            modules. By default each expert has separate tensors, as in published files.

    Returns:
        Names by dotted path, for `hf.load` and `hf.save`.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)
        >>> names = fs.hf.names_of(config)
        >>> names["blocks.wq"]
        'model.layers.{i}.self_attn.q_proj.weight'
        >>> names["blocks.wo"]
        Transposed(name='model.layers.{i}.self_attn.o_proj.weight')
    """
    config = decoder_config(config)
    blocks = _ATTENTION | (_BIASES if config.bias else {}) | (_HEAD_NORMS if config.qk_norm else {})
    if config.experts is None:
        blocks |= _DENSE
    elif stacked_experts:
        sizes = (config.experts.intermediate_size,) * 2
        fused = f"{_LAYER}mlp.experts.gate_up_proj"
        blocks |= {"experts.router": f"{_LAYER}mlp.gate.weight"}
        blocks |= {f"experts.{name}": Section(fused, index, sizes) for index, name in enumerate(("gate", "up"))}
        blocks |= {"experts.down": Transposed(f"{_LAYER}mlp.experts.down_proj")}
    else:
        router, gate, up, down = EXPERTS["qwen3_moe" if config.qk_norm else "mixtral"]
        blocks |= {"experts.router": router, "experts.gate": gate, "experts.up": up, "experts.down": Transposed(down)}
    blocks = _fused(blocks) if config.fused else blocks
    ends: dict[str, Name] = {"embed.table": "model.embed_tokens.weight", "head.norm": "model.norm.weight"}
    # The files of a tied model have one table, under the name of the embedding.
    if not config.tied:
        ends["head.unembed"] = "lm_head.weight"
    return {**ends, **{f"blocks.{leaf}": name for leaf, name in blocks.items()}}
