"""Ranks of one machine read each other's buffers in place, in memory that all of them map.

Guarantee: a member reads only what was written before the note; a group over several machines never comes here; members
that send unlike things are told so before they read any.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm import bucket as buckets
from fsharding.comm.bucket import Bucket
from fsharding.comm.counters import record_sent
from fsharding.comm.handles import Exchange, Handle, Memory, Places, Reduction, Rows, nowhere
from fsharding.comm.native import Offer, as_bytes
from fsharding.comm.reduce import Noise, SumLayout, copy_terms, sum_rows, sums_at_once
from fsharding.contrib.pairwise import Pairwise, swap_rows
from fsharding.contrib.shared_memory import segments
from fsharding.contrib.shared_memory.pipes import MemberError, Pipes
from fsharding.mesh.device_mesh import Group
from fsharding.mesh.failures import UnlikeSizes, among

__all__ = ["Joint", "Posted", "SharedMemory"]

_TAG = 1 << 20
"""Tag of handshakes; no other message has it."""

_NOWHERE: segments.Note = (-1, -1, -1, -1)
"""Sent instead of a block by a member that provides none."""

_POSTED, _RESERVED, _JOINT = range(3)
"""Kind of a note: a separate buffer, the memory of the next joint buffer, or a part of one."""

_SWITCH = "FSHARDING_SHARED_MEMORY"


@dataclass
class _Members:
    """Connected processes of this machine, and those of their blocks that this one has mapped."""

    name: int
    pids: tuple[int, ...]
    pipes: Pipes
    channels: int = 0
    mapped: dict[tuple[int, int, int], segments.Mapping] = field(default_factory=dict)

    def open(self, member: int, fd: int, inode: int, size: int) -> segments.Mapping:
        known = self.mapped.get((member, fd, inode))
        if known is None:
            known = self.mapped[member, fd, inode] = segments.map_block(self.pids[member], fd, inode, size)
        return known

    def check(self, index: int, records: Sequence[Sequence[int]]) -> None:
        """Reach every other member through the locations of its name and pipes."""
        self.pipes.connect(self.pids, [write_ends[index] for _, _, _, _, *write_ends in records])
        for member, (_, fd, inode, size, *_) in enumerate(records):
            if member != index:
                result = self.open(member, fd, inode, size)
                if int(result.data[:8].view(torch.int64)) != self.pids[member]:
                    raise RuntimeError(f"Process {self.pids[member]} is another one than it says.")


@dataclass
class _Turns:
    """Joint buffers of one size on a channel: their number, and the note of the last one."""

    size: int
    count: int = 0
    notes: _Notes | None = None
    reserved: segments.Block | None = None

    def reserve_next(self, group: Group) -> segments.Note:
        """Return this member's note on the next buffer: its location, if this member provides it."""
        if self.count % group.size != group.index:
            return _NOWHERE
        self.reserved = segments.reserve(self.size, self)
        return self.reserved.note()


@dataclass
class _Channel:
    """Notes of one process group; groups of the same processes have separate channels."""

    members: _Members
    number: int
    turns: dict[int, _Turns] = field(default_factory=dict)


_channels: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], bool], _Channel | str]] = (
    WeakKeyDictionary()
)
"""By process group and the order of its ranks: the channel, or the reason that it has none."""

_known: WeakValueDictionary[tuple[int, ...], _Members] = WeakValueDictionary()
"""By their ranks."""


def _channel(group: Group) -> _Channel:
    """Return the channel of a group to which `SharedMemory` was offered."""
    assert group.process_group is not None
    channel = _channels[group.process_group][group.ranks, group.transport == "shared_memory"]
    assert isinstance(channel, _Channel)
    return channel


def _handshake(group: Group, *, asked: bool) -> _Channel | str:
    """Return the channel of a group, or why it has none; groups of the same processes share pipes."""
    if group.size > segments.HEAD // 8:
        return f"it has more than {segments.HEAD // 8} ranks"
    machine = _machine()
    known = _known.get(group.ranks)
    wanted = machine >= 0 and (asked or os.environ.get(_SWITCH, "1") != "0")
    own = [machine if wanted else -1, *((known.name, known.channels) if known is not None else (0, 0))]
    records, pids = zip(*((r[:-1], r[-1]) for r in _numbers([*own, os.getpid()], group)), strict=True)
    machines = {record[0] for record in records}
    if -1 in machines:
        return f"a rank does not share its memory ({_SWITCH}=0, or its system cannot)"
    if len(machines) > 1:
        return "its ranks are on several machines"
    if known is None or known.pids != pids or any(record != own for record in records):
        known = _connect(group, pids)
        if known is None:
            return "its ranks may not map each other's memory"
        _known[group.ranks] = known
    known.channels += 1
    return _Channel(known, known.channels)


def _connect(group: Group, pids: tuple[int, ...]) -> _Members | None:
    """Write this member's name into a block and open pipes; every member must reach all of them."""
    own = segments.take(8)
    pipes: Pipes | None = None
    record = [-1] * (4 + group.size)
    with suppress(OSError):  # this process may open no more files
        pipes = Pipes(group.size, group.index, len(_NOWHERE) + 1)
        block = segments.block_of(own)
        own.view(torch.int64).fill_(os.getpid())
        record = [time.time_ns(), block.fd, block.inode, block.size, *pipes.write_ends]
    records = _numbers(record, group)
    members = None
    if pipes is not None:
        members = _Members(records[0][0], pids, pipes)
        try:
            members.check(group.index, records)
        except (RuntimeError, ValueError):
            members = None
    # The block may be written again, and the ends of pipes closed, only after all members have answered.
    answers = _numbers([int(members is not None)], group)
    if pipes is not None:
        pipes.close_write_ends()
    return members if all(answer for (answer,) in answers) else None


def _numbers(own: Sequence[int], group: Group) -> list[list[int]]:
    """All-gather a value over the group itself."""
    rows = torch.empty(group.size, len(own), dtype=torch.int64)
    rows[group.index] = torch.tensor(own)
    swap_rows(rows, group, tag=_TAG).wait()
    return rows.tolist()


def _machine() -> int:
    """Return a number shared by processes of one boot and one PID namespace; -1 if unknown."""
    if not hasattr(os, "memfd_create"):
        return -1
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return int(boot.replace("-", "")[:15], 16) ^ Path("/proc/self/ns/pid").stat().st_ino
    except (OSError, ValueError):
        return -1


@contextmanager
def _naming(group: Group) -> Generator[None]:
    """Name the rank of the member in a failure."""
    try:
        yield
    except MemberError as error:
        with among((group.ranks[error.member],)):
            raise


class _Notes:
    """An exchange of notes: one from each member to each other."""

    def __init__(self, note: segments.Note, kind: int, nbytes: int, group: Group) -> None:
        """Send this member's note."""
        self._group, self._channel, self._what = group, _channel(group), nbytes * 3 + kind
        with _naming(group):
            self._number = self._channel.members.pipes.send(self._channel.number, (*note, self._what))
        self._received: Mapping[int, tuple[int, ...]] | None = None

    def wait(self, timeout: timedelta | None = None) -> Mapping[int, tuple[int, ...]]:
        """Return the notes of the other members."""
        if self._received is None:
            assert self._group.process_group is not None
            limit = _compat.group_timeout(self._group.process_group) if timeout is None else timeout
            with among(self._group.ranks), _naming(self._group):
                notes = self._channel.members.pipes.receive(self._channel.number, self._number, limit)
            if unlike := [member for member, note in notes.items() if note[-1] != self._what]:
                with among([self._group.ranks[member] for member in unlike]):
                    theirs = notes[unlike[0]][-1] // 3
                    ours = self._what // 3
                    raise UnlikeSizes(f"{theirs} bytes came, where {ours} are sent")
            self._received = {member: note[:-1] for member, note in notes.items()}
        return self._received

    def is_ready(self) -> bool:
        """Return whether `wait` would return at once; raise as it does."""
        if self._received is not None:
            return True
        with _naming(self._group):
            return self._channel.members.pipes.is_ready(self._channel.number, self._number)


def _map_from(member: int, note: Sequence[int], group: Group) -> segments.Mapping:
    """Return the block of a member's note."""
    fd, inode, size, _ = note
    with among((group.ranks[member],)):
        return _channel(group).members.open(member, fd, inode, size)


class Posted:
    """One buffer of each member, all of one size, once all are posted."""

    def __init__(self, own: Tensor, group: Group) -> None:
        """Post this member's buffer to the others."""
        block = segments.block_of(own)
        block.readers = {i: pid for i, pid in enumerate(_channel(group).members.pids) if i != group.index}
        self._mine = own
        self._group = group
        self._notes = _Notes(block.note(), _POSTED, own.numel(), group)
        self._buffers: list[Tensor] | None = None
        self._unread: list[tuple[memoryview[int], int]] = []
        self._acknowledged = False

    def wait(self, timeout: timedelta | None = None) -> Sequence[Tensor]:
        """Return the buffer of each member as bytes, valid until `release`."""
        assert not self._acknowledged, "the buffers may have been written again"
        if self._buffers is None:
            buffers = [self._mine] * self._group.size
            for member, note in self._notes.wait(timeout).items():
                mapping = _map_from(member, note, self._group)
                self._unread.append((mapping.head, note[-1]))
                buffers[member] = mapping.data[: self._mine.numel()]
            self._buffers = buffers
        return self._buffers

    def is_ready(self) -> bool:
        """Return whether `wait` would return at once; raise as it does."""
        return self._notes.is_ready()

    def release(self, timeout: timedelta | None = None) -> None:
        """Acknowledge the buffers, which may then be written again; wait for them first if needed."""
        # Acknowledge each once: later its member may have posted a different buffer in the same memory.
        if not self._acknowledged:
            self.wait(timeout)
            for head, number in self._unread:
                head[self._group.index] = number
            self._acknowledged = True
            self._buffers = None


class Joint:
    """A buffer in shared memory, of which every member writes a part: fill, `start`, `wait`."""

    # Members provide the memory in round-robin order. The note that a part is written also has the address of the next
    # buffer, if its member provides that one, so no member waits for memory or requests it.
    # `buffer`: all parts as bytes, uninitialized until written. It is acknowledged when this process has no view left.

    def __init__(self, nbytes: int, group: Group) -> None:
        """Find the memory; wait for the others if it is the first of its size, or the last one wasn't waited for."""
        channel = _channel(group)
        size = segments.size_of(nbytes)
        self._group, self._turns = group, channel.turns.setdefault(size, _Turns(size))
        turns = self._turns
        if turns.notes is None:
            turns.notes = _Notes(turns.reserve_next(group), _RESERVED, size, group)
        giver = turns.count % group.size
        if giver == group.index:
            assert turns.reserved is not None
            mapping = turns.reserved.mapping
            number = turns.reserved.number
            segments.use(turns.reserved, nbytes, dict(enumerate(channel.members.pids)))
        else:
            note = turns.notes.wait()[giver]
            mapping = _map_from(giver, note, group)
            number = note[-1]
        turns.count += 1
        memory = mapping.memory[segments.HEAD : segments.HEAD + nbytes]
        finalize(memory, _acknowledge, os.getpid(), mapping.head, group.index, number)
        self.buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self._notes: _Notes | None = None

    def start(self) -> None:
        """Announce that this member's part is written; it must not change afterwards."""
        note = self._turns.reserve_next(self._group)
        self._notes = self._turns.notes = _Notes(note, _JOINT, self.buffer.numel(), self._group)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until all parts are written."""
        assert self._notes is not None
        self._notes.wait(timeout)

    def is_ready(self) -> bool:
        """Return whether `wait` would return at once; raise as it does."""
        return self._notes is not None and self._notes.is_ready()

    def release(self, timeout: timedelta | None = None) -> None:
        """See `Work`: the buffer is acknowledged once no view of it is left."""
        self.wait(timeout)


def _acknowledge(pid: int, head: memoryview[int], slot: int, number: int) -> None:
    """Acknowledge memory that this process no longer views; a forked child does nothing."""
    if os.getpid() == pid:
        head[slot] = number


# ------------------------------------------------------------------------------------------------------- the transport
class SharedMemory(Pairwise):
    """A group within one machine; see `Native`. Messages and uneven rows go over gloo."""

    name = "shared_memory"

    @classmethod
    def offer(cls, group: Group, *, asked: bool) -> Offer:
        """See `Native.offer`: all members must be processes of one machine that can map each other's memory."""
        assert group.process_group is not None
        channels = _channels.setdefault(group.process_group, {})
        key = group.ranks, asked
        if key not in channels:
            channels[key] = _handshake(group, asked=asked)
        result = channels[key]
        if isinstance(result, str):
            return Offer(False, result)
        return Offer(True, "its ranks are processes of one machine")

    def all_gather(
        self, bucket: Bucket, shards: Sequence[Tensor], dtype: torch.dtype, memory: Memory | None = None
    ) -> Handle[Tensor]:
        """See `Native`: each member writes its shards into the full leaves, without a copy."""
        if bucket.width == 0:
            return super().all_gather(bucket, shards, dtype, memory)
        joint = Joint(bucket.size * dtype.itemsize, self.group)
        flat = joint.buffer.view(dtype)
        if memory is not None:
            memory.adopt(flat)
        wholes = buckets.whole_views(flat, bucket)
        _compat.foreach_copy_(buckets.pieces_of(wholes, bucket, self.group.index), list(shards))
        record_sent((self.group.size - 1) * bucket.width * dtype.itemsize, self.group.axes)
        joint.start()
        return Handle(joint, lambda _: flat)

    def reduction(
        self,
        terms: SumLayout,
        sum_dtype: torch.dtype,
        *,
        large: bool = False,
        memory: Memory | None = None,
        noise: Noise | None = None,
    ) -> Reduction:
        """See `Native`: members read their shards from the others' full leaves, if these are large."""
        if large and terms.as_is and self.has_slots(terms.bucket.width, scatter=terms.scatter):
            return _LeafReduction(terms, self.group, sum_dtype)
        return super().reduction(terms, sum_dtype, large=large, memory=memory, noise=noise)

    def has_slots(self, size: int, *, scatter: bool) -> bool:
        """See `Native`."""
        return size > 0 and (scatter or sums_at_once(size, self.group.size))

    def gather_rows(self, width: int, dtype: torch.dtype, memory: Memory | None = None) -> Exchange:
        """See `Native`."""
        if width == 0:
            return super().gather_rows(width, dtype, memory)
        own = segments.take(width * dtype.itemsize).view(dtype)
        return Exchange(own, lambda: self._show(own, own.nbytes, lambda rows: rows))

    def all_to_all(self, width: int, dtype: torch.dtype, memory: Memory | None = None) -> Exchange:
        """See `Native`."""
        if width == 0:
            return super().all_to_all(width, dtype, memory)
        group = self.group
        own = segments.take(group.size * width * dtype.itemsize).view(dtype).view(group.size, width)
        return Exchange(own, lambda: self._show(own, own[0].nbytes, lambda rows: [each[group.index] for each in rows]))

    def _show(self, own: Tensor, sent: int, choose: Callable[[Sequence[Tensor]], Rows]) -> Handle[Rows]:
        """Let the others read a buffer in place; of theirs, choose the rows for this rank."""
        record_sent((self.group.size - 1) * sent, self.group.axes)
        posted = Posted(as_bytes(own), self.group)
        return Handle(posted, lambda read: choose([each.view(own.dtype).view(own.shape) for each in read]))


class _LeafReduction:
    """A `Reduction` of full leaves that the others read in place."""

    # With `scatter` each member reads its shards, otherwise the full leaves.

    def __init__(self, terms: SumLayout, group: Group, sum_dtype: torch.dtype) -> None:
        self._bucket = terms.bucket
        self._scatter = terms.scatter
        self._group = group
        self._sum_dtype = sum_dtype
        self._flat = segments.take(terms.bucket.size * terms.dtype.itemsize).view(terms.dtype)
        self._slots = buckets.whole_views(self._flat, terms.bucket)

    def slot(self, leaf: int, dtype: torch.dtype) -> Tensor | None:
        return self._slots[leaf] if self._slots[leaf].dtype == dtype else None

    def add(self, leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
        copy_terms([self._slots[i] for i in leaves], terms)

    def start(self, places: Places = nowhere) -> Handle[list[Tensor]]:
        record_sent((self._group.size - 1) * self._bucket.width * self._flat.itemsize, self._group.axes)
        posted = Posted(as_bytes(self._flat), self._group)
        return Handle(posted, lambda read: self._sum(read, places(), posted))

    def _sum(self, read: Sequence[Tensor], into: Sequence[Tensor] | None, posted: Posted) -> list[Tensor]:
        parts = [self._part(buffer.view(self._flat.dtype)) for buffer in read]
        outs = into or [None] * len(self._slots)
        sums = [
            sum_rows(terms, self._group.terms, self._sum_dtype, out=out)
            for *terms, out in zip(*parts, outs, strict=True)
        ]
        posted.release()
        return sums

    def _part(self, flat: Tensor) -> list[Tensor]:
        leaves = buckets.whole_views(flat, self._bucket)
        return buckets.pieces_of(leaves, self._bucket, self._group.index) if self._scatter else leaves
