"""Tensors in files: their offsets, and reads of any slice, a window at a time."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box

__all__ = ["WINDOW_BYTES", "Range", "Window", "copy_range", "memory", "pieces", "pread", "shared", "span"]

T = TypeVar("T")

WINDOW_BYTES = 16 << 20  # maximum bytes of a file, and of a tensor, in memory at once during a copy


class Range(NamedTuple):
    """A strided tensor in a file, or in a record of one."""

    offset: int  # byte of its first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: torch.dtype  # of its elements, little-endian

    def moved(self, start: int) -> Range:
        """Return the range in a file that contains the record at `start`."""
        return self._replace(offset=start + self.offset)

    def part(self, place: Sequence[slice]) -> Range:
        """Return the range of a slice."""
        first = sum(cut.start * step for cut, step in zip(place, self.strides, strict=True))
        offset = self.offset + first * self.dtype.itemsize
        return self._replace(offset=offset, shape=tuple(cut.stop - cut.start for cut in place))

    @property
    def is_dense(self) -> bool:
        """Whether elements are contiguous in row-major order."""
        steps = zip(self.shape, self.strides, boxes.contiguous_strides(self.shape), strict=True)
        return 0 in self.shape or all(n == 1 or step == dense for n, step, dense in steps)


class Window(io.IOBase):
    """A file for `zipfile` whose bytes are read on demand, with a limit for one read."""

    def __init__(self, fetch: Callable[[int, int], bytes], length: int, most: int = 1 << 17) -> None:
        self.fetch = fetch
        self.length = length
        self.most = most
        self.at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position."""
        self.at = (0, self.at, self.length)[whence] + offset
        if self.at < 0:
            raise OSError(22, "seek to before the beginning")
        return self.at

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes; refuse a size that is too large."""
        stop = self.length if size < 0 else min(self.at + size, self.length)
        if stop - self.at > self.most:  # before allocating memory for it
            raise ValueError(f"its directory has {stop - self.at:,} bytes; at most {self.most:,} are read")
        data = self.fetch(self.at, stop) if stop > self.at else b""
        self.at += len(data)
        return data


def pieces(box: Box, itemsize: int, strides: Sequence[int] | None = None) -> Iterator[Box]:
    """Split a box in halves, along the dim with the largest span, until each part spans at most `WINDOW_BYTES`."""
    sizes = boxes.shape_of(box)
    steps = boxes.contiguous_strides(sizes) if strides is None else strides
    if 0 in sizes:
        return
    if span(sizes, steps) * itemsize <= max(WINDOW_BYTES, itemsize):
        yield box
        return
    dim = max(range(len(box)), key=lambda d: (sizes[d] - 1) * steps[d])
    start, stop = box[dim]
    for half in ((start, (start + stop) // 2), ((start + stop) // 2, stop)):
        yield from pieces((*box[:dim], half, *box[dim + 1 :]), itemsize, strides)


def shared(box: Box, parts: Iterable[tuple[Box, T]]) -> Iterator[tuple[T, tuple[slice, ...], tuple[slice, ...]]]:
    """Intersect the parts of a tensor with a box; yield a part's value, and the slices of the part and the box."""
    for part, value in parts:
        if (common := boxes.intersect(part, box)) is not None:
            yield value, boxes.relative(common, part), boxes.relative(common, box)


def copy_range(source: Range, out: Tensor, fill: Callable[[int, memoryview], None]) -> None:
    """Copy a tensor in a file into `out`, casting where the dtypes differ; `fill` reads bytes into memory."""
    same = source.dtype == out.dtype and out.device.type == "cpu" and out.is_contiguous()
    if same and source.is_dense:
        fill(source.offset, memory(out))
        return
    whole = boxes.full(source.shape)
    buffer = torch.empty(0, dtype=torch.uint8)  # of all pieces: fresh memory for each would cost page faults
    for piece in pieces(whole, source.dtype.itemsize, source.strides):
        # One read for the piece, including the bytes of the file between its elements.
        place = boxes.relative(piece, whole)
        part = source.part(place)
        size = span(part.shape, part.strides) * part.dtype.itemsize
        if size > len(buffer):
            buffer = torch.empty(size, dtype=torch.uint8)
        flat = buffer[:size]
        fill(part.offset, memory(flat))
        out[place].copy_(flat.view(part.dtype).as_strided(part.shape, part.strides))


def memory(x: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, whatever the strides of its dims of size 1."""
    raw: Any = x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(raw)


def pread(handle: int, start: int, target: memoryview) -> None:
    """Read the bytes of an open file from `start` on; raise an `EOFError` if there are too few."""
    while target:
        got = os.preadv(handle, [target], start)
        if not got:
            raise EOFError(f"the file ends at byte {start:,}, before the tensor does")
        start = start + got
        target = target[got:]


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Count the elements from the first to the last of a nonempty tensor, inclusive."""
    return 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
