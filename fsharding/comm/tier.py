"""The tiers that every machine has, DEVICE and HOST, and which tier a tensor is in. Others register themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fsharding.base import _compat, devices
from fsharding.sharding.memory_kinds import Tier, tier_named

__all__ = ["DEVICE", "HOST", "compute_device", "pinned", "rows_together", "tier_of", "tier_on"]

_TOGETHER = 2 << 20
"""Elements of small rows that are copied together."""


class _Host(Tier):
    """Pinned memory of the host, for a device that has memory of its own."""

    name: ClassVar[str] = "host"
    text: ClassVar[str] = "the host"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Tier`."""
        return pinned(shape, dtype)

    def put(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """See `Tier`. A tensor that is in pinned memory already stays there."""
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
        """See `Tier`; while a graph is recorded nothing runs, and the replay is waited for."""
        stream = devices.current_stream(device)
        if stream is not None and not devices.is_capturing(device):
            stream.synchronize()


DEVICE = Tier()
HOST = _Host()


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return pinned memory of the host that is to be filled."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def tier_of(x: Tensor, device_type: str) -> Tier:
    """Return the tier of a local tensor; a subclass of tensors may have a tier of its own."""
    own: Tier | None = getattr(type(x), "tier", None)
    if own is not None:
        return own
    return HOST if x.is_cpu and device_type != "cpu" else DEVICE


def tier_on(name: str, device_type: str) -> Tier:
    """Return the tier that stands for a name: a CPU has its memory for both, and a fake tensor is in no file."""
    tier = tier_named(name)
    if tier.can_fail and _compat.makes_fakes():
        tier = HOST
    return DEVICE if tier is HOST and device_type == "cpu" else tier


def compute_device(device_type: str) -> torch.device:
    """Return the device of this process with its index, as tensors have it."""
    return torch.empty(0, device=device_type).device


def rows_together(shape: Sequence[int]) -> int:
    """Return how many rows of dim 0 to copy together."""
    return max(1, _TOGETHER // max(1, math.prod(shape[1:])))
