"""torch DCP underneath: writes shards into one file a rank, and reads them into any other boxes.

In: `Shards` by path. Out: `__<rank>_0.distcp` and `.metadata` as torch writes them, which plain torch can read as well.
`.metadata` is a pickle: it is read with an allow-list, then every chunk in it is checked before a byte is read.
Law: what is read is what was written, or nothing: all failures raise on this rank and leave no state half read.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fsharding import boxes
from fsharding.boxes import Box
from fsharding.checkpoint.agree import failure
from fsharding.checkpoint.leaves import Shards
from fsharding.checkpoint.manifest import Manifest, dtype_name
from fsharding.errors import CheckpointError, message

__all__ = ["METADATA", "inventory", "read", "write"]

METADATA = ".metadata"


# ------------------------------------------------------------------------------------------------------------- writing


def write(folder: Path, leaves: Mapping[str, Shards]) -> None:
    """Writes every leaf; each box once, by one of the ranks that hold it. Collective.

    Raises:
        CheckpointError: on every rank, if one could not write.
    """
    planner = _SavePlanner(leaves)
    with _reported("fs.checkpoint.save"):
        dcp_save({path: x.local for path, x in leaves.items()}, storage_writer=_Writer(folder), planner=planner)


class _SavePlanner(DefaultSavePlanner):
    """Plans from our boxes, so that it does not matter what a DTensor claims."""

    def __init__(self, leaves: Mapping[str, Shards]) -> None:
        super().__init__()
        self._leaves = {path: (x, x.kept()) for path, x in leaves.items()}

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for path, (x, kept) in self._leaves.items():
            kind = WriteItemType.TENSOR if x.sharding is None else WriteItemType.SHARD
            for offset, (box, _) in kept.items():
                properties = TensorProperties(dtype=x.local.dtype)
                data = TensorWriteData(chunk=_chunk(box), properties=properties, size=torch.Size(x.shape))
                items.append(WriteItem(index=MetadataIndex(path, offset), type=kind, tensor_data=data))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._leaves[index.fqn][1][tuple(index.offset or ())][1]


class _Writer(FileSystemWriter):
    """One thread, since torch loses the errors of others; every file is synced; no path of this machine is kept."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, thread_count=1, sync_files=True, overwrite=False)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(start for start, _ in box), torch.Size(boxes.shape_of(box)))


# ------------------------------------------------------------------------------------------------------------- reading


def read(folder: Path, metadata: Metadata, leaves: Mapping[str, Shards]) -> None:
    """Reads into the local tensors of `leaves`. Not collective: each rank reads what it needs.

    Args:
        folder: the checkpoint.
        metadata: what `inventory` gave.
        leaves: what to read; shapes and dtypes as saved.

    Raises:
        CheckpointError: something could not be read.
    """
    state = {path: x.local for path, x in leaves.items()}
    reader, planner = _Reader(folder, metadata), _LoadPlanner(leaves)
    with _reported("fs.checkpoint.load"):
        dcp_load(state, storage_reader=reader, planner=planner, no_dist=True)


class _Reader(FileSystemReader):
    """torch's reader, which loads tensors with `weights_only=True`, with metadata that have been checked already."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _LoadPlanner(DefaultLoadPlanner):
    """Plans from our boxes."""

    def __init__(self, leaves: Mapping[str, Shards]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._leaves = {path: x.kept() for path, x in leaves.items()}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for path, kept in self._leaves.items():
            saved = self.metadata.state_dict_metadata[path]
            assert isinstance(saved, TensorStorageMetadata)
            mine = create_read_items_for_chunk_list(path, saved, [_chunk(box) for box, _ in kept.values()])
            found, want = sum(math.prod(item.lengths) for item in mine), sum(boxes.volume(b) for b, _ in kept.values())
            if found != want:
                raise ValueError(f"{path}: {found} of {want} elements are in the files")
            items += mine
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._leaves[index.fqn][tuple(index.offset or ())][1]


@contextmanager
def _reported(function: str) -> Generator[None]:
    """Words what DCP raises: from a save on every rank, from a load on this one; hides its warning of no group."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
            yield
    except CheckpointException as error:
        for e, _ in error.failures.values():
            if not isinstance(e, Exception):
                raise e from error
        problems = {r: (False, f"{type(e).__name__}: {e}") for r, (e, _) in error.failures.items()}
        if function == "fs.checkpoint.save":
            raise failure(function, problems) from error
        raise CheckpointError(message(function, "failed.", [text for _, text in problems.values()])) from error


# ------------------------------------------------------------------------------------------------------------ metadata

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            rule = f"refuses to unpickle {module}.{name}, which {METADATA} names: no checkpoint of ours has it."
            mend = "Whoever made this file may have meant to run code here. Use a checkpoint that you trust."
            raise CheckpointError(message("fs.checkpoint.load", rule, mend=mend))
        return super().find_class(module, name)


def inventory(folder: Path, manifest: Manifest) -> Metadata:
    """Reads DCP's own metadata, without running anything, and checks that they and the manifest say the same.

    Raises:
        CheckpointError: a global that is not on the list, chunks that do not fill their leaf, a file or range that the
            manifest does not know.
    """
    rows: list[str] = []
    try:
        found = _Unpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
        rows = _contradictions(found, manifest)
    except CheckpointError:
        raise
    except Exception as error:
        rows, found = [f"{type(error).__name__}: {error}"], None
    if rows or not isinstance(found, Metadata):
        rule = f"cannot read {folder}: its {METADATA} does not fit its manifest."
        raise CheckpointError(
            message("fs.checkpoint.load", rule, rows, "Use another checkpoint, or a copy of this one.")
        )
    return dataclasses.replace(found, planner_data=None, storage_meta=None)


def _contradictions(found: Any, manifest: Manifest) -> list[str]:
    if not isinstance(found, Metadata):
        return [f"it holds a {type(found).__name__}"]
    leaves, storage = found.state_dict_metadata, dict(found.storage_data)
    rows = [f"{path}: only in one of the two" for path in sorted(set(leaves) ^ set(manifest.tree))]
    for path, leaf in manifest.tree.items():
        entry = leaves.get(path)
        if entry is None:
            continue
        if not isinstance(entry, TensorStorageMetadata):
            rows.append(f"{path}: is no tensor")
            continue
        saved = dtype_name(entry.properties.dtype), tuple(entry.size)
        if saved != (leaf.dtype, leaf.shape):
            rows.append(f"{path}: is {saved[0]}{list(saved[1])}, the manifest says {leaf}")
            continue
        rows += [f"{path}: {text}" for text in _chunk_problems(path, entry, storage, manifest)]
    return rows


def _chunk_problems(
    path: str, entry: TensorStorageMetadata, storage: Mapping[Any, Any], manifest: Manifest
) -> list[str]:
    rows: list[str] = []
    shape, volume = tuple(entry.size), 0
    for chunk in entry.chunks:
        box = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        if len(box) != len(shape) or any(not 0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True)):
            rows.append(f"chunk {box} is outside {list(shape)}")
            continue
        volume += boxes.volume(box)
        where = storage.get(MetadataIndex(path, chunk.offsets))
        if where is None or where.relative_path not in manifest.files:
            rows.append(f"chunk {box} is in no file that the manifest names")
            continue
        size = manifest.files[where.relative_path].bytes
        if not 0 <= where.offset <= where.offset + where.length <= size or where.transform_descriptors:
            rows.append(f"chunk {box} is not inside {where.relative_path}")
    starts = {tuple(chunk.offsets) for chunk in entry.chunks}
    if volume != math.prod(shape) or len(starts) != len(entry.chunks):
        rows.append(f"its {len(entry.chunks)} chunks have {volume} of {math.prod(shape)} elements")
    return rows
