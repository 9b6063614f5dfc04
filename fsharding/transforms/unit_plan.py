"""The static plan of a unit: which leaves are gathered together, and how their gradients get where they belong.

In: for each leaf its sharding, global shape, dtypes, and the goal of its gradient. Out: one cached, printable plan.
A bucket is (dtype, data axes) on the way in, and (steps, dtypes) on the way back. Nothing here moves a byte.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fsharding.comm import steps as transition
from fsharding.comm.bucket import Bucket, plan_bucket
from fsharding.comm.steps import Step
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.mesh_cache import cache_on_mesh
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import P

__all__ = [
    "Early", "Gathering", "Goal", "LeafPlan", "Place", "Reducing", "UnitPlan", "early_from", "own_memory_from",
    "plan_unit", "unreduced", "whole",
]  # fmt: skip

_large: ContextVar[int] = ContextVar("fsharding_large", default=1 << 16)
"""Elements of a gradient from which on it is worth a call of its own to let it go early."""


@contextmanager
def early_from(elements: int) -> Generator[None]:
    """Has gradients of so many elements taken as soon as they are complete, inside the `with` block."""
    token = _large.set(elements)
    try:
        yield
    finally:
        _large.reset(token)


def own_memory_from() -> int:
    """Elements of a gradient from which on its memory is worth more care than that of small ones."""
    return 4 * _large.get()


@dataclass(frozen=True)
class Goal:
    """What becomes of the gradient of a leaf.

    Attributes:
        target: the sharding in which it ends.
        dtype: in which it is summed and kept.
        wire_dtype: in which terms travel; None for that in which they are.
        held: the sharding of gradients of earlier microbatches that it is added to; None without any.
    """

    target: NamedSharding
    dtype: torch.dtype
    wire_dtype: torch.dtype | None = None
    held: NamedSharding | None = None

    def row(self) -> Goal:
        """The goal of one block of a stacked leaf."""
        return replace(self, target=self.target.drop(0), held=self.held.drop(0) if self.held else None)


class Place(NamedTuple):
    """A leaf of a unit inside the state: its number, and its row when it is one block of a stack."""

    leaf: int
    row: int | None


class LeafPlan(NamedTuple):
    """One leaf of a unit: sharding, global shape, dtype at rest, dtype in the loss, goal (None when frozen).

    A row of a stack that does not begin where a fresh tensor would is `misaligned`: kernels may round differently on
    it, so it is copied to a buffer like the leaves that are gathered.
    """

    sharding: NamedSharding
    shape: tuple[int, ...]
    rest: torch.dtype
    compute: torch.dtype
    goal: Goal | None
    misaligned: bool = False


@dataclass(frozen=True)
class Gathering:
    """Leaves that are gathered together; without axes they are only cast."""

    leaves: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: torch.dtype
    bucket: Bucket


@dataclass(frozen=True)
class Reducing:
    """Leaves whose gradients travel together.

    Attributes:
        leaves: their numbers in the unit.
        shapes: their local shapes as they come out of backward.
        before: for each leaf, the steps until it can be added to what is held.
        after: for each leaf, the steps from there to the target.
        wholes_before: `whole_sizes` of the steps before.
        wholes_after: the same for the steps after.
        dtype: of sums.
        wire_dtype: of terms that come out of backward.
        held_wire_dtype: of terms that come out of what is held.
        large: some leaf is so large that its gradient is taken as soon as it is complete.
    """

    leaves: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    before: tuple[tuple[Step, ...], ...]
    after: tuple[tuple[Step, ...], ...]
    wholes_before: tuple[tuple[int, ...], ...]
    wholes_after: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    held_wire_dtype: torch.dtype
    large: bool


class Early(NamedTuple):
    """A leaf whose gradient is taken as soon as it is complete: its number, its reduction, and its place in that."""

    leaf: int
    reduction: int
    place: int


@dataclass(frozen=True)
class UnitPlan:
    """Everything static about a unit.

    Attributes:
        mesh: of its leaves.
        gathers: what is gathered or cast.
        aliases: leaves that are whole already, with the dtype in which they are used.
        reductions: what is reduced.
        early: large leaves of these, one by one.
    """

    mesh: Mesh
    gathers: tuple[Gathering, ...]
    aliases: tuple[tuple[int, torch.dtype], ...]
    reductions: tuple[Reducing, ...]
    early: tuple[Early, ...]


def plan_unit(leaves: tuple[LeafPlan, ...]) -> UnitPlan:
    """Sorts the leaves of a unit into buckets."""
    return _plan_unit(leaves[0].sharding.mesh, leaves, _large.get())


@cache_on_mesh(1024)
def _plan_unit(mesh: Mesh, leaves: tuple[LeafPlan, ...], large: int) -> UnitPlan:
    gathers, aliases = _plan_gathers(leaves)
    reductions = _plan_reductions(leaves, large)
    early = tuple(
        Early(leaf, number, place)
        for number, r in enumerate(reductions)
        if r.large
        for place, (leaf, shape) in enumerate(zip(r.leaves, r.shapes, strict=True))
        if math.prod(shape) >= large
    )
    return UnitPlan(mesh, gathers, aliases, reductions, early)


def whole(sharding: NamedSharding) -> NamedSharding:
    """The sharding of a leaf once it has been gathered over its data axes."""
    data = sharding.data_axes
    kept = (tuple(a for a in sharding.axes(dim) if a not in data) for dim in range(len(sharding.spec)))
    return NamedSharding(sharding.mesh, P(*kept), owned=sharding.owned)


def unreduced(sharding: NamedSharding) -> NamedSharding:
    """The sharding of a leaf's gradient as it comes out of backward: whole, each data rank with its own term."""
    return replace(whole(sharding), partial=tuple(sorted(sharding.data_axes, key=AXES.index)))


def _plan_gathers(leaves: tuple[LeafPlan, ...]) -> tuple[tuple[Gathering, ...], tuple[tuple[int, torch.dtype], ...]]:
    found: dict[tuple[torch.dtype, tuple[str, ...], tuple[str, ...]], list[tuple[int, tuple[int, ...], int]]] = {}
    aliases: list[tuple[int, torch.dtype]] = []
    for i, leaf in enumerate(leaves):
        cuts = [(dim, cut) for dim in range(len(leaf.shape)) if (cut := _data_cut(leaf.sharding, dim))]
        assert len(cuts) <= 1, "data axes cut one dim of a leaf"
        shape, everywhere = whole(leaf.sharding).local_shape(leaf.shape), leaf.sharding.data_axes
        if cuts:
            found.setdefault((leaf.compute, cuts[0][1], everywhere), []).append((i, shape, cuts[0][0]))
        elif (leaf.compute != leaf.rest or leaf.misaligned) and shape:
            found.setdefault((leaf.compute, (), everywhere), []).append((i, shape, 0))
        else:
            aliases.append((i, leaf.compute))
    sizes = abstract(leaves[0].sharding.mesh)
    gathers = [
        Gathering(
            tuple(i for i, _, _ in members), axes, dtype,
            plan_bucket(tuple((shape, dim) for _, shape, dim in members), tuple(map(sizes.axis_size, axes))),
        )
        for (dtype, axes, _), members in found.items()
    ]  # fmt: skip
    return tuple(gathers), tuple(aliases)


def _plan_reductions(leaves: tuple[LeafPlan, ...], large: int) -> tuple[Reducing, ...]:
    found: dict[Any, list[int]] = {}
    routes: dict[int, tuple[NamedSharding, tuple[Step, ...], tuple[Step, ...]]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.goal is None:
            continue
        goal, middle = leaf.goal, leaf.goal.held or leaf.goal.target
        before = transition.plan_steps(unreduced(leaf.sharding), middle)
        after = transition.plan_steps(middle, goal.target)
        routes[i] = (middle, before, after)
        dtypes = (goal.dtype, goal.wire_dtype or leaf.compute, goal.wire_dtype or goal.dtype)
        found.setdefault((transition.kinds(before), transition.kinds(after), *dtypes), []).append(i)

    def wholes(i: int, source: NamedSharding, steps: tuple[Step, ...]) -> tuple[int, ...]:
        return transition.whole_sizes(source, steps, leaves[i].shape)

    shapes = [whole(leaf.sharding).local_shape(leaf.shape) for leaf in leaves]
    return tuple(
        Reducing(
            tuple(members),
            tuple(shapes[i] for i in members),
            tuple(routes[i][1] for i in members),
            tuple(routes[i][2] for i in members),
            tuple(wholes(i, unreduced(leaves[i].sharding), routes[i][1]) for i in members),
            tuple(wholes(i, routes[i][0], routes[i][2]) for i in members),
            *dtypes,
            large=transition.departs_in_rows([routes[i][1] for i in members])
            and any(math.prod(shapes[i]) >= large for i in members),
        )
        for (_, _, *dtypes), members in found.items()
    )


def _data_cut(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    return tuple(axis for axis in sharding.axes(dim) if axis in sharding.data_axes)
