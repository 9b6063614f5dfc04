"""The static plan of a unit: which leaves are gathered together, and which of their gradients are reduced together.

In: for each leaf its sharding, global shape and dtypes, and the target of its gradient. Out: a cached, printable
`UnitPlan`. A bucket of gathers has one (dtype, axes), a bucket of reductions one (steps, dtypes).
Law: nothing here communicates, and all ranks of a mesh compute the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fsharding._compat import cache_on_its_mesh, cache_on_mesh
from fsharding.comm.bucket import Bucket, plan_bucket
from fsharding.comm.codes import CodedBucket, CodePlan, code_bucket, plan_codes
from fsharding.comm.steps import Step, begins_with_sum, kinds_of, plan_steps, whole_sizes
from fsharding.formats.blocks import Blocks
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import P

__all__ = [
    "GatherBucket", "GradTarget", "LargeLeaf", "LeafIndex", "ReduceBucket", "UnitLeaf", "UnitPlan", "large_from",
    "pooled_from", "plan_unit", "unreduced", "whole",
]  # fmt: skip

_large: ContextVar[int] = ContextVar("fsharding_large", default=1 << 16)
"""Elements from which on a gradient is worth a call of its own, so that its memory is free early."""


@contextmanager
def large_from(elements: int) -> Generator[None]:
    """Sets from how many elements on a leaf is a `LargeLeaf`, inside the `with` block."""
    token = _large.set(elements)
    try:
        yield
    finally:
        _large.reset(token)


def pooled_from() -> int:
    """Elements of a gradient from which on its memory is kept and used again from step to step."""
    return 4 * _large.get()


@dataclass(frozen=True)
class GradTarget:
    """Where the gradient of a leaf goes.

    Attributes:
        sharding: of the result.
        dtype: in which it is summed and returned.
        wire_dtype: in which terms are sent; None for the dtype that they have.
        accumulated: the sharding of gradients of earlier microbatches that it is added to; None without any.
        native: it is summed by the backend's own collectives, unless there is a format.
        format: in which terms travel between ranks, and to which they are rounded; None for `wire_dtype`.
    """

    sharding: NamedSharding
    dtype: torch.dtype
    wire_dtype: torch.dtype | None = None
    accumulated: NamedSharding | None = None
    native: bool = False
    format: Blocks | None = None

    def row(self) -> GradTarget:
        """The target of one row of a stacked leaf."""
        accumulated = self.accumulated.drop(0) if self.accumulated else None
        return replace(self, sharding=self.sharding.drop(0), accumulated=accumulated)


class LeafIndex(NamedTuple):
    """A leaf of a unit inside the parameter tree: its number, and its row if it is one layer of a stack."""

    leaf: int
    row: int | None


class UnitLeaf(NamedTuple):
    """One leaf of a unit.

    Attributes:
        sharding: of the leaf in the state.
        shape: global.
        stored: dtype in the state.
        compute: dtype of the gathered leaf.
        target: of its gradient; None for a frozen leaf.
        misaligned: a row of a stack that does not begin where a fresh tensor would. Kernels may round differently on
            it, so it is copied to a buffer like the leaves that are gathered.
        format: in which the leaf travels, and to which it is rounded; None for the dtype of compute.
        quantised: the loss function gets codes and scales.
        strict: as in `Quantised`.
        columnwise: backward may gather it in blocks along its other dim, see `Precision.columnwise`.
    """

    sharding: NamedSharding
    shape: tuple[int, ...]
    stored: torch.dtype
    compute: torch.dtype
    target: GradTarget | None
    misaligned: bool = False
    format: Blocks | None = None
    quantised: bool = False
    strict: bool = False
    columnwise: bool = False

    def across(self) -> UnitLeaf:
        """The same leaf in blocks along its other dim, as backward gathers it."""
        assert self.format is not None
        return self._replace(format=self.format.across(self.shape), target=None, columnwise=False)


@dataclass(frozen=True)
class GatherBucket:
    """Leaves that are gathered by one collective; those of a bucket without axes are only cast.

    Attributes:
        leaves: their numbers in the unit.
        axes: over which they are gathered.
        dtype: of the gathered leaves.
        bucket: offsets in rows and in the flat buffer.
        coded: what travels in its place, for leaves that have a format.
        quantised: nothing else is made of it: whole leaves are codes and scales.
        columnwise: backward needs it again only where something else than a product has kept views of it.
    """

    leaves: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: torch.dtype
    bucket: Bucket
    coded: CodedBucket | None = None
    quantised: bool = False
    columnwise: bool = False


@dataclass(frozen=True)
class ReduceBucket:
    """Leaves whose gradients are reduced by the same collectives.

    Attributes:
        leaves: their numbers in the unit.
        shapes: of their gradients as backward computes them.
        steps: for each leaf, from there until it can be added to what earlier microbatches have accumulated.
        late_steps: for each leaf, from there to the target.
        sizes: `whole_sizes` of the steps.
        late_sizes: `whole_sizes` of the late steps.
        dtype: of sums.
        wire_dtype: in which terms of `steps` are sent.
        late_wire_dtype: in which terms of `late_steps` are sent.
        large: some leaf is so large that its gradient is taken as soon as it is complete.
        native: sums are the backend's own.
        format: in which terms of the first sum travel, of `steps` or, where these are none, of `late_steps`; what has
            been summed over some ranks travels as it is.
    """

    leaves: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[Step, ...], ...]
    late_steps: tuple[tuple[Step, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    late_sizes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    late_wire_dtype: torch.dtype
    large: bool
    native: bool
    format: Blocks | None = None


class LargeLeaf(NamedTuple):
    """A leaf whose gradient is taken as soon as it is complete.

    Attributes:
        leaf: its number in the unit.
        bucket: the number of its `ReduceBucket` in the plan.
        slot: its position in that bucket.
    """

    leaf: int
    bucket: int
    slot: int


@dataclass(frozen=True)
class UnitPlan:
    """Everything static about a unit.

    Attributes:
        mesh: of its leaves.
        gathers: what is gathered or cast.
        aliases: leaves that are whole already, with the dtype in which they are used.
        reductions: what is reduced.
        large: large leaves of these, one by one.
        strict: as in `Quantised`, of the leaves that are one.
        columnwise: leaves that backward may gather in blocks along their other dim.
    """

    mesh: Mesh
    gathers: tuple[GatherBucket, ...]
    aliases: tuple[tuple[int, torch.dtype], ...]
    reductions: tuple[ReduceBucket, ...]
    large: tuple[LargeLeaf, ...]
    strict: bool = False
    columnwise: tuple[int, ...] = ()


def plan_unit(leaves: tuple[UnitLeaf, ...]) -> UnitPlan:
    """Sorts the leaves of a unit into buckets."""
    return _plan_unit(leaves[0].sharding.mesh, leaves, _large.get())


@cache_on_mesh(1024)
def _plan_unit(mesh: Mesh, leaves: tuple[UnitLeaf, ...], large: int) -> UnitPlan:
    gathers, aliases = _plan_gathers(leaves)
    reductions = _plan_reductions(leaves, large)
    large_leaves = tuple(
        LargeLeaf(leaf, number, slot)
        for number, bucket in enumerate(reductions)
        if bucket.large
        for slot, (leaf, shape) in enumerate(zip(bucket.leaves, bucket.shapes, strict=True))
        if math.prod(shape) >= large
    )
    columnwise = tuple(i for i, leaf in enumerate(leaves) if leaf.columnwise)
    strict = any(leaf.strict for leaf in leaves)
    return UnitPlan(mesh, gathers, aliases, reductions, large_leaves, strict, columnwise)


@cache_on_its_mesh()
def whole(sharding: NamedSharding) -> NamedSharding:
    """The sharding of a leaf once it has been gathered over its data axes."""
    data = sharding.data_axes
    kept = (tuple(a for a in sharding.axes(dim) if a not in data) for dim in range(len(sharding.spec)))
    return NamedSharding(sharding.mesh, P(*kept), owned=sharding.owned)


@cache_on_its_mesh()
def unreduced(sharding: NamedSharding) -> NamedSharding:
    """The sharding of a leaf's gradient as it comes out of backward: whole, each data rank with its own term."""
    return replace(whole(sharding), partial=tuple(sorted(sharding.data_axes, key=AXES.index)))


def _plan_gathers(leaves: tuple[UnitLeaf, ...]) -> tuple[tuple[GatherBucket, ...], tuple[tuple[int, torch.dtype], ...]]:
    result: dict[tuple[Any, ...], list[tuple[int, tuple[int, ...], int]]] = {}
    aliases: list[tuple[int, torch.dtype]] = []
    for i, leaf in enumerate(leaves):
        cuts = [(dim, cut) for dim in range(len(leaf.shape)) if (cut := _data_cut(leaf.sharding, dim))]
        assert len(cuts) <= 1, "data axes cut one dim of a leaf"
        shape, everywhere = whole(leaf.sharding).local_shape(leaf.shape), leaf.sharding.data_axes
        kind = (leaf.format is not None, leaf.quantised, leaf.columnwise)
        if cuts:
            result.setdefault((leaf.compute, cuts[0][1], everywhere, kind), []).append((i, shape, cuts[0][0]))
        elif (leaf.compute != leaf.stored or leaf.misaligned or kind[0]) and shape:
            result.setdefault((leaf.compute, (), everywhere, kind), []).append((i, shape, 0))
        else:
            aliases.append((i, leaf.compute))
    sizes = abstract(leaves[0].sharding.mesh)
    gathers = [
        GatherBucket(
            tuple(i for i, _, _ in members), axes, dtype,
            plan_bucket(tuple((shape, dim) for _, shape, dim in members), tuple(map(sizes.axis_size, axes))),
            _coded(leaves, members, tuple(map(sizes.axis_size, axes))) if coded else None, quantised, columnwise,
        )
        for (dtype, axes, _, (coded, quantised, columnwise)), members in result.items()
    ]  # fmt: skip
    return tuple(gathers), tuple(aliases)


def _coded(
    leaves: tuple[UnitLeaf, ...], members: Sequence[tuple[int, tuple[int, ...], int]], axis_sizes: tuple[int, ...]
) -> CodedBucket:
    plans: list[CodePlan] = []
    for i, _, _ in members:
        sharding, shape, format = leaves[i].sharding, leaves[i].shape, leaves[i].format
        assert format is not None
        plans.append(plan_codes(sharding.mesh, sharding, whole(sharding), shape, format))
    return code_bucket(plans, [dim for _, _, dim in members], axis_sizes)


def _plan_reductions(leaves: tuple[UnitLeaf, ...], large: int) -> tuple[ReduceBucket, ...]:
    result: dict[Any, list[int]] = {}
    routes: dict[int, tuple[NamedSharding, tuple[Step, ...], tuple[Step, ...]]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.target is None:
            continue
        target = leaf.target
        middle = target.accumulated or target.sharding
        steps = plan_steps(unreduced(leaf.sharding), middle)
        late_steps = plan_steps(middle, target.sharding)
        routes[i] = (middle, steps, late_steps)
        # A backend adds what travels, where ordered sums widen it.
        format = target.format if begins_with_sum([steps or late_steps]) else None
        native = target.native and format is None
        first_wire = target.dtype if native else leaf.compute
        dtypes = (target.dtype, target.wire_dtype or first_wire, target.wire_dtype or target.dtype)
        result.setdefault((kinds_of(steps), kinds_of(late_steps), *dtypes, native, format), []).append(i)

    def sizes(i: int, source: NamedSharding, steps: tuple[Step, ...]) -> tuple[int, ...]:
        return whole_sizes(source, steps, leaves[i].shape)

    shapes = [whole(leaf.sharding).local_shape(leaf.shape) for leaf in leaves]
    return tuple(
        ReduceBucket(
            leaves=tuple(members),
            shapes=tuple(shapes[i] for i in members),
            steps=tuple(routes[i][1] for i in members),
            late_steps=tuple(routes[i][2] for i in members),
            sizes=tuple(sizes(i, unreduced(leaves[i].sharding), routes[i][1]) for i in members),
            late_sizes=tuple(sizes(i, routes[i][0], routes[i][2]) for i in members),
            dtype=dtype,
            wire_dtype=wire_dtype,
            late_wire_dtype=late_wire_dtype,
            large=begins_with_sum([routes[i][1] for i in members])
            and any(math.prod(shapes[i]) >= large for i in members),
            native=native,
            format=format,
        )
        for (_, _, dtype, wire_dtype, late_wire_dtype, native, format), members in result.items()
    )


def _data_cut(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    return tuple(axis for axis in sharding.axes(dim) if axis in sharding.data_axes)
