"""The built-in tiers, DEVICE and HOST, and functions that find the tier of a tensor. Others register themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fsharding.base import _compat, devices
from fsharding.sharding.memory_kinds import Tier, tier_named

__all__ = ["DEVICE", "HOST", "compute_device", "pinned", "rows_together", "tier_of", "tier_on"]

# Small rows are copied together, in chunks of this many elements.
_TOGETHER = 2 << 20


class _Host(Tier):
    """Host memory, pinned for a device with separate memory."""

    name: ClassVar[str] = "host"
    text: ClassVar[str] = "the host"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Tier`."""
        return pinned(shape, dtype)

    def put(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """See `Tier`; a tensor in pinned memory is returned itself, unless `into` fits."""
        fits = into is not None and (into.dtype, into.shape) == (x.dtype, x.shape)
        if x.is_cpu and not fits and (_compat.is_fake(x) or x.is_pinned()):
            return x
        there = into if into is not None and fits else pinned(tuple(x.shape), x.dtype)
        return super().put(x, there) if x.is_cpu else there.copy_(x, non_blocking=True)

    def get(self, x: Tensor, device: torch.device) -> Tensor:
        """See `Tier`."""
        if x.device.type == device.type:
            return x
        return _compat.fresh(tuple(x.shape), x.dtype, device).copy_(x, non_blocking=True)

    def settle(self, x: Tensor, device: torch.device) -> None:
        """See `Tier`; during the capture of a graph nothing runs, and the replay is waited for instead."""
        if devices.is_here(device.type) and not devices.is_capturing(device):
            torch.accelerator.current_stream(device).synchronize()


DEVICE = Tier()
HOST = _Host()


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return uninitialized pinned host memory."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def tier_of(x: Tensor, device_type: str) -> Tier:
    """Return the tier of a local tensor; a subclass of tensors may have a tier of its own."""
    own: Tier | None = getattr(type(x), "tier", None)
    if own is not None:
        return own
    return HOST if x.is_cpu and device_type != "cpu" else DEVICE


def tier_on(name: str, device_type: str) -> Tier:
    """Return the tier that this process uses for a memory kind."""
    # Fake tensors are never written to files, so HOST replaces a tier of files; on a CPU, DEVICE replaces HOST.
    tier = tier_named(name)
    if tier.can_fail and _compat.makes_fakes():
        tier = HOST
    return DEVICE if tier is HOST and device_type == "cpu" else tier


def compute_device(device_type: str) -> torch.device:
    """Return the device of this process, with its index."""
    return torch.empty(0, device=device_type).device


def rows_together(shape: Sequence[int]) -> int:
    """Return the number of rows of dim 0 to copy together."""
    return max(1, _TOGETHER // max(1, math.prod(shape[1:])))
