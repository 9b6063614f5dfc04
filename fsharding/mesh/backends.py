# pyright: reportPrivateImportUsage=false
# torch documents the stores of torch.distributed, and its stubs do not export them.
"""Backends of process groups by device type, and the key-value store that all ranks share."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = [
    "backend_of", "default_store", "has_fake_backend", "is_served_by_rank", "open_store", "own_connection",
    "prefixed",
]  # fmt: skip


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of each device type; torch writes them as "cpu:gloo,cuda:nccl"."""
    parts = (entry.partition(":") for entry in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in parts}


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the backend of a group for a device type, such as gloo or nccl; "" without one."""
    return _backends(group).get(device_type, "")


def has_fake_backend(group: dist.ProcessGroup) -> bool:
    """Return whether a group has torch's fake backend: only this rank exists."""
    return "fake" in _backends(group).values()


def default_store() -> dist.Store | None:
    """Return the store of the default process group, or None."""
    world = dist.group.WORLD
    return world.get_group_store() if isinstance(world, dist.ProcessGroup) else None


def own_connection(store: Any) -> Any:
    """Return a second connection to a store: a thread that waits for a key blocks its connection."""
    return store.clone()


def open_store(url: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Open the store at one of torch's URLs, waiting only for the rank that serves it."""
    if url != "env://" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(iter(dist.rendezvous(url, rank, size, timeout=timeout)))
    else:
        # By default the serving rank waits for the others in the constructor, which can't report the missing ones.
        address = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, size, rank == 0, timeout, wait_for_workers=False, multi_tenant=True)
    store.set_timeout(timeout)
    return store


def prefixed(prefix: str, store: Any) -> Any:
    """Return the store with a prefix before every key."""
    return dist.PrefixStore(prefix, store)


def is_served_by_rank(store: dist.Store | None) -> bool:
    """Return whether one of the ranks serves a store, which then ends with that rank."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)
