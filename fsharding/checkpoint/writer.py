"""Write the files of a checkpoint as torch DCP does, and hash every block on its way to the disk.

Guarantee: the same tensors give the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.checkpoint.byte_ranges import memory
from fsharding.checkpoint.chunks import Chunk, Place, file_name
from fsharding.checkpoint.manifest import BLOCK, METADATA, SavedFile
from fsharding.comm.leaf_memory import in_memory
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box
from fsharding.sharding.named_sharding import LeafType

__all__ = ["Writer", "Written", "write_metadata"]

_PIECE = 1 << 20


class Written(NamedTuple):
    """A complete, synced file: name, size, checksums, and contents."""

    name: str
    file: SavedFile
    chunks: tuple[Chunk, ...]
    values: dict[str, Place]  # records of plain values by path, such as settings of torch's optimizers


class _HashedStream:
    """A new file, written sequentially; buffers small pieces, and hashes each block."""

    # A separate thread hashes while the disk is busy: values must not change until `hashed` returns. `write` never
    # raises: after an exception, the destructor of torch's zip writer, which calls it, would write the end of the zip,
    # find a wrong position, and abort the process. So the first error is stored, later bytes are only counted, and
    # `check` raises once torch has returned.

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._small = bytearray()
        self._digests: list[str] = []
        self._block = hashlib.sha256()
        self._put = 0
        # Not a pool of concurrent.futures: they refuse work while the process exits, when a save may still be running.
        self._passed: SimpleQueue[tuple[memoryview, bool] | threading.Event | None] = SimpleQueue()
        self._failed: BaseException | None = None
        self._watched = (0, 0)
        self.found: int | None = None  # the byte where watched memory begins; None before it is written, or if empty
        self._hasher = threading.Thread(target=self._hash_all, name="fsharding-hash", daemon=True)
        self._hasher.start()

    @property
    def size(self) -> int:
        """Number of bytes so far."""
        return self._put + len(self._small)

    def write(self, data: bytes | memoryview) -> int:
        """Accept bytes from torch, a header or the memory of a tensor; never raises."""
        start, size = self.size, len(data)
        try:
            if 0 < size == self._watched[0] and _address(data) == self._watched[1]:
                self.found = start
            if size < _PIECE:
                self._small += data
                data = b""
            if data or len(self._small) >= _PIECE:
                self.flush()
            self._through(memoryview(data))
        except BaseException as error:  # also Ctrl-C
            self._failed = self._failed or error
            self._small.clear()
            self._put = start + size
        return size

    def watch(self, x: Tensor) -> None:
        """Record in `found` the offset of the memory of a tensor."""
        self._watched = (x.nbytes, x.data_ptr())
        self.found = None

    def check(self) -> None:
        """Raise the first error of a write, or of the hashing."""
        if self._failed is not None:
            raise self._failed

    def flush(self) -> None:
        """Write the buffered pieces."""
        if self._small:
            small = self._small
            self._small = bytearray()
            self._through(memoryview(small))

    def _through(self, data: memoryview) -> None:
        """Pass each piece to the hashing thread, then to the kernel; after an error only count it."""
        while data:
            piece = data[: min(BLOCK - self._put % BLOCK, _PIECE)]
            data = data[len(piece) :]
            self._put += len(piece)
            if self._failed is not None:
                continue
            self._passed.put((piece, self._put % BLOCK == 0))
            while piece:
                piece = piece[os.write(self._fd, piece) :]

    def _hash_all(self) -> None:
        for item in iter(self._passed.get, None):
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._hash(*item)
            except Exception as error:
                self._failed = self._failed or error

    def _hash(self, piece: memoryview, ends: bool) -> None:
        self._block.update(piece)
        if ends:
            self._digests.append(self._block.hexdigest())
            self._block = hashlib.sha256()

    def hashed(self) -> None:
        """Wait until everything so far is hashed; raise the first error."""
        done = threading.Event()
        self._passed.put(done)
        done.wait()
        self.check()

    def finish(self) -> SavedFile:
        """Sync, and return size and checksums of the file."""
        self.check()
        self.flush()
        os.fsync(self._fd)
        self.hashed()
        if self._put % BLOCK:
            self._digests.append(self._block.hexdigest())
        return SavedFile(self._put, tuple(self._digests))

    def close(self) -> None:
        """Close the file, finished or not."""
        self._passed.put(None)
        self._hasher.join()
        os.close(self._fd)


class Writer:
    """Write one file of a checkpoint: `with Writer(folder, number) as writer`, then `add` each box, then `close`."""

    def __init__(self, folder: Path, number: int) -> None:
        self.name = file_name(number)
        self._stream = _HashedStream(folder / self.name)
        self._chunks: list[Chunk] = []
        self._values: dict[str, Place] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stream.close()

    def add(self, path: str, shape: tuple[int, ...], box: Box, tensor: Tensor) -> None:
        """Write one box of a leaf; its tensor must stay as it is until `settle` or `close`."""
        assert tuple(tensor.shape) == boxes.shape_of(box), f"{path}: {tuple(tensor.shape)} is not {box}"
        values = in_memory(tensor)
        alone = _alone(values)
        self._stream.watch(alone)
        place = self._record(alone)
        if values is not tensor or alone.data_ptr() != values.data_ptr():  # a copy, freed when this returns
            self.settle()
        self._chunks.append(Chunk(path, LeafType(shape, tensor.dtype), box, place, self._stream.found))

    def add_value(self, path: str, value: Any) -> None:
        """Write a plain value, which only torch reads: `load` ignores such leaves."""
        self._values[path] = self._record(value)

    def _record(self, x: object) -> Place:
        first = self._stream.size
        _compat.save_record(x, self._stream)
        self._stream.check()
        return Place(self.name, first, self._stream.size - first)

    def settle(self) -> None:
        """Wait until all added boxes are hashed and written; afterward their tensors may change or be freed."""
        self._stream.flush()
        self._stream.hashed()

    def close(self) -> Written:
        """Sync the file, and return its contents."""
        return Written(self.name, self._stream.finish(), tuple(self._chunks), self._values)


def _address(data: bytes | memoryview) -> int:
    """Return the address of bytes in memory."""
    return np.frombuffer(data, np.uint8).__array_interface__["data"][0]


def _alone(tensor: Tensor) -> Tensor:
    """Return a CPU tensor with a storage of exactly its size, since records contain full storages; copy if needed."""
    x = tensor.detach().cpu().contiguous()
    if x.untyped_storage().nbytes() == x.nbytes:
        return x
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype)
    return torch.frombuffer(memory(x), dtype=torch.uint8).view(x.dtype).reshape(x.shape)


def write_metadata(folder: Path, written: Sequence[Written]) -> SavedFile:
    """Write `.metadata` for all files of a checkpoint, without paths of this machine."""
    from torch.distributed.checkpoint import filesystem  # lazy: slow to import, and only saves need it
    from torch.distributed.checkpoint import metadata as dcp  # lazy: as above

    every = sorted((chunk for part in written for chunk in part.chunks), key=lambda chunk: (chunk.path, chunk.box))
    by_path = {path: list(chunks) for path, chunks in groupby(every, key=lambda chunk: chunk.path)}
    leaves: dict[str, dcp.STORAGE_TYPES] = {
        path: dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype=chunks[0].leaf.dtype),
            torch.Size(chunks[0].leaf.shape),
            [dcp.ChunkStorageMetadata(_offset(chunk.box), torch.Size(boxes.shape_of(chunk.box))) for chunk in chunks],
        )
        for path, chunks in by_path.items()
    }
    # A pickle depends on which equal strings are one object. Interning the names of files makes it deterministic,
    # whichever rank sent them; a path is always the key of `by_path`.
    values = {path: place for part in written for path, place in part.values.items()}
    places = {dcp.MetadataIndex(path, _offset(x.box)): x.place for path, chunks in by_path.items() for x in chunks}
    places |= {dcp.MetadataIndex(path): place for path, place in values.items()}
    info: Any = filesystem._StorageInfo  # pyright: ignore[reportPrivateUsage]
    storage = {index: info(sys.intern(file), first, length) for index, (file, first, length) in places.items()}
    leaves |= {path: dcp.BytesStorageMetadata() for path in values}
    metadata = dcp.Metadata({**leaves}, storage_data=storage, storage_meta=dcp.StorageMeta())
    with closing(_HashedStream(folder / METADATA)) as stream:
        stream.write(pickle.dumps(metadata, protocol=4))
        return stream.finish()


def _offset(box: Box) -> torch.Size:
    return torch.Size([start for start, _ in box])
