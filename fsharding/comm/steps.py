r"""Plan the steps between two shardings of a leaf that differ along data axes.

    from \ to            full          sharded on dim d    sharded on dim e      unreduced
    full                 -             slice d             slice e               not possible
    sharded on dim d     gather d      -                   gather d, slice e     not possible
    unreduced            sum           scatter d           scatter e             -

The table is for one axis. gather: all-gather. sum: all-reduce. scatter: reduce-scatter. slice: sends nothing.
With ordered sums, each element is the same balanced sum over ranks for any steps, so bits don't depend on a strategy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsharding.base._compat import cache_on_its_mesh
from fsharding.comm.wires import Parts, Wire
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import PartitionSpec

__all__ = ["LeafSteps", "Step", "begins_with_sum", "kinds_of", "sharding_after", "steps_of"]


@dataclass(frozen=True)
class Step:
    """One collective or slice."""

    kind: str  # "scatter", "sum", "gather" or "slice"
    axes: tuple[str, ...]  # axes of its group, major first
    dim: int = -1  # tensor dim that is sharded or joined; -1 for "sum"


@cache_on_its_mesh
def _plan_steps(source: NamedSharding, target: NamedSharding) -> tuple[Step, ...]:
    """Plan the steps from one sharding to another on one mesh; axes over which `target` is unreduced aren't summed."""
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
            for axis in inner:
                unreduced.remove(axis)

    # `replica` has the slowest links, so it comes after the inner axes, when partial sums are smallest. The tree of
    # additions is the same whether inner axes are scattered or summed.
    if lost:
        # Sums come before gathers, which would otherwise send every unreduced value.
        sum_over([axis for axis in unreduced if axis != "replica"])
        sum_over(["replica"])
    # Gathers come before slices and scatters: an axis that moves to a different dim has to leave its dim first.
    steps += [Step("gather", axes, dim) for dim, axes in lost]
    for dim, axes in gained:
        for axis_run in _runs(axes, unreduced):
            if axis_run[0] not in unreduced:
                steps.append(Step("slice", axis_run, dim))
                continue
            if axis_run == ("replica",):
                # Inner axes come first here too, except those that a scatter of a different dim sums anyway.
                later = {axis for other, new in gained if other != dim for axis in new}
                sum_over([axis for axis in unreduced if axis != "replica" and axis not in later])
            steps.append(Step("scatter", axis_run, dim))
            for axis in axis_run:
                unreduced.remove(axis)
    sum_over([axis for axis in unreduced if axis != "replica"])
    sum_over(["replica"])
    return tuple(steps)


def _changes(
    source: PartitionSpec, target: PartitionSpec, dims: range
) -> tuple[list[tuple[int, tuple[str, ...]]], list[tuple[int, tuple[str, ...]]]]:
    """Return (gained, lost): per dim, the axes of target and of source that follow the major axes both share."""
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
    """Group neighboring axes that one collective can serve; a minor `replica` always has its own collective."""
    result: list[tuple[str, ...]] = []
    for axis in axes:
        alone = axis == "replica" and axis == axes[-1]
        if result and not alone and (result[-1][0] in unreduced) == (axis in unreduced):
            result[-1] = (*result[-1], axis)
        else:
            result.append((axis,))
    return result


def kinds_of(steps: Sequence[Step]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the key that leaves of one bucket share: the kinds and axes of their steps, not the dims."""
    return tuple((step.kind, step.axes) for step in steps)


def begins_with_sum(steps: Sequence[Step]) -> bool:
    """Whether the first step sums leaves, so that partial gradients are copied into its send buffer one by one."""
    return bool(steps) and steps[0].kind in ("scatter", "sum")


@cache_on_its_mesh
def sharding_after(source: NamedSharding, step: Step) -> NamedSharding:
    """Return the sharding after a step."""
    partial = tuple(axis for axis in source.partial if axis not in step.axes)
    if step.kind == "sum":
        return replace(source, partial=partial)
    # A gather removes the minor axes of a dim; the others append to them.
    axes = source.spec.axes(step.dim)
    axes = axes[: len(axes) - len(step.axes)] if step.kind == "gather" else (*axes, *step.axes)
    return replace(source, spec=source.spec.replace(step.dim, axes), partial=partial)


@dataclass(frozen=True)
class LeafSteps:
    """The steps of one leaf."""

    # Neither sharding has assigned ranks: both are on the slice of the mesh that holds the leaf.
    source: NamedSharding
    target: NamedSharding
    shape: tuple[int, ...]  # global shape on that slice
    steps: tuple[Step, ...]

    @functools.cached_property
    def local(self) -> tuple[int, ...]:
        """Shape of the local tensor before the first step."""
        return self.source.local_shape(self.shape)

    @functools.cached_property
    def received(self) -> tuple[int, ...]:
        """Shape of the local tensor after the last step."""
        return self.target.local_shape(self.shape)

    @functools.cached_property
    def size(self) -> int:
        """Most elements before and after the steps, on any rank, so that all ranks plan the same buckets."""
        return max(math.prod(x.first_shape(self.shape)) for x in (self.source, self.target))

    @functools.cached_property
    def rest(self) -> LeafSteps:
        """The leaf after its first step."""
        after = sharding_after(self.source, self.steps[0]) if self.steps else self.target
        return LeafSteps(after, self.target, self.shape, self.steps[1:])

    @functools.cached_property
    def slice(self) -> tuple[int, int, int]:
        """Arguments of `Tensor.narrow` for the first step, a slice: dim, start and length in the local tensor."""
        dim = self.steps[0].dim
        before, after = (sharding.box(self.shape)[dim] for sharding in (self.source, self.rest.source))
        return dim, after[0] - before[0], after[1] - after[0]

    @functools.cached_property
    def _parts(self) -> dict[Wire, Parts]:
        return {}

    def parts(self, wire: Wire) -> Parts:
        """Plan the tensors that a wire sends in the first step, a gather; without steps, those it encodes to."""
        found = self._parts.get(wire)
        if found is None:
            dim = self.steps[0].dim if self.steps else 0
            found = self._parts[wire] = wire.parts(self.shape, self.source, self.rest.source, dim)
        return found


def steps_of(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> LeafSteps:
    """Plan the steps of a leaf from one sharding to another, on the mesh object of the first."""
    return _steps_of(source, target if target.mesh is source.mesh else replace(target, mesh=source.mesh), shape)


@cache_on_its_mesh
def _steps_of(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> LeafSteps:
    return LeafSteps(source.simplified(), target.simplified(), shape, _plan_steps(source, target))
