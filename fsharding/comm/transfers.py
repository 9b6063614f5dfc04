"""Copies between a device and other tiers, on a stream for each way: nothing else uses the streams `out` and `in`.

    compute    !ready       what is copied has been computed, and the memory that is copied to is no longer used
    out, in    ?ready  ?after   copy   !done
    compute    ?done        before the copies are read, and before the memory of what was copied is used again

Device memory belongs to the compute stream: it is allocated there before a copy in, and freed there after `?done`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsharding.comm.streams import StreamName, streams_for
from fsharding.comm.tier import DEVICE, HOST
from fsharding.sharding.memory_kinds import Tier

__all__ = ["Transfer", "Transfers"]


class Transfer(NamedTuple):
    """Copies in flight: the tensors that are copied to, and the event after which they may be read."""

    values: list[Tensor]
    done: Any


class Transfers:
    """Copies from and to a device."""

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_for(device)

    def fetch(self, xs: Sequence[Tensor], target: torch.device, after: Transfer | None = None) -> Transfer:
        """Start to copy tensors to the device or to the host, after another transfer."""
        tier = HOST if target.type == "cpu" else DEVICE
        there = [tier.empty(tuple(x.shape), x.dtype, target) for x in xs]

        def copy() -> list[Tensor]:
            for x, to in zip(xs, there, strict=True):
                to.copy_(x, non_blocking=True)
            return there

        return self._start("out" if target.type == "cpu" else "in", copy, after)

    def send(self, xs: Sequence[tuple[Tensor, Tier, Tensor | None]]) -> Transfer:
        """Start to put tensors into tiers, in memory of the tier if it is given."""
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
