"""Sum over the members of a group in a fixed order, for any transport that can send rows.

Guarantee: terms are added in one balanced tree over the members, whichever member adds them and however they are sent.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.base.dtypes import wide
from fsharding.comm import bucket as buckets
from fsharding.comm.bucket import Bucket
from fsharding.comm.handles import Rows
from fsharding.mesh.device_mesh import Group, index_of

__all__ = ["Fill", "Noise", "SumLayout", "copy_terms", "plain_terms", "sum_rows", "sums_at_once"]

# Returns the numbers in [0, 1) for stochastic rounding of leaf i or its term; see `formats.philox.uniform_at`.
Noise: TypeAlias = Callable[[int], Tensor]

# A sum of at most this many elements is one all-gather, after which every rank adds all terms itself. All terms
# together may have at most `_SMALL_TERMS` elements, which 64 members reach.
_SMALL = 1 << 14
_SMALL_TERMS = 1 << 20

# Elements of rows that are added at a time if partial sums need separate memory.
_BLOCK = 1 << 20


def sum_rows(
    rows: Rows, terms: Sequence[int], dtype: torch.dtype, *, out: Tensor | None = None, donate: bool = False
) -> Tensor:
    """Add rows, [members, width] or a list of [width], in the order of `terms`, pairwise in a balanced tree."""
    # A tree over 4 ranks is the sum of two trees over 2, so sums taken in one step or axis by axis agree bitwise when
    # sizes are powers of two. Rows in one buffer take log2(k) additions, each of all pairs of a level; separate rows
    # take k - 1. Partial sums are in float32 at least and rounded once. `donate`: a buffer of rows may be overwritten.
    if len(terms) > 1 and (among := wide(dtype)) != dtype:
        total = sum_rows(rows, terms, among, donate=donate)
        return total.to(dtype) if out is None else out.copy_(total)
    if len(terms) == 1:
        return rows[terms[0]].to(dtype) if out is None else out.copy_(rows[terms[0]])
    if out is None:
        out = _compat.fresh(rows[0].shape, dtype, rows[0].device)
    if len(terms) == 2 and rows[0].dtype == dtype:
        return torch.add(rows[terms[0]], rows[terms[1]], out=out)
    if isinstance(rows, Tensor):
        return _sum_levels(rows, terms, dtype, out, donate=donate)
    half = 1 << ((len(terms) - 1).bit_length() - 1)
    left = sum_rows(rows, terms[:half], dtype, out=out)
    right = rows[terms[half]] if len(terms) == half + 1 else sum_rows(rows, terms[half:], dtype)
    return left.add_(right)


def _sum_levels(rows: Tensor, terms: Sequence[int], dtype: torch.dtype, out: Tensor, *, donate: bool) -> Tensor:
    """Add rows of a buffer level by level, in ranges of columns if partial sums need memory."""
    if terms != range(len(rows)):
        rows = rows.index_select(0, index_of(terms, rows.device))
        donate = True
    width = rows.shape[1]
    in_one = (donate and rows.dtype == dtype) or _compat.is_fake(rows)  # fake partial sums take no memory
    columns = max(1, width if in_one else _BLOCK // len(rows))
    for start in range(0, width, columns):
        left, right = _last_two(rows[:, start : start + columns], dtype, donate=donate)
        place = out[start : start + columns]
        if left.dtype == dtype:
            torch.add(left, right, out=place)
        else:
            place.copy_(left).add_(right)
    return out


def _last_two(rows: Tensor, dtype: torch.dtype, *, donate: bool) -> tuple[Tensor, Tensor]:
    """Return the two terms of the last addition of the tree over at least two rows, in their order."""
    # Each iteration adds all pairs of neighbors at once. `rest` is an unpaired last term: it joins the next level with
    # an odd number of sums, which is where the recursive tree of separate rows adds it too.
    count = len(rows)
    rest = rows[-1] if len(rows) % 2 else None
    if count == 2:
        return rows[0], rows[1]
    left = rows[: count - count % 2 : 2]
    right = rows[1::2]
    if donate and rows.dtype == dtype:
        sums = left.add_(right)
    elif rows.dtype == dtype:
        sums = torch.add(left, right)
    else:
        sums = left.to(dtype).add_(right)
    while len(sums) + (rest is not None) > 2:
        odd = sums[-1] if len(sums) % 2 else None
        sums = sums[: len(sums) - len(sums) % 2 : 2].add_(sums[1::2])
        if odd is not None:
            rest = odd if rest is None else odd.add_(rest)
    return (sums[0], sums[1]) if rest is None else (sums[0], rest)


def _sum_shards(
    rows: Rows, bucket: Bucket, member: int, terms: Sequence[int], dtype: torch.dtype, into: Sequence[Tensor] | None
) -> list[Tensor]:
    """Sum the shards of a member, each into its tensor of `into`; rows in one buffer are overwritten."""
    # Short rows are summed at once into a new tensor, which the caller copies to `into`: faster than one view per leaf.
    if into is None or rows[0].numel() <= _SMALL:
        return buckets.piece_views(sum_rows(rows, terms, dtype, donate=True), bucket, member)
    if isinstance(rows, Tensor):
        for slot, out in zip(bucket.slots, into, strict=True):
            part = rows[:, slot.offset : slot.offset + out.numel()]
            sum_rows(part, terms, dtype, out=out.view(-1), donate=True)
        return list(into)
    pieces = [buckets.piece_views(row, bucket, member) for row in rows]
    return [sum_rows([piece[i] for piece in pieces], terms, dtype, out=out) for i, out in enumerate(into)]


def copy_terms(slots: Sequence[Tensor], terms: Sequence[Tensor | None]) -> None:
    """Copy terms into their slots of a send buffer; None counts as zeros."""
    pairs = list(zip(slots, terms, strict=True))
    _compat.foreach_zero_([slot for slot, x in pairs if x is None])
    given = [(slot, x) for slot, x in pairs if x is not None]
    _compat.foreach_copy_([slot for slot, _ in given], [x for _, x in given])


def sums_at_once(n: int, members: int) -> bool:
    """Return whether every member receives and adds all terms, instead of adding a part and gathering the parts."""
    # This saves a communication round. For two members it sends no more bytes and touches less memory; for more members
    # it sends more bytes, so it is limited to small sums.
    return members <= 2 or (n <= _SMALL and n * members <= _SMALL_TERMS)


# ------------------------------------------------------------------------------------------------- terms that are sent
# Copies terms of some leaves into the send buffer; None counts as zeros.
Fill: TypeAlias = Callable[[Sequence[int], Sequence[Tensor | None]], None]


@dataclass(frozen=True, kw_only=True)
class SumLayout(ABC):
    """The layout in which terms of leaves are sent, and how received rows are added."""

    # Three schemes: `scatter`, each member receives and adds the terms of its shards; `at_once`, every member receives
    # all terms; else in two rounds, each member adds the part [part_width] of the leaves, then the parts are gathered.

    bucket: Bucket  # the leaves as a member adds them: its shards of them, or full
    dtype: torch.dtype  # dtype of a row
    scatter: bool  # members get the sums of their shards; otherwise all get the sums of full leaves
    width: int  # elements of a row, which is what each member is sent
    part_width: int | None = None
    native: bool = False  # the backend adds the terms, in its own order and in `dtype`
    as_is: bool = False  # a full leaf is a valid send buffer: kernels may write it, and other processes read it, there

    @property
    def at_once(self) -> bool:
        """Whether all members receive the same row from this one."""
        return not self.scatter and self.part_width is None

    @abstractmethod
    def filling(self, own: Tensor, noise: Noise | None) -> Fill:
        """Return the function that fills the send buffer `own`: [members, width], or [width] if `at_once`."""

    @abstractmethod
    def sum(self, rows: Rows, group: Group, dtype: torch.dtype, into: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the sums of leaves, or of this member's shards, from one row of each member; may overwrite rows."""

    @abstractmethod
    def sum_part(self, rows: Rows, group: Group, own: Tensor) -> None:
        """Add received rows into this member's part [part_width]."""

    @abstractmethod
    def join(self, rows: Rows, into: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the sums of leaves from the parts of all members."""


class PlainTerms(SumLayout):
    """Terms that are sent in a dtype; with two rounds, the leaves are split into parts as one flat row."""

    def filling(self, own: Tensor, noise: Noise | None) -> Fill:
        slots = self.bucket.slots
        if self.scatter:
            return lambda leaves, terms: buckets.copy_in(terms, own, [slots[i] for i in leaves])
        flat = own.view(-1)
        if flat.numel() > self.bucket.width:
            flat[self.bucket.width :].zero_()
        views = buckets.piece_views(flat, self.bucket, 0)
        return lambda leaves, terms: copy_terms([views[i] for i in leaves], terms)

    def sum(self, rows: Rows, group: Group, dtype: torch.dtype, into: Sequence[Tensor] | None) -> list[Tensor]:
        member = group.index if self.scatter else 0
        if self.native:  # one row: the sum
            return buckets.piece_views(rows[0].to(dtype), self.bucket, member)
        return _sum_shards(rows, self.bucket, member, group.terms, dtype, into)

    def sum_part(self, rows: Rows, group: Group, own: Tensor) -> None:
        sum_rows(rows, group.terms, own.dtype, out=own, donate=True)

    def join(self, rows: Rows, into: Sequence[Tensor] | None) -> list[Tensor]:
        # If rows are one buffer, it has the sums of all leaves in a row.
        flat = rows.view(-1) if isinstance(rows, Tensor) else torch.cat([*rows])
        return buckets.piece_views(flat, self.bucket, 0)


@functools.lru_cache(maxsize=4096)
def plain_terms(
    leaves: tuple[tuple[tuple[int, ...], int], ...],
    axis_sizes: tuple[int, ...],
    dtype: torch.dtype,
    *,
    scatter: bool,
    native: bool = False,
) -> SumLayout:
    """Lay out terms, each a (shape, sharded dim), that are sent in a dtype; the dim is used by `scatter` only."""
    members = math.prod(axis_sizes)
    native = native and members > 1
    kind = functools.partial(PlainTerms, dtype=dtype, scatter=scatter, native=native, as_is=not native)
    if scatter:
        bucket = buckets.plan_bucket(leaves, axis_sizes)
        return kind(bucket=bucket, width=bucket.width)
    bucket = buckets.plan_bucket(tuple((shape, 0) for shape, _ in leaves), ())
    if native or sums_at_once(bucket.width, members):
        return kind(bucket=bucket, width=bucket.width)
    part = -(-bucket.width // members)
    return kind(bucket=bucket, width=part, part_width=part)
