"""Weights and gradients in low precision: which leaves of a tree have a format, how they are rounded, by which key.

In: a `Precision`, paths of leaves, a key. Out: for a leaf in flight, and for terms of its gradient, format and noise;
for a state, parameters at rest that have been rounded to what the loss function would see of their main copies.
Law: a weight is rounded once, from its main copy, to the same bits under every strategy and on every mesh.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.calls import named
from fsharding.base.errors import ConfigError, message, report
from fsharding.base.tree import Tree
from fsharding.comm.bucket_queue import BucketQueue
from fsharding.comm.rounded_moves import Rounding, start_rounded
from fsharding.comm.wires import Plain, Quantizing, Rounded, Wire
from fsharding.formats.blocks import Blocks
from fsharding.formats.philox import uniform_at
from fsharding.formats.precision import Precision
from fsharding.mesh.device_mesh import Mesh, data_position
from fsharding.sharding import random
from fsharding.sharding.boxes import Runs, cut_runs
from fsharding.sharding.layout import Layout
from fsharding.sharding.leaf_plan import LeafLayout, is_stacked
from fsharding.sharding.named_sharding import NamedSharding, to_local
from fsharding.transforms.unit_plan import GradTarget, LeafIndex, whole

__all__ = [
    "AtRest", "WeightFormats", "key_of_terms", "round_leaves", "round_params", "roundings_in_flight",
    "roundings_of_copies",
]  # fmt: skip

_GIVE_A_KEY = "Give a key, int64[2], that is another one in each step: fs.value_and_grad(..., key=fs.random.key(0))."


@dataclass(frozen=True)
class WeightFormats:
    """The formats of the leaves of a parameter tree.

    Attributes:
        precision: with `gather`, or a format in `reduce`.
        paths: of the leaves.
        stacks: for each leaf how many layers it has, where units are rows of it: in the whole model.
        firsts: for each leaf, which of these layers its first row is.
        key: for keyed rounding, int64[2]; None without one.
        term_key: the same for terms of gradients: another one on each data rank, and for each microbatch.
    """

    precision: Precision
    paths: Sequence[str]
    stacks: Sequence[int]
    firsts: Sequence[int]
    key: Tensor | None
    term_key: Tensor | None

    def wire(self, index: LeafIndex, ndim: int, dtype: torch.dtype) -> Wire:
        """How a leaf of a unit is gathered.

        Args:
            index: of the leaf.
            ndim: how many dims it has in the unit.
            dtype: of the gathered leaf.
        """
        precision = self.precision
        path = self.paths[index.leaf]
        format = precision.format_of(path, ndim)
        if format is None or self._keeps(index):
            return Plain(dtype)
        if precision.rounded:
            return Rounded(dtype, format, precision.strict)
        if not precision.computes_quantized:
            return Quantizing(dtype, format)
        columnwise = precision.takes_columns(path, ndim)
        return Quantizing(dtype, format, stays=True, strict=precision.strict, columnwise=columnwise)

    def with_terms(
        self, target: GradTarget | None, index: LeafIndex, ndim: int, dtype: torch.dtype
    ) -> GradTarget | None:
        """The target of the gradient of a leaf of a unit, which says how its terms, computed in a dtype, are sent."""
        format = self.precision.reduce_format(self.paths[index.leaf], ndim)
        if target is None or format is None or self._keeps(index):
            return target
        return replace(target, first_wire=Quantizing(dtype, format))

    def _keeps(self, index: LeafIndex) -> bool:
        if index.row is None:
            return False
        kept = self.precision.kept_rows(self.paths[index.leaf], self.stacks[index.leaf])
        return self.firsts[index.leaf] + index.row in kept

    def noise(self, index: LeafIndex, sharding: NamedSharding, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The numbers in [0, 1) by which the shard of a leaf of a unit is rounded."""
        return self._noise(self.key, index, sharding, shape, device)

    @named("fs.value_and_grad")
    def term_noise(
        self, index: LeafIndex, sharding: NamedSharding, shape: tuple[int, ...], device: torch.device
    ) -> Tensor:
        """The numbers in [0, 1) by which a term of the gradient of a leaf of a unit is rounded.

        Raises:
            ConfigError: there is no key.
        """
        if self.term_key is None:
            rule = f"rounds terms of the gradient of {self.paths[index.leaf]} by key, and has none."
            raise ConfigError(message(rule, mend=_GIVE_A_KEY))
        return self._noise(self.term_key, index, whole(sharding), shape, device)

    def _noise(
        self,
        key: Tensor | None,
        index: LeafIndex,
        sharding: NamedSharding,
        shape: tuple[int, ...],
        device: torch.device,
    ) -> Tensor:
        path = self.paths[index.leaf]
        ranges = list(sharding.grid(shape) or ())
        if index.row is None:
            return _noise(key, path, shape, ranges, device)
        row = self.firsts[index.leaf] + index.row
        stack = (self.stacks[index.leaf], *shape)
        return _noise(key, path, stack, [((row, row + 1),), *ranges], device)[0]


def key_of_terms(key: Tensor | None, mesh: Mesh | None, microbatch: int) -> Tensor | None:
    """The key by which terms of gradients are rounded: the same on ranks that have the same term.

    Args:
        key: of the step.
        mesh: of the parameters.
        microbatch: its number.
    """
    if key is None or mesh is None:
        return key
    for number in (data_position(mesh, cp=True)[0], microbatch):
        key = random.fold_in_count(key, torch.full((), number, dtype=torch.int64, device=key.device))
    return key


def _noise(
    key: Tensor | None, path: str, shape: tuple[int, ...], ranges: Sequence[Runs], device: torch.device
) -> Tensor:
    """The numbers of some ranges of a leaf, whose place among the layers of its stack counts.

    Raises:
        ConfigError: there is no key.
    """
    if key is None:
        raise ConfigError(report(f"fs.gather_unit rounds {path} by key, and has none.", mend=_GIVE_A_KEY))
    return uniform_at(key, zlib.crc32(path.encode()), shape, ranges, device)


class AtRest(NamedTuple):
    """A main parameter at rest, and how it is to be rounded.

    Attributes:
        x: the leaf.
        leaf: its layout.
        home: where it is, which says what layers of a stack the rank has.
        format: that it is rounded to.
    """

    x: DTensor
    leaf: LeafLayout
    home: NamedSharding
    format: Blocks


def roundings_of_copies(leaves: Sequence[DTensor | None], layout: Layout, key: Tensor | None) -> list[Rounding | None]:
    """How copies at rest are made of main parameters, where there is one that has a format.

    Args:
        leaves: main parameters as the layout has them, None for frozen ones.
        layout: of both.
        key: for keyed rounding.
    """
    formats = [None if x is None else layout.rounds(leaf) for x, leaf in zip(leaves, layout.leaves, strict=True)]
    return [
        None if x is None or format is None else _rounding(AtRest(x, leaf, leaf.main, format), layout.precision, key)
        for x, leaf, format in zip(leaves, layout.leaves, formats, strict=True)
    ]


def roundings_in_flight(
    params: Tree, layout: Layout, precision: Precision, key: Tensor | None
) -> list[Rounding | None]:
    """How parameters at rest that are main parameters are rounded on their way to the loss function; None for others.

    Args:
        params: of a state in the layout.
        layout: of the state.
        precision: of the call, as `Layout.in_flight` gives it.
        key: for keyed rounding.
    """
    given = _mains_in_flight(params, layout, precision)
    return [_rounding(given[i], precision, key) if i in given else None for i in range(len(layout.leaves))]


def round_params(params: Tree, layout: Layout, precision: Precision, key: Tensor | None) -> Tree:
    """Parameters at rest that are main parameters, rounded to what a loss function sees; others as they are.

    Args:
        params: of a state in the layout.
        layout: of the state.
        precision: of the call, as `Layout.in_flight` gives it.
        key: for keyed rounding.
    """
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
    """Main parameters at rest as a loss function sees them, in the dtype of compute; cut as they were.

    Args:
        given: those of one layout. Ranks that share blocks of some of them exchange the magnitudes of all at once.
        precision: which layers of a stack have no format.
        key: for keyed rounding.
    """
    values = [at.x for at in given]
    homes = [at.home for at in given]
    dtypes = [precision.compute_dtype(at.leaf.init) for at in given]
    roundings = [_rounding(at, precision, key) for at in given]
    return start_rounded(values, homes, roundings, BucketQueue(0), dtypes=dtypes).wait()


def _rounding(at: AtRest, precision: Precision, key: Tensor | None) -> Rounding | None:
    """How a main parameter at rest is rounded; None on a rank that has nothing of it."""
    if at.home.grid(at.leaf.shape) is None:
        return None
    return Rounding(at.format, _kept_rows(at.leaf, at.home, precision), _noise_at_rest(at, key))


def _kept_rows(leaf: LeafLayout, home: NamedSharding, precision: Precision) -> tuple[int, ...] | None:
    """Which of this rank's rows of a stack have no format although others have one; None where no rank has any."""
    kept = precision.kept_rows(leaf.path, leaf.shape[0]) if is_stacked(leaf.names) else ()
    if not kept:
        return None
    grid = home.grid(leaf.shape)
    here = [row for start, stop in (grid[0] if grid is not None else ()) for row in range(start, stop)]
    return tuple(place for place, row in enumerate(here) if row in kept)


def _noise_at_rest(at: AtRest, key: Tensor | None) -> Callable[[int, int], Tensor] | None:
    """The numbers by which rows of a main parameter at rest are rounded: those of their place in the whole leaf."""
    if not at.format.keyed:
        return None
    node = to_local(at.x)
    grid = at.home.grid(at.leaf.shape)
    assert grid is not None
    ranges = list(node.sharding.grid(node.shape) or ())
    shape = tuple(node.shape)
    if is_stacked(at.leaf.names):
        ranges[0], shape = grid[0], (at.leaf.shape[0], *shape[1:])
    device = node.value.device
    return lambda start, stop: _noise(key, at.leaf.path, shape, [cut_runs(ranges[0], start, stop), *ranges[1:]], device)
