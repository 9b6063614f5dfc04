"""Saved-tensor hooks: autograd saves the place of a gathered weight instead of the weight.

So saved tensors never keep a unit's buffers alive, unless the policy keeps gathered weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm.host_memory import OnHost
from fsharding.transforms.gathered_unit import GatheredUnit

__all__ = ["SavedTensors"]

# What autograd saves: a tensor that stays, or a function that returns it in backward.
Saved: TypeAlias = Tensor | Callable[[], Tensor]


class _Watched(NamedTuple):
    """A buffer of a unit. The weak reference keeps the id of its storage from being reused."""

    unit: GatheredUnit
    bucket: int
    buffer: int
    storage: _compat.WeakStorage


class _Values(NamedTuple):
    """Decoded values. The weak reference keeps the id of their storage from being reused."""

    decode: Callable[..., Tensor]
    parts: tuple[Saved, ...]
    dtype: torch.dtype
    storage: _compat.WeakStorage


class SavedTensors:
    """The hooks of one `value_and_grad` call."""

    # `_away` keeps activations in host memory, from the first unit that offloads them; `_keeper` is `_away` during such
    # a unit, else None. `pack` runs for each saved tensor of forward, in the order of a recognized view of a buffer or
    # of decoded values, then an activation to offload, then any other tensor, which stays.

    def __init__(self, bring: Callable[[GatheredUnit], None], on_host: Callable[[], OnHost] | None) -> None:
        # `bring` makes the buffers of a unit alive for backward. `on_host` creates the memory of offloaded activations;
        # None if the device is the CPU.
        self._bring = bring
        self._on_host = on_host
        self._away: OnHost | None = None
        self._keeper: OnHost | None = None
        self._watched: dict[int, _Watched] = {}
        self._values: dict[int, _Values] = {}

    def enter(self, *, offloads: bool) -> None:
        """Begin a unit, whose activations stay on the device or are offloaded."""
        if self._keeper is not None:
            self._keeper.next_unit()
        if offloads and self._away is None and self._on_host is not None:
            self._away = self._on_host()
        self._keeper = self._away if offloads else None

    def end_forward(self) -> None:
        """End forward; backward comes later."""
        if self._keeper is not None:
            self._keeper.end_forward()

    def watch(self, unit: GatheredUnit) -> None:
        """Recognize views of the buffers of a unit that is alive."""
        for bucket, buffers in unit.buffers.items():
            for number, buffer in enumerate(buffers):
                watched = _Watched(unit, bucket, number, _compat.weak_storage(buffer))
                self._watched[_compat.storage_id(buffer)] = watched

    def note_values(self, x: Tensor, decode: Callable[..., Tensor], parts: Sequence[Tensor]) -> None:
        """Recognize views of values decoded from parts; backward decodes again instead of keeping them."""
        kept = tuple(self.pack(part.detach()) for part in parts)
        self._values[_compat.storage_id(x)] = _Values(decode, kept, x.dtype, _compat.weak_storage(x))

    def pack(self, x: Tensor) -> Saved:
        """Replace a view of a gathered buffer or of decoded values by its place; keep other tensors."""
        # An id that is a key belongs to the storage noted with it, since the weak reference keeps it from being reused.
        storage = _compat.storage_id(x)
        values = self._values.get(storage)
        if values is not None and x.dtype == values.dtype:
            return functools.partial(self._decoded, values, *_view(x))
        known = self._watched.get(storage)
        if known is None or known.unit.kept:
            # Detached: a node that saves its result with its history would keep itself alive until its backward runs.
            x = x if x.grad_fn is None else x.detach()
            return x if self._keeper is None else self._keeper.keep(x)
        known.unit.note_view(known.bucket)
        return functools.partial(self._gathered, known, x.dtype, *_view(x))

    def unpack(self, saved: Saved) -> Tensor:
        """Return the saved tensor."""
        return saved if isinstance(saved, Tensor) else saved()

    def _decoded(self, values: _Values, *view: Any) -> Tensor:
        return values.decode(*map(self.unpack, values.parts)).as_strided(*view)

    def _gathered(self, place: _Watched, dtype: torch.dtype, *view: Any) -> Tensor:
        """Return a view of a unit's buffer; the unit is gathered again if needed."""
        self._bring(place.unit)
        buffer = place.unit.buffers[place.bucket][place.buffer]
        if buffer.dtype != dtype:  # a part of a buffer of bytes
            buffer = buffer[: buffer.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return buffer.as_strided(*view)

    def forget_freed(self) -> None:
        """Forget decoded values that are freed."""
        self._values = {key: x for key, x in self._values.items() if not x.storage.expired()}

    def close(self) -> None:
        """Break the references to units and buffers, and to the context, which holds this."""
        self._watched.clear()
        self._values.clear()
        if self._away is not None:
            self._away.close()
        self._away = self._keeper = self._on_host = None
        self._bring = lambda _: None  # no unit is gathered any more


def _view(x: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    """Return the arguments of `Tensor.as_strided` that make this view of its storage."""
    return x.size(), x.stride(), int(x.storage_offset())
