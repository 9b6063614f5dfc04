"""Finds the checkpoint that a run resumes from, and makes sure that the run is alone in its directory."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fsharding import checkpoint
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.usage import option
from fsharding.base.errors import CheckpointError, ConfigError, message, report
from fsharding.checkpoint.collective_call import on_all, together
from fsharding.checkpoint.directory import lock_alone, survey
from fsharding.mesh.device_mesh import own_rank

__all__ = ["Choice", "batches_seen", "changes", "choose", "is_damaged", "lock_run", "notes"]

LOCK = ".lock"


class Choice(NamedTuple):
    """The checkpoint that a run resumes from, if any, and a row for each newer one that is passed over."""

    path: Path | None
    passed: tuple[str, ...] = ()


def choose(resume: str, checkpoints: Path, skip: Collection[Path] = ()) -> Choice:
    """Find the checkpoint that `--resume` means, without those in `skip`, whose data is damaged."""
    if not resume:
        return Choice(None)
    if resume not in ("auto", "newest"):
        path = checkpoints / resume if resume.isdigit() else Path(resume)
        checkpoint.metadata(path)
        return Choice(path)  # never one of `skip`: --resume-older needs auto or newest
    passed: list[str] = []
    for one in survey(checkpoints):
        problem = "its data is damaged" if one.path in skip else one.problem
        if not problem:
            return Choice(one.path, tuple(passed))
        passed.append(f"{one.path.name}: {problem}")
    if resume == "newest" or skip:
        text = f"fsharding train --resume finds no complete checkpoint in {checkpoints}."
        raise CheckpointError(report(text, passed, "Leave --resume out to start a new run."))
    return Choice(None, tuple(passed))


def is_damaged(path: Path) -> bool:
    """Return whether a checkpoint's data differs from its manifest. Collective; rank 0 reads all of it."""
    _, answers = together(lambda: (None, own_rank() == 0 and bool(checkpoint.inspect(path).damaged)))
    return answers[0]


def batches_seen(newest: Path) -> int:
    """Return how many batches a run had seen when it saved a checkpoint."""
    manifest = checkpoint.metadata(newest)
    batches = notes(manifest).get("batches", manifest.step)
    if type(batches) is not int or batches < 0:
        text = f"cannot go on from {newest}: it does not say how many batches its run had seen."
        mend = "fs.checkpoint.load reads it; --resume takes what fsharding train has saved."
        raise CheckpointError(report(f"fsharding train --resume {text}", [f"batches: {batches!r}"], mend))
    return batches


def notes(manifest: checkpoint.Manifest) -> dict[str, Any]:
    """Return what a run has added to a checkpoint, {} if something else saved it. Its `config` is a dictionary."""
    extra = manifest.extra if isinstance(manifest.extra, dict) else {}
    config = extra.get("config")
    return {**extra, "config": config if isinstance(config, dict) else {}}


def changes(config: TrainConfig, before: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Return a row for each option that had another value when a checkpoint was saved."""
    rows: list[str] = []
    for name in names:
        then = str(before.get(name))
        now = str(getattr(config, name))
        if name in before and then != now:
            words = [text if text not in ("", "None") else "left out" for text in (then, now)]
            rows.append(f"{option(name)}: {words[0]} in the checkpoint, {words[1]} now")
    return rows


def lock_run(out: Path, held: ExitStack) -> None:
    """Lock the directory of a run until `held` ends, and refuse ranks that see another directory. Collective."""
    _, (token, *_) = together(lambda: (None, _lock(out, held) if own_rank() == 0 else ""))
    on_all(lambda: _check_seen(out, token))


def _lock(out: Path, held: ExitStack) -> str:
    """Lock a directory on rank 0, and return what is then written in its lock."""
    # The kernel drops the lock with the process, however that ends; on a shared file system it may hold for all hosts.
    fd = os.open(out / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        held.enter_context(lock_alone(fd))
    except BlockingIOError as error:
        holder = (out / LOCK).read_text(errors="replace")[:300].partition("\n")[0]
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
    with suppress(OSError):
        if (out / LOCK).read_text(errors="replace") == token:
            return
    mend = "Give all ranks an --out on a file system that they share: checkpoints are written by all of them."
    raise ConfigError(message(f"does not see the --out of rank 0 at {out}.", mend=mend))
