"""A pool of flat buffers that are reused within a step, so that their pages are faulted in only once.

Guarantee: the live bytes of each owner are counted exactly. On a device with several streams nothing is kept: freed
memory goes back to the allocator of the device, which gives it to the next allocation on the same stream.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm.handles import Memory
from fsharding.comm.streams import streams_for

__all__ = ["Pool", "PoolMemory", "Spare"]


class Spare(NamedTuple):
    """Memory that may be written again after an event."""

    memory: Tensor  # uint8, flat
    done: Any


@dataclass
class _Buffer:
    """A buffer of the pool."""

    base: Tensor
    storage: int  # identity of `base`'s storage
    owner: object | None = None  # the object for which its bytes are counted, if any

    def in_use(self, idle: int) -> bool:
        return _compat.storage_users(self.storage) > idle


class Pool:
    """See the module."""

    # No buffer is ever returned. `in_use` compares the number of references to a storage with `_idle`, the number if
    # only the pool refers to it; views in Python, in autograd and in C++ all count.

    def __init__(self, allocate: Callable[..., Tensor] = _compat.fresh) -> None:
        """Make an empty pool; `allocate` takes a shape, a dtype and a device."""
        self._allocate = allocate
        self.peak_owners = 0  # most owners with a live buffer at once
        self.peak_bytes = 0  # most live bytes of all owners at once
        self._buffers: list[_Buffer] = []
        self._adopted: list[tuple[_compat.WeakStorage, int, object]] = []
        self._idle = 0
        self._spare: list[Spare] = []

    def take(self, size: int, dtype: torch.dtype, device: torch.device, owner: object = None) -> Tensor:
        """Return an uninitialized flat buffer; its bytes are counted if it has an owner."""
        need = max(size, 1) * dtype.itemsize
        if streams_for(device).several:
            # The device's allocator reuses memory of any size at once, in stream order. A buffer that waited here for
            # a later one of its size would count at the peak of the step.
            x = self._borrowed(need, device)
            if owner is not None:
                self.adopt(x, owner)
            return x.view(dtype)[:size]
        fits = [b for b in self._buffers if need <= b.base.numel() <= 2 * need and not b.in_use(self._idle)]
        buffer = min(fits, key=lambda b: b.base.numel(), default=None) or self._make(need, device)
        buffer.owner = owner
        result = buffer.base[:need].view(dtype)[:size]
        if owner is not None:
            self._count()
        return result

    @contextmanager
    def lending(self, spare: Iterable[Spare]) -> Generator[None]:
        """Inside the block, a buffer for a device with several streams may be spare memory that it fits."""
        self._spare = [*spare]
        try:
            yield
        finally:
            self._spare = []

    def _borrowed(self, need: int, device: torch.device) -> Tensor:
        """Return the least spare memory that fits, after its event, or new memory."""
        fits = [spare for spare in self._spare if need <= spare.memory.numel() <= 2 * need]
        if not fits:
            return self._allocate((need,), torch.uint8, device)
        least = min(fits, key=lambda spare: spare.memory.numel())
        self._spare = [spare for spare in self._spare if spare is not least]
        streams_for(device).wait(least.done)
        return least.memory[:need]

    def adopt(self, x: Tensor, owner: object) -> None:
        """Count a tensor from outside of the pool for an owner while its storage is alive."""
        self._adopted.append((_compat.weak_storage(x), x.nbytes, owner))
        self._count()

    def memory(self, device: torch.device, owner: object | None = None) -> PoolMemory:
        """Return the pool as the `Memory` of an owner."""
        return PoolMemory(device, self, owner)

    def alive(self) -> dict[int, int]:
        """Return the live bytes of each owner, by its id."""
        result: dict[int, int] = {}
        for buffer in self._buffers:
            if buffer.owner is not None and buffer.in_use(self._idle):
                result[id(buffer.owner)] = result.get(id(buffer.owner), 0) + buffer.base.numel()
        self._adopted = [x for x in self._adopted if not x[0].expired()]
        for _, nbytes, owner in self._adopted:
            result[id(owner)] = result.get(id(owner), 0) + nbytes
        return result

    def holds(self, x: Tensor) -> bool:
        """Return whether a tensor is in a buffer of this pool."""
        return any(buffer.storage == _compat.storage_id(x) for buffer in self._buffers)

    def close(self) -> None:
        """Drop all buffers."""
        self._buffers.clear()
        self._adopted.clear()

    def _make(self, need: int, device: torch.device) -> _Buffer:
        base = self._allocate((need,), torch.uint8, device)
        buffer = _Buffer(base, _compat.storage_id(base))
        self._idle = _compat.storage_users(buffer.storage)
        self._buffers.append(buffer)
        return buffer

    def _count(self) -> None:
        alive = self.alive()
        self.peak_owners = max(self.peak_owners, len(alive))
        self.peak_bytes = max(self.peak_bytes, sum(alive.values()))


@dataclass(frozen=True)
class PoolMemory(Memory):
    """A pool as the `Memory` of an owner; without one, bytes aren't counted."""

    pool: Pool
    owner: object | None

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """See `Memory`."""
        return self.pool.take(size, dtype, self.device, self.owner)

    def adopt(self, x: Tensor) -> None:
        """See `Memory`."""
        if self.owner is not None:
            self.pool.adopt(x, self.owner)
