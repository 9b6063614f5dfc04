"""Keep saved tensors in host memory until backward needs them, so that two units at a time are on the device.

    out        copy out   !out
    compute    ?out       when the unit after the next begins: only then may the device memory be reused
    in         ?out   copy in   !in      (when backward reaches the unit after it)
    compute    ?in    backward of the unit

`!` records an event on the stream of its line, and `?` waits for one there.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.tier import HOST, pinned
from fsharding.comm.transfers import Transfer, Transfers

__all__ = ["OnHost", "is_kept", "keep_in_place"]

_ALIGN = 64  # tensors begin at multiples of this many bytes in host memory

# A tensor with fewer bytes stays on the device: a copy costs more than its memory is worth.
_SMALLEST = 1 << 10

# A tensor stays on the device if its storage has more than this many times its bytes, since full storages are copied.
_LARGEST_SHARE = 4


@dataclass(eq=False)
class _Storage:
    """The elements of a storage: on the device, in host memory, or both."""

    here: Tensor | None  # on the device, from forward until its unit is freed, and again from its fetch
    host: Tensor | None = None


@dataclass(eq=False)
class _Unit:
    """The storages that a unit has saved."""

    number: int
    # By id, version and dtype: a storage that is written in place between two saves is copied twice.
    storages: dict[tuple[int, int, torch.dtype], _Storage] = field(default_factory=dict)
    out: Transfer | None = None  # the copies of all storages to the host; None before they start
    back: Transfer | None = None  # copies to the device that the compute stream hasn't waited for
    # Whether the compute stream has waited for `out`. Before, no storage may be freed: the allocator would hand its
    # memory to the compute stream while the copy still reads it.
    is_sent: bool = False


class OnHost:
    """Host memory for the tensors that autograd saves, except `resident` ones; they are fetched one unit ahead."""

    def __init__(self, device: torch.device, resident: Sequence[Tensor]) -> None:
        self._device = device
        self._values = resident
        self._transfers = Transfers(device)
        self._pool = _pool.__wrapped__() if _compat.makes_fakes() else _pool()
        self._units = [_Unit(0)]  # in the order of forward
        self._reached: _Unit | None = None  # the unit that backward is at; None in forward

    @functools.cached_property
    def _resident(self) -> frozenset[int]:
        """Ids of storages that stay on the device; computed lazily, since most calls move nothing."""
        return frozenset(map(_compat.storage_id, self._values))

    # ---------------------------------------------------------------------------------------------------------- forward
    def keep(self, x: Tensor) -> Tensor | Callable[[], Tensor]:
        """Return what autograd saves for a tensor: itself if it stays, else a function that returns it in backward."""
        storage, size = _compat.storage_id(x), x.untyped_storage().nbytes()
        stays = size < _SMALLEST or size > _LARGEST_SHARE * x.nbytes or storage in self._resident
        if stays or x.device != self._device:
            return x
        unit = self._units[-1]
        key = storage, _compat.version_of(x), x.dtype
        if key not in unit.storages:
            unit.storages[key] = _Storage(x.as_strided((size // x.element_size(),), (1,), 0))
        view = x.size(), x.stride(), int(x.storage_offset())
        return functools.partial(self._back_on_device, unit, unit.storages[key], *view)

    def next_unit(self) -> None:
        """Note that forward has left a unit: copy it to the host, and free the one before."""
        self._send(self._units[-1])
        for unit in self._units[-2:-1]:
            self._free(unit)
        self._units.append(_Unit(len(self._units)))

    def end_forward(self) -> None:
        """Note that forward has ended and that backward comes later: free the last two units."""
        self._send(self._units[-1])
        for unit in self._units[-2:]:
            self._free(unit)

    def _send(self, unit: _Unit) -> None:
        """Start to copy a unit to the host."""
        if not unit.storages:
            return
        here = [storage.here for storage in unit.storages.values() if storage.here is not None]
        places = [place.view(x.dtype) for x, place in zip(here, self._room(here), strict=True)]
        unit.out = self._transfers.send([(x, HOST, place) for x, place in zip(here, places, strict=True)])
        for storage, place in zip(unit.storages.values(), places, strict=True):
            storage.host = place

    def _room(self, here: Sequence[Tensor]) -> list[Tensor]:
        """Return host memory for tensors, as bytes."""
        sizes = [x.nbytes for x in here]
        ends = [*itertools.accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes)]
        flat = self._pool.take(ends[-1], torch.uint8, torch.device("cpu"))
        return [flat[end - -(-size // _ALIGN) * _ALIGN :][:size] for size, end in zip(sizes, ends, strict=True)]

    def _free(self, unit: _Unit) -> None:
        """Free the device memory of a unit that has been sent."""
        if unit.out is None:
            return
        if not unit.is_sent:
            self._transfers.wait(unit.out)
            unit.is_sent = True
        self._wait(unit)
        for storage in unit.storages.values():
            storage.here = None

    def _wait(self, unit: _Unit) -> None:
        """Have the compute stream wait until a unit is back on the device."""
        if unit.back is not None:
            self._transfers.wait(unit.back)
            unit.back = None

    # --------------------------------------------------------------------------------------------------------- backward
    def _back_on_device(self, unit: _Unit, storage: _Storage, *view: Any) -> Tensor:
        """Return a tensor of a unit on the device; the current stream waits for it."""
        self._reach(unit)
        assert storage.here is not None
        return storage.here.as_strided(*view)

    def _reach(self, unit: _Unit) -> None:
        """Note that backward needs a unit: free the later ones, wait for this one, start to fetch the one before."""
        if self._reached is unit:
            return
        self._reached = unit
        for later in self._units[unit.number + 1 :]:
            self._free(later)
        self._fetch(unit)
        self._wait(unit)
        before = next((u for u in reversed(self._units[: unit.number]) if u.storages), None)
        if before is not None:
            self._fetch(before)

    def _fetch(self, unit: _Unit) -> None:
        """Start to copy a unit to the device, unless it is there or in flight."""
        gone = [storage for storage in unit.storages.values() if storage.here is None]
        if not gone:
            return
        there = [storage.host for storage in gone if storage.host is not None]
        unit.back = self._transfers.fetch(there, self._device, after=unit.out)
        for storage, here in zip(gone, unit.back.values, strict=True):
            storage.here = here

    def close(self) -> None:
        """Drop all tensors; the current stream waits for all copies."""
        for unit in self._units:
            self._free(unit)
        self._units = [_Unit(0)]
        self._reached = None
        self._values = ()


@functools.cache
def _pool() -> Pool:
    """Return the pool of pinned memory of this process."""
    # Never closed: pinning is slow, and a captured graph replays copies to the same addresses.
    return Pool(lambda shape, dtype, _: pinned(shape, dtype))


# Host tensors whose addresses are stable while they are referred to, by the ids of their storages.
_stays: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def keep_in_place(x: Tensor) -> None:
    """Mark a host tensor as having a stable address until nothing refers to it."""
    if x.is_cpu:
        _stays[_compat.storage_id(x)] = x


def is_kept(x: Tensor) -> bool:
    """Return whether a tensor has a stable address, so that a captured graph may replay copies from and to it."""
    return _pool().holds(x) or _compat.storage_id(x) in _stays
