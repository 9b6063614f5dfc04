"""Saves in the background: one at a time; a failure is raised by `wait`, the next save, or the end of the process."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from fsharding.base.calls import call_as, public_name
from fsharding.base.errors import CheckpointError, FshardingError, message, report
from fsharding.base.public import check_timeout
from fsharding.checkpoint.directory import naming_path
from fsharding.mesh.failures import is_fake_world, own_rank

__all__ = ["SAVE_TIMEOUT", "PendingSave", "own_group", "settle", "start", "watched"]

T = TypeVar("T")

SAVE_TIMEOUT = timedelta(minutes=30)  # of ranks for each other by default: file systems are slower than networks

_SLOW_S = 60.0
_log = logging.getLogger("fsharding")


class PendingSave:
    """A save that may still be going on.

    Args:
        work: what is left to do; it runs on a thread of its own.

    Example:
        >>> pending = fs.checkpoint.PendingSave(lambda: None)  # `save_async` returns one
        >>> pending.wait()
        >>> pending.done
        True
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: CheckpointError | None = None
        self._told = False
        # Python waits for threads that are no daemons before it ends.
        self._thread = threading.Thread(target=self._run, name="fsharding-save", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except CheckpointError as error:
            self._error = error
        except BaseException as error:
            text = str(error)
            if not isinstance(error, FshardingError):  # unlike a lost rank, which has its words already
                text = report("fs.checkpoint.save_async failed.", [f"{type(error).__name__}: {error}"])
            self._error = CheckpointError(text)
            self._error.__cause__ = error
        del self._work  # and the copies of leaves with it

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is in its place.

        Raises:
            CheckpointError: it failed; the same on all ranks.
        """
        self._thread.join()
        self._told = True
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait as `wait` does, but raise no failure a second time."""
        if not self._told:
            self.wait()


_latest: PendingSave | None = None
_groups: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}  # by use: the default group then, and the group


def start(work: Callable[[], None]) -> PendingSave:
    """Begins a save in the background; `settle` comes first."""
    global _latest
    assert _latest is None
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    _latest = PendingSave(work)
    return _latest


def settle() -> None:
    """Wait for the save in the background, if there is one."""
    global _latest
    before = _latest
    _latest = None
    if before is not None:
        before.settle()


def _at_exit() -> None:
    """Ends a process whose last save failed with a message and status 1; Python has no gentler way this late."""
    try:
        settle()
    except CheckpointError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


def own_group(timeout: timedelta, use: str = "checkpoint") -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks for saves, made once for each use; None without several ranks. Collective."""
    # A write to a disk may take longer than a collective of a step, so the timeout is another one. Two threads must not
    # use one group, since their collectives would meet in any order: checkpoints wait for each other, exports do not.
    check_timeout(timeout)
    if not dist.is_initialized() or is_fake_world():
        return None
    world = dist.group.WORLD
    assert world is not None
    if use not in _groups or _groups[use][0] is not world:
        made = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(made, dist.ProcessGroup)
        _groups[use] = world, made
    group = _groups[use][1]
    group.set_timeout(timeout)
    return group


def watched(path: Path, work: Callable[[], T]) -> Callable[[], T]:
    """Have work on a file system log once that it takes long, and name the path in its errors."""
    name = public_name()  # the timer has a thread of its own

    def run() -> T:
        timer = threading.Timer(_SLOW_S, call_as, (name, _report_slow, path))
        timer.daemon = True
        timer.start()
        try:
            with naming_path(path):
                return work()
        finally:
            timer.cancel()

    return run


def _report_slow(path: Path) -> None:
    rule = f"has written to {path} for {_SLOW_S:g} s on rank {own_rank()}, and is not done: its file system is slow."
    _log.warning(message(rule, mend="Other ranks wait for it as long as its timeout= allows."))
