"""Flat buffers that are used again within a step, so that they cost their page faults once.

In: a size, a dtype, an owner. Out: a flat tensor that nobody else views. A buffer is free when the pool alone holds its
storage, so a view that somebody keeps is never overwritten. Law: the bytes that owners have alive are known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fsharding import _compat

__all__ = ["Pool", "PoolMemory"]


@dataclass
class _Buffer:
    base: Tensor
    storage: int
    owner: object | None = None

    def in_use(self, idle: int) -> bool:
        return _compat.storage_users(self.storage) > idle


class Pool:
    """See the module.

    Attributes:
        peak_owners: most owners that had a buffer alive at once.
        peak_bytes: most bytes that owners had alive at once.
    """

    def __init__(self) -> None:
        """Makes an empty pool."""
        self.peak_owners = 0
        self.peak_bytes = 0
        self._buffers: list[_Buffer] = []
        self._adopted: list[tuple[_compat.WeakStorage, int, object]] = []
        self._idle = 0

    def take(self, size: int, dtype: torch.dtype, device: torch.device, owner: object | None = None) -> Tensor:
        """A flat buffer of `size` elements with garbage inside; bytes of a buffer with an owner are counted."""
        need = max(size, 1) * dtype.itemsize
        fits = [b for b in self._buffers if need <= b.base.numel() <= 2 * need and not b.in_use(self._idle)]
        buffer = min(fits, key=lambda b: b.base.numel(), default=None) or self._make(need, device)
        buffer.owner = owner
        result = buffer.base[:need].view(dtype)[:size]
        if owner is not None:
            self._count()
        return result

    def adopt(self, x: Tensor, owner: object) -> None:
        """Counts a tensor that the pool has not made as an owner's, as long as somebody views its storage."""
        self._adopted.append((_compat.weak_storage(x), x.nbytes, owner))
        self._count()

    def memory(self, device: torch.device, owner: object | None = None) -> PoolMemory:
        """The pool as the `Memory` of an owner."""
        return PoolMemory(self, device, owner)

    def alive(self) -> dict[int, int]:
        """Bytes alive by id of their owner."""
        result: dict[int, int] = {}
        for buffer in self._buffers:
            if buffer.owner is not None and buffer.in_use(self._idle):
                result[id(buffer.owner)] = result.get(id(buffer.owner), 0) + buffer.base.numel()
        self._adopted = [x for x in self._adopted if not x[0].expired()]
        for _, nbytes, owner in self._adopted:
            result[id(owner)] = result.get(id(owner), 0) + nbytes
        return result

    def close(self) -> None:
        """Lets all buffers go."""
        self._buffers.clear()
        self._adopted.clear()

    def _make(self, need: int, device: torch.device) -> _Buffer:
        base = _compat.fresh((need,), torch.uint8, device)
        buffer = _Buffer(base, _compat.storage_id(base))
        self._idle = _compat.storage_users(buffer.storage)
        self._buffers.append(buffer)
        return buffer

    def _count(self) -> None:
        alive = self.alive()
        self.peak_owners = max(self.peak_owners, len(alive))
        self.peak_bytes = max(self.peak_bytes, sum(alive.values()))


class PoolMemory(NamedTuple):
    """A pool as the `Memory` of an owner, whose bytes are counted; None for nobody, whose are not."""

    pool: Pool
    device: torch.device
    owner: object | None

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """See `Memory`."""
        return self.pool.take(size, dtype, self.device, self.owner)

    def adopt(self, x: Tensor) -> None:
        """See `Memory`."""
        if self.owner is not None:
            self.pool.adopt(x, self.owner)
