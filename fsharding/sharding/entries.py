"""Entries of a state, and which optimizer leaves are moments of which parameter.

State tree -> `Outline` -> `places`: subtrees with the structure of the parameters, whose leaves are moments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.tree import Tree
from fsharding.formats import Blocks
from fsharding.sharding.block_scales import CODES, is_coded, plan_scales, scales_name
from fsharding.sharding.leaf_names import joined
from fsharding.sharding.leaf_plan import LeafLayout, mean_over
from fsharding.sharding.named_sharding import NamedSharding

__all__ = [
    "CODED", "LEAF", "NONE", "UNKNOWN", "Entry", "Moment", "Outline", "Place", "entry_at", "moments", "outline",
    "places", "places_in", "state_leaves", "state_structure", "with_leaves",
]  # fmt: skip


def state_leaves(state: Tree) -> dict[str, Any]:
    """Return the leaves of an optimizer state by path; a low-precision moment is one leaf."""
    return tree.named_leaves(state, is_leaf=is_coded)


def with_leaves(state: Tree, leaves: Mapping[str, Any]) -> Tree:
    """Replace leaves of an optimizer state by path."""
    return tree.map_with_path(lambda path, x: leaves.get(path, x), state, is_leaf=is_coded)


def state_structure(state: Tree) -> optree.PyTreeSpec:
    """Return the structure of an optimizer state, which doesn't depend on the format of its moments."""
    return tree.flatten(state, is_leaf=is_coded)[1]


@dataclass(frozen=True)
class Entry:
    """One leaf of a state."""

    path: str  # in the state, such as `opt_state.mu.blocks.wq`
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: NamedSharding | None  # with its memory kind; None for a replicated tensor, such as a count
    of: LeafLayout | None  # the parameter it belongs to, if any

    @property
    def planned(self) -> tuple[NamedSharding, tuple[int, ...], torch.dtype] | None:
        """Sharding, global shape and dtype; None without a sharding."""
        return None if self.sharding is None else (self.sharding, self.shape, self.dtype)

    @property
    def field(self) -> str:
        """The field of the state."""
        return self.path.partition(".")[0]

    def local_bytes(self, coord: dict[str, int] | None = None) -> int:
        """Count the bytes of one rank; default: this process."""
        shape = self.shape if self.sharding is None else self.sharding.local_shape(self.shape, coord)
        return math.prod(shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Moment(Entry):
    """A leaf of a state that belongs to a parameter, on its mesh."""

    sharding: NamedSharding
    of: LeafLayout


class Place(NamedTuple):
    """The parameter that a leaf of an optimizer state corresponds to, and which part of its moment the leaf is."""

    param: str  # path of the parameter
    blocks: Blocks | None = None  # the moment's format, if the leaf has its scales
    mean_over: int | None = None  # the dim, from the end, over which the leaf is a mean; kept with size 1


def moments(leaves: Sequence[LeafLayout], structure: optree.PyTreeSpec, opt_state: Tree) -> dict[str, Moment]:
    """Describe the moments of an optimizer state by path, as `Layout.moments` does."""
    found = places(opt_state, tree.unflatten(structure, [leaf.path for leaf in leaves]))
    by_path = {leaf.path: leaf for leaf in leaves}
    result: dict[str, Moment] = {}
    for path, x in tree.named_leaves(opt_state).items():
        place = found.get(path)
        if place is None or not isinstance(x, Tensor):
            continue
        at_rest = isinstance(x, DTensor) or x.is_meta
        # A plain 0-d tensor, such as a count of updates, isn't a moment, even of a 0-d parameter.
        if not at_rest and not x.ndim:
            continue
        named = joined("opt_state", path)
        entry = entry_at(named, place, by_path[place.param], tuple(x.shape), x.dtype, local=not at_rest)
        if entry is not None:
            result[path] = entry
    return result


def entry_at(
    path: str, place: Place, leaf: LeafLayout, shape: Sequence[int], dtype: torch.dtype, *, local: bool = False
) -> Moment | None:
    """Describe a tensor at a parameter's place; None if its shape isn't a moment's."""
    for full, sharding in _forms(place, leaf):
        others = [sharding.local_shape(full)] if local else [sharding.shape_at_rest(full)]
        if tuple(shape) in (full, *others):
            return Moment(path, full, dtype, replace(sharding, memory=leaf.moments.memory), leaf)
    return None


def _forms(place: Place, leaf: LeafLayout) -> Iterator[tuple[tuple[int, ...], NamedSharding]]:
    """Yield the shapes and shardings that a moment may have at a place."""
    shape = leaf.shape
    if place.blocks is not None:
        if len(shape) > 1:
            scales = plan_scales(leaf.main, shape, place.blocks)
            yield scales.shape, scales.sharding
        return
    if place.mean_over is not None and len(shape) >= -place.mean_over:
        dim = len(shape) + place.mean_over
        yield (*shape[:dim], min(shape[dim], 1), *shape[dim + 1 :]), mean_over(leaf.main, len(shape), place.mean_over)
    yield shape, leaf.main


# ------------------------------------------------------------------------------------------------------------- places
LEAF, NONE, CODED = "<leaf>", "<none>", "<coded>"
UNKNOWN = "<unknown>"  # the kind of a node known only by the paths of its leaves, as in a manifest


@dataclass(frozen=True)
class Outline:
    """The structure of a tree, or of a description of one, such as a manifest."""

    kind: str  # `LEAF`, `NONE`, `CODED`, the name of the node's class, or `UNKNOWN`
    path: str
    children: Mapping[str, Outline]  # by key
    blocks: Blocks | None = None  # the format of a low-precision moment
    # Fields whose leaves are means over a dim of the parameters, as the class of the state declares in `MEANS_OVER`.
    means: Mapping[str, int] = field(default_factory=dict)


def places(opt_state: Tree, params: Tree) -> dict[str, Place]:
    """Map paths of leaves of an optimizer state to the parameters they correspond to."""
    return _places(*(tree.flatten(x)[1] for x in (opt_state, params)))


@functools.lru_cache(maxsize=1 << 10)
def _places(opt_state: optree.PyTreeSpec, params: optree.PyTreeSpec) -> dict[str, Place]:
    state, model = (outline(tree.unflatten(spec, [0] * spec.num_leaves)) for spec in (opt_state, params))
    return dict(places_in(state, model))


def places_in(node: Outline, params: Outline, mean_over: int | None = None) -> Iterator[tuple[str, Place]]:
    """Find the subtrees with the structure of the parameters, outermost first, and pair their leaves."""
    # Don't descend into a match: a parameter may have the name of a field, such as `mu`.
    if _alike(node, params):
        yield from _paired(node, params, mean_over)
        return
    for key, child in node.children.items():
        yield from places_in(child, params, node.means.get(key, mean_over))


def _alike(node: Outline, params: Outline) -> bool:
    """Return whether a node has the structure of the parameters, or of a part of them."""
    if node.kind == NONE:
        return True
    if params.kind == LEAF:
        return node.kind in (LEAF, CODED)
    if node.kind not in (params.kind, UNKNOWN) or not node.children.keys() <= params.children.keys():
        return False
    return all(_alike(child, params.children[key]) for key, child in node.children.items())


def _paired(node: Outline, params: Outline, mean_over: int | None) -> Iterator[tuple[str, Place]]:
    if node.kind == CODED:
        assert node.blocks is not None
        yield node.path, Place(params.path)
        yield joined(node.path, CODES), Place(params.path)
        yield joined(node.path, scales_name(node.blocks)), Place(params.path, node.blocks)
    elif node.kind == LEAF:
        yield node.path, Place(params.path, None, mean_over)
    for key, child in node.children.items():
        yield from _paired(child, params.children[key], mean_over)


def outline(node: Tree, path: str = "") -> Outline:
    """Outline a tree."""
    if node is None:
        return Outline(NONE, path, {})
    if is_coded(node):
        return Outline(CODED, path, {}, node.format)
    children = tree.children(node)
    if children is None:
        return Outline(LEAF, path, {})
    parts = {key: outline(child, joined(path, key)) for key, child in children.items()}
    return Outline(type(node).__name__, path, parts, means=dict(getattr(type(node), "MEANS_OVER", ())))
