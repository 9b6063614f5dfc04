"""Choose the wires of each leaf of a parameter tree, for gathers, gradients and copies, and draw their rounding noise.

Guarantee: a weight is quantized once, from its main parameter, to the same bits under every strategy and on any mesh.
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
from fsharding.sharding.leaf_plan import LeafLayout
from fsharding.sharding.named_sharding import NamedSharding, to_local

__all__ = [
    "LeafIndex", "LeafWires", "TreeLeaf", "UnitWire", "check_patterns", "round_leaf", "round_params", "wires_in_flight",
    "wires_of", "wires_of_copies",
]  # fmt: skip

_PASS_A_KEY = "Pass a key, int64[2], a different one in each step: fs.value_and_grad(..., key=fs.random.key(0))."


class LeafIndex(NamedTuple):
    """A leaf of a unit in the parameter tree: its index, and its row if it is one layer of a stack."""

    leaf: int
    row: int | None


class TreeLeaf(NamedTuple):
    """A leaf of a parameter tree."""

    path: str  # dotted
    first: int  # layer index, in the full model, of its first row, if units are rows of it
    layers: int  # number of layers in the full model


class UnitWire(NamedTuple):
    """The wires of a leaf of a unit."""

    wire: Wire  # of its gather
    terms: Wire | None = None  # of the terms of the first sum, which isn't native then; None: as for later sums
    again: Wire | None = None  # of a second gather, for backward, besides or instead of the first
    seen: Callable[[Tensor], WholeLeaf] | None = None  # from its node to what the loss function sees; None: the node


class _OfNumbers(NamedTuple):
    """The view of a leaf that was quantized at rest: its values, which products quantize again."""

    format: Blocks
    strict: bool

    def __call__(self, node: Tensor) -> Quantized:
        return Quantized.of_numbers(node, self.format, strict=self.strict)


@dataclass(frozen=True)
class LeafWires:
    """The wires of the leaves of a tree for one call."""

    precision: Precision
    leaves: Sequence[TreeLeaf]  # empty, like both keys, for a precision without formats
    key: Tensor | None  # for stochastic rounding of weights: equal on all ranks, which round the same values
    term_key: Tensor | None  # for partial gradients: different for each data rank and microbatch

    def noting(self, note: Note) -> AbstractContextManager[None]:
        """Call `note` for everything that is dequantized inside the `with` block, so that autograd may save less."""
        return noting_numbers(note) if self.precision.computes_quantized else nullcontext()

    def is_kept(self, index: LeafIndex) -> bool:
        """Return whether a row of a stack has no format although its leaf may have one; other rows have equal wires."""
        if index.row is None or not self.leaves:
            return False
        leaf = self.leaves[index.leaf]
        return leaf.first + index.row in self.precision.kept_rows(leaf.path, leaf.layers)

    def gather(self, index: LeafIndex, shape: tuple[int, ...], dtype: torch.dtype) -> UnitWire:
        """Return the wires of a leaf of a unit, given its full shape and the dtype in which it is used."""
        precision = self.precision
        if not precision.has_formats:
            return UnitWire(Plain(dtype))
        ndim = len(shape)
        leaf = self.leaves[index.leaf]
        if self.is_kept(index):
            return UnitWire(Plain(dtype))
        reduced, format = precision.reduce_format(leaf.path, ndim), precision.format_of(leaf.path, ndim)
        terms = None if reduced is None else Quantizing(dtype, reduced)
        if format is None:
            return UnitWire(Plain(dtype), terms)
        if precision.rounded:
            return UnitWire(Plain(dtype), terms, seen=_OfNumbers(format, precision.strict))
        wire = Quantizing(dtype, format, precision.computes_quantized, precision.strict)
        # Products in backward sum along the other dim, so backward gathers the leaf in blocks along it.
        takes_columns = wire.stays and precision.takes_columns(leaf.path, ndim)
        return UnitWire(wire, terms, replace(wire, format=format.across(shape)) if takes_columns else None)

    def noise(
        self, index: LeafIndex, sharding: NamedSharding, shape: Sequence[int], device: torch.device, *, of_term: bool
    ) -> Tensor:
        """Draw the numbers for stochastic rounding of a shard of a leaf, or of a partial gradient if `of_term`."""
        key = self.term_key if of_term else self.key
        if of_term and key is None:
            rule = f"needs a key to round partial gradients of {self.leaves[index.leaf].path} stochastically."
            raise ConfigError(message(rule, mend=_PASS_A_KEY))
        leaf = self.leaves[index.leaf]
        ranges = list(sharding.grid(tuple(shape)) or ())
        if index.row is None:
            return rounding_noise(key, leaf.path, shape, ranges, device)
        row = leaf.first + index.row
        return rounding_noise(key, leaf.path, (leaf.layers, *shape), [((row, row + 1),), *ranges], device)[0]


def wires_of(
    precision: Precision, leaves: Iterable[TreeLeaf], key: Tensor | None, mesh: Mesh | None, microbatch: int
) -> LeafWires:
    """Return the wires of a tree for one call; `key`, for stochastic rounding, differs in every step."""
    if not precision.has_formats:
        return LeafWires(precision, (), None, None)
    return LeafWires(precision, [*leaves], key, _key_of_terms(key, mesh, microbatch))


def _key_of_terms(key: Tensor | None, mesh: Mesh | None, microbatch: int) -> Tensor | None:
    """Return the key for rounding partial gradients: equal on ranks that hold the same one."""
    if key is None or mesh is None:
        return key
    for number in (data_rank_and_size(mesh, cp=True)[0], microbatch):
        key = random.fold_in_count(key, torch.full((), number, dtype=torch.int64, device=key.device))
    return key


def rounding_noise(
    key: Tensor | None, path: str, shape: Sequence[int], ranges: Sequence[Runs], device: torch.device
) -> Tensor:
    """Draw the numbers in [0, 1) for stochastic rounding of ranges of a leaf, whose shape has all layers of a stack."""
    if key is None:
        raise ConfigError(report(f"fs.gather_unit needs a key to round {path} stochastically.", mend=_PASS_A_KEY))
    # Each number is a function of key, path and position in the full leaf, so sharding changes no bit.
    return uniform_at(key, zlib.crc32(path.encode()), tuple(shape), ranges, device)


# -------------------------------------------------------------------------------------------------- parameters at rest
def wires_of_copies(
    leaves: Sequence[DTensor | None], layout: Layout, key: Tensor | None
) -> list[LeafWire | None] | None:
    """Return the wires from main parameters to stored low-precision copies; None for leaves without a format."""
    if layout.precision.gather is None:
        return None
    pairs = zip(leaves, layout.leaves, strict=True)
    return [_at_rest(x, leaf, leaf.main, layout.rounds(leaf), layout.precision, key) for x, leaf in pairs]


def wires_in_flight(params: Tree, layout: Layout, precision: Precision, key: Tensor | None) -> list[LeafWire | None]:
    """Return the wires of main parameters that are quantized when they are gathered; None for other leaves."""
    rows = zip(tree.leaves(params), layout.leaves, _formats_in_flight(layout, precision), strict=True)
    return [_at_rest(x, leaf, leaf.params, format, precision, key) for x, leaf, format in rows]


def round_params(params: Tree, layout: Layout, precision: Precision, key: Tensor | None) -> Tree:
    """Round main parameters without a stored copy to the values that a loss function uses, without resharding."""
    formats = _formats_in_flight(layout, precision)
    if not any(formats):
        return params
    # A rank without a shard of a leaf has no wire for it, but its result must have the dtype of the other ranks'.
    pairs = [*zip(layout.leaves, formats, strict=True)]
    homes = [None if format is None else leaf.params for leaf, format in pairs]
    dtypes = [None if format is None else precision.compute_dtype(leaf.init) for leaf, format in pairs]
    wires = wires_in_flight(params, layout, precision, key)
    rounded = send(tree.leaves(params), homes, BucketQueue(0), dtypes=dtypes, wires=wires).wait()
    return tree.unflatten(layout.structure, rounded)


def round_leaf(
    x: DTensor, leaf: LeafLayout, home: NamedSharding, format: Blocks, precision: Precision, key: Tensor | None
) -> DTensor:
    """Round a main parameter with sharding `home`, as `round_params` does."""
    wires = [_at_rest(x, leaf, home, format, precision, key)]
    return send([x], [home], BucketQueue(0), dtypes=[precision.compute_dtype(leaf.init)], wires=wires).wait()[0]


def _formats_in_flight(layout: Layout, precision: Precision) -> list[Blocks | None]:
    """Return the formats of main parameters that are quantized in gathers only; None for other leaves."""
    rounds = precision.gather is not None and not precision.rounded
    return [layout.format_of(leaf) if rounds else None for leaf in layout.leaves]


def _at_rest(
    x: DTensor | None,
    leaf: LeafLayout,
    home: NamedSharding,  # its sharding, which has the layers of a stack that this rank holds
    format: Blocks | None,
    precision: Precision,
    key: Tensor | None,
) -> LeafWire | None:
    """Return the wire of a main parameter at rest; None without a format, and on a rank without a shard."""
    grid = home.grid(leaf.shape)
    if x is None or format is None or grid is None:
        return None
    kept = precision.kept_rows(leaf.path, leaf.shape[0]) if leaf.is_stacked else ()
    rows = (row for start, stop in (grid[0] if kept else ()) for row in range(start, stop))
    places = tuple(place for place, row in enumerate(rows) if row in kept) if kept else None
    noise = _noise_at_rest(x, leaf, grid, key) if format.stochastic else None
    return LeafWire(Quantizing(precision.compute_dtype(leaf.init), format), places, noise)


def _noise_at_rest(x: DTensor, leaf: LeafLayout, grid: Grid, key: Tensor | None) -> Callable[[int, int], Tensor]:
    """Return the rounding noise of rows of a main parameter at rest, by their position in the full leaf."""
    node = to_local(x)
    ranges = list(node.sharding.grid(node.shape) or ())
    shape = tuple(node.shape)
    if leaf.is_stacked:
        ranges[0] = grid[0]
        shape = (leaf.shape[0], *shape[1:])
    device = node.value.device
    return lambda start, stop: rounding_noise(
        key, leaf.path, shape, [cut_runs(ranges[0], start, stop), *ranges[1:]], device
    )


def check_patterns(precision: Precision, params: Tree) -> None:
    """Raise if a pattern of a precision with formats matches no parameter."""
    if not precision.has_formats or (precision.keep is KEEP and not precision.columnwise):
        return
    shapes = zip(tree.paths(params), (tuple(x.shape) for x in tree.leaves(params)), strict=True)
    precision.check_leaves(tuple(PatternLeaf(p, shape, len(shape) > 2) for p, shape in shapes))
