"""What the members of a group have of a sum, leaf by leaf, on its way; and the sums that each of them wants.

In: whole leaves. Out: the sum of each leaf on every member, or of the piece of it that is this rank's.
Large ones lie in memory that the members share: each reads its pieces out of the leaves of the others. Else rows of
pieces travel. Law: the sums are the same either way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from fsharding.comm import bucket as buckets
from fsharding.comm import process_group as wire
from fsharding.comm.bucket import Bucket
from fsharding.comm.counters import record_sent
from fsharding.comm.shared_memory import segments as blocks
from fsharding.comm.shared_memory import transport as shared
from fsharding.comm.transport import (
    Empty,
    fill_terms,
    is_read_in_place,
    open_exchange,
    open_sum,
    sum_pieces,
    sum_rows,
    sums_at_once,
)
from fsharding.mesh.device_mesh import Group

__all__ = ["Shown", "Terms", "can_show", "open_terms"]


class Terms(Protocol):
    """Fill each leaf, `start`, `wait_each`."""

    def fill(self, numbers: Sequence[int], leaves: Sequence[Tensor | None]) -> None:
        """Copies some of this rank's leaves to where they travel from; None counts as zeros."""
        ...

    def start(self) -> None:
        """Sends the leaves, which must not change from here."""
        ...

    def come(self) -> bool:
        """Whether there is nothing to wait for."""
        ...

    def wait_each(self, into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The sum of each leaf, or of this rank's piece.

        Args:
            into: contiguous, where each sum may go; those that are not the tensor that was given are to be copied.
        """
        ...


def open_terms(
    shapes: Sequence[tuple[int, ...]],
    dims: Sequence[int],
    axis_sizes: tuple[int, ...],
    group: Group,
    *,
    wire_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    large: bool,
    empty: Empty | None,
) -> Terms:
    """Finds the memory for the terms of a sum; nothing is sent.

    Args:
        shapes: of the whole leaves.
        dims: the dim of each that is cut among the members; none where every member wants whole sums.
        axis_sizes: of the axes that cut them, major first.
        group: who takes part; collective over it.
        wire_dtype: of the terms.
        dtype: of the sums.
        device: where they live.
        large: the leaves are worth being taken one by one.
        empty: makes a flat buffer for rows that go over the wire; by default a fresh one.
    """
    cuts = tuple(zip(shapes, dims, strict=True)) if dims else tuple((shape or (1,), 0) for shape in shapes)
    plan = buckets.plan_bucket(cuts, axis_sizes if dims else ())
    if large and can_show(plan.width, group, device, cut=bool(dims)):
        return Shown(plan, None if dims else shapes, group, wire_dtype, dtype)
    if not dims:
        return open_sum(shapes, wire_dtype, group, dtype, device)
    return _Cut(plan, group, wire_dtype, dtype, device, empty)


def can_show(n: int, group: Group, device: torch.device, *, cut: bool) -> bool:
    """Whether each member can read what it wants of a sum out of the others' leaves. Collective the first time.

    Args:
        n: elements of what a member wants.
        group: who takes part.
        device: where leaves live.
        cut: members want pieces.
    """
    return is_read_in_place(n, group, device) and (cut or sums_at_once(n, group.size))


class Shown:
    """In memory that the members share, every leaf whole.

    Attributes:
        homes: where this rank's leaves go.
    """

    def __init__(
        self,
        plan: Bucket,
        shapes: Sequence[tuple[int, ...]] | None,
        group: Group,
        wire_dtype: torch.dtype,
        dtype: torch.dtype,
    ) -> None:
        """Without shapes each member wants its piece, else all want all of each leaf."""
        self._plan, self._shapes, self._group, self._dtype = plan, shapes, group, dtype
        self._flat = blocks.take(plan.size * wire_dtype.itemsize).view(wire_dtype)
        self.homes = self._leaves(self._flat)
        self._posted: shared.Posted | None = None

    def fill(self, numbers: Sequence[int], leaves: Sequence[Tensor | None]) -> None:
        """See `Terms`."""
        fill_terms([self.homes[i] for i in numbers], leaves)

    def start(self) -> None:
        """See `Terms`."""
        record_sent((self._group.size - 1) * self._plan.width * self._flat.itemsize, self._group.axes)
        self._posted = shared.Posted(wire.as_bytes(self._flat), self._group)

    def come(self) -> bool:
        """See `Terms`."""
        return self._posted is not None and self._posted.come()

    def wait_each(self, into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """See `Terms`."""
        assert self._posted is not None
        found = [self._wanted(buffer.view(self._flat.dtype)) for buffer in self._posted.wait()]
        homes = into or [None] * len(self.homes)
        sums = [
            sum_rows(terms, self._group.terms, self._dtype, out=out)
            for *terms, out in zip(*found, homes, strict=True)
        ]  # fmt: skip
        self._posted.sign()
        return sums

    def _leaves(self, flat: Tensor) -> list[Tensor]:
        wholes = buckets.whole_views(flat, self._plan)
        return wholes if self._shapes is None else [x.view(s) for x, s in zip(wholes, self._shapes, strict=True)]

    def _wanted(self, flat: Tensor) -> list[Tensor]:
        leaves = self._leaves(flat)
        return buckets.pieces_of(leaves, self._plan, self._group.index) if self._shapes is None else leaves


class _Cut:
    """In rows, one for each member, who sums those that are for it."""

    def __init__(
        self,
        plan: Bucket,
        group: Group,
        wire_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        empty: Empty | None,
    ) -> None:
        self._plan, self._group, self._dtype = plan, group, dtype
        self._delivery = open_exchange(plan.width, wire_dtype, group, device, empty)

    def fill(self, numbers: Sequence[int], leaves: Sequence[Tensor | None]) -> None:
        slots = tuple(self._plan.slots[i] for i in numbers)
        buckets.copy_in(leaves, self._delivery.mine, replace(self._plan, slots=slots))

    def start(self) -> None:
        self._delivery.start()

    def come(self) -> bool:
        return self._delivery.come()

    def wait_each(self, into: Sequence[Tensor] | None = None) -> list[Tensor]:
        cut = functools.partial(buckets.piece_views, bucket=self._plan, member=self._group.index)
        mine = sum_pieces(self._delivery.wait(), cut, self._group.terms, self._dtype, into)
        self._delivery.done()
        return mine
