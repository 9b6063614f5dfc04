"""The leaves and chunks of a checkpoint, from its `.metadata`, read without running anything.

In: a directory, and the manifest where there is one. Out: `Stored` by path.
`.metadata` is a pickle: it is read as inert data, and every chunk in it is checked before a byte of a file is read.
Guarantee: chunks have the elements of their leaf, in files of the directory itself, as the manifest says.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fsharding.base.errors import CheckpointError, listed, message
from fsharding.base.untrusted import open_plain
from fsharding.checkpoint.chunks import Place, Stored, checked, unfit
from fsharding.checkpoint.inert_pickle import Find, Global, Made, Pairs, named, unpickled
from fsharding.checkpoint.manifest import Manifest, dtype_name, is_plain_name, is_shape
from fsharding.checkpoint.writer import METADATA
from fsharding.sharding.boxes import Box

__all__ = ["LARGEST", "inventory", "value_places"]

LARGEST = 1 << 29
"""Bytes of a `.metadata` that is read: about two million chunks."""


_DCP = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    _DCP: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # Megatron Core keeps the plans of its save in it; they are ignored.
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    # The path that plain torch was told to write to; it is ignored.
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}
_MEGATRON_METADATA = ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _finder() -> Find:
    """The value of a global of `.metadata`: a dtype for itself, and any other that may be there for its name."""

    def find(module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if name not in _ALLOWED.get(module, ()):
            rule = f"refuses to unpickle {module}.{name}, which {METADATA} names: no checkpoint of ours has it."
            mend = "The file may be an attempt to run code here. Use a checkpoint that you trust."
            raise CheckpointError(message(rule, mend=mend))
        return Global(module, name)

    return find


def inventory(folder: Path, pickled: bytes | bytearray, manifest: Manifest | None) -> dict[str, Stored]:
    """Reads DCP's own metadata, without running anything, and checks them.

    Args:
        pickled: what is in its `.metadata`.
        manifest: with which they have to agree; None for a checkpoint that plain torch wrote, of which leaves that are
            no tensors are left out.

    Raises:
        CheckpointError: a global that is not on the list, chunks that do not fill their leaf, a file or range that is
            not in the directory or that the manifest does not know.
    """
    rows: list[str] = []
    result: dict[str, Stored] = {}
    try:
        fields = _metadata_fields(unpickled(pickled, _finder()))
        sizes = {name: file.bytes for name, file in manifest.files.items()} if manifest else _sizes(folder)
        result, rows = _leaves(fields, sizes, strict=manifest is not None)
        rows += _contradictions(result, manifest) if manifest else []
    except CheckpointError:
        raise
    except ValueError as error:
        rows = [str(error)]
    if rows:
        raise unfit(folder, METADATA, "fit its manifest" if manifest else "describe what is there", rows)
    return result


def value_places(folder: Path) -> dict[str, Place]:
    """Find the records of a plain DCP checkpoint that hold other values than tensors.

    Args:
        folder: the checkpoint, whose `.metadata` `inventory` has accepted.

    Returns:
        The place of each by path; a value whose record is outside of the directory's files is left out.
    """
    with open_plain(folder / METADATA) as stream:
        fields = _metadata_fields(unpickled(stream.read(LARGEST), _finder()))
    sizes = _sizes(folder)
    result = dict[str, Place]()
    for key, value in fields["storage_data"]:
        index = _fields(key, "MetadataIndex")
        place = _place(value)
        if index.get("offset") is None and isinstance(path := index.get("fqn"), str) and place is not None:
            name, start, length = place
            if is_plain_name(name) and 0 <= start <= start + length <= sizes.get(name, -1):
                result[path] = place
    return result


def _metadata_fields(value: object) -> dict[str, Any]:
    """The attributes of DCP's metadata, or of the subclass that Megatron Core 0.15 has of it."""
    if isinstance(value, Made) and value.kind == _MEGATRON_METADATA:
        return named(value.state)
    return _fields(value, "Metadata")


def _fields(value: object, name: str, module: str = _DCP) -> dict[str, Any]:
    """The attributes of an object of one of DCP's classes."""
    if not isinstance(value, Made) or value.kind != (module, name):
        raise ValueError(f"something else is where a {name} belongs")
    return named(value.state)


def _size(value: object) -> tuple[int, ...]:
    """A `torch.Size`."""
    if isinstance(value, Made) and value.kind == ("torch", "Size") and len(value.args) == 1:
        sizes = value.args[0]
        if isinstance(sizes, tuple | list) and is_shape(result := tuple(sizes)):
            return result
    raise ValueError("something else is where a torch.Size belongs")


def _sizes(folder: Path) -> dict[str, int]:
    """The plain files of a directory."""
    result = {name: os.lstat(folder / name) for name in os.listdir(folder)}
    return {name: status.st_size for name, status in result.items() if stat.S_ISREG(status.st_mode)}


def _leaves(
    fields: Mapping[str, Any], sizes: Mapping[str, int], *, strict: bool
) -> tuple[dict[str, Stored], list[str]]:
    """The leaves, and one row for whatever is wrong with them."""
    storage = _storage(fields.get("storage_data"))
    changed = _changed(fields["storage_data"])
    leaves: dict[str, Stored] = {}
    rows: list[str] = []
    for path, entry in named(fields.get("state_dict_metadata")).items():
        if isinstance(entry, Made) and entry.kind == (_DCP, "TensorStorageMetadata"):
            try:
                shape, dtype, places = _leaf(path, _fields(entry, "TensorStorageMetadata"), storage)
            except (ValueError, KeyError) as error:
                rows.append(f"{path}: {f'it has no {error}' if isinstance(error, KeyError) else error}")
                continue
            if path in changed and not strict:
                leaves[path] = Stored(shape, dtype, (), changed[path])
                continue
            leaves[path], wrong = checked(path, shape, dtype, places, sizes, values=False)
            rows += wrong
        elif strict:
            rows.append(f"{path}: is no tensor")
    return leaves, rows


def _storage(pairs: object) -> dict[tuple[str, tuple[int, ...]], Place | None]:
    """Where chunks are, by path and offsets: file, first byte, length; None for a place that is none."""
    if not isinstance(pairs, Pairs):
        raise ValueError("it does not say where its chunks are")
    result: dict[tuple[str, tuple[int, ...]], Place | None] = {}
    for key, value in pairs:
        index = _fields(key, "MetadataIndex")
        path = index.get("fqn")
        offset = index.get("offset")
        if not isinstance(path, str):
            raise ValueError("a chunk has no path")
        if offset is not None:  # of a tensor
            result[path, _size(offset)] = _place(value)
    return result


def _changed(pairs: Pairs) -> dict[str, str]:
    """Why the chunks of leaves are not read, by path: they went through something, such as compression."""
    changed: dict[str, str] = {}
    for key, value in pairs:
        if (transforms := _transforms(value)) is not None:
            names = listed(map(str, transforms)) if isinstance(transforms, list) else str(transforms)
            path = str(_fields(key, "MetadataIndex").get("fqn"))
            changed[path] = f"it was written through {names}: load it with torch and save it without _extensions"
    return changed


def _place(value: object) -> Place | None:
    info = _fields(value, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
    name, start, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or type(start) is not int or type(length) is not int:
        raise ValueError("a chunk is at no place")
    return (name, start, length) if _transforms(value) is None else (name, -1, length)


def _transforms(value: object) -> object:
    """What chunks went through on the way, such as compression; None for nothing."""
    return _fields(value, "_StorageInfo", "torch.distributed.checkpoint.filesystem").get("transform_descriptors")


def _leaf(
    path: str, entry: Mapping[str, Any], storage: Mapping[tuple[str, tuple[int, ...]], Place | None]
) -> tuple[tuple[int, ...], str, list[tuple[Box, Place | None]]]:
    """Shape and dtype of a leaf, and the box and place of each chunk."""
    if not isinstance(chunks := entry["chunks"], list):
        raise ValueError("it has no list of chunks")
    places: list[tuple[Box, Place | None]] = []
    for chunk in chunks:
        fields = _fields(chunk, "ChunkStorageMetadata")
        offsets = _size(fields["offsets"])
        extent = _size(fields["sizes"])
        if len(offsets) != len(extent):
            raise ValueError(f"a chunk has {len(offsets)} offsets and {len(extent)} sizes")
        box: Box = tuple((a, a + n) for a, n in zip(offsets, extent, strict=True))
        places.append((box, storage.get((path, offsets))))
    return _size(entry["size"]), dtype_name(_dtype(entry["properties"])) or "", places


def _dtype(properties: object) -> torch.dtype:
    """The dtype of a tensor by its properties, whose state is a tuple that begins with it."""
    if isinstance(properties, Made) and properties.kind == (_DCP, "TensorProperties"):
        state = properties.state
        first = state[0] if isinstance(state, tuple) and state else None
        if isinstance(state, Pairs):
            first = named(state).get("dtype")
        if isinstance(first, torch.dtype):
            return first
    raise ValueError("it has no dtype")


def _contradictions(stored_leaves: Mapping[str, Stored], manifest: Manifest) -> list[str]:
    rows = [f"{path}: only in one of the two" for path in sorted(set(stored_leaves) ^ set(manifest.tree))]
    for path, leaf in manifest.tree.items():
        stored = stored_leaves.get(path)
        if stored is not None and (stored.shape, stored.dtype) != (leaf.shape, leaf.dtype):
            rows.append(f"{path}: is {stored.dtype}{list(stored.shape)}, the manifest says {leaf}")
    return rows
