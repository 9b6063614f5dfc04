"""Lay out the leaves of a bucket, which share dtype and axes, as one row per rank, and copy them in and out.

Guarantee: copy-in then copy-out is the identity, also for uneven and empty shards. A shard is padded to the longest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
    def _of_width(self) -> dict[int, list[_Copy]]:
        return {}

    def copies(self, width: int) -> list[_Copy]:
        """Return the copies between rows of a width and a contiguous leaf; computed once for each width."""
        copies = self._of_width.get(width)
        if copies is None:
            copies = [_copy_of(self, grid, width, self.strides) for grid in self.grids]
            self._of_width[width] = copies
        return copies

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


class _Copy(NamedTuple):
    """Views of equal shape of the shards of a grid."""

    in_rows: _View
    in_leaf: _View
    run: int  # elements of each contiguous run, if views as a wider dtype may be faster; else 0


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


def _copy_of(slot: Slot, grid: PieceGrid, width: int, strides: Sequence[int]) -> _Copy:
    """View the shards of a grid in rows and in a full leaf whose strides as [before, dim, after] are these."""
    before, _, after = slot.sizes
    outer, along, inner = strides
    run = grid.length * after
    is_joined = inner == 1 and along == after
    last = (run,) if is_joined else (grid.length, after)
    shape = (*grid.counts, before, *last)
    of_row = (*(n * width for n in grid.strides), run, *boxes.contiguous_strides(last))
    of_leaf = (*(n * along for n in grid.steps), outer, *((1,) if is_joined else (along, inner)))
    is_many = math.prod(shape) >= _FEW and shape[-1] > 1 and of_leaf[-1] == 1
    row = _View(slot.offset + grid.first * width, shape, of_row)
    return _Copy(row, _View(grid.start * along, shape, of_leaf), shape[-1] if is_many else 0)


def _pairs(rows: Tensor, leaf: Tensor, slot: Slot, width: int, there: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """View the shards of all members but `there` in rows and in a full leaf, with equal shapes."""
    if leaf.is_contiguous() and there is None:
        copies = slot.copies(width)
    else:
        strides: Sequence[int] = slot.strides
        if not leaf.is_contiguous():
            leaf = leaf.reshape(slot.sizes)  # a copy if it has no strides as [before, dim, after]
            strides = leaf.stride()
        grids = slot.grids if there is None else [part for grid in slot.grids for part in _without(grid, there)]
        copies = [_copy_of(slot, grid, width, strides) for grid in grids]
    first = rows.storage_offset()
    start = leaf.storage_offset()
    size = rows.element_size()
    result: list[tuple[Tensor, Tensor]] = []
    for (row, shape, strides), (offset, _, of_leaf), run in copies:
        a = rows.as_strided(shape, strides, first + row)
        b = leaf.as_strided(shape, of_leaf, start + offset)
        result.append(_widened(a, b) if 0 < run * size <= _SHORT else (a, b))
    return result


# Dtypes of 16, 8 and 4 bytes, as which several shorter elements are copied at once.
_WIDE = (torch.complex128, torch.int64, torch.int32)

# Up to this many bytes of a contiguous run, the time of a copy depends on the number of elements, not of bytes.
_SHORT = 64

# With fewer elements, finding a wider dtype takes longer than it saves.
_FEW = 4096


def _widened(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """View both sides of a copy as a wider dtype if their contiguous runs are short; the bytes copied are the same."""
    if a.dtype != b.dtype:
        return a, b
    size = a.element_size()
    places = (a.shape[-1], *a.stride()[:-1], *b.stride()[:-1], a.storage_offset(), b.storage_offset())
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
            for source, target in _pairs(rows, leaf, slot, bucket.width, there):
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
            _compat.foreach_zero_(_views(rows, [copy.in_rows for copy in slot.copies(width)]))
            continue
        for target, source in _pairs(rows, leaf, slot, width):
            sources.append(source)
            targets.append(target)
    _compat.foreach_copy_(targets, sources)
