"""The parts of torch's own formats: DCP's `.metadata`, and the archive that `torch.save` makes of one tensor or many.

In: files that anyone may have written. Out: shapes, dtypes, and the byte at which each tensor begins.
`.metadata` is a pickle, which is read with a list of the classes that may be in it. No tensor data are read here.
Law: what is returned is inside the files, and its chunks tile each tensor.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fsharding import _compat, boxes
from fsharding.boxes import Box
from fsharding.checkpoint.ranges import Range
from fsharding.errors import CheckpointError, message

__all__ = ["METADATA", "Entry", "contradictions", "range_of", "read_metadata", "unpacked"]

METADATA = ".metadata"

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
_PATHS = {("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath")}


class Entry(NamedTuple):
    """One chunk of a tensor in a DCP directory.

    Attributes:
        box: which part of the tensor.
        file: name of its file.
        offset: where in the file its archive begins.
        length: of the archive.
    """

    box: Box
    file: str
    offset: int
    length: int


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATHS:
            return PurePosixPath
        if name not in _ALLOWED.get(module, ()):
            rule = f"refuses to unpickle {module}.{name}, which {METADATA} names: torch writes no such thing."
            mend = "Whoever made this file may have meant to run code here. Use a checkpoint that you trust."
            raise CheckpointError(message("fs.checkpoint.open_weights", rule, mend=mend))
        return super().find_class(module, name)


def read_metadata(
    file: Path,
) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype, tuple[Entry, ...]]], tuple[str, ...]]:
    """What `.metadata` says, without running anything.

    Returns:
        Shape, dtype and chunks of each tensor by name; the names of entries that are no tensors.

    Raises:
        CheckpointError: a class that is not on the list.
        ValueError: it is no metadata, or of a kind that cannot be read here.
    """
    found: Any = _Unpickler(io.BytesIO(file.read_bytes())).load()
    if not isinstance(found, Metadata):
        raise ValueError(f"{METADATA} holds a {type(found).__name__}")
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[Entry, ...]]] = {}
    others: list[str] = []
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            others.append(name)
            continue
        entries: list[Entry] = []
        for chunk in entry.chunks:
            info = found.storage_data[MetadataIndex(name, chunk.offsets)]
            if info.transform_descriptors:
                raise ValueError(f"{name} is stored through {', '.join(info.transform_descriptors)}")
            box = tuple((a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            entries.append(Entry(box, info.relative_path, info.offset, info.length))
        tensors[name] = tuple(entry.size), entry.properties.dtype, tuple(entries)
    return tensors, tuple(others)


def contradictions(shape: tuple[int, ...], entries: Sequence[Entry], sizes: Mapping[str, int]) -> list[str]:
    """Why chunks cannot be the tensor that they claim to be: outside of it or of their file, or not all of it.

    Args:
        shape: of the tensor.
        entries: its chunks.
        sizes: bytes of the files; chunks in other files are not looked at.
    """
    rows: list[str] = []
    for entry in entries:
        if len(entry.box) != len(shape) or any(
            not 0 <= a <= b <= n for (a, b), n in zip(entry.box, shape, strict=True)
        ):
            rows.append(f"chunk {entry.box} is outside {list(shape)}")
        elif not 0 <= entry.offset <= entry.offset + entry.length <= sizes.get(entry.file, math.inf):
            rows.append(f"chunk {entry.box} is not inside {entry.file}")
    held, starts = sum(boxes.volume(entry.box) for entry in entries), {entry.box for entry in entries}
    if not rows and (held != math.prod(shape) or len(starts) != len(entries)):
        rows.append(f"its {len(entries)} chunks have {held} of {math.prod(shape)} elements")
    return rows


def range_of(file: Path, x: Tensor, base: int = 0) -> Range:
    """Where a tensor lies that was loaded without its data.

    Args:
        file: that it was loaded from.
        x: the tensor.
        base: where in the file its archive begins.

    Raises:
        ValueError: a tensor that is not plainly strided.
    """
    if x.layout != torch.strided or x.is_quantized or x.is_conj() or x.is_neg():
        raise ValueError(f"a {x.layout} tensor cannot be read by slices")
    offset = base + _compat.file_offset(x) + x.storage_offset() * x.itemsize
    return Range(file, offset, tuple(x.shape), tuple(x.stride()), x.dtype)


def unpacked(file: Path, entry: Entry) -> Range:
    """Where the tensor lies that an archive inside a file holds.

    Raises:
        CheckpointError: the archive holds something else, or more than itself.
    """
    try:
        with file.open("rb") as stream, _compat.shapes_only():
            x = torch.load(_Slice(stream, entry.offset, entry.length), map_location="cpu", weights_only=True)
        where = range_of(file, x, entry.offset)
    except (RuntimeError, ValueError, AttributeError, pickle.UnpicklingError) as error:
        rule = f"cannot read {file}: at byte {entry.offset:,} is no tensor of torch.save."
        raise CheckpointError(message("fs.checkpoint.open_weights", rule, [str(error).split("\n")[0]])) from error
    if where.end > entry.offset + entry.length:
        rule = f"cannot read {file}: the tensor at byte {entry.offset:,} is longer than its archive."
        raise CheckpointError(message("fs.checkpoint.open_weights", rule))
    return where


class _Slice(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, stream: io.BufferedReader, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        count = max(0, min(len(view), self._length - self._at))
        self._stream.seek(self._start + self._at)
        got = self._stream.readinto(view[:count])
        self._at += got
        return got
