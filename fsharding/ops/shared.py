"""Rows that the processes of one machine read where they were written, in memory that all of them map.

In: a number of bytes. Out: a buffer in a block of shared memory; `Posted` tells the other members of a group where it
is, in a note of 40 bytes through a pipe, and each reads it in place.
A block is written again when nobody here views it and every reader has signed for it.
Law: what a member reads is what was in the buffer when it was posted; a group of several machines never comes here.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import util
from pathlib import Path
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fsharding import _compat
from fsharding.lost import among
from fsharding.mesh import Group
from fsharding.ops import wire
from fsharding.ops.pipes import MemberError, Pipes

__all__ = ["Posted", "allocated_bytes", "can_share", "take", "watched"]

_HEAD = 4096
"""Bytes before the data of a block: one int64 for each reader, which signs with the number of the posting."""

_TAG = 1 << 20
"""Of introductions, so that they are never taken for a message of somebody else."""

_NOTE = 4
"""Integers of a note: file descriptor, inode and size of a block, and the number of its posting."""

_FAREWELL_S = 2.0
"""How long a process that ends waits for what it posted to be read."""

_SWITCH = "FSHARDING_SHARED_MEMORY"


class _Block:
    """Memory without a name, which is gone with the last process that maps it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("fsharding")
        os.ftruncate(self.fd, self.size)
        self.inode = os.fstat(self.fd).st_ino
        self.head, self.data = _map(self.fd, self.size)
        self.used = self.number = 0
        self.readers: dict[int, int] = {}
        self._storage = _compat.storage_id(self.data)
        self._idle = _compat.storage_users(self._storage)

    def unread(self) -> list[int]:
        """Processes that have not signed for what was posted last."""
        return [pid for slot, pid in self.readers.items() if self.head[slot] != self.number]

    def free(self) -> bool:
        return _compat.storage_users(self._storage) <= self._idle and not self.unread()


def _map(fd: int, size: int) -> tuple[memoryview[int], Tensor]:
    """The head as integers, and the data as bytes.

    Without an operation on tensors: what is computed again for backward may find no free block where forward found one,
    and torch's checkpoint refuses operations that forward did not have.
    """
    mapped = mmap.mmap(fd, size)
    return memoryview(mapped)[:_HEAD].cast("q"), torch.frombuffer(mapped, dtype=torch.uint8, offset=_HEAD)


class _Arena:
    """The blocks that this process writes."""

    def __init__(self) -> None:
        self.blocks: dict[int, _Block] = {}
        self._sized: dict[int, list[_Block]] = {}
        self.log: list[tuple[int, int]] | None = None

    def take(self, nbytes: int) -> Tensor:
        size = 1 << (nbytes + _HEAD - 1).bit_length()
        sized = self._sized.setdefault(size, [])
        block = next((b for b in sized if b.free()), None)
        if block is None:
            block = _Block(size)
            sized.append(block)
            self.blocks[_compat.storage_id(block.data)] = block
        result, block.used = block.data[:nbytes], nbytes
        if self.log is not None:
            self.log.append((time.time_ns(), sum(b.used for b in self.blocks.values() if not b.free())))
        return result

    def drain(self) -> None:
        """A reader opens a block through the process that made it, so that this one must not be gone before."""
        until = time.monotonic() + _FAREWELL_S
        while time.monotonic() < until and any(map(_alive, {p for b in self.blocks.values() for p in b.unread()})):
            time.sleep(1e-3)


@functools.lru_cache(maxsize=1)
def _arena_of(pid: int) -> _Arena:
    """A process that was forked begins anew."""
    del pid
    arena = _Arena()
    util.Finalize(None, arena.drain, exitpriority=0)
    return arena


def _arena() -> _Arena:
    return _arena_of(os.getpid())


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def take(nbytes: int) -> Tensor:
    """A flat buffer of bytes that can be posted, with garbage inside; it is free when nobody views it any more."""
    return _arena().take(nbytes)


def allocated_bytes() -> int:
    """Bytes of all blocks that this process has made, in use or not: an upper bound of the memory they take."""
    return sum(block.size for block in _arena().blocks.values())


@contextmanager
def watched() -> Generator[list[tuple[int, int]]]:
    """Fills a list with (ns since the epoch, bytes in use here or by a reader) at each `take`.

    What becomes free meanwhile shows at the next one.
    """
    arena, log = _arena(), list[tuple[int, int]]()
    arena.log = log
    try:
        yield log
    finally:
        arena.log = None


@dataclass
class _Members:
    """Processes of this machine that know each other, and which of their blocks this one has mapped."""

    name: int
    pids: tuple[int, ...]
    pipes: Pipes
    channels: int = 0
    mapped: dict[tuple[int, int, int], tuple[memoryview[int], Tensor]] = field(default_factory=dict)

    def open(self, member: int, fd: int, inode: int, size: int) -> tuple[memoryview[int], Tensor]:
        known = self.mapped.get((member, fd, inode))
        if known is None:
            known = self.mapped[member, fd, inode] = _open(self.pids[member], fd, inode, size)
        return known

    def check(self, index: int, cards: Sequence[Sequence[int]]) -> None:
        """Reaches every other member, who says where it has its name, and where its pipes.

        Raises:
            RuntimeError: there is one that it cannot reach.
        """
        self.pipes.connect(self.pids, [doors[index] for _, _, _, _, *doors in cards])
        for member, (_, fd, inode, size, *_) in enumerate(cards):
            if member != index:
                _, found = self.open(member, fd, inode, size)
                if int(found[:8].view(torch.int64)) != self.pids[member]:
                    raise RuntimeError(f"Process {self.pids[member]} is another one than it says.")


@dataclass(frozen=True)
class _Channel:
    """What a process group sends, apart from what other groups of the same processes do."""

    members: _Members
    number: int


def _open(pid: int, fd: int, inode: int, size: int) -> tuple[memoryview[int], Tensor]:
    """Maps a block of another process.

    Raises:
        RuntimeError: that process is gone, or keeps it to itself.
    """
    try:
        mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as e:
        raise RuntimeError(f"Process {pid} is gone, or does not let this one map what it shares: {e}.") from e
    try:
        if os.fstat(mine).st_ino != inode:
            raise RuntimeError(f"Process {pid} is gone; another one has its number.")
        return _map(mine, size)
    finally:
        os.close(mine)


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
    return _channel(group) is not None


def _channel(group: Group) -> _Channel | None:
    assert group.process_group is not None
    orders = _channels.setdefault(group.process_group, {})
    if group.ranks not in orders:
        orders[group.ranks] = _introduce(group)
    return orders[group.ranks]


def _introduce(group: Group) -> _Channel | None:
    """Groups of the same processes have one set of pipes."""
    machine, known = _machine(), _met.get(group.ranks)
    wanted = machine >= 0 and os.environ.get(_SWITCH, "1") != "0" and group.size <= _HEAD // 8
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
    mine, pipes, card = take(8), _pipes(group), [-1] * (4 + group.size)
    if pipes is not None:
        block = _arena().blocks[_compat.storage_id(mine)]
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
        return Pipes(group.size, group.index, _NOTE)
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


class Posted:
    """A buffer of each member, once all of them have posted theirs, of one size each.

    Args:
        mine: from `take`, filled; it must not change any more.
        group: for which `can_share` is true.
    """

    def __init__(self, mine: Tensor, group: Group) -> None:
        """Starts to show the buffer to the other members."""
        channel = _channel(group)
        assert channel is not None
        block = _arena().blocks[_compat.storage_id(mine)]
        block.number += 1
        block.readers = {i: pid for i, pid in enumerate(channel.members.pids) if i != group.index}
        self._mine, self._group, self._channel = mine, group, channel
        with _naming(group):
            self._note = channel.members.pipes.send(channel.number, (block.fd, block.inode, block.size, block.number))
        self._unsigned: list[tuple[memoryview[int], int]] = []

    def wait(self, timeout: timedelta | None = None) -> Sequence[Tensor]:
        """The buffer of each member as bytes, to be read until `sign`.

        Raises:
            RuntimeError: a member is gone, or the timeout is over, which is that of the group where none is given.
        """
        assert self._group.process_group is not None
        limit = _compat.group_timeout(self._group.process_group) if timeout is None else timeout
        buffers = [self._mine] * self._group.size
        members, channel = self._channel.members, self._channel.number
        with _naming(self._group):
            notes = members.pipes.receive(channel, self._note, limit)
        for member, (fd, inode, size, number) in notes.items():
            with among((self._group.ranks[member],)):
                head, data = members.open(member, fd, inode, size)
            self._unsigned.append((head, number))
            buffers[member] = data[: self._mine.numel()]
        return buffers

    def sign(self) -> None:
        """The buffers have been read, and may be written again."""
        for head, number in self._unsigned:
            head[self._group.index] = number
        self._unsigned.clear()
