"""Blocks of memory that one process creates and the others of its machine map.

Guarantee: memory has no name, and is freed with the last process that maps it.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
import weakref
from multiprocessing import util
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.mesh.shutdown import state_of

__all__ = [
    "HEAD", "Block", "Mapping", "Note", "block_of", "blocks", "map_block", "reserve", "size_of", "take", "use",
]  # fmt: skip

HEAD = 4096
"""Bytes before the data of a block: an int64 per reader, the number of the last posting that it read."""

_DRAIN_S = 2.0
"""Seconds that an exiting process waits for its postings to be read."""

Note: TypeAlias = tuple[int, int, int, int]
"""File descriptor, inode and size of a block, and the number of its posting."""


class Mapping(NamedTuple):
    """A mapped block: its head as integers, its data as bytes, and both as a Python buffer."""

    head: memoryview[int]
    data: Tensor
    memory: memoryview


class Block:
    """Nameless memory, freed with the last process that maps it."""

    # `mapping`: in this process, its creator.
    # `used`: requested bytes.
    # `readers`: processes that acknowledge what was posted last, by their slots in the head.
    # `owner`: the object it is reserved for; None if unreserved or in use.

    def __init__(self, size: int) -> None:
        """Create a block of a size, with its head."""
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
        """Return the facts with which others read and acknowledge the next posting."""
        self.number += 1
        return self.fd, self.inode, self.size, self.number

    def unread(self) -> list[int]:
        """Return the processes that haven't acknowledged the last posting."""
        return [pid for slot, pid in self.readers.items() if self.mapping.head[slot] != self.number]

    def in_use(self) -> bool:
        """Return whether any process has a view of it."""
        return _compat.storage_users(self._storage) > self._idle or bool(self.unread())

    def free(self) -> bool:
        """Return whether it may be written again."""
        return (self.owner is None or self.owner() is None) and not self.in_use()


def _map(fd: int, size: int) -> Mapping:
    """Create a buffer without a tensor operation."""
    # A recomputation may find no free block where forward found one, and torch's checkpoint refuses operations that
    # forward didn't have.
    memory = memoryview(mmap.mmap(fd, size))
    return Mapping(memory[:HEAD].cast("q"), torch.frombuffer(memory, dtype=torch.uint8, offset=HEAD), memory)


class _Arena:
    """Blocks that this process writes."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self._sized: dict[int, list[Block]] = {}

    def find(self, size: int) -> Block:
        sized = self._sized.setdefault(size, [])
        block = next((b for b in sized if b.free()), None)
        if block is None:
            block = Block(size)
            sized.append(block)
            self.blocks[_compat.storage_id(block.mapping.data)] = block
        return block

    def drain(self) -> None:
        """Wait for readers at exit: they open blocks through the process that created them."""
        until = time.monotonic() + _DRAIN_S
        own = os.getpid()
        while time.monotonic() < until:
            readers = {pid for b in self.blocks.values() for pid in b.unread()} - {own}
            if all(state_of(Path(f"/proc/{pid}")) in "ZX" for pid in readers):
                return
            time.sleep(1e-3)


@functools.lru_cache(maxsize=1)
def _arena_of(pid: int) -> _Arena:
    """Forget all blocks in a forked process."""
    del pid
    arena = _Arena()
    util.Finalize(None, arena.drain, exitpriority=0)
    return arena


def _arena() -> _Arena:
    return _arena_of(os.getpid())


def size_of(nbytes: int) -> int:
    """Return the size of the block for a number of bytes."""
    return 1 << (nbytes + HEAD - 1).bit_length()


def take(nbytes: int) -> Tensor:
    """Return an uninitialized flat buffer of bytes that can be posted; it is free once no view is left."""
    block = _arena().find(size_of(nbytes))
    result = block.mapping.data[:nbytes]
    block.used = nbytes
    return result


def reserve(size: int, owner: object) -> Block:
    """Reserve a free block until `use`, or for the lifetime of `owner`."""
    block = _arena().find(size)
    block.owner = weakref.ref(owner)
    block.readers = {}
    return block


def use(block: Block, nbytes: int, readers: dict[int, int]) -> None:
    """Use a reserved block: it is free again once its readers, this process included, acknowledge it."""
    block.owner = None
    block.readers = readers
    block.used = nbytes


def block_of(buffer: Tensor) -> Block:
    """Return the block of a buffer from `take`."""
    return _arena().blocks[_compat.storage_id(buffer)]


def map_block(pid: int, fd: int, inode: int, size: int) -> Mapping:
    """Map a block of a different process."""
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


def blocks() -> list[Block]:
    """Return all blocks of this process, in use or not."""
    return [*_arena().blocks.values()]
