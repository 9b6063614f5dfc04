"""The types of communication: `Exchange` and `Reduction` are filled and started, a `Handle` is in flight.

In: memory that a rank fills. Out: handles, which every transport implements.
Law: after `start` a rank's contribution must not change; after `release` results in the transport's memory must not be
read; and every handle is ended by `release`, at the latest after a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from fsharding import _compat

__all__ = ["Exchange", "FreshMemory", "Handle", "Memory", "Reduction", "Rows"]

Rows: TypeAlias = Tensor | Sequence[Tensor]
"""A row from each member: [members, width], or as many tensors [width]."""

_T_co = TypeVar("_T_co", covariant=True)


class Handle(Protocol[_T_co]):
    """Communication in flight."""

    def is_ready(self) -> bool:
        """Whether `wait` would return at once, or raise."""
        ...

    def wait(self, timeout: timedelta | None = None, *, into: Sequence[Tensor] | None = None) -> _T_co:
        """Waits for it.

        Args:
            timeout: by default that of the group.
            into: contiguous tensors for the results of a `Reduction`, which may be written there; a result that is
                another tensor has to be copied. Other handles do not look.

        Raises:
            RuntimeError: a member is gone, or the timeout is over.
        """
        ...

    def release(self, timeout: timedelta | None = None) -> None:
        """Ends it: its buffers may be used again. Waits for what is in flight, if `wait` has not been called."""
        ...


class Exchange(Protocol):
    """Rows to send.

    Attributes:
        own: to be filled: [width] for a gather, [members, width] for an all-to-all.
    """

    own: Tensor

    def start(self) -> Handle[Rows]:
        """Sends what was filled in."""
        ...


class Reduction(Protocol):
    """Terms of a sum over the members, leaf by leaf."""

    def slot(self, leaf: int, dtype: torch.dtype) -> Tensor | None:
        """Memory that a kernel may write the first term of a leaf to; None where there is none of that dtype."""
        ...

    def add(self, leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
        """Copies the terms of some leaves to where they are sent from; None counts as zeros."""
        ...

    def start(self) -> Handle[list[Tensor]]:
        """Sends the terms: the handle of the sum of each leaf, or of this member's piece of it."""
        ...


class Memory(Protocol):
    """Where buffers come from."""

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer with garbage inside."""
        ...

    def adopt(self, x: Tensor) -> None:
        """Counts a buffer that comes from somewhere else, as long as somebody views it."""
        ...


class FreshMemory(NamedTuple):
    """New memory for each buffer."""

    device: torch.device

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """See `Memory`."""
        return _compat.fresh((size,), dtype, self.device)

    def adopt(self, x: Tensor) -> None:
        """See `Memory`; nothing is counted."""
