"""Where the boxes of leaves are in the files of a checkpoint: one table, from the manifest or from DCP's `.metadata`.

Guarantee: chunks have each element of their leaf once, in files that the directory has.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from fsharding.base.errors import CheckpointError, listed, message
from fsharding.base.untrusted import open_plain
from fsharding.checkpoint.manifest import MANIFEST, METADATA, Manifest, SavedFile, dtype_name, is_plain_name, is_shape
from fsharding.checkpoint.torch_pickles import Made, Pairs, find_in, named, sizes_of, unpickled
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box

__all__ = [
    "LARGEST", "Entry", "Place", "Stored", "described", "file_name", "from_manifest", "from_metadata", "plain_files",
    "record_places",
]  # fmt: skip

LARGEST = 1 << 29  # bytes of a `.metadata` that is read: about two million chunks

_MOST_BYTES = 8 << 20
"""Bytes of the table of a manifest, about 250,000 chunks: `latest` parses the manifest of every checkpoint."""
_SEPARATORS = str.maketrans(":,", "  ")

Place: TypeAlias = tuple[str, int, int]
"""Where a record is: name of the file, first byte, length."""


class Entry(NamedTuple):
    """A chunk: a box of a leaf, in a file."""

    path: str
    shape: tuple[int, ...]  # global shape of the leaf
    dtype: str  # its name, such as "float32"
    box: Box  # which part of the leaf it is
    file: str  # name of the file
    offset: int  # where its record begins, in bytes; if there is no need to read the record, where the values begin
    length: int  # of the record, or of the values, in bytes
    values: int | None = None  # byte of the file where the values begin; None if only the record has it


class Stored(NamedTuple):
    """A leaf as the files have it."""

    shape: tuple[int, ...]
    dtype: str  # its name, such as "float32"
    chunks: tuple[Entry, ...]  # where its boxes are
    why: str = ""  # why it is not read; it has no chunks then


def file_name(number: int) -> str:
    """The name of the file that a rank writes."""
    return f"__{number}_0.distcp"


def described(entries: Iterable[Entry]) -> dict[str, str] | None:
    """Describe chunks as the manifest does, by path: `FILE BYTE START:STOP ...` for each, with commas in between."""
    # A leaf is one string, since a manifest may only have so many values. None if there are too many chunks, or one
    # whose values have no known place.
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
    """Read the chunks that a manifest describes, and check them."""
    table = manifest.chunks or {}
    result: dict[str, Stored] = {}
    rows = [f"{path}: is no leaf" for path in table if path not in manifest.tree]
    for path, (shape, dtype, _) in manifest.tree.items():
        try:
            places = _places(table.get(path, ""), len(shape), getattr(torch, dtype).itemsize)
        except ValueError as error:
            rows.append(f"{path}: {error}")
            continue
        result[path], wrong = _checked(path, shape, dtype, places, manifest.files, values=True)
        rows += wrong
    if rows:
        raise _unfit(folder, MANIFEST, "fit its files", rows)
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


# ------------------------------------------------------------------------------------------------------ DCP's .metadata
_DCP = "torch.distributed.checkpoint.metadata."
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch."
# Megatron Core keeps the plans of its save in it, and plain torch the path that it wrote to. They are ignored.
_NAMES = {
    *(_DCP + name for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *(_DCP + name for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    *(f"torch.distributed.checkpoint.planner.{name}" for name in ("SavePlan", "TensorWriteData")),
    *(f"torch.distributed.checkpoint.planner.{name}" for name in ("WriteItem", "WriteItemType")),
    *(_MEGATRON + name for name in ("MCoreMetadata", "MCoreSavePlan")),
    *(_INFO, "torch.serialization._get_layout", "torch.Size", "pathlib.PosixPath", "pathlib._local.PosixPath"),
}


def from_metadata(folder: Path, pickled: bytes | bytearray, manifest: Manifest | None) -> dict[str, Stored]:
    """Read the chunks that `.metadata` describes without running anything, and check them."""
    rows: list[str] = []
    result: dict[str, Stored] = {}
    try:
        fields = _metadata(pickled)
        located = _located(fields)
        places = {(path, starts): place for path, starts, place, _ in located if starts is not None}
        changed = {path: via for path, _, _, via in located if via and manifest is None}
        files = manifest.files if manifest else plain_files(folder)
        for path, entry in named(fields.get("state_dict_metadata")).items():
            if not isinstance(entry, Made) or entry.kind != _DCP + "TensorStorageMetadata":
                rows += [f"{path}: is no tensor"] if manifest else []
                continue
            try:
                shape, dtype, found = _leaf(named(entry.state))
            except ValueError as error:
                rows.append(f"{path}: {error}")
                continue
            if path in changed:
                result[path] = Stored(shape, dtype, (), changed[path])
                continue
            chunks = [(box, places.get((path, tuple(start for start, _ in box)))) for box in found]
            result[path], wrong = _checked(path, shape, dtype, chunks, files, values=False)
            rows += wrong
        rows += _contradictions(result, manifest) if manifest else []
    except CheckpointError:
        raise
    except ValueError as error:
        rows = [str(error)]
    if rows:
        raise _unfit(folder, METADATA, "fit its manifest" if manifest else "describe what is there", rows)
    return result


def record_places(folder: Path) -> dict[str, Place]:
    """Find the first record of each path of a plain DCP checkpoint, if it is inside of a file of the directory."""
    with open_plain(folder / METADATA) as stream:
        located = _located(_metadata(stream.read(LARGEST)))
    files = plain_files(folder)
    result = dict[str, Place]()
    for path, _, (name, first, length), _ in located:
        if is_plain_name(name) and name in files and 0 <= first <= first + length <= files[name].bytes:
            result.setdefault(path, (name, first, length))
    return result


def _metadata(pickled: bytes | bytearray) -> dict[str, Any]:
    """Return the attributes of DCP's metadata, or of the subclass that Megatron Core 0.15 has of it."""

    def find(module: str, name: str) -> Any:
        result, known = find_in(_NAMES, module, name)
        if not known:
            rule = f"refuses to unpickle {result}, which {METADATA} names: no checkpoint of ours has it."
            mend = "The file may be an attempt to run code here. Use a checkpoint that you trust."
            raise CheckpointError(message(rule, mend=mend))
        return result

    return _attributes(unpickled(pickled, find), _DCP + "Metadata", _MEGATRON + "MCoreMetadata")


def _attributes(value: object, *kinds: str) -> dict[str, Any]:
    """Return the attributes of an object of one of some classes."""
    if not isinstance(value, Made) or value.kind not in kinds:
        raise ValueError(f"something else is where a {kinds[0].rpartition('.')[2]} belongs")
    return named(value.state)


def _located(metadata: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...] | None, Place, str]]:
    """Return path, offsets and place of each chunk, and why it is not read; a value has no offsets."""
    if not isinstance(storage := metadata.get("storage_data"), Pairs):
        raise ValueError("it does not say where its chunks are")
    result: list[tuple[str, tuple[int, ...] | None, Place, str]] = []
    for key, value in storage:
        index, info = _attributes(key, _DCP + "MetadataIndex"), _attributes(value, _INFO)
        path, offset = index.get("fqn"), index.get("offset")
        name, first, length = (info.get(key) for key in ("relative_path", "offset", "length"))
        if not isinstance(path, str):
            raise ValueError("a chunk has no path")
        if not isinstance(name, str) or type(first) is not int or type(length) is not int:
            raise ValueError("a chunk is at no place")
        why = ""
        if (via := info.get("transform_descriptors")) is not None:
            names = listed(map(str, via)) if isinstance(via, list) else str(via)
            why = f"it was written through {names}: load it with torch and save it without _extensions"
        starts = None if offset is None else sizes_of(offset)
        result.append((path, starts, (name, -1 if why else first, length), why))
    return result


def _leaf(entry: Mapping[str, Any]) -> tuple[tuple[int, ...], str, list[Box]]:
    """Return shape and dtype of a leaf, and the boxes of its chunks."""
    properties = entry.get("properties")
    state = properties.state if isinstance(properties, Made) else None
    if isinstance(state, Pairs):
        state = (named(state).get("dtype"),)
    dtype = state[0] if isinstance(state, tuple) and state else None  # the first of the tuple that it is saved as
    if not isinstance(dtype, torch.dtype):
        raise ValueError("it has no dtype")
    if not isinstance(chunks := entry.get("chunks"), list):
        raise ValueError("it has no list of chunks")
    found: list[Box] = []
    for chunk in chunks:
        fields = _attributes(chunk, _DCP + "ChunkStorageMetadata")
        offsets, extent = sizes_of(fields.get("offsets")), sizes_of(fields.get("sizes"))
        if len(offsets) != len(extent):
            raise ValueError(f"a chunk has {len(offsets)} offsets and {len(extent)} sizes")
        found.append(tuple((a, a + n) for a, n in zip(offsets, extent, strict=True)))
    if not is_shape(shape := sizes_of(entry.get("size"))):
        raise ValueError("it has no size that a tensor could have")
    return shape, dtype_name(dtype) or "", found


def plain_files(folder: Path) -> dict[str, SavedFile]:
    """Return the plain files of a directory that nothing describes: their sizes, without checksums."""
    result = {name: os.lstat(folder / name) for name in os.listdir(folder)}
    return {name: SavedFile(status.st_size, ()) for name, status in result.items() if stat.S_ISREG(status.st_mode)}


def _contradictions(found: Mapping[str, Stored], manifest: Manifest) -> list[str]:
    rows = [f"{path}: only in one of the two" for path in sorted(set(found) ^ set(manifest.tree))]
    for path, leaf in manifest.tree.items():
        stored = found.get(path)
        if stored is not None and (stored.shape, stored.dtype) != (leaf.shape, leaf.dtype):
            rows.append(f"{path}: is {stored.dtype}{list(stored.shape)}, the manifest says {leaf}")
    return rows


# --------------------------------------------------------------------------------------------------------------- checks


def _checked(
    path: str,
    shape: tuple[int, ...],
    dtype: str,
    places: Sequence[tuple[Box, Place | None]],
    files: Mapping[str, SavedFile],
    *,
    values: bool,
) -> tuple[Stored, list[str]]:
    """Check the chunks of a leaf, and return it with one row for whatever is wrong."""
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
        if where is None or not is_plain_name(where[0]) or where[0] not in files:
            rows.append(f"chunk {box} is in no file that the manifest names")
            continue
        file, start, length = where
        if not 0 <= start <= start + length <= files[file].bytes:
            rows.append(f"chunk {box} is not inside {file}")
        result.append(Entry(path, shape, dtype, box, file, start, length, start if values else None))
    if volume != math.prod(shape) or len(seen) != len(places):
        rows.append(f"its {len(places)} chunks have {volume} of {math.prod(shape)} elements")
    elif not boxes.are_disjoint([entry.box for entry in result if boxes.volume(entry.box)]):
        rows.append("its chunks overlap")
    return Stored(shape, dtype, tuple(result)), [f"{path}: {row}" for row in rows]


def _unfit(folder: Path, name: str, what: str, rows: Sequence[str]) -> CheckpointError:
    mend = "Use another checkpoint, or a copy of this one."
    return CheckpointError(message(f"cannot read {folder}: its {name} does not {what}.", rows, mend))
