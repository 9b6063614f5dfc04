"""From one sharding of a leaf to another along its data axes: scatter, sum, gather, slice, a bucket at a time.

In: two shardings that differ in data axes only, and the local tensors of a bucket. Out: the steps as a cached value,
and the local tensors in the new sharding. Sums go over the inner axes first and over `replica` last.
Law: whatever the steps, each element is the same balanced sum over ranks, so the bits do not depend on the strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fsharding import _compat
from fsharding._compat import cache_on_its_mesh
from fsharding.comm import bucket as buckets
from fsharding.comm.handles import Handle, Memory, Reduction, Terms, done
from fsharding.comm.native_sums import native_reduction
from fsharding.comm.reduce import Noise, PlainTerms
from fsharding.comm.transport import transport_for
from fsharding.comm.wires import Plain, Wire
from fsharding.mesh.device_mesh import Mesh, abstract, axis_group, reduction_group
from fsharding.sharding import boxes
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import PartitionSpec

__all__ = [
    "Step", "SteppedReduction", "begins_with_sum", "has_slots", "kinds_of", "plan_steps", "run_steps", "sharding_after",
    "start_steps", "whole_sizes",
]  # fmt: skip


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
    source, target = source.simplified(), target.simplified()
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
    """Per dim, the minor axes that the target has more, and those that it has no longer."""
    gained: list[tuple[int, tuple[str, ...]]] = []
    lost: list[tuple[int, tuple[str, ...]]] = []
    for dim in dims:
        old, new = source.axes(dim), target.axes(dim)
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        if old[same:]:
            lost.append((dim, old[same:]))
        if new[same:]:
            gained.append((dim, new[same:]))
    return gained, lost


def _runs(axes: tuple[str, ...], unreduced: Sequence[str]) -> list[tuple[str, ...]]:
    """Neighbours that one collective can serve: both unreduced or neither; a minor `replica` stands alone."""
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


def has_slots(leaf: Tensor, steps: Sequence[Step], mesh: Mesh, wire: Wire) -> bool:
    """Whether a kernel can write a large leaf, of which `begins_with_sum`, to where it is sent from.

    Collective over the group of the first step the first time.

    Args:
        leaf: or one like it.
        steps: as planned.
        mesh: with devices.
        wire: of its terms.
    """
    if not wire.has_slots:
        return False
    transport = transport_for(reduction_group(mesh, steps[0].axes), leaf.device)
    return transport.has_slots(leaf.numel(), scatter=steps[0].kind == "scatter")


class SteppedReduction:
    """A `Reduction` of a bucket, whose first sum is followed by more steps.

    Args:
        steps: as planned, for each leaf; of the same `kinds_of`.
        shapes: the local shapes.
        mesh: with devices.
        wire: how the terms of the first sum are sent.
        dtype: in which sums are taken, and of the result.
        device: where buffers live.
        wholes: `whole_sizes` of each leaf; needed when a step gathers.
        large: leaves are worth being added one by one.
        memory: for what is sent.
        native: sums are the backend's own, see `comm.native_sums`; the wire is plain then.
        noise: by number of the leaf, for a wire whose rounding is keyed.

    Attributes:
        memory: the same.
        filled: the leaves that have a term. A kernel that writes into a slot adds its leaf.
    """

    def __init__(
        self,
        steps: Sequence[tuple[Step, ...]],
        shapes: Sequence[tuple[int, ...]],
        mesh: Mesh,
        *,
        wire: Wire,
        dtype: torch.dtype,
        device: torch.device,
        wholes: Sequence[tuple[int, ...]] = (),
        large: bool = False,
        memory: Memory | None = None,
        native: bool = False,
        noise: Noise | None = None,
    ) -> None:
        self._native = native
        self.memory = memory
        self._steps = steps
        self._shapes = shapes
        self._mesh = mesh
        self._wholes = wholes
        self._wire_dtype = wire.dtype
        self._dtype = dtype
        self._device = device
        self.filled: set[int] = set()
        self._terms: dict[int, Tensor] = {}
        """By leaf, where the first step is no sum."""
        self._first: Reduction | None = None
        if begins_with_sum(steps):
            axes, scatter = steps[0][0].axes, steps[0][0].kind == "scatter"
            cuts = tuple((shape, s[0].dim if scatter else 0) for shape, s in zip(shapes, steps, strict=True))
            group, terms = reduction_group(mesh, axes), wire.terms(cuts, _sizes(mesh, axes), scatter=scatter)
            if native and group.process_group is not None and isinstance(terms, PlainTerms):
                self._first = native_reduction(terms, group, device, dtype, memory)
            else:
                transport = transport_for(group, device)
                self._first = transport.reduction(terms, dtype, large=large, memory=memory, noise=noise)

    @property
    def sends(self) -> bool:
        """Whether the first step is a sum, whose terms are copied to where they are sent from."""
        return self._first is not None

    def slot(self, leaf: int, dtype: torch.dtype) -> Tensor | None:
        """See `Reduction`."""
        return None if self._first is None else self._first.slot(leaf, dtype)

    def add(self, leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
        """See `Reduction`; a leaf that is filled has a slot, and the term is added there."""
        first = self._first
        if first is None:
            self._terms.update({i: x for i, x in zip(leaves, terms, strict=True) if x is not None})
            return
        if self.filled.isdisjoint(leaves):
            first.add(leaves, terms)
        else:
            new = [(i, x) for i, x in zip(leaves, terms, strict=True) if i not in self.filled]
            first.add([i for i, _ in new], [x for _, x in new])
            for i, x in zip(leaves, terms, strict=True):
                if i in self.filled and x is not None:
                    slot = first.slot(i, self._wire_dtype)
                    assert slot is not None, "only slots take a second term"
                    slot.add_(x)
        self.filled.update(leaves)

    def start(self) -> Handle[Terms]:
        """See `Reduction`; leaves without a term count as zeros."""
        mesh, native, first = self._mesh, self._native, self._first
        if first is None:
            kind = self._wire_dtype if self._steps and self._steps[0] else self._dtype
            values = [
                _zeros(self._terms.get(i), s, kind, self._device).to(self._dtype) for i, s in enumerate(self._shapes)
            ]
            sums = Terms(lambda into: run_steps(values, self._steps, mesh, self._wholes, into, native=native))
            return done(lambda: sums, communicates=True)
        if len(self.filled) < len(self._shapes):
            empty = [i for i in range(len(self._shapes)) if i not in self.filled]
            first.add(empty, [None] * len(empty))
        handle = first.start()
        later = [steps[1:] for steps in self._steps]
        if not later[0]:
            return handle
        wholes = [sizes[1:] for sizes in self._wholes]

        def continued(terms: Terms) -> Terms:
            return Terms(lambda into: run_steps(terms.sum(None), later, mesh, wholes, into, native=native))

        # Not `then`, which would release the terms before they are summed.
        return Handle(handle, continued, communicates=True)


def _zeros(x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if x is None else x.to(dtype)


def _sizes(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(abstract(mesh).axis_size(axis) for axis in axes)


@cache_on_its_mesh()
def sharding_after(source: NamedSharding, step: Step) -> NamedSharding:
    """The sharding that a step leaves."""
    cut = source.spec.axes(step.dim) if step.kind != "sum" else ()
    if step.kind == "gather":
        return replace(source, spec=source.spec.replace(step.dim, cut[: len(cut) - len(step.axes)]))
    left = tuple(axis for axis in source.partial if axis not in step.axes)
    spec = source.spec if step.kind == "sum" else source.spec.replace(step.dim, (*cut, *step.axes))
    return replace(source, spec=spec, partial=left)


def whole_sizes(source: NamedSharding, steps: Sequence[Step], shape: tuple[int, ...]) -> tuple[int, ...]:
    """For each step, how long this rank's piece of the joined dim is after a "gather"; 0 for the other kinds.

    Args:
        source: the sharding before the first step.
        steps: as planned.
        shape: the global shape of the leaf.
    """
    sizes: list[int] = []
    for step in steps:
        source = sharding_after(source, step)
        sizes.append(source.local_shape(shape)[step.dim] if step.kind == "gather" else 0)
    return tuple(sizes)


def run_steps(
    leaves: Sequence[Tensor],
    steps: Sequence[tuple[Step, ...]],
    mesh: Mesh,
    wholes: Sequence[tuple[int, ...]] = (),
    into: Sequence[Tensor] | None = None,
    *,
    native: bool = False,
) -> list[Tensor]:
    """Takes the steps one after the other, waiting for each.

    Args:
        leaves: local tensors of one dtype.
        steps: as planned, for each leaf; of the same `kinds_of`.
        mesh: with devices.
        wholes: `whole_sizes` of each leaf; needed when a step gathers.
        into: contiguous tensors for the results, of their shapes and dtype. A gather as the last step fills them, a sum
            may; other last steps do not look. A result that is not the tensor that was given is to be copied.
        native: as in `SteppedReduction`.
    """
    return start_steps(leaves, steps, mesh, wholes, into, native=native).wait()


def start_steps(
    leaves: Sequence[Tensor],
    steps: Sequence[tuple[Step, ...]],
    mesh: Mesh,
    wholes: Sequence[tuple[int, ...]] = (),
    into: Sequence[Tensor] | None = None,
    *,
    native: bool = False,
) -> Handle[list[Tensor]]:
    """Starts the first collective of `run_steps`; those that follow it are done when it is waited for.

    Args:
        leaves: as in `run_steps`, and so are the others; they must not change before `wait`.
        steps: of each leaf.
        mesh: with devices.
        wholes: of each leaf.
        into: for the results.
        native: as in `SteppedReduction`.
    """
    current, place = list(leaves), 0
    while steps and place < len(steps[0]) and steps[0][place].kind == "slice":
        axes = steps[0][place].axes
        sizes, index = _sizes(mesh, axes), axis_group(mesh, axes).index
        current = [_slice(x, s[place].dim, sizes, index) for x, s in zip(current, steps, strict=True)]
        place += 1
    left, lengths = [s[place:] for s in steps], [w[place:] for w in wholes]
    if not left or not left[0]:
        return done(lambda: current)
    later, later_lengths = [s[1:] for s in left], [w[1:] for w in lengths]
    last = not later[0]

    def continued(moved: Sequence[Tensor]) -> list[Tensor]:
        return [*moved] if last else run_steps(moved, later, mesh, later_lengths, into, native=native)

    if left[0][0].kind == "gather":
        dims, out = [s[0].dim for s in left], into if last else None
        gather = _gather(current, [w[0] for w in lengths], dims, left[0][0].axes, mesh, out)
        return gather.then(continued, communicates=not last)
    x, shapes = current[0], [tuple(leaf.shape) for leaf in current]
    reduction = SteppedReduction(
        [s[:1] for s in left], shapes, mesh, device=x.device, wire=Plain(x.dtype), dtype=x.dtype, native=native
    )
    reduction.add(range(len(current)), current)
    return reduction.start().then(lambda terms: continued(terms.sum(into if last else None)), communicates=not last)


def _slice(x: Tensor, dim: int, sizes: tuple[int, ...], index: int) -> Tensor:
    places: list[int] = []
    for size in reversed(sizes):
        index, place = divmod(index, size)
        places.insert(0, place)
    begin, end = boxes.nested_chunk(x.shape[dim], list(zip(sizes, places, strict=True)))
    return x.narrow(dim, begin, end - begin)


def _gather(
    leaves: Sequence[Tensor],
    wholes: Sequence[int],
    dims: Sequence[int],
    axes: tuple[str, ...],
    mesh: Mesh,
    into: Sequence[Tensor] | None,
) -> Handle[Sequence[Tensor]]:
    group = axis_group(mesh, axes)
    shapes = [(*x.shape[:d], whole, *x.shape[d + 1 :]) for x, whole, d in zip(leaves, wholes, dims, strict=True)]
    plan = buckets.plan_bucket(tuple(zip(shapes, dims, strict=True)), _sizes(mesh, axes))
    if into is None:
        into = buckets.whole_views(_compat.fresh((plan.size,), leaves[0].dtype, leaves[0].device), plan)
    return transport_for(group, leaves[0].device).all_gather_into(plan, leaves, into)
