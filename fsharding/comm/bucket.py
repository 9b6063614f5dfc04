"""One collective per bucket: the leaves of a unit that share dtype and axes travel as one row per rank.

In: shapes, the dim that is cut, the sizes of the axes. Out: a cached, printable plan of offsets and strides, and thin
functions that copy between leaves, rows `[members, width]` and one flat buffer of whole leaves.
Law: copy-in then copy-out is the identity, for even, uneven and empty pieces; padding is at most one row a leaf a rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from fsharding import _compat
from fsharding.sharding import boxes

__all__ = [
    "Bucket", "Slot", "copy_in", "copy_out", "fill", "piece_views", "pieces_of", "plan_bucket", "whole_views"
]  # fmt: skip

_ALIGN = 64
"""Whole leaves begin at multiples of so many elements, as fresh tensors would, so that kernels take the same path."""


@dataclass(frozen=True)
class Slot:
    """One leaf in a bucket.

    Attributes:
        shape: the whole leaf.
        dim: the dim that the members cut.
        pieces: for each member, (start, stop) along `dim`.
        offset: where the leaf begins in a row.
        start: where the whole leaf begins in the flat buffer.
    """

    shape: tuple[int, ...]
    dim: int
    pieces: tuple[tuple[int, int], ...]
    offset: int
    start: int

    @property
    def before(self) -> int:
        """How many elements the dims before `dim` have."""
        return math.prod(self.shape[: self.dim])

    @property
    def after(self) -> int:
        """How many elements the dims after `dim` have."""
        return math.prod(self.shape[self.dim + 1 :])

    @property
    def even(self) -> bool:
        """Whether all pieces are as long as the first and follow each other."""
        length = self.pieces[0][1]
        return all(piece == (i * length, (i + 1) * length) for i, piece in enumerate(self.pieces))

    def piece_shape(self, member: int) -> tuple[int, ...]:
        """The shape of a member's piece."""
        start, stop = self.pieces[member]
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :]) if self.shape else ()


@dataclass(frozen=True)
class Bucket:
    """The plan of one bucket.

    Attributes:
        slots: its leaves.
        members: how many ranks take part.
        width: elements of a row: what each rank sends.
        size: elements of the flat buffer of whole leaves.
    """

    slots: tuple[Slot, ...]
    members: int
    width: int
    size: int


@functools.lru_cache(maxsize=4096)
def plan_bucket(leaves: tuple[tuple[tuple[int, ...], int], ...], axis_sizes: tuple[int, ...]) -> Bucket:
    """Lays leaves out in rows and in a flat buffer.

    Args:
        leaves: (shape, dim that is cut) of each leaf; one without dims cannot be cut.
        axis_sizes: sizes of the axes that cut it, major first; none for a bucket of one member.
    """
    slots: list[Slot] = []
    width = size = 0
    coords = list(product(*(range(n) for n in axis_sizes)))
    for shape, dim in leaves:
        cuts = [list(zip(axis_sizes, coord, strict=True)) for coord in coords]
        pieces = tuple(boxes.nested_chunk(shape[dim] if shape else 1, cut) for cut in cuts)
        slot = Slot(shape, dim, pieces, width, size)
        slots.append(slot)
        width += slot.before * slot.after * max(stop - start for start, stop in pieces)
        size += -(-math.prod(shape) // _ALIGN) * _ALIGN
    return Bucket(tuple(slots), math.prod(axis_sizes), width, size)


def piece_views(row: Tensor, bucket: Bucket, member: int) -> list[Tensor]:
    """A row, or one of the same width, as the pieces of one member."""
    shapes = [slot.piece_shape(member) for slot in bucket.slots]
    return [
        row[slot.offset : slot.offset + math.prod(shape)].view(shape)
        for slot, shape in zip(bucket.slots, shapes, strict=True)
    ]


def whole_views(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """The flat buffer as whole leaves."""
    return [flat[slot.start : slot.start + math.prod(slot.shape)].view(slot.shape) for slot in bucket.slots]


def pieces_of(leaves: Sequence[Tensor], bucket: Bucket, member: int) -> list[Tensor]:
    """The pieces of one member, where they are in whole leaves."""
    return [
        leaf.narrow(slot.dim, slot.pieces[member][0], slot.pieces[member][1] - slot.pieces[member][0])
        for leaf, slot in zip(leaves, bucket.slots, strict=True)
    ]


def _row_views(rows: Tensor, slot: Slot, width: int) -> list[Tensor]:
    """Views of the rows that match `_leaf_views`: one of [members, before, length, after], or one a member."""
    base, before, after = rows.storage_offset() + slot.offset, slot.before, slot.after
    if slot.even:
        length = slot.pieces[0][1]
        size = (len(slot.pieces), before, length, after)
        return [rows.as_strided(size, (width, length * after, after, 1), base)]
    return [
        rows.as_strided((before, stop - start, after), ((stop - start) * after, after, 1), base + member * width)
        for member, (start, stop) in enumerate(slot.pieces)
    ]


def _leaf_views(leaf: Tensor, slot: Slot) -> list[Tensor]:
    """Views of a whole leaf, piece by piece, as `_row_views` has them."""
    total = slot.shape[slot.dim]
    flat = leaf.reshape(slot.before, total, slot.after)
    if slot.even:
        count = len(slot.pieces)
        return [flat.view(slot.before, count, total // count, slot.after).transpose(0, 1)]
    return [flat[:, start:stop] for start, stop in slot.pieces]


def copy_out(rows: Tensor | Sequence[Tensor], flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """Puts gathered rows together: fills the flat buffer and returns its whole leaves.

    Args:
        rows: [members, width], or as many tensors [width].
        flat: [size] of the same dtype.
        bucket: the plan of both.
    """
    return fill(rows, whole_views(flat, bucket), bucket)


def fill(
    rows: Tensor | Sequence[Tensor], leaves: list[Tensor], bucket: Bucket, *, there: int | None = None
) -> list[Tensor]:
    """Puts gathered rows together in whole leaves.

    Args:
        rows: [members, width], or as many tensors [width].
        leaves: contiguous, of the same dtype.
        bucket: the plan of both.
        there: a member whose pieces the leaves have already.

    Returns:
        The leaves.
    """
    if isinstance(rows, Tensor) and there is None:
        sources = [view for slot in bucket.slots for view in _row_views(rows, slot, bucket.width)]
        targets = [view for leaf, slot in zip(leaves, bucket.slots, strict=True) for view in _leaf_views(leaf, slot)]
    else:
        members = [member for member in range(bucket.members) if member != there]
        sources = [piece for member in members for piece in piece_views(rows[member], bucket, member)]
        targets = [piece for member in members for piece in pieces_of(leaves, bucket, member)]
    _compat.foreach_copy_(targets, sources)
    return leaves


def copy_in(leaves: Sequence[Tensor | None], rows: Tensor, slots: Sequence[Slot]) -> None:
    """Cuts whole leaves into the rows of the members who will own the pieces; None counts as zeros.

    Args:
        leaves: one for each slot, of any strides.
        rows: [members, width], of any dtype: the cast is part of the copy.
        slots: of the leaves in a row.
    """
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    width = rows.shape[1]
    for leaf, slot in zip(leaves, slots, strict=True):
        views = _row_views(rows, slot, width)
        if leaf is None:
            _compat.foreach_zero_(views)
        else:
            sources.extend(_leaf_views(leaf, slot))
            targets.extend(views)
    if sources:
        _compat.foreach_copy_(targets, sources)
