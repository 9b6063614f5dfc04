"""Read any box of any leaf of a checkpoint, ours or plain torch DCP's.

Guarantee: files are hashed block by block in the memory that values are taken from, so what was checked is used.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import stat
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from fsharding.base.errors import CheckpointError, message
from fsharding.base.untrusted import open_plain
from fsharding.checkpoint.byte_ranges import Range, Window, copy_range, pread, shared
from fsharding.checkpoint.chunks import (
    LARGEST,
    TRUSTED,
    Chunk,
    Place,
    Stored,
    from_manifest,
    from_metadata,
    plain_files,
)
from fsharding.checkpoint.manifest import METADATA, OTHER, Manifest, SavedFile
from fsharding.checkpoint.torch_pickles import OddTensorError, parse_record
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box
from fsharding.sharding.named_sharding import LeafType

__all__ = ["DamagedError", "Source", "damage", "open_source"]

_PIECE = 1 << 20
_KEPT_BLOCKS = 3


class DamagedError(CheckpointError):
    """Files differ from what was written; other errors of a load mean that a checkpoint doesn't match."""


# --------------------------------------------------------------------------------------------------------------- files
def damage(folder: Path, files: Mapping[str, SavedFile], *, hashed: bool = True) -> list[str]:
    """Return one row for each problem of a checkpoint's files; without `hashed` only sizes are compared."""
    rows: list[str] = []
    scratch = memoryview(bytearray(_PIECE))
    for name, want in files.items():
        try:
            result = os.lstat(folder / name)
        except FileNotFoundError:
            rows.append(f"{name} is missing")
            continue
        if not stat.S_ISREG(result.st_mode):
            rows.append(f"{name} isn't a plain file")
        elif result.st_size != want.bytes:
            rows.append(f"{name} has {result.st_size:,} bytes, the manifest says {want.bytes:,}")
        elif hashed:
            problems = (_read_block(folder, name, want, i, scratch) for i in range(len(want.sha256)))
            rows += [row for row in problems if row][:1]
    return rows


def _read_block(folder: Path, name: str, file: SavedFile, block: int, target: memoryview) -> str:
    """Read and hash a block; return its problem, or "". A target that is too small is reused for each piece."""
    digest = hashlib.sha256()
    start = block * file.block
    size = min(file.block, file.bytes - start)
    whole = len(target) >= size
    with open_plain(folder / name) as opened:
        for done in range(0, size, _PIECE):
            stop = min(done + _PIECE, size)
            piece = target[done:stop] if whole else target[: stop - done]
            try:
                pread(opened.fileno(), start + done, piece)
            except EOFError:
                return f"{name} ends before its {file.bytes:,} bytes"
            if file.sha256:
                digest.update(piece)
    got = digest.hexdigest()
    if not file.sha256 or got == file.sha256[block]:  # a file of plain torch has no checksums
        return ""
    where = f" in block {block + 1} of {len(file.sha256)}" if len(file.sha256) > 1 else ""
    return f"{name} has the sha256 {got[:12]}...{where}, the manifest says {file.sha256[block][:12]}..."


class _Blocks:
    """Reads the files of a checkpoint in checked blocks and caches the last few, since neighbors share blocks."""

    def __init__(self, folder: Path, files: Mapping[str, SavedFile]) -> None:
        self._folder = folder
        self._files = files
        self._kept: OrderedDict[tuple[str, int], memoryview] = OrderedDict()

    def fill(self, name: str, start: int, target: memoryview) -> None:
        """Read the bytes from `start` on; full blocks are read straight into the target."""
        file = self._files[name]
        stop = start + len(target)
        while target:
            block = start // file.block
            low = block * file.block
            high = min((block + 1) * file.block, file.bytes)
            part = target[: min(high, stop) - start]
            assert part, f"{name} has no byte {start:,}"  # `chunks` has compared places with the file's size
            if len(part) == high - low and (name, block) not in self._kept:
                self._check(name, block, part)
            else:
                part[:] = self._block(name, block)[start - low : start - low + len(part)]
            start = start + len(part)
            target = target[len(part) :]

    def _block(self, name: str, block: int) -> memoryview:
        if (name, block) in self._kept:
            self._kept.move_to_end((name, block))
            return self._kept[name, block]
        size = min(self._files[name].block, self._files[name].bytes)
        # Reuse the memory of the least recently used block.
        held = self._kept.popitem(last=False)[1] if len(self._kept) >= _KEPT_BLOCKS else memoryview(b"")
        if len(held) < size:
            held = memoryview(bytearray(size))
        self._check(name, block, held)
        self._kept[name, block] = held
        return held

    def _check(self, name: str, block: int, target: memoryview) -> None:
        try:
            row = _read_block(self._folder, name, self._files[name], block, target)
        except (OSError, ValueError) as error:
            raise self._damaged(f"{name}: {getattr(error, 'strerror', None) or error}") from error
        if row:
            raise self._damaged(row)

    def _damaged(self, row: str) -> DamagedError:
        return DamagedError(message(f"refuses {self._folder}: it is damaged.", [row], OTHER))


# -------------------------------------------------------------------------------------------------------------- leaves
class Source:
    """A checkpoint, read box by box."""

    def __init__(
        self,
        folder: Path,
        inventory: Mapping[str, Stored],
        files: Mapping[str, SavedFile],
        records: Mapping[str, Place] = MappingProxyType({}),
    ) -> None:
        self.unread = {path: stored.why for path, stored in inventory.items() if stored.why}
        self.leaves = {path: stored.leaf for path, stored in inventory.items() if not stored.why}
        self.records = records  # where the first record of each path is, of leaves and of other values
        self._folder = folder
        self._inventory = inventory
        self._blocks = _Blocks(folder, files)
        self._parsed: dict[Chunk, Range] = {}  # values of records, each parsed once

    def position(self, path: str, box: Box) -> tuple[str, int]:
        """File and byte of the first part of a box. Reading boxes in this order reads every block once."""
        result = (c.place for c in self._inventory[path].chunks if boxes.intersect(c.box, box) is not None)
        return min(((place.file, place.first) for place in result), default=("", 0))

    def read(self, path: str, box: Box, out: Tensor) -> None:
        """Copy a box of a leaf into a tensor of any strides, dtype or device; an exception leaves it undefined."""
        assert tuple(out.shape) == boxes.shape_of(box), f"{path}: {tuple(out.shape)} is not {box}"
        # Chunks tile their leaf, see `chunks`, so all elements of the box are in some.
        for chunk, there, here in shared(box, ((chunk.box, chunk) for chunk in self._inventory[path].chunks)):
            fill = functools.partial(self._blocks.fill, chunk.place.file)
            copy_range(self._values(chunk).part(there), out[here], fill)

    def located(self) -> list[Chunk]:
        """Parse every record without reading its values, and return all chunks with the places of their values."""
        result: list[Chunk] = []
        for chunk in (chunk for stored in self._inventory.values() for chunk in stored.chunks):
            values = self._values(chunk)
            result.append(chunk._replace(values=values.offset if values.is_dense else None))
        return result

    def _values(self, chunk: Chunk) -> Range:
        """Find the values of a chunk in its file: a tensor of the chunk's shape and dtype."""
        if chunk.values is not None:
            shape = boxes.shape_of(chunk.box)
            return Range(chunk.values, shape, boxes.contiguous_strides(shape), chunk.leaf.dtype)
        if chunk not in self._parsed:
            self._parsed[chunk] = self._record(chunk).moved(chunk.place.first)
        return self._parsed[chunk]

    def _record(self, chunk: Chunk) -> Range:
        """Find the values of a chunk in its record."""
        name, first, length = chunk.place

        def fetch(start: int, stop: int) -> bytes:
            data = bytearray(stop - start)
            self._blocks.fill(name, first + start, memoryview(data))
            return bytes(data)

        try:
            record = parse_record(Window(fetch, length))
            result, want = LeafType(record.shape, record.dtype), LeafType(boxes.shape_of(chunk.box), chunk.leaf.dtype)
            if result != want:
                raise ValueError(f"it is {result}, should be {want}")
        except CheckpointError:
            raise
        except ValueError as error:
            rule, mend = f"refuses a record of {self._folder / name}.", TRUSTED
            if isinstance(error, OddTensorError):
                rule, mend = f"cannot read a record of {self._folder / name}.", ""
            raise CheckpointError(message(rule, [f"{chunk.path}: {error}"], mend)) from error
        return record


def open_source(folder: Path, manifest: Manifest | None, *, as_torch: bool = False) -> Source:
    """Open a checkpoint: read the places of its chunks, and check them; `as_torch` always reads `.metadata`."""
    # The manifest has the places, except in older checkpoints. Directories of plain torch have no manifest.
    if manifest is None:
        files = {METADATA: SavedFile(os.lstat(folder / METADATA).st_size, ()), **plain_files(folder)}
    else:
        files = manifest.files
    if METADATA not in files:
        raise DamagedError(message(f"refuses {folder}: {METADATA} is not named.", mend=OTHER))
    if (size := files[METADATA].bytes) > LARGEST:
        row = f"{METADATA} has {size:,} bytes; at most {LARGEST:,} are read"
        raise CheckpointError(message(f"refuses {folder}.", [row], OTHER))
    if rows := damage(folder, {METADATA: files[METADATA]}, hashed=False):  # before allocating memory of its size
        raise DamagedError(message(f"refuses {folder}: it is damaged.", rows, OTHER))
    if manifest is not None and manifest.chunks is not None and not as_torch:
        return Source(folder, from_manifest(folder, manifest), files)
    pickled = io.BytesIO(bytes(size))  # exposes its bytes without a copy: there may be half a GiB of them
    with pickled.getbuffer() as target:
        _Blocks(folder, files).fill(METADATA, 0, target)
    stored, records = from_metadata(folder, pickled.getvalue(), manifest)
    return Source(folder, stored, files, records)
