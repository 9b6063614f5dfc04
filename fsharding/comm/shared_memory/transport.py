"""What the processes of one machine read where it was written, in memory that all of them map.

In: a number of bytes. Out: `Posted`, a buffer of each member, which the others read in place; or `Joint`, one buffer
of which each member writes a part. A note of 48 bytes through a pipe says where it is, how large, and that it is
written. Law: what a member reads is what was written before the note; a group of several machines never comes here, and
members that send unlike things find out before they read any.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from fsharding import _compat
from fsharding.comm import process_group as wire
from fsharding.comm.shared_memory import segments as blocks
from fsharding.comm.shared_memory.pipes import MemberError, Pipes
from fsharding.mesh.device_mesh import Group
from fsharding.mesh.failures import UnlikeSizes, among

__all__ = ["Joint", "Posted", "can_share"]

_TAG = 1 << 20
"""Of introductions, so that they are never taken for a message of somebody else."""

_NOWHERE: blocks.Note = (-1, -1, -1, -1)
"""In place of a block, from a member that gives none."""

_POSTED, _OFFERED, _JOINT = range(3)
"""What a note is about: a buffer of its own, memory for the next joint buffer, or a part of one."""

_SWITCH = "FSHARDING_SHARED_MEMORY"


@dataclass
class _Members:
    """Processes of this machine that know each other, and which of their blocks this one has mapped."""

    name: int
    pids: tuple[int, ...]
    pipes: Pipes
    channels: int = 0
    mapped: dict[tuple[int, int, int], blocks.Mapping] = field(default_factory=dict)

    def open(self, member: int, fd: int, inode: int, size: int) -> blocks.Mapping:
        known = self.mapped.get((member, fd, inode))
        if known is None:
            known = self.mapped[member, fd, inode] = blocks.map_block(self.pids[member], fd, inode, size)
        return known

    def check(self, index: int, cards: Sequence[Sequence[int]]) -> None:
        """Reaches every other member, who says where it has its name, and where its pipes.

        Raises:
            RuntimeError: there is one that it cannot reach.
        """
        self.pipes.connect(self.pids, [doors[index] for _, _, _, _, *doors in cards])
        for member, (_, fd, inode, size, *_) in enumerate(cards):
            if member != index:
                found = self.open(member, fd, inode, size)
                if int(found.data[:8].view(torch.int64)) != self.pids[member]:
                    raise RuntimeError(f"Process {self.pids[member]} is another one than it says.")


@dataclass
class _Turns:
    """The joint buffers of one size on a channel: how many there were, and what was said with the last one."""

    size: int
    count: int = 0
    notes: _Notes | None = None
    offered: blocks.Block | None = None

    def offer(self, group: Group) -> blocks.Note:
        """What this member says of the next buffer: where it is, if it is its turn."""
        if self.count % group.size != group.index:
            return _NOWHERE
        self.offered = blocks.reserve(self.size, self)
        return self.offered.note()


@dataclass
class _Channel:
    """What a process group sends, apart from what other groups of the same processes do."""

    members: _Members
    number: int
    turns: dict[int, _Turns] = field(default_factory=dict)


_channels: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], _Channel | None]] = WeakKeyDictionary()
"""By process group, and by the order in which its ranks are members."""

_met: WeakValueDictionary[tuple[int, ...], _Members] = WeakValueDictionary()
"""By their ranks."""


def can_share(group: Group) -> bool:
    """Whether all members of a group are processes of one machine that can map each other's memory.

    Collective over the group the first time. `FSHARDING_SHARED_MEMORY=0` on any member says no.

    Args:
        group: of gloo, with several members.
    """
    assert group.process_group is not None
    orders = _channels.setdefault(group.process_group, {})
    if group.ranks not in orders:
        orders[group.ranks] = _introduce(group)
    return orders[group.ranks] is not None


def _channel(group: Group) -> _Channel:
    """That of a group for which `can_share` is true."""
    assert group.process_group is not None
    channel = _channels[group.process_group][group.ranks]
    assert channel is not None
    return channel


def _introduce(group: Group) -> _Channel | None:
    """Groups of the same processes have one set of pipes."""
    machine, known = _machine(), _met.get(group.ranks)
    wanted = machine >= 0 and os.environ.get(_SWITCH, "1") != "0" and group.size <= blocks.HEAD // 8
    mine = [machine if wanted else -1, *((known.name, known.channels) if known is not None else (0, 0))]
    cards, pids = zip(*((c[:-1], c[-1]) for c in _numbers([*mine, os.getpid()], group)), strict=True)
    if mine[0] < 0 or any(card[0] != machine for card in cards):
        return None
    if known is None or known.pids != pids or any(card != mine for card in cards):
        known = _meet(group, pids)
        if known is None:
            return None
        _met[group.ranks] = known
    known.channels += 1
    return _Channel(known, known.channels)


def _meet(group: Group, pids: tuple[int, ...]) -> _Members | None:
    """Every member writes its name into a block, and opens pipes; all must be able to reach them there."""
    mine, pipes, card = blocks.take(8), _pipes(group), [-1] * (4 + group.size)
    if pipes is not None:
        block = blocks.block_of(mine)
        mine.view(torch.int64).fill_(os.getpid())
        card = [time.time_ns(), block.fd, block.inode, block.size, *pipes.doors]
    cards, members = _numbers(card, group), None
    if pipes is not None:
        members = _Members(cards[0][0], pids, pipes)
        try:
            members.check(group.index, cards)
        except (RuntimeError, ValueError):
            members = None
    # The block may be written again, and the pipes shut, only after everybody's answer.
    answers = _numbers([int(members is not None)], group)
    if pipes is not None:
        pipes.shut()
    return members if all(answer for (answer,) in answers) else None


def _pipes(group: Group) -> Pipes | None:
    """None where this process may open no more files."""
    try:
        return Pipes(group.size, group.index, len(_NOWHERE) + 1)
    except OSError:
        return None


def _numbers(mine: Sequence[int], group: Group) -> list[list[int]]:
    """What every member gives, over the group itself."""
    rows = torch.empty(group.size, len(mine), dtype=torch.int64)
    rows[group.index] = torch.tensor(mine)
    wire.swap_rows(rows, group, tag=_TAG).wait()
    return rows.tolist()


def _machine() -> int:
    """A number that processes share if they see the same processes under the same numbers; -1 where there is none."""
    if not hasattr(os, "memfd_create"):
        return -1
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return int(boot.replace("-", "")[:15], 16) ^ Path("/proc/self/ns/pid").stat().st_ino
    except (OSError, ValueError):
        return -1


@contextmanager
def _naming(group: Group) -> Generator[None]:
    """Says which rank the member is that a failure names."""
    try:
        yield
    except MemberError as error:
        with among((group.ranks[error.member],)):
            raise


class _Notes:
    """A note from each member to each other one.

    Args:
        note: where something is.
        kind: what this member sends.
        nbytes: how large it is; kind and size are the same on every member, or they are not in the same call.
        group: who takes part.
    """

    def __init__(self, note: blocks.Note, kind: int, nbytes: int, group: Group) -> None:
        """Sends this member's."""
        self._group, self._channel, self._what = group, _channel(group), nbytes * 3 + kind
        with _naming(group):
            self._number = self._channel.members.pipes.send(self._channel.number, (*note, self._what))
        self._come: Mapping[int, tuple[int, ...]] | None = None

    def wait(self, timeout: timedelta | None = None) -> Mapping[int, tuple[int, ...]]:
        """Those of the others.

        Raises:
            RuntimeError: a member is gone, or the timeout is over, which is that of the group where none is given.
        """
        if self._come is None:
            assert self._group.process_group is not None
            limit = _compat.group_timeout(self._group.process_group) if timeout is None else timeout
            with among(self._group.ranks), _naming(self._group):
                notes = self._channel.members.pipes.receive(self._channel.number, self._number, limit)
            if unlike := [member for member, note in notes.items() if note[-1] != self._what]:
                with among([self._group.ranks[member] for member in unlike]):
                    theirs, ours = notes[unlike[0]][-1] // 3, self._what // 3
                    raise UnlikeSizes(f"{theirs} bytes came, where {ours} are sent")
            self._come = {member: note[:-1] for member, note in notes.items()}
        return self._come

    def come(self) -> bool:
        """Whether `wait` would return at once. Raises as that does."""
        if self._come is not None:
            return True
        with _naming(self._group):
            return self._channel.members.pipes.come(self._channel.number, self._number)


def _map_from(member: int, note: Sequence[int], group: Group) -> blocks.Mapping:
    """What a member's note says where it is."""
    fd, inode, size, _ = note
    with among((group.ranks[member],)):
        return _channel(group).members.open(member, fd, inode, size)


class Posted:
    """A buffer of each member, once all of them have posted theirs, of one size each.

    Args:
        mine: from `blocks.take`, filled; it must not change any more.
        group: for which `can_share` is true.
    """

    def __init__(self, mine: Tensor, group: Group) -> None:
        """Starts to show the buffer to the other members."""
        block = blocks.block_of(mine)
        block.readers = {i: pid for i, pid in enumerate(_channel(group).members.pids) if i != group.index}
        self._mine, self._group = mine, group
        self._notes = _Notes(block.note(), _POSTED, mine.numel(), group)
        self._unsigned: list[tuple[memoryview[int], int]] = []

    def wait(self, timeout: timedelta | None = None) -> Sequence[Tensor]:
        """The buffer of each member as bytes, to be read until `sign`.

        Raises:
            RuntimeError: a member is gone, or the timeout is over, which is that of the group where none is given.
        """
        buffers = [self._mine] * self._group.size
        for member, note in self._notes.wait(timeout).items():
            mapping = _map_from(member, note, self._group)
            self._unsigned.append((mapping.head, note[-1]))
            buffers[member] = mapping.data[: self._mine.numel()]
        return buffers

    def come(self) -> bool:
        """Whether `wait` would return at once. Raises as that does."""
        return self._notes.come()

    def sign(self) -> None:
        """The buffers have been read, and may be written again."""
        for head, number in self._unsigned:
            head[self._group.index] = number
        self._unsigned.clear()


class Joint:
    """A buffer of which every member writes a part, all in the same memory. Fill, `start`, `wait`, and all is there.

    The members take turns in giving the memory. Whose turn is next says where with the note by which it says that its
    part of this one is written; so as a rule nobody waits for memory, and nobody asks for it.

    Args:
        nbytes: the same on every member.
        group: for which `can_share` is true.

    Attributes:
        buffer: all parts as bytes, garbage until they are written. When nobody here views it any more, this member
            signs for it.
    """

    def __init__(self, nbytes: int, group: Group) -> None:
        """Finds the memory. Waits for the others where it is the first of its size, or none was waited for since."""
        channel, size = _channel(group), blocks.size_of(nbytes)
        self._group, self._turns = group, channel.turns.setdefault(size, _Turns(size))
        turns = self._turns
        if turns.notes is None:
            turns.notes = _Notes(turns.offer(group), _OFFERED, size, group)
        giver = turns.count % group.size
        if giver == group.index:
            assert turns.offered is not None
            mapping, number = turns.offered.mapping, turns.offered.number
            blocks.use(turns.offered, nbytes, dict(enumerate(channel.members.pids)))
        else:
            note = turns.notes.wait()[giver]
            mapping, number = _map_from(giver, note, group), note[-1]
        turns.count += 1
        memory = mapping.memory[blocks.HEAD : blocks.HEAD + nbytes]
        finalize(memory, _sign, os.getpid(), mapping.head, group.index, number)
        self.buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self._notes: _Notes | None = None

    def start(self) -> None:
        """Says that this member's part is written; it must not change from here."""
        note = self._turns.offer(self._group)
        self._notes = self._turns.notes = _Notes(note, _JOINT, self.buffer.numel(), self._group)

    def wait(self, timeout: timedelta | None = None) -> None:
        """All parts are written.

        Raises:
            RuntimeError: a member is gone, or the timeout is over, which is that of the group where none is given.
        """
        assert self._notes is not None
        self._notes.wait(timeout)


def _sign(pid: int, head: memoryview[int], slot: int, number: int) -> None:
    """For what nobody views any more in a process; a fork of it has nothing to say."""
    if os.getpid() == pid:
        head[slot] = number
