"""Send tensors inside a group of ranks by the collectives of its backend, NCCL or gloo."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm import bucket as buckets
from fsharding.comm.bucket import Bucket
from fsharding.comm.counters import record_sent
from fsharding.comm.handles import Exchange, Handle, Memory, Places, Reduction, Rows, Works, nowhere
from fsharding.comm.reduce import Noise, SumLayout
from fsharding.mesh.backends import backend_of
from fsharding.mesh.device_mesh import Group, index_of
from fsharding.mesh.failures import among

__all__ = [
    "IN_PLACE", "Message", "Native", "Offer", "RowSum", "as_bytes", "receive", "receive_object", "send", "send_object",
]  # fmt: skip


# Backends whose reduce-scatter may write a sum over this rank's term of it.
IN_PLACE = {"nccl", "gloo", "fake"}


class Message(NamedTuple):
    """A point-to-point message."""

    rank: int  # global rank of the peer
    tag: int  # equal on both sides, and unique among the messages in flight between two ranks
    data: Tensor  # contiguous tensor to send, or to receive into


def as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as flat bytes, which every backend can send."""
    return x.view(-1).view(torch.uint8)


class Offer(NamedTuple):
    """Whether a transport can serve a group, and why; the reason may be empty."""

    yes: bool
    reason: str


class Native:
    """The transport of one group, whose members make the same calls in the same order."""

    # Other transports derive from it and override methods. They must return the same bits and count the same bytes.

    name = "native"  # as in `make_mesh(transport=...)`
    # Shards of at least this many bytes are gathered directly into full leaves: smaller messages cost more than copies.
    worth = 1 << 14

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.device = device

    @classmethod
    def offer(cls, group: Group, *, asked: bool) -> Offer:
        """Decide whether this transport can serve a group; `asked`: it was requested. Collective the first time."""
        return Offer(True, "")

    # ---------------------------------------------------------------------------------------------------------- leaves
    def all_gather(
        self, bucket: Bucket, shards: Sequence[Tensor], dtype: torch.dtype, memory: Memory | None = None
    ) -> Handle[Tensor]:
        """Start to gather full leaves into a flat buffer of the bucket; casts this rank's shards to `dtype`."""
        # The result must not be written: in shared memory, other members read the same buffer.
        memory = memory or Memory(self.device)
        if self._gathers_in_place(bucket, shards, dtype):
            flat = memory.empty(bucket.size, dtype)
            return self._start_in_place(bucket, shards, buckets.whole_views(flat, bucket), memory).then(lambda _: flat)

        def join(rows: Rows) -> Tensor:
            flat = memory.empty(bucket.size, dtype)
            buckets.fill(rows, buckets.whole_views(flat, bucket), bucket)
            return flat

        return self._start_gather(bucket, shards, dtype, memory).then(join)

    def all_gather_into(
        self, bucket: Bucket, shards: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> Handle[Sequence[Tensor]]:
        """Start to gather full leaves into contiguous tensors of this rank; its shards may be views of these."""
        # The choice of a collective must not depend on addresses: some ranks may have their shards in place already,
        # others not. Only the local copy of this rank's own shard does.
        if self._gathers_in_place(bucket, shards, leaves[0].dtype):
            return self._start_in_place(bucket, shards, leaves, Memory(self.device)).then(lambda _: leaves)
        own = buckets.pieces_of(leaves, bucket, self.group.index)
        there = self.group.index if all(map(_compat.is_same_view, own, shards)) else None
        rows = self._start_gather(bucket, shards, leaves[0].dtype, None)
        return rows.then(lambda rows: buckets.fill(rows, list(leaves), bucket, there=there))

    def _gathers_in_place(self, bucket: Bucket, shards: Sequence[Tensor], dtype: torch.dtype) -> bool:
        """Whether the backend can gather some leaves directly into full leaves."""
        ordered = self.group.process_group is not None and self.group.in_order
        if not ordered or not buckets.part(bucket, self.worth // dtype.itemsize).direct:
            return False
        return not _compat.is_fake(shards[0])  # torch can't trace a coalesced all-gather; rows send as many bytes

    def _start_in_place(
        self, bucket: Bucket, shards: Sequence[Tensor], leaves: Sequence[Tensor], memory: Memory
    ) -> Handle[Sequence[Tensor]]:
        """Start one collective that gathers some leaves, at least one, in place, and rows of the others."""
        group = self.group
        dtype = leaves[0].dtype
        direct, others, rest = buckets.part(bucket, self.worth // dtype.itemsize)
        rows = self._rows(rest.width, dtype, memory)
        # A shard that needs no cast is sent from its own memory, so the caller must not write it before `wait`. All
        # other shards are copied at once, into one buffer.
        copied = [i for i in direct if shards[i].dtype != dtype or not shards[i].is_contiguous()]
        sizes = [rest.width, *(shards[i].numel() for i in copied)]
        row, *casts = _compat.fresh((sum(sizes),), dtype, self.device).split(sizes)
        targets = [*buckets.piece_views(row, rest, group.index), *casts]
        _compat.foreach_copy_(targets, [*(shards[i] for i in others), *(shards[i].reshape(-1) for i in copied)])
        sent = dict(zip(copied, casts, strict=True))
        own = [sent[i] if i in sent else shards[i].view(-1) for i in direct]
        outs = [leaves[i].view(-1) for i in direct]
        if rest.width:
            own.append(row)
            outs.append(rows.view(-1))
        record_sent((group.size - 1) * sum(x.nbytes for x in own), group.axes)
        works = self._gather_several(outs, own)
        return Handle(works, lambda _: buckets.fill(rows, [leaves[i] for i in others], rest))

    def _gather_several(self, outs: Sequence[Tensor], own: Sequence[Tensor]) -> Works:
        """Start to fill flat tensors with the data of all members; the caller counts the bytes."""
        assert self.group.process_group is not None
        with among(self.group.ranks):
            work = _compat.all_gather_several([*outs], [*own], group=self.group.process_group)
        return Works((work,), (*own, *outs), (self.group.ranks,))

    def _start_gather(
        self, bucket: Bucket, shards: Sequence[Tensor], dtype: torch.dtype, memory: Memory | None
    ) -> Handle[Rows]:
        exchange = self.gather_rows(bucket.width, dtype, memory)
        _compat.foreach_copy_(buckets.piece_views(exchange.own, bucket, self.group.index), list(shards))
        return exchange.start()

    def reduction(
        self,
        terms: SumLayout,
        sum_dtype: torch.dtype,
        *,
        large: bool = False,
        memory: Memory | None = None,
        noise: Noise | None = None,
    ) -> Reduction:
        """Return a sum over the members, without sending anything; `large` leaves are added one by one."""
        return RowSum(terms, self, sum_dtype, memory, noise)

    def has_slots(self, size: int, *, scatter: bool) -> bool:
        """Whether kernels can write terms of a `large` reduction into its send buffer; into rows they can't."""
        return False

    # ------------------------------------------------------------------------------------------------------------ rows
    def gather_rows(self, width: int, dtype: torch.dtype, memory: Memory | None = None) -> Exchange:
        """Prepare an all-gather of one row [width] from each member."""
        rows = self._rows(width, dtype, memory)
        own = self._own_row(rows)
        return Exchange(own, lambda: Handle(self._gather(own, rows), lambda _: rows))

    def _own_row(self, rows: Tensor) -> Tensor:
        """Return this member's row to send: the one that the gather fills, unless it has to reorder rows."""
        if self.group.process_group is None or self.group.in_order:
            return rows[self.group.index]
        return _compat.fresh((rows.shape[1],), rows.dtype, self.device)

    def all_to_all(self, width: int, dtype: torch.dtype, memory: Memory | None = None) -> Exchange:
        """Prepare an exchange of one row [width] between each pair of members."""
        sent = self._rows(width, dtype, memory)

        def send() -> Handle[Rows]:
            # Allocated at the start, not before: until then, rows received by an earlier exchange may still be in use,
            # and the pool would have to allocate more.
            received = self._rows(width, dtype, memory)
            return Handle(self._all_to_all(sent, received), lambda _: received)

        return Exchange(sent, send)

    def add_rows(self, width: int, dtype: torch.dtype, memory: Memory | None = None, *, scatter: bool) -> Exchange:
        """Prepare a backend sum of one row [width] that all members receive; with `scatter`, one row for each."""
        start = functools.partial(self._reduce_scatter, kept=memory is None) if scatter else self._all_reduce
        members = self.group.size if scatter else 1
        own = (memory or Memory(self.device)).empty(members * width, dtype).view(members, width)
        return Exchange(own, lambda: start(own))

    def _all_reduce(self, row: Tensor) -> Handle[Rows]:
        group = self.group
        k, n = group.size, row.numel()
        if n == 0:
            return Handle(Works(), lambda _: row)
        record_sent(2 * (k - 1) * -(-n // k) * row.element_size(), group.axes)
        with among(group.ranks):
            work = _started(dist.all_reduce(row, group=group.process_group, async_op=True))
        return Handle(Works((work,), (), (group.ranks,)), lambda _: row)

    def _reduce_scatter(self, rows: Tensor, *, kept: bool) -> Handle[Rows]:
        """Start to sum rows; the caller keeps the result, or reads it while its rows live."""
        group = self.group
        assert group.process_group is not None
        total = rows[group.index : group.index + 1]
        if kept or backend_of(group.process_group, rows.device.type) not in IN_PLACE:
            total = torch.empty_like(total)
        if rows.numel() == 0:
            return Handle(Works(), lambda _: total)
        record_sent((group.size - 1) * rows[0].nbytes, group.axes)
        if not group.in_order:
            rows = rows.index_select(0, index_of(group.by_rank, rows.device))
        flat = rows.view(-1)
        with among(group.ranks):
            work = _started(_compat.reduce_scatter_single(total[0], flat, group=group.process_group, async_op=True))
        return Handle(Works((work,), (rows,), (group.ranks,)), lambda _: total)

    def _rows(self, width: int, dtype: torch.dtype, memory: Memory | None) -> Tensor:
        memory = memory or Memory(self.device)
        size = self.group.size
        return memory.empty(size * width, dtype).view(size, width)

    def _gather(self, own: Tensor, rows: Tensor) -> Works:
        """Start to fill each row with its member's data."""
        group = self.group
        if group.process_group is None or rows.numel() == 0:
            return Works()
        record_sent((group.size - 1) * own.nbytes, group.axes)
        return self._in_order(rows, own, lambda out: self._all_gather_flat(out, own))

    def _in_order(self, rows: Tensor, sent: Tensor, start: Callable[[Tensor], dist.Work]) -> Works:
        """Start to receive a row from each member; if members aren't in rank order, wait and reorder the rows."""
        group = self.group
        if group.in_order:
            return Works((start(rows),), (sent,), (group.ranks,))
        by_rank = torch.empty_like(rows)
        Works((start(by_rank),), (), (group.ranks,)).wait()
        torch.index_select(by_rank, 0, index_of(group.order, rows.device), out=rows)
        return Works()

    def _all_gather_flat(self, out: Tensor, own: Tensor) -> dist.Work:
        assert self.group.process_group is not None
        with among(self.group.ranks):
            return _started(_compat.all_gather_single(out.view(-1), own, group=self.group.process_group, async_op=True))

    def _all_to_all(self, sent: Tensor, received: Tensor) -> Works:
        """Start to send row i to member i, and to receive row i from it."""
        group = self.group
        if group.process_group is None or sent.numel() == 0:
            received.copy_(sent)
            return Works()
        record_sent((group.size - 1) * sent[0].nbytes, group.axes)
        rows = sent if group.in_order else sent.index_select(0, index_of(group.by_rank, sent.device))
        return self._in_order(received, rows, lambda out: self._all_to_all_single(out, rows))

    def _all_to_all_single(
        self, out: Tensor, x: Tensor, sizes: Sequence[list[int]] | tuple[None, None] = (None, None)
    ) -> dist.Work:
        with among(self.group.ranks):
            return _started(dist.all_to_all_single(out, x, *sizes, group=self.group.process_group, async_op=True))

    def all_to_all_v(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle[Tensor]:
        """Start an uneven all-to-all: `send[i]` rows of x go to member i, and `receive[i]` come from it, in order."""
        group = self.group
        received = x.new_empty(sum(receive), *x.shape[1:])
        if group.process_group is None:
            received.copy_(x)
            return Handle(Works(), lambda _: received)
        width = x[:1].nbytes if x.shape[0] else 0
        record_sent((sum(send) - send[group.index]) * width, group.axes)
        if self.group.in_order:
            works = Works((self._all_to_all_single(received, x, ([*receive], [*send])),), (x,), (group.ranks,))
            return Handle(works, lambda _: received)
        members = group.by_rank
        pieces = x.split([*send])
        by_rank = torch.empty_like(received)
        sizes = [[rows[m] for m in members] for rows in (receive, send)]
        work = self._all_to_all_single(by_rank, torch.cat([pieces[m] for m in members]), sizes)
        Works((work,), (), (group.ranks,)).wait()
        targets = received.split([*receive])
        for member, piece in zip(members, by_rank.split(sizes[0]), strict=True):
            targets[member].copy_(piece)
        return Handle(Works(), lambda _: received)

    # -------------------------------------------------------------------------------------------------------- messages
    def send_recv(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle[None]:
        """Start point-to-point messages of any sizes."""
        # Two ranks must list the messages between them in the same order: NCCL matches by order, gloo by tag.
        group = self.group
        if sends:
            record_sent(sum(m.data.nbytes for m in sends), group.axes)
        works: list[dist.Work] = []
        peers = [(m.rank,) for m in (*receives, *sends)]
        if group.process_group is None:
            assert not peers, "one rank has no peer to send to"
        elif backend_of(group.process_group, self.device.type) == "gloo":
            works = [*(receive(m, group) for m in receives), *(send(m, group) for m in sends)]
        elif peers:
            ops = [dist.P2POp(dist.irecv, m.data, m.rank, group.process_group, m.tag) for m in receives]
            ops += [dist.P2POp(dist.isend, m.data, m.rank, group.process_group, m.tag) for m in sends]
            peers = [tuple({rank for several in peers for rank in several})]  # there may be one work for all
            with among(peers[0]):
                works = dist.batch_isend_irecv(ops)
        buffers = tuple(m.data for m in (*sends, *receives))
        sent = Works(tuple(works), buffers, tuple(peers) or ((),), message_limit(group, self.device))
        return Handle(sent, lambda _: None)


# ------------------------------------------------------------------------------------------------------ sums of rows
class RowSum:
    """A `Reduction` whose terms are sent as rows, as a `SumLayout` plans."""

    def __init__(
        self,
        terms: SumLayout,
        transport: Native,
        sum_dtype: torch.dtype,
        memory: Memory | None = None,
        noise: Noise | None = None,
    ) -> None:
        self._layout = terms
        self._transport = transport
        self._sum_dtype = sum_dtype
        if terms.native:
            self._exchange = transport.add_rows(terms.width, terms.dtype, memory, scatter=terms.scatter)
        elif terms.at_once:
            self._exchange = transport.gather_rows(terms.width, terms.dtype)
        else:
            self._exchange = transport.all_to_all(terms.width, terms.dtype, memory)
        self.own = self._exchange.own
        self._fill = terms.filling(self.own, noise)

    def add(self, leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
        """See `Reduction`."""
        self._fill(leaves, terms)

    def slot(self, leaf: int, dtype: torch.dtype) -> Tensor | None:
        """See `Reduction`."""
        return None  # rows have shards of a leaf, and a kernel writes the full leaf

    def start(self, places: Places = nowhere) -> Handle[list[Tensor]]:
        """See `Reduction`."""
        handle = self._exchange.start()
        if self._layout.part_width is None:
            return handle.then(lambda rows: self._sum(rows, places()))
        return Handle(handle, lambda rows: self._sum_parts(rows, places(), handle), communicates=True)

    @torch.no_grad()
    def _sum(self, rows: Rows, into: Sequence[Tensor] | None) -> list[Tensor]:
        return self._layout.sum(rows, self._transport.group, self._sum_dtype, into)

    @torch.no_grad()
    def _sum_parts(self, rows: Rows, into: Sequence[Tensor] | None, handle: Handle[Rows]) -> list[Tensor]:
        assert self._layout.part_width is not None
        parts = self._transport.gather_rows(self._layout.part_width, self._sum_dtype)
        self._layout.sum_part(rows, self._transport.group, parts.own)
        handle.release()  # before the second round: other members may wait to reuse these rows
        return parts.start().then(lambda rows: self._layout.join(rows, into)).wait()


# -------------------------------------------------------------------------------------------------- between two ranks
def message_limit(group: Group, device: torch.device) -> timedelta | None:
    """Return the timeout of messages: the group's current one for gloo, otherwise None."""
    # Without it, gloo messages use the timeout from the creation of the group.
    if group.process_group is None or backend_of(group.process_group, device.type) != "gloo":
        return None  # with a timeout, other backends would make the host wait for the device
    return _compat.group_timeout(group.process_group)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


def send(m: Message, group: Group) -> dist.Work:
    """Start to send a message, without counting its bytes."""
    with among((m.rank,)):
        return _started(dist.isend(m.data, m.rank, group.process_group, m.tag))


def receive(m: Message, group: Group) -> dist.Work:
    """Start to receive a message."""
    with among((m.rank,)):
        return _started(dist.irecv(m.data, m.rank, group.process_group, m.tag))


def send_object(value: Any, rank: int, group: Group, device: torch.device) -> None:
    """Send a picklable value to `receive_object`, without counting its bytes."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    for x in (torch.tensor([data.numel()], device=device), data):
        Works((send(Message(rank, 0, x), group),), (x,), ((rank,),), message_limit(group, device)).wait()


def receive_object(rank: int, group: Group, device: torch.device) -> Any:
    """Receive a value from `send_object`."""
    # It is unpickled without checks: all ranks run the same program, and trust each other.
    size = torch.zeros(1, dtype=torch.int64, device=device)
    Works((receive(Message(rank, 0, size), group),), (), ((rank,),), message_limit(group, device)).wait()
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    Works((receive(Message(rank, 0, data), group),), (), ((rank,),), message_limit(group, device)).wait()
    return pickle.loads(data.cpu().numpy().tobytes())
