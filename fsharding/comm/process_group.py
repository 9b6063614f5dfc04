"""What moves over a process group: rows of bytes to everybody, rows to their owners, and messages between two.

In: a group and a `[members, width]` buffer. Out: a `Pending` whose `wait` says that the buffer is ready.
On gloo a point-to-point gather and an all-to-all beat its own collectives two- to threefold, so they are the default;
`algorithm("native")` asks for the backend's own. Law: every algorithm gives the same bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsharding import _compat
from fsharding.comm.counters import record_sent
from fsharding.mesh.device_mesh import Group
from fsharding.mesh.failures import among

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
    "receive_object",
    "send_object",
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
        peers: global ranks that each of the works is with; the last entry is for all that are left.
        limit: how long to wait where nothing else is said; by default as long as torch does.
    """

    works: tuple[dist.Work, ...] = ()
    held: tuple[Tensor, ...] = ()
    peers: tuple[tuple[int, ...], ...] = ((),)
    limit: timedelta | None = None

    def come(self) -> bool:
        """Whether `wait` would return at once, or raise."""
        return all(work.is_completed() for work in self.works)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Returns when the buffers are ready.

        Args:
            timeout: by default the group's.

        Raises:
            RuntimeError: torch's own, when a peer is gone or the timeout is over.
        """
        timeout = self.limit if timeout is None else timeout
        for i, work in enumerate(self.works):
            with among(self.peers[min(i, len(self.peers) - 1)]):
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
        return Pending((_all_gather(rows, mine, group),), (mine,), (group.ranks,))
    mine, landed = rows[group.index].clone(), torch.empty_like(rows)
    Pending((_all_gather(landed, mine, group),), (), (group.ranks,)).wait()
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
    peers: list[tuple[int, ...]] = []
    for step in range(1, group.size):
        source, target = (group.index - step) % group.size, (group.index + step) % group.size
        works.append(_receive(Message(group.ranks[source], tag, rows[source]), group))
        works.append(_send(Message(group.ranks[target], tag, rows[group.index]), group))
        peers += [(group.ranks[source],), (group.ranks[target],)]
    return Pending(tuple(works), (), tuple(peers), _limit(group))


def _limit(group: Group) -> timedelta | None:
    """What gloo's messages have to be told: they go by a timeout that the group had when it was made."""
    assert group.process_group is not None
    gloo = dist.get_backend(group.process_group) == "gloo"  # any other would have the host wait for the device
    return _compat.group_timeout(group.process_group) if gloo else None


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


def _send(m: Message, group: Group) -> dist.Work:
    with among((m.rank,)):
        return _started(dist.isend(m.data, m.rank, group.process_group, m.tag))


def _receive(m: Message, group: Group) -> dist.Work:
    with among((m.rank,)):
        return _started(dist.irecv(m.data, m.rank, group.process_group, m.tag))


def _all_gather(out: Tensor, mine: Tensor, group: Group) -> dist.Work:
    assert group.process_group is not None
    with among(group.ranks):
        return _compat.all_gather_flat(out.view(-1), mine, group.process_group)


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
        return Pending((_all_to_all(received, send, group),), (send,), (group.ranks,))
    members = [group.order.index(i) for i in range(group.size)]
    landed = torch.empty_like(received)
    Pending((_all_to_all(landed, send[members], group),), (), (group.ranks,)).wait()
    received.copy_(landed[list(group.order)])
    return Pending()


def _all_to_all(
    out: Tensor, x: Tensor, group: Group, sizes: Sequence[list[int]] | tuple[None, None] = (None, None)
) -> dist.Work:
    with among(group.ranks):
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
    record_sent((sum(sends) - sends[group.index]) * width, group.axes)
    if group.order == tuple(range(group.size)):
        return Pending((_all_to_all(received, send, group, ([*receives], [*sends])),), (send,), (group.ranks,))
    members = [group.order.index(i) for i in range(group.size)]
    pieces, landed = send.split([*sends]), torch.empty_like(received)
    sizes = [[rows[m] for m in members] for rows in (receives, sends)]
    Pending((_all_to_all(landed, torch.cat([pieces[m] for m in members]), group, sizes),), (), (group.ranks,)).wait()
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
    peers = [(m.rank,) for m in (*receives, *sends)]
    if dist.get_backend(group.process_group) == "gloo":
        works = [*(_receive(m, group) for m in receives), *(_send(m, group) for m in sends)]
    elif sends or receives:
        ops = [dist.P2POp(dist.irecv, m.data, m.rank, group.process_group, m.tag) for m in receives]
        ops += [dist.P2POp(dist.isend, m.data, m.rank, group.process_group, m.tag) for m in sends]
        peers = [tuple({rank for several in peers for rank in several})]  # what comes back may be one work for all
        with among(peers[0]):
            works = dist.batch_isend_irecv(ops)
    return Pending(tuple(works), tuple(m.data for m in (*sends, *receives)), tuple(peers) or ((),), _limit(group))


def send_object(value: Any, rank: int, group: Group, device: torch.device) -> None:
    """Sends anything that can be pickled, to be got by `receive_object`; its bytes are not counted.

    Args:
        value: what to send.
        rank: global rank that gets it.
        group: both are in it.
        device: on which the group sends.
    """
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    for x in (torch.tensor([data.numel()], device=device), data):
        Pending((_send(Message(rank, 0, x), group),), (x,), ((rank,),), _limit(group)).wait()


def receive_object(rank: int, group: Group, device: torch.device) -> Any:
    """What another rank sends by `send_object`, which is trusted as is all of this program.

    Args:
        rank: global rank that sends it.
        group: both are in it.
        device: on which the group sends.
    """
    size = torch.zeros(1, dtype=torch.int64, device=device)
    Pending((_receive(Message(rank, 0, size), group),), (), ((rank,),), _limit(group)).wait()
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    Pending((_receive(Message(rank, 0, data), group),), (), ((rank,),), _limit(group)).wait()
    return pickle.loads(data.cpu().numpy().tobytes())


def send_receive(x: Tensor, out: Tensor, group: Group, *, target: int | None, source: int | None) -> Pending:
    """Starts to send `x` to one member and to receive `out` from another; None for nobody."""
    works: list[dist.Work] = []
    if source is not None and source != group.index:
        works.append(_receive(Message(group.ranks[source], 0, out), group))
    if target is not None and target != group.index:
        record_sent(x.nbytes, group.axes)
        works.append(_send(Message(group.ranks[target], 0, x), group))
    if source == group.index:
        out.copy_(x)
    others = tuple(group.ranks[i] for i in (source, target) if i is not None)
    return Pending(tuple(works), (x, out), (others,), _limit(group) if works else None)
