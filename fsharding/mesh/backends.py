# pyright: reportPrivateImportUsage=false
# torch documents the stores of torch.distributed, and its stubs do not export them.
"""Queries about process groups: the backend of each device type, and the store in which all ranks read and write.

Guarantee: every rank of a group gets the same answer.
"""

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
    """The backend of each device type, from a text such as "cpu:gloo,cuda:nccl"."""
    parts = (entry.partition(":") for entry in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in parts}


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend of a group for the tensors of a device type, such as gloo or nccl; "" if there is none."""
    return _backends(group).get(device_type, "")


def has_fake_backend(group: dist.ProcessGroup) -> bool:
    """Whether some ranks of a group are torch's fake ones: only this one exists."""
    return "fake" in _backends(group).values()


def default_store() -> dist.Store | None:
    """The store of the default process group, which all ranks can read and write; None without a group."""
    world = dist.group.WORLD
    return world.get_group_store() if isinstance(world, dist.ProcessGroup) else None


def own_connection(store: Any) -> Any:
    """The same store for another thread, which does not wait while this one waits for a key."""
    return store.clone()


def open_store(url: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Open the store at one of torch's URLs without waiting for other ranks, but for the one that serves it."""
    if url != "env://" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(iter(dist.rendezvous(url, rank, size, timeout=timeout)))
    else:
        # The rank that serves torch's own store waits for the others in its constructor, and cannot say for which.
        address = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, size, rank == 0, timeout, wait_for_workers=False, multi_tenant=True)
    store.set_timeout(timeout)
    return store


def prefixed(prefix: str, store: Any) -> Any:
    """Return the store with a prefix before every key."""
    return dist.PrefixStore(prefix, store)


def is_served_by_rank(store: dist.Store | None) -> bool:
    """Whether a store is in the memory of one of the ranks, so that it ends with that rank."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)
