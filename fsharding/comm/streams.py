"""Device streams in addition to the compute stream: for all-gathers, for gradient reductions, and for copies.

The order of a unit, where `!` records an event on the stream of its line and `?` waits for one there:

    compute    !free
    gather     ?free   ?reduced (in the memory of that reduction)   cast, all-gather   ?free   join   !gathered
    compute    ?gathered   forward or backward of the unit   ?reduced (the unit before)   fill a bucket   !filled
    reduce     ?filled   exchange, sum, add to the gradient   !reduced
    end        compute waits for both
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

import torch

from fsharding.base import devices
from fsharding.base.scoped import scoped

__all__ = ["StreamName", "Streams", "streams_for", "use_streams"]

# Rules that replace `record_stream`: memory belongs to the stream on which it was allocated, and returns to it as soon
# as the tensor is freed. So before a stream allocates, it waits for all that read its freed tensors: the gather stream
# for the compute stream each time, the compute stream for the reduce stream before it frees a bucket.

# The streams other than the compute stream, which is current outside of `on`. `out`, `in`: to and from other tiers.
StreamName: TypeAlias = Literal["gather", "reduce", "out", "in"]

_NOTHING = nullcontext()


class Streams:
    """The streams of a device. This class, used on CPUs, has the compute stream only: all runs in program order."""

    several = False  # whether there are streams other than the compute stream

    def on(self, name: StreamName) -> AbstractContextManager[Any]:
        """Make a stream current inside the `with` block, for operations and allocations."""
        return _NOTHING

    def record(self, of: str) -> Any:
        """Record an event on the current stream, named for logs; returns None if there is one stream only."""

    def current(self) -> Any:
        """Return the current stream, for `wait`; None if there is one stream only."""

    def wait(self, event: Any, on: Any = None) -> None:
        """Have a stream, the current one by default, wait for an event before all later operations."""

    def wait_all(self) -> None:
        """Have the current stream wait for all work given to the compute, gather and reduce streams so far."""

    def settle(self, event: Any) -> None:
        """Have the host wait for an event."""

    def allocated(self) -> int:
        """Return the bytes that are allocated on the device; 0 without several streams."""
        return 0


_ONE = Streams()


class DeviceStreams(Streams):
    """The streams of an accelerator, with high priority, since the compute stream waits for their work."""

    several = True

    def __init__(self, device: torch.device) -> None:
        names: tuple[StreamName, ...] = ("gather", "reduce", "out", "in")
        self._device = device
        self._streams = {name: torch.Stream(device, priority=-1) for name in names}
        self._compute: torch.Stream | None = None  # inside `on`: the stream current outside; else None

    @contextmanager
    def on(self, name: StreamName) -> Generator[None]:
        before = self._compute
        self._compute = self.current() if before is None else before
        try:
            with devices.on_stream(self._streams[name]):
                yield
        finally:
            self._compute = before

    def record(self, of: str) -> torch.Event:
        event = torch.Event(self._device)
        event.record(self.current())
        return event

    def wait(self, event: torch.Event, on: torch.Stream | None = None) -> None:
        (self.current() if on is None else on).wait_event(event)

    def wait_all(self) -> None:
        current = self.current()
        for stream in (self._compute or current, self._streams["gather"], self._streams["reduce"]):
            if stream != current:
                current.wait_stream(stream)

    def settle(self, event: torch.Event) -> None:
        # During the capture of a graph nothing runs, so there is no event to wait for; the caller waits for the replay.
        if not devices.is_capturing(self._device):
            event.synchronize()

    def allocated(self) -> int:
        return torch.accelerator.memory_allocated(self._device)

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


_chosen: ContextVar[Streams | None] = ContextVar("fsharding_streams", default=None)


def streams_for(device: torch.device) -> Streams:
    """Return the streams of a device; every call returns the same object."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    return _streams(device) if devices.is_here(device.type) else _ONE


@functools.cache
def _streams(device: torch.device) -> Streams:
    return DeviceStreams(device)


def use_streams(streams: Streams) -> AbstractContextManager[None]:
    """Use these streams for every device inside the `with` block; `Streams()` runs everything in program order."""
    return scoped(_chosen, streams)
