"""Sums over the members of a group in a fixed order, for any transport that can send rows.

In: terms of leaves. Out: the sum of each leaf on every member, or of the piece of it that is this member's.
Law: a sum adds its terms in one balanced tree over the members, whichever member adds them and however they are sent.
A sum of k rows in one buffer is log2(k) additions, each of all pairs of a level; of rows that lie apart, as those of
processes of one machine do, it is k - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fsharding import _compat
from fsharding.comm import bucket as buckets
from fsharding.comm.bucket import Bucket
from fsharding.comm.handles import Exchange, Handle, Memory, Rows, Terms
from fsharding.mesh.device_mesh import Group, index_of
from fsharding.precision import wide

__all__ = ["AllReduce", "ReduceScatter", "RowTransport", "copy_terms", "sum_pieces", "sum_rows", "sums_at_once"]

_SMALL = 1 << 14
"""Up to so many elements a sum over ranks is one gather: every rank adds all terms itself."""

_SMALL_TERMS = 1 << 20
"""Up to so many elements of all terms together. 64 members reach it with `_SMALL`."""

_BLOCK = 1 << 20
"""Elements of rows that are added at a time where partial sums need memory of their own."""


def sum_rows(
    rows: Rows, terms: Sequence[int], dtype: torch.dtype, *, out: Tensor | None = None, donate: bool = False
) -> Tensor:
    """Adds the rows of a buffer pairwise in a balanced tree.

    A tree over 4 ranks is the sum of two trees over 2, so sums taken in one step or axis by axis agree bitwise when
    sizes are powers of two. Rows in one buffer take one addition for each level of the tree, of all pairs at once.

    Args:
        rows: [members, width], or as many tensors [width].
        terms: the order of the rows; as a range where they stand in it.
        dtype: of the sum; partial sums are in float32 at least, and rounded once.
        out: where the sum goes.
        donate: a buffer of rows may be overwritten.

    Returns:
        [width].
    """
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
        rows, donate = rows.index_select(0, index_of(terms, rows.device)), True
    width = rows.shape[1]
    columns = max(1, width if donate and rows.dtype == dtype else _BLOCK // len(rows))
    for start in range(0, width, columns):
        left, right = _last_two(rows[:, start : start + columns], dtype, donate=donate)
        place = out[start : start + columns]
        if left.dtype == dtype:
            torch.add(left, right, out=place)
        else:
            place.copy_(left).add_(right)
    return out


def _last_two(rows: Tensor, dtype: torch.dtype, *, donate: bool) -> tuple[Tensor, Tensor]:
    """The two terms of the last addition of the tree over at least two rows, in their order.

    Each turn adds all pairs of neighbours at once. `rest` is the last term where it has no neighbour: it waits for the
    next level that has one for it.
    """
    count, rest = len(rows), rows[-1] if len(rows) % 2 else None
    if count == 2:
        return rows[0], rows[1]
    left, right = rows[: count - count % 2 : 2], rows[1::2]
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
    """`sum_rows`, piece by piece, so that each sum goes where it belongs without a copy.

    Args:
        rows: as in `sum_rows`; a buffer of them is overwritten.
        bucket: says what is in a row.
        member: whose pieces the rows have.
        terms: the order of the rows.
        dtype: of the sums.
        into: contiguous, where the sum of each piece may go; those of short rows are copied faster than they are made.

    Returns:
        The sum of each piece, which is the tensor of `into` if it is there.
    """
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
    """Whether every member gets all terms of a sum and adds them, instead of adding a part and gathering the parts.

    It spares a round. Two members get no more bytes by it, and touch less memory; many would get all terms of all.

    Args:
        n: elements.
        members: of the group.
    """
    return members <= 2 or (n <= _SMALL and n * members <= _SMALL_TERMS)


class RowTransport(Protocol):
    """A transport, as far as sums need it."""

    group: Group

    def gather_rows(self, width: int, dtype: torch.dtype, memory: Memory | None = None) -> Exchange:
        """An all-gather of one row from each member."""
        ...

    def all_to_all(self, width: int, dtype: torch.dtype, memory: Memory | None = None) -> Exchange:
        """An exchange of one row between each two members."""
        ...


class AllReduce:
    """A `Reduction` whose sums all members get.

    Args:
        transport: that sends the rows.
        bucket: the leaves, of one member.
        wire_dtype: of the terms.
        sum_dtype: of the sums.
    """

    def __init__(
        self, transport: RowTransport, bucket: Bucket, wire_dtype: torch.dtype, sum_dtype: torch.dtype
    ) -> None:
        self._transport, self._bucket, self._sum_dtype = transport, bucket, sum_dtype
        group, n = transport.group, bucket.width
        self._terms = group.terms
        self._at_once = sums_at_once(n, group.size)
        if self._at_once:
            self._exchange = transport.gather_rows(n, wire_dtype)
        else:
            self._exchange = transport.all_to_all(-(-n // group.size), wire_dtype)
        flat = self._exchange.own.view(-1)
        flat[n:].zero_()
        self._slots = self._cut(flat)

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return buckets.piece_views(flat, self._bucket, 0)

    def slot(self, leaf: int, dtype: torch.dtype) -> Tensor | None:
        """See `Reduction`: kernels write large leaves only, which are not sent as rows."""
        return None

    def add(self, leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
        """See `Reduction`."""
        copy_terms([self._slots[i] for i in leaves], terms)

    def start(self) -> Handle[Terms]:
        """See `Reduction`: a large sum takes a second round, in which members gather the parts that each has added."""
        handle = self._exchange.start()
        if self._at_once:
            return Handle(handle, lambda rows: Terms(lambda into: self._sum(rows, into, handle)))
        return Handle(handle, lambda rows: Terms(lambda _: self._sum_parts(rows, handle)), communicates=True)

    def _sum(self, rows: Rows, into: Sequence[Tensor] | None, handle: Handle[Rows]) -> list[Tensor]:
        sums = sum_pieces(rows, self._bucket, 0, self._terms, self._sum_dtype, into)
        handle.release()
        return sums

    def _sum_parts(self, rows: Rows, handle: Handle[Rows]) -> list[Tensor]:
        parts = self._transport.gather_rows(rows[0].numel(), self._sum_dtype)
        sum_rows(rows, self._terms, self._sum_dtype, out=parts.own, donate=True)
        handle.release()
        second = parts.start()
        whole = second.wait()
        flat = whole.view(-1) if isinstance(whole, Tensor) else _join(whole)
        second.release()
        return self._cut(flat)


def _join(rows: Sequence[Tensor]) -> Tensor:
    out = _compat.fresh((len(rows) * rows[0].numel(),), rows[0].dtype, rows[0].device)
    return torch.cat([*rows], out=out)


class ReduceScatter:
    """A `Reduction` of which each member gets its own pieces: an all-to-all of rows, and sums.

    Args:
        transport: that sends the rows.
        bucket: the leaves, and how the members cut them.
        wire_dtype: of the terms.
        sum_dtype: of the sums.
        memory: for rows.
    """

    def __init__(
        self,
        transport: RowTransport,
        bucket: Bucket,
        wire_dtype: torch.dtype,
        sum_dtype: torch.dtype,
        memory: Memory | None = None,
    ) -> None:
        self._group, self._bucket, self._sum_dtype = transport.group, bucket, sum_dtype
        self._exchange = transport.all_to_all(bucket.width, wire_dtype, memory)

    def slot(self, leaf: int, dtype: torch.dtype) -> Tensor | None:
        """See `Reduction`: rows have pieces of a leaf, and a kernel wants it whole."""
        return None

    def add(self, leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
        """See `Reduction`."""
        buckets.copy_in(terms, self._exchange.own, [self._bucket.slots[i] for i in leaves])

    def start(self) -> Handle[Terms]:
        """See `Reduction`."""
        handle = self._exchange.start()
        return Handle(handle, lambda rows: Terms(lambda into: self._sum(rows, into, handle)))

    def _sum(self, rows: Rows, into: Sequence[Tensor] | None, handle: Handle[Rows]) -> list[Tensor]:
        group = self._group
        pieces = sum_pieces(rows, self._bucket, group.index, group.terms, self._sum_dtype, into)
        handle.release()
        return pieces
