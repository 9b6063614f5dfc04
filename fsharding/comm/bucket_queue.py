"""Start buckets in order, with a limit on the bytes in flight, and finish them in the order in which they started.

Guarantee: what is started or finished depends on the calls alone, never on time, so ranks that make the same calls
start the same collectives in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from fsharding.comm.counters import note
from fsharding.comm.handles import Handle

__all__ = ["BucketQueue"]


class BucketQueue:
    """See the module."""

    # `_flying`: started buckets, oldest first, `_bytes` in total. `_waiting`: queued buckets in order. Buckets are
    # numbered from 1: `_added` were added, and the first `finished` have finished.

    def __init__(self, limit: int) -> None:
        # `limit`: bytes of buckets in flight; one bucket is always allowed.
        self._limit = limit
        self._bytes = 0
        self._added = 0
        self.finished = 0
        self._waiting: deque[tuple[int, Callable[[], Handle[Any]]]] = deque()
        self._flying: deque[tuple[int, Handle[Any]]] = deque()

    def add(self, size: int, start: Callable[[], Handle[Any]]) -> Handle[None]:
        """Append a bucket, and start those that there is room for; the handle finishes all up to this one."""
        self._waiting.append((size, start))
        self._added += 1
        self._fill()
        return Handle(_Bucket(self, self._added), lambda _: None)

    def advance(self) -> None:
        """If buckets wait for room, finish the oldest one in flight and start those that fit."""
        if self._waiting:
            self._finish_oldest()
            self._fill()

    def finish(self, last: int | None = None) -> None:
        """Finishes the oldest buckets, up to one of them; by default all."""
        last = self._added if last is None else last
        while self.finished < last:
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
        while self._waiting and (not self._flying or self._bytes + self._waiting[0][0] <= self._limit):
            size, start = self._waiting.popleft()
            self._bytes += size
            note("start", "bucket")
            self._flying.append((size, start()))

    def _finish_oldest(self) -> None:
        size, handle = self._flying.popleft()
        handle.wait()
        note("wait", "bucket")
        self._bytes -= size
        self.finished += 1


class _Bucket(NamedTuple):
    """A bucket of a queue, as a `Work`."""

    queue: BucketQueue
    number: int

    def is_ready(self) -> bool:
        """See `Work`."""
        return self.queue.finished >= self.number

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Work`; each bucket is waited for as long as its group says."""
        self.queue.finish(self.number)

    def release(self, timeout: timedelta | None = None) -> None:
        """See `Work`: the queue releases its buckets."""
