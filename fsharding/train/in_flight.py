"""Main parameters and optimizer state whose copies to other tiers may not have arrived: the host waits to read them.

A train step reads them on the device alone, in the order of streams, so it calls `unread`, which doesn't wait.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, TypeVar

from fsharding.base.tree import Tree
from fsharding.comm.transfers import InFlight

__all__ = ["arrived", "carry", "copies_in_flight", "left_in_flight", "lock", "unread"]

T = TypeVar("T")

_FIELDS = ("main", "opt_state")
_IN_FLIGHT = "_in_flight"

lock = threading.RLock()
"""Held where the fields of a state arrive or go; a signal handler may read a state as well."""


class _Unread(NamedTuple):
    fields: dict[str, Tree]
    copies: InFlight


def _unread(state: Any) -> _Unread | None:
    return vars(state).get(_IN_FLIGHT)


def left_in_flight(state: T, copies: InFlight | None) -> T:
    """Note on a new state that its fields are being copied, unless there are no copies; return it."""
    if copies is not None:
        vars(state)[_IN_FLIGHT] = _Unread({name: vars(state).pop(name) for name in _FIELDS}, copies)
    return state


def unread(state: Any, field: str) -> Any:
    """Return a field of a state; the host does not wait for copies."""
    known = _unread(state)
    return known.fields[field] if known is not None and field in _FIELDS else getattr(state, field)


def copies_in_flight(state: Any) -> InFlight | None:
    """Return the copies of a state that the host has not waited for."""
    known = _unread(state)
    return None if known is None else known.copies


def carry(state: Any, to: Any) -> None:
    """Note that the fields which a state shares with a new one are in flight there as well."""
    known = _unread(state)
    if known is not None and any(x is not None and x is vars(to).get(name) for name, x in known.fields.items()):
        left_in_flight(to, known.copies)


def arrived(state: Any) -> bool:
    """Wait for the copies of a state, and give it its fields; return whether it has them, as a donated one has not."""
    known = _unread(state)
    if known is not None:
        known.copies.settle()
        with lock:
            # Fields first, so that a thread that reads one finds it here or in flight.
            if _unread(state) is known:
                vars(state).update(known.fields)
                vars(state).pop(_IN_FLIGHT)
    return _FIELDS[0] in vars(state)
