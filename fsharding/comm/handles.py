"""The types of communication: an `Exchange` or a `Reduction` is filled and started; a `Handle` is work in flight.

Rule for callers: from `start` until the handle has been waited for, nothing that is sent may be written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsharding.base import _compat
from fsharding.mesh.failures import among

__all__ = [
    "Exchange", "Handle", "Memory", "Places", "Reduction", "Rows", "Work", "Works", "done", "nowhere",
]  # fmt: skip

T = TypeVar("T")
U = TypeVar("U")
_T_co = TypeVar("_T_co", covariant=True)

# A row from each member: [members, width], or a list of [width].
Rows: TypeAlias = Tensor | Sequence[Tensor]

# Returns contiguous tensors that results may be written to, or None. Called once, inside the `wait` that computes the
# results, since memory may become free until then. A result that is a different tensor must be copied by the caller.
Places: TypeAlias = Callable[[], Sequence[Tensor] | None]


def nowhere() -> None:
    """Return no `Places`: results are new tensors."""


class Work(Protocol[_T_co]):
    """Something in flight that a transport waits for."""

    def is_ready(self) -> bool:
        """Whether `wait` would return at once, or raise."""
        ...

    def wait(self, timeout: timedelta | None = None) -> _T_co:
        """Wait for the result for at most `timeout`, by default the group's."""
        ...

    def release(self, timeout: timedelta | None = None) -> None:
        """Allow reuse of its buffers; waits first if `wait` has not been called."""
        ...


class Handle(Generic[_T_co]):
    """Communication in flight, and the function that computes its result."""

    def __init__(self, work: Work[Any], finish: Callable[[Any], _T_co], *, communicates: bool = False) -> None:
        # The handle keeps alive what `finish` refers to, such as send buffers that peers may still read. It must live
        # until it has been waited for, and be deleted before its buffers are expected to return to a pool.
        self._work = work
        self._finish = finish  # computes the result from that of `work.wait`
        # Whether `finish` starts a collective. Then `wait` must be called in the same order on all ranks, so the handle
        # is never ready: readiness depends on time, which differs between ranks.
        self._communicates = communicates

    def is_ready(self) -> bool:
        """Whether `wait` would return at once, or raise."""
        return not self._communicates and self._work.is_ready()

    def wait(self, timeout: timedelta | None = None) -> _T_co:
        """Wait for the result; call it once. A lost member or the timeout raises a RuntimeError."""
        return self._finish(self._work.wait(timeout))

    def release(self, timeout: timedelta | None = None) -> None:
        """Allow reuse of its buffers; waits first if `wait` has not been called."""
        self._work.release(timeout)

    def then(self, f: Callable[[_T_co], U], *, communicates: bool = False) -> Handle[U]:
        """Return a handle of `f(result)`, which releases this one as soon as `f` has returned."""
        # So the result of `f` must not view buffers of the transport, which other members may then overwrite.

        def finish(result: Any) -> U:
            value = f(result)
            self.release()
            return value

        return Handle(self, finish, communicates=communicates or self._communicates)


@dataclass
class Works:
    """Several `dist.Work` objects as one `Work`."""

    # Pending works; emptied by `wait`, since a gloo message can be waited for only once.
    works: tuple[dist.Work, ...] = ()
    # Tensors that the works read or write, kept alive so that no allocator or pool reuses their memory in flight.
    buffers: tuple[Tensor, ...] = ()
    # Global ranks that each work involves, to name the lost ranks in an error; the last entry covers the rest.
    peers: tuple[tuple[int, ...], ...] = ((),)
    limit: timedelta | None = None  # timeout if `wait` gets none; None uses torch's

    def is_ready(self) -> bool:
        """See `Work`."""
        return all(work.is_completed() for work in self.works)

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Work`; errors of torch are raised unchanged."""
        timeout = self.limit if timeout is None else timeout
        for i, work in enumerate(self.works):
            with among(self.peers[min(i, len(self.peers) - 1)]):
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timeout)
        self.works = ()

    def release(self, timeout: timedelta | None = None) -> None:
        """See `Work`."""
        self.wait(timeout)


def done(result: Callable[[], T], *, communicates: bool = False) -> Handle[T]:
    """Return a handle that waits for nothing, and calls `result` in `wait`."""
    return Handle(Works(), lambda _: result(), communicates=communicates)


@dataclass(frozen=True)
class Exchange:
    """Rows to send."""

    own: Tensor  # the send buffer, to be filled: [width] for a gather, [members, width] for an all-to-all
    start: Callable[[], Handle[Rows]]  # sends it; after that it must not be written


class Reduction(Protocol):
    """A sum over the members whose terms are added leaf by leaf."""

    def slot(self, leaf: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory of this dtype that a kernel may write the first term of a leaf to; None if it has none."""
        ...

    def add(self, leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
        """Copy terms of some leaves into the send buffer; None counts as zeros."""
        ...

    def start(self, places: Places = nowhere) -> Handle[list[Tensor]]:
        """Send the terms; the result is the sum of each leaf, or of this member's shard of it."""
        ...


@dataclass(frozen=True)
class Memory:
    """A source of buffers. This class allocates each one; a `PoolMemory` reuses free buffers."""

    device: torch.device

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized flat buffer."""
        return _compat.fresh((size,), dtype, self.device)

    def adopt(self, x: Tensor) -> None:
        """Count the bytes of a buffer that was allocated elsewhere while any view of it is alive."""
