"""Reduce each unit's gradients over the data axes while backward runs, and accumulate them into the gradient tree.

In: gradients of full leaves, one unit at a time; large leaves individually, as soon as they are complete.
Out: the local gradient of each leaf, in the sharding of its target.

A bucket is filled by `take` or `write` (large gradients) and `reduce` (all others), which starts its collectives.
`settle` finishes collectives in the order in which they started, because sums depend on it. Rows of a large stack have
separate memory until all of them are reduced, so that the stacked gradient does not exist beside the activations.

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
from fsharding.comm.codes import Noise
from fsharding.comm.handles import Handle, Memory, Terms, done
from fsharding.comm.leaf_wires import LeafIndex
from fsharding.comm.move import Filling, plan_move
from fsharding.comm.streams import streams_for
from fsharding.comm.wires import Plain
from fsharding.mesh.device_mesh import coordinate
from fsharding.sharding.named_sharding import Local
from fsharding.transforms.unit_plan import GradTarget, LargeLeaf, ReduceBucket, UnitPlan, pooled_from

__all__ = ["GradReducer"]


class _Pending(NamedTuple):
    """A bucket whose collectives are under way.

    Attributes:
        handle: waits for them, and adds their sums to the gradients.
        sends: there are any collectives.
        in_use: buckets and their handles, whose memory is read where a device has several streams; `handle` may add to
            them.
    """

    handle: Handle[object]
    sends: bool
    in_use: list[tuple[Filling, Handle[Terms]]]


class _Reduced(NamedTuple):
    """Buckets that the stream of reductions was given, and the event after which their memory is no longer read."""

    event: Any
    in_use: list[tuple[Filling, Handle[Terms]]]


class _Memory(NamedTuple):
    """The memory of a local gradient.

    Attributes:
        shape: local.
        dtype: of the gradient.
        pool: that it is taken from; None for fresh memory.
        by_row: rows of a stack have memory of their own until all have been reduced.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pool: Pool | None
    by_row: bool


def _no_noise(unit: object) -> Noise | None:
    return None


class GradReducer:
    """See the module.

    Args:
        leaves: all leaves of the differentiated tree, in order; None for a leaf that isn't a DTensor.
        targets: where each gradient goes; None for frozen leaves.
        accumulated: local gradients of earlier microbatches, added to in place; None without any.
        grad_pool: memory for large gradients that data axes don't shard, kept between calls.
        noise_of: returns, for a unit, the numbers for keyed rounding of a leaf's gradient, by its index.
    """

    # By number of the leaf: `_result[i]` is the local gradient, None until it is written; rows that are in memory of
    # their own are in `_rows_apart[i]`. It holds garbage where nothing was written: `_written[i]` has the rows that
    # were, or None for the whole leaf. Leaves in `_accumulating` hold numbers from the start. `_taken[i]` has the rows,
    # or None for all, for which the accumulated gradient has been added to a term, so that it counts once.
    # `_open` has the buckets that have large gradients and wait for the rest of their unit, `_pending` those under way.
    # Where a device has several queues nothing is pending: all that is left to do is given to the queue of reductions
    # at once, and `_reduced` keeps the buckets until the queue that computes has waited for it.

    def __init__(
        self,
        leaves: Sequence[Local | None],
        targets: Sequence[GradTarget | None],
        accumulated: Sequence[Tensor | None],
        memory: Memory,
        device: torch.device,
        grad_pool: Pool | None = None,
        noise_of: Callable[[Any], Noise | None] = _no_noise,
    ) -> None:
        self._leaves = leaves
        self._targets = targets
        self._accumulated = accumulated
        self._wire_memory = memory
        self._device = device
        self._grad_pool = grad_pool
        self._noise_of = noise_of
        self._result: list[Tensor | None] = [
            x if x is not None and target is not None and target.accumulated == target.sharding else None
            for x, target in zip(accumulated, targets, strict=True)
        ]
        self._accumulating = {i for i, x in enumerate(self._result) if x is not None}
        self._pooled_from = pooled_from()
        self._memory: dict[int, _Memory] = {}
        self._rows_apart: dict[int, dict[int, Tensor]] = {}
        self._written: dict[int, set[int | None]] = {}
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
        """Copies a large gradient into its bucket, so that its own memory is free, or adds it to the terms there.

        Args:
            unit: that the leaf belongs to; `reduce` follows, with its other gradients.
            grad: whole, and complete but for the terms that `write` was called with.
        """
        bucket = self._open_bucket(unit, plan, large)
        with _compat.region("scatter"):
            bucket.add([large.slot], [grad])

    @torch.no_grad()
    def write(
        self, unit: Hashable, plan: UnitPlan, large: LargeLeaf, dtype: torch.dtype, kernel: Callable[[Tensor], object]
    ) -> bool:
        """Has a kernel write a large gradient, or a term of it, into its bucket.

        Args:
            kernel: fills a tensor of the leaf's shape, whatever is in it.

        Returns:
            Whether it did; else the term has to come by `take`.
        """
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
        """Finishes the reductions under way, and starts the unit's.

        Args:
            grads: of its leaves, whole; None for those without a gradient, and those that `take` or `write` had all of.
        """
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

    def _start(self, bucket: Filling) -> Handle[Terms]:
        """Starts a reduction on its queue, when the bucket is filled."""
        if not (self._streams.several and bucket.sends):
            return bucket.start()
        filled = self._streams.record("filled")
        with self._streams.on("reduce"):
            self._streams.wait(filled)
            return bucket.start()

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
        """Starts a bucket; the steps that follow its first collective come when that is done."""
        first = self._start(bucket)
        several = self._streams.several
        in_use = [(bucket, first)] if several else []

        def accumulate(terms: Terms) -> None:
            self._accumulate(index, terms)

        if b.late.is_empty:
            return _Pending(first.then(accumulate), bucket.sends, in_use)

        def start_late(first: Terms) -> Handle[Terms]:
            terms = self._add_accumulated(index, first.sum(None))
            late = b.late.open(self._device, self._memory_of_bucket(), self._noise(unit, b))
            late.add(range(len(terms)), terms)
            handle = self._start(late)
            if several:
                in_use.append((late, handle))
            return handle

        if not b.early.is_empty:
            both = first.then(lambda terms: accumulate(start_late(terms).wait()), communicates=True)
            return _Pending(both, bucket.sends, in_use)
        late = start_late(first.wait())
        sends = bool(in_use) and in_use[-1][0].sends
        return _Pending(late.then(accumulate), sends, in_use)

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
                result[i][rest] += accumulated[rest]
            else:
                result[i] = accumulated if row is None else accumulated[row]
                sums.append(i)
            taken.add(row)
        if sums:
            _compat.foreach_add_([result[i] for i in sums], [terms[i] for i in sums])
        return result

    def _accumulate(self, index: Sequence[LeafIndex], reduced: Terms) -> None:
        """Sums the terms of gradients, and adds them to the result; first ones are summed right into it."""
        added: list[bool] = []
        for leaf, row in index:
            written = self._written.setdefault(leaf, set())
            if row is None and written:
                self._fill_with_zeros(leaf)
            added.append(leaf in self._accumulating or None in written or row in written)
            written.add(row)
        results = [self._view_of(i) for i in index]
        terms = reduced.sum(None if any(added) else results)
        triples = list(zip(added, results, terms, strict=True))
        copies = [(to, term) for has_some, to, term in triples if not has_some and term is not to]
        _compat.foreach_copy_([to for to, _ in copies], [term for _, term in copies])
        _compat.foreach_add_(
            [to for has_some, to, _ in triples if has_some], [term for has_some, _, term in triples if has_some]
        )

    # ----------------------------------------------------------------------------------------------- the gradient tree
    def _fill_with_zeros(self, leaf: int) -> Tensor:
        """The gradient of a leaf, zero where nothing was written."""
        result = self._view_of(LeafIndex(leaf, None))
        written = self._written.setdefault(leaf, set())
        if leaf not in self._accumulating and None not in written:
            blank = [result[row] for row in range(result.shape[0]) if row not in written] if written else [result]
            _compat.foreach_zero_(blank)
            written.add(None)
        return result

    def _view_of(self, index: LeafIndex) -> Tensor:
        """The memory of a gradient, or of a row of it; garbage until it is written."""
        leaf, row = index
        result = self._result[leaf]
        if result is None:
            memory = self._memory_of(leaf)
            if row is not None and memory.by_row:
                rows = self._rows_apart.setdefault(leaf, {})
                if row not in rows:
                    rows[row] = _compat.fresh(memory.shape[1:], memory.dtype, self._device)
                return rows[row]
            result = self._result[leaf] = self._allocate(memory)
            rows = self._rows_apart.pop(leaf, {})
            _compat.foreach_copy_([result[number] for number in rows], [*rows.values()])
        return result if row is None else result[row]

    def _memory_of(self, i: int) -> _Memory:
        memory = self._memory.get(i)
        if memory is None:
            leaf = self._leaves[i]
            target = self._targets[i]
            assert leaf is not None and target is not None
            shape = target.sharding.local_shape(leaf.shape)
            large = math.prod(shape) >= self._pooled_from
            cut = any(axis in target.sharding.data_axes for axis in target.sharding.spec.all_axes)
            pool = self._grad_pool if large and not cut else None
            memory = self._memory[i] = _Memory(shape, target.dtype, pool, by_row=large and pool is None)
        return memory

    def _allocate(self, memory: _Memory) -> Tensor:
        if memory.pool is None:
            return _compat.fresh(memory.shape, memory.dtype, self._device)
        return memory.pool.take(math.prod(memory.shape), memory.dtype, self._device).view(memory.shape)

    # ---------------------------------------------------------------------------------------------------------- the end
    def add_reduced(self, i: int, grad: Tensor) -> None:
        """Adds a gradient that came through plain autograd, in the sharding of the leaf and summed over its ranks."""
        leaf = self._leaves[i]
        target = self._targets[i]
        assert leaf is not None and target is not None
        move = plan_move([leaf.sharding], [target.sharding], [leaf.shape], Plain(target.dtype), target.dtype)
        where = coordinate(move.mesh)
        with self._after_compute():
            result = self._fill_with_zeros(i)
            moved = move.run([grad.to(target.dtype)])[0]
            # Of an unreduced target it is one term: the first rank's.
            if all(where.get(axis, 0) == 0 for axis in target.sharding.partial):
                result.add_(moved)

    def finish(self) -> list[Tensor | None]:
        """Finishes all reductions, and adds what was accumulated for leaves that had no gradient this time.

        Returns:
            The local gradient of each leaf, zeros where nothing came, None for frozen leaves.
        """
        self.settle()
        with _compat.region("scatter"), self._after_compute():
            for i, (leaf, target) in enumerate(zip(self._leaves, self._targets, strict=True)):
                if leaf is not None and target is not None:
                    self._add_rest_of_accumulated(i, leaf, target)
            self._reduced.append(_Reduced(self._streams.record("gradients"), []))
        self._let_go(self._reduced)
        return list(self._result)

    def _add_rest_of_accumulated(self, i: int, leaf: Local, target: GradTarget) -> None:
        """Adds the rows of an accumulated gradient, in another sharding than the target, that no term has taken."""
        result = self._fill_with_zeros(i)
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
            part = accumulated if row is None else accumulated[row]
            moved = plan_move([source], [to], [shape], Plain(part.dtype), part.dtype).run([part])[0]
            (result if row is None else result[row]).add_(moved)

    def close(self) -> None:
        """Releases all gradients, and the buckets that they are sent in."""
        self._result.clear()
        self._rows_apart.clear()
        self._open.clear()
        self._pending.clear()
        self._reduced.clear()
        self._noise_of = _no_noise  # a context's own holds the context, which holds this
