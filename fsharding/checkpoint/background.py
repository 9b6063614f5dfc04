"""Saves that go on beside the training: one at a time, and no failure of one goes unnoticed.

In: the work, which needs nothing of the state any more. Out: a `PendingSave`.
A failure is raised by the first of: `wait`, the next save, the end of the process, which then has exit status 1.
Law: of two saves the second begins when the first has ended.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable

import torch.distributed as dist

from fsharding import _compat
from fsharding.errors import CheckpointError, FshardingError, message

__all__ = ["PendingSave", "own_group", "settle", "start"]


class PendingSave:
    """A save that may still be going on.

    Args:
        work: what is left to do; it runs on a thread of its own.

    Example:
        >>> import tempfile
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(device="cpu"))
        >>> state = fs.state_from(fs.shard({"w": torch.ones(4)}, layout), fs.sgd(0.1), fs.random.key(0), layout)
        >>> with tempfile.TemporaryDirectory() as run:
        ...     pending = fs.checkpoint.save_async(f"{run}/5", state)
        ...     pending.wait()
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
            self._error = _as_ours(error)
        del self._work

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

    def unreported(self) -> CheckpointError | None:
        """Waits; the failure that nobody has heard of yet, if there is one."""
        self._thread.join()
        return None if self._told else self._error


def _as_ours(error: BaseException) -> CheckpointError:
    """A failure that is none of a checkpoint's, such as a lost rank, as one of them."""
    text = str(error)
    if not isinstance(error, FshardingError):
        text = message("fs.checkpoint.save_async", "failed.", [f"{type(error).__name__}: {error}"])
    result = CheckpointError(text)
    result.__cause__ = error
    return result


_latest: PendingSave | None = None
_group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None


def start(work: Callable[[], None]) -> PendingSave:
    """Begins a save in the background; `settle` comes first."""
    global _latest
    assert _latest is None
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    _latest = PendingSave(work)
    return _latest


def settle() -> None:
    """Waits for the save in the background, if there is one.

    Raises:
        CheckpointError: it failed, and nobody has heard of it yet.
    """
    global _latest
    before, _latest = _latest, None
    if before is not None and before.unreported() is not None:
        before.wait()


def _at_exit() -> None:
    """Ends a process whose last save failed with a message and status 1; Python has no gentler way this late."""
    error = None if _latest is None else _latest.unreported()
    if error is None:
        return
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def own_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks for the thread, with the timeout of the default group; made once. Collective.

    Two threads must not use one group: their collectives would meet in any order.
    """
    global _group
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    assert world is not None
    if _group is None or _group[0] is not world:
        made = dist.new_group(backend="gloo", timeout=_compat.group_timeout(world))
        assert isinstance(made, dist.ProcessGroup)
        _group = world, made
    return _group[1]
