"""The static plan of a unit: which leaves are gathered together, and which gradients are reduced together.

Planning never communicates; the plans of all ranks of a mesh have the same `outline`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsharding.base._compat import cache_on_its_mesh, cache_on_mesh
from fsharding.base.scoped import scoped
from fsharding.comm.leaf_wires import UnitWire
from fsharding.comm.move import Move
from fsharding.comm.steps import LeafSteps, begins_with_sum, kinds_of, steps_of
from fsharding.comm.wires import Plain, WholeLeaf
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import Mesh
from fsharding.sharding import boxes
from fsharding.sharding.assigned import Assigned
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import P

__all__ = [
    "GradTarget", "LargeLeaf", "ReduceBucket", "UnitGather", "UnitLeaf", "UnitPlan",
    "large_elements", "large_from", "plan_unit", "unreduced", "whole",
]  # fmt: skip

# Minimum number of elements of a large gradient. One of a full leaf may be written right into its bucket; one of a
# shard is pooled or, if it is of a stack, held by row until backward ends, while activations of earlier rows live.
_large: ContextVar[int] = ContextVar("fsharding_large", default=1 << 16)


def large_from(elements: int) -> AbstractContextManager[None]:
    """Set the minimum number of elements of a large gradient inside the `with` block."""
    return scoped(_large, elements)


def large_elements() -> int:
    """Return the minimum number of elements of a large gradient."""
    return _large.get()


@dataclass(frozen=True)
class GradTarget:
    """Destination of a leaf's gradient."""

    sharding: NamedSharding  # sharding of the reduced gradient
    dtype: torch.dtype  # dtype of the sum and of the result
    reduce_dtype: torch.dtype | None = None  # in which gradients and partial sums are sent; None: their own
    accumulated: NamedSharding | None = None  # sharding of the gradients of earlier microbatches; None without any
    native: bool = False  # use the backend's reductions
    # The leaf's assignments, which `sharding` omits; its slices may differ in size between ranks.
    assigned: tuple[Assigned, ...] = ()

    @functools.cached_property
    def row(self) -> GradTarget:
        """The target of one row of a stacked leaf."""
        accumulated = self.accumulated.drop(0) if self.accumulated else None
        assigned = tuple(replace(a, dim=a.dim - 1) for a in self.assigned if a.dim)
        return replace(self, sharding=self.sharding.drop(0), accumulated=accumulated, assigned=assigned)

    def slices(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes of a leaf's slices on all ranks, so that all ranks plan alike; `shape` is this rank's."""
        shapes = [shape]
        for a in self.assigned:
            if a.dim is not None:
                lengths = {boxes.length(runs) for runs in a.ranges}
                shapes = [(*s[: a.dim], n, *s[a.dim + 1 :]) for s in shapes for n in sorted(lengths)]
        return shapes


class UnitLeaf(NamedTuple):
    """One leaf of a unit."""

    sharding: NamedSharding  # sharding in the state
    shape: tuple[int, ...]  # global shape
    stored: torch.dtype  # dtype in the state
    sent: UnitWire
    target: GradTarget | None  # None for a frozen leaf
    # It is copied into a buffer even if it is full: it isn't on the device, or it is a row of a stack that isn't
    # aligned like a fresh tensor, on which kernels may round differently.
    copied: bool = False


class UnitGather(NamedTuple):
    """Leaves that are gathered together; a move without axes only casts or encodes them."""

    leaves: tuple[int, ...]  # their numbers in the unit
    move: Move
    if_viewed: bool  # backward gathers them again only if autograd has saved a view of them


@dataclass(frozen=True)
class ReduceBucket:
    """Leaves whose gradients are reduced by the same collectives."""

    leaves: tuple[int, ...]  # their numbers in the unit
    early: Move  # from backward's gradients to the sharding of accumulated gradients
    late: Move  # from there to the target


class LargeLeaf(NamedTuple):
    """A leaf whose gradient is copied to its bucket as soon as it is complete."""

    leaf: int  # its number in the unit
    bucket: int  # number of its `ReduceBucket` in the plan
    slot: int  # its position in that bucket


@dataclass(frozen=True)
class UnitPlan:
    """The plan of a unit's collectives."""

    mesh: Mesh
    gathers: tuple[UnitGather, ...]
    aliases: tuple[tuple[int, torch.dtype], ...]  # leaves used without a gather, and the dtype of their use
    reductions: tuple[ReduceBucket, ...]
    large: tuple[LargeLeaf, ...]
    seen: tuple[tuple[int, Callable[[Tensor], WholeLeaf]], ...]  # `UnitWire.seen` of the leaves that have one
    again: tuple[tuple[int, ...], UnitPlan] | None  # leaves that have a second gather, and the plan of their unit

    @functools.cached_property
    def outline(self) -> str:
        """The order of collectives as text, equal on all ranks although their shards may differ in size."""
        gathers = [(b.leaves, b.move.outline, b.if_viewed) for b in self.gathers]
        reductions = [(b.leaves, b.early.outline, b.late.outline) for b in self.reductions]
        # Each leaf is in one gather bucket or is an alias; its gradient is in at most one reduction.
        gathered = [*(i for b in self.gathers for i in b.leaves), *(i for i, _ in self.aliases)]
        reduced = [i for b in self.reductions for i in b.leaves]
        assert sorted(gathered) == [*range(len(gathered))] and len({*reduced}) == len(reduced), self
        again = None if self.again is None else (self.again[0], self.again[1].outline)
        return repr((gathers, self.aliases, reductions, self.large, again))


def plan_unit(leaves: tuple[UnitLeaf, ...]) -> UnitPlan:
    """Sort the leaves of a unit into buckets."""
    return _plan_unit(leaves[0].sharding.mesh, leaves, _large.get())


@cache_on_mesh(1024)
def _plan_unit(mesh: Mesh, leaves: tuple[UnitLeaf, ...], large: int) -> UnitPlan:
    gathers, aliases = _plan_gathers(leaves)
    reductions = _plan_reductions(leaves, large)
    large_leaves = tuple(
        LargeLeaf(leaf, number, slot)
        for number, bucket in enumerate(reductions)
        if bucket.early.large
        for slot, leaf in enumerate(bucket.leaves)
        if _elements(leaves[leaf]) >= large
    )
    seen = tuple((i, leaf.sent.seen) for i, leaf in enumerate(leaves) if leaf.sent.seen is not None)
    second = {
        i: leaf._replace(sent=UnitWire(leaf.sent.again), target=None)
        for i, leaf in enumerate(leaves)
        if leaf.sent.again is not None
    }
    again = (tuple(second), plan_unit(tuple(second.values()))) if second else None
    return UnitPlan(mesh, gathers, aliases, reductions, large_leaves, seen, again)


@cache_on_its_mesh
def whole(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of a leaf that is gathered over its data axes."""
    data = sharding.data_axes
    kept = (tuple(a for a in sharding.axes(dim) if a not in data) for dim in range(len(sharding.spec)))
    return NamedSharding(sharding.mesh, P(*kept), owned=sharding.owned)


@cache_on_its_mesh
def unreduced(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of a leaf's gradient in backward: full, and partial over its data axes."""
    return replace(whole(sharding), partial=tuple(sorted(sharding.data_axes, key=AXES.index)))


def _plan_gathers(leaves: tuple[UnitLeaf, ...]) -> tuple[tuple[UnitGather, ...], tuple[tuple[int, torch.dtype], ...]]:
    result: dict[tuple[Any, ...], list[tuple[int, LeafSteps]]] = {}
    aliases: list[tuple[int, torch.dtype]] = []
    for i, leaf in enumerate(leaves):
        steps = steps_of(leaf.sharding, whole(leaf.sharding), leaf.shape)
        assert [step.kind for step in steps.steps] in ([], ["gather"]), "data axes shard one dim of a leaf"
        axes = steps.steps[0].axes if steps.steps else ()
        wire = leaf.sent.wire
        parts = steps.parts(wire)
        is_itself = parts.dtype == wire.dtype == leaf.stored and not leaf.copied
        if axes or (leaf.shape and not is_itself):
            # All leaves of a bucket view its received buffer, or all are decoded into one buffer.
            kind = (wire.dtype, parts.dtype, parts.decoded is None, leaf.sent.again is not None)
            result.setdefault((axes, leaf.sharding.data_axes, *kind), []).append((i, steps))
        else:
            aliases.append((i, wire.dtype))
    gathers: list[UnitGather] = []
    for members in result.values():
        numbers = tuple(i for i, _ in members)
        wires = tuple(leaves[i].sent.wire for i in numbers)
        move = Move(leaves[0].sharding.mesh, tuple(steps for _, steps in members), wires, wires[0].dtype)
        gathers.append(UnitGather(numbers, move, leaves[numbers[0]].sent.again is not None))
    return tuple(gathers), tuple(aliases)


def _plan_reductions(leaves: tuple[UnitLeaf, ...], large: int) -> tuple[ReduceBucket, ...]:
    result: dict[tuple[Any, ...], list[tuple[int, LeafSteps, LeafSteps]]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.target is None:
            continue
        target = leaf.target
        middle = target.accumulated or target.sharding
        early = steps_of(unreduced(leaf.sharding), middle, leaf.shape)
        late = steps_of(middle, target.sharding, leaf.shape)
        first = leaf.sent.terms if begins_with_sum(early.steps or late.steps) else None
        # A sum whose terms have a wire of their own is never native.
        native = target.native and first is None
        # A native sum adds in the dtype that is sent, so terms need the sum's dtype; ordered sums widen terms first.
        sums = Plain(target.reduce_dtype or target.dtype, native)
        terms = sums if target.reduce_dtype or native else Plain(leaf.sent.wire.dtype)
        wires = (first or terms, sums) if early.steps else (terms, first or sums)
        key = kinds_of(early.steps), kinds_of(late.steps), target.dtype, *wires
        result.setdefault(key, []).append((i, early, late))
    buckets: list[ReduceBucket] = []
    for (_, _, dtype, *wires), members in result.items():
        numbers, *steps = zip(*members, strict=True)
        mesh = leaves[0].sharding.mesh
        early, late = (Move(mesh, s, (w,) * len(s), dtype) for s, w in zip(steps, wires, strict=True))
        is_large = early.sums_first and any(_elements(leaves[i]) >= large for i in numbers)
        buckets.append(ReduceBucket(numbers, replace(early, large=is_large), late))
    return tuple(buckets)


def _elements(leaf: UnitLeaf) -> int:
    """Return the largest number of elements of a rank's partial gradient of a leaf."""
    assert leaf.target is not None
    sharding = unreduced(leaf.sharding)
    return max(math.prod(sharding.first_shape(shape)) for shape in leaf.target.slices(leaf.shape))
