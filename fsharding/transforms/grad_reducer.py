"""Reduce each unit's gradients over the data axes while backward runs, and accumulate them into the gradient tree.

Guarantee: gradients of a leaf that is used more than once are summed, the gradient of an unused leaf is zero, and
accumulated gradients of earlier microbatches count once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm.buffer_pool import Pool, PoolMemory
from fsharding.comm.grad_memory import GradMemory
from fsharding.comm.handles import Handle, Memory, Places, done, nowhere
from fsharding.comm.leaf_memory import on_device
from fsharding.comm.leaf_wires import LeafIndex
from fsharding.comm.move import Filling, plan_move
from fsharding.comm.reduce import Noise
from fsharding.comm.streams import streams_for
from fsharding.comm.wires import Plain
from fsharding.mesh.device_mesh import coordinate
from fsharding.sharding.named_sharding import Local
from fsharding.transforms.unit_plan import GradTarget, LargeLeaf, ReduceBucket, UnitPlan, pooled_from

__all__ = ["GradReducer"]


class _Pending(NamedTuple):
    """A bucket whose collectives are under way."""

    handle: Handle[object]  # waits for them, and adds their sums to the gradients
    sends: bool  # there are any collectives
    # buckets and their handles, whose memory is read where a device has several streams; `handle` may add to them
    in_use: list[tuple[Filling, Handle[list[Tensor]]]]


class _Reduced(NamedTuple):
    """Buckets that the stream of reductions was given, and the event after which their memory is no longer read."""

    event: Any
    in_use: list[tuple[Filling, Handle[list[Tensor]]]]


class _Gradients:
    """The gradients of the leaves of a bucket, to which its sums are added; first ones are summed right into them."""

    def __init__(self, grad_of: Callable[[int], GradMemory], index: Sequence[LeafIndex]) -> None:
        self._grad_of = grad_of
        self._index = index
        self._parts: list[tuple[GradMemory, int | None]] = []
        self._begun: list[tuple[Tensor, bool]] = []

    def places(self) -> Sequence[Tensor] | None:
        """See `Places`: a sum may be written to a gradient that has no value yet."""
        self._parts = [(self._grad_of(leaf), row) for leaf, row in self._index]
        self._begun = [grad.begin(row) for grad, row in self._parts]
        return None if any(has_value for _, has_value in self._begun) else [part for part, _ in self._begun]

    def add(self, sums: list[Tensor]) -> None:
        """Add the sums, after `places`."""
        triples = [(has_value, to, term) for (to, has_value), term in zip(self._begun, sums, strict=True)]
        copies = [(to, term) for has_value, to, term in triples if not has_value and term is not to]
        _compat.foreach_copy_([to for to, _ in copies], [term for _, term in copies])
        more = [(to, term) for has_value, to, term in triples if has_value]
        _compat.foreach_add_([to for to, _ in more], [term for _, term in more])
        for grad, row in self._parts:
            grad.end(row)


def _no_noise(unit: object) -> Noise | None:
    return None


class GradReducer:
    """See the module."""

    # By number of the leaf: `_grads[i]` is the memory of its gradient, from its first use. `_taken[i]` has the rows,
    # or None for all, for which the accumulated gradient has been added to a term, so that it counts once.
    # `_open` has the buckets that have large gradients and wait for the rest of their unit, `_pending` those under way.
    # Where a device has several queues nothing is pending: all that is left to do is given to the queue of reductions
    # at once, and `_reduced` keeps the buckets until the queue that computes has waited for it.

    def __init__(
        self,
        # All leaves of the differentiated tree, in order; None for a leaf that isn't a DTensor.
        leaves: Sequence[Local | None],
        targets: Sequence[GradTarget | None],  # where each gradient goes; None for frozen leaves
        # Local gradients of earlier microbatches, added to in place; None without any.
        accumulated: Sequence[Tensor | None],
        memory: Memory,
        device: torch.device,
        grad_pool: Pool | None = None,  # memory for large gradients that data axes don't shard, kept between calls
        # Returns, for a unit, the numbers for keyed rounding of a leaf's gradient, by its index.
        noise_of: Callable[[Any], Noise | None] = _no_noise,
    ) -> None:
        self._leaves = leaves
        self._targets = targets
        self._accumulated = accumulated
        self._wire_memory = memory
        self._device = device
        self._grad_pool = grad_pool
        self._noise_of = noise_of
        self._pooled_from = pooled_from()
        self._grads: dict[int, GradMemory] = {}
        self._taken: dict[int, set[int | None]] = {}
        self._open: dict[tuple[Hashable, int], Filling] = {}
        self._pending: list[_Pending] = []
        self._streams = streams_for(device)
        if grad_pool is not None:
            grad_pool.retire_all()  # gradients of earlier calls that the caller has freed
        self._reduced: list[_Reduced] = []

    # --------------------------------------------------------------------------------------------------- from backward
    @torch.no_grad()
    def take(self, unit: Hashable, plan: UnitPlan, large: LargeLeaf, grad: Tensor) -> None:
        """Copy a large gradient into its bucket, so that its own memory is free, or add it to the terms there."""
        # It is complete but for terms from `write`; `reduce` follows, with the other gradients of the unit.
        bucket = self._open_bucket(unit, plan, large)
        with _compat.region("scatter"):
            bucket.add([large.slot], [grad])

    @torch.no_grad()
    def write(
        self, unit: Hashable, plan: UnitPlan, large: LargeLeaf, dtype: torch.dtype, kernel: Callable[[Tensor], object]
    ) -> bool:
        """Have a kernel fill a large gradient, or a term of it, in its bucket; if False, it has to come by `take`."""
        bucket = self._open_bucket(unit, plan, large)
        slot = bucket.slot(large.slot, dtype)
        if slot is None:
            return False
        if large.slot in bucket.filled:
            term = torch.empty_like(slot)
            kernel(term)
            slot.add_(term)
        else:
            kernel(slot)
            bucket.filled.add(large.slot)
        return True

    def _open_bucket(self, unit: Hashable, plan: UnitPlan, large: LargeLeaf) -> Filling:
        bucket = self._open.get((unit, large.bucket))
        if bucket is None:
            self.settle(wait=False)
            bucket = self._make_bucket(unit, plan, plan.reductions[large.bucket])
            self._open[unit, large.bucket] = bucket
        return bucket

    def reduce(
        self, unit: Hashable, plan: UnitPlan, index: Sequence[LeafIndex], grads: Sequence[Tensor | None]
    ) -> None:
        """Finish the reductions in flight, and start the unit's; None where `take` or `write` had all of a gradient."""
        self.settle()
        with _compat.region("scatter"):
            for number, b in enumerate(plan.reductions):
                bucket = self._open.pop((unit, number), None) or self._make_bucket(unit, plan, b)
                filled = bucket.filled
                rest = [(slot, i) for slot, i in enumerate(b.leaves) if slot not in filled or grads[i] is not None]
                bucket.add([slot for slot, _ in rest], [grads[i] for _, i in rest])
                self._pending.append(self._finish_later(unit, plan, b, [index[i] for i in b.leaves], bucket))
        if self._streams.several:
            self._hand_over()

    def _hand_over(self) -> None:
        """Gives what is left to do for a unit to the queue of reductions, and waits for the unit before."""
        sent = [pending for pending in self._pending if pending.sends]
        with _compat.region("scatter"):
            for pending in self._pending:
                if not pending.sends:
                    pending.handle.wait()
            with self._streams.on("reduce"):
                for pending in sent:
                    pending.handle.wait()
                event = self._streams.record("reduced") if sent else None
        self._pending.clear()
        before = self._reduced
        if sent:
            self._reduced = [_Reduced(event, [used for pending in sent for used in pending.in_use])]
            self._let_go(before)

    def _let_go(self, reduced: list[_Reduced]) -> None:
        """Has the queue that computes wait for reductions, and lets their memory go."""
        memories = [bucket.memory for _, in_use in reduced for bucket, _ in in_use]
        for event in [event for event, _ in reduced]:  # no name is left that would hold a bucket
            self._streams.wait(event)
        reduced.clear()
        for memory in memories:
            if isinstance(memory, PoolMemory):
                memory.retire()

    @contextmanager
    def _after_compute(self) -> Generator[None]:
        """The queue of reductions, after all that the one that computes was given so far."""
        if not self._streams.several:
            yield
            return
        computed = self._streams.record("computed")
        with self._streams.on("reduce"):
            self._streams.wait(computed)
            yield

    def _start(self, bucket: Filling, places: Places = nowhere) -> Handle[list[Tensor]]:
        """Start a reduction on its stream, when the bucket is filled."""
        if not (self._streams.several and bucket.sends):
            return bucket.start(places)
        filled = self._streams.record("filled")
        with self._streams.on("reduce"):
            self._streams.wait(filled)
            return bucket.start(places)

    def follow(self, earlier: Callable[[], object]) -> None:
        """Run `earlier` before the first gradient is added, since another reducer adds to the same gradients."""
        assert not self._pending, "a gradient may have been added"
        self._pending.append(_Pending(done(earlier, communicates=True), sends=False, in_use=[]))

    def settle(self, *, wait: bool = True) -> None:
        """Finishes the reductions under way, in the order of their start; without `wait`, up to the first not done."""
        with _compat.region("scatter"):
            while self._pending and (wait or self._pending[0].handle.is_ready()):
                self._pending.pop(0).handle.wait()

    # ------------------------------------------------------------------------------------------------------ one bucket
    def _make_bucket(self, unit: Hashable, plan: UnitPlan, b: ReduceBucket) -> Filling:
        return b.early.open(self._device, self._memory_of_bucket(), self._noise(unit, b))

    def _memory_of_bucket(self) -> Memory:
        memory = self._wire_memory
        return memory.of_one_user() if self._streams.several and isinstance(memory, PoolMemory) else memory

    def _noise(self, unit: Hashable, b: ReduceBucket) -> Noise | None:
        noise = self._noise_of(unit)
        return None if noise is None else lambda slot: noise(b.leaves[slot])

    def _finish_later(
        self,
        unit: Hashable,
        plan: UnitPlan,
        b: ReduceBucket,
        index: Sequence[LeafIndex],
        bucket: Filling,
    ) -> _Pending:
        """Start a bucket; the steps that follow its first collective come when that is done."""
        grads = _Gradients(self._grad, index)
        several = self._streams.several
        if b.late.is_empty:
            handle = self._start(bucket, grads.places)
            return _Pending(handle.then(grads.add), bucket.sends, [(bucket, handle)] if several else [])
        first = self._start(bucket)
        in_use = [(bucket, first)] if several else []

        def start_late(sums: list[Tensor]) -> tuple[Filling, Handle[list[Tensor]]]:
            terms = self._add_accumulated(index, sums)
            late = b.late.open(self._device, self._memory_of_bucket(), self._noise(unit, b))
            late.add(range(len(terms)), terms)
            started = late, self._start(late, grads.places)
            if several:
                in_use.append(started)  # another stream reads it until `_hand_over` has recorded its event
            return started

        if b.early.is_empty:
            late, handle = start_late(first.wait())
            return _Pending(handle.then(grads.add), late.sends, in_use)
        both = first.then(lambda sums: grads.add(start_late(sums)[1].wait()), communicates=True)
        return _Pending(both, bucket.sends, in_use)

    def _add_accumulated(self, index: Sequence[LeafIndex], terms: list[Tensor]) -> list[Tensor]:
        """Adds what earlier microbatches have accumulated for some leaves to their terms, and notes it in `_taken`."""
        result = list(terms)
        sums: list[int] = []
        for i, (leaf, row) in enumerate(index):
            accumulated = self._accumulated[leaf]
            taken = self._taken.setdefault(leaf, set())
            if accumulated is None or None in taken or row in taken:
                continue
            if row is None and taken:
                rest = [r for r in range(accumulated.shape[0]) if r not in taken]
                result[i] = terms[i].clone()
                result[i][rest] += on_device(accumulated, self._device.type)[rest]
            else:
                result[i] = on_device(accumulated if row is None else accumulated[row], self._device.type)
                sums.append(i)
            taken.add(row)
        if sums:
            _compat.foreach_add_([result[i] for i in sums], [terms[i] for i in sums])
        return result

    # ----------------------------------------------------------------------------------------------- the gradient tree
    def _grad(self, i: int) -> GradMemory:
        """The memory of the gradient of a leaf."""
        if i not in self._grads:
            leaf = self._leaves[i]
            target = self._targets[i]
            assert leaf is not None and target is not None
            shape = target.sharding.local_shape(leaf.shape)
            given = self._accumulated[i] if target.accumulated == target.sharding else None
            large = math.prod(shape) >= self._pooled_from
            cut = any(axis in target.sharding.data_axes for axis in target.sharding.spec.all_axes)
            pool = self._grad_pool if large and not cut else None
            self._grads[i] = GradMemory(
                target.sharding.memory,
                shape,
                target.dtype,
                self._device,
                pool=pool,
                by_row=large and pool is None,
                given=given,
            )
        return self._grads[i]

    def _add(self, i: int, row: int | None, term: Tensor) -> None:
        """Add a term to a gradient that may have no value yet."""
        grad = self._grad(i)
        part, has_value = grad.begin(row)
        (part if has_value else part.zero_()).add_(term)
        grad.end(row)

    # ---------------------------------------------------------------------------------------------------------- the end
    def add_reduced(self, i: int, grad: Tensor) -> None:
        """Adds a gradient that came through plain autograd, in the sharding of the leaf and summed over its ranks."""
        leaf = self._leaves[i]
        target = self._targets[i]
        assert leaf is not None and target is not None
        move = plan_move([leaf.sharding], [target.sharding], [leaf.shape], Plain(target.dtype), target.dtype)
        where = coordinate(move.mesh)
        with self._after_compute():
            moved = move.run([on_device(grad, self._device.type).to(target.dtype)])[0]
            # Of an unreduced target it is one term: the first rank's.
            if all(where.get(axis, 0) == 0 for axis in target.sharding.partial):
                self._add(i, None, moved)

    def finish(self) -> list[Tensor | None]:
        """Finish all reductions, add what was accumulated for leaves without a gradient, and return gradients."""
        self.settle()
        with _compat.region("scatter"), self._after_compute():
            for i, (leaf, target) in enumerate(zip(self._leaves, self._targets, strict=True)):
                if leaf is not None and target is not None:
                    self._add_rest_of_accumulated(i, leaf, target)
            pairs = enumerate(zip(self._leaves, self._targets, strict=True))
            result = [None if leaf is None or to is None else self._grad(i).result() for i, (leaf, to) in pairs]
            self._reduced.append(_Reduced(self._streams.record("gradients"), []))
        self._let_go(self._reduced)
        return result

    def _add_rest_of_accumulated(self, i: int, leaf: Local, target: GradTarget) -> None:
        """Adds the rows of an accumulated gradient, in another sharding than the target, that no term has taken."""
        accumulated = self._accumulated[i]
        taken = self._taken.get(i, set())
        if accumulated is None or target.accumulated in (None, target.sharding) or None in taken:
            return
        for row in (row for row in range(accumulated.shape[0]) if row not in taken) if taken else (None,):
            source = target.accumulated
            to = target.sharding
            shape = leaf.shape
            if row is not None:
                source = source.drop(0)
                to = to.drop(0)
                shape = shape[1:]
            part = on_device(accumulated if row is None else accumulated[row], self._device.type)
            moved = plan_move([source], [to], [shape], Plain(part.dtype), part.dtype).run([part])[0]
            self._add(i, row, moved)

    def close(self) -> None:
        """Releases all gradients, and the buckets that they are sent in."""
        self._grads.clear()
        self._open.clear()
        self._pending.clear()
        self._reduced.clear()
        self._noise_of = _no_noise  # a context's own holds the context, which holds this
