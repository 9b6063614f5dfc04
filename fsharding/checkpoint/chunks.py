"""Read which boxes of leaves are where in a checkpoint's files, from the manifest or from DCP's `.metadata`.

Guarantee: a leaf's chunks tile it, inside files of the directory.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsharding.base.errors import CheckpointError, listed, message
from fsharding.checkpoint.manifest import MANIFEST, METADATA, OTHER, Manifest, SavedFile, is_shape
from fsharding.checkpoint.torch_pickles import Made, Pairs, find_in, named, sizes_of, unpickled
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box
from fsharding.sharding.named_sharding import LeafType

__all__ = [
    "LARGEST", "TRUSTED", "Chunk", "Place", "Stored", "described", "file_name", "from_manifest", "from_metadata",
    "plain_files",
]  # fmt: skip

LARGEST = 1 << 29  # bytes of a `.metadata` that is read: about two million chunks
_MOST_BYTES = 8 << 20  # largest chunk table of a manifest (250,000 chunks): `latest` parses every manifest
TRUSTED = "The file may be an attempt to run code here. Use a checkpoint that you trust."
_SEPARATORS = str.maketrans(":,", "  ")


class Place(NamedTuple):
    """Bytes of a file of the directory."""

    file: str
    first: int
    length: int


class Chunk(NamedTuple):
    """A box of a leaf in a file."""

    path: str
    leaf: LeafType  # with the full shape
    box: Box
    place: Place  # of the record, or of the values if their offset is known
    values: int | None = None  # byte of the file where the values begin; None if only the record has it


class Stored(NamedTuple):
    """A leaf in the files."""

    leaf: LeafType
    chunks: tuple[Chunk, ...]  # which tile it
    why: str = ""  # why it is not read; it has no chunks then


def file_name(number: int) -> str:
    """Name the file that a rank writes."""
    return f"__{number}_0.distcp"


def described(chunks: Iterable[Chunk]) -> dict[str, str] | None:
    """Describe chunks for the manifest, by path: `FILE BYTE START:STOP ...` for each, separated by commas."""
    # One string per leaf, because the number of values of a manifest is limited. None if there are too many chunks, or
    # the values of one have no known place.
    result: dict[str, list[str]] = {}
    for chunk in sorted(chunks, key=lambda chunk: (chunk.path, chunk.box)):
        if (start := chunk.values if boxes.volume(chunk.box) else 0) is None:
            return None
        number = chunk.place.file.removeprefix("__").removesuffix("_0.distcp")
        ranges = [f"{a}:{b}" for a, b in chunk.box]
        result.setdefault(chunk.path, []).append(" ".join([number, str(start), *ranges]))
    table = {path: ",".join(texts) for path, texts in result.items()}
    return table if sum(map(len, table.values())) <= _MOST_BYTES else None


def from_manifest(folder: Path, manifest: Manifest) -> dict[str, Stored]:
    """Read the chunks that a manifest describes, and check them."""
    table = manifest.chunks or {}
    result: dict[str, Stored] = {}
    rows = [f"{path}: isn't a leaf" for path in table if path not in manifest.tree]
    for path, saved in manifest.tree.items():
        leaf = LeafType(saved.shape, getattr(torch, saved.dtype))
        try:
            places = [*_places(table.get(path, ""), leaf)]
        except ValueError as error:
            rows.append(f"{path}: {error}")
            continue
        result[path] = _checked(path, leaf, places, manifest.files, rows, values=True)
    if rows:
        raise _unfit(folder, MANIFEST, "fit its files", rows)
    return result


def _places(text: str, leaf: LeafType) -> Iterator[tuple[Box, Place | None]]:
    """Yield the boxes and places of a leaf of a manifest; see `described`."""
    numbers = [int(part) for part in text.translate(_SEPARATORS).split()]
    width = 2 + 2 * len(leaf.shape)
    if len(numbers) % width:
        raise ValueError(f"its chunks have {len(numbers)} numbers, {width} each")
    for i in range(0, len(numbers), width):
        ends = numbers[i + 2 : i + width]
        box = tuple(zip(ends[::2], ends[1::2], strict=True))
        yield box, Place(file_name(numbers[i]), numbers[i + 1], boxes.volume(box) * leaf.dtype.itemsize)


# ------------------------------------------------------------------------------------------------------ DCP's .metadata
_DCP = "torch.distributed.checkpoint.metadata."
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch."
# Megatron Core stores the plans of its save in it, and plain torch the path of the directory. Both are ignored.
_NAMES = {
    *(_DCP + name for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *(_DCP + name for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    *(f"torch.distributed.checkpoint.planner.{name}" for name in ("SavePlan", "TensorWriteData")),
    *(f"torch.distributed.checkpoint.planner.{name}" for name in ("WriteItem", "WriteItemType")),
    *(_MEGATRON + name for name in ("MCoreMetadata", "MCoreSavePlan")),
    *(_INFO, "torch.serialization._get_layout", "torch.Size", "pathlib.PosixPath", "pathlib._local.PosixPath"),
}


def from_metadata(
    folder: Path, pickled: bytes | bytearray, manifest: Manifest | None
) -> tuple[dict[str, Stored], dict[str, Place]]:
    """Read `.metadata` without running any code, and check it: chunks, and the first record of each path."""
    rows: list[str] = []
    result: dict[str, Stored] = {}
    records: dict[str, Place] = {}
    try:
        fields = _metadata(pickled)
        located = [*_located(fields)]
        places = {(path, starts): place for path, starts, place, _ in located}
        changed = {path: why for path, _, _, why in located if why and manifest is None}
        files = manifest.files if manifest else plain_files(folder)
        for path, _, place, _ in located:
            if place.file in files and _is_inside(place, files):
                records.setdefault(path, place)
        for path, entry in named(fields.get("state_dict_metadata")).items():
            if not isinstance(entry, Made) or entry.kind != _DCP + "TensorStorageMetadata":
                rows += [f"{path}: is no tensor"] if manifest else []
                continue
            try:
                leaf, found = _leaf(named(entry.state))
            except ValueError as error:
                rows.append(f"{path}: {error}")
                continue
            if path in changed:
                result[path] = Stored(leaf, (), changed[path])
                continue
            chunks = [(box, places.get((path, tuple(start for start, _ in box)))) for box in found]
            result[path] = _checked(path, leaf, chunks, files, rows, values=False)
        rows += _contradictions(result, manifest) if manifest else []
    except CheckpointError:
        raise
    except ValueError as error:
        rows = [str(error)]
    if rows:
        raise _unfit(folder, METADATA, "fit its manifest" if manifest else "describe what is there", rows)
    return result, records


def _metadata(pickled: bytes | bytearray) -> dict[str, Any]:
    """Return the attributes of DCP's metadata, or of its subclass in Megatron Core 0.15."""

    def find(module: str, name: str) -> Any:
        result, known = find_in(_NAMES, module, name)
        if not known:
            rule = f"refuses to unpickle {result}, which {METADATA} names: no checkpoint of ours has it."
            raise CheckpointError(message(rule, mend=TRUSTED))
        return result

    return _attributes(unpickled(pickled, find), _DCP + "Metadata", _MEGATRON + "MCoreMetadata")


def _attributes(value: object, *kinds: str) -> dict[str, Any]:
    """Return the attributes of an object of one of the classes."""
    if not isinstance(value, Made) or value.kind not in kinds:
        raise ValueError(f"something else is where a {kinds[0].rpartition('.')[2]} belongs")
    return named(value.state)


def _located(metadata: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...] | None, Place, str]]:
    """Yield path, offsets and place of each chunk, and why it is not read; a value has no offsets."""
    if not isinstance(storage := metadata.get("storage_data"), Pairs):
        raise ValueError("it does not say where its chunks are")
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
        yield path, None if offset is None else sizes_of(offset), Place(name, -1 if why else first, length), why


def _leaf(entry: Mapping[str, Any]) -> tuple[LeafType, list[Box]]:
    """Return a leaf, and the boxes of its chunks."""
    properties = entry.get("properties")
    state = properties.state if isinstance(properties, Made) else None
    if isinstance(state, Pairs):
        state = (named(state).get("dtype"),)
    dtype = state[0] if isinstance(state, tuple) and state else None  # its pickled state is a tuple with dtype first
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
    return LeafType(shape, dtype), found


def plain_files(folder: Path) -> dict[str, SavedFile]:
    """List the plain files of a directory without a manifest: sizes, without checksums."""
    result = {name: os.lstat(folder / name) for name in os.listdir(folder)}
    return {name: SavedFile(status.st_size, ()) for name, status in result.items() if stat.S_ISREG(status.st_mode)}


def _contradictions(found: Mapping[str, Stored], manifest: Manifest) -> Iterator[str]:
    yield from (f"{path}: only in one of the two" for path in sorted(set(found) ^ set(manifest.tree)))
    for path, leaf in manifest.tree.items():
        stored = found.get(path)
        if stored is not None and str(stored.leaf) != str(leaf):
            yield f"{path}: is {stored.leaf}, the manifest says {leaf}"


# --------------------------------------------------------------------------------------------------------------- checks
def _checked(
    path: str,
    leaf: LeafType,
    places: Sequence[tuple[Box, Place | None]],
    files: Mapping[str, SavedFile],
    rows: list[str],
    *,
    values: bool,
) -> Stored:
    """Return a leaf with its chunks, and add a row for each problem."""
    result: list[Chunk] = []
    seen: set[tuple[int, ...]] = set()
    volume = 0
    for box, place in places:
        if len(box) != len(leaf.shape) or any(not 0 <= a <= b <= n for (a, b), n in zip(box, leaf.shape, strict=True)):
            rows.append(f"{path}: chunk {box} is outside {list(leaf.shape)}")
            continue
        volume += boxes.volume(box)
        seen.add(tuple(a for a, _ in box))
        if place is None or place.file not in files:  # which have plain names only
            rows.append(f"{path}: chunk {box} is in no file that the manifest names")
            continue
        if not _is_inside(place, files):
            rows.append(f"{path}: chunk {box} is not inside {place.file}")
        result.append(Chunk(path, leaf, box, place, place.first if values else None))
    if volume != math.prod(leaf.shape) or len(seen) != len(places):
        rows.append(f"{path}: its {len(places)} chunks have {volume} of {math.prod(leaf.shape)} elements")
    elif not boxes.is_tiling([box for box, _ in places], leaf.shape):
        rows.append(f"{path}: its chunks overlap")
    return Stored(leaf, tuple(result))


def _is_inside(place: Place, files: Mapping[str, SavedFile]) -> bool:
    return 0 <= place.first <= place.first + place.length <= files[place.file].bytes


def _unfit(folder: Path, name: str, what: str, rows: Sequence[str]) -> CheckpointError:
    return CheckpointError(message(f"cannot read {folder}: its {name} does not {what}.", rows, OTHER))
