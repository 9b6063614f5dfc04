"""Move leaves together from one sharding to another: the plan, and its execution.

In: the steps of some leaves, and their local tensors or terms of a sum. Out: a handle of the local tensors in the new
sharding.
Guarantee: a result has the same bits whether its terms are added one by one or all at once, and whatever else is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm import bucket as buckets
from fsharding.comm.handles import Handle, Memory, Reduction, Terms, done
from fsharding.comm.native_sums import native_reduction
from fsharding.comm.reduce import Noise, PlainTerms
from fsharding.comm.step_agreement import compare_plans
from fsharding.comm.steps import Step, begins_with_sum, full_lengths, plan_steps
from fsharding.comm.transport import transport_for
from fsharding.comm.wires import Plain, Wire, plain_payload, start_gather
from fsharding.mesh.device_mesh import Mesh, abstract, axis_group, reduction_group
from fsharding.sharding import boxes
from fsharding.sharding.named_sharding import NamedSharding

__all__ = ["Filling", "Move", "axis_sizes", "plan_move"]


@dataclass(frozen=True)
class Move:
    """Leaves that are sent together. The same value on every rank of a mesh.

    Attributes:
        mesh: of the leaves.
        steps: of each leaf, as planned; alike but for the dims.
        shapes: of the local tensors before the first step.
        lengths: `full_lengths` of each leaf.
        wire: how terms are sent that are summed in the first step.
        dtype: of the results; sums are taken in it.
        native: sums are the backend's own, see `comm.native_sums`; the wire is plain then.
        large: leaves are worth being added one by one.
    """

    mesh: Mesh
    steps: tuple[tuple[Step, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    lengths: tuple[tuple[int, ...], ...]
    wire: Wire
    dtype: torch.dtype
    native: bool = False
    large: bool = False

    @functools.cached_property
    def outline(self) -> str:
        """What determines the order of collectives, as text: equal on all ranks, whose shards may differ in size."""
        return repr((self.steps, self.wire, self.dtype, self.native, self.large))

    @property
    def is_empty(self) -> bool:
        """Whether there are no steps."""
        return not self.steps or not self.steps[0]

    @functools.cached_property
    def sums_first(self) -> bool:
        """Whether the first step is a sum, so that terms are copied one by one to where they are sent from."""
        return begins_with_sum(self.steps)

    @functools.cached_property
    def rest(self) -> Move:
        """The move after its first step, without shapes. What has been summed is sent as it is."""
        return replace(
            self,
            steps=tuple(steps[1:] for steps in self.steps),
            shapes=(),
            lengths=tuple(lengths[1:] for lengths in self.lengths),
            wire=Plain(self.dtype),
            large=False,
        )

    def has_slots(self, leaf: Tensor) -> bool:
        """Whether a kernel can write a large leaf to where it is sent from. Collective the first time."""
        if self.native or not self.sums_first or not self.wire.has_slots:
            return False
        first = self.steps[0][0]
        transport = transport_for(reduction_group(self.mesh, first.axes), leaf.device)
        return transport.has_slots(leaf.numel(), scatter=first.kind == "scatter")

    def open(self, device: torch.device, memory: Memory | None = None, noise: Noise | None = None) -> Filling:
        """Make room for the terms of a sum; nothing is sent.

        Args:
            noise: by number of the leaf, for a wire whose rounding is keyed.
        """
        return Filling(self, self.shapes, device, memory, noise)

    def start(self, leaves: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> Handle[list[Tensor]]:
        """Start the first collective; those that follow it are done when the handle is waited for.

        Args:
            leaves: local tensors, sent in the one dtype that they have; they must not change before `wait`.
            into: contiguous tensors for the results, of their shapes and dtype. A gather as the last step fills them, a
                sum may; other last steps ignore them. A result that is a different tensor has to be copied.
        """
        if self.is_empty:
            return done(lambda: list(leaves))
        first = self.steps[0][0]
        last = self.rest.is_empty
        dims = [steps[0].dim for steps in self.steps]
        if first.kind == "slice":
            sizes = axis_sizes(self.mesh, first.axes)
            index = axis_group(self.mesh, first.axes).index
            return self.rest.start([_slice(x, dim, sizes, index) for x, dim in zip(leaves, dims, strict=True)], into)
        if first.kind == "gather":
            compare_plans(axis_group(self.mesh, first.axes), leaves[0].device.type, lambda: self.outline)
            lengths = [lengths[0] for lengths in self.lengths]
            gathered = _gather(leaves, lengths, dims, first.axes, self.mesh, into if last else None)
            return gathered.then(lambda x: [*x] if last else self.rest.run(x, into), communicates=not last)
        shapes = [tuple(x.shape) for x in leaves]
        terms = Filling(replace(self, wire=Plain(leaves[0].dtype)), shapes, leaves[0].device)
        terms.add(range(len(leaves)), leaves)
        return terms.start().then(lambda received: received.sum(into), communicates=not last)

    def run(self, leaves: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Take the steps one after the other; see `start`."""
        return self.start(leaves, into).wait()


def plan_move(
    sources: Sequence[NamedSharding],
    targets: Sequence[NamedSharding],
    shapes: Sequence[tuple[int, ...]],
    wire: Wire,
    dtype: torch.dtype,
    *,
    native: bool = False,
    large: bool = False,
) -> Move:
    """Plan a move of leaves whose steps differ in dims only.

    Args:
        sources: of the leaves, at least one; on one mesh.
        wire: see `Move`, as for the arguments that follow.
        native: sums are the backend's own.
        large: leaves are worth being added one by one.
    """
    steps = [plan_steps(source, target) for source, target in zip(sources, targets, strict=True)]
    leaves = [*zip(sources, steps, shapes, strict=True)]
    return Move(
        mesh=sources[0].mesh,
        steps=tuple(steps),
        shapes=tuple(source.local_shape(shape) for source, _, shape in leaves),
        lengths=tuple(full_lengths(*leaf) for leaf in leaves),
        wire=wire,
        dtype=dtype,
        native=native,
        large=large,
    )


class Filling:
    """A `Reduction` of the leaves of a move: the first sum, and the steps after it.

    Args:
        noise: by number of the leaf, for a wire whose rounding is keyed.

    Attributes:
        memory: the same.
        filled: the leaves that have a term. A kernel that writes into a slot adds its leaf.
    """

    def __init__(
        self,
        move: Move,
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
        memory: Memory | None = None,
        noise: Noise | None = None,
    ) -> None:
        self.memory = memory
        self.filled: set[int] = set()
        self._move = move
        self._shapes = shapes
        self._device = device
        self._terms: dict[int, Tensor] = {}
        """By leaf, where the first step is no sum."""
        self._first: Reduction | None = None
        if move.sums_first:
            axes = move.steps[0][0].axes
            scatter = move.steps[0][0].kind == "scatter"
            cuts = tuple((shape, steps[0].dim) for shape, steps in zip(shapes, move.steps, strict=True))
            terms = move.wire.terms(cuts, axis_sizes(move.mesh, axes), scatter=scatter)
            group = reduction_group(move.mesh, axes)
            if move.native and group.process_group is not None and isinstance(terms, PlainTerms):
                self._first = native_reduction(terms, group, device, move.dtype, memory)
            else:
                transport = transport_for(group, device)
                self._first = transport.reduction(terms, move.dtype, large=move.large, memory=memory, noise=noise)

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
                    slot = first.slot(i, self._move.wire.dtype)
                    assert slot is not None, "only slots take a second term"
                    slot.add_(x)
        self.filled.update(leaves)

    def start(self) -> Handle[Terms]:
        """See `Reduction`; leaves without a term count as zeros."""
        move = self._move
        first = self._first
        if first is None and move.is_empty:
            return done(lambda: Terms(self._own), communicates=True)
        if first is None:
            values = [self._value(i, move.wire.dtype) for i in range(len(self._shapes))]
            return done(lambda: Terms(lambda into: move.run(values, into)), communicates=True)
        if len(self.filled) < len(self._shapes):
            empty = [i for i in range(len(self._shapes)) if i not in self.filled]
            first.add(empty, [None] * len(empty))
        compare_plans(reduction_group(move.mesh, move.steps[0][0].axes), self._device.type, lambda: move.outline)
        handle = first.start()
        if move.rest.is_empty:
            return handle

        def continued(terms: Terms) -> Terms:
            return Terms(lambda into: move.rest.run(terms.sum(None), into))

        # Not `then`, which would release the terms before they are summed.
        return Handle(handle, continued, communicates=True)

    def _own(self, into: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the terms unreduced, since the move has no steps. With `into`, the caller's copy casts them."""
        if into is None:
            return [self._value(i, self._move.dtype) for i in range(len(self._shapes))]
        return [self._terms[i] if i in self._terms else x.zero_() for i, x in enumerate(into)]

    def _value(self, leaf: int, sent: torch.dtype) -> Tensor:
        """The term of a leaf that no collective sums first, rounded to the dtype in which it would be sent."""
        dtype = self._move.dtype
        term = self._terms.get(leaf)
        if term is None:
            return torch.zeros(self._shapes[leaf], dtype=dtype, device=self._device)
        return term.to(sent).to(dtype)


def axis_sizes(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return how many ranks there are along each of some axes."""
    return tuple(abstract(mesh).axis_size(axis) for axis in axes)


def _slice(x: Tensor, dim: int, sizes: tuple[int, ...], index: int) -> Tensor:
    places: list[int] = []
    for size in reversed(sizes):
        index, place = divmod(index, size)
        places.insert(0, place)
    begin, end = boxes.nested_chunk(x.shape[dim], list(zip(sizes, places, strict=True)))
    return x.narrow(dim, begin, end - begin)


def _gather(
    leaves: Sequence[Tensor],
    lengths: Sequence[int],
    dims: Sequence[int],
    axes: tuple[str, ...],
    mesh: Mesh,
    into: Sequence[Tensor] | None,
) -> Handle[Sequence[Tensor]]:
    """Gather leaves into `into`, or into memory of their own, which other ranks do not read."""
    shapes = [(*x.shape[:d], length, *x.shape[d + 1 :]) for x, length, d in zip(leaves, lengths, dims, strict=True)]
    payload = plain_payload(leaves[0].dtype, tuple(zip(shapes, dims, strict=True)), axis_sizes(mesh, axes))
    if into is None:
        flat = _compat.fresh((payload.bucket.size,), leaves[0].dtype, leaves[0].device)
        into = buckets.whole_views(flat, payload.bucket)
    results = into
    return start_gather(payload, leaves, mesh, axes, into=results).then(lambda _: results)
