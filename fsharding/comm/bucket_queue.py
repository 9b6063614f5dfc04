"""Start buckets in order, with a limit on the bytes in flight, and finish them in the same order.

Guarantee: which buckets start or finish depends on the calls alone, never on time. So ranks that make the same calls
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

    def __init__(self, limit: int) -> None:
        self._limit = limit  # bytes in flight; one bucket is always allowed
        self._bytes = 0  # bytes of `_flying`
        # Buckets are numbered from 1 in the order of `add`. They start and finish in that order too, so two counts are
        # enough to find whether a bucket has finished.
        self._added = 0
        self.finished = 0
        self._waiting: deque[tuple[int, Callable[[], Handle[Any]]]] = deque()
        self._flying: deque[tuple[int, Handle[Any]]] = deque()

    def add(self, size: int, start: Callable[[], Handle[Any]]) -> Handle[None]:
        """Append a bucket and start those that fit; waiting for the handle finishes all buckets up to this one."""
        self._waiting.append((size, start))
        self._added += 1
        self._fill()
        return Handle(_Bucket(self, self._added), lambda _: None)

    def advance(self) -> None:
        """If buckets are queued, finish the oldest one in flight and start those that fit."""
        if self._waiting:
            self._finish_oldest()
            self._fill()

    def finish(self, last: int) -> None:
        """Finish the buckets up to number `last`."""
        while self.finished < last:
            self._finish_oldest()
            self._fill()

    def release(self) -> None:
        """Free all buckets after a failure."""
        # A peer may have died, so a message may never come: wait for 1 s, and keep the error that is being raised.
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
        return self.queue.finished >= self.number

    def wait(self, timeout: timedelta | None = None) -> None:
        # Each bucket is waited for with the timeout of its own group, so `timeout` has no effect.
        self.queue.finish(self.number)

    def release(self, timeout: timedelta | None = None) -> None:
        pass  # buckets are released in `BucketQueue.finish`
