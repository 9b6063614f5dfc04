"""One gather of one unit: all-gather its shards, release the full leaves, and gather them again for backward.

Guarantee: a buffer is released with its last view, and its collective has been waited for by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from enum import Enum

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.base.errors import TransformError, report
from fsharding.comm.buffer_pool import PoolMemory
from fsharding.comm.handles import Handle
from fsharding.comm.leaf_memory import on_device, read_ahead
from fsharding.comm.leaf_wires import LeafIndex
from fsharding.comm.move import Moved
from fsharding.comm.streams import streams_for
from fsharding.comm.wires import WholeLeaf
from fsharding.sharding.named_sharding import Local
from fsharding.transforms.unit_plan import UnitGather, UnitPlan

__all__ = ["GatheredUnit", "UnitState"]


class UnitState(Enum):
    """Where the whole leaves of a unit are."""

    PLANNED = "nothing has been sent"
    GATHERING = "all-gathers are under way"
    ALIVE = "whole leaves are in buffers"
    RELEASED = "the buffers have been let go"


# Which states may follow one another, and by which call; everything else is a mistake of the runtime.
_FOLLOWS = {
    (UnitState.PLANNED, UnitState.GATHERING),  # start: ahead of its use, or when it is used
    (UnitState.GATHERING, UnitState.ALIVE),  # wait
    (UnitState.GATHERING, UnitState.RELEASED),  # release of a unit that was prefetched in vain, or after a failure
    (UnitState.ALIVE, UnitState.RELEASED),  # release: forward has left it, or its gradients are all there
    (UnitState.RELEASED, UnitState.GATHERING),  # start: backward needs it again
    (UnitState.RELEASED, UnitState.RELEASED),  # the end of the call releases all units
}


class GatheredUnit:
    """One gather of one unit. `start`, `wait`, `release`; then `start` again, if backward needs it."""

    def __init__(
        self,
        plan: UnitPlan,
        leaves: Sequence[Local],
        index: tuple[LeafIndex, ...],  # the places of its leaves in the parameter tree
        memory: PoolMemory,  # where it is gathered, whose bytes are counted as the unit's; shards may be elsewhere
        *,
        name: str,
        # Is told of the unit each time before its all-gathers start, and how many of them send something.
        starts: Callable[[GatheredUnit, int], object],
        # Returns the numbers for stochastic rounding of a leaf, by its number in the plan.
        noise: Callable[[GatheredUnit, int], Tensor],
        site: tuple[str, int] | None = None,  # file and line of the user's call; None if no error needs them
    ) -> None:
        self.plan = plan
        self.leaves = leaves
        self.index = index
        self.name = name
        self.site = site
        self._starts = starts
        self._noise = noise
        self._device_type = memory.device.type
        self._streams = streams_for(memory.device)
        self._memory = memory.of_one_user() if self._streams.several else memory
        self.state = UnitState.PLANNED
        self.order = -1  # position among the units of a forward pass; -1 until the loss function has used it
        # Number of saved tensors that view the buffers; for a `columns` unit, of products that will use it.
        self.saved_views = 0
        self.kept = False  # the buffers are kept for backward
        self.in_backward = False  # backward has needed it
        # A gather of some leaves in blocks along their other dim, for backward; it is released with this one.
        self.columns: GatheredUnit | None = None
        # The full leaves of a `columns` unit while it is ALIVE, by their number in the plan.
        self.full: dict[int, WholeLeaf] = {}
        # By bucket of the plan, but for those that are not gathered again: all-gathers while they are under way, and
        # flat buffers while the unit is ALIVE, or when waiting for one of several has failed.
        self._handles: dict[int, Handle[Moved]] = {}
        self.buffers: dict[int, list[Tensor]] = {}
        # The buckets that autograd has saved views of; they can be told only once the unit has been alive.
        self._viewed: set[int] = set()
        # Tensors that the loss function sees, and their versions in autograd: they must not be written in place.
        self._guarded: list[tuple[Tensor, int]] = []

    def _go(self, state: UnitState) -> None:
        assert (self.state, state) in _FOLLOWS, f"{self.name} is {self.state.name}, not to become {state.name}"
        self.state = state

    @torch.no_grad()
    def start(self) -> None:
        """Casts the shards and starts to gather them, if that has not been done."""
        if self.state not in (UnitState.PLANNED, UnitState.RELEASED):
            return
        again = self.state is UnitState.RELEASED
        buckets = {n: b for n, b in enumerate(self.plan.gathers) if not (again and b.if_viewed) or n in self._viewed}
        self._starts(self, sum(1 for b in buckets.values() if b.move.axes))
        with _compat.region("gather"), self._streams.on("gather"):
            self._handles = {number: self._start(b) for number, b in buckets.items()}
        self._go(UnitState.GATHERING)

    def _start(self, b: UnitGather) -> Handle[Moved]:
        shards = [on_device(self.leaves[i].value, self._device_type) for i in b.leaves]
        return b.move.start(shards, self._memory, noise=lambda i: self._noise(self, b.leaves[i]))

    @property
    def again(self) -> list[GatheredUnit]:
        """What backward needs of a unit, in the order in which it is started: itself, and its columns."""
        return [unit for unit in (self, self.columns) if unit is not None and unit.saved_views]

    def start_again(self) -> None:
        """Starts what backward needs of a unit."""
        for unit in self.again:
            unit.start()

    def read_ahead(self) -> None:
        """Start to read the shards for the next `start`."""
        for leaf in self.leaves:
            read_ahead(leaf.value, self._device_type)

    def note_view(self, bucket: int) -> None:
        """Note that autograd has saved a view of a buffer of a bucket, so that backward needs what is in it."""
        self.saved_views += 1
        self._viewed.add(bucket)

    @torch.no_grad()
    def wait(self) -> dict[int, WholeLeaf]:
        """Wait for the all-gathers, which it starts if needed; return the full leaves by number in the plan."""
        self.start()
        full: dict[int, WholeLeaf] = {}
        with _compat.region("gather"), self._streams.on("gather"):
            for number in [*self._handles]:
                gathered = self._handles[number].wait()
                del self._handles[number]  # it holds the rows that were received, which `retire` can recycle now
                self._memory.retire()
                self.buffers[number] = gathered.buffers
                full |= zip(self.plan.gathers[number].leaves, gathered.leaves, strict=True)
        if self._streams.several and self.plan.gathers:
            with self._streams.on("gather"):
                done = self._streams.record("gathered")
            self._streams.wait(done)
        shown = [x for buffers in self.buffers.values() for x in buffers]
        shown += [self.leaves[i].value for i, _ in self.plan.aliases]
        self._guarded = [(x, _compat.version_of(x)) for x in shown]
        self._go(UnitState.ALIVE)
        return full

    def release(self, *, failed: bool = False) -> None:
        """Let the unit go, in any state; after a failure wait only briefly, else refuse weights written in place."""
        changed = not failed and any(_compat.version_of(x) != version for x, version in self._guarded)
        self.buffers = {}
        self._guarded = []
        self.full = {}
        if self.columns is not None:
            self.columns.release(failed=failed)
        if self._handles:
            self._end_gathers(failed=failed)
        if self.state is not UnitState.PLANNED:
            self._memory.retire()
            self._go(UnitState.RELEASED)
        if changed:
            rule = f"fs.gather_unit gave weights of {self.name} that were then written in place."
            mend = "Make new tensors of them: other ranks read the same memory, and backward gathers the weights again."
            if self.plan.aliases:
                mend += " Leaves that nothing cuts are the state's own: it is changed, so load or make it again."
            raise TransformError(report(rule, mend=mend))

    def _end_gathers(self, *, failed: bool) -> None:
        with self._streams.on("gather"):
            for handle in self._handles.values():
                with suppress(RuntimeError) if failed else nullcontext():
                    handle.release(timedelta(seconds=1) if failed else None)
            self._handles = {}
            self._memory.retire()
