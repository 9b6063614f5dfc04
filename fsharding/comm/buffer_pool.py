"""A pool of flat buffers that are reused within a step, so that their pages are faulted in only once.

Guarantee: the live bytes of each owner are counted exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm.handles import Memory
from fsharding.comm.streams import Streams, streams_for

__all__ = ["Pool", "PoolMemory"]


@dataclass
class _Buffer:
    """A buffer of the pool."""

    base: Tensor
    storage: int  # identity of `base`'s storage
    owner: object | None = None  # the object for which its bytes are counted, if any
    user: object | None = None  # the key by which `retire` finds buffers
    # On a device with several streams, a buffer without views may still be read by kernels that are queued. Once it was
    # `taken` there, its next user waits for the event `done`; if `retire` has recorded none, for all streams.
    taken: bool = False
    done: Any = None

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
        self._streams = Streams()

    def take(
        self, size: int, dtype: torch.dtype, device: torch.device, owner: object = None, user: object = None
    ) -> Tensor:
        """Return an uninitialized flat buffer; its bytes are counted if it has an owner."""
        # The stream that is current here may write it: it waits for the event of the last reader, if there is one.
        need = max(size, 1) * dtype.itemsize
        fits = [b for b in self._buffers if need <= b.base.numel() <= 2 * need and not b.in_use(self._idle)]
        buffer = min(fits, key=lambda b: b.base.numel(), default=None) or self._make(need, device)
        buffer.owner = owner
        if (streams := self._streams).several:
            if buffer.done is not None:
                streams.wait(buffer.done)
            elif buffer.taken:
                streams.wait_all()
            buffer.taken = True
            buffer.user = user
            buffer.done = None
        result = buffer.base[:need].view(dtype)[:size]
        if owner is not None:
            self._count()
        return result

    def adopt(self, x: Tensor, owner: object) -> None:
        """Count a tensor from outside of the pool for an owner while its storage is alive."""
        self._adopted.append((_compat.weak_storage(x), x.nbytes, owner))
        self._count()

    def retire(self, user: object) -> None:
        """Record an event for the free buffers of a user, which the current stream was the last to use."""
        if self._streams.several:
            self._retire([b for b in self._buffers if b.user is user and b.taken and b.done is None])

    def retire_all(self) -> None:
        """Record an event for the free buffers of all users, which the current stream was the last to use."""
        if self._streams.several:
            self._retire([b for b in self._buffers if b.taken])

    def _retire(self, buffers: list[_Buffer]) -> None:
        free = [b for b in buffers if not b.in_use(self._idle)]
        done = self._streams.record("free") if free else None
        for buffer in free:
            buffer.done = done

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
        self._streams = streams_for(device)
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
    user: object | None = None

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """See `Memory`."""
        return self.pool.take(size, dtype, self.device, self.owner, self.user)

    def of_one_user(self) -> PoolMemory:
        """See `Memory`."""
        return replace(self, user=object())

    def retire(self) -> None:
        """See `Memory`."""
        self.pool.retire(self.user)

    def adopt(self, x: Tensor) -> None:
        """See `Memory`."""
        if self.owner is not None:
            self.pool.adopt(x, self.owner)
