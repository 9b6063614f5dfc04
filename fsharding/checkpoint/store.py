"""Directories of checkpoints: a save shows up whole or not at all, and is found again whatever broke in between.

In: a target path. Out: a fresh directory beside it to write to, then one rename; the newest complete one of many.
An older checkpoint at the target is first renamed to `.<name>.replaced`, so that one of the two is there at every
moment, and who looks for the target finds it there. Law: only plain files that the manifest names are ever read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from fsharding.checkpoint.manifest import MANIFEST, Manifest, SavedFile, parse
from fsharding.errors import CheckpointError, message

__all__ = [
    "StrPath",
    "commit",
    "damage",
    "digest_files",
    "discard",
    "find",
    "latest",
    "metadata",
    "partial_of",
    "prepare",
    "read_manifest",
]

StrPath: TypeAlias = str | os.PathLike[str]

_ASIDE = re.compile(r"\.(.+)\.replaced")
_OURS = re.compile(r"manifest\.json|\.metadata|__\d+_\d+\.distcp")


def partial_of(target: Path) -> Path:
    """The directory that a save writes to, beside its target."""
    return target.with_name(f".{target.name}.partial")


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


# ------------------------------------------------------------------------------------------------------------- writing


def prepare(target: Path) -> Path:
    """Makes the directory to write to, and clears away what an interrupted save left. On one rank.

    Raises:
        CheckpointError: there is something at the target that is no checkpoint.
    """
    partial, aside = partial_of(target), _aside(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    if aside.is_dir() and not target.exists():
        aside.rename(target)
    if os.path.lexists(target) and not _is_ours(target):
        mend = "Give another path; nothing but a checkpoint is ever overwritten."
        rule = f"cannot write {target}: something that is no checkpoint is there."
        raise CheckpointError(message("fs.checkpoint.save", rule, mend=mend))
    if partial.is_dir():
        shutil.rmtree(partial)
    partial.mkdir()
    return partial


def _is_ours(target: Path) -> bool:
    """Whether a directory is a checkpoint, whole or not, or empty."""
    if not target.is_dir():
        return False
    if all(_OURS.fullmatch(name) for name in os.listdir(target)):
        return True
    try:
        read_manifest("fs.checkpoint.save", target, newer=True)
    except (CheckpointError, OSError):
        return False
    return True


def digest_files(folder: Path, names: Iterable[str]) -> dict[str, SavedFile]:
    """Size and sha256 of files of a directory."""
    return {name: _digest(folder / name) for name in names}


def _digest(path: Path) -> SavedFile:
    with path.open("rb") as file:
        return SavedFile(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def commit(partial: Path, target: Path, text: str, files: dict[str, SavedFile]) -> None:
    """Adds the manifest and puts the directory in its place. On one rank.

    Args:
        partial: what `prepare` gave, with all files in it.
        target: where it goes.
        text: of the manifest.
        files: that the manifest names.

    Raises:
        CheckpointError: files that other ranks wrote are not there.
    """
    sizes = {name: os.stat(partial / name).st_size for name in os.listdir(partial)}
    rows = [f"{name}: not seen whole by rank 0" for name, file in files.items() if sizes.get(name) != file.bytes]
    if rows:
        rule = f"needs a directory that all ranks share, and {target.parent} is none."
        raise CheckpointError(message("fs.checkpoint.save", rule, rows))
    with (partial / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    aside = _aside(target)
    if aside.is_dir():
        shutil.rmtree(aside)
    replaced = target.exists()
    if replaced:
        target.rename(aside)
    try:
        partial.rename(target)
    except OSError:
        if replaced:
            aside.rename(target)
        raise
    _sync(target.parent)
    if replaced:
        # The new checkpoint is in its place: what is left of the old one is cleared by the next save.
        shutil.rmtree(aside, ignore_errors=True)


def discard(target: Path) -> None:
    """Removes what a failed save left beside the target; the next save removes what cannot be removed now."""
    shutil.rmtree(partial_of(target), ignore_errors=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------------------------------- reading


def find(path: StrPath) -> Path:
    """Where a checkpoint is: at its path, or set aside by a save that was interrupted while it replaced it."""
    target = Path(os.path.realpath(path))
    aside = _aside(target)
    return aside if not target.exists() and (aside / MANIFEST).is_file() else target


def read_manifest(function: str, folder: Path, *, newer: bool = False) -> Manifest:
    """The manifest in a directory.

    Raises:
        CheckpointError: no directory, no manifest, or one that cannot be used; see `manifest.parse`.
    """
    if not folder.is_dir():
        what = "it is no directory" if os.path.lexists(folder) else "there is no such directory"
    elif not os.listdir(folder):
        what = "the directory is empty"
    elif not os.path.lexists(folder / MANIFEST):
        what = f"there is no {MANIFEST} in it, so its save was never finished"
    elif not stat.S_ISREG(os.lstat(folder / MANIFEST).st_mode):
        what = f"its {MANIFEST} is no plain file"
    else:
        return parse((folder / MANIFEST).read_bytes(), function, str(folder), newer=newer)
    mend = "fs.checkpoint.latest(directory) finds the newest complete checkpoint of a directory."
    raise CheckpointError(message(function, f"finds no checkpoint at {folder}: {what}.", mend=mend))


def damage(folder: Path, files: dict[str, SavedFile], *, hashed: bool = True) -> list[str]:
    """What is wrong with files of a checkpoint, one row each.

    Args:
        folder: the checkpoint.
        files: which files, and what the manifest says of them.
        hashed: compare checksums too, not sizes alone.
    """
    rows: list[str] = []
    for name, want in files.items():
        try:
            found = os.lstat(folder / name)
        except FileNotFoundError:
            rows.append(f"{name} is missing")
            continue
        if not stat.S_ISREG(found.st_mode):
            rows.append(f"{name} is no plain file")
        elif found.st_size != want.bytes:
            rows.append(f"{name} has {found.st_size:,} bytes, the manifest says {want.bytes:,}")
        elif hashed and (got := _digest(folder / name).sha256) != want.sha256:
            rows.append(f"{name} has the sha256 {got[:12]}..., the manifest says {want.sha256[:12]}...")
    return rows


def metadata(path: StrPath) -> Manifest:
    """What a checkpoint says of itself; reads no other file, and any process can call it.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest cannot be used.
    """
    return read_manifest("fs.checkpoint.metadata", find(path))


def latest(directory: StrPath) -> Path | None:
    """The complete checkpoint of a directory with the highest step; None if there is none.

    Complete means: its manifest can be read, and every file that it names is there in its size. Checksums are left to
    `load`. A checkpoint of a newer format counts, so that `load` refuses it by name instead of going back in silence.
    One that was set aside by an interrupted save counts as long as nothing complete is in its place.

    Args:
        directory: which holds checkpoints, under any names.
    """
    root = Path(os.path.realpath(directory))
    steps: dict[str, int] = {}
    for name in sorted(os.listdir(root)) if root.is_dir() else ():
        step = None if name.startswith(".") and not _ASIDE.fullmatch(name) else _complete(root / name)
        if step is not None:
            steps[name] = step
    for name in list(steps):
        if (aside := _ASIDE.fullmatch(name)) and aside[1] in steps:
            del steps[name]
    best = max(steps, key=lambda name: (steps[name], name), default=None)
    return None if best is None else root / best


def _complete(folder: Path) -> int | None:
    """The step of a complete checkpoint, else None."""
    with contextlib.suppress(CheckpointError, OSError):
        manifest = read_manifest("fs.checkpoint.latest", folder, newer=True)
        if not damage(folder, manifest.files, hashed=False):
            return manifest.step
    return None
