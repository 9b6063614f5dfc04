"""The steps between two shardings of a leaf that differ along data axes: scatter, sum, gather, slice.

In: two shardings. Out: the steps, as a cached value. Inner axes are summed first, `replica` last.
Guarantee: with ordered sums, each element is the same balanced sum over ranks for any steps, so bits do not depend on
the strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsharding.base._compat import cache_on_its_mesh
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import PartitionSpec

__all__ = ["Step", "begins_with_sum", "full_lengths", "kinds_of", "plan_steps", "sharding_after"]


@dataclass(frozen=True)
class Step:
    """One collective or slice.

    Attributes:
        kind: "scatter" (sum and cut), "sum", "gather" (join) or "slice" (cut what is whole).
        axes: over which, major first.
        dim: the tensor dim that is cut or joined; -1 for "sum".
    """

    kind: str
    axes: tuple[str, ...]
    dim: int = -1


def plan_steps(source: NamedSharding, target: NamedSharding) -> tuple[Step, ...]:
    """The steps from one sharding to another on the same mesh.

    Args:
        source: what the local tensors are, with the axes over which they are unreduced.
        target: what they become; axes over which it is unreduced are left alone.
    """
    return _plan_steps(source, target if target.mesh is source.mesh else replace(target, mesh=source.mesh))


@cache_on_its_mesh()
def _plan_steps(source: NamedSharding, target: NamedSharding) -> tuple[Step, ...]:
    source = source.simplified()
    target = target.simplified()
    unreduced = [axis for axis in source.partial if axis not in target.partial]
    dims = range(max(len(source.spec), len(target.spec)))
    gained, lost = _changes(source.spec, target.spec, dims)
    steps: list[Step] = []

    def sum_over(axes: Sequence[str]) -> None:
        inner = tuple(axis for axis in axes if axis in unreduced)
        if inner:
            steps.append(Step("sum", inner))
            unreduced[:] = [axis for axis in unreduced if axis not in inner]

    if lost:
        sum_over([axis for axis in unreduced if axis != "replica"])
        sum_over(["replica"])
    steps += [Step("gather", axes, dim) for dim, axes in lost]
    for dim, axes in gained:
        for axis_run in _runs(axes, unreduced):
            if axis_run[0] not in unreduced:
                steps.append(Step("slice", axis_run, dim))
                continue
            if axis_run == ("replica",):
                later = {axis for other, cut in gained if other != dim for axis in cut}
                sum_over([axis for axis in unreduced if axis != "replica" and axis not in later])
            steps.append(Step("scatter", axis_run, dim))
            unreduced[:] = [axis for axis in unreduced if axis not in axis_run]
    sum_over([axis for axis in unreduced if axis != "replica"])
    sum_over(["replica"])
    return tuple(steps)


def _changes(
    source: PartitionSpec, target: PartitionSpec, dims: range
) -> tuple[list[tuple[int, tuple[str, ...]]], list[tuple[int, tuple[str, ...]]]]:
    """Return (gained, lost): per dim, the axes of target and source after the major ones that they share."""
    gained: list[tuple[int, tuple[str, ...]]] = []
    lost: list[tuple[int, tuple[str, ...]]] = []
    for dim in dims:
        old = source.axes(dim)
        new = target.axes(dim)
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        if old[same:]:
            lost.append((dim, old[same:]))
        if new[same:]:
            gained.append((dim, new[same:]))
    return gained, lost


def _runs(axes: tuple[str, ...], unreduced: Sequence[str]) -> list[tuple[str, ...]]:
    """Neighbors that one collective can serve: both unreduced or neither; a minor `replica` stands alone."""
    result: list[tuple[str, ...]] = []
    for axis in axes:
        alone = axis == "replica" and axis == axes[-1]
        if result and not alone and (result[-1][0] in unreduced) == (axis in unreduced):
            result[-1] = (*result[-1], axis)
        else:
            result.append((axis,))
    return result


def kinds_of(steps: Sequence[Step]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The key that two leaves must share to travel together: the kinds and axes of their steps, not the dims."""
    return tuple((step.kind, step.axes) for step in steps)


def begins_with_sum(steps: Sequence[tuple[Step, ...]]) -> bool:
    """Whether the first step of some leaves sums them, so that they are copied one by one to where they are sent."""
    return bool(steps and steps[0] and steps[0][0].kind in ("scatter", "sum"))


@cache_on_its_mesh()
def sharding_after(source: NamedSharding, step: Step) -> NamedSharding:
    """Return the sharding after a step."""
    cut = source.spec.axes(step.dim) if step.kind != "sum" else ()
    if step.kind == "gather":
        return replace(source, spec=source.spec.replace(step.dim, cut[: len(cut) - len(step.axes)]))
    left = tuple(axis for axis in source.partial if axis not in step.axes)
    spec = source.spec if step.kind == "sum" else source.spec.replace(step.dim, (*cut, *step.axes))
    return replace(source, spec=spec, partial=left)


def full_lengths(source: NamedSharding, steps: Sequence[Step], shape: tuple[int, ...]) -> tuple[int, ...]:
    """For each step, the length of this rank's piece of the joined dim after a "gather"; 0 for the other kinds.

    Args:
        source: the sharding before the first step.
        shape: the global shape of the leaf.
    """
    sizes: list[int] = []
    for step in steps:
        source = sharding_after(source, step)
        sizes.append(source.local_shape(shape)[step.dim] if step.kind == "gather" else 0)
    return tuple(sizes)
