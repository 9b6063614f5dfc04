"""Count all-gathers, gradient reductions, peak gathered memory and bytes sent; record the order of events.

Guarantee: counts equal those of torch's `CommDebugMode`, and the peak equals the sum of live storages.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from fsharding.base.scoped import scoped

__all__ = [
    "Counts", "Event", "Sent", "Traffic", "count_bytes", "following", "note", "record", "record_collectives",
    "record_sent", "uncounted",
]  # fmt: skip


@dataclass
class Counts:
    """The all-gathers, reductions and peak memory of one `value_and_grad` call.

    Attributes:
        gathers: Unit name of each all-gather, in order.
        reductions: Unit name of each gradient bucket that was summed over ranks, in order.
        peak_units: Most units with gathered parameters alive at once.
        peak_bytes: Most bytes of gathered parameters alive at once.
    """

    gathers: list[str] = field(default_factory=list[str])
    reductions: list[str] = field(default_factory=list[str])
    peak_units: int = 0
    peak_bytes: int = 0


T = TypeVar("T")


@contextmanager
def _collecting(open_blocks: ContextVar[tuple[T, ...]], collector: T) -> Generator[T]:
    """Add a collector to those of the enclosing blocks; outside of blocks there are none, and nothing is recorded."""
    with scoped(open_blocks, (*open_blocks.get(), collector)):
        yield collector


_recorders: ContextVar[tuple[list[Counts], ...]] = ContextVar("fsharding_recorders", default=())


def record_collectives() -> AbstractContextManager[list[Counts]]:
    """Record the `Counts` of every `value_and_grad` call inside the `with` block.

    Returns:
        A context manager that yields a list; each call appends one `Counts` when it finishes.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.shard({"w": torch.ones(4)}, layout)
        >>> with fs.debug.record_collectives() as calls:
        ...     _ = fs.value_and_grad(lambda p: fs.gather_unit(p)["w"].sum())(params)
        >>> len(calls), calls[0].gathers == (["w"] if layout.mesh.size() > 1 else [])  # one rank has nothing to gather
        (1, True)
    """
    return _collecting(_recorders, list[Counts]())


def record(counts: Counts) -> None:
    """Append the counts of a finished call in every enclosing `record_collectives`."""
    for seen in _recorders.get():
        seen.append(counts)


class Sent(NamedTuple):
    """The traffic of this rank over some mesh axes."""

    calls: int  # collectives and rounds of messages
    bytes: int  # payload bytes sent to other ranks, without what the collective library adds


@dataclass
class Traffic:
    """The bytes that this rank sent to other ranks, and its communication calls.

    Attributes:
        by_axes: `Sent` per tuple of mesh axes of a group, in the order of `AXES`; `()` for a group without axes.

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
        """Collectives and rounds of messages over all axes."""
        return sum(sent.calls for sent in self.by_axes.values())

    def add(self, axes: tuple[str, ...], size: int, calls: int = 1) -> None:
        """Add calls that send `size` bytes in total."""
        before = self.by_axes.get(axes, Sent(0, 0))
        self.by_axes[axes] = Sent(before.calls + calls, before.bytes + size)


_meters: ContextVar[tuple[Traffic, ...]] = ContextVar("fsharding_meters", default=())


def count_bytes() -> AbstractContextManager[Traffic]:
    """Count the bytes that this rank sends to other ranks inside the `with` block, in any function of the library.

    Returns:
        A context manager that yields a `Traffic`, which is updated as communication starts.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> with fs.debug.count_bytes() as traffic:
        ...     total = fs.ops.psum(torch.ones(4), "dp", mesh=mesh)
        >>> (traffic.bytes > 0) == (mesh.size() > 1)  # one rank alone sends nothing
        True
    """
    return _collecting(_meters, Traffic())


def uncounted() -> AbstractContextManager[None]:
    """Disable `count_bytes` inside the `with` block, for work that this rank does on behalf of a different one."""
    return scoped(_meters, ())


def record_sent(size: int, axes: tuple[str, ...] = ()) -> None:
    """Add a call that sends `size` bytes along some axes to every enclosing `count_bytes`."""
    for traffic in _meters.get():
        traffic.add(axes, size)


# ------------------------------------------------------------------------------------------------- the order of events
class Event(NamedTuple):
    """An event of a step. Prints as `begin 0F1`: stage, action, microbatch."""

    what: str  # "start" and "wait" (results are there) of communication; "begin" and "end" of a computation
    name: str  # such as `3SCATTER`

    def __str__(self) -> str:
        return f"{self.what} {self.name}"


_lists: ContextVar[tuple[list[Event], ...]] = ContextVar("fsharding_events", default=())


def following() -> AbstractContextManager[list[Event]]:
    """Record the events inside the `with` block, in order."""
    return _collecting(_lists, list[Event]())


def note(what: str, name: object) -> None:
    """Append an event in every enclosing `following`."""
    for seen in _lists.get():
        seen.append(Event(what, str(name)))
