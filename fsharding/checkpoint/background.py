"""Background saves, one at a time; `wait`, the next save, or the end of the process raises their errors."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from fsharding.base import _compat
from fsharding.base.calls import call_as, public_name
from fsharding.base.errors import CheckpointError, FshardingError, message, report
from fsharding.base.public import check_timeout
from fsharding.checkpoint.directory import naming_path
from fsharding.mesh.failures import is_fake_world, own_rank

__all__ = ["SAVE_TIMEOUT", "PendingSave", "own_group", "settle", "start", "watched"]

T = TypeVar("T")

SAVE_TIMEOUT = timedelta(minutes=30)  # longer than the mesh's: file systems are slower than networks

_SLOW_S = 60.0
_log = logging.getLogger("fsharding")


class PendingSave:
    """A save that may still be running.

    Args:
        work: Remaining work of the save, which runs on a new thread.

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
        # Not a daemon, so that Python waits for the save before it exits.
        self._thread = threading.Thread(target=self._run, name="fsharding-save", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except CheckpointError as error:
            self._error = error
        except BaseException as error:
            text = str(error)
            if not isinstance(error, FshardingError):  # our errors, such as a lost rank, have a full text
                text = report("fs.checkpoint.save_async failed.", [f"{type(error).__name__}: {error}"])
            self._error = CheckpointError(text)
            self._error.__cause__ = error
        del self._work  # frees the copies of leaves

    @property
    def done(self) -> bool:
        """Whether it has finished or failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            CheckpointError: the save failed; the same on all ranks.
        """
        self._thread.join()
        self._told = True
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait, but don't raise an error that `wait` has already raised."""
        if not self._told:
            self.wait()


_latest: PendingSave | None = None
_groups: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}  # by use: the default group then, and the group


def start(work: Callable[[], None]) -> PendingSave:
    """Start a background save; call `settle` first."""
    global _latest
    assert _latest is None
    with suppress(RuntimeError):  # the main thread has ended, and threads go on
        _compat.call_first_at_exit(_last_save_failed)
    _latest = PendingSave(work)
    return _latest


def settle() -> None:
    """Wait for the background save, if there is one."""
    global _latest
    before = _latest
    _latest = None
    if before is not None:
        before.settle()


def _last_save_failed() -> bool:
    """Wait for the last save, and print its error if no caller received it."""
    try:
        settle()
    except CheckpointError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return True
    return False


def own_group(timeout: timedelta, use: str = "checkpoint") -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks for saves, one per use; None for a single process. Collective."""
    # A separate timeout, since writes take longer than a step's collectives. Two threads must not share a group: ranks
    # could order their collectives differently. Checkpoints run one at a time, exports at the same time as they.
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
    """Make file system work log a warning if it is slow, and name the path in its errors."""
    name = public_name()  # read it here: the timer runs on a different thread

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
    rule = f"has been writing to {path} for {_SLOW_S:g} s on rank {own_rank()}: its file system is slow."
    _log.warning(message(rule, mend="Other ranks wait for it up to timeout=."))
