"""Start buckets in order, with a limit on the bytes in flight, and finish them in the order in which they started.

In: for each bucket its size and how to start it; points at which to continue. Out: every handle is waited for.
Guarantee: what is started or finished depends on the calls alone, never on time, so ranks that make the same calls
start the same collectives in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from fsharding.comm.events import note
from fsharding.comm.handles import Handle

__all__ = ["BucketQueue", "Queued"]


class Queued(NamedTuple):
    """A bucket that may be sent.

    Attributes:
        bytes: of memory that it takes while it is in flight.
        start: starts its collectives; the handle's result is not looked at.
    """

    bytes: int
    start: Callable[[], Handle[Any]]


class BucketQueue:
    """See the module.

    Args:
        limit: bytes of buckets in flight; one bucket is always allowed.
    """

    # `_flying`: started buckets, oldest first, `_bytes` in total. `_waiting`: queued buckets in order. Buckets are
    # numbered from 1: `_added` were added, and the first `_finished` have finished.

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._added = 0
        self._finished = 0
        self._waiting: deque[Queued] = deque()
        self._flying: deque[tuple[int, Handle[Any]]] = deque()

    def add(self, buckets: Sequence[Queued]) -> int:
        """Puts buckets behind the others, and starts those that there is room for.

        Returns:
            The number of the last one, for `finish`.
        """
        self._waiting.extend(buckets)
        self._added += len(buckets)
        self._fill()
        return self._added

    def advance(self) -> None:
        """If buckets wait for room, finish the oldest one in flight and start those that fit."""
        if self._waiting:
            self._finish_oldest()
            self._fill()

    def is_finished(self, last: int) -> bool:
        """Whether bucket `last` and all before it have finished."""
        return self._finished >= last

    def finish(self, last: int | None = None) -> None:
        """Finishes the oldest buckets, up to one of them; by default all."""
        last = self._added if last is None else last
        while self._finished < last:
            self._finish_oldest()
            self._fill()

    def release(self) -> None:
        """Lets all buckets go after a failure, without waiting for long."""
        for _, handle in self._flying:
            with suppress(RuntimeError):
                handle.release(timedelta(seconds=1))
        self._waiting.clear()
        self._flying.clear()

    def _fill(self) -> None:
        while self._waiting and (not self._flying or self._bytes + self._waiting[0].bytes <= self._limit):
            bucket = self._waiting.popleft()
            self._bytes += bucket.bytes
            note("start", "bucket")
            self._flying.append((bucket.bytes, bucket.start()))

    def _finish_oldest(self) -> None:
        size, handle = self._flying.popleft()
        handle.wait()
        note("wait", "bucket")
        self._bytes -= size
        self._finished += 1
