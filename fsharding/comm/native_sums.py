"""Sums by the backend's own collectives: one call of NCCL or gloo, in an order that the backend chooses.

Guarantee: sums equal the ordered ones up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm import bucket as buckets
from fsharding.comm.bucket import Bucket
from fsharding.comm.counters import record_sent
from fsharding.comm.handles import FreshMemory, Handle, Memory, Places, Reduction, Works, nowhere
from fsharding.comm.reduce import PlainTerms, copy_terms
from fsharding.mesh.device_mesh import Group, index_of
from fsharding.mesh.failures import among

__all__ = ["native_reduction"]


def native_reduction(
    terms: PlainTerms, group: Group, device: torch.device, sum_dtype: torch.dtype, memory: Memory | None = None
) -> Reduction:
    """Return a sum over several ranks, which the backend takes in the dtype in which terms are sent."""
    kind = _ReduceScatter if terms.scatter else _AllReduce
    return kind(terms.bucket, group, terms.dtype, sum_dtype, memory or FreshMemory(device))


class _Native:
    """What both sums have in common."""

    def __init__(
        self, bucket: Bucket, group: Group, wire_dtype: torch.dtype, sum_dtype: torch.dtype, memory: Memory
    ) -> None:
        assert group.process_group is not None, "one rank has nothing to sum"
        self._bucket = bucket
        self._group = group
        self._process_group = group.process_group
        self._sum_dtype = sum_dtype
        self._terms = memory.empty(bucket.members * bucket.width, wire_dtype)

    def slot(self, leaf: int, dtype: torch.dtype) -> Tensor | None:
        """See `Reduction`: terms and sums share memory, and a kernel writes nothing into it."""
        return None

    def _sent(self, works: Works, sums: Tensor, member: int, places: Places) -> Handle[list[Tensor]]:
        """Return a handle of works that add the terms into a row of sums, of which a member wants its pieces."""

        def pieces(_: None) -> list[Tensor]:
            places()  # asked for, and not used: the backend has written the sums elsewhere
            return [piece.to(self._sum_dtype) for piece in buckets.piece_views(sums, self._bucket, member)]

        return Handle(works, pieces)


class _AllReduce(_Native):
    def add(self, leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
        """See `Reduction`."""
        slots = buckets.piece_views(self._terms, self._bucket, 0)
        copy_terms([slots[i] for i in leaves], terms)

    def start(self, places: Places = nowhere) -> Handle[list[Tensor]]:
        """See `Reduction`."""
        k = self._group.size
        n = self._terms.numel()
        works = Works()
        if n:
            record_sent(2 * (k - 1) * -(-n // k) * self._terms.element_size(), self._group.axes)
            with among(self._group.ranks):
                work = dist.all_reduce(self._terms, group=self._process_group, async_op=True)
            assert work is not None
            works = Works((work,), (), (self._group.ranks,))
        return self._sent(works, self._terms, 0, places)


class _ReduceScatter(_Native):
    def add(self, leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
        """See `Reduction`."""
        rows = self._terms.view(self._bucket.members, self._bucket.width)
        buckets.copy_in(terms, rows, [self._bucket.slots[i] for i in leaves])

    def start(self, places: Places = nowhere) -> Handle[list[Tensor]]:
        """See `Reduction`."""
        group = self._group
        rows = self._terms.view(self._bucket.members, self._bucket.width)
        works = Works()
        sums = _compat.fresh((self._bucket.width,), rows.dtype, rows.device)
        if rows.numel():
            record_sent((group.size - 1) * rows[0].nbytes, group.axes)
            if not group.in_order:
                rows = rows.index_select(0, index_of(group.by_rank, rows.device))
            with among(group.ranks):
                work = _compat.reduce_scatter_single(sums, rows.view(-1), group=self._process_group, async_op=True)
            assert work is not None
            works = Works((work,), (rows,), (group.ranks,))
        return self._sent(works, sums, group.index, places)
