"""Copy between a device and other tiers, on the streams `out` and `in`, which nothing else uses.

    compute    !ready       the source has been computed, and the target's memory is no longer in use
    out, in    ?ready  ?after   copy   !done
    compute    ?done        before the target is read, and before the source's memory is reused

Device memory belongs to the compute stream: it is allocated there before a copy in, and freed there after `?done`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsharding.comm.streams import StreamName, streams_for
from fsharding.comm.tier import DEVICE, HOST, tier_of
from fsharding.sharding.memory_kinds import Tier

__all__ = ["NOTHING", "Between", "InFlight", "Transfer", "Transfers"]


class Transfer(NamedTuple):
    """Copies in flight."""

    values: list[Tensor]  # the targets, readable after `done`
    done: Any  # the event of the copies; None without streams


class Transfers:
    """The copies from and to one device."""

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_for(device)

    def fetch(self, xs: Sequence[Tensor], target: torch.device, after: Transfer | None = None) -> Transfer:
        """Start to copy tensors to the device or to host memory, once the transfer `after` is done."""
        tier = HOST if target.type == "cpu" else DEVICE
        there = [tier.empty(tuple(x.shape), x.dtype, target) for x in xs]

        def copy() -> list[Tensor]:
            for x, to in zip(xs, there, strict=True):
                to.copy_(x, non_blocking=True)
            return there

        return self._start("out" if target.type == "cpu" else "in", copy, after)

    def send(self, xs: Sequence[tuple[Tensor, Tier, Tensor | None]]) -> Transfer:
        """Start to copy tensors to tiers, into the given memory of the tier if it isn't None."""
        return self._start("out", lambda: [tier.put(x, into) for x, tier, into in xs], None)

    def _start(self, way: StreamName, copy: Callable[[], list[Tensor]], after: Transfer | None) -> Transfer:
        ready, compute = self._streams.record("ready"), self._streams.current()
        with self._streams.on(way):
            self._streams.wait(ready)
            if after is not None:
                self._streams.wait(after.done)
            try:
                values = copy()
            except BaseException:  # what has begun uses memory that is freed now
                self._streams.wait(self._streams.record(way), compute)
                raise
            return Transfer(values, self._streams.record(way))

    def stream(self) -> Any:
        """Return the current stream."""
        return self._streams.current()

    def wait(self, transfer: Transfer, on: Any = None) -> None:
        """Have a stream, the current one by default, wait for a transfer."""
        self._streams.wait(transfer.done, on)

    def settle(self, transfer: Transfer) -> None:
        """Have the host wait for a transfer."""
        self._streams.settle(transfer.done)


class InFlight:
    """Copies out of a device that may not be done, the oldest first, with the memory that they read."""

    # Memory belongs to the stream that was current at `add`, so that stream waits before `shrink` frees it, whichever
    # is current then. The host may read the targets after `settle` alone: their last event stays when all memory is
    # freed. Other threads, or a signal handler, may read a state while a step frees its copies.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._transfers = Transfers(device)
        self._groups: deque[tuple[Transfer, Sequence[Tensor], Any]] = deque()
        self._last: Transfer | None = None
        self._lock = threading.RLock()
        self.nbytes = 0
        _in_flight.add(self)

    def add(self, transfer: Transfer, read: Sequence[Tensor]) -> None:
        """Hold the memory that a copy reads."""
        with self._lock:
            self._groups.append((transfer, read, self._transfers.stream()))
            self._last = transfer
            self.nbytes += sum(x.nbytes for x in read)

    def shrink(self, most: int = 0) -> None:
        """Free the oldest memory until at most so many bytes are held; the current stream waits for its copies."""
        while (transfer := self._popped(most)) is not None:
            for x in transfer.values:
                tier_of(x, x.device.type).settle(x, self._device)

    def _popped(self, most: int) -> Transfer | None:
        """Wait for the oldest copies and drop their memory; return None if no more than `most` bytes are held."""
        with self._lock:
            if not self._groups or self.nbytes <= most:
                return None
            transfer, read, owner = self._groups.popleft()
            self.nbytes -= sum(x.nbytes for x in read)
        self._transfers.wait(transfer)
        if owner != self._transfers.stream():
            self._transfers.wait(transfer, on=owner)
        return transfer

    def settle(self) -> None:
        """Have the host wait for all copies, and free all memory."""
        if self._last is not None:
            self._transfers.settle(self._last)
        self.shrink()


_in_flight: weakref.WeakSet[InFlight] = weakref.WeakSet()


class Between:
    """Copies of a call that are started between its units; the base class starts none, and frees what others left."""

    def forward(self) -> None:
        """Note that forward begins with a unit."""
        if _in_flight:
            for copies in [*_in_flight]:
                copies.shrink()

    def backward(self) -> None:
        """Note that backward has left a unit."""


NOTHING = Between()
