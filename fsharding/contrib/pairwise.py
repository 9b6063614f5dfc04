"""Rows by sends and receives between pairs of ranks, on gloo two to three times as fast as its collectives.

Guarantee: it sends the same bytes as every transport.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm.counters import record_sent
from fsharding.comm.handles import Works
from fsharding.comm.native import Message, Native, message_limit, receive, send
from fsharding.mesh.device_mesh import Group

__all__ = ["SHORT", "Pairwise", "swap_rows"]

SHORT = 1 << 17
"""Up to so many bytes a row, an all-to-all of equal rows is at least as fast on gloo as sends and receives."""


class Pairwise(Native):
    """A group of gloo; see `Native`."""

    name = "pairwise"
    worth = SHORT

    def _own_row(self, rows: Tensor) -> Tensor:
        return rows[self.group.index]

    def _gather(self, own: Tensor, rows: Tensor) -> Works:
        group = self.group
        if group.process_group is None or rows.numel() == 0:
            return Works()
        if own.nbytes <= SHORT:
            return self._all_to_all(own.expand_as(rows).contiguous(), rows)
        record_sent((group.size - 1) * own.nbytes, group.axes)
        return swap_rows(rows, group)

    def _gather_several(self, outs: Sequence[Tensor], own: Sequence[Tensor]) -> Works:
        group = self.group
        works = list[Works]()
        several = [out.view(group.size, -1) for out in outs]
        _compat.foreach_copy_([rows[group.index] for rows in several], list(own))
        for tag, rows in enumerate(several):
            works.append(swap_rows(rows, group, tag=tag))
        return Works(
            tuple(work for each in works for work in each.works),
            tuple(outs),
            tuple(peer for each in works for peer in each.peers),
            works[0].limit,
        )


def swap_rows(rows: Tensor, group: Group, *, tag: int = 0) -> Works:
    """Start to fill every row of a buffer by sends and receives of full rows; the caller counts bytes."""
    works: list[dist.Work] = []
    peers: list[tuple[int, ...]] = []
    for step in range(1, group.size):
        source = (group.index - step) % group.size
        target = (group.index + step) % group.size
        works.append(receive(Message(group.ranks[source], tag, rows[source]), group))
        works.append(send(Message(group.ranks[target], tag, rows[group.index]), group))
        peers += [(group.ranks[source],), (group.ranks[target],)]
    return Works(tuple(works), (), tuple(peers), message_limit(group, rows.device))
