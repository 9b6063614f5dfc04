"""Blocks of memory that the processes of one machine map, each made by one of them.

Guarantee: memory has no name, and is gone with the last process that maps it.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.mesh.shutdown import state_of

__all__ = [
    "HEAD", "Block", "Mapping", "Note", "allocated_bytes", "block_of", "map_block", "reserve", "size_of", "take", "use",
    "watched",
]  # fmt: skip

HEAD = 4096
"""Bytes before the data of a block: an int64 for each reader, which writes the number of a posting that it has read."""

_DRAIN_S = 2.0
"""How long a process that ends waits for what it posted to be read."""

Note: TypeAlias = tuple[int, int, int, int]
"""File descriptor, inode and size of a block, and the number of its posting."""


class Mapping(NamedTuple):
    """A block as a process sees it: its head as integers, the data as bytes, and both as Python's memory."""

    head: memoryview[int]
    data: Tensor
    memory: memoryview


class Block:
    """Memory without a name, which is gone with the last process that maps it."""

    # `mapping`: of this process, which made it.
    # `used`: bytes that were asked for.
    # `readers`: processes that acknowledge what was posted last, by their slots in the head.
    # `owner`: the member it was reserved for; None if it was not, or is in use.

    def __init__(self, size: int) -> None:
        """Makes a block of so many bytes, with its head."""
        self.size = size
        self.fd = os.memfd_create("fsharding")
        os.ftruncate(self.fd, self.size)
        self.inode = os.fstat(self.fd).st_ino
        self.mapping = _map(self.fd, self.size)
        self.used = self.number = 0
        self.readers: dict[int, int] = {}
        self.owner: weakref.ref[object] | None = None
        self._storage = _compat.storage_id(self.mapping.data)
        self._idle = _compat.storage_users(self._storage)

    def note(self) -> Note:
        """The facts that others need to read the next block, and to acknowledge it."""
        self.number += 1
        return self.fd, self.inode, self.size, self.number

    def unread(self) -> list[int]:
        """Processes that have not acknowledged what was posted last."""
        return [pid for slot, pid in self.readers.items() if self.mapping.head[slot] != self.number]

    def in_use(self) -> bool:
        """Whether this or another process views it."""
        return _compat.storage_users(self._storage) > self._idle or bool(self.unread())

    def free(self) -> bool:
        """Whether it may be written again."""
        return (self.owner is None or self.owner() is None) and not self.in_use()


def _map(fd: int, size: int) -> Mapping:
    """Without an operation on tensors."""
    # What is computed again for backward may find no free block where forward found one, and torch's checkpoint refuses
    # operations that forward did not have.
    memory = memoryview(mmap.mmap(fd, size))
    return Mapping(memory[:HEAD].cast("q"), torch.frombuffer(memory, dtype=torch.uint8, offset=HEAD), memory)


class _Arena:
    """The blocks that this process writes."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self._sized: dict[int, list[Block]] = {}
        self._log: list[tuple[int, int]] | None = None

    def find(self, size: int) -> Block:
        sized = self._sized.setdefault(size, [])
        block = next((b for b in sized if b.free()), None)
        if block is None:
            block = Block(size)
            sized.append(block)
            self.blocks[_compat.storage_id(block.mapping.data)] = block
        return block

    def note_use(self) -> None:
        if self._log is not None:
            self._log.append((time.time_ns(), sum(b.used for b in self.blocks.values() if b.in_use())))

    def drain(self) -> None:
        """A reader opens a block through the process that made it, so that this one must not be gone before."""
        until = time.monotonic() + _DRAIN_S
        own = os.getpid()
        while time.monotonic() < until:
            readers = {pid for b in self.blocks.values() for pid in b.unread()} - {own}
            if all(state_of(Path(f"/proc/{pid}")) in "ZX" for pid in readers):
                return
            time.sleep(1e-3)

    @contextmanager
    def watched(self) -> Generator[list[tuple[int, int]]]:
        log = list[tuple[int, int]]()
        self._log = log
        try:
            yield log
        finally:
            self._log = None


@functools.lru_cache(maxsize=1)
def _arena_of(pid: int) -> _Arena:
    """A process that was forked begins anew."""
    del pid
    arena = _Arena()
    util.Finalize(None, arena.drain, exitpriority=0)
    return arena


def _arena() -> _Arena:
    return _arena_of(os.getpid())


def size_of(nbytes: int) -> int:
    """The size of the block that so many bytes of data go to."""
    return 1 << (nbytes + HEAD - 1).bit_length()


def take(nbytes: int) -> Tensor:
    """A flat buffer of bytes that can be posted, with garbage inside; it is free when its last view is gone."""
    block = _arena().find(size_of(nbytes))
    result = block.mapping.data[:nbytes]
    block.used = nbytes
    _arena().note_use()
    return result


def reserve(size: int, owner: object) -> Block:
    """A free block of this process that nothing else gets as long as `owner` lives, or until `use`."""
    block = _arena().find(size)
    block.owner = weakref.ref(owner)
    block.readers = {}
    return block


def use(block: Block, nbytes: int, readers: dict[int, int]) -> None:
    """A reserved block is free again as soon as its readers have signed, who may be this process itself."""
    block.owner = None
    block.readers = readers
    block.used = nbytes
    _arena().note_use()


def block_of(buffer: Tensor) -> Block:
    """The block in which something is that `take` gave."""
    return _arena().blocks[_compat.storage_id(buffer)]


def map_block(pid: int, fd: int, inode: int, size: int) -> Mapping:
    """Maps a block of another process."""
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as e:
        raise RuntimeError(f"Process {pid} is gone, or does not let this one map what it shares: {e}.") from e
    try:
        if os.fstat(own).st_ino != inode:
            raise RuntimeError(f"Process {pid} is gone; another one has its number.")
        return _map(own, size)
    finally:
        os.close(own)


def allocated_bytes() -> int:
    """Bytes of all blocks that this process has made, in use or not: an upper bound of the memory they take."""
    return sum(block.size for block in _arena().blocks.values())


@contextmanager
def watched() -> Generator[list[tuple[int, int]]]:
    """Fills a list with (ns since the epoch, bytes in use here or by a reader) whenever a block comes into use."""
    # What becomes free meanwhile shows at the next one.
    with _arena().watched() as log:
        yield log
