"""Finds the checkpoint that a run resumes from, and makes sure that the run is alone in its directory.

In: the option `--resume`, a directory of checkpoints. Out: the checkpoint to load, and why newer ones are passed over;
a lock on the directory for the life of the run. Guarantee: nothing is passed over in silence, and of two runs in one
directory the second is refused before it changes anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Collection, Generator
from pathlib import Path
from typing import NamedTuple

from fsharding import checkpoint
from fsharding.base.calls import named
from fsharding.base.errors import CheckpointError, ConfigError, message
from fsharding.checkpoint.collective_call import on_all, together
from fsharding.checkpoint.directory import lock_alone, survey
from fsharding.mesh.device_mesh import own_rank

__all__ = ["Choice", "alone_in", "choose", "is_damaged"]

_FUNCTION = "fsharding train --resume"
LOCK = ".lock"


class Choice(NamedTuple):
    """The checkpoint that a run resumes from.

    Attributes:
        path: the checkpoint; None to start anew.
        passed: newer ones that are not used, one row each, with the reason.
    """

    path: Path | None
    passed: tuple[str, ...] = ()


def choose(resume: str, checkpoints: Path, skip: Collection[Path] = ()) -> Choice:
    """The checkpoint that an option means.

    Args:
        resume: "auto", the newest complete one, or none where there is none; "newest", which has to be there; the
            number of a step, or a path; "" for a new run.
        skip: complete ones that turned out to be damaged.

    Raises:
        CheckpointError: there is none; the text says what there is.
    """
    if not resume:
        return Choice(None)
    if resume not in ("auto", "newest"):
        path = checkpoints / resume if resume.isdigit() else Path(resume)
        checkpoint.metadata(path)
        if path in skip:
            raise _nothing(checkpoints, [f"{path.name}: its data is damaged"])
        return Choice(path)
    seen = survey(checkpoints)
    passed: list[str] = []
    for one in seen:
        problem = "its data is damaged" if one.path in skip else one.problem
        if not problem:
            return Choice(one.path, tuple(passed))
        passed.append(f"{one.path.name}: {problem}")
    if resume == "newest" or skip:
        raise _nothing(checkpoints, passed)
    return Choice(None, tuple(passed))


@named(_FUNCTION)
def _nothing(checkpoints: Path, rows: list[str]) -> CheckpointError:
    text = f"finds no complete checkpoint in {checkpoints}."
    return CheckpointError(message(text, rows, "Leave --resume out to start a new run."))


@named(_FUNCTION)
def is_damaged(path: Path) -> bool:
    """Whether a checkpoint's data is not what its manifest says. Collective; rank 0 reads all of it."""
    _, answers = together(lambda: (None, own_rank() == 0 and bool(checkpoint.inspect(path).damaged)))
    return answers[0]


@contextlib.contextmanager
@named("fsharding train")
def alone_in(out: Path) -> Generator[None]:
    """Holds a directory for one run, and makes sure that all ranks see the same one. Collective.

    Rank 0 locks `.lock` there. The lock is the kernel's and goes with the process, however that ends; on a file system
    that several hosts share it holds for all of them, if that knows locks. Its text says who holds it.

    Args:
        out: the directory of the run; it exists.

    Raises:
        CheckpointError: on every rank: another run is there, or a rank sees another directory.
    """
    with contextlib.ExitStack() as stack:

        def hold() -> tuple[None, str]:
            return None, stack.enter_context(_held(out)) if own_rank() == 0 else ""

        _, (token, *_) = together(hold)
        on_all(lambda: _check_seen(out, token))
        yield


@contextlib.contextmanager
def _held(out: Path) -> Generator[str]:
    """Lock a directory, and yield what is then written in its lock."""
    fd = os.open(out / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield _token(fd, out)
    finally:
        # Explicitly: a process that was forked meanwhile has it open as well.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _token(fd: int, out: Path) -> str:
    try:
        lock_alone(fd)
    except BlockingIOError as error:
        holder = os.pread(fd, 300, 0).decode(errors="replace").partition("\n")[0]
        mend = "Wait for its end, or give another --out."
        text = f"cannot run in {out}: another run is there."
        raise ConfigError(message(text, [holder] if holder else [], mend)) from error
    holder = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    token = f"{holder}\n{uuid.uuid4().hex}\n"
    os.ftruncate(fd, 0)
    os.pwrite(fd, token.encode(), 0)
    os.fsync(fd)
    return token


def _check_seen(out: Path, token: str) -> None:
    """Refuses a directory other than rank 0's."""
    try:
        result = (out / LOCK).read_text(errors="replace")
    except OSError:
        result = ""
    if result != token:
        mend = "Give all ranks an --out on a file system that they share: checkpoints are written by all of them."
        raise ConfigError(message(f"does not see the --out of rank 0 at {out}.", mend=mend))
