"""Sum over the members of a group in a fixed order, for any transport that can send rows.

Guarantee: a sum adds its terms in one balanced tree over the members, whichever member adds them and however they are
sent. k rows in one buffer take log2(k) additions, each of all pairs of a level; separate rows take k - 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.base.dtypes import wide
from fsharding.comm import bucket as buckets
from fsharding.comm.bucket import Bucket
from fsharding.comm.handles import Exchange, Handle, Memory, Places, Rows, nowhere
from fsharding.mesh.device_mesh import Group, index_of

__all__ = [
    "Fill", "Noise", "OrderedSum", "PlainTerms", "RowTransport", "SumLayout", "copy_terms", "plain_terms", "sum_pieces",
    "sum_rows", "sums_at_once",
]  # fmt: skip

Noise: TypeAlias = Callable[[int], Tensor]
"""The numbers in [0, 1) by which a leaf or a term is rounded, by its number; see `formats.philox.uniform_at`."""

_SMALL = 1 << 14
"""Up to so many elements a sum over ranks is one gather: every rank adds all terms itself."""

_SMALL_TERMS = 1 << 20
"""Up to so many elements of all terms together. 64 members reach it with `_SMALL`."""

_BLOCK = 1 << 20
"""Elements of rows that are added at a time where partial sums need memory of their own."""


def sum_rows(
    rows: Rows, terms: Sequence[int], dtype: torch.dtype, *, out: Tensor | None = None, donate: bool = False
) -> Tensor:
    """Add rows, [members, width] or as many [width], in the order of `terms`, pairwise in a balanced tree."""
    # A tree over 4 ranks is the sum of two trees over 2, so sums taken in one step or axis by axis agree bitwise when
    # sizes are powers of two. Rows in one buffer take one addition for each level of the tree, of all pairs at once.
    # Partial sums are in float32 at least, and rounded once. `donate`: a buffer of rows may be overwritten.
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
    """`sum_rows` of a buffer, level by level, a range of columns at a time where partial sums need memory."""
    if terms != range(len(rows)):
        rows = rows.index_select(0, index_of(terms, rows.device))
        donate = True
    width = rows.shape[1]
    in_one = (donate and rows.dtype == dtype) or _compat.is_fake(rows)  # partial sums without values take no memory
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
    # Each iteration adds all pairs of neighbors at once. `rest` is an unpaired last term; it is added at the next level
    # that leaves a partner for it.
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


def sum_pieces(
    rows: Rows,
    bucket: Bucket,
    member: int,
    terms: Sequence[int],
    dtype: torch.dtype,
    into: Sequence[Tensor] | None,
) -> list[Tensor]:
    """`sum_rows` of the pieces of a member, each into its tensor of `into`; rows in one buffer are overwritten."""
    # Sums of short rows are copied faster than views are made, so they are other tensors than those of `into`.
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
    """Copies terms to where they are sent from; None counts as zeros."""
    pairs = list(zip(slots, terms, strict=True))
    _compat.foreach_zero_([slot for slot, x in pairs if x is None])
    given = [(slot, x) for slot, x in pairs if x is not None]
    _compat.foreach_copy_([slot for slot, _ in given], [x for _, x in given])


def sums_at_once(n: int, members: int) -> bool:
    """Whether every member gets all terms of a sum and adds them, instead of adding a part and gathering the parts."""
    # It saves one communication round. For two members it sends no more bytes and touches less memory; with many, every
    # member would receive all terms, so it is for small sums only.
    return members <= 2 or (n <= _SMALL and n * members <= _SMALL_TERMS)


# ------------------------------------------------------------------------------------------------- terms that are sent
Fill: TypeAlias = Callable[[Sequence[int], Sequence[Tensor | None]], None]
"""Copies the terms of some leaves to where they are sent from; None counts as zeros."""


class SumLayout(Protocol):
    """How the terms of some leaves are sent, and how received rows of them are added."""

    @property
    def scatter(self) -> bool:
        """Whether each member gets the sums of its own pieces; else all get the sums of full leaves."""
        ...

    @property
    def at_once(self) -> bool:
        """Whether every member receives all terms and adds them itself; else it adds a part, and gathers the others."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what is sent."""
        ...

    @property
    def width(self) -> int:
        """Elements of a row: what is sent to a member."""
        ...

    @property
    def part_width(self) -> int:
        """Elements of the sums that a member adds for all, where these take a second round."""
        ...

    def filling(self, own: Tensor, noise: Noise | None) -> Fill:
        """Return what fills the rows `own` that are sent: [members, width], or [width] if all members get the same."""
        ...

    def sum(self, rows: Rows, group: Group, dtype: torch.dtype, into: Sequence[Tensor] | None) -> list[Tensor]:
        """Add rows, one from each member; a buffer may be overwritten. Return sums of leaves, or of own pieces."""
        ...

    def sum_part(self, rows: Rows, group: Group, own: Tensor) -> None:
        """Add received rows into the part [part_width] that this member adds for all."""
        ...

    def join(self, rows: Rows, into: Sequence[Tensor] | None) -> list[Tensor]:
        """Make the sums of leaves of the parts of all members; `into` is as in `sum`."""
        ...


@dataclass(frozen=True)
class PlainTerms:
    """Terms that are sent in a dtype."""

    bucket: Bucket  # the leaves; without `scatter`, as one member has them
    dtype: torch.dtype  # of the terms on the wire
    scatter: bool  # see `SumLayout`
    members: int  # how many there are

    @property
    def at_once(self) -> bool:
        """See `SumLayout`."""
        return not self.scatter and sums_at_once(self.bucket.width, self.members)

    @property
    def width(self) -> int:
        """See `SumLayout`."""
        return self.bucket.width if self.scatter or self.at_once else self.part_width

    @property
    def part_width(self) -> int:
        """See `SumLayout`: leaves are cut as one flat row."""
        return -(-self.bucket.width // self.members)

    def filling(self, own: Tensor, noise: Noise | None) -> Fill:
        """See `SumLayout`."""
        slots = self.bucket.slots
        if self.scatter:
            return lambda leaves, terms: buckets.copy_in(terms, own, [slots[i] for i in leaves])
        flat = own.view(-1)
        flat[self.bucket.width :].zero_()
        views = buckets.piece_views(flat, self.bucket, 0)
        return lambda leaves, terms: copy_terms([views[i] for i in leaves], terms)

    def sum(self, rows: Rows, group: Group, dtype: torch.dtype, into: Sequence[Tensor] | None) -> list[Tensor]:
        """See `SumLayout`."""
        return sum_pieces(rows, self.bucket, group.index if self.scatter else 0, group.terms, dtype, into)

    def sum_part(self, rows: Rows, group: Group, own: Tensor) -> None:
        """See `SumLayout`."""
        sum_rows(rows, group.terms, own.dtype, out=own, donate=True)

    def join(self, rows: Rows, into: Sequence[Tensor] | None) -> list[Tensor]:
        """See `SumLayout`; nothing is copied where the rows are one tensor."""
        flat = rows.view(-1) if isinstance(rows, Tensor) else torch.cat([*rows])
        return buckets.piece_views(flat, self.bucket, 0)


@functools.lru_cache(maxsize=4096)
def plain_terms(
    leaves: tuple[tuple[tuple[int, ...], int], ...], axis_sizes: tuple[int, ...], dtype: torch.dtype, *, scatter: bool
) -> PlainTerms:
    """Lay out terms that are sent in a dtype: (shape, sharded dim) of each; the dim counts with `scatter` only."""
    members = math.prod(axis_sizes)
    if scatter:
        return PlainTerms(buckets.plan_bucket(leaves, axis_sizes), dtype, True, members)
    return PlainTerms(buckets.plan_bucket(tuple((shape, 0) for shape, _ in leaves), ()), dtype, False, members)


# ------------------------------------------------------------------------------------------------------ sums of rows
class RowTransport(Protocol):
    """A transport, as far as sums need it."""

    group: Group

    def gather_rows(self, width: int, dtype: torch.dtype, memory: Memory | None = None) -> Exchange:
        """An all-gather of one row from each member."""
        ...

    def all_to_all(self, width: int, dtype: torch.dtype, memory: Memory | None = None) -> Exchange:
        """An exchange of one row between each two members."""
        ...


class OrderedSum:
    """A `Reduction` in the order of the members: rows of terms are exchanged, and added by `sum_rows`."""

    def __init__(
        self,
        terms: SumLayout,  # how they are sent and added
        transport: RowTransport,
        sum_dtype: torch.dtype,
        memory: Memory | None = None,
        noise: Noise | None = None,
    ) -> None:
        self._layout = terms
        self._transport = transport
        self._sum_dtype = sum_dtype
        if terms.at_once:
            self._exchange = transport.gather_rows(terms.width, terms.dtype)
        else:
            self._exchange = transport.all_to_all(terms.width, terms.dtype, memory)
        self._fill = terms.filling(self._exchange.own, noise)

    def add(self, leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
        """See `Reduction`."""
        self._fill(leaves, terms)

    def slot(self, leaf: int, dtype: torch.dtype) -> Tensor | None:
        """See `Reduction`: rows have pieces of a leaf, and a kernel needs the full one."""
        return None

    def start(self, places: Places = nowhere) -> Handle[list[Tensor]]:
        """See `Reduction`: sums that members add in parts take a second round, a gather of these."""
        handle = self._exchange.start()
        if self._layout.scatter or self._layout.at_once:
            return Handle(handle, lambda rows: self._sum(rows, places(), handle))
        return Handle(handle, lambda rows: self._sum_parts(rows, places(), handle), communicates=True)

    @torch.no_grad()
    def _sum(self, rows: Rows, into: Sequence[Tensor] | None, handle: Handle[Rows]) -> list[Tensor]:
        sums = self._layout.sum(rows, self._transport.group, self._sum_dtype, into)
        handle.release()
        return sums

    @torch.no_grad()
    def _sum_parts(self, rows: Rows, into: Sequence[Tensor] | None, handle: Handle[Rows]) -> list[Tensor]:
        parts = self._transport.gather_rows(self._layout.part_width, self._sum_dtype)
        self._layout.sum_part(rows, self._transport.group, parts.own)
        handle.release()
        return parts.start().then(lambda rows: self._layout.join(rows, into)).wait()
