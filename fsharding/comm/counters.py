"""Count the gathers, reductions and peak memory of a step, and the bytes that a rank sends; record the order of events.

Guarantee: the counts equal torch's own `CommDebugMode`, and the peak equals the sum of the live storages. Recording
changes nothing, and nothing is recorded outside of a block.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from fsharding.base.scoped import scoped

__all__ = [
    "Counts", "Event", "Sent", "Traffic", "count_bytes", "following", "note", "record", "record_collectives",
    "record_sent", "uncounted",
]  # fmt: skip


@dataclass
class Counts:
    """The gathers, reductions and peaks of one `value_and_grad` call."""

    gathers: list[str] = field(default_factory=list[str])  # the unit of each all-gather, in order
    # the unit of each gradient bucket that was summed over ranks, in order
    reductions: list[str] = field(default_factory=list[str])
    peak_units: int = 0  # most units whose gathered bytes were alive at once
    peak_bytes: int = 0  # most gathered bytes that were alive at once


_recorders: ContextVar[tuple[list[Counts], ...]] = ContextVar("fsharding_recorders", default=())


@contextmanager
def record_collectives() -> Generator[list[Counts]]:
    """Collects the counts of every `value_and_grad` call inside the `with` block, one entry a call.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.shard({"w": torch.ones(4)}, layout)
        >>> with fs.debug.record_collectives() as calls:
        ...     _ = fs.value_and_grad(lambda p: fs.gather_unit(p)["w"].sum())(params)
        >>> len(calls), calls[0].gathers == (["w"] if layout.mesh.size() > 1 else [])  # one rank has nothing to gather
        (1, True)
    """
    seen: list[Counts] = []
    with scoped(_recorders, (*_recorders.get(), seen)):
        yield seen


def record(counts: Counts) -> None:
    """Hands the counts of a finished call to every `record_collectives` around it."""
    for seen in _recorders.get():
        seen.append(counts)


class Sent(NamedTuple):
    """The traffic over some axes."""

    calls: int  # collectives, or rounds of messages
    bytes: int  # payload bytes to other ranks; what a collective library adds is not seen


@dataclass
class Traffic:
    """The bytes and calls that this rank sent to others.

    Attributes:
        by_axes: by the axes that a group goes along, in the order of `AXES`; `()` for a group that has none.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> with fs.debug.count_bytes() as traffic:
        ...     total = fs.ops.psum(torch.ones(4), "dp", mesh=mesh)
        >>> (traffic.bytes > 0) == (mesh.size() > 1)  # one rank alone sends nothing
        True
    """

    by_axes: dict[tuple[str, ...], Sent] = field(default_factory=dict[tuple[str, ...], Sent])

    @property
    def bytes(self) -> int:
        """Payload bytes over all axes."""
        return sum(sent.bytes for sent in self.by_axes.values())

    @property
    def calls(self) -> int:
        """Collectives, and rounds of messages, over all axes."""
        return sum(sent.calls for sent in self.by_axes.values())

    def add(self, axes: tuple[str, ...], size: int, calls: int = 1) -> None:
        """Counts calls that send so many bytes together."""
        before = self.by_axes.get(axes, Sent(0, 0))
        self.by_axes[axes] = Sent(before.calls + calls, before.bytes + size)


_meters: ContextVar[tuple[Traffic, ...]] = ContextVar("fsharding_meters", default=())


@contextmanager
def count_bytes() -> Generator[Traffic]:
    """Counts what this rank sends to other ranks inside the `with` block, by whatever function of the library.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> with fs.debug.count_bytes() as traffic:
        ...     total = fs.ops.psum(torch.ones(4), "dp", mesh=mesh)
        >>> (traffic.bytes > 0) == (mesh.size() > 1)  # one rank alone sends nothing
        True
    """
    traffic = Traffic()
    with scoped(_meters, (*_meters.get(), traffic)):
        yield traffic


def uncounted() -> AbstractContextManager[None]:
    """Don't count bytes inside the `with` block, where this rank does the work of another."""
    return scoped(_meters, ())


def record_sent(size: int, axes: tuple[str, ...] = ()) -> None:
    """Adds a call that sends so many bytes along some axes to every `count_bytes` around it."""
    for traffic in _meters.get():
        traffic.add(axes, size)


# ------------------------------------------------------------------------------------------------- the order of events
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
