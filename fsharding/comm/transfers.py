"""Copy between a device and other tiers, on the streams `out` and `in`, which nothing else uses.

    compute    !ready       the source has been computed, and the target's memory is no longer in use
    out, in    ?ready  ?after   copy   !done
    compute    ?done        before the target is read, and before the source's memory is reused

Device memory belongs to the compute stream: it is allocated there before a copy in, and freed there after `?done`.
"""

from __future__ import annotations

import threading
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
        ready = self._streams.record("ready")
        with self._streams.on(way):
            self._streams.wait(ready)
            if after is not None:
                self._streams.wait(after.done)
            values = copy()
            return Transfer(values, self._streams.record(way))

    def wait(self, transfer: Transfer) -> None:
        """Have the current stream wait for a transfer."""
        self._streams.wait(transfer.done)

    def settle(self, transfer: Transfer) -> None:
        """Have the host wait for a transfer."""
        self._streams.settle(transfer.done)


class InFlight:
    """Copies out of a device that may not be done, the oldest first, with the memory that they read."""

    # The memory belongs to the compute stream, so `shrink` frees it only after that stream waits for the copy. The host
    # may read the targets after `settle` alone: their last event stays when all memory is freed. A thread that saves a
    # state may settle its copies while the next step frees them, hence the lock.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._transfers = Transfers(device)
        self._groups: deque[tuple[Transfer, Sequence[Tensor]]] = deque()
        self._last: Transfer | None = None
        self._lock = threading.Lock()
        self.nbytes = 0

    def add(self, transfer: Transfer, read: Sequence[Tensor]) -> None:
        """Hold the memory that a copy reads."""
        with self._lock:
            self._groups.append((transfer, read))
            self._last = transfer
            self.nbytes += sum(x.nbytes for x in read)

    def shrink(self, most: int = 0) -> None:
        """Free the oldest memory until at most so many bytes are held; the current stream waits for its copies."""
        with self._lock:
            while self._groups and self.nbytes > most:
                transfer, read = self._groups.popleft()
                self._transfers.wait(transfer)
                self.nbytes -= sum(x.nbytes for x in read)
                for x in transfer.values:
                    tier_of(x, x.device.type).settle(x, self._device)

    def settle(self) -> None:
        """Have the host wait for all copies, and free all memory."""
        if self._last is not None:
            self._transfers.settle(self._last)
        self.shrink()


class Between:
    """Copies of a call that are started between its units; the base class starts none."""

    def forward(self) -> None:
        """Note that forward begins with a unit."""

    def backward(self) -> None:
        """Note that backward has left a unit."""


NOTHING = Between()
