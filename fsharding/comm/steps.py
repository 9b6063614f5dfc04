"""From one sharding of a leaf to another along its data axes: scatter, sum, gather, slice, a bucket at a time.

In: two shardings that differ in data axes only, and the local tensors of a bucket. Out: the steps as a cached value,
and the local tensors in the new sharding. Sums go over the inner axes first and over `replica` last.
Law: whatever the steps, each element is the same balanced sum over ranks, so the bits do not depend on the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fsharding import _compat
from fsharding.comm import bucket as buckets
from fsharding.comm.reduce import Shown, can_show, open_terms
from fsharding.comm.transport import Empty, open_gather
from fsharding.mesh.device_mesh import Mesh, abstract, axis_group
from fsharding.mesh_cache import cache_on_its_mesh
from fsharding.sharding import boxes
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import PartitionSpec

__all__ = [
    "Departure", "Step", "Transit", "after", "departs_in_rows", "kinds", "move", "plan_steps", "takes_terms",
    "whole_sizes",
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
        source: what the local tensors are, with the axes whose sum is still open.
        target: what they become; axes that stay partial stay open.
    """
    return _plan_steps(source, target if target.mesh is source.mesh else replace(target, mesh=source.mesh))


@cache_on_its_mesh()
def _plan_steps(source: NamedSharding, target: NamedSharding) -> tuple[Step, ...]:
    source, target = source.simplified(), target.simplified()
    open_axes = [axis for axis in source.partial if axis not in target.partial]
    dims = range(max(len(source.spec), len(target.spec)))
    gained, lost = _changes(source.spec, target.spec, dims)
    steps: list[Step] = []

    def close(axes: Sequence[str]) -> None:
        inner = tuple(axis for axis in axes if axis in open_axes)
        if inner:
            steps.append(Step("sum", inner))
            open_axes[:] = [axis for axis in open_axes if axis not in inner]

    if lost:
        close([axis for axis in open_axes if axis != "replica"])
        close(["replica"])
    steps += [Step("gather", axes, dim) for dim, axes in lost]
    for dim, axes in gained:
        for axis_run in _runs(axes, open_axes):
            if axis_run[0] not in open_axes:
                steps.append(Step("slice", axis_run, dim))
                continue
            if axis_run == ("replica",):
                later = {axis for other, cut in gained if other != dim for axis in cut}
                close([axis for axis in open_axes if axis != "replica" and axis not in later])
            steps.append(Step("scatter", axis_run, dim))
            open_axes[:] = [axis for axis in open_axes if axis not in axis_run]
    close([axis for axis in open_axes if axis != "replica"])
    close(["replica"])
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


def _runs(axes: tuple[str, ...], open_axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Neighbours that one collective can serve: both open or both closed; a minor `replica` stands alone."""
    result: list[tuple[str, ...]] = []
    for axis in axes:
        alone = axis == "replica" and axis == axes[-1]
        if result and not alone and (result[-1][0] in open_axes) == (axis in open_axes):
            result[-1] = (*result[-1], axis)
        else:
            result.append((axis,))
    return result


@dataclass(frozen=True)
class Transit:
    """Local tensors on their way; the first collective is under way.

    Attributes:
        rest: what `finish` does.
        come: whether that has nothing to wait for, and nothing more to send.
    """

    rest: Callable[[Sequence[Tensor] | None], list[Tensor]]
    come: Callable[[], bool]

    def finish(self, into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Waits, does what is left, returns the local tensors in the target sharding.

        Args:
            into: as in `move`.
        """
        return self.rest(into)


def kinds(steps: Sequence[Step]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What two leaves must share to travel together: the kinds and axes of their steps, not the dims."""
    return tuple((step.kind, step.axes) for step in steps)


def departs_in_rows(steps: Sequence[tuple[Step, ...]]) -> bool:
    """Whether the first step of some leaves copies them to where they travel from, one by one."""
    return bool(steps and steps[0] and steps[0][0].kind in ("scatter", "sum"))


def takes_terms(leaf: Tensor, steps: Sequence[Step], mesh: Mesh) -> bool:
    """Whether a large leaf, which `departs_in_rows`, can be computed where it travels from. Collective the first time.

    Args:
        leaf: or one like it.
        steps: as planned.
        mesh: with devices.
    """
    return can_show(leaf.numel(), axis_group(mesh, steps[0].axes), leaf.device, cut=steps[0].kind == "scatter")


class Departure:
    """A bucket that waits for its leaves, which may be put where they travel from as soon as they are there.

    Args:
        steps: as planned, for each leaf; of the same `kinds`.
        shapes: the local shapes.
        mesh: with devices.
        wire_dtype: in which the first sum travels.
        dtype: in which sums are taken, and of the result.
        device: where buffers live.
        wholes: `whole_sizes` of each leaf; needed when a step gathers.
        large: leaves are worth being taken one by one.
        empty: makes a flat buffer from a size and a dtype; by default a fresh one.
    """

    def __init__(
        self,
        steps: Sequence[tuple[Step, ...]],
        shapes: Sequence[tuple[int, ...]],
        mesh: Mesh,
        *,
        wire_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        wholes: Sequence[tuple[int, ...]] = (),
        large: bool = False,
        empty: Empty | None = None,
    ) -> None:
        """Finds the memory for what `departs_in_rows`; nothing is sent."""
        self._steps, self._shapes, self._mesh, self._wholes = steps, shapes, mesh, wholes
        self._wire_dtype, self._dtype, self._device = wire_dtype, dtype, device
        self._there: set[int] = set()
        if not departs_in_rows(steps):
            return
        axes = steps[0][0].axes
        dims = [s[0].dim for s in steps] if steps[0][0].kind == "scatter" else []
        self._first = open_terms(
            shapes, dims, _sizes(mesh, axes), axis_group(mesh, axes),
            wire_dtype=wire_dtype, dtype=dtype, device=device, large=large, empty=empty,
        )  # fmt: skip

    def put(self, number: int, leaf: Tensor) -> None:
        """Copies a leaf to where it travels from, or adds it to what is there; only for what `departs_in_rows`."""
        if number in self._there:
            assert isinstance(self._first, Shown)
            self._first.homes[number].add_(leaf)
        else:
            self._first.fill([number], [leaf])
            self._there.add(number)

    def put_term(self, number: int, dtype: torch.dtype, write: Callable[[Tensor], object]) -> bool:
        """Has a leaf, or a term of it, written to where it travels from.

        Args:
            number: of the leaf.
            dtype: of the term.
            write: fills a tensor of the leaf's shape, whatever is in it.

        Returns:
            Whether it was; what `takes_terms` does not say, or in another dtype, is to be `put`.
        """
        if not isinstance(self._first, Shown) or self._first.homes[number].dtype != dtype:
            return False
        home = self._first.homes[number]
        if number in self._there:
            term = torch.empty_like(home)
            write(term)
            home.add_(term)
        else:
            write(home)
            self._there.add(number)
        return True

    def start(self, leaves: Sequence[Tensor | None]) -> Transit:
        """Starts.

        Args:
            leaves: local tensors in the source sharding; None counts as zeros, and for those that were put.
        """
        steps, mesh = self._steps, self._mesh
        if not departs_in_rows(steps):
            kind = self._wire_dtype if steps and steps[0] else self._dtype
            values = [_zeros(x, s, kind, self._device) for x, s in zip(leaves, self._shapes, strict=True)]
            cast = [x.to(self._dtype) for x in values]
            return Transit(lambda into: move(cast, steps, mesh, self._wholes, into), lambda: False)
        left = [i for i in range(len(leaves)) if i not in self._there]
        self._first.fill(left, [leaves[i] for i in left])
        self._first.start()
        first, rest, later = self._first, [s[1:] for s in steps], [sizes[1:] for sizes in self._wholes]
        return Transit(
            lambda into: move(first.wait_each(None if rest[0] else into), rest, mesh, later, into),
            lambda: not rest[0] and first.come(),
        )


def _zeros(x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if x is None else x.to(dtype)


def _sizes(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(abstract(mesh).axis_size(axis) for axis in axes)


def after(source: NamedSharding, step: Step) -> NamedSharding:
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
        source = after(source, step)
        sizes.append(source.local_shape(shape)[step.dim] if step.kind == "gather" else 0)
    return tuple(sizes)


def move(
    leaves: Sequence[Tensor],
    steps: Sequence[tuple[Step, ...]],
    mesh: Mesh,
    wholes: Sequence[tuple[int, ...]] = (),
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Takes the steps one after the other, waiting for each.

    Args:
        leaves: local tensors of one dtype.
        steps: as planned, for each leaf; of the same `kinds`.
        mesh: with devices.
        wholes: `whole_sizes` of each leaf; needed when a step gathers.
        into: contiguous tensors for the results, of their shapes and dtype. A gather as the last step fills them, a sum
            may; other last steps do not look. A result that is not the tensor that was given is to be copied.
    """
    current = list(leaves)
    for place, step in enumerate(steps[0] if steps else ()):
        sizes, dims = _sizes(mesh, step.axes), [s[place].dim for s in steps]
        home = into if place + 1 == len(steps[0]) else None
        if step.kind == "slice":
            index = axis_group(mesh, step.axes).index
            current = [_slice(x, dim, sizes, index) for x, dim in zip(current, dims, strict=True)]
        elif step.kind == "gather":
            current = _gather(current, [w[place] for w in wholes], dims, step.axes, mesh, home)
        else:
            x = current[0]
            shapes = [tuple(leaf.shape) for leaf in current]
            now = [(s[place],) for s in steps]
            departure = Departure(now, shapes, mesh, device=x.device, wire_dtype=x.dtype, dtype=x.dtype)
            current = departure.start(current).finish(home)
    return current


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
) -> list[Tensor]:
    group = axis_group(mesh, axes)
    shapes = [(*x.shape[:d], whole, *x.shape[d + 1 :]) for x, whole, d in zip(leaves, wholes, dims, strict=True)]
    plan = buckets.plan_bucket(tuple(zip(shapes, dims, strict=True)), _sizes(mesh, axes))
    delivery = open_gather(plan.width, leaves[0].dtype, group, leaves[0].device)
    _compat.foreach_copy_(buckets.piece_views(delivery.mine, plan, group.index), list(leaves))
    delivery.start()
    rows = delivery.wait()
    if into is None:
        joined = buckets.copy_out(rows, _compat.fresh((plan.size,), leaves[0].dtype, leaves[0].device), plan)
    else:
        own = buckets.pieces_of(into, plan, group.index)
        there = group.index if all(map(Tensor.is_set_to, own, leaves)) else None
        joined = buckets.fill(rows, list(into), plan, there=there)
    delivery.done()
    return joined
