"""Where the boxes of leaves are in the files of a checkpoint: one table, whether the manifest or `.metadata` gave it.

In: the manifest's `chunks`, or what `.metadata` says. Out: `Stored` by path. The manifest has the place of the values
themselves, so that neither `.metadata` nor a record, which are pickles, is read; `.metadata` has the place of records.
Guarantee: chunks have each element of their leaf once, in files that the directory has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from fsharding.base.errors import CheckpointError, message
from fsharding.checkpoint.manifest import MANIFEST, Manifest, is_plain_name
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box

__all__ = ["Entry", "Place", "Stored", "checked", "described", "file_name", "from_manifest", "unfit"]

_MOST_BYTES = 8 << 20
"""Bytes of the table of a manifest, about 250,000 chunks: `latest` parses the manifest of every checkpoint."""
_SEPARATORS = str.maketrans(":,", "  ")

Place: TypeAlias = tuple[str, int, int]
"""Where a record is: name of the file, first byte, length."""


class Entry(NamedTuple):
    """A chunk: a box of a leaf, in a file.

    Attributes:
        path: of the leaf.
        shape: global shape of the leaf.
        dtype: its name, such as "float32".
        box: which part of the leaf it is.
        file: name of the file.
        offset: where its record begins, in bytes; if there is no need to read the record, where the values begin.
        length: of the record, or of the values, in bytes.
        values: byte of the file at which the values begin, in row-major order; None if only the record has it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    file: str
    offset: int
    length: int
    values: int | None = None


class Stored(NamedTuple):
    """A leaf as the files have it.

    Attributes:
        shape: global shape.
        dtype: its name, such as "float32".
        chunks: where its boxes are.
        why: why it is not read; it has no chunks then.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Entry, ...]
    why: str = ""


def file_name(number: int) -> str:
    """The name of the file that a rank writes."""
    return f"__{number}_0.distcp"


def described(entries: Iterable[Entry]) -> dict[str, str] | None:
    """Describe chunks as the manifest does, by path: `FILE BYTE START:STOP ...` for each, with commas in between.

    FILE is the number of the file, BYTE where the values begin, and each dim has its `START:STOP`. A leaf is one
    string, since a manifest may only have so many values.

    Returns:
        None if there are too many chunks for a manifest, or one whose values have no known place.
    """
    result: dict[str, list[str]] = {}
    for entry in sorted(entries):
        start = entry.values if boxes.volume(entry.box) else 0
        if start is None:
            return None
        number = entry.file.removeprefix("__").removesuffix("_0.distcp")
        ranges = [f"{a}:{b}" for a, b in entry.box]
        result.setdefault(entry.path, []).append(" ".join([number, str(start), *ranges]))
    table = {path: ",".join(texts) for path, texts in result.items()}
    return table if sum(map(len, table.values())) <= _MOST_BYTES else None


def from_manifest(folder: Path, manifest: Manifest) -> dict[str, Stored]:
    """Read the chunks that a manifest describes, and check them.

    Raises:
        CheckpointError: chunks that do not fill their leaf, or a place that is not in the files.
    """
    table = manifest.chunks or {}
    sizes = {name: file.bytes for name, file in manifest.files.items()}
    result: dict[str, Stored] = {}
    rows = [f"{path}: is no leaf" for path in table if path not in manifest.tree]
    for path, (shape, dtype, _) in manifest.tree.items():
        try:
            places = _places(table.get(path, ""), len(shape), getattr(torch, dtype).itemsize)
        except ValueError as error:
            rows.append(f"{path}: {error}")
            continue
        result[path], wrong = checked(path, shape, dtype, places, sizes, values=True)
        rows += wrong
    if rows:
        raise unfit(folder, MANIFEST, "fit its files", rows)
    return result


def _places(text: str, dims: int, itemsize: int) -> list[tuple[Box, Place]]:
    """The boxes and places of a leaf of a manifest; see `described`."""
    numbers = [int(part) for part in text.translate(_SEPARATORS).split()]
    width = 2 + 2 * dims
    if len(numbers) % width:
        raise ValueError(f"its chunks have {len(numbers)} numbers, {width} each")
    result: list[tuple[Box, Place]] = []
    for i in range(0, len(numbers), width):
        ends = numbers[i + 2 : i + width]
        box = tuple(zip(ends[::2], ends[1::2], strict=True))
        result.append((box, (file_name(numbers[i]), numbers[i + 1], boxes.volume(box) * itemsize)))
    return result


def checked(
    path: str,
    shape: tuple[int, ...],
    dtype: str,
    places: Sequence[tuple[Box, Place | None]],
    sizes: Mapping[str, int],
    *,
    values: bool,
) -> tuple[Stored, list[str]]:
    """Check the chunks of a leaf, and return it with one row for whatever is wrong.

    Args:
        places: the box of each chunk, and where it is; None for nowhere.
        values: places are of values, not of records.
    """
    rows: list[str] = []
    result: list[Entry] = []
    seen: set[tuple[int, ...]] = set()
    volume = 0
    for box, where in places:
        if len(box) != len(shape) or any(not 0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True)):
            rows.append(f"chunk {box} is outside {list(shape)}")
            continue
        volume += boxes.volume(box)
        seen.add(tuple(a for a, _ in box))
        if where is None or not is_plain_name(where[0]) or where[0] not in sizes:
            rows.append(f"chunk {box} is in no file that the manifest names")
            continue
        file, start, length = where
        if not 0 <= start <= start + length <= sizes[file]:
            rows.append(f"chunk {box} is not inside {file}")
        result.append(Entry(path, shape, dtype, box, file, start, length, start if values else None))
    if volume != math.prod(shape) or len(seen) != len(places):
        rows.append(f"its {len(places)} chunks have {volume} of {math.prod(shape)} elements")
    elif not boxes.are_disjoint([entry.box for entry in result if boxes.volume(entry.box)]):
        rows.append("its chunks overlap")
    return Stored(shape, dtype, tuple(result)), [f"{path}: {row}" for row in rows]


def unfit(folder: Path, name: str, what: str, rows: Sequence[str]) -> CheckpointError:
    """The error of a file that does not describe its checkpoint."""
    mend = "Use another checkpoint, or a copy of this one."
    return CheckpointError(message(f"cannot read {folder}: its {name} does not {what}.", rows, mend))
