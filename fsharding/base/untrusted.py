"""Open and parse files from untrusted sources: no file can hang, crash or fill this process.

The result is a value within its limits, an `OSError`, or a `ValueError` that describes the file.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

__all__ = ["beside", "open_plain", "own_tree", "parse_json", "read_json", "read_plain", "values_of"]

StrPath: TypeAlias = str | os.PathLike[str]

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DEPTH = 200  # of JSON: the values are walked recursively, and Python allows a thousand nested calls

_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]|u([dD][89a-fA-F])|.)", re.DOTALL)
_BRACKETS = b"[{]}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))
_STEPS = np.array([1 if byte in b"[{" else -1 for byte in range(256)], np.int8)


# --------------------------------------------------------------------------------------------------------------- files
def open_plain(path: StrPath) -> BinaryIO:
    """Open a regular file for reading, unbuffered, without blocking and without following links."""
    # Checked before opening, which has side effects on some devices, and after it, when the file can't be replaced.
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise ValueError("it isn't a plain file")
    fd = os.open(path, _FLAGS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("it isn't a plain file")
    return open(fd, "rb", buffering=0)


def read_plain(path: StrPath, most: int) -> bytes:
    """Read all bytes of a regular file; see `open_plain`."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it has {size:,} bytes; at most {most:,} are read")
        parts: list[bytes] = []
        left = most + 1  # the file may grow during the read
        while left and (part := file.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise ValueError(f"it has more than {most:,} bytes")
    return b"".join(parts)


def own_tree(folder: Path) -> Path:
    """Return the directory to which links in a folder may lead: the folder, or a model in the Hub's cache."""
    # That cache stores a file as `models--ORG--NAME/blobs/HASH`; `models--ORG--NAME/snapshots/REVISION/FILE` is a link.
    for parent in folder.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return parent.parent
    return folder


def beside(folder: Path, name: str) -> Path:
    """Return the real path of an entry of a directory, which may be a link inside `own_tree(folder)`."""
    real = Path(os.path.realpath(folder / name, strict=True))
    tree = own_tree(folder)
    if not real.is_relative_to(tree):
        raise ValueError(f"it is a link that leads out of {tree}")
    return real


# ---------------------------------------------------------------------------------------------------------------- JSON
def read_json(path: StrPath, *, most: int, finite: bool = True) -> Any:
    """Read a JSON file; see `read_plain` and `parse_json`."""
    return parse_json(read_plain(path, most), finite=finite)


def parse_json(data: bytes, *, values: int = 1_000_000, finite: bool = True, negative: bool = True) -> Any:
    """Parse JSON in UTF-8; raise for repeated names, and for values outside of the limits."""
    text = data.decode("utf-8")
    # A short text with few brackets is within the limits, whether or not they are in strings.
    small = negative and len(data) < values and data.count(b"[") + data.count(b"{") <= _DEPTH
    plain = b"" if small else _without_strings(data)
    if (result := _count(plain)) > values:
        raise ValueError(f"it holds about {result:,} values; at most {values:,} are read")
    if not small and (depth := _depth(plain)) > _DEPTH:
        raise ValueError(f"its brackets are {depth:,} deep; at most {_DEPTH} are read")
    if not negative and b"-" in plain:
        raise ValueError("it has a number with a minus sign")
    if b"\\u" in data and any(escape[1] for escape in _ESCAPE.finditer(data)):
        raise ValueError("it has half of a surrogate pair, which isn't a character")
    kinds: dict[str, Any] = {"parse_float": _finite, "parse_constant": _no_number} if finite else {}
    return json.loads(text, object_pairs_hook=_object, **kinds)


def values_of(data: bytes) -> int:
    """Count the values of a JSON text like `parse_json`, without parsing it."""
    return _count(_without_strings(data))


def _without_strings(data: bytes) -> bytes:
    """Remove all strings from a JSON text, except for their closing quotes."""
    # Remove pairs of backslashes first: a remaining one before a quote escapes it. Outside of strings there are none.
    chars = np.frombuffer(data.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    inside = np.cumsum(chars == ord('"'), dtype=np.uint8) & 1
    return chars[inside == 0].tobytes()


def _count(plain: bytes) -> int:
    """Count the values of a text without strings: one for each comma and bracket."""
    return plain.count(b",") + plain.count(b"[") + plain.count(b"{") + 1


def _depth(plain: bytes) -> int:
    """Return the largest nesting depth of brackets in a text without strings."""
    brackets = np.frombuffer(plain.translate(None, _OTHERS), np.uint8)
    return int(np.cumsum(_STEPS[brackets], dtype=np.int32).max(initial=0))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"it has the name {_short(twice)} twice in one object")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"no float64 can hold the number {_short(text)}")
    return value


def _no_number(name: str) -> float:
    raise ValueError(f"{name} isn't a number in JSON")


_short = functools.partial("{:.60}".format)
