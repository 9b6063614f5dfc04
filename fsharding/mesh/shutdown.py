"""The end of a process that has talked to others: it waits for those who still hold something of Python's.

Guarantee: it waits for a second at most.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["let_others_finish", "rest_at_exit", "state_of"]

_LIMIT_S = 1.0
_LOOK_S = 1e-3


@functools.cache
def rest_at_exit() -> None:
    """Has this process wait for its other threads before it ends; once is enough."""
    atexit.register(let_others_finish)


def let_others_finish(busy: Callable[[], bool] | None = None) -> None:
    """Waits until all other threads of this process are found asleep twice in a row, or the time is over."""
    # Twice, because one that waits for the interpreter sleeps as well: it gets it between two looks.
    look = busy or _others_run
    until = time.monotonic() + _LIMIT_S
    quiet = 0
    while quiet < 2 and time.monotonic() < until:
        time.sleep(_LOOK_S)
        quiet = 0 if look() else quiet + 1


def _others_run() -> bool:
    own = str(threading.get_native_id())
    return any(state_of(task) in "RD" for task in Path("/proc/self/task").glob("[0-9]*") if task.name != own)


def state_of(task: Path) -> str:
    """Linux's letter for what a process or a thread does, such as R, S or Z, from its directory; X where it is gone."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
