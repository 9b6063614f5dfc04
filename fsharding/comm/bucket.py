"""Lay out the leaves of a bucket, which share dtype and axes, as one row per rank, and copy them in and out.

Guarantee: copy-in then copy-out is the identity, also for uneven and empty shards. A shard is padded to the longest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.sharding import boxes

__all__ = [
    "Bucket", "Parted", "PieceGrid", "Slot", "check_bucket", "copy_in", "fill", "part", "piece_views", "pieces_of",
    "plan_bucket", "whole_views",
]  # fmt: skip

# Full leaves begin at multiples of this many elements, aligned as separate tensors are, so that kernels take the same
# path, and give the same bits, for both.
_ALIGN = 64


class PieceGrid(NamedTuple):
    """Members with equally long and equally spaced shards, in rows and in the leaf: one strided copy."""

    first: int  # index of the first member
    counts: tuple[int, ...]  # members along each axis that shards the leaf, major first
    strides: tuple[int, ...]  # difference in member index between neighbors along each axis
    start: int  # offset of the first member's shard along the sharded dim
    steps: tuple[int, ...]  # distance along that dim between the shards of neighbors along each axis
    length: int  # size of each shard along that dim


@dataclass(frozen=True)
class Slot:
    """One leaf in a bucket."""

    shape: tuple[int, ...]  # shape of the full leaf
    dim: int  # the dim that is sharded over the members
    axis_sizes: tuple[int, ...]  # sizes of the axes that shard it, major first
    offset: int  # offset of a shard in a row
    start: int  # offset of the full leaf in the flat buffer

    @functools.cached_property
    def sizes(self) -> tuple[int, int, int]:
        """The shape [before, dim, after] of the leaf, with the dims before and after `dim` flattened."""
        length = self.shape[self.dim] if self.shape else 1
        return math.prod(self.shape[: self.dim]), length, math.prod(self.shape[self.dim + 1 :])

    @functools.cached_property
    def strides(self) -> tuple[int, ...]:
        """The strides of a contiguous leaf of shape [before, dim, after]."""
        return boxes.contiguous_strides(self.sizes)

    @functools.cached_property
    def grids(self) -> tuple[PieceGrid, ...]:
        """All nonempty shards: one grid if they are even, at most 2 ** (number of axes)."""
        return tuple(_piece_grids(self.sizes[1], self.axis_sizes))

    @functools.cached_property
    def joined(self) -> bool:
        """Whether the concatenated shards of all members are the full leaf in memory, and of one size."""
        before, size, _ = self.sizes
        return before == 1 and size > 0 and size % math.prod(self.axis_sizes) == 0

    def piece(self, member: int) -> tuple[int, int]:
        """Return (start, stop) of a member's shard along `dim`."""
        coord: list[int] = []
        for size in reversed(self.axis_sizes):
            member, place = divmod(member, size)
            coord.append(place)
        return boxes.nested_chunk(self.sizes[1], list(zip(self.axis_sizes, reversed(coord), strict=True)))

    def piece_shape(self, member: int) -> tuple[int, ...]:
        """Return the shape of a member's shard."""
        start, stop = self.piece(member)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :]) if self.shape else ()


def _piece_grids(size: int, axis_sizes: tuple[int, ...]) -> list[PieceGrid]:
    """Split a dim into grids: the equal leading chunks of the major axis, then a shorter last one."""
    # The minor axes shard equal chunks identically, so one grid describes all of them.
    if size == 0:
        return []
    if not axis_sizes:
        return [PieceGrid(0, (), (), 0, (), size)]
    members = math.prod(axis_sizes[1:])
    step = -(-size // axis_sizes[0])
    count = size // step
    result: list[PieceGrid] = []
    for number, first, length in ((count, 0, step), (1, count, size - count * step)):
        for inner in _piece_grids(length, axis_sizes[1:]):
            result.append(
                PieceGrid(
                    first * members + inner.first, (number, *inner.counts), (members, *inner.strides),
                    first * step + inner.start, (step, *inner.steps), inner.length,
                )
            )  # fmt: skip
    return result


def _without(grid: PieceGrid, member: int) -> list[PieceGrid]:
    """Remove a member from a grid: return the members before and after it along each axis in turn."""
    result: list[PieceGrid] = []
    left = member - grid.first
    for axis, (count, stride) in enumerate(zip(grid.counts, grid.strides, strict=True)):
        place, left = divmod(left, stride)
        if not 0 <= place < count:
            return [*result, grid]
        for low, high in ((0, place), (place + 1, count)):
            if high > low:
                result.append(_narrowed(grid, axis, low, high))
        grid = _narrowed(grid, axis, place, place + 1)
    return result


def _narrowed(grid: PieceGrid, axis: int, low: int, high: int) -> PieceGrid:
    """Return the members of a grid from `low` to `high` along an axis."""
    return grid._replace(
        first=grid.first + low * grid.strides[axis],
        start=grid.start + low * grid.steps[axis],
        counts=(*grid.counts[:axis], high - low, *grid.counts[axis + 1 :]),
    )


class _View(NamedTuple):
    """A view of a contiguous tensor: offset, shape and strides."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Pieces(NamedTuple):
    """The shards of a member as views."""

    in_row: list[_View]  # views of a row, contiguous
    in_leaves: list[_View]  # views of contiguous full leaves, with the strides of these


def _views(flat: Tensor, views: Sequence[_View]) -> list[Tensor]:
    """Return views of a flat buffer."""
    # One call of torch for each: a slice and a `view` take three times as long.
    first = flat.storage_offset()
    return [flat.as_strided(shape, strides, first + start) for start, shape, strides in views]


@dataclass(frozen=True)
class Bucket:
    """The plan of one bucket."""

    slots: tuple[Slot, ...]  # one for each leaf
    members: int  # number of ranks
    width: int  # elements of a row, which is what each rank sends
    size: int  # elements of the flat buffer of full leaves

    @functools.cached_property
    def wholes(self) -> list[_View]:
        """The full leaves as views of the flat buffer."""
        return [_View(slot.start, slot.shape, boxes.contiguous_strides(slot.shape)) for slot in self.slots]

    @functools.cached_property
    def _of_members(self) -> dict[int, _Pieces]:
        return {}

    def pieces(self, member: int) -> _Pieces:
        """Return the shards of a member; computed once for each member."""
        pieces = self._of_members.get(member)
        if pieces is None:
            pieces = _Pieces([], [])
            for slot in self.slots:
                shape = slot.piece_shape(member)
                first = slot.piece(member)[0] * slot.sizes[2]
                pieces.in_row.append(_View(slot.offset, shape, boxes.contiguous_strides(shape)))
                pieces.in_leaves.append(_View(first, shape, boxes.contiguous_strides(slot.shape)))
            self._of_members[member] = pieces
        return pieces


def check_bucket(bucket: Bucket) -> None:
    """Assert that leaves overlap neither in rows nor in the flat buffer, and that the shards tile each leaf."""
    width = end = 0
    for slot in bucket.slots:
        assert slot.offset == width and slot.start >= end, slot
        width += math.prod(slot.piece_shape(0))
        end = slot.start + math.prod(slot.shape)
        pieces = [(slot.piece(member),) for member in range(math.prod(slot.axis_sizes))]
        assert boxes.is_tiling(pieces, slot.sizes[1:2]), slot
    assert bucket.width == width and bucket.size >= end, bucket


@functools.lru_cache(maxsize=4096)
def plan_bucket(leaves: tuple[tuple[tuple[int, ...], int], ...], axis_sizes: tuple[int, ...]) -> Bucket:
    """Lay out leaves, each a (shape, sharded dim), in rows and in a flat buffer; no axes means one member."""
    slots: list[Slot] = []
    width = size = 0
    for shape, dim in leaves:
        slot = Slot(shape, dim, axis_sizes, width, size)
        slots.append(slot)
        width += math.prod(slot.piece_shape(0))  # no shard is longer than the first
        size += -(-math.prod(shape) // _ALIGN) * _ALIGN
    return Bucket(tuple(slots), math.prod(axis_sizes), width, size)


class Parted(NamedTuple):
    """The leaves of a bucket, split by how a backend gathers them."""

    direct: tuple[int, ...]  # leaves that are gathered into their final memory, as `joined` allows
    others: tuple[int, ...]  # leaves that are gathered as rows, then copied
    rest: Bucket  # a bucket of `others`, with offsets into the flat buffer of the original bucket


@functools.lru_cache(maxsize=4096)
def part(bucket: Bucket, least: int) -> Parted:
    """Split the leaves of a bucket; shards of fewer than `least` elements are gathered as rows."""
    slots = [*enumerate(bucket.slots)]
    direct = tuple(i for i, slot in slots if slot.joined and math.prod(slot.piece_shape(0)) >= least)
    others = tuple(i for i, _ in slots if i not in direct)
    axis_sizes = bucket.slots[0].axis_sizes if bucket.slots else ()
    rows = plan_bucket(tuple((bucket.slots[i].shape, bucket.slots[i].dim) for i in others), axis_sizes)
    rest = tuple(replace(slot, start=bucket.slots[i].start) for i, slot in zip(others, rows.slots, strict=True))
    return Parted(direct, others, replace(rows, slots=rest, members=bucket.members, size=bucket.size))


def piece_views(row: Tensor, bucket: Bucket, member: int) -> list[Tensor]:
    """View a contiguous row [width] as the shards of one member."""
    return _views(row, bucket.pieces(member).in_row)


def whole_views(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """View the contiguous flat buffer as full leaves."""
    return _views(flat, bucket.wholes)


def pieces_of(leaves: Sequence[Tensor], bucket: Bucket, member: int) -> list[Tensor]:
    """View the shards of one member in contiguous full leaves."""
    views = bucket.pieces(member).in_leaves
    return [
        leaf.as_strided(shape, strides, leaf.storage_offset() + start)
        for leaf, (start, shape, strides) in zip(leaves, views, strict=True)
    ]


def _row_view(rows: Tensor, slot: Slot, grid: PieceGrid, width: int) -> Tensor:
    """View the shards of a grid in rows: [*counts, before, length * after]."""
    before, _, after = slot.sizes
    run = grid.length * after
    size = (*grid.counts, before, run)
    strides = (*(stride * width for stride in grid.strides), run, 1)
    return rows.as_strided(size, strides, rows.storage_offset() + slot.offset + grid.first * width)


# A full leaf, and its strides as [before, dim, after].
_Strided: TypeAlias = tuple[Tensor, tuple[int, ...]]


def _strided(leaf: Tensor, slot: Slot) -> _Strided:
    """Return a full leaf with its strides as [before, dim, after]; `reshape` copies it if these don't exist."""
    if leaf.is_contiguous():
        return leaf, slot.strides
    leaf = leaf.reshape(slot.sizes)
    return leaf, leaf.stride()


def _pair(rows: Tensor, strided: _Strided, slot: Slot, grid: PieceGrid, width: int) -> tuple[Tensor, Tensor]:
    """View the shards of a grid in rows and in a full leaf, with equal shapes."""
    row = _row_view(rows, slot, grid, width)
    leaf, (before, along, after) = strided
    outer = tuple(step * along for step in grid.steps)
    first = leaf.storage_offset() + grid.start * along
    count, _, inner = slot.sizes
    if after == 1 and along == inner:
        return _widened(row, leaf.as_strided(row.shape, (*outer, before, 1), first))
    size = (*grid.counts, count, grid.length, inner)
    return row.unflatten(-1, size[-2:]), leaf.as_strided(size, (*outer, before, along, after), first)


# Dtypes of 16, 8 and 4 bytes, as which several shorter elements are copied at once.
_WIDE = (torch.complex128, torch.int64, torch.int32)

# Up to this many bytes of a contiguous run, the time of a copy depends on the number of elements, not of bytes.
_SHORT = 64

# With fewer elements, finding a wider dtype takes longer than it saves.
_FEW = 4096


def _widened(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """View both sides of a copy as a wider dtype if their contiguous runs are short; the bytes copied are the same."""
    run = a.shape[-1]
    size = a.element_size()
    if a.dtype != b.dtype or not 1 < run <= _SHORT // size or a.numel() < _FEW:
        return a, b
    places = (run, *a.stride()[:-1], *b.stride()[:-1], a.storage_offset(), b.storage_offset())
    for wide in _WIDE:
        together = wide.itemsize // size
        if together > 1 and not any(place % together for place in places):
            return a.view(wide), b.view(wide)
    return a, b


def fill(
    rows: Tensor | Sequence[Tensor], leaves: list[Tensor], bucket: Bucket, *, there: int | None = None
) -> list[Tensor]:
    """Copy gathered rows, [members, width] or a list of [width], to full leaves, except the row of member `there`."""
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    if isinstance(rows, Tensor):
        for leaf, slot in zip(leaves, bucket.slots, strict=True):
            strided = _strided(leaf, slot)
            for grid in slot.grids:
                for part in (grid,) if there is None else _without(grid, there):
                    source, target = _pair(rows, strided, slot, part, bucket.width)
                    sources.append(source)
                    targets.append(target)
    else:
        # Rows in the memory of other processes of this machine: no stride leads from one to the next.
        for member in (member for member in range(bucket.members) if member != there):
            sources += piece_views(rows[member], bucket, member)
            targets += pieces_of(leaves, bucket, member)
    _compat.foreach_copy_(targets, sources)
    return leaves


def copy_in(leaves: Sequence[Tensor | None], rows: Tensor, slots: Sequence[Slot]) -> None:
    """Copy full leaves of any strides and dtypes into rows [members, width], one per owner; None counts as zeros."""
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    width = rows.shape[1]
    for leaf, slot in zip(leaves, slots, strict=True):
        if leaf is None:
            _compat.foreach_zero_([_row_view(rows, slot, grid, width) for grid in slot.grids])
            continue
        strided = _strided(leaf, slot)
        for grid in slot.grids:
            target, source = _pair(rows, strided, slot, grid, width)
            sources.append(source)
            targets.append(target)
    _compat.foreach_copy_(targets, sources)
