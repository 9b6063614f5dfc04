"""One gather of one unit: all-gather its shards, release the full leaves, and gather them again for backward.

Guarantee: a buffer is released with its last view, and its collective has been waited for by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.base.errors import TransformError, report
from fsharding.comm.buffer_pool import PoolMemory
from fsharding.comm.handles import Handle
from fsharding.comm.leaf_memory import on_device, read_ahead
from fsharding.comm.leaf_wires import LeafIndex
from fsharding.comm.move import Moved
from fsharding.comm.reduce import Noise
from fsharding.comm.streams import streams_for
from fsharding.comm.wires import WholeLeaf
from fsharding.sharding.named_sharding import Local
from fsharding.transforms.unit_plan import UnitGather, UnitPlan

__all__ = ["GatheredUnit", "UnitState"]


class UnitState(Enum):
    """Where the whole leaves of a unit are. `start` goes on from PLANNED and from RELEASED."""

    PLANNED = "nothing has been sent"
    GATHERING = "all-gathers are under way"
    ALIVE = "whole leaves are in buffers"
    RELEASED = "the buffers have been let go"


class Owner(Protocol):
    """Context of a call that gathers units."""

    def name_of(self, index: Sequence[LeafIndex]) -> str:
        """Return the name of a unit of these leaves."""
        ...

    def starts(self, unit: GatheredUnit) -> None:
        """Is told of a unit each time before its all-gathers start."""
        ...

    def counts_gather(self, unit: GatheredUnit) -> None:
        """Is told of each all-gather that starts."""
        ...


class GatheredUnit:
    """One gather of one unit. `start`, `wait`, `release`; then `start` again, if backward needs it."""

    def __init__(
        self,
        plan: UnitPlan,
        leaves: Sequence[Local],
        index: tuple[LeafIndex, ...],  # the places of its leaves in the parameter tree
        memory: PoolMemory,  # where it is gathered, whose bytes are counted as the unit's; shards may be elsewhere
        owner: Owner,  # names the unit, and is notified of each collective
        *,
        site: tuple[str, int] | None = None,  # file and line of the user's call; None if no error needs them
        noise: Noise | None = None,  # returns the numbers for keyed rounding of a leaf, by its index in the plan
        # A gather of some leaves in blocks along their other dim, for backward; it is released with this one.
        columns: GatheredUnit | None = None,
    ) -> None:
        self.plan = plan
        self.leaves = leaves
        self.index = index
        self._owner = owner
        self._noise = noise
        self.site = site
        self._device_type = memory.device.type
        self._streams = streams_for(memory.device)
        self._memory = memory.of_one_user() if self._streams.several else memory
        # See `UnitState`. All-gathers are under way only while it is GATHERING, and `buffers` has elements only while
        # it is ALIVE or when waiting for one of several has failed.
        self.state = UnitState.PLANNED
        self.order = -1  # position among the units of a forward pass; -1 until the loss function has used it
        # Number of saved tensors that view the buffers; for a `columns` unit, of products that will use it.
        self.saved_views = 0
        self.kept = False  # the buffers are kept for backward
        self.in_backward = False  # backward has needed it
        self.columns = columns
        # The full leaves of `columns` while it is ALIVE, by their number in the plan.
        self.full: dict[int, WholeLeaf] = {}
        # The flat buffers of each bucket; empty for a bucket that backward did not gather again.
        self.buffers: list[list[Tensor]] = []
        self._viewed: set[int] = set()
        """The buckets that autograd has saved views of; they can be told only once the unit has been alive."""
        self._was_alive = False
        self._handles: list[Handle[Moved] | None] = []
        """One for each bucket of the plan; None for one that is not gathered again, and after it was waited for."""
        self._guarded: list[tuple[Tensor, int]] = []
        """Tensors that the loss function sees, and their versions in autograd: they must not be written in place."""

    @torch.no_grad()
    def start(self) -> None:
        """Casts the shards and starts to gather them, if that has not been done."""
        if self.state in (UnitState.PLANNED, UnitState.RELEASED):
            self._owner.starts(self)
            with _compat.region("gather"), self._streams.on("gather"):
                self._handles = [self._start(number, b) for number, b in enumerate(self.plan.gathers)]
            self.state = UnitState.GATHERING

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

    def _start(self, number: int, b: UnitGather) -> Handle[Moved] | None:
        if b.if_viewed and self._was_alive and number not in self._viewed:
            return None
        if b.move.axes:
            self._owner.counts_gather(self)
        noise = self._noise
        shards = [on_device(self.leaves[i].value, self._device_type) for i in b.leaves]
        drawn = None if noise is None else lambda i: noise(b.leaves[i])
        return b.move.start(shards, self._memory, noise=drawn)

    @torch.no_grad()
    def wait(self) -> dict[int, WholeLeaf]:
        """Wait for the all-gathers, which it starts if needed; return the full leaves by number in the plan."""
        self.start()
        assert self.state is UnitState.GATHERING, self.state
        full: dict[int, WholeLeaf] = {}
        with _compat.region("gather"), self._streams.on("gather"):
            for number, b in enumerate(self.plan.gathers):
                gathered = self._take(number)
                self.buffers.append(gathered.buffers)
                full |= zip(b.leaves, gathered.leaves, strict=False)
        if self._streams.several and self.plan.gathers:
            with self._streams.on("gather"):
                done = self._streams.record("gathered")
            self._streams.wait(done)
        self._handles = []
        buffers = [x for several in self.buffers for x in several]
        shown = [*buffers, *(self.leaves[i].value for i, _ in self.plan.aliases)]
        self._guarded = [(x, _compat.version_of(x)) for x in shown]
        self.state = UnitState.ALIVE
        self._was_alive = True
        return full

    def _take(self, number: int) -> Moved:
        """Wait for a bucket, and recycle the memory that it needed only until now."""
        handle = self._handles[number]
        if handle is None:
            return Moved([], [])
        gathered, self._handles[number] = handle.wait(), None
        del handle  # it holds the rows that were received, which `retire` can only recycle when they are free
        self._memory.retire()
        return gathered

    def wait_for_full(self) -> None:
        """Wait for `columns`, if that has not been done; `full` has its leaves then."""
        if self.state is not UnitState.ALIVE:
            self.full = self.wait()

    def release(self, *, failed: bool = False) -> None:
        """Release the buffers, and refuse weights that were written in place, unless the step has `failed`."""
        changed = not failed and any(_compat.version_of(x) != version for x, version in self._guarded)
        self._handles = []
        self.buffers = []
        self._guarded = []
        self.full = {}
        if self.columns is not None:
            self.columns.release(failed=failed)
        if self.state is not UnitState.PLANNED:
            self.state = UnitState.RELEASED
            self._memory.retire()
        if changed:
            rule = f"fs.gather_unit gave weights of {self._owner.name_of(self.index)} that were then written in place."
            mend = "Make new tensors of them: other ranks read the same memory, and backward gathers the weights again."
            if self.plan.aliases:
                mend += " Leaves that nothing cuts are the state's own: it is changed, so load or make it again."
            raise TransformError(report(rule, mend=mend))

    def abandon(self, *, failed: bool = False) -> None:
        """Release a unit in any state; wait for pending all-gathers, only briefly after a failure."""
        if self.columns is not None:
            self.columns.abandon(failed=failed)
        if self._handles:
            with self._streams.on("gather"):
                self._end_gathers(failed=failed)
                self._memory.retire()
        self.release(failed=failed)

    def _end_gathers(self, *, failed: bool) -> None:
        for handle in self._handles:
            if handle is not None:
                with suppress(RuntimeError) if failed else nullcontext():
                    handle.release(timedelta(seconds=1) if failed else None)
        self._handles = []
