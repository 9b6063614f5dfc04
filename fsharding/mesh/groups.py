"""Process groups of meshes: one for each set of ranks, timeout and use, shared by all meshes.

All ranks make and close the same groups in the same order; no group is closed while any rank uses it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from fsharding.base import _compat
from fsharding.mesh.backends import backend_of, default_store, own_connection
from fsharding.mesh.failures import among, own_rank, world_size
from fsharding.mesh.meeting import meet

__all__ = ["Group", "Key", "close_unused", "find_group", "group_among", "groups_of_another_world", "meet_first"]

Key = tuple[tuple[int, ...], timedelta, str]
"""The sorted ranks of a group, its timeout, and its use: "" for any, or the purpose of a separate group."""

# A group is closed once this many meshes were made without it: a run that swaps strategies returns to earlier meshes.
_SPARE_MESHES = 8
_BITS = 62  # groups per `meet`, one bit of an int64 each


@dataclass(frozen=True)
class Group:
    """The ranks whose coordinates differ only along some axes."""

    ranks: tuple[int, ...]  # global ranks in the order of the axes, major first
    index: int  # this process's position among them
    process_group: dist.ProcessGroup | None  # None for a group of one rank
    # Members in the order in which sums add them: by coordinate, with the axes as in `AXES`. So a sum over `(dp,
    # replica)`, and one over `dp` and then `replica`, add the same pairs. A range if that is the order of `ranks`.
    terms: tuple[int, ...] | range = range(1)
    axes: tuple[str, ...] = ()  # ordered as in `AXES`; empty if the ranks aren't those of one mesh
    transport: str = "auto"  # as passed to `make_mesh`

    @functools.cached_property
    def transports(self) -> dict[str, Any]:
        """The selected transport by device type; `comm.transport` writes it."""
        return {}

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Rank inside `process_group` of each member."""
        in_group = {rank: i for i, rank in enumerate(sorted(self.ranks))}
        return tuple(in_group[rank] for rank in self.ranks)

    @functools.cached_property
    def by_rank(self) -> tuple[int, ...]:
        """Member at each rank inside `process_group`: the inverse of `order`."""
        return tuple(sorted(range(self.size), key=self.order.__getitem__))

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether the ranks of `process_group` are in the order of the axes."""
        return self.order == tuple(range(self.size))


@dataclass
class _Kept:
    """A group that every rank has made."""

    group: dist.ProcessGroup | None  # None on a rank outside
    idle: int = 0  # number of references to it if it is unused: torch's and this one
    last: int = 0  # number of the last mesh that used it, or during whose construction a rank held it

    def holders(self) -> int:
        """Return the number of references to the group."""
        return 0 if self.group is None else _compat.holders_of(self.group)


class _Groups:
    """The groups of one default process group, and the number of meshes made so far."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = world
        self.by_key: dict[Key, _Kept] = {}
        self.meshes = 0

    def get(self, key: Key) -> _Kept:
        kept = self.by_key.get(key)
        if kept is None:
            kept = self.by_key[key] = self._make(*key[:2], apart=bool(key[2]))
            # Count here, where no variable of a caller holds the group.
            kept.idle = kept.holders()
            kept.last = self.meshes
        return kept

    def _make(self, ranks: tuple[int, ...], timeout: timedelta, *, apart: bool) -> _Kept:
        """Make a group; the default process group serves the first timeout over all ranks."""
        taken = any(kept.group is self.world for kept in self.by_key.values())
        if apart or taken or len(ranks) < world_size():
            return _Kept(_compat.new_group(ranks, timeout))
        if dist.get_backend(self.world) != "fake":  # fake ranks never wait, and have no timeout
            self.world.set_timeout(timeout)
        return _Kept(self.world)


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
    """Forget the groups made in this block when it ends, and restore the earlier ones."""
    global _groups
    before = _groups
    try:
        yield
    finally:
        _groups = before


def group_among(families: Iterable[Sequence[int]], timeout: timedelta, use: str = "") -> dist.ProcessGroup | None:
    """Return this process's group among several, or None. Collective over all ranks, which pass the same families."""
    known = _known()
    here = own_rank()
    own = None
    for family in families:
        group = known.get((tuple(sorted(family)), timeout, use)).group
        if here in family:
            own = group
    return own


_met: WeakSet[dist.ProcessGroup] = WeakSet()  # groups whose ranks `meet_first` has seen


def meet_first(group: dist.ProcessGroup, device_type: str) -> None:
    """Wait for all ranks of a gloo group before its first collective. Collective over the group."""
    # gloo connects ranks lazily, at their first message, and that wait ignores the group's timeout.
    store = default_store()
    if store is None or group in _met or backend_of(group, device_type) != "gloo":
        return
    ranks = dist.get_process_group_ranks(group)
    keys = [f"fsharding/first/{group.group_name}/{rank}" for rank in ranks]
    connection = own_connection(store)
    connection.set(keys[ranks.index(own_rank())], b"")
    with among(ranks):
        connection.wait(keys, _compat.group_timeout(group))
    _met.add(group)


def find_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup | None:
    """Return the group of some ranks, if it exists."""
    kept = _known().by_key.get((tuple(sorted(ranks)), timeout, ""))
    return None if kept is None else kept.group


def close_unused(families: Iterable[Sequence[int]], timeout: timedelta, uses: Sequence[str] = ("",)) -> None:
    """Close groups that no rank uses and that recent meshes didn't need. Collective over all ranks, once per mesh."""
    known = _known()
    known.meshes += 1
    wanted = {(tuple(sorted(family)), timeout, use) for family in families for use in uses}
    for key in wanted & known.by_key.keys():
        known.by_key[key].last = known.meshes
    old = [
        key
        for key, kept in known.by_key.items()
        if known.meshes - kept.last > _SPARE_MESHES and kept.group is not known.world
    ]
    if old:
        gc.collect()  # a mesh and its caches reference each other
    for start in range(0, len(old), _BITS):
        some = old[start : start + _BITS]
        # A mesh, a plan or a pending collective of any rank may still use a group.
        used = [known.by_key[key].holders() > known.by_key[key].idle for key in some]
        anywhere = meet(sum(is_used << i for i, is_used in enumerate(used)))
        for i, key in enumerate(some):
            if any(mask >> i & 1 for mask in anywhere):
                known.by_key[key].last = known.meshes
            elif (group := known.by_key.pop(key).group) is not None:
                _compat.close_group(group)
