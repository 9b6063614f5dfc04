"""The leaves of a state in a checkpoint: paths, boxes, and the ranks that hold and write each box."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base._compat import cache_on_its_mesh
from fsharding.base.errors import CheckpointError, LayoutError, message
from fsharding.base.public import refuse
from fsharding.base.tree import Tree
from fsharding.checkpoint.manifest import Manifest, SavedLeaf, dtype_name
from fsharding.checkpoint.serialized_layout import outline_of
from fsharding.comm.leaf_memory import fill, placed
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import abstract, own_rank
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box
from fsharding.sharding.entries import Moment, entry_at, outline, places_in
from fsharding.sharding.layout import Layout, LeafLayout
from fsharding.sharding.named_sharding import LeafType, NamedSharding, local_of, sharding_of
from fsharding.train.state import TrainState, main_of

__all__ = [
    "BUFFERS", "StateLeaf", "Want", "content", "device_of", "holders_of", "leaves_beside", "leaves_in", "main_wants",
    "objections", "own_boxes", "saved_shardings", "shares", "stored_params",
]  # fmt: skip

BUFFERS = "buffers."  # prefix of the paths of buffers; the rest, dots included, is the name


@dataclass(frozen=True)
class StateLeaf:
    """A leaf of a state, and this rank's part of it."""

    shape: tuple[int, ...]
    sharding: NamedSharding | None  # from the layout, since DTensors can't express explicit owners
    local: Any  # the local tensor; anything else can't be saved

    @property
    def saved(self) -> SavedLeaf:
        """Describe the leaf for the manifest."""
        spec = None if self.sharding is None else str(self.sharding)
        return SavedLeaf(self.shape, dtype_name(self.local.dtype), spec)

    def at_rest(self) -> Tensor:
        """Return the leaf for a state: a DTensor, or a plain tensor."""
        if self.sharding is None:
            return self.local
        return placed(self.local, self.sharding, self.sharding.shape_at_rest(self.shape))

    def kept(self) -> dict[Box, Tensor]:
        """Return this rank's boxes; empty boxes only if the full leaf is empty."""
        empty = not math.prod(self.shape)
        grid = boxes.grid_of(self.shape) if self.sharding is None else self.sharding.grid(self.shape)
        parts = () if grid is None else boxes.grid_boxes(grid)
        return {box: self.local[place] for box, place in parts if boxes.volume(box) or empty}


class Want(NamedTuple):
    """A leaf that is to be loaded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: NamedSharding | None  # where it goes; None for a plain tensor
    device: torch.device  # where its memory is

    def __str__(self) -> str:
        return str(LeafType(self.shape, self.dtype))

    def without_memory(self) -> StateLeaf:
        """Make the leaf on the meta device."""
        shape = self.shape if self.sharding is None else self.sharding.local_shape(self.shape)
        return StateLeaf(self.shape, self.sharding, torch.empty(shape, dtype=self.dtype, device="meta"))

    def empty(self) -> StateLeaf:
        """Make the leaf with uninitialized memory."""
        if self.sharding is None:
            return StateLeaf(self.shape, None, _compat.fresh(self.shape, self.dtype, self.device))
        size = self.sharding.local_shape(self.shape)
        return StateLeaf(self.shape, self.sharding, fill(self.sharding, size, self.dtype))


def content(state: TrainState) -> dict[str, StateLeaf]:
    """Return every leaf of a state by path."""
    leaves = state.layout.leaves
    stored = tree.leaves(stored_params(state))
    paths = [*tree.paths(_beside(state)), *(leaf.path_in("params") for leaf in leaves)]
    if twice := sorted(path for path, count in Counter(paths).items() if count > 1):
        mend = "Rename a key: keys with dots can make two paths equal."
        raise CheckpointError(message("found paths that name two leaves.", twice, mend))
    named = {leaf.path_in("params"): _leaf(x, leaf) for leaf, x in zip(leaves, stored, strict=True)}
    return leaves_beside(state) | named


def stored_params(state: TrainState) -> Tree:
    """Return the parameters that are written to files: main parameters, and frozen ones."""
    structure = state.layout.structure
    main = tree.flatten_up_to(structure, main_of(state))
    params = tree.flatten_up_to(structure, state.params, ("the layout", "state.params"))
    return tree.unflatten(structure, [p if m is None else m for p, m in zip(params, main, strict=True)])


def leaves_beside(state: TrainState) -> dict[str, StateLeaf]:
    """Collect the leaves of a state other than parameters, by path."""
    return leaves_in(_beside(state), state.layout.moments(state.opt_state))


def _beside(state: TrainState) -> Tree:
    names = ("step", "key", "opt_state", "loss_scale", "buffers")
    return {name: getattr(state, name) for name in names}


def leaves_in(values: Tree, moments: Mapping[str, Moment]) -> dict[str, StateLeaf]:
    """Collect the leaves of a tree by path; `moments` has the layouts of moments in its `opt_state`."""
    known = {entry.path: entry for entry in moments.values()}
    return {path: _leaf(x, known.get(path)) for path, x in tree.named_leaves(values).items()}


def _leaf(x: Any, of: Moment | LeafLayout | None) -> StateLeaf:
    if not isinstance(x, DTensor):
        return StateLeaf(tuple(getattr(x, "shape", ())), None, x.detach() if isinstance(x, Tensor) else x)
    home = None if of is None else of.home if isinstance(of, LeafLayout) else of.sharding
    if of is not None and home is not None and home.assigned and home.shape_at_rest(of.shape) == tuple(x.shape):
        return StateLeaf(of.shape, home, local_of(x))
    return StateLeaf(tuple(x.shape), sharding_of(x), local_of(x))


def saved_shardings(manifest: Manifest, layout: Layout) -> dict[str, NamedSharding | None]:
    """Find the sharding of each leaf of a checkpoint in a layout; None for plain tensors."""
    homes = {leaf.path_in("params"): leaf.home for leaf in layout.leaves}
    leaves = {leaf.path: leaf for leaf in layout.leaves}
    described = outline_of(manifest.structure, "opt_state", manifest.tree)
    found = dict(places_in(described, outline(tree.unflatten(layout.structure, [*leaves]))))
    result: dict[str, NamedSharding | None] = {}
    for path, saved in manifest.tree.items():
        entry = None
        if (place := found.get(path)) is not None:
            entry = entry_at(path, place, leaves[place.param], saved.shape, getattr(torch, saved.dtype))
        home = homes.get(path) if entry is None else entry.sharding
        result[path] = None if saved.spec is None else home or NamedSharding(layout.mesh)
    return result


def device_of(layout: Layout) -> torch.device:
    """Return the device of a layout's leaves; refuse an abstract mesh, and arguments that aren't layouts."""
    if not isinstance(layout, Layout):
        raise refuse("a path, then a Layout", layout, "Plan one: layout = fs.plan_layout(model, mesh).")
    if isinstance(layout.mesh, AbstractMesh):
        mend = "Plan the layout on a mesh of fs.make_mesh."
        raise LayoutError(message(f"cannot load onto the abstract mesh {layout.mesh}.", mend=mend))
    return torch.device(layout.mesh.device_type)


def main_wants(layout: Layout) -> dict[str, Want]:
    """Return the main parameters of a layout, and frozen ones, by their path in the layout."""
    device = device_of(layout)
    dtype = layout.precision.main_dtype
    return {leaf.path: Want(leaf.shape, dtype(leaf.init), leaf.home, device) for leaf in layout.leaves}


def objections(leaves: Mapping[str, StateLeaf]) -> Iterator[str]:
    """Yield why leaves can't be saved, one row each."""
    for path, leaf in leaves.items():
        if not isinstance(leaf.local, Tensor):
            yield f"{path} is a {type(leaf.local).__name__}: make it a 0-d tensor"
            continue
        sharding = leaf.sharding
        if sharding is None:
            continue
        want = list(sharding.local_shape(leaf.shape))
        held = list(leaf.local.shape)
        if sharding.partial:
            yield f"{path} is {sharding}: reduce it"
        elif want != held:
            yield f"{path} claims {sharding} of {list(leaf.shape)}, that is {want} here, but holds {held}"


# ------------------------------------------------------------------------------------------------------ who writes what
# Every element is written once, and all ranks write about the same number of bytes. Each rank computes the same result
# from the shardings, without a collective.
def own_boxes(leaves: Mapping[str, StateLeaf], ranks: Sequence[int]) -> dict[str, dict[Box, Tensor]]:
    """Return the boxes that this rank writes, with their values, by path."""
    writers = shares(leaves, ranks)
    kept = ((path, leaf.kept().items()) for path, leaf in leaves.items())
    return {path: {box: x for box, x in own if writers[path][box] == own_rank()} for path, own in kept}


def shares(leaves: Mapping[str, StateLeaf], ranks: Sequence[int]) -> dict[str, dict[Box, int]]:
    """Choose the rank that writes each box, by path: assign boxes with few holders first, then large ones."""
    every = tuple(ranks)
    open_boxes = [
        (boxes.volume(box) * x.local.dtype.itemsize, path, box, holders)
        for path, x in leaves.items()
        for box, holders in holders_of(x, every).items()
    ]
    load: dict[int, int] = {}
    result: dict[str, dict[Box, int]] = {path: {} for path in leaves}
    for size, path, box, holders in sorted(open_boxes, key=lambda b: (len(b[3]), -b[0], b[1], b[2])):
        writer = min(holders, key=lambda rank: (load.get(rank, 0), rank))
        load[writer] = load.get(writer, 0) + size
        result[path][box] = writer
    return result


def holders_of(x: StateLeaf, ranks: tuple[int, ...]) -> dict[Box, tuple[int, ...]]:
    """Return the ranks that hold each box of a leaf."""
    return _holders(x.sharding, x.shape) if x.sharding is not None else {boxes.full(x.shape): ranks}


@cache_on_its_mesh
def _holders(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Box, tuple[int, ...]]:
    mesh = abstract(sharding.mesh)
    empty = not math.prod(shape)
    held: dict[Box, tuple[int, ...]] = {}
    for coord in mesh.coordinates():
        for box in sharding.boxes(shape, coord):
            # Empty boxes have no bytes; write one only for an empty leaf, so that the files have its path.
            if boxes.volume(box) or empty:
                held[box] = (*held.get(box, ()), mesh.rank_at(coord))
    return held
