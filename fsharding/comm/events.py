"""Record the order of events on this rank: collectives started and waited for, computes begun and ended.

Guarantee: recording changes nothing, and nothing is recorded outside of a block.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from fsharding.base.scoped import scoped

__all__ = ["Event", "following", "note"]


class Event(NamedTuple):
    """Something that happened. Prints as `begin 0F1`: stage, action, microbatch."""

    what: str  # "start" of communication, and "wait" when its results are there; "begin" and "end" of a compute
    name: str  # of it, such as `3SCATTER`

    def __str__(self) -> str:
        return f"{self.what} {self.name}"


_lists: ContextVar[tuple[list[Event], ...]] = ContextVar("fsharding_events", default=())


@contextmanager
def following() -> Generator[list[Event]]:
    """Collects what happens inside the `with` block, in order."""
    seen: list[Event] = []
    with scoped(_lists, (*_lists.get(), seen)):
        yield seen


def note(what: str, name: object) -> None:
    """Adds an event to every `following` around it."""
    for seen in _lists.get():
        seen.append(Event(what, str(name)))
