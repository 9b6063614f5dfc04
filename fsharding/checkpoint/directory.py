"""Directories of checkpoints: written next to the target, renamed once complete, and found after any interruption.

Guarantee: while a checkpoint is replaced, a complete one exists at any time; only plain files of the manifest are read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

from fsharding.base.errors import CheckpointError, message
from fsharding.base.local_paths import check_local
from fsharding.base.public import public
from fsharding.base.untrusted import read_json, read_plain
from fsharding.checkpoint.chunks import plain_files
from fsharding.checkpoint.manifest import MANIFEST, Manifest, SavedFile, check_readable, limits, parse
from fsharding.checkpoint.reader import damage

__all__ = [
    "Seen", "StrPath", "append", "clear_stale", "commit", "find", "found", "in_one_line", "latest", "lock_alone",
    "metadata", "naming_path", "new_file", "new_target", "not_shared", "partial_checkpoint", "partial_of",
    "partial_output", "place", "read_manifest", "real_path", "retire", "survey", "sync", "wording_failures", "writing",
]  # fmt: skip

StrPath: TypeAlias = str | os.PathLike[str]

_ASIDE = re.compile(r"\.(.+)\.replaced")
_STALE = re.compile(r"\.(\d+)\.(partial|replaced|retired)")
_OURS = re.compile(r"manifest\.json|\.metadata|__\d+_\d+\.distcp")
_TENSORS = r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
_UNFINISHED = "its save was never finished"
_LATEST = "fs.checkpoint.latest(directory) finds the newest complete checkpoint of a directory."
_WRITTEN = re.compile(rf"{_OURS.pattern}|{_TENSORS}|(generation_)?config\.json")


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


# ------------------------------------------------------------------------------------------------------------- writing
@contextlib.contextmanager
def partial_output(target: Path) -> Generator[Path]:
    """Lock an empty directory next to a target; `place` renames it, and an exception removes it."""
    path = partial_of(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, target) as lock:
        try:
            for name in os.listdir(path):
                (path / name).unlink()
            yield path
        except BaseException:  # also Ctrl-C
            with contextlib.suppress(OSError):  # the next save tries again to remove it
                if lock.is_at(path):
                    shutil.rmtree(path)
            raise


def place(target: Path, output: Path | None = None) -> None:
    """Rename a complete output, by default the partial directory, to its target, which must not exist."""
    output = partial_of(target) if output is None else output
    sync(output)
    output.rename(target)
    sync(target.parent)


@contextlib.contextmanager
def writing(target: Path, *, file: bool = False) -> Generator[Path]:
    """Yield a path to write to; it is renamed to the target at the end, or removed if the block raises."""
    with wording_failures(), naming_path(target), partial_output(target) as folder:
        # A file is written inside of the directory, so that locks, and what a kill leaves, are always directories.
        output = folder / target.name if file else folder
        yield output
        place(target, output)
        if file:
            folder.rmdir()


@contextlib.contextmanager
def partial_checkpoint(target: Path) -> Generator[Path]:
    """Lock the directory that a save of a checkpoint writes to; `commit` renames it to the target."""
    with partial_output(target) as path:
        # The save that wrote the existing target may still be cleaning up: it holds a lock on its renamed directory.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), _holding(target, target):
            pass
        aside = _aside(target)
        if aside.is_dir() and not target.exists():
            aside.rename(target)
        if os.path.lexists(target) and not _is_ours(target):
            mend = "Pass a different path; only checkpoints are ever overwritten."
            raise CheckpointError(message(f"cannot write {target}: it exists and is not a checkpoint.", mend=mend))
        clear_stale(target.parent)
        yield path


def commit(target: Path, text: str, files: Mapping[str, SavedFile]) -> None:
    """Add the manifest to a partial checkpoint, and rename it to its target."""
    folder, aside = partial_of(target), _aside(target)
    sizes = {name: os.stat(folder / name).st_size for name in os.listdir(folder)}
    if rows := [f"{name}: incomplete on rank 0" for name, file in files.items() if sizes.get(name) != file.bytes]:
        raise not_shared(target, rows)
    check_readable(text, sum(file.bytes for file in files.values()))
    # The manifest is written last, after the ranks have synced all files that it names: a directory that has one is
    # complete, even after a power failure. For the same reason, sync it and the directory before the renames.
    with new_file(folder / MANIFEST) as stream:
        stream.write(text.encode())
    sync(folder)
    if aside.is_dir():
        shutil.rmtree(aside)
    if replaced := target.exists():
        # A rename can't replace a directory that isn't empty. If the process is killed between the two renames, `find`
        # and `latest` find the old checkpoint under its `.replaced` name, as long as the target doesn't exist.
        target.rename(aside)
    try:
        folder.rename(target)
    except OSError:
        if replaced:
            aside.rename(target)
        raise
    sync(target.parent)  # so that the renames survive a power failure
    if replaced:
        shutil.rmtree(aside, ignore_errors=True)  # the next save removes what is left


@contextlib.contextmanager
def new_file(path: Path) -> Generator[BinaryIO]:
    """Create a file, and sync it at the end of the block."""
    with path.open("xb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def not_shared(target: Path, rows: Sequence[str]) -> CheckpointError:
    """Return the error of ranks that do not see the same directory."""
    rule = f"needs a directory that all ranks share; {target.parent} isn't shared."
    mend = "Pass a path on a file system that every host has mounted at the same place."
    return CheckpointError(message(rule, rows, mend))


def partial_of(target: Path) -> Path:
    """Return the path of the partial output for a target."""
    return target.with_name(f".{target.name}.partial")


class _Lock(NamedTuple):
    """An open file or directory that this process has locked."""

    fd: int
    known: bool  # false if the file system doesn't support locks: other processes may hold it too

    def is_at(self, path: Path) -> bool:
        """Whether it is still at a path, neither renamed nor removed."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            return False


@contextlib.contextmanager
def lock_alone(fd: int) -> Generator[_Lock]:
    """Lock an open file or directory for this process, and close it at the end; the kernel unlocks it on a kill."""
    try:
        known = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            known = False
        yield _Lock(fd, known)
    finally:
        # Unlock before closing: a child process that was started meanwhile has the same open file, and so the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):  # nothing was written through it
            os.close(fd)


@contextlib.contextmanager
def _holding(path: Path, target: Path) -> Generator[_Lock]:
    """Lock a directory; only directories are opened, since opening a pipe would block."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(lock_alone(os.open(path, flags)))
        except BlockingIOError as error:
            mend = "Wait for it, or pass a different path."
            text = message(f"cannot write {target}: another save is writing it.", mend=mend)
            raise CheckpointError(text) from error
        yield lock


@contextlib.contextmanager
def _locked(path: Path, target: Path) -> Generator[_Lock]:
    """Make a directory and lock it; refuse one with files that no save has written."""
    rule = f"cannot write {target}: the partial output {path} has content that no save has written."
    mend = "Move it away, or pass a different path."
    while True:
        with contextlib.suppress(FileExistsError):  # not exist_ok=True, which checks again and may find it removed
            path.mkdir()
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(_holding(path, target))
            except FileNotFoundError:  # another save has just finished with it
                continue
            except NotADirectoryError as error:
                raise CheckpointError(message(rule, ["it isn't a directory"], mend)) from error
            if not lock.is_at(path):
                continue
            if rows := [x for x in sorted(os.listdir(path)) if x != target.name and not _WRITTEN.fullmatch(x)]:
                raise CheckpointError(message(rule, rows, mend))
            yield lock
            return


def clear_stale(root: Path) -> None:
    """Remove what interrupted saves of steps left in a directory. Runs on one rank."""
    # Remove a partial checkpoint only if its lock is free, and never if the file system doesn't support locks. Remove a
    # replaced one only if a complete checkpoint has its name.
    for name in os.listdir(root):
        result = _STALE.fullmatch(name)
        folder = root / name
        if result is None or folder.is_symlink() or not folder.is_dir():
            continue
        step, kind = result.groups()
        if kind == "retired" or (kind == "replaced" and not _state_of(root / step)[1]):
            shutil.rmtree(folder, ignore_errors=True)
        elif kind == "partial" and all(_OURS.fullmatch(inner) for inner in os.listdir(folder)):
            gone = FileNotFoundError, NotADirectoryError, CheckpointError
            with contextlib.suppress(*gone), _holding(folder, folder) as lock:
                # Only if it is still there: a save that finished before the lock was taken has renamed it.
                if lock.known and lock.is_at(folder):
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def naming_path(path: Path) -> Generator[None]:
    """Add a path to OSErrors that have none, such as ENOSPC."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def append(fd: int, data: bytes) -> None:
    """Append all bytes to a file, or none: truncate it again if the disk is full."""
    size = os.fstat(fd).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError:
        os.ftruncate(fd, size)
        raise


@contextlib.contextmanager
def wording_failures() -> Generator[None]:
    """Convert OSErrors, such as of a full disk, to `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(message("failed.", [f"{type(error).__name__}: {error}"])) from error


def _is_ours(target: Path) -> bool:
    """Whether a directory is a checkpoint, complete or not, or empty."""
    if not target.is_dir():
        return False
    if all(_OURS.fullmatch(name) for name in os.listdir(target)):
        return True
    try:
        read_manifest(target, newer=True)
    except (CheckpointError, OSError):
        return False
    return True


def sync(path: Path) -> None:
    """Sync a file, or the entries of a directory, to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------------------------------- reading
def real_path(path: StrPath) -> Path:
    """Resolve a user's path, which need not exist."""
    check_local(path)
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:
        raise CheckpointError(message(f"cannot use the path {os.fspath(path)!r}.", [str(error)])) from error


def new_target(path: StrPath) -> tuple[Path, list[str]]:
    """Return the absolute path of a new output, without resolving a link, and a row if it exists."""
    real_path(path)
    target = Path(os.path.abspath(path))
    return target, [f"{target}: the path exists, and is never overwritten"] if os.path.lexists(target) else []


def find(path: StrPath) -> Path:
    """Find a checkpoint at its path, or under its `.replaced` name if a save was interrupted while replacing it."""
    target = real_path(path)
    aside = _aside(target)
    with wording_failures():
        return aside if not target.exists() and (aside / MANIFEST).is_file() else target


def found(path: StrPath) -> tuple[Path, Manifest]:
    """Return the directory of a checkpoint, and its manifest."""
    with wording_failures():
        folder = find(path)
        return folder, read_manifest(folder)


def read_manifest(folder: Path, *, newer: bool = False) -> Manifest:
    """Read the manifest in a directory."""
    if os.path.lexists(folder / MANIFEST):
        try:
            others = sum(file.bytes for name, file in plain_files(folder).items() if name != MANIFEST)
            most_bytes, most_values = limits(others)
            text = read_plain(folder / MANIFEST, most_bytes)
        except ValueError as error:
            what, mend = f"its {MANIFEST} {str(error).removeprefix('it ')}", _LATEST
        else:
            return parse(text, str(folder), newer=newer, values=most_values)
    else:
        what, mend = _something_else(folder)
    raise CheckpointError(message(f"finds no checkpoint at {folder}: {what}.", mend=mend))


def _something_else(folder: Path) -> tuple[str, str]:
    """Describe what is at a path instead of a checkpoint, and how to read it."""
    if not folder.is_dir():
        return "it isn't a directory" if os.path.lexists(folder) else "there is no such directory", _LATEST
    names = set(os.listdir(folder))
    foreign = "fs.foreign.load_weights(path, layout, names)"
    if not names:
        return "the directory is empty", _LATEST
    if backend := _megatron(folder):
        mend = "Pass a directory that fs.checkpoint.save has written."
        if backend == "torch_dist":
            mend = "Read it with fs.megatron.load(path, layout, config), or fs.megatron.load_state."
        return f"it is one in Megatron's {backend} format", mend
    if ".metadata" in names:
        what = "torch.distributed.checkpoint wrote it, as FSDP2 does, or its save was never finished"
        return f"{what}: it has no {MANIFEST}", f"Read the tensors of such a directory with {foreign}."
    if "config.json" in names or any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "it is a directory of Hugging Face", f"Read its weights with fs.hf.load(path, layout), or {foreign}."
    for inner in (folder, folder / "ckpt"):
        if complete := _complete(inner):
            what = "it is the directory of a run" if inner != folder else "it is a directory of checkpoints"
            return what, f"Pass one of its checkpoints, such as the newest: {complete[0]}"
    if "metrics.jsonl" in names:
        return "it is the directory of a run that has no complete checkpoint", "Pass the directory of a different run."
    return f"there is no {MANIFEST} in it, so its save was never finished", _LATEST


def _megatron(folder: Path) -> str:
    """Name the Megatron format of a directory; "" for others."""
    with contextlib.suppress(OSError, ValueError):
        said = read_json(folder / "metadata.json", most=1 << 16)
        backend = said.get("sharded_backend") if isinstance(said, dict) else None
        if backend in ("torch_dist", "zarr"):
            return str(backend)
    return "zarr" if any((folder / name / ".zarray").is_file() for name in ("", *os.listdir(folder))) else ""


@public
def metadata(path: StrPath) -> Manifest:
    """Read the manifest of a checkpoint, and no other file. Any process can call it alone.

    Args:
        path: Checkpoint directory.

    Returns:
        The manifest: step, layout, leaves, files, and `extra`.

    Raises:
        CheckpointError: the path isn't a checkpoint, or its manifest is damaged or of a newer version.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: {"w": torch.ones(4)}, fs.sgd(0.1), fs.random.key(0), layout)
        >>> fs.checkpoint.save("run/first", state, extra={"epoch": 2})
        >>> fs.checkpoint.metadata("run/first").extra
        {'epoch': 2}
    """
    return found(path)[1]


@public
def latest(directory: StrPath) -> Path | None:
    """Find the complete checkpoint with the highest step.

    A checkpoint is complete if its manifest is readable and all files exist with the right sizes; `load` compares the
    checksums. Checkpoints of newer format versions count, so that `load` refuses them instead of silently resuming from
    an older one. So do checkpoints that an interrupted save was replacing.

    Args:
        directory: Parent directory of checkpoints with any names.

    Returns:
        Path of the checkpoint; None if there is none.

    Raises:
        CheckpointError: the directory can't be read.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: {"w": torch.ones(4)}, fs.sgd(0.1), fs.random.key(0), layout)
        >>> fs.checkpoint.save("run/first", state)
        >>> fs.checkpoint.latest("run").name
        'first'
    """
    with wording_failures():
        return next(iter(_complete(directory)), None)


class Seen(NamedTuple):
    """A directory that looks like a checkpoint."""

    path: Path
    number: int  # its step, or its name as a number if the manifest is unreadable
    problem: str  # why it isn't complete, or ""


def survey(directory: StrPath) -> list[Seen]:
    """List everything that looks like a checkpoint, newest first, and complete ones first among equal steps."""
    root = real_path(directory)
    result = dict[str, Seen]()
    for name in os.listdir(root) if root.is_dir() else ():
        numbered = re.fullmatch(r"\.?(\d+)(\.partial)?", name)
        step, problem = _state_of(root / name)
        if name.startswith(".") and not _ASIDE.fullmatch(name):  # a save may be writing it
            step, problem = None, problem or _UNFINISHED
        if step is not None:
            result[name] = Seen(root / name, step, "")
        elif numbered is not None and (root / name).is_dir():
            result[name] = Seen(root / name, int(numbered[1]), problem)
    # A `.replaced` checkpoint counts only if no complete one has its name.
    outdated = {f".{name}.replaced" for name, seen in result.items() if not seen.problem}
    kept = [seen for name, seen in result.items() if name not in outdated]
    # Several names may have one step, since a run may skip steps: larger numbers, so longer names, are newer.
    return sorted(kept, key=lambda x: (x.number, not x.problem, len(x.path.name), x.path.name), reverse=True)


def _complete(directory: StrPath) -> list[Path]:
    """List the complete checkpoints of a directory, newest first."""
    return [seen.path for seen in survey(directory) if not seen.problem]


def _state_of(folder: Path) -> tuple[int | None, str]:
    """Return the step of a complete checkpoint, or None and the problem in one line."""
    if not os.path.lexists(folder / MANIFEST):
        return None, _UNFINISHED  # the manifest is written last
    try:
        manifest = read_manifest(folder, newer=True)
        wrong = damage(folder, manifest.files, hashed=False)
        return (None, wrong[0]) if wrong else (manifest.step, "")
    except (CheckpointError, OSError) as error:
        return None, in_one_line(error)


def in_one_line(error: Exception) -> str:
    """Shorten an error to its rule and first row."""
    return " ".join(line.strip() for line in str(error).splitlines()[:2])


def retire(root: Path, keep: int, newest: Path) -> None:
    """Remove all but the newest checkpoints with numbers as names; always keep `newest`. Runs on one rank."""
    # Rename first, so that an interruption never leaves a partial checkpoint under a valid name.
    clear_stale(root)
    numbered = [x for x in _complete(root) if re.fullmatch(r"0|[1-9]\d*", x.name) and x != newest]
    for path in sorted(numbered, key=lambda x: int(x.name), reverse=True)[keep - 1 :]:
        hidden = root / f".{path.name}.retired"
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
