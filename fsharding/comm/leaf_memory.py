"""Move local tensors between the device that computes with them and the tier in which their sharding keeps them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, devices, tree
from fsharding.base._compat import cache_on_its_mesh
from fsharding.base.tree import Tree
from fsharding.comm.tier import DEVICE, HOST, compute_device, pinned, rows_together, tier_of, tier_on
from fsharding.mesh.device_mesh import abstract
from fsharding.sharding.memory_kinds import Tier
from fsharding.sharding.named_sharding import Local, NamedSharding, like, local_of, sharding_of

__all__ = [
    "cast_to_memory", "copied", "device_of", "fill", "here", "home_of", "in_memory", "is_aligned", "is_away",
    "on_device", "placed", "placed_as", "read_ahead", "scaled", "settle_copies", "sharding_here", "tier_at_rest",
    "to_memory",
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ where a leaf is
def tier_at_rest(x: DTensor) -> Tier:
    """Return the tier of a leaf at rest."""
    return tier_of(_compat.local_tensor(x), x.device_mesh.device_type)


def is_away(x: Any) -> bool:
    """Return whether a leaf at rest is in a tier other than the device of its mesh."""
    return isinstance(x, DTensor) and tier_at_rest(x) is not DEVICE


def home_of(sharding: NamedSharding) -> Tier:
    """Return the tier in which this process keeps leaves of a sharding."""
    return tier_on(sharding.memory, sharding.device_type)


def device_of(x: Tensor, device_type: str) -> torch.device:
    """Return the device that computes with a local tensor."""
    return x.device if tier_of(x, device_type) is DEVICE else compute_device(device_type)


def sharding_here(x: DTensor) -> NamedSharding:
    """Return the sharding of a leaf as an update reads it: in host memory if it is there, else on the device."""
    tier = tier_at_rest(x)
    return sharding_of(x) if tier is DEVICE or tier.can_fail else replace(sharding_of(x), memory=tier.name)


_ALIGN = 64  # alignment of fresh tensors, in bytes


@cache_on_its_mesh
def is_aligned(sharding: NamedSharding, shape: tuple[int, ...], itemsize: int) -> bool:
    """Return whether each row of a stack is aligned like a fresh tensor, on every rank: row sizes may differ."""
    axes = [*itertools.chain(*map(sharding.axes, range(len(shape))))]
    ranges = (range(abstract(sharding.mesh).axis_size(axis)) for axis in axes)
    shapes = (sharding.local_shape(shape, dict(zip(axes, at, strict=True))) for at in itertools.product(*ranges))
    return all(math.prod(local) * itemsize % _ALIGN == 0 for local in shapes)


# -------------------------------------------------------------------------------------------------------- to the device
def on_device(x: Tensor, device_type: str) -> Tensor:
    """Return a local tensor on the device of its mesh: itself, or a copy that the current stream makes."""
    tier = tier_of(x, device_type)
    return x if tier is DEVICE else tier.get(x, torch.device(device_type))


def read_ahead(x: Tensor, device_type: str) -> None:
    """Start the part of the next `on_device` that would block the host."""
    tier_of(x, device_type).prefetch(x, torch.device(device_type))


def in_memory(x: Tensor) -> Tensor:
    """Return a tensor that the host or the device can address: `x`, or a copy if its tier is a file."""
    return on_device(x, x.device.type)


def here(node: Local) -> Tensor:
    """Return the local tensor of a `Local` on its device; a copy is differentiable."""
    own = tier_of(node.value, node.sharding.device_type)
    value = cast(Tensor, _Read.apply(node.value)) if own.can_fail else node.value
    return value.to(node.sharding.device_type)


class _Read(Function):
    """A differentiable `in_memory`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return in_memory(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


# ------------------------------------------------------------------------------------------ to the tier of its sharding
def fill(sharding: NamedSharding, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return uninitialized memory for a leaf, which the caller fills and passes to `to_memory`."""
    return home_of(sharding).empty(shape, dtype, torch.device(sharding.device_mesh().device_type))


def to_memory(x: Tensor, sharding: NamedSharding) -> Tensor:
    """Return a local tensor in the tier of its sharding: itself if it is there. The host waits for a copy."""
    there, home = tier_of(x, sharding.device_type), home_of(sharding)
    if x.is_meta or home is DEVICE:
        return x if x.is_meta else on_device(x, sharding.device_type)
    if home is there and home.can_fail:  # never written again, so there is nothing to copy
        return x
    result = home.put(in_memory(x))
    home.settle(result, x.device)
    return result


def placed(x: Tensor, sharding: NamedSharding, size: tuple[int, ...]) -> DTensor:
    """Return a local tensor as a DTensor of shape `size`, in the tier of its sharding."""
    return sharding.at_rest(to_memory(x, sharding), size)


def placed_as(x: DTensor, sharding: NamedSharding) -> DTensor:
    """Return a DTensor in the tier of a sharding, with its own mesh and placements."""
    return like(x, to_memory(local_of(x), sharding))


def cast_to_memory(x: Tensor, dtype: torch.dtype, sharding: NamedSharding) -> Tensor:
    """Cast a local tensor, and return it in the tier of its sharding."""
    if x.dtype == dtype:
        return to_memory(x, sharding)
    home, there = home_of(sharding), tier_of(x, sharding.device_type)
    if home is HOST:
        return pinned(tuple(x.shape), dtype).copy_(x)
    if (there, home) == (HOST, DEVICE):
        # On the device, some rows at a time: the host would take longer than the copies, and would wait for them.
        device = compute_device(sharding.device_type)
        result = home.empty(tuple(x.shape), dtype, device)
        parts = (y.split(rows_together(x.shape)) if x.ndim else (y,) for y in (result, x))
        for new, rows in zip(*parts, strict=True):
            new.copy_(there.get(rows, device))
        return result
    return to_memory(x.to(dtype), sharding)


def copied(x: Any) -> Any:
    """Copy a leaf within its tier; a tensor that is never written in place is returned itself."""
    if isinstance(x, DTensor):
        return like(x, copied(local_of(x)))
    if not isinstance(x, Tensor) or tier_of(x, x.device.type).can_fail:
        return x
    if x.is_cpu and not _compat.is_fake(x) and x.is_pinned():
        return pinned(tuple(x.shape), x.dtype).copy_(x)
    return x.clone()


def settle_copies(values: Tree) -> None:
    """Have the host wait for the device if leaves are in other tiers, so that it may read their values."""
    if any(map(is_away, tree.leaves(values))):
        devices.synchronize()


def scaled(values: Tree, factor: Tensor) -> Tree:
    """Multiply the leaves of a tree by a 0-d tensor on the device, in place on the device and on the host."""

    def scaled_away(x: Any) -> Any:
        if not is_away(x):
            return x
        tier, local = tier_at_rest(x), local_of(x)
        there = tier.put(on_device(local, x.device_mesh.device_type) * factor, local)
        tier.settle(there, factor.device)
        return like(x, there)

    _compat.foreach_mul_([local_of(x) for x in tree.leaves(values) if x is not None and not is_away(x)], factor)
    return tree.map(scaled_away, values)
