"""Device streams besides the compute stream: one for gathers of parameters, one for reductions of gradients.

In: names of streams, and events between them. Out: calls of torch's accelerator API, or nothing on a CPU.
The order of a unit, where `!` records an event on the stream of its line and `?` waits for one there:

    gather     ?begun  ?free of its buffers   cast, all-gather, join   !gathered
    compute    ?gathered   forward or backward of the unit   !free of its buffers   fill a bucket   !filled
    reduce     ?filled   exchange, sum, add to the gradient   !reduced
    compute    ?reduced, when the next unit has been left: only then may the bucket's memory be used again
    end        compute waits for both

Memory belongs to the stream on which it was allocated, and returns to it as soon as the tensor is freed. So a tensor
that another stream reads is freed only after its own stream has waited for that reader; a `Pool` hands out buffers with
the event after which they may be overwritten. This replaces `record_stream`.
Guarantees: nothing is read before it was written, nothing is overwritten before its last reader, and no bit depends on
streams.
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

StreamName: TypeAlias = Literal["gather", "reduce", "out", "in"]
"""The streams besides the compute stream, which is the current one outside of them; `out` and `in` copy to the host."""


_NOTHING = nullcontext()


class Streams:
    """The streams of a device. Here, as on a CPU, there is the compute stream alone: all runs in program order."""

    several = False  # whether there are others

    def on(self, name: StreamName) -> AbstractContextManager[Any]:
        """Make a stream the current one inside: operations and allocations belong to it."""
        return _NOTHING

    def record(self, of: str) -> Any:
        """Record an event on the current stream of what has happened then, in a word for logs; None for one stream."""

    def wait(self, event: Any) -> None:
        """Have the current stream wait for an event before everything that follows."""

    def wait_all(self) -> None:
        """Have the current stream wait for everything that the compute, gather and reduce streams have been given."""

    def settle(self, event: Any) -> None:
        """Have the host wait for an event."""


_ONE = Streams()


class DeviceStreams(Streams):
    """Streams besides the current one, of higher priority, since others wait for their work."""

    several = True

    # `_compute` is the stream that was current when `on` was entered from outside; None outside.

    def __init__(self, device: torch.device) -> None:
        names: tuple[StreamName, ...] = ("gather", "reduce", "out", "in")
        self._device = device
        self._streams = {name: devices.new_stream(device) for name in names}
        self._compute: torch.Stream | None = None

    @contextmanager
    def on(self, name: StreamName) -> Generator[None]:
        before = self._compute
        self._compute = self._current() if before is None else before
        try:
            with devices.on_stream(self._streams[name]):
                yield
        finally:
            self._compute = before

    def record(self, of: str) -> torch.Event:
        event = devices.new_event(self._device)
        event.record(self._current())
        return event

    def wait(self, event: torch.Event) -> None:
        self._current().wait_event(event)

    def wait_all(self) -> None:
        current = self._current()
        for stream in (self._compute or current, self._streams["gather"], self._streams["reduce"]):
            if stream != current:
                current.wait_stream(stream)

    def settle(self, event: torch.Event) -> None:
        # While a graph is recorded nothing runs, and whoever replays it waits.
        if not devices.is_capturing(self._device):
            event.synchronize()

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


_chosen: ContextVar[Streams | None] = ContextVar("fsharding_streams", default=None)


def streams_for(device: torch.device) -> Streams:
    """Return the streams of a device, the same ones at every call."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    return _streams(device) if devices.is_here(device.type) else _ONE


@functools.cache
def _streams(device: torch.device) -> Streams:
    return DeviceStreams(device)


def use_streams(streams: Streams) -> AbstractContextManager[None]:
    """Have every device use these streams inside the `with` block: `Streams()` runs everything in program order."""
    return scoped(_chosen, streams)
