"""The types of communication: an `Exchange` or a `Reduction` is filled and started; a `Handle` is work in flight.

Guarantee: after `start`, a rank's contribution must not change.
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

Rows: TypeAlias = Tensor | Sequence[Tensor]
"""A row from each member: [members, width], or as many tensors [width]."""


Places: TypeAlias = Callable[[], Sequence[Tensor] | None]
"""Contiguous tensors that results may be written to, or None. Asked for once, by the `wait` that makes the results.

A result that is a different tensor has to be copied there.
"""


def nowhere() -> None:
    """`Places` of results in memory of their own."""


class Work(Protocol[_T_co]):
    """What a transport waits for; a `Handle` is one too."""

    def is_ready(self) -> bool:
        """Whether `wait` would return at once, or raise."""
        ...

    def wait(self, timeout: timedelta | None = None) -> _T_co:
        """Wait until it is done, for at most `timeout` (by default the group's)."""
        ...

    def release(self, timeout: timedelta | None = None) -> None:
        """End it, so that its buffers can be reused. Waits first, if `wait` has not been called."""
        ...


class Handle(Generic[_T_co]):
    """Communication in flight, and what its result is made of once it is done."""

    def __init__(self, work: Work[Any], finish: Callable[[Any], _T_co], *, communicates: bool = False) -> None:
        # `finish`: makes the result of what `work.wait` returns. `communicates`: `finish` starts a collective of its
        # own, so the handle is never ready before it is waited for.
        self._work = work
        self._finish = finish
        self._communicates = communicates

    def is_ready(self) -> bool:
        """Whether `wait` would return at once, or raise."""
        return not self._communicates and self._work.is_ready()

    def wait(self, timeout: timedelta | None = None) -> _T_co:
        """Wait for the result; call it once. A member that is gone, or the timeout, is a RuntimeError."""
        return self._finish(self._work.wait(timeout))

    def release(self, timeout: timedelta | None = None) -> None:
        """End it: its buffers can be reused. Waits for what is in flight, if `wait` has not been called."""
        self._work.release(timeout)

    def then(self, f: Callable[[_T_co], U], *, communicates: bool = False) -> Handle[U]:
        """Return a handle of `f(result)`, which releases this one as soon as `f` has returned."""
        # So the result of `f` must not view memory of the transport. `communicates`: it starts a collective of its own.

        def finish(result: Any) -> U:
            value = f(result)
            self.release()
            return value

        return Handle(self, finish, communicates=communicates or self._communicates)


@dataclass
class Works:
    """Works of torch, as a `Work`."""

    # pending works; emptied by `wait`, since a gloo message can be waited for only once
    works: tuple[dist.Work, ...] = ()
    buffers: tuple[Tensor, ...] = ()  # tensors that are kept alive until then
    # global ranks that each work involves; the last entry covers the remaining works
    peers: tuple[tuple[int, ...], ...] = ((),)
    limit: timedelta | None = None  # timeout if `wait` gets none; None leaves it to torch

    def is_ready(self) -> bool:
        """See `Work`."""
        return all(work.is_completed() for work in self.works)

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Work`; the error is torch's own."""
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
    """Return a handle that waits for nothing; its result is made when it is asked for."""
    return Handle(Works(), lambda _: result(), communicates=communicates)


@dataclass(frozen=True)
class Exchange:
    """Rows to send."""

    own: Tensor  # to be filled: [width] for a gather, [members, width] for an all-to-all
    start: Callable[[], Handle[Rows]]  # sends what was filled in


class Reduction(Protocol):
    """Terms of a sum over the members, leaf by leaf."""

    def slot(self, leaf: int, dtype: torch.dtype) -> Tensor | None:
        """Memory that a kernel may write the first term of a leaf to; None where there is none of that dtype."""
        ...

    def add(self, leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
        """Copies the terms of some leaves to where they are sent from; None counts as zeros."""
        ...

    def start(self, places: Places = nowhere) -> Handle[list[Tensor]]:
        """Send the terms. The handle has the sum of each leaf, or of this member's piece of it."""
        ...


@dataclass(frozen=True)
class Memory:
    """Where buffers come from. Here each is new; a `Pool` hands out those that are no longer used."""

    device: torch.device

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer with garbage inside."""
        return _compat.fresh((size,), dtype, self.device)

    def adopt(self, x: Tensor) -> None:
        """Count a buffer that comes from somewhere else, as long as it is viewed."""

    def of_one_user(self) -> Memory:
        """The same, for a user that calls `retire`."""
        return self

    def retire(self) -> None:
        """Let buffers that were taken from here and are free be used again, when the current stream has come here."""
