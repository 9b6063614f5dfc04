"""What a step did, as the ledger saw it: gathers, reductions, and the most that was alive at once.

In: nothing but what the ledger writes. Out: one `Counts` for each `value_and_grad` call inside a `recording` block.
Law: the counts are those of torch's own `CommDebugMode`, and the peak is that of the storages themselves.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

__all__ = ["Counts", "record", "recording"]


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
