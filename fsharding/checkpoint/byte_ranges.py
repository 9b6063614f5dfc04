"""Tensors in files: where their bytes begin, and any slice of them, read a window at a time."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fsharding.base.untrusted import open_plain
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box

__all__ = ["WINDOW_BYTES", "Range", "Window", "pieces", "read_range", "span"]

WINDOW_BYTES = 16 << 20
"""How much of a file, and how much of a tensor, is in memory at once while it is copied."""


class Range(NamedTuple):
    """A strided tensor in a file."""

    file: Path
    offset: int  # byte of its first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype  # of its elements, little-endian

    @property
    def end(self) -> int:
        """The byte after its last element."""
        if 0 in self.shape:
            return self.offset
        return self.offset + span(self.shape, self.strides) * self.dtype.itemsize


class Window:
    """Bytes that are fetched on demand, at most so many at once, as a file for `zipfile`."""

    def __init__(self, fetch: Callable[[int, int], bytes], length: int, most: int = 1 << 17) -> None:
        self.fetch = fetch
        self.length = length
        self.most = most
        self.at = 0

    def tell(self) -> int:
        """Return the position."""
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position."""
        self.at = (0, self.at, self.length)[whence] + offset
        if self.at < 0:
            raise OSError(22, "seek to before the beginning")
        return self.at

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes; refuse a size that is too large."""
        stop = self.length if size < 0 else min(self.at + size, self.length)
        if stop - self.at > self.most:  # before there is memory for it
            raise ValueError(f"its directory has {stop - self.at:,} bytes; at most {self.most:,} are read")
        data = self.fetch(self.at, stop) if stop > self.at else b""
        self.at += len(data)
        return data


def pieces(box: Box, itemsize: int, strides: Sequence[int] | None = None) -> Iterator[Box]:
    """Cuts a box into boxes that span at most `WINDOW_BYTES` each, in halves, along the dim that reaches furthest."""
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


def read_range(source: Range, box: Box, out: Tensor) -> None:
    """Copies a box of a tensor in a file into `out`, casting where the dtypes differ."""
    with open_plain(source.file) as file:
        for piece in pieces(box, source.dtype.itemsize, source.strides):
            out[boxes.relative(piece, box)].copy_(_window(file.fileno(), source, piece))


def _window(handle: int, source: Range, box: Box) -> Tensor:
    """A box, and what of the file lies between its elements, in new memory."""
    sizes = boxes.shape_of(box)
    itemsize = source.dtype.itemsize
    first = sum(start * step for (start, _), step in zip(box, source.strides, strict=True))
    flat = torch.empty(span(sizes, source.strides) * itemsize, dtype=torch.uint8)
    _fill(handle, source.offset + first * itemsize, flat.numpy().data)
    return flat.view(source.dtype).as_strided(sizes, source.strides)


def _fill(handle: int, start: int, target: memoryview) -> None:
    while target:
        got = os.preadv(handle, [target], start)
        if not got:
            raise EOFError(f"the file ends at byte {start:,}, before the tensor does")
        start = start + got
        target = target[got:]


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor that is not empty, both counted."""
    return 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
