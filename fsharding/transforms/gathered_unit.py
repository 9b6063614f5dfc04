"""One use of a unit: all-gather its shards, release the full leaves, and gather them again for backward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from enum import Enum

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.base.errors import TransformError, report
from fsharding.comm.buffer_pool import PoolMemory
from fsharding.comm.handles import Handle
from fsharding.comm.leaf_memory import on_device, read_ahead
from fsharding.comm.leaf_wires import LeafIndex, LeafWires
from fsharding.comm.move import Moved
from fsharding.comm.streams import streams_for
from fsharding.comm.wires import WholeLeaf
from fsharding.sharding.named_sharding import Local
from fsharding.transforms.unit_plan import UnitGather, UnitPlan, whole

__all__ = ["GatheredUnit", "UnitState"]


class UnitState(Enum):
    """State of the full leaves of a unit."""

    PLANNED = "nothing has been sent"
    GATHERING = "all-gathers are in flight"
    ALIVE = "full leaves are in buffers"
    RELEASED = "this unit holds no buffers"


# Allowed transitions, and the call that makes each; anything else is a bug of the runtime.
_FOLLOWS = {
    (UnitState.PLANNED, UnitState.GATHERING),  # start: ahead of its use, or when it is used
    (UnitState.GATHERING, UnitState.ALIVE),  # wait
    (UnitState.GATHERING, UnitState.RELEASED),  # release of a unit that was prefetched but not used, or after a failure
    (UnitState.ALIVE, UnitState.RELEASED),  # release: forward has left it, or all its gradients are complete
    (UnitState.RELEASED, UnitState.GATHERING),  # start: backward needs it again
    (UnitState.RELEASED, UnitState.RELEASED),  # release is idempotent after forward
}


class GatheredUnit:
    """One use of a unit: `start`, `wait`, `release`; then `start` again if backward needs it."""

    # All-gathers and decoding run on the gather stream. On a device with streams, `wait` never blocks the host.

    def __init__(
        self,
        plan: UnitPlan,
        leaves: Sequence[Local],
        index: tuple[LeafIndex, ...],  # the places of its leaves in the parameter tree
        memory: PoolMemory,  # memory of the buffers; shards may be in other memory
        *,
        name: str,
        # Called each time before its all-gathers start, with how many of them send something.
        starts: Callable[[GatheredUnit, int], object],
        wires: LeafWires,
        site: tuple[str, int] | None = None,  # file and line of the user's call; None if ranks don't compare units
    ) -> None:
        self.plan = plan
        self.leaves = leaves
        self.index = index
        self.name = name
        self.site = site
        self._starts = starts
        self._wires = wires
        self._device_type = memory.device.type
        self._streams = streams_for(memory.device)
        self._memory = memory
        self.state = UnitState.PLANNED
        self.order = -1  # position among the units of a forward pass; -1 until the loss function uses it
        # Number of saved tensors that view the buffers; of a `columns` unit, number of products that will use it. At 0
        # backward doesn't need the unit.
        self.saved_views = 0
        self.kept = False  # the policy keeps gathered weights: saved tensors hold the buffers themselves
        self.in_backward = False  # backward has reached it
        # Second gather, of weights quantized in blocks along the other dim, for backward; released with this unit.
        self.columns: GatheredUnit | None = None
        # Full leaves of a `columns` unit while it is ALIVE, by number in the plan.
        self.full: dict[int, WholeLeaf] = {}
        # By bucket of the plan: all-gathers while GATHERING, and flat buffers while ALIVE. After a failed wait both may
        # have entries.
        self._handles: dict[int, Handle[Moved]] = {}
        self.buffers: dict[int, list[Tensor]] = {}
        # Buckets of which autograd saved a view; final once forward releases the unit.
        self._viewed: set[int] = set()
        # Buffers, and shards passed without a copy, with autograd versions, to detect in-place writes.
        self._guarded: list[tuple[Tensor, int]] = []

    def _go(self, state: UnitState) -> None:
        assert (self.state, state) in _FOLLOWS, f"{self.name} is {self.state.name} and cannot become {state.name}"
        self.state = state

    @torch.no_grad()
    def start(self) -> None:
        """Cast the shards and start to gather them, unless that has been done."""
        if self.state not in (UnitState.PLANNED, UnitState.RELEASED):
            return
        # A bucket whose leaves also have `columns` is sent again in backward only if autograd saved a view of it.
        again = self.state is UnitState.RELEASED
        buckets = {n: b for n, b in enumerate(self.plan.gathers) if not (again and b.if_viewed) or n in self._viewed}
        self._starts(self, sum(1 for b in buckets.values() if b.move.axes))
        with self._on_gather_stream():
            self._handles = {number: self._start(b) for number, b in buckets.items()}
        self._go(UnitState.GATHERING)

    @contextmanager
    def _on_gather_stream(self) -> Generator[None]:
        """Run the block on the gather stream, which may then take memory that the compute stream read until now."""
        free = self._streams.record("free")
        with _compat.region("gather", self.name), self._streams.on("gather"):
            self._streams.wait(free)
            yield

    def _start(self, b: UnitGather) -> Handle[Moved]:
        shards = [on_device(self.leaves[i].value, self._device_type) for i in b.leaves]
        return b.move.start(shards, self._memory, noise=lambda i: self.noise(b.leaves[i]))

    def noise(self, leaf: int, *, of_term: bool = False) -> Tensor:
        """Draw the noise for stochastic rounding of a leaf's shard, or of its full partial gradient."""
        node = self.leaves[leaf]
        sharding = whole(node.sharding) if of_term else node.sharding
        return self._wires.noise(self.index[leaf], sharding, node.shape, self._memory.device, of_term=of_term)

    @property
    def again(self) -> list[GatheredUnit]:
        """The gathers that backward needs, in the order of their start: the unit itself, and its columns."""
        return [unit for unit in (self, self.columns) if unit is not None and unit.saved_views]

    def start_again(self) -> None:
        """Start the gathers that backward needs."""
        for unit in self.again:
            unit.start()

    def read_ahead(self) -> None:
        """Start to read the shards for the next `start`."""
        for leaf in self.leaves:
            read_ahead(leaf.value, self._device_type)

    def note_view(self, bucket: int) -> None:
        """Note that autograd has saved a view of a buffer of a bucket, which backward will need."""
        self.saved_views += 1
        self._viewed.add(bucket)

    @torch.no_grad()
    def wait(self) -> dict[int, WholeLeaf]:
        """Wait for the all-gathers, which it starts if needed; return the full leaves by number in the plan."""
        self.start()
        full: dict[int, WholeLeaf] = {}
        with self._on_gather_stream():
            for number in [*self._handles]:
                gathered = self._handles[number].wait()
                del self._handles[number]  # it holds the received rows, whose memory the next bucket may take
                self.buffers[number] = gathered.buffers
                full |= zip(self.plan.gathers[number].leaves, gathered.leaves, strict=True)
            done = self._streams.record("gathered")
        if self.plan.gathers:
            self._streams.wait(done)
        shown = [x for buffers in self.buffers.values() for x in buffers]
        shown += [self.leaves[i].value for i, _ in self.plan.aliases]
        self._guarded = [(x, _compat.version_of(x)) for x in shown]
        self._go(UnitState.ALIVE)
        return full

    def release(self, *, failed: bool = False) -> None:
        """Free the buffers, in any state, and refuse weights written in place; after a failure, wait only briefly."""
        # A buffer's memory returns to the pool when its last view is gone, which a user may still hold.
        changed = not failed and any(_compat.version_of(x) != version for x, version in self._guarded)
        self.buffers = {}
        self._guarded = []
        self.full = {}
        if self.columns is not None:
            self.columns.release(failed=failed)
        if self._handles:
            self._end_gathers(failed=failed)
        if self.state is not UnitState.PLANNED:
            self._go(UnitState.RELEASED)
        if changed:
            rule = f"fs.gather_unit returned weights of {self.name} that were then written in place."
            mend = "Don't modify gathered weights: other ranks read the same memory, and backward gathers them again."
            if self.plan.aliases:
                mend += " Leaves without shards are the state's own tensors: load or create the state again."
            raise TransformError(report(rule, mend=mend))

    def _end_gathers(self, *, failed: bool) -> None:
        with self._streams.on("gather"):
            for handle in self._handles.values():
                with suppress(RuntimeError) if failed else nullcontext():
                    handle.release(timedelta(seconds=1) if failed else None)
            self._handles = {}
            done = self._streams.record("gathered")
        self._streams.wait(done)  # the compute stream may own the memory of received rows
