"""What a checkpoint holds, by its `.metadata`: every leaf with its chunks, read without running anything.

In: a directory, and the manifest where there is one. Out: `Stored` by path.
`.metadata` is a pickle: it is read with an allow-list, then every chunk in it is checked before a byte is read.
Law: chunks have the elements of their leaf, in files of the directory itself, as the manifest says.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fsharding import boxes
from fsharding.checkpoint.files import METADATA, Entry
from fsharding.checkpoint.manifest import Manifest, dtype_name, is_plain_name
from fsharding.errors import CheckpointError, message

__all__ = ["Stored", "inventory"]


class Stored(NamedTuple):
    """A leaf as the files have it.

    Attributes:
        shape: global shape.
        dtype: its name, such as "float32".
        chunks: where its boxes are.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Entry, ...]


_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
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
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
}


class _SomePath:
    """In place of the path that plain torch was told to write to; nobody looks at it, and it leads nowhere."""

    __slots__ = ()

    def __call__(self, *parts: str) -> str:
        return "/".join(parts)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name == "PosixPath":
            return _SomePath()
        if name not in _ALLOWED.get(module, ()):
            rule = f"refuses to unpickle {module}.{name}, which {METADATA} names: no checkpoint of ours has it."
            mend = "Whoever made this file may have meant to run code here. Use a checkpoint that you trust."
            raise CheckpointError(message("fs.checkpoint.load", rule, mend=mend))
        return super().find_class(module, name)


def inventory(folder: Path, pickled: bytes, manifest: Manifest | None) -> dict[str, Stored]:
    """Reads DCP's own metadata, without running anything, and checks them.

    Args:
        folder: the checkpoint.
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
        found = _Unpickler(io.BytesIO(pickled)).load()
        if not isinstance(found, Metadata):
            rows = [f"it holds a {type(found).__name__}"]
        else:
            sizes = {name: file.bytes for name, file in manifest.files.items()} if manifest else _sizes(folder)
            result, rows = _leaves(found, sizes, strict=manifest is not None)
            rows += _contradictions(result, manifest) if manifest else []
    except CheckpointError:
        raise
    except Exception as error:
        rows = [f"{type(error).__name__}: {error}"]
    if rows:
        what = "fit its manifest" if manifest else "describe what is there"
        rule = f"cannot read {folder}: its {METADATA} does not {what}."
        mend = "Use another checkpoint, or a copy of this one."
        raise CheckpointError(message("fs.checkpoint.load", rule, rows, mend))
    return result


def _sizes(folder: Path) -> dict[str, int]:
    """The plain files of a directory."""
    found = {name: os.lstat(folder / name) for name in os.listdir(folder)}
    return {name: status.st_size for name, status in found.items() if stat.S_ISREG(status.st_mode)}


def _leaves(found: Metadata, sizes: Mapping[str, int], *, strict: bool) -> tuple[dict[str, Stored], list[str]]:
    """The leaves, and one row for whatever is wrong with them."""
    storage = dict(found.storage_data)
    leaves: dict[str, Stored] = {}
    rows: list[str] = []
    for path, entry in found.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            shape, dtype = tuple(map(int, entry.size)), dtype_name(entry.properties.dtype) or ""
            chunks, wrong = _chunks(str(path), shape, dtype, entry, storage, sizes)
            rows += [f"{path}: {text}" for text in wrong]
            leaves[str(path)] = Stored(shape, dtype, tuple(chunks))
        elif strict:
            rows.append(f"{path}: is no tensor")
    return leaves, rows


def _chunks(
    path: str,
    shape: tuple[int, ...],
    dtype: str,
    entry: TensorStorageMetadata,
    storage: Mapping[Any, Any],
    sizes: Mapping[str, int],
) -> tuple[list[Entry], list[str]]:
    rows: list[str] = []
    result: list[Entry] = []
    volume = 0
    for chunk in entry.chunks:
        box = tuple((int(a), int(a) + int(n)) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
        if len(box) != len(shape) or any(not 0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True)):
            rows.append(f"chunk {box} is outside {list(shape)}")
            continue
        volume += boxes.volume(box)
        where = storage.get(MetadataIndex(path, chunk.offsets))
        if where is None or not is_plain_name(where.relative_path) or where.relative_path not in sizes:
            rows.append(f"chunk {box} is in no file that the manifest names")
            continue
        start, length, file = int(where.offset), int(where.length), where.relative_path
        if not 0 <= start <= start + length <= sizes[file] or where.transform_descriptors:
            rows.append(f"chunk {box} is not inside {file}")
        result.append(Entry(path, shape, dtype, box, file, start, length))
    starts = {tuple(chunk.offsets) for chunk in entry.chunks}
    if volume != math.prod(shape) or len(starts) != len(entry.chunks):
        rows.append(f"its {len(entry.chunks)} chunks have {volume} of {math.prod(shape)} elements")
    return result, rows


def _contradictions(found: Mapping[str, Stored], manifest: Manifest) -> list[str]:
    rows = [f"{path}: only in one of the two" for path in sorted(set(found) ^ set(manifest.tree))]
    for path, leaf in manifest.tree.items():
        stored = found.get(path)
        if stored is not None and (stored.shape, stored.dtype) != (leaf.shape, leaf.dtype):
            rows.append(f"{path}: is {stored.dtype}{list(stored.shape)}, the manifest says {leaf}")
    return rows
