"""Files of text: which ones there are, in an order that every machine agrees on, and their bytes.

In: paths of files and directories. Out: lists of files, or all bytes in one buffer with the places where files begin.
Guarantee: the order depends on names alone, and a file counts once.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from fsharding.base.calls import named
from fsharding.base.errors import DataError, message
from fsharding.base.local_paths import check_local
from fsharding.base.untrusted import read_plain

__all__ = ["StrPath", "files_below", "python_stdlib_files", "read_files"]

StrPath: TypeAlias = str | os.PathLike[str]
"""A path."""

_LARGEST = 1 << 40

_NO_TRAINING_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def read_files(paths: StrPath | Iterable[StrPath]) -> tuple[bytearray, list[int], str]:
    """The bytes of files, one after the other; see `data.from_files`.

    Args:
        paths: a file, a directory, or several of them.

    Returns:
        The bytes, where each file that is not empty begins, and what to call all of it in messages.

    Raises:
        DataError: a path is missing or cannot be read, there are no files, or all are empty.
    """
    names = [paths] if isinstance(paths, str | os.PathLike) else paths
    names = [*names]
    check_local(*names)
    given = sorted({Path(name) for name in names}, key=Path.as_posix)
    files: dict[Path, Path] = {}
    for path in given:
        result = _walk(path, _visible) if path.is_dir() else iter([path])
        files.update((file.resolve(), file) for file in result)
    more = f" and {len(given) - 3} more" if len(given) > 3 else ""
    source = ", ".join(map(str, given[:3])) + more if given else "an empty list of paths"
    buffer = bytearray()
    begins = list[int]()
    rows = list[str]()
    for file in files.values():
        try:
            content = read_plain(file.resolve(), _LARGEST)
            begins += [len(buffer)] if content else []
            buffer += content
        except OSError as error:
            rows.append(f"{file}: {error.strerror}")
        except ValueError as error:
            rows.append(f"{file}: {error}")
    if rows:
        raise DataError(message(f"cannot read {len(rows)} paths.", rows, "Correct or remove them."))
    if not buffer:
        what = f"found {len(files)} files, all empty, in {source}." if files else f"found no files in {source}."
        raise DataError(message(what, mend="Name files, or a directory that has some."))
    return buffer, begins, source


def files_below(root: Path) -> list[Path]:
    """The files of a directory that are not hidden, in the order of their relative paths.

    Raises:
        DataError: there are none, or a directory cannot be listed.
    """
    files = [*_walk(root, _visible)]
    if not files:
        raise DataError(message(f"found no files in {root}.", mend="Name a directory that has some."))
    return files


def _visible(name: str, _is_dir: bool) -> bool:
    return not name.startswith(".")


def _walk(root: Path, keep: Callable[[str, bool], bool]) -> Iterator[Path]:
    """The regular files below `root` in the order of their relative paths; `keep(name, is_dir)` says what counts."""
    failed: list[OSError] = []
    files: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=failed.append):
        folders[:] = [name for name in folders if keep(name, True)]
        files += [path for name in names if keep(name, False) and (path := Path(folder, name)).is_file()]
    if failed:
        rows = [f"{error.filename}: {error.strerror}" for error in failed]
        raise DataError(message(f"cannot list {len(rows)} directories.", rows, "Make them readable."))
    yield from sorted(files, key=lambda file: file.relative_to(root).as_posix())


@named("python_stdlib_files")
def python_stdlib_files(max_bytes: int = 1 << 24) -> list[Path]:
    """The `.py` files of this Python's standard library: data that every machine has.

    Third-party packages, test directories and files that differ between machines of one Python version are left out.

    Args:
        max_bytes: the list ends before the file that would take it beyond this sum of sizes.

    Returns:
        Paths in the order of their names relative to the library.

    Raises:
        DataError: there are none, or not one fits in `max_bytes`.

    Example:
        >>> files = fs.data.python_stdlib_files(max_bytes=1 << 16)
        >>> files[0].name, sum(file.stat().st_size for file in files) <= 1 << 16
        ('__future__.py', True)
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    left = max_bytes
    for file in _walk(root, _is_library_text):
        left -= file.stat().st_size
        if left < 0:
            break
        files.append(file)
    if not files:
        rule = f"found no .py files within max_bytes {max_bytes} in {root}."
        raise DataError(message(rule, mend="Raise max_bytes, or name your own files."))
    return files


def _is_library_text(name: str, is_dir: bool) -> bool:
    if is_dir:
        return name not in _NO_TRAINING_TEXT and not name.startswith((".", "config-"))
    return name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize"))
