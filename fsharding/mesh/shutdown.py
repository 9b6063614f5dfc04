"""Let other threads come to rest before Python's shutdown, for at most a second."""

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
    """Make this process wait for its other threads before it exits; further calls do nothing."""
    atexit.register(let_others_finish)


def let_others_finish(busy: Callable[[], bool] | None = None) -> None:
    """Wait until all other threads are asleep twice in a row, or a time limit."""
    # Twice, because a thread that waits for the interpreter lock is asleep, too; it gets the lock in between.
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
    """Return Linux's letter for the state of a process or thread directory, such as R, S or Z; X if it has exited."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
