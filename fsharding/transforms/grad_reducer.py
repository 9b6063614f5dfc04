"""Reduce each unit's gradients over the data axes while backward runs, and accumulate them into the gradient tree.

Gradients of a leaf that is used more than once are summed, an unused leaf has a zero gradient, and accumulated
gradients of earlier microbatches count once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm.buffer_pool import Pool, Spare
from fsharding.comm.grad_memory import GradMemory
from fsharding.comm.handles import Handle, Memory, Places, done, nowhere
from fsharding.comm.leaf_memory import on_device
from fsharding.comm.leaf_wires import LeafIndex
from fsharding.comm.move import Filling, Move, plan_move
from fsharding.comm.streams import streams_for
from fsharding.comm.wires import Plain
from fsharding.mesh.device_mesh import coordinate
from fsharding.sharding.named_sharding import Local, NamedSharding
from fsharding.transforms.gathered_unit import GatheredUnit
from fsharding.transforms.unit_plan import GradTarget, LargeLeaf, ReduceBucket, large_elements

__all__ = ["GradReducer", "TapeLeaf"]

_InUse: TypeAlias = list[Filling]
"""Buckets whose memory the reduce stream may still read; empty on a device with one stream."""


class TapeLeaf(NamedTuple):
    """A sharded leaf of the differentiated tree."""

    path: str
    node: Local  # as the loss function sees it
    target: GradTarget | None  # None for a frozen leaf
    accumulated: Tensor | None  # local gradient of earlier microbatches, added to in place; None without any


class _Pending(NamedTuple):
    """A bucket whose collectives are in flight."""

    handle: Handle[object]  # waits for them, and adds their sums to the gradients
    sends: bool  # False if it has no collectives
    in_use: _InUse  # waiting for `handle` may append the late bucket


class _Gradients:
    """The gradients of a bucket's leaves, to which its sums are added; first sums are written directly into them."""

    def __init__(self, grad_of: Callable[[int], GradMemory], index: Sequence[LeafIndex]) -> None:
        self._grad_of = grad_of
        self._index = index
        self._parts: list[tuple[GradMemory, int | None]] = []
        self._begun: list[tuple[Tensor, bool]] = []

    def places(self) -> Sequence[Tensor] | None:
        """Begin the gradients, full ones before rows; return them if all are still empty: sums are written there."""
        self._parts = [(self._grad_of(leaf), row) for leaf, row in self._index]
        order = sorted(range(len(self._parts)), key=lambda i: self._parts[i][1] is not None)
        begun = {i: self._parts[i][0].begin(self._parts[i][1]) for i in order}
        self._begun = [begun[i] for i in range(len(order))]
        return None if any(has_value for _, has_value in self._begun) else [part for part, _ in self._begun]

    def add(self, sums: list[Tensor]) -> None:
        """Add the sums. Call `places` first."""
        triples = [(has_value, to, term) for (to, has_value), term in zip(self._begun, sums, strict=True)]
        copies = [(to, term) for has_value, to, term in triples if not has_value and term is not to]
        _compat.foreach_copy_([to for to, _ in copies], [term for _, term in copies])
        more = [(to, term) for has_value, to, term in triples if has_value]
        _compat.foreach_add_([to for to, _ in more], [term for _, term in more])
        for grad, row in self._parts:
            grad.end(row)


class GradReducer:
    """The gradients of one call, and the buckets in which they are reduced."""

    # By number of the leaf: `_grads[i]` is the memory of its gradient, from its first use. `_taken[i]` has the rows (or
    # None for all) whose accumulated gradient has been added to a partial gradient, so that it counts once.
    # A bucket is in one of three places. `_open`: it has large gradients, and waits for the rest of its unit.
    # `_pending`: its collectives are in flight, and its sums not added yet; buckets finish in the order of their start,
    # which fixes the order of adds. `_in_use`: on a device with several streams nothing stays pending, because the
    # reduce stream gets all remaining work at once; this keeps the memory until the compute stream has waited for the
    # event `_reduced`. The next gather may take what is in `_spare`, which the reduce stream alone reads until then.

    def __init__(
        self,
        leaves: Mapping[int, TapeLeaf],  # by their numbers in the differentiated tree
        memory: Memory,  # of send buffers
        grad_pool: Pool | None = None,  # memory for large gradients that data axes don't shard, kept between calls
    ) -> None:
        self._leaves = leaves
        self._targets = {i: leaf.target for i, leaf in leaves.items() if leaf.target is not None}
        self._wire_memory = memory
        self._device = memory.device
        self._grad_pool = grad_pool
        self._large = large_elements()
        self._grads: dict[int, GradMemory] = {}
        self._taken: dict[int, set[int | None]] = {}
        self._open: dict[tuple[GatheredUnit, int], Filling] = {}
        self._pending: list[_Pending] = []
        self._streams = streams_for(memory.device)
        self._reduced: Any = None
        self._in_use: _InUse = []
        self._spare: list[Spare] = []

    # --------------------------------------------------------------------------------------------------- from backward
    @torch.no_grad()
    def take(self, unit: GatheredUnit, large: LargeLeaf, grad: Tensor) -> None:
        """Copy a large gradient into its bucket, so that its memory is free, or add it to the values there."""
        # It is complete except for values from `write`; `reduce` follows with the other gradients of the unit.
        bucket = self._open_bucket(unit, large)
        with _compat.region("scatter", unit.name):
            bucket.add([large.slot], [grad])

    @torch.no_grad()
    def write(
        self, unit: GatheredUnit, large: LargeLeaf, dtype: torch.dtype, kernel: Callable[[Tensor], object]
    ) -> bool:
        """Have a kernel fill or add to a large gradient in its bucket; return False if it needs `take` instead."""
        bucket = self._open_bucket(unit, large)
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

    def _open_bucket(self, unit: GatheredUnit, large: LargeLeaf) -> Filling:
        bucket = self._open.get((unit, large.bucket))
        if bucket is None:
            self.settle(wait=False)
            b = unit.plan.reductions[large.bucket]
            bucket = self._open[unit, large.bucket] = self._make_bucket(unit, b, b.early)
        return bucket

    def reduce(self, unit: GatheredUnit, grads: Sequence[Tensor | None]) -> None:
        """Finish the reductions in flight, and start the unit's; None for gradients that are in their bucket."""
        # Of the unit before: its buckets are freed before those of this unit are made, whose backward they overlapped.
        self.settle()
        self._let_go()
        with _compat.region("scatter", unit.name):
            for number, b in enumerate(unit.plan.reductions):
                bucket = self._open.pop((unit, number), None) or self._make_bucket(unit, b, b.early)
                filled = bucket.filled
                rest = [(slot, i) for slot, i in enumerate(b.leaves) if slot not in filled or grads[i] is not None]
                bucket.add([slot for slot, _ in rest], [grads[i] for _, i in rest])
                self._pending.append(self._started(unit, b, bucket))
        if self._streams.several:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give the rest of a unit's reductions to the reduce stream."""
        # Waiting for a handle on the reduce stream only enqueues: collectives, then the adds.
        sent = [pending for pending in self._pending if pending.sends]
        with _compat.region("scatter"):
            for pending in self._pending:
                if not pending.sends:
                    pending.handle.wait()
            with self._streams.on("reduce"):
                for pending in sent:
                    pending.handle.wait()
                if sent:
                    self._reduced = self._streams.record("reduced")
        self._in_use = [used for pending in sent for used in pending.in_use]
        # Where a second collective follows, a gather would wait for that as well.
        alone = [pending.in_use[0].buffer for pending in sent if len(pending.in_use) == 1]
        self._spare = [Spare(x, self._reduced) for x in alone if x is not None]
        self._pending.clear()

    def spare(self) -> list[Spare]:
        """Return the memory that is free after the last reduction, once."""
        spare, self._spare = self._spare, []
        return spare

    def _let_go(self) -> None:
        """Have the compute stream wait for the reductions handed over, and free their memory."""
        if self._reduced is not None:
            self._streams.wait(self._reduced)
            self._reduced = None
        self._in_use.clear()
        self._spare.clear()

    @contextmanager
    def _after_compute(self, what: str) -> Generator[None]:
        """Run the block on the reduce stream, after everything enqueued on the compute stream so far."""
        if not self._streams.several:
            yield
            return
        event = self._streams.record(what)
        with self._streams.on("reduce"):
            self._streams.wait(event)
            yield

    def follow(self, earlier: Callable[[], object]) -> None:
        """Run `earlier` before the first gradient is added, because an earlier reducer adds to the same gradients."""
        assert not self._pending, "a gradient may have been added"
        self._pending.append(_Pending(done(earlier, communicates=True), sends=False, in_use=[]))

    def settle(self, *, wait: bool = True) -> None:
        """Finish the reductions in flight, in the order of their start; without `wait`, up to the first not done."""
        with _compat.region("scatter"):
            while self._pending and (wait or self._pending[0].handle.is_ready()):
                self._pending.pop(0).handle.wait()

    # ------------------------------------------------------------------------------------------------------ one bucket
    def _make_bucket(self, unit: GatheredUnit, b: ReduceBucket, move: Move) -> Filling:
        return move.open(self._device, self._wire_memory, lambda slot: unit.noise(b.leaves[slot], of_term=True))

    def _start(self, bucket: Filling, in_use: _InUse, places: Places = nowhere) -> Handle[list[Tensor]]:
        """Start a move of a filled bucket, on the reduce stream if it sends anything."""
        with self._after_compute("filled") if bucket.sends else nullcontext():
            handle = bucket.start(places)
        if self._streams.several:
            in_use.append(bucket)  # alive until the compute stream, which allocated it, has waited for the last read
        return handle

    def _started(self, unit: GatheredUnit, b: ReduceBucket, bucket: Filling) -> _Pending:
        """Start a bucket; if both moves have steps, the late one starts when the early one is done."""
        # Accumulated gradients are in the sharding between the two moves, so they are added there, and the late move
        # reduces the sum: accumulation costs no extra collective.
        index = [unit.index[i] for i in b.leaves]
        grads = _Gradients(self._grad, index)
        in_use: _InUse = []

        def filled_late(sums: list[Tensor]) -> Filling:
            terms = self._add_accumulated(index, sums)
            late = self._make_bucket(unit, b, b.late)
            late.add(range(len(terms)), terms)
            return late

        def finish_late(sums: list[Tensor]) -> None:
            grads.add(self._start(filled_late(sums), in_use, grads.places).wait())

        if b.early.is_empty and not b.late.is_empty:
            bucket = filled_late(self._start(bucket, in_use).wait())
        if b.early.is_empty or b.late.is_empty:
            return _Pending(self._start(bucket, in_use, grads.places).then(grads.add), bucket.sends, in_use)
        early = self._start(bucket, in_use)
        return _Pending(early.then(finish_late, communicates=True), bucket.sends, in_use)

    def _add_accumulated(self, index: Sequence[LeafIndex], terms: list[Tensor]) -> list[Tensor]:
        """Add the accumulated gradients of some leaves to their partial gradients, and note it in `_taken`."""
        result = list(terms)
        sums: list[int] = []
        for i, (leaf, row) in enumerate(index):
            accumulated = self._leaves[leaf].accumulated
            taken = self._taken.setdefault(leaf, set())
            if accumulated is None or None in taken or row in taken:
                continue
            if row is None and taken:
                rest = [r for r in range(accumulated.shape[0]) if r not in taken]
                result[i] = terms[i].clone()
                result[i][rest] += on_device(accumulated, self._device.type)[rest]
            else:
                result[i] = self._accumulated_part(accumulated, row)
                sums.append(i)
            taken.add(row)
        if sums:
            _compat.foreach_add_([result[i] for i in sums], [terms[i] for i in sums])
        return result

    def _accumulated_part(self, accumulated: Tensor, row: int | None) -> Tensor:
        return on_device(accumulated if row is None else accumulated[row], self._device.type)

    # ----------------------------------------------------------------------------------------------- the gradient tree
    def _grad(self, i: int) -> GradMemory:
        """Return the memory of a leaf's gradient."""
        if i not in self._grads:
            leaf = self._leaves[i]
            target = self._targets[i]
            shape = target.sharding.local_shape(leaf.node.shape)
            large = math.prod(shape) >= self._large
            sharded = any(axis in target.sharding.data_axes for axis in target.sharding.spec.all_axes)
            pool = self._grad_pool if large and not sharded else None
            self._grads[i] = GradMemory(
                target.sharding.memory, shape, target.dtype, self._device, pool=pool, by_row=large and pool is None,
                given=leaf.accumulated if target.accumulated == target.sharding else None,
            )  # fmt: skip
        return self._grads[i]

    def _add(self, i: int, row: int | None, term: Tensor) -> None:
        """Add to a gradient that may have no value yet."""
        grad = self._grad(i)
        part, has_value = grad.begin(row)
        (part if has_value else part.zero_()).add_(term)
        grad.end(row)

    # ---------------------------------------------------------------------------------------------------------- the end
    def add_reduced(self, i: int, grad: Tensor) -> None:
        """Add a gradient from plain autograd: in the sharding of the leaf, and already summed over its ranks."""
        node = self._leaves[i].node
        target = self._targets[i]
        where = coordinate(node.sharding.mesh)
        with self._after_compute("computed"):
            term = on_device(grad, self._device.type).to(target.dtype)
            moved = _moved(term, node.sharding, target.sharding, node.shape)
            # In an unreduced target each rank adds its part, and this sum must count once: on the first rank.
            if all(where.get(axis, 0) == 0 for axis in target.sharding.partial):
                self._add(i, None, moved)

    def finish(self) -> dict[int, Tensor]:
        """Finish all reductions, add accumulated gradients that have not been added, and return all gradients."""
        self.settle()
        with _compat.region("scatter"), self._after_compute("computed"):
            for i in self._targets:
                self._add_rest_of_accumulated(i)
            result = {i: self._grad(i).result() for i in self._targets}
            self._reduced = self._streams.record("gradients")
        self._let_go()
        return result

    def _add_rest_of_accumulated(self, i: int) -> None:
        """Add the rows of an accumulated gradient that `_add_accumulated` has not added."""
        # In the target's sharding the accumulated tensor is the gradient's memory, so nothing is left to add.
        accumulated = self._leaves[i].accumulated
        shape = self._leaves[i].node.shape
        source = self._targets[i].accumulated
        to = self._targets[i].sharding
        taken = self._taken.get(i, set())
        if accumulated is None or source in (None, to) or None in taken:
            return
        if not taken:
            self._add(i, None, _moved(self._accumulated_part(accumulated, None), source, to, shape))
            return
        for row in (row for row in range(accumulated.shape[0]) if row not in taken):
            part = self._accumulated_part(accumulated, row)
            self._add(i, row, _moved(part, source.drop(0), to.drop(0), shape[1:]))

    def close(self) -> None:
        """Free all gradients and buckets."""
        self._grads.clear()
        self._open.clear()
        self._pending.clear()
        self._let_go()


def _moved(x: Tensor, source: NamedSharding, to: NamedSharding, shape: tuple[int, ...]) -> Tensor:
    """Move a local tensor of a leaf of this shape to a different sharding."""
    return plan_move([source], [to], [shape], Plain(x.dtype), x.dtype).run([x])[0]
