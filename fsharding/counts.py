"""What a step did, as the ledger saw it: gathers, reductions, the most that was alive at once; and the bytes sent.

In: nothing but what the ledger and the wire write. Out: one `Counts` for each `value_and_grad` call inside a
`recording` block, and the `Traffic` of a `counting_bytes` block.
Law: the counts are those of torch's own `CommDebugMode`, and the peak is that of the storages themselves.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

__all__ = ["Counts", "Traffic", "counting_bytes", "record", "record_sent", "recording"]


def _names() -> list[str]:
    return []


@dataclass
class Counts:
    """What one `value_and_grad` call did.

    Attributes:
        gathers: the unit of each all-gather, in order.
        reductions: the unit of each gradient bucket that was summed over ranks, in order.
        peak_units: most units whose gathered bytes were alive at once.
        peak_bytes: most gathered bytes that were alive at once.
    """

    gathers: list[str] = field(default_factory=_names)
    reductions: list[str] = field(default_factory=_names)
    peak_units: int = 0
    peak_bytes: int = 0


_recorders: ContextVar[tuple[list[Counts], ...]] = ContextVar("fsharding_recorders", default=())


@contextmanager
def recording() -> Generator[list[Counts]]:
    """Collects the counts of every `value_and_grad` call inside the `with` block, one entry a call."""
    seen: list[Counts] = []
    token = _recorders.set((*_recorders.get(), seen))
    try:
        yield seen
    finally:
        _recorders.reset(token)


def record(counts: Counts) -> None:
    """Hands the counts of a finished call to every `recording` around it."""
    for seen in _recorders.get():
        seen.append(counts)


@dataclass
class Traffic:
    """What this rank sent to others.

    Attributes:
        bytes: payload bytes; what a collective library adds is not seen.
        messages: collectives, or single sends.
    """

    bytes: int = 0
    messages: int = 0


_meters: ContextVar[tuple[Traffic, ...]] = ContextVar("fsharding_meters", default=())


@contextmanager
def counting_bytes() -> Generator[Traffic]:
    """Counts what this rank sends to other ranks inside the `with` block, by whatever function of the library."""
    traffic = Traffic()
    token = _meters.set((*_meters.get(), traffic))
    try:
        yield traffic
    finally:
        _meters.reset(token)


def record_sent(size: int) -> None:
    """Adds a message of so many bytes to every `counting_bytes` around it."""
    for traffic in _meters.get():
        traffic.bytes += size
        traffic.messages += 1
