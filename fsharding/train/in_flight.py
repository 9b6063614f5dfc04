"""Optimizer state whose copies to other tiers may not have arrived: the host waits for them when it reads the field.

A train step reads it on the device alone, in the order of streams, so it calls `unread`, which doesn't wait.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from fsharding.base.tree import Tree
from fsharding.comm.transfers import InFlight

__all__ = ["arrived", "carry", "copies_in_flight", "free_copies", "left_in_flight", "unread"]

T = TypeVar("T")

_FIELD = "opt_state"
_IN_FLIGHT = "_in_flight"


class _Unread(NamedTuple):
    opt_state: Tree
    copies: InFlight


def left_in_flight(state: T, copies: InFlight | None) -> T:
    """Note on a new state that its optimizer state is being copied, unless there are no copies; return it."""
    if copies is not None:
        vars(state)[_IN_FLIGHT] = _Unread(vars(state).pop(_FIELD), copies)
    return state


def unread(state: Any, field: str) -> Any:
    """Return a field of a state; the host does not wait for copies."""
    known: _Unread | None = vars(state).get(_IN_FLIGHT)
    return known.opt_state if known is not None and field == _FIELD else getattr(state, field)


def copies_in_flight(state: Any) -> InFlight | None:
    """Return the copies of a state that the host has not waited for."""
    known: _Unread | None = vars(state).get(_IN_FLIGHT)
    return None if known is None else known.copies


def free_copies(state: Any) -> None:
    """Free the device memory of a state's copies once the current stream has waited for them."""
    copies = copies_in_flight(state)
    if copies is not None:
        copies.shrink()


def carry(state: Any, to: Any) -> None:
    """Note on a state with the optimizer state of another that it is in flight as well."""
    known: _Unread | None = vars(state).get(_IN_FLIGHT)
    if known is not None and vars(to).get(_FIELD) is known.opt_state:
        left_in_flight(to, known.copies)


def arrived(state: Any) -> bool:
    """Wait for the copies of a state, and give it its field; return False if there are none."""
    known: _Unread | None = vars(state).get(_IN_FLIGHT)
    if known is None:
        return False
    known.copies.settle()
    # In this order, so that another thread that reads the field finds one of the two.
    vars(state)[_FIELD] = known.opt_state
    vars(state).pop(_IN_FLIGHT, None)
    return True
