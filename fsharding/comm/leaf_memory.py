"""The memory of a leaf: its local tensor is on the device of its mesh, in pinned memory of the host, or on disk.

In: local tensors, shardings. Out: the same values on the device, where they are computed with, or where they rest.
Guarantee: a copy changes no bit, and a tensor that is where it should be is returned itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, devices, tree
from fsharding.base.tree import Tree
from fsharding.comm.disk import OnDisk, in_memory, store
from fsharding.comm.streams import StreamName, streams_for
from fsharding.sharding.memory_kinds import MemoryKind
from fsharding.sharding.named_sharding import Local, NamedSharding, like, local_of, sharding_of

__all__ = [
    "Copies", "cast_to_memory", "compute_device", "copied", "device_of", "empty_on_host", "fill", "here", "is_away",
    "is_in_memory", "kind_here", "memory_of", "on_device", "put_away", "read_ahead", "scaled", "settle_copies",
    "sharding_here", "to_memory", "written",
]  # fmt: skip


def empty_on_host(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return pinned memory that is to be filled."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def compute_device(device_type: str) -> torch.device:
    """Return the device of this process with its index, as tensors have it."""
    return torch.empty(0, device=device_type).device


def device_of(x: Tensor, device_type: str) -> torch.device:
    """Return the device on which a local tensor is computed with."""
    return x.device if memory_of(x, device_type) == "device" else compute_device(device_type)


def here(node: Local) -> Tensor:
    """Return the local tensor of a leaf in flight on its device; a copy can be differentiated."""
    value = cast(Tensor, _Read.apply(node.value)) if isinstance(node.value, OnDisk) else node.value
    return value.to(node.sharding.device_type)


class _Read(Function):
    """The elements of a tensor on disk."""

    @staticmethod
    def forward(ctx: Any, x: OnDisk) -> Tensor:
        return x.read()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


def memory_of(x: Tensor, device_type: str) -> MemoryKind:
    """Return the kind of memory of a local tensor.

    Args:
        device_type: of the mesh. On a CPU, memory of the host is that of the device.
    """
    if isinstance(x, OnDisk):
        return "disk"
    return "host" if x.is_cpu and device_type != "cpu" else "device"


def is_away(x: Any) -> bool:
    """Whether a leaf is elsewhere than on the device of its mesh."""
    return isinstance(x, DTensor) and memory_of(_compat.local_tensor(x), x.device_mesh.device_type) != "device"


def sharding_here(x: DTensor) -> NamedSharding:
    """Return the sharding of a leaf that is read by an update, with memory "host" if the leaf is on the host."""
    sharding = sharding_of(x)
    on_host = memory_of(_compat.local_tensor(x), x.device_mesh.device_type) == "host"
    return replace(sharding, memory="host") if on_host else sharding


def on_device(x: Tensor, device_type: str) -> Tensor:
    """Return a local tensor on the device of its mesh: itself, or a copy that the current stream makes."""
    away = device_type != "cpu"
    if isinstance(x, OnDisk):
        x = x.read(pinned=away)
    if not (away and x.is_cpu):
        return x
    return _compat.fresh(tuple(x.shape), x.dtype, torch.device(device_type)).copy_(x, non_blocking=True)


def copied(x: Any) -> Any:
    """Return a copy of a leaf in the same kind of memory. A tensor on disk, which is never written, is its own copy."""
    if isinstance(x, DTensor):
        return like(x, copied(local_of(x)))
    if not isinstance(x, Tensor) or isinstance(x, OnDisk):
        return x
    if x.is_cpu and not _compat.is_fake(x) and x.is_pinned():
        return empty_on_host(tuple(x.shape), x.dtype).copy_(x)
    return x.clone()


def settle_copies(values: Tree) -> None:
    """Have the host wait for what its device was given, if leaves of a tree are elsewhere: it may read those."""
    if any(map(is_away, tree.leaves(values))):
        devices.synchronize()


def read_ahead(x: Tensor, device_type: str) -> None:
    """Start to read a local tensor for the next `on_device`, if it is on disk."""
    if isinstance(x, OnDisk):
        x.start_reading(pinned=device_type != "cpu")


def fill(sharding: NamedSharding, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory that is to be filled, for a leaf which `to_memory` brings where its sharding says afterwards."""
    device = torch.device(sharding.device_mesh().device_type)
    if sharding.memory == "device" or device.type == "cpu":
        return _compat.fresh(shape, dtype, device)
    return empty_on_host(shape, dtype)


def is_in_memory(x: Tensor, sharding: NamedSharding) -> bool:
    """Whether a local tensor is where its sharding says; one without memory is."""
    device_type = sharding.device_type
    return x.is_meta or memory_of(x, device_type) == kind_here(sharding.memory, device_type)


def to_memory(x: Tensor, sharding: NamedSharding) -> Tensor:
    """Return a local tensor where its sharding says: itself if it is there. The host waits for a copy."""
    device_type = sharding.device_type
    kind = kind_here(sharding.memory, device_type)
    if is_in_memory(x, sharding):
        return _pinned(x) if kind == "host" else x
    if kind == "device":
        return on_device(x, device_type)
    if kind == "host":
        return empty_on_host(tuple(x.shape), x.dtype).copy_(in_memory(x))
    stored = store(x.cpu())
    stored.settle()
    return stored


def cast_to_memory(x: Tensor, dtype: torch.dtype, sharding: NamedSharding) -> Tensor:
    """Return a local tensor in a dtype, where its sharding says. It is cast where it is."""
    if x.dtype == dtype:
        return to_memory(x, sharding)
    device_type = sharding.device_type
    if kind_here(sharding.memory, device_type) == "host":
        return empty_on_host(tuple(x.shape), dtype).copy_(x)
    return to_memory(x.to(dtype), sharding)


def kind_here(kind: MemoryKind, device_type: str) -> MemoryKind:
    """Return the kind that stands for another: the device for the host of a CPU, the host for a file without values."""
    if kind == "disk" and _compat.makes_fakes():
        kind = "host"
    return "device" if kind == "host" and device_type == "cpu" else kind


def put_away(x: Tensor, kind: MemoryKind, home: Tensor | None = None) -> tuple[Tensor, Any]:
    """Start to copy a tensor of the device elsewhere, on the current stream, after which its memory may be used again.

    Args:
        kind: "host" or "disk".
        home: memory of the host that may be written.

    Returns:
        The tensor there, and the event after which it is there; the write of a file is waited for by `OnDisk.settle`.
    """
    streams = streams_for(x.device)
    usable = home is not None and kind == "host" and home.dtype == x.dtype and home.shape == x.shape
    if x.is_cpu:
        if kind == "disk":
            return store(x), None
        return written(home, x) if usable and home is not None else _pinned(x), None
    there = home if usable and home is not None else empty_on_host(tuple(x.shape), x.dtype)
    there.copy_(x, non_blocking=True)
    event = streams.record("out")
    if kind == "host":
        return there, event
    return store(there, lambda: streams.settle(event)), event


def written(home: Tensor, x: Tensor) -> Tensor:
    """Copy a tensor to memory, unless it is that memory; return the memory."""
    return home if _compat.is_same_view(home, x) else home.copy_(x)


def _pinned(x: Tensor) -> Tensor:
    """Return a tensor of the host, or a pinned copy if it is not pinned."""
    return x if _compat.is_fake(x) or x.is_pinned() else empty_on_host(tuple(x.shape), x.dtype).copy_(x)


def scaled(values: Tree, factor: Tensor) -> Tree:
    """Multiply the leaves of a tree by a number of the device, in the memory of those that may be written."""

    def elsewhere(x: Any) -> Any:
        if not is_away(x):
            return x
        local, kind = local_of(x), memory_of(local_of(x), x.device_mesh.device_type)
        there, event = put_away(on_device(local, x.device_mesh.device_type) * factor, kind, local)
        if event is not None:
            streams_for(factor.device).settle(event)
        return like(x, there)

    _compat.foreach_mul_([local_of(x) for x in tree.leaves(values) if x is not None and not is_away(x)], factor)
    return tree.map(elsewhere, values)


class Copies:
    """Copies of leaves to where an update is computed and back, on streams of their own, one group each way at a time.

    Args:
        device: of the mesh.
        on_host: the update is computed on the host, which waits for copies from the device.
    """

    # `_coming` is the event of the group that is fetched. `_leaving` has the tensors of the group that was sent last,
    # where they are now, and the event after which they are there.

    def __init__(self, device: torch.device, *, on_host: bool = False) -> None:
        self._on_host = on_host
        self._target = torch.device("cpu") if on_host else device
        self._streams = streams_for(device)
        self._coming: Any = None
        self._later: dict[str, OnDisk] = {}
        self._leaving: tuple[list[Tensor], list[Tensor], Any] | None = None

    def fetch(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy a group; `arrive` waits for it and adds what is read from disk."""
        self._later = {name: x for name, x in wanted.items() if isinstance(x, OnDisk)}
        for x in self._later.values():
            x.start_reading(pinned=self._target.type != "cpu")
        return self._copied({name: x for name, x in wanted.items() if name not in self._later})

    def _copied(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        moving = {name: x for name, x in values.items() if x.device != self._target}
        if not moving:
            return {**values}
        here = {name: self._empty(x) for name, x in moving.items()}
        event = self._streams.record("wanted")
        way: StreamName = "out" if self._on_host else "in"
        with self._streams.on(way):
            self._streams.wait(event)
            for name, x in moving.items():
                here[name].copy_(x, non_blocking=True)
            self._coming = self._streams.record(way)
        return {**values, **here}

    def _empty(self, x: Tensor) -> Tensor:
        if self._on_host:
            return empty_on_host(tuple(x.shape), x.dtype)
        return _compat.fresh(tuple(x.shape), x.dtype, self._target)

    def arrive(self, here: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the group that was fetched; the compute stream or the host waits for it."""
        pinned = self._target.type != "cpu"
        here = {**here, **self._copied({name: x.read(pinned=pinned) for name, x in self._later.items()})}
        self._later = {}
        if self._coming is not None:
            self._streams.wait(self._coming)
            if self._on_host:
                self._streams.settle(self._coming)
            self._coming = None
        return here

    def send(self, values: Mapping[str, Tensor], kinds: Mapping[str, MemoryKind], homes: Mapping[str, Tensor]) -> Any:
        """Start to copy a group to where it rests, and free the group before; returns where its tensors will be."""
        updated = self._streams.record("updated")
        with self._streams.on("out"):
            self._streams.wait(updated)
            there = {name: put_away(x, kinds[name], homes.get(name))[0] for name, x in values.items()}
            done = self._streams.record("out")
        self._let_go()
        self._leaving = [*values.values()], [*there.values()], done
        return there

    def _let_go(self) -> None:
        """Free the group that was sent last, when it is where it goes."""
        if self._leaving is not None:
            _, there, event = self._leaving
            self._streams.wait(event)
            self._leaving = None
            for x in there:
                if isinstance(x, OnDisk):
                    x.settle()

    def close(self) -> None:
        """Wait for all copies, as the host does."""
        if self._coming is not None:
            self._streams.wait(self._coming)
            self._coming = None
        self._later = {}
        if self._leaving is not None:
            event = self._leaving[2]
            self._let_go()
            self._streams.settle(event)
