"""Rows from every member of a group, for every member or for one, and sums of them in a fixed order.

In: what one rank fills, a row for a gather, a row for each member for an exchange. Out: a row from each member.
Rows of ranks on one machine are read where they were written; others go over the wire.
Law: a sum adds its terms in one balanced tree, whoever takes it and however the rows came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fsharding import _compat
from fsharding.comm import process_group as wire
from fsharding.comm.counters import record_sent
from fsharding.comm.shared_memory import segments as blocks
from fsharding.comm.shared_memory import transport as shared
from fsharding.mesh.device_mesh import Group
from fsharding.precision import wide

__all__ = [
    "sums_at_once",
    "Delivery",
    "Empty",
    "PendingSum",
    "Rows",
    "fill_terms",
    "is_read_in_place",
    "open_exchange",
    "open_gather",
    "open_sum",
    "start_sum",
    "sum_pieces",
    "sum_rows",
]

_SMALL = 1 << 14
"""Up to so many elements a sum over ranks is one gather: every rank adds all terms itself."""

Rows: TypeAlias = Tensor | Sequence[Tensor]
Empty: TypeAlias = Callable[[int, torch.dtype], Tensor]


class Delivery(Protocol):
    """Rows on their way. Fill `mine`, `start`, `wait`, read the rows, say `done`.

    Attributes:
        mine: what this rank fills: [width] for a gather, [members, width] for an exchange.
    """

    mine: Tensor

    def start(self) -> None:
        """Sends what was filled in, which must not change from here."""
        ...

    def wait(self, timeout: timedelta | None = None) -> Rows:
        """A row from each member, [width] each, which must not be changed, nor read after `done`.

        Raises:
            RuntimeError: a member is gone, or the timeout is over.
        """
        ...

    def come(self) -> bool:
        """Whether `wait` would return at once, with rows or with an error."""
        ...

    def done(self) -> None:
        """The rows have been read. After a failure it may come without `wait`."""
        ...


class _Sent:
    """Over the wire, into a buffer of this rank."""

    def __init__(self, mine: Tensor, rows: Tensor, start: Callable[[], wire.Pending]) -> None:
        self.mine, self._rows, self._start = mine, rows, start
        self._pending = wire.Pending()

    def start(self) -> None:
        self._pending = self._start()

    def wait(self, timeout: timedelta | None = None) -> Rows:
        self._pending.wait(timeout)
        return self._rows

    def come(self) -> bool:
        return self._pending.come()

    def done(self) -> None:
        pass


class _Shown:
    """In memory that the members share; `row` says which row of another member's buffer is for this rank."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, group: Group, row: int | None) -> None:
        self.mine = blocks.take(dtype.itemsize * math.prod(shape)).view(dtype).view(shape)
        self._group, self._row = group, row
        self._posted: shared.Posted | None = None

    def start(self) -> None:
        row = self.mine if self._row is None else self.mine[0]
        record_sent((self._group.size - 1) * row.nbytes, self._group.axes)
        self._posted = shared.Posted(wire.as_bytes(self.mine), self._group)

    def wait(self, timeout: timedelta | None = None) -> Rows:
        assert self._posted is not None
        found = [buffer.view(self.mine.dtype).view(self.mine.shape) for buffer in self._posted.wait(timeout)]
        return found if self._row is None else [rows[self._row] for rows in found]

    def come(self) -> bool:
        return self._posted is not None and self._posted.come()

    def done(self) -> None:
        if self._posted is not None:
            self._posted.sign()


def open_gather(
    width: int, dtype: torch.dtype, group: Group, device: torch.device, empty: Empty | None = None
) -> Delivery:
    """A gather: every member fills a row, and gets all of them.

    Args:
        width: elements of a row, the same on every member.
        dtype: of the rows.
        group: who takes part; collective over it.
        device: where rows live.
        empty: makes a flat buffer for rows that come over the wire; by default a fresh one.
    """
    if is_read_in_place(width * dtype.itemsize, group, device):
        return _Shown((width,), dtype, group, None)
    rows = _make(group.size * width, dtype, device, empty).view(group.size, width)
    return _Sent(rows[group.index], rows, lambda: wire.gather_rows(rows, group))


def open_exchange(
    width: int, dtype: torch.dtype, group: Group, device: torch.device, empty: Empty | None = None
) -> Delivery:
    """An exchange: every member fills a row for each member, and gets those that are for it.

    Args:
        width: elements of a row, the same on every member.
        dtype: of the rows.
        group: who takes part; collective over it.
        device: where rows live.
        empty: makes a flat buffer for rows that go over the wire; by default a fresh one.
    """
    shape = (group.size, width)
    if is_read_in_place(width * dtype.itemsize, group, device):
        return _Shown(shape, dtype, group, group.index)
    send, received = (_make(group.size * width, dtype, device, empty).view(shape) for _ in range(2))
    return _Sent(send, received, lambda: wire.exchange_rows(send, received, group))


def _make(size: int, dtype: torch.dtype, device: torch.device, empty: Empty | None) -> Tensor:
    return _compat.fresh((size,), dtype, device) if empty is None else empty(size, dtype)


def is_read_in_place(nbytes: int, group: Group, device: torch.device) -> bool:
    """Whether rows of so many bytes are in memory that the members share. Collective over the group the first time."""
    if group.process_group is None or nbytes == 0 or device.type != "cpu" or wire.chosen() != "auto":
        return False
    return dist.get_backend(group.process_group) == "gloo" and shared.can_share(group)


def sum_rows(rows: Rows, terms: Sequence[int], dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Adds the rows of a buffer pairwise in a balanced tree.

    A tree over 4 ranks is the sum of two trees over 2, so sums taken in one step or axis by axis agree bitwise when
    sizes are powers of two.

    Args:
        rows: [members, width], or as many tensors [width].
        terms: the order of the rows.
        dtype: of the sum; partial sums are in float32 at least, and rounded once.
        out: where the sum goes.

    Returns:
        [width].
    """
    if len(terms) > 1 and (among := wide(dtype)) != dtype:
        total = sum_rows(rows, terms, among)
        return total.to(dtype) if out is None else out.copy_(total)
    if len(terms) == 1:
        return rows[terms[0]].to(dtype) if out is None else out.copy_(rows[terms[0]])
    if out is None:
        out = _compat.fresh(rows[0].shape, dtype, rows[0].device)
    if len(terms) == 2 and rows[0].dtype == dtype:
        return torch.add(rows[terms[0]], rows[terms[1]], out=out)
    half = 1 << ((len(terms) - 1).bit_length() - 1)
    left = sum_rows(rows, terms[:half], dtype, out=out)
    right = rows[terms[half]] if len(terms) == half + 1 else sum_rows(rows, terms[half:], dtype)
    return left.add_(right)


def sum_pieces(
    rows: Rows,
    cut: Callable[[Tensor], list[Tensor]],
    terms: Sequence[int],
    dtype: torch.dtype,
    into: Sequence[Tensor] | None,
) -> list[Tensor]:
    """`sum_rows`, piece by piece, so that each sum goes where it belongs without a copy.

    Args:
        rows: as in `sum_rows`.
        cut: a row into its pieces.
        terms: the order of the rows.
        dtype: of the sums.
        into: contiguous, where the sum of each piece may go; those of short rows are copied faster than they are made.

    Returns:
        The sum of each piece, which is the tensor of `into` if it is there.
    """
    if into is None or rows[0].numel() <= _SMALL:
        return cut(sum_rows(rows, terms, dtype))
    pieces = [cut(row) for row in rows]
    return [sum_rows([piece[i] for piece in pieces], terms, dtype, out=out) for i, out in enumerate(into)]


def fill_terms(homes: Sequence[Tensor], terms: Sequence[Tensor | None]) -> None:
    """Copies tensors to where they belong; None counts as zeros."""
    pairs = list(zip(homes, terms, strict=True))
    _compat.foreach_zero_([home for home, x in pairs if x is None])
    given = [(home, x) for home, x in pairs if x is not None]
    _compat.foreach_copy_([home for home, _ in given], [x for _, x in given])


@dataclass(frozen=True)
class PendingSum:
    """A sum over a group: `fill`, `start`, wait; see `open_sum`.

    Attributes:
        terms: where this rank's terms go, or what they are, if nothing travels.
    """

    terms: list[Tensor]
    group: Group
    dtype: torch.dtype
    delivery: Delivery | None = None

    def fill(self, numbers: Sequence[int], leaves: Sequence[Tensor | None]) -> None:
        """Copies some of this rank's terms to where they travel from; None counts as zeros."""
        fill_terms([self.terms[i] for i in numbers], leaves)

    def start(self) -> None:
        """Sends the terms, which must not change from here."""
        if self.delivery is not None:
            self.delivery.start()

    def come(self) -> bool:
        """Whether there is nothing to wait for."""
        at_once = sums_at_once(_count(self.terms), self.group.size)
        return self.delivery is None or (at_once and self.delivery.come())

    def wait_each(self, into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The sum of each term, in its shape, on every member.

        Args:
            into: as in `sum_pieces`.
        """
        if into is None or self.delivery is None or not sums_at_once(_count(self.terms), self.group.size):
            return self._cut(self.wait())
        sums = sum_pieces(self.delivery.wait(), self._cut, self.group.terms, self.dtype, into)
        self.delivery.done()
        return sums

    def _cut(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([x.numel() for x in self.terms])
        return [part.view(x.shape) for part, x in zip(parts, self.terms, strict=True)]

    def wait(self) -> Tensor:
        """The sum, flat, on every member."""
        if self.delivery is None:
            return torch.cat([x.reshape(-1) for x in self.terms]).to(self.dtype)
        rows, order, n = self.delivery.wait(), self.group.terms, _count(self.terms)
        if sums_at_once(n, self.group.size):
            total = sum_rows(rows, order, self.dtype)
            self.delivery.done()
            return total
        gather = open_gather(rows[0].numel(), self.dtype, self.group, self.terms[0].device)
        sum_rows(rows, order, self.dtype, out=gather.mine)
        self.delivery.done()
        gather.start()
        whole = gather.wait()
        flat = whole.view(-1) if isinstance(whole, Tensor) else _joined(whole)
        gather.done()
        return flat[:n]


def sums_at_once(n: int, members: int) -> bool:
    """Whether every member gets all terms of a sum and adds them, instead of adding a part and gathering the parts.

    It spares a round. Two members get no more bytes by it, and touch less memory.

    Args:
        n: elements.
        members: of the group.
    """
    return n <= _SMALL or members <= 2


def _joined(rows: Sequence[Tensor]) -> Tensor:
    out = _compat.fresh((len(rows) * rows[0].numel(),), rows[0].dtype, rows[0].device)
    return torch.cat([*rows], out=out)


def _count(terms: Sequence[Tensor]) -> int:
    return sum(x.numel() for x in terms)


def open_sum(
    shapes: Sequence[Sequence[int]], kind: torch.dtype, group: Group, dtype: torch.dtype, device: torch.device
) -> PendingSum:
    """A sum of tensors over a group, added as by `sum_rows`; nothing is sent.

    Args:
        shapes: of the terms of a rank, which travel one after the other.
        kind: their dtype on the way.
        group: who takes part.
        dtype: of the sum.
        device: where they live.
    """
    if group.process_group is None:
        return PendingSum([_compat.fresh(shape, kind, device) for shape in shapes], group, dtype)
    sizes = [math.prod(shape) for shape in shapes]
    n = sum(sizes)
    whole = sums_at_once(n, group.size)
    delivery = (open_gather if whole else open_exchange)(n if whole else -(-n // group.size), kind, group, device)
    flat = delivery.mine.view(-1)
    flat[n:].zero_()
    parts = [part.view(torch.Size(shape)) for part, shape in zip(flat[:n].split(sizes), shapes, strict=True)]
    return PendingSum(parts, group, dtype, delivery)


def start_sum(x: Tensor | Sequence[Tensor], group: Group, dtype: torch.dtype) -> PendingSum:
    """Starts the sum of a tensor over a group.

    Args:
        x: of any shape; or several of one dtype, which travel one after the other.
        group: who takes part.
        dtype: of the sum; the terms travel as they are, the sum travels in this dtype.
    """
    terms = [x] if isinstance(x, Tensor) else list(x)
    if group.process_group is None:
        return PendingSum(terms, group, dtype)
    pending = open_sum([term.shape for term in terms], terms[0].dtype, group, dtype, terms[0].device)
    pending.fill(range(len(terms)), terms)
    pending.start()
    return pending
