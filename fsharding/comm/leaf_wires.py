"""Choose the wires of each leaf of a parameter tree, for gathers, gradients and copies, and draw their rounding noise.

Guarantee: a weight is rounded once, from its main copy, to the same bits under every strategy and on every mesh.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.errors import ConfigError, message, report
from fsharding.base.tree import Tree
from fsharding.comm.bucket_queue import BucketQueue
from fsharding.comm.codes import Quantizing
from fsharding.comm.redistribute import send
from fsharding.comm.wires import LeafWire, Plain, WholeLeaf, Wire
from fsharding.formats.blocks import Blocks
from fsharding.formats.philox import uniform_at
from fsharding.formats.precision import KEEP, PatternLeaf, Precision
from fsharding.formats.quantized import Note, Quantized, noting_numbers
from fsharding.mesh.device_mesh import Mesh, data_rank_and_size
from fsharding.sharding import random
from fsharding.sharding.boxes import Grid, Runs, cut_runs
from fsharding.sharding.layout import Layout
from fsharding.sharding.leaf_plan import LeafLayout, is_stacked
from fsharding.sharding.named_sharding import NamedSharding, to_local

__all__ = [
    "LeafIndex", "LeafWires", "TreeLeaf", "UnitWire", "check_patterns", "round_leaf", "round_params", "wires_in_flight",
    "wires_of", "wires_of_copies",
]  # fmt: skip

_GIVE_A_KEY = "Give a key, int64[2], that is another one in each step: fs.value_and_grad(..., key=fs.random.key(0))."


class LeafIndex(NamedTuple):
    """A leaf of a unit inside the parameter tree: its number, and its row if it is one layer of a stack."""

    leaf: int
    row: int | None


class TreeLeaf(NamedTuple):
    """A leaf of a parameter tree."""

    path: str  # dotted
    first: int  # which layer of the whole model its first row is, where units are rows of it
    layers: int  # how many there are in the whole model


class UnitWire(NamedTuple):
    """How a leaf of a unit is gathered; see `UnitLeaf`."""

    wire: Wire
    terms: Wire | None = None  # of the terms of its gradient; None for the wire of later sums
    again: Wire | None = None
    seen: Callable[[Tensor], WholeLeaf] | None = None


class LeafWires:
    """How the leaves of a tree are sent. Here each is cast to the dtype that the call computes in."""

    def noting(self, note: Note) -> AbstractContextManager[None]:
        """Inside, `note` is told of all that a loss function dequantizes, so that autograd may save less."""
        return nullcontext()

    def gather(self, index: LeafIndex, shape: tuple[int, ...], dtype: torch.dtype) -> UnitWire:
        """Return how a leaf of a unit, of this full shape, is gathered."""
        return UnitWire(Plain(dtype))

    def noise(
        self, index: LeafIndex, sharding: NamedSharding, shape: Sequence[int], device: torch.device, *, of_term: bool
    ) -> Tensor:
        """Draw the numbers by which a shard of a leaf, or of a term of its gradient, of a full shape is rounded."""
        raise AssertionError("nothing is rounded")


def wires_of(
    precision: Precision, leaves: Iterable[TreeLeaf], key: Tensor | None, mesh: Mesh | None, microbatch: int
) -> LeafWires:
    """Return how the leaves of a tree are sent in one call; `key`, for stochastic rounding, is new in each step."""
    if not precision.has_formats:
        return LeafWires()
    return _FormatWires(precision, [*leaves], key, _key_of_terms(key, mesh, microbatch))


class _OfNumbers(NamedTuple):
    """What a loss function sees of a leaf that was rounded at rest: its numbers, which products quantize."""

    format: Blocks
    strict: bool

    def __call__(self, node: Tensor) -> Quantized:
        return Quantized.of_numbers(node, self.format, strict=self.strict)


@dataclass(frozen=True)
class _FormatWires(LeafWires):
    """Leaves that a precision gives a format are sent in it."""

    precision: Precision  # with `gather`, or a format in `reduce`
    leaves: Sequence[TreeLeaf]  # of the tree
    key: Tensor | None  # for stochastic rounding of weights
    term_key: Tensor | None  # for terms of gradients: another one on each data rank, and for each microbatch

    def noting(self, note: Note) -> AbstractContextManager[None]:
        return noting_numbers(note) if self.precision.computes_quantized else nullcontext()

    def gather(self, index: LeafIndex, shape: tuple[int, ...], dtype: torch.dtype) -> UnitWire:
        precision, path, ndim = self.precision, self.leaves[index.leaf].path, len(shape)
        if self._keeps(index):
            return UnitWire(Plain(dtype))
        reduced, format = precision.reduce_format(path, ndim), precision.format_of(path, ndim)
        terms = None if reduced is None else Quantizing(dtype, reduced)
        if format is None:
            return UnitWire(Plain(dtype), terms)
        if precision.rounded:
            return UnitWire(Plain(dtype), terms, seen=_OfNumbers(format, precision.strict))
        wire = Quantizing(dtype, format, precision.computes_quantized, precision.strict)
        # Products in backward sum along the other dim, so backward gathers the leaf in blocks along it.
        takes_columns = wire.stays and precision.takes_columns(path, ndim)
        return UnitWire(wire, terms, replace(wire, format=format.across(shape)) if takes_columns else None)

    def _keeps(self, index: LeafIndex) -> bool:
        if index.row is None:
            return False
        leaf = self.leaves[index.leaf]
        return leaf.first + index.row in self.precision.kept_rows(leaf.path, leaf.layers)

    def noise(
        self, index: LeafIndex, sharding: NamedSharding, shape: Sequence[int], device: torch.device, *, of_term: bool
    ) -> Tensor:
        key = self.term_key if of_term else self.key
        if of_term and key is None:
            rule = f"rounds terms of the gradient of {self.leaves[index.leaf].path} by key, and has none."
            raise ConfigError(message(rule, mend=_GIVE_A_KEY))
        leaf = self.leaves[index.leaf]
        ranges = list(sharding.grid(tuple(shape)) or ())
        if index.row is None:
            return rounding_noise(key, leaf.path, shape, ranges, device)
        row = leaf.first + index.row
        return rounding_noise(key, leaf.path, (leaf.layers, *shape), [((row, row + 1),), *ranges], device)[0]


def _key_of_terms(key: Tensor | None, mesh: Mesh | None, microbatch: int) -> Tensor | None:
    """The key by which terms of gradients are rounded: the same on ranks that have the same term."""
    if key is None or mesh is None:
        return key
    for number in (data_rank_and_size(mesh, cp=True)[0], microbatch):
        key = random.fold_in_count(key, torch.full((), number, dtype=torch.int64, device=key.device))
    return key


def rounding_noise(
    key: Tensor | None, path: str, shape: Sequence[int], ranges: Sequence[Runs], device: torch.device
) -> Tensor:
    """Draw the numbers in [0, 1) by which ranges of a leaf are rounded; its shape has all layers of a stack."""
    if key is None:
        raise ConfigError(report(f"fs.gather_unit rounds {path} by key, and has none.", mend=_GIVE_A_KEY))
    return uniform_at(key, zlib.crc32(path.encode()), tuple(shape), ranges, device)


# -------------------------------------------------------------------------------------------------- parameters at rest
def wires_of_copies(
    leaves: Sequence[DTensor | None], layout: Layout, key: Tensor | None
) -> list[LeafWire | None] | None:
    """Return how stored low-precision copies are rounded from main parameters; None for leaves without a format."""
    if layout.precision.gather is None:
        return None
    pairs = zip(leaves, layout.leaves, strict=True)
    return [_at_rest(x, leaf, leaf.main, layout.rounds(leaf), layout.precision, key) for x, leaf in pairs]


def wires_in_flight(params: Tree, layout: Layout, precision: Precision, key: Tensor | None) -> list[LeafWire | None]:
    """Return how main parameters without a stored copy are rounded when they are gathered; None for other leaves."""
    rows = zip(tree.leaves(params), layout.leaves, _formats_in_flight(layout, precision), strict=True)
    return [_at_rest(x, leaf, leaf.params, format, precision, key) for x, leaf, format in rows]


def round_params(params: Tree, layout: Layout, precision: Precision, key: Tensor | None) -> Tree:
    """Round main parameters without a stored copy to the values that a loss function sees; sharded as they were."""
    formats = _formats_in_flight(layout, precision)
    if not any(formats):
        return params
    # A rank that has nothing of a leaf has no wire for it, and yet the dtype of the others.
    pairs = [*zip(layout.leaves, formats, strict=True)]
    homes = [None if format is None else leaf.params for leaf, format in pairs]
    dtypes = [None if format is None else precision.compute_dtype(leaf.init) for leaf, format in pairs]
    wires = wires_in_flight(params, layout, precision, key)
    rounded = send(tree.leaves(params), homes, BucketQueue(0), dtypes=dtypes, wires=wires).wait()
    return tree.unflatten(layout.structure, rounded)


def round_leaf(
    x: DTensor, leaf: LeafLayout, home: NamedSharding, format: Blocks, precision: Precision, key: Tensor | None
) -> DTensor:
    """Round a main parameter at rest, which `home` says where it is, as `round_params` does."""
    wires = [_at_rest(x, leaf, home, format, precision, key)]
    return send([x], [home], BucketQueue(0), dtypes=[precision.compute_dtype(leaf.init)], wires=wires).wait()[0]


def _formats_in_flight(layout: Layout, precision: Precision) -> list[Blocks | None]:
    """Return the formats of main parameters that have not been rounded; None for other leaves."""
    rounds = precision.gather is not None and not precision.rounded
    return [layout.format_of(leaf) if rounds else None for leaf in layout.leaves]


def _at_rest(
    x: DTensor | None,
    leaf: LeafLayout,
    home: NamedSharding,  # where it is, which says what layers of a stack the rank has
    format: Blocks | None,
    precision: Precision,
    key: Tensor | None,
) -> LeafWire | None:
    """How a main parameter at rest is rounded; None without a format, and on a rank that has nothing of it."""
    grid = home.grid(leaf.shape)
    if x is None or format is None or grid is None:
        return None
    kept = precision.kept_rows(leaf.path, leaf.shape[0]) if is_stacked(leaf.names) else ()
    rows = (row for start, stop in (grid[0] if kept else ()) for row in range(start, stop))
    places = tuple(place for place, row in enumerate(rows) if row in kept) if kept else None
    noise = _noise_at_rest(x, leaf, grid, key) if format.stochastic else None
    return LeafWire(Quantizing(precision.compute_dtype(leaf.init), format), places, noise)


def _noise_at_rest(x: DTensor, leaf: LeafLayout, grid: Grid, key: Tensor | None) -> Callable[[int, int], Tensor]:
    """The numbers by which rows of a main parameter at rest are rounded: by their place in the whole leaf."""
    node = to_local(x)
    ranges = list(node.sharding.grid(node.shape) or ())
    shape = tuple(node.shape)
    if is_stacked(leaf.names):
        ranges[0] = grid[0]
        shape = (leaf.shape[0], *shape[1:])
    device = node.value.device
    return lambda start, stop: rounding_noise(
        key, leaf.path, shape, [cut_runs(ranges[0], start, stop), *ranges[1:]], device
    )


def check_patterns(precision: Precision, params: Tree) -> None:
    """Refuse patterns of a precision with formats that match none of the parameters."""
    if not precision.has_formats or (precision.keep is KEEP and not precision.columnwise):
        return
    shapes = zip(tree.paths(params), (tuple(x.shape) for x in tree.leaves(params)), strict=True)
    precision.check_leaves(tuple(PatternLeaf(p, shape, len(shape) > 2) for p, shape in shapes))
