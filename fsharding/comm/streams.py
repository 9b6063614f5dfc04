"""Queues of a device beside the one that computes: one gathers parameters, one reduces gradients.

In: names of queues, and events between them. Out: calls of CUDA, or nothing where a device has one queue, as a CPU.
The order of a unit, where `!` records an event on the queue whose line it is and `?` waits for one there:

    gather     ?begun  ?free of its buffers   cast, all-gather, join   !gathered
    compute    ?gathered   forward or backward of the unit   !free of its buffers   fill a bucket   !filled
    reduce     ?filled   exchange, sum, add to the gradient   !reduced
    compute    ?reduced, when the next unit has been left: only then may the bucket's memory be used again
    end        compute waits for both

Memory belongs to the queue on which it was taken, and returns to it as soon as it is unused. So code that
holds memory of another queue frees it after its own queue has waited for the last reader; a `Pool` hands out buffers
with the event after which they may be written.
Guarantees: nothing is read before it was written, nothing is written while a reader is due, and no bit depends on
queues.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, Protocol, TypeAlias

import torch

from fsharding.base.scoped import scoped

__all__ = ["CudaStreams", "OneStream", "StreamName", "Streams", "streams_for", "use_streams"]

StreamName: TypeAlias = Literal["gather", "reduce"]
"""The queues beside the one that computes, which is the current one where none of them is."""


class Streams(Protocol):
    """The queues of a device.

    Attributes:
        several: whether there are others than the one that computes.
    """

    several: bool

    def on(self, name: StreamName) -> AbstractContextManager[Any]:
        """Makes a queue the current one inside: operations go there, and memory is taken there."""
        ...

    def record(self, of: str) -> Any:
        """An event on the current queue: all that it was given so far is done. Where there is one queue, nothing.

        Args:
            of: what has happened then, in a word.
        """
        ...

    def wait(self, event: Any) -> None:
        """Has the current queue do nothing that it is given from here before an event has happened."""
        ...

    def wait_all(self) -> None:
        """Has the current queue wait for all that the others were given so far."""
        ...


class OneStream:
    """The queue of a CPU: everything is done in the order of the program."""

    several = False

    def on(self, name: StreamName) -> AbstractContextManager[Any]:
        """See `Streams`."""
        return _NOTHING

    def record(self, of: str) -> Any:
        """See `Streams`."""
        return None

    def wait(self, event: Any) -> None:
        """See `Streams`."""

    def wait_all(self) -> None:
        """See `Streams`."""


_NOTHING = nullcontext()
_ONE = OneStream()


class CudaStreams:
    """Two streams of CUDA beside the current one, of higher priority: what they do is what others wait for."""

    several = True

    # `_compute` is the stream that was current when `on` was entered from outside; None outside.

    def __init__(self, device: torch.device) -> None:
        names: tuple[StreamName, ...] = ("gather", "reduce")
        self._streams = {name: torch.cuda.Stream(device, priority=-1) for name in names}
        self._compute: torch.cuda.Stream | None = None

    @contextmanager
    def on(self, name: StreamName) -> Generator[None]:
        """See `Streams`."""
        before = self._compute
        self._compute = torch.cuda.current_stream() if before is None else before
        try:
            with torch.cuda.stream(self._streams[name]):
                yield
        finally:
            self._compute = before

    def record(self, of: str) -> torch.cuda.Event:
        """See `Streams`."""
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """See `Streams`."""
        torch.cuda.current_stream().wait_event(event)

    def wait_all(self) -> None:
        """See `Streams`."""
        current = torch.cuda.current_stream()
        for stream in (self._compute or current, *self._streams.values()):
            if stream != current:
                current.wait_stream(stream)


_chosen: ContextVar[Streams | None] = ContextVar("fsharding_streams", default=None)


def streams_for(device: torch.device) -> Streams:
    """The queues of a device, the same ones at every call."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    return _cuda(device) if device.type == "cuda" and torch.cuda.is_available() else _ONE


@functools.cache
def _cuda(device: torch.device) -> Streams:
    return CudaStreams(device)


def use_streams(streams: Streams) -> AbstractContextManager[None]:
    """Has every device use some queues inside the `with` block: `OneStream()` does all in the order of the program."""
    return scoped(_chosen, streams)
