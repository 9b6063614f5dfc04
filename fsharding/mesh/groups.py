"""Process groups of meshes: one for each set of ranks, timeout and use, however many meshes there are and were.

Guarantee: all ranks make, use and close the same groups in the same order; none is closed while it is in use.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakSet

import torch.distributed as dist

from fsharding.base import _compat
from fsharding.mesh.backends import backend_of, default_store, own_connection
from fsharding.mesh.failures import among, own_rank, world_size
from fsharding.mesh.meeting import meet

__all__ = ["Key", "close_unused", "find_group", "group_among", "groups_of_another_world", "meet_first"]

Key = tuple[tuple[int, ...], timedelta, str]
"""The ranks of a group, sorted, its timeout, and its use: "" for any, or what it is kept apart for."""

_SPARE_MESHES = 8
"""For so many meshes that are made without it, an unused group is kept: a run that swaps strategies returns to it."""
_BITS = 62


@dataclass
class _Kept:
    """A group that every rank knows."""

    group: dist.ProcessGroup | None  # None on a rank outside
    idle: int = 0  # number of references to an unused group: torch's and this one
    # number of the last mesh that asked for it when it was made, or that found it held; as all ranks count
    last: int = 0

    def holders(self) -> int:
        """How many hold it."""
        return 0 if self.group is None else _compat.holders_of(self.group)


class _Groups:
    """The groups beside one default process group, and how many meshes were made so far."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = world
        self.by_key: dict[Key, _Kept] = {}
        self.meshes = 0

    def get(self, key: Key) -> _Kept:
        kept = self.by_key.get(key)
        if kept is None:
            kept = self.by_key[key] = self._make(*key[:2], apart=bool(key[2]))
            # Here, where no local name of a caller holds it.
            kept.idle = kept.holders()
            kept.last = self.meshes
        return kept

    def _make(self, ranks: tuple[int, ...], timeout: timedelta, *, apart: bool) -> _Kept:
        """The default process group serves the meshes of one timeout: the first mesh's over all ranks."""
        if (
            not apart
            and len(ranks) == world_size()
            and all(kept.group is not self.world for kept in self.by_key.values())
        ):
            if dist.get_backend(self.world) != "fake":  # Its ranks never wait, and it has no timeout.
                self.world.set_timeout(timeout)
            return _Kept(self.world)
        return _Kept(_compat.new_group(ranks, timeout))

    def close(self, wanted: set[Key]) -> None:
        self.meshes += 1
        for key in wanted & self.by_key.keys():
            self.by_key[key].last = self.meshes
        old = [
            key
            for key, kept in self.by_key.items()
            if self.meshes - kept.last > _SPARE_MESHES and kept.group is not self.world
        ]
        if old:
            gc.collect()  # A mesh and what it keeps hold each other.
        for start in range(0, len(old), _BITS):
            some = old[start : start + _BITS]
            # A mesh, a plan or a pending collective of this process may still use a group.
            used = [self.by_key[key].holders() > self.by_key[key].idle for key in some]
            held = sum(is_used << i for i, is_used in enumerate(used))
            anywhere = meet(held)
            for i, key in enumerate(some):
                if any(mask >> i & 1 for mask in anywhere):
                    self.by_key[key].last = self.meshes
                elif (group := self.by_key.pop(key).group) is not None:
                    _compat.close_group(group)


_groups: _Groups | None = None


def _known() -> _Groups:
    global _groups
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    if _groups is None or _groups.world is not world:
        _groups = _Groups(world)
    return _groups


@contextmanager
def groups_of_another_world() -> Generator[None]:
    """Forget the groups that are made in this block, and know those from before again after it."""
    global _groups
    before = _groups
    try:
        yield
    finally:
        _groups = before


def group_among(families: Iterable[Sequence[int]], timeout: timedelta, use: str = "") -> dist.ProcessGroup | None:
    """The group of this process among some; None if it is in none of them. All ranks there are ask for the same."""
    known = _known()
    here = own_rank()
    own = None
    for family in families:
        group = known.get((tuple(sorted(family)), timeout, use)).group
        if here in family:
            own = group
    return own


_met: WeakSet[dist.ProcessGroup] = WeakSet()  # groups whose ranks `meet_first` has seen


def meet_first(group: dist.ProcessGroup, device_type: str, timeout: timedelta) -> None:
    """Wait for all ranks of a group of gloo before its first collective here. Collective over the group."""
    # gloo connects ranks when they first send something, and waits for them as long as it likes, whatever the timeout.
    store = default_store()
    if store is None or group in _met or backend_of(group, device_type) != "gloo":
        return
    ranks = dist.get_process_group_ranks(group)
    keys = [f"fsharding/first/{group.group_name}/{rank}" for rank in ranks]
    connection = own_connection(store)
    connection.set(keys[ranks.index(own_rank())], b"")
    with among(ranks):
        connection.wait(keys, timeout)
    _met.add(group)


def find_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup | None:
    """The group of some ranks, if there is one."""
    kept = _known().by_key.get((tuple(sorted(ranks)), timeout, ""))
    return None if kept is None else kept.group


def close_unused(families: Iterable[Sequence[int]], timeout: timedelta, uses: Sequence[str] = ("",)) -> None:
    """Closes the groups that no rank holds and that were not used for a while. Called by all ranks, for each mesh."""
    _known().close({(tuple(sorted(family)), timeout, use) for family in families for use in uses})
