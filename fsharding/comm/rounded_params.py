"""Main parameters at rest, rounded to what a loss function sees of them.

Guarantee: a weight is rounded once, from its main copy, to the same bits under every strategy and on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.tree import Tree
from fsharding.comm.bucket_queue import BucketQueue
from fsharding.comm.leaf_wires import keyed_noise
from fsharding.comm.redistribute import send
from fsharding.comm.wires import LeafWire, Quantizing
from fsharding.formats.blocks import Blocks
from fsharding.formats.precision import Precision
from fsharding.sharding.boxes import cut_runs
from fsharding.sharding.layout import Layout
from fsharding.sharding.leaf_plan import LeafLayout, is_stacked
from fsharding.sharding.named_sharding import NamedSharding, to_local

__all__ = ["AtRest", "round_leaves", "round_params", "wires_in_flight", "wires_of_copies"]


class AtRest(NamedTuple):
    """A main parameter at rest, and how it is to be rounded."""

    x: DTensor  # the leaf
    leaf: LeafLayout  # its layout
    home: NamedSharding  # where it is, which says what layers of a stack the rank has
    format: Blocks  # that it is rounded to


def wires_of_copies(
    leaves: Sequence[DTensor | None], layout: Layout, key: Tensor | None
) -> list[LeafWire | None] | None:
    """Return how stored low-precision copies are rounded from main parameters; None for leaves without a format."""
    if layout.precision.gather is None:
        return None
    result: list[LeafWire | None] = []
    for x, leaf in zip(leaves, layout.leaves, strict=True):
        format = None if x is None else layout.rounds(leaf)
        if x is None or format is None:
            result.append(None)
            continue
        at = AtRest(x, leaf, leaf.main, format)
        result.append(_wire(at, layout.param_dtype(leaf), layout.precision, key))
    return result


def wires_in_flight(params: Tree, layout: Layout, precision: Precision, key: Tensor | None) -> list[LeafWire | None]:
    """Return how main parameters without a stored copy are rounded when they are gathered; None for other leaves."""
    given = _mains_in_flight(params, layout, precision)
    dtypes = [precision.compute_dtype(layout.param_dtype(leaf)) for leaf in layout.leaves]
    return [_wire(given[i], dtype, precision, key) if i in given else None for i, dtype in enumerate(dtypes)]


def round_params(params: Tree, layout: Layout, precision: Precision, key: Tensor | None) -> Tree:
    """Round main parameters without a stored copy to the values that a loss function sees."""
    given = _mains_in_flight(params, layout, precision)
    if not given:
        return params
    rounded = dict(zip(given, round_leaves([*given.values()], precision, key), strict=True))
    return tree.unflatten(layout.structure, [rounded.get(i, x) for i, x in enumerate(tree.leaves(params))])


def _mains_in_flight(params: Tree, layout: Layout, precision: Precision) -> dict[int, AtRest]:
    """The main parameters at rest that have a format and have not been rounded, by number of the leaf."""
    if precision.gather is None or precision.rounded:
        return {}
    pairs = zip(tree.leaves(params), layout.leaves, strict=True)
    return {
        i: AtRest(x, leaf, leaf.params, format)
        for i, (x, leaf) in enumerate(pairs)
        if (format := layout.format_of(leaf)) is not None
    }


def round_leaves(given: Sequence[AtRest], precision: Precision, key: Tensor | None) -> list[DTensor]:
    """Return main parameters at rest as a loss function sees them, in the dtype of compute; sharded as they were."""
    # Ranks that share blocks of some of them exchange the magnitudes of all at once.
    values = [at.x for at in given]
    homes = [at.home for at in given]
    dtypes = [precision.compute_dtype(at.leaf.init) for at in given]
    wires = [_wire(at, dtype, precision, key) for at, dtype in zip(given, dtypes, strict=True)]
    return send(values, homes, BucketQueue(0), dtypes=dtypes, wires=wires).wait()


def _wire(at: AtRest, dtype: torch.dtype, precision: Precision, key: Tensor | None) -> LeafWire | None:
    """How a main parameter at rest is rounded; None on a rank that has nothing of it."""
    if at.home.grid(at.leaf.shape) is None:
        return None
    return LeafWire(Quantizing(dtype, at.format), _kept_rows(at.leaf, at.home, precision), _noise_at_rest(at, key))


def _kept_rows(leaf: LeafLayout, home: NamedSharding, precision: Precision) -> tuple[int, ...] | None:
    """Which of this rank's rows of a stack have no format although others have one; None where no rank has any."""
    kept = precision.kept_rows(leaf.path, leaf.shape[0]) if is_stacked(leaf.names) else ()
    if not kept:
        return None
    grid = home.grid(leaf.shape)
    here = [row for start, stop in (grid[0] if grid is not None else ()) for row in range(start, stop)]
    return tuple(place for place, row in enumerate(here) if row in kept)


def _noise_at_rest(at: AtRest, key: Tensor | None) -> Callable[[int, int], Tensor] | None:
    """The numbers by which rows of a main parameter at rest are rounded: by their place in the whole leaf."""
    if not at.format.keyed:
        return None
    node = to_local(at.x)
    grid = at.home.grid(at.leaf.shape)
    assert grid is not None
    ranges = list(node.sharding.grid(node.shape) or ())
    shape = tuple(node.shape)
    if is_stacked(at.leaf.names):
        ranges[0] = grid[0]
        shape = (at.leaf.shape[0], *shape[1:])
    device = node.value.device
    return lambda start, stop: keyed_noise(
        key, at.leaf.path, shape, [cut_runs(ranges[0], start, stop), *ranges[1:]], device
    )
