"""Record, during a forward, whether an expert with a capacity was full and how many choices were dropped."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.base.scoped import scoped

__all__ = ["FULL", "counting_drops", "is_full", "note_capacity", "refused_if_full", "watching_capacity"]

FULL = "an expert got more tokens of a rank than its capacity has room for"

_notes: ContextVar[list[Tensor] | None] = ContextVar("fsharding_capacity", default=None)
_drops: ContextVar[list[Tensor] | None] = ContextVar("fsharding_drops", default=None)


@_compat.outside_of_graphs
def note_capacity(full: Tensor, dropped: Tensor) -> None:
    """Record whether an expert was full (bool, 0-d), and how many choices were dropped (int64, 0-d)."""
    notes = _notes.get()
    if notes is not None:
        notes.append(torch.stack((full.double(), dropped.double())))


@contextmanager
def watching_capacity() -> Generator[list[Tensor]]:
    """Collect the records of a forward: float64[2] each."""
    notes: list[Tensor] = []
    with scoped(_notes, notes):
        yield notes
    if (drops := _drops.get()) is not None:
        drops += [note[1] for note in notes]


@contextmanager
def counting_drops() -> Generator[list[Tensor]]:
    """Collect the numbers of dropped choices of all forwards in this block: float64, 0-d each."""
    drops: list[Tensor] = []
    with scoped(_drops, drops):
        yield drops


def refused_if_full(weight: Tensor, notes: Sequence[Tensor]) -> Tensor:
    """Replace the count of a loss by minus infinity if an expert was full: no sum over ranks loses that."""
    return weight.masked_fill(torch.stack([*notes])[:, 0].sum() > 0, -math.inf) if notes else weight


def is_full(weight: float) -> bool:
    """Return whether a summed count marks that an expert was full."""
    return weight == -math.inf
