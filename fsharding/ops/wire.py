"""What moves over a process group: rows of bytes to everybody, rows to their owners, and messages between two.

In: a group and a `[members, width]` buffer. Out: a `Pending` whose `wait` says that the buffer is ready.
On gloo a point-to-point gather and an all-to-all beat its own collectives two- to threefold, so they are the default;
`algorithm("native")` asks for the backend's own. Law: every algorithm gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsharding import _compat
from fsharding.counts import record_sent
from fsharding.mesh import Group

__all__ = [
    "Pending",
    "algorithm",
    "as_bytes",
    "chosen",
    "Message",
    "exchange_messages",
    "exchange_pieces",
    "exchange_rows",
    "gather_rows",
    "send_receive",
    "swap_rows",
]

_SHORT = 1 << 17
"""Up to so many bytes a row, an all-to-all of equal rows is a gather at least as fast as sends and receives on gloo."""

_algorithm: ContextVar[str] = ContextVar("fsharding_wire_algorithm", default="auto")


@contextmanager
def algorithm(name: str) -> Generator[None]:
    """Chooses how rows are gathered inside the `with` block.

    Args:
        name: "auto" (by backend and size), "native" (all-gather), "p2p" (sends and receives) or "exchange" (all-to-all
            of equal rows). All give the same bytes.
    """
    assert name in ("auto", "native", "p2p", "exchange"), name
    token = _algorithm.set(name)
    try:
        yield
    finally:
        _algorithm.reset(token)


@dataclass(frozen=True)
class Pending:
    """Communication under way.

    Attributes:
        works: what torch will wait for.
        held: buffers that have to live until then.
    """

    works: tuple[dist.Work, ...] = ()
    held: tuple[Tensor, ...] = ()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Returns when the buffers are ready.

        Args:
            timeout: by default the group's.

        Raises:
            RuntimeError: torch's own, when a peer is gone or the timeout is over.
        """
        for work in self.works:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)


def chosen() -> str:
    """The algorithm of the innermost `algorithm` block."""
    return _algorithm.get()


def _choose(rows: Tensor, group: Group) -> str:
    if chosen() != "auto":
        return chosen()
    if dist.get_backend(group.process_group) != "gloo":
        return "native"
    return "exchange" if rows[0].nbytes <= _SHORT else "p2p"


def gather_rows(rows: Tensor, group: Group) -> Pending:
    """Starts to fill every row of a buffer with that member's data; this member's row is already there.

    Args:
        rows: contiguous [members, width], row i from member i.
        group: who takes part.
    """
    if group.process_group is None or rows.numel() == 0:
        return Pending()
    way = _choose(rows, group)
    if way == "exchange":
        return exchange_rows(rows[group.index].expand_as(rows).contiguous(), rows, group)
    record_sent((group.size - 1) * rows[0].nbytes, group.axes)
    if way == "p2p":
        return swap_rows(rows, group)
    if group.order == tuple(range(group.size)):
        mine = rows[group.index].clone()
        return Pending((_compat.all_gather_flat(rows.view(-1), mine, group.process_group),), (mine,))
    mine, landed = rows[group.index].clone(), torch.empty_like(rows)
    _compat.all_gather_flat(landed.view(-1), mine, group.process_group).wait()
    rows.copy_(landed[list(group.order)])
    return Pending()


def swap_rows(rows: Tensor, group: Group, *, tag: int = 0) -> Pending:
    """Starts to fill a buffer as `gather_rows` does, by sends and receives of whole rows, which are not counted here.

    Args:
        rows: contiguous [members, width], row i from member i.
        group: who takes part.
        tag: of the messages.
    """
    works: list[dist.Work] = []
    for step in range(1, group.size):
        source, target = (group.index - step) % group.size, (group.index + step) % group.size
        works.append(_started(dist.irecv(rows[source], group.ranks[source], group.process_group, tag)))
        works.append(_started(dist.isend(rows[group.index], group.ranks[target], group.process_group, tag)))
    return Pending(tuple(works))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


def exchange_rows(send: Tensor, received: Tensor, group: Group) -> Pending:
    """Starts an all-to-all: row i of `send` goes to member i, row i of `received` comes from member i.

    Args:
        send: contiguous [members, width].
        received: the same shape and dtype.
        group: who takes part.
    """
    if group.process_group is None or send.numel() == 0:
        received.copy_(send)
        return Pending()
    record_sent((group.size - 1) * send[0].nbytes, group.axes)
    if group.order == tuple(range(group.size)):
        return Pending((_all_to_all(received, send, group),), (send,))
    members = [group.order.index(i) for i in range(group.size)]
    landed = torch.empty_like(received)
    _all_to_all(landed, send[members], group).wait()
    received.copy_(landed[list(group.order)])
    return Pending()


def _all_to_all(
    out: Tensor, x: Tensor, group: Group, sizes: Sequence[list[int]] | tuple[None, None] = (None, None)
) -> dist.Work:
    return _started(dist.all_to_all_single(out, x, *sizes, group=group.process_group, async_op=True))


def exchange_pieces(
    send: Tensor, received: Tensor, sends: Sequence[int], receives: Sequence[int], group: Group
) -> Pending:
    """Starts an uneven all-to-all of rows.

    Args:
        send: contiguous [sum of sends, ...]; the next `sends[i]` rows go to member i.
        received: contiguous [sum of receives, ...] of the same dtype; the next `receives[i]` rows come from member i.
        sends: rows for each member, this one included.
        receives: rows from each member: what it sends to this one.
        group: who takes part.
    """
    if group.process_group is None:
        received.copy_(send)
        return Pending()
    width = send[:1].nbytes if send.shape[0] else 0
    record_sent((sum(sends) - sends[group.index]) * width)
    if group.order == tuple(range(group.size)):
        return Pending((_all_to_all(received, send, group, ([*receives], [*sends])),), (send,))
    members = [group.order.index(i) for i in range(group.size)]
    pieces, landed = send.split([*sends]), torch.empty_like(received)
    sizes = [[rows[m] for m in members] for rows in (receives, sends)]
    _all_to_all(landed, torch.cat([pieces[m] for m in members]), group, sizes).wait()
    targets = received.split([*receives])
    for member, piece in zip(members, landed.split(sizes[0]), strict=True):
        targets[member].copy_(piece)
    return Pending()


class Message(NamedTuple):
    """One message of a round.

    Attributes:
        rank: global rank of the other side.
        tag: the same on both sides; of its own for each message between two ranks.
        data: contiguous; where it is, or where it will be.
    """

    rank: int
    tag: int
    data: Tensor


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, which travel whatever its dtype: a flat view."""
    return x.view(-1).view(torch.uint8)


def exchange_messages(sends: Sequence[Message], receives: Sequence[Message], group: Group) -> Pending:
    """Starts to send and receive messages of any sizes between any two ranks of a group.

    Args:
        sends: from this rank, in the same order as the other sides receive them.
        receives: to this rank.
        group: who takes part.
    """
    if sends:
        record_sent(sum(m.data.nbytes for m in sends), group.axes)
    works: list[dist.Work] = []
    if dist.get_backend(group.process_group) == "gloo":
        works = [_started(dist.irecv(m.data, m.rank, group.process_group, m.tag)) for m in receives]
        works += [_started(dist.isend(m.data, m.rank, group.process_group, m.tag)) for m in sends]
    elif sends or receives:
        ops = [dist.P2POp(dist.irecv, m.data, m.rank, group.process_group, m.tag) for m in receives]
        ops += [dist.P2POp(dist.isend, m.data, m.rank, group.process_group, m.tag) for m in sends]
        works = dist.batch_isend_irecv(ops)
    return Pending(tuple(works), tuple(m.data for m in (*sends, *receives)))


def send_receive(x: Tensor, out: Tensor, group: Group, *, target: int | None, source: int | None) -> Pending:
    """Starts to send `x` to one member and to receive `out` from another; None for nobody."""
    works: list[dist.Work] = []
    if source is not None and source != group.index:
        works.append(_started(dist.irecv(out, group.ranks[source], group.process_group)))
    if target is not None and target != group.index:
        record_sent(x.nbytes, group.axes)
        works.append(_started(dist.isend(x, group.ranks[target], group.process_group)))
    if source == group.index:
        out.copy_(x)
    return Pending(tuple(works), (x, out))
