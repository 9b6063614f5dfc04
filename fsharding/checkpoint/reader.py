"""Read any box of any leaf of a checkpoint, ours or plain torch DCP's.

Guarantee: files are hashed block by block in the memory that values are taken from, so what was checked is used.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import os
import stat
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsharding.base.errors import CheckpointError, message
from fsharding.base.untrusted import open_plain
from fsharding.checkpoint.byte_ranges import Range, Window, copy_box, pread, within
from fsharding.checkpoint.chunks import LARGEST, Entry, Stored, from_manifest, from_metadata, plain_files
from fsharding.checkpoint.manifest import METADATA, Manifest, SavedFile, dtype_name
from fsharding.checkpoint.torch_pickles import OddTensorError, parse_record
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box
from fsharding.sharding.named_sharding import LeafType

__all__ = ["DamagedError", "Source", "damage", "open_source"]

_PIECE = 1 << 20
_KEPT_BLOCKS = 3
_OTHER = "Use another checkpoint, or a copy of this one."


class DamagedError(CheckpointError):
    """Bytes that are not those that were written; the other exceptions of a load say that a checkpoint does not fit."""


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
            rows.append(f"{name} is no plain file")
        elif result.st_size != want.bytes:
            rows.append(f"{name} has {result.st_size:,} bytes, the manifest says {want.bytes:,}")
        elif hashed:
            digests = (_pull(folder / name, want, i, scratch) for i in range(len(want.sha256)))
            rows += [row for i, got in enumerate(digests) if (row := _difference(name, want, i, got))][:1]
    return rows


def _difference(name: str, want: SavedFile, block: int, got: str) -> str:
    if not got:
        return f"{name} ends before its {want.bytes:,} bytes"
    if not want.sha256 or got == want.sha256[block]:
        return ""
    where = f" in block {block + 1} of {len(want.sha256)}" if len(want.sha256) > 1 else ""
    return f"{name} has the sha256 {got[:12]}...{where}, the manifest says {want.sha256[block][:12]}..."


def _pull(path: Path, file: SavedFile, block: int, target: memoryview) -> str:
    """Read a block, and return its sha256, or "" if the file ends early; a small target takes each piece in turn."""
    digest = hashlib.sha256()
    start = block * file.block
    size = min(file.block, file.bytes - start)
    whole = len(target) >= size
    with open_plain(path) as opened:
        for done in range(0, size, _PIECE):
            stop = min(done + _PIECE, size)
            piece = target[done:stop] if whole else target[: stop - done]
            try:
                pread(opened.fileno(), start + done, piece)
            except EOFError:
                return ""
            if file.sha256:
                digest.update(piece)
    return digest.hexdigest()


class _Blocks:
    """The files of a checkpoint in checked blocks, of which the last few are kept; neighbors share blocks."""

    def __init__(self, folder: Path, files: Mapping[str, SavedFile]) -> None:
        self._folder = folder
        self._files = files
        self._kept: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._spare: list[memoryview] = []

    def fill(self, name: str, start: int, target: memoryview) -> None:
        """Reads the bytes from `start` on; whole blocks go to where they are wanted without a stop."""
        file = self._files[name]
        stop = start + len(target)
        while target:
            block = start // file.block
            low = block * file.block
            high = min((block + 1) * file.block, file.bytes)
            part = target[: min(high, stop) - start]
            if not part:
                raise self._damaged(f"{name} has no byte {start:,}")
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
        if len(self._kept) >= _KEPT_BLOCKS:
            self._spare.append(self._kept.popitem(last=False)[1])
        size = min(self._files[name].block, self._files[name].bytes)
        held = self._spare.pop() if self._spare else memoryview(bytearray(size))
        if len(held) < size:
            held = memoryview(bytearray(size))
        self._check(name, block, held)
        self._kept[name, block] = held
        return held

    def _check(self, name: str, block: int, target: memoryview) -> None:
        file = self._files[name]
        try:
            got = _pull(self._folder / name, file, block, target)
        except (OSError, ValueError) as error:
            raise self._damaged(f"{name}: {getattr(error, 'strerror', None) or error}") from error
        if row := _difference(name, file, block, got):
            raise self._damaged(row)

    def _damaged(self, row: str) -> DamagedError:
        return DamagedError(message(f"refuses {self._folder}: it is damaged.", [row], _OTHER))


# -------------------------------------------------------------------------------------------------------------- leaves


class Source:
    """A checkpoint that is read box by box."""

    def __init__(self, folder: Path, inventory: Mapping[str, Stored], files: Mapping[str, SavedFile]) -> None:
        self.unread = {path: leaf.why for path, leaf in inventory.items() if leaf.why}
        self.leaves = {
            path: LeafType(leaf.shape, getattr(torch, leaf.dtype)) for path, leaf in inventory.items() if not leaf.why
        }
        self._folder = folder
        self._inventory = inventory
        self._blocks = _Blocks(folder, files)
        self._records: dict[Entry, Range] = {}
        self._staging: Tensor | None = None

    def position(self, path: str, box: Box) -> tuple[str, int]:
        """Where the first part of a box is: file and byte. Reading in this order reads every block once."""
        result = (c for c in self._inventory[path].chunks if boxes.intersect(c.box, box) is not None)
        return min(((c.file, c.offset) for c in result), default=("", 0))

    def read(self, path: str, box: Box, out: Tensor) -> None:
        """Copy a box of a leaf into a tensor of any strides, dtype or device; an exception leaves it undefined."""
        assert tuple(out.shape) == boxes.shape_of(box), f"{path}: {tuple(out.shape)} is not {box}"
        result = 0
        for chunk in self._inventory[path].chunks:
            part = boxes.intersect(chunk.box, box)
            if part is not None:
                result += boxes.volume(part)
                self._copy(chunk, within(part, chunk.box), out[boxes.relative(part, box)])
        if result != boxes.volume(box):
            row = f"{path}: {result} of {boxes.volume(box)} elements are in the files"
            raise CheckpointError(message(f"refuses {self._folder}.", [row], _OTHER))

    def located(self) -> list[Entry]:
        """Look at every record without reading its values, and return all chunks with the places of these."""
        result: list[Entry] = []
        for chunk in sorted(chunk for leaf in self._inventory.values() for chunk in leaf.chunks):
            values = self._values(chunk)
            result.append(chunk._replace(values=values.offset if _is_dense(values.shape, values.strides) else None))
        return result

    def _copy(self, chunk: Entry, part: Box, out: Tensor) -> None:
        """Copies a part of a chunk, straight where both have the same bytes, else piece by piece through staging."""
        source = self._values(chunk)
        fill = functools.partial(self._blocks.fill, chunk.file)
        same = source.dtype == out.dtype and out.device.type == "cpu" and out.is_contiguous()
        if same and _is_dense(tuple(out.shape), source.strides):
            first = sum(start * step for (start, _), step in zip(part, source.strides, strict=True))
            fill(source.offset + first * source.dtype.itemsize, _memory(out))
        else:
            copy_box(source, part, out, fill, self._stage)

    def _stage(self, size: int) -> Tensor:
        if self._staging is None or len(self._staging) < size:
            self._staging = torch.empty(max(size, _PIECE), dtype=torch.uint8)
        return self._staging[:size]

    def _values(self, chunk: Entry) -> Range:
        """Find the values of a chunk in its file: a tensor of the chunk's shape and dtype."""
        if chunk.values is not None:
            shape = boxes.shape_of(chunk.box)
            return Range(chunk.values, shape, boxes.contiguous_strides(shape), self.leaves[chunk.path].dtype)
        if chunk not in self._records:
            self._records[chunk] = self._record(chunk).moved(chunk.offset)
        return self._records[chunk]

    def _record(self, chunk: Entry) -> Range:
        """Find the values of a chunk in its record."""

        def fetch(start: int, stop: int) -> bytes:
            data = bytearray(stop - start)
            self._blocks.fill(chunk.file, chunk.offset + start, memoryview(data))
            return bytes(data)

        try:
            record = parse_record(Window(fetch, chunk.length))
            result = (dtype_name(record.dtype), record.shape)
            want = (chunk.dtype, boxes.shape_of(chunk.box))
            if result != want:
                raise ValueError(f"it is {result[0]}{list(result[1])}, should be {want[0]}{list(want[1])}")
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            if isinstance(error, OddTensorError):
                text = message(f"cannot read a record of {self._folder / chunk.file}.", [f"{chunk.path}: {error}"])
                raise CheckpointError(text) from error
            rule = f"refuses a record of {self._folder / chunk.file}."
            mend = "The file may be an attempt to run code here. Use a checkpoint that you trust."
            raise CheckpointError(message(rule, [f"{chunk.path}: {error}"], mend)) from error
        return record


def _memory(x: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, whatever the strides of its dims of size 1."""
    raw: Any = x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(raw)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements stand one after the other in row-major order."""
    steps = zip(shape, stride, boxes.contiguous_strides(shape), strict=True)
    return not math.prod(shape) or all(n == 1 or step == dense for n, step, dense in steps)


def open_source(folder: Path, manifest: Manifest | None, *, as_torch: bool = False) -> Source:
    """Open a checkpoint: read where its chunks are, and check it; `as_torch` reads `.metadata` in any case."""
    # The manifest has the places, unless it is older than its `chunks`. Plain torch writes none, and no checksums.
    if manifest is None:
        files = {METADATA: SavedFile(os.lstat(folder / METADATA).st_size, ()), **plain_files(folder)}
    else:
        files = manifest.files
    if METADATA not in files:
        raise DamagedError(message(f"refuses {folder}: {METADATA} is not named.", mend=_OTHER))
    if (size := files[METADATA].bytes) > LARGEST:
        row = f"{METADATA} has {size:,} bytes; at most {LARGEST:,} are read"
        raise CheckpointError(message(f"refuses {folder}.", [row], _OTHER))
    if rows := damage(folder, {METADATA: files[METADATA]}, hashed=False):  # before there is memory for all of it
        raise DamagedError(message(f"refuses {folder}: it is damaged.", rows, _OTHER))
    if manifest is not None and manifest.chunks is not None and not as_torch:
        return Source(folder, from_manifest(folder, manifest), files)
    pickled = io.BytesIO()  # which gives its bytes without a copy: there may be half a GiB of them
    blocks = _Blocks(folder, files)
    for start in range(0, size, files[METADATA].block):
        part = bytearray(min(files[METADATA].block, size - start))
        blocks.fill(METADATA, start, memoryview(part))
        pickled.write(part)
    return Source(folder, from_metadata(folder, pickled.getvalue(), manifest), files)
