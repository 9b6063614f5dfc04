"""Tensors like a leaf, and the chunks in which this rank's shard of one is decoded, updated and rounded."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.formats.philox import coarse_uniform_at, uniform_at
from fsharding.mesh.device_mesh import Mesh
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box, Grid, Runs
from fsharding.sharding.named_sharding import like

__all__ = ["Chunk", "ChunkedLeaf", "chunk_size", "like_leaf", "local_leaf", "new_zeros", "overwrite"]

_CHUNK = 1 << 16  # elements that are widened at once on a CPU: few enough for a core's cache


def like_leaf(x: Tensor, local: Tensor) -> Tensor:
    """Make a leaf of a local tensor: a DTensor with the same sharding if the leaf is one."""
    return like(x, local) if isinstance(x, DTensor) else local


def new_zeros(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous zeros in the shape of a local tensor: kernels write through flat views."""
    return torch.zeros(x.shape, dtype=dtype, device=x.device)


def chunk_size(device: torch.device) -> int:
    """Return how many elements are widened at once on a device."""
    return _CHUNK if device.type == "cpu" else _CHUNK << 8


class Chunk(NamedTuple):
    """A part of a leaf that is decoded at once."""

    box: Box  # in the full leaf
    place: tuple[slice, ...]  # in this rank's tensor
    of_scales: tuple[slice, ...]  # in this rank's scales

    @property
    def start(self) -> tuple[int, int]:
        """Where it begins in the last two dims of the leaf."""
        return self.box[-2][0], self.box[-1][0]

    def of(self, x: Tensor) -> Tensor:
        """Return the chunk of this rank's tensor; the tensor itself if the chunk covers it."""
        return x[self.place] if self.place else x


@dataclass(frozen=True)
class ChunkedLeaf:
    """Where this rank's shard of a leaf is."""

    path: str
    shape: tuple[int, ...]  # of the full leaf
    block: tuple[int, int] | None  # rows and columns; None without blocks
    grid: Grid | None  # index ranges of this rank; None if it has no part
    of_scales: Grid | None = None  # the same for its scales
    shared: tuple[str, ...] = ()  # axes over which ranks share a block
    mesh: Mesh | None = None

    def chunks(self, limit: int) -> Iterator[Chunk]:
        """Split the shard into chunks of at most `limit` elements, or of one block."""
        if self.grid is None:
            return
        if self.block is None and all(len(runs) == 1 for runs in self.grid):
            box = tuple(runs[0] for runs in self.grid)
            if 0 < boxes.volume(box) <= limit:  # the usual small leaf: a model may have thousands
                yield Chunk(box, (), ())
                return
        factors = (*(1,) * (len(self.shape) - 2), *(self.block or (1, 1)))[-len(self.shape) or None :]
        for box, place in boxes.grid_boxes(self.grid):
            for part in _split(box, factors, limit):
                here = tuple(
                    slice(p.start + a - start, p.start + b - start)
                    for (a, b), (start, _), p in zip(part, box, place, strict=True)
                )
                of_scales = () if self.of_scales is None else tuple(
                    _within(runs, a // f, -(-b // f))
                    for (a, b), f, runs in zip(part, factors, self.of_scales, strict=True)
                )  # fmt: skip
                yield Chunk(part, here, of_scales)

    def noise(self, key: Tensor, role: str, box: Box, device: torch.device, *, coarse: bool = False) -> Tensor:
        """Return the random numbers in [0, 1) by which a chunk is rounded; coarse ones are multiples of 2^-16."""
        # Coarse numbers take a tenth of the time. The stream depends on names and on indices in the full leaf, never on
        # an order or a shard: every mesh rounds alike.
        stream = zlib.crc32(f"{role}.{self.path}".encode())
        shape = self.shape or (1,)
        if coarse:
            drawn = coarse_uniform_at(key, stream, shape, box or ((0, 1),), device)
        else:
            drawn = uniform_at(key, stream, shape, [(r,) for r in box] or [((0, 1),)], device)
        return drawn if box else drawn.view(())


def _split(box: Box, factors: Sequence[int], limit: int, dim: int = 0) -> Iterator[Box]:
    """Split a box in parts of at most `limit` elements or one block, at multiples of the factors, outer dims first."""
    size = boxes.volume(box)
    if size <= limit or dim == len(box):
        if size:
            yield box
        return
    (start, stop), factor = box[dim], factors[dim]
    step = max(limit // (size // (stop - start)) // factor, 1) * factor
    bounds = [start, *range(start // factor * factor + step, stop, step), stop]
    for part in itertools.pairwise(bounds):
        yield from _split((*box[:dim], part, *box[dim + 1 :]), factors, limit, dim + 1)


def _within(runs: Runs, start: int, stop: int) -> slice:
    """Return where a range is in runs that are laid end to end."""
    ((at, _, length),) = boxes.meet(runs, ((start, stop),))
    return slice(at, at + length)


@functools.lru_cache(maxsize=1024)
def local_leaf(shape: torch.Size) -> ChunkedLeaf:
    """Return a local tensor as a leaf that has no blocks and isn't rounded stochastically."""
    return ChunkedLeaf("", tuple(shape), None, boxes.grid_of(shape))


def overwrite(held: Tensor, new: Tensor, finite: Tensor | None) -> None:
    """Overwrite a tensor, or keep it if `finite` is false."""
    held.copy_(new if finite is None else torch.where(finite, new, held))
