"""Tensors that are kept in memory of the host until backward needs them: copies out and back, a unit at a time.

    out        copy out   !out
    compute    ?out, when the unit after the next begins: only then may the memory be used again
    in         ?out   copy in   !in      (when backward reaches the unit after it)
    compute    ?in    backward of the unit

So two units have their tensors on the device at a time, in forward and in backward.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.tier import HOST, pinned
from fsharding.comm.transfers import Transfer, Transfers

__all__ = ["OnHost", "Parked", "is_kept", "keep_in_place"]

_ALIGN = 64

_SMALLEST = 1 << 10
"""Bytes below which a tensor stays on the device: a copy costs more than its memory is worth."""

_LARGEST_SHARE = 4
"""A tensor stays where its storage has more than this many times its bytes."""


@dataclass(eq=False)
class _Storage:
    """The elements of a storage: on the device, on the host, or on both."""

    here: Tensor | None
    host: Tensor | None = None


@dataclass(eq=False)
class _Unit:
    """The storages that a unit has saved, by the id, version and dtype of each."""

    # `out` are the copies of all storages to the host, None before they are sent; `is_sent` once the compute stream has
    # waited for them, before which no storage may be freed. `back` are copies to the device that it has not waited for.

    number: int
    storages: dict[tuple[int, int, torch.dtype], _Storage] = field(default_factory=dict)
    out: Transfer | None = None
    back: Transfer | None = None
    is_sent: bool = False


@dataclass(frozen=True, eq=False)
class Parked:
    """Stands for a tensor among those that autograd saves; `take` gives it back."""

    keeper: OnHost
    unit: _Unit
    storage: _Storage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def take(self) -> Tensor:
        """Return the tensor on the device; the current stream waits for it."""
        self.keeper.reach(self.unit)
        assert self.storage.here is not None
        return self.storage.here.as_strided(self.size, self.stride, self.offset)


class OnHost:
    """Memory for the tensors that autograd saves, but for `resident` ones: on the host, and back one unit ahead."""

    # `_units` has the units in the order of forward. `_reached` is the one that backward is at; None before. A storage
    # is on the device (`here`) from forward until its unit is freed, and from its fetch until backward has left it.

    def __init__(self, device: torch.device, resident: Sequence[Tensor]) -> None:
        self._device = device
        self._values = resident
        self._transfers = Transfers(device)
        self._pool = _pool.__wrapped__() if _compat.makes_fakes() else _pool()
        self._units = [_Unit(0)]
        self._reached: _Unit | None = None

    @functools.cached_property
    def _resident(self) -> frozenset[int]:
        """Ids of storages that stay; most calls keep nothing here, and do not ask."""
        return frozenset(map(_compat.storage_id, self._values))

    # ---------------------------------------------------------------------------------------------------------- forward
    def keep(self, x: Tensor) -> Tensor | Parked:
        """Return what autograd saves for a tensor of the present unit."""
        storage, size = _compat.storage_id(x), x.untyped_storage().nbytes()
        stays = size < _SMALLEST or size > _LARGEST_SHARE * x.nbytes or storage in self._resident
        if stays or x.device != self._device:
            return x
        unit = self._units[-1]
        key = storage, _compat.version_of(x), x.dtype
        if key not in unit.storages:
            unit.storages[key] = _Storage(x.as_strided((size // x.element_size(),), (1,), 0))
        return Parked(self, unit, unit.storages[key], x.size(), x.stride(), int(x.storage_offset()))

    def next_unit(self) -> None:
        """Forward has left a unit."""
        self._send(self._units[-1])
        for unit in self._units[-2:-1]:
            self._free(unit)
        self._units.append(_Unit(len(self._units)))

    def end_forward(self) -> None:
        """Forward is over, and backward comes later."""
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
        """Memory of the host for tensors, as bytes."""
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
        """Have the compute stream wait for the copies of a unit to the device."""
        if unit.back is not None:
            self._transfers.wait(unit.back)
            unit.back = None

    # --------------------------------------------------------------------------------------------------------- backward
    def reach(self, unit: _Unit) -> None:
        """Backward needs a unit: frees the later ones, waits for this one, and starts to fetch the one before it."""
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
        """Start to copy a unit to the device, unless it is there or on its way."""
        gone = [storage for storage in unit.storages.values() if storage.here is None]
        if not gone:
            return
        there = [storage.host for storage in gone if storage.host is not None]
        unit.back = self._transfers.fetch(there, self._device, after=unit.out)
        for storage, here in zip(gone, unit.back.values, strict=True):
            storage.here = here

    def close(self) -> None:
        """Drop everything; the current stream waits for all copies."""
        for unit in self._units:
            self._free(unit)
        self._units = [_Unit(0)]
        self._reached = None
        self._values = ()


@functools.cache
def _pool() -> Pool:
    """Pinned memory of this process. It is kept: pinning is slow, and a graph replays copies to the same addresses."""
    return Pool(lambda shape, dtype, _: pinned(shape, dtype))


_stays: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""Tensors of the host that stay as long as they are referred to, by the ids of their storages."""


def keep_in_place(x: Tensor) -> None:
    """Note that a tensor of the host stays where it is until nothing refers to it."""
    if x.is_cpu:
        _stays[_compat.storage_id(x)] = x


def is_kept(x: Tensor) -> bool:
    """Return whether a tensor is in pinned memory that stays, so that a graph may replay copies from and to it."""
    return _pool().holds(x) or _compat.storage_id(x) in _stays
