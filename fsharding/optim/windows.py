"""Updates of leaves that are kept elsewhere than on the device: through windows of leaves on the device.

In: gradients, a state and parameters as they are at rest, and a function that updates some of the leaves. Out: the
same, updated, each leaf in its kind of memory. While a window is updated the next one is copied in and the one before
copied out, on two more streams:

    in         ?wanted   copy in   !in
    compute    ?in       update    !updated
    out        ?updated  copy out  !out
    compute    ?out, when the window after the next has been updated: only then is the memory free

Files are read and written by threads besides. An optimizer that computes each leaf by itself has windows of some
leaves; any other one has all leaves in one.
Guarantees: the bits are those of an update without windows. The host waits for the last copy, so that a state between
steps can be read. If a file fails, all leaves are as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.tree import Tree
from fsharding.comm.leaf_memory import Copies, compute_device, copied, is_away, memory_of
from fsharding.comm.redistribute import in_buckets
from fsharding.optim.base import like_leaf
from fsharding.optim.coded_moment import is_coded
from fsharding.sharding.memory_kinds import MemoryKind
from fsharding.sharding.named_sharding import like, local_of

__all__ = ["WINDOW_BYTES", "start_in_windows", "through_windows"]

WINDOW_BYTES = 32 << 20
"""Most bytes of leaves that are copied in for a window; a larger leaf is in one of its own."""

_Change: TypeAlias = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
"""`change(grads, state, params) -> (params, state)`, on trees with None for the leaves of other windows."""


class _Values(NamedTuple):
    """What an update reads, a tree."""

    grads: Tree
    state: Tree
    params: Tree


def through_windows(change: _Change, grads: Tree, state: Tree, params: Tree, *, by_leaf: bool, donate: bool) -> Any:
    """Run an update on leaves that are on the device.

    Args:
        change: updates the leaves that it is given.
        by_leaf: each leaf is updated by itself.
        donate: memory of the state may be overwritten.

    Returns:
        (parameters, state), in the kinds of memory that they were in.
    """
    values = _Values(grads, state, params)
    away = {path: x for path, x in tree.named_leaves(values).items() if is_away(x)}
    if not away:
        return change(grads, state, params)
    names = {*tree.paths(params)}
    owners = _owners(state, names)
    groups = _groups(values, owners, names) if by_leaf else [names]
    found: list[tuple[Tree, Tree]] = []
    with _Windows(away, donate=donate) as windows:
        selected = [_of_window(values, group, owners) for group in groups] if len(groups) > 1 else [values]
        coming = windows.fetch(selected[0])
        for number, present in enumerate(selected):
            present = windows.arrive(present, coming)
            coming = windows.fetch(selected[number + 1]) if number + 1 < len(selected) else {}
            found.append(windows.send(*change(*present)))
    if len(found) == 1:
        return found[0]
    return _merged(params, (x for x, _ in found)), _merged(state, (x for _, x in found))


def start_in_windows(start: Callable[[Tree], Tree], params: Tree, sizes: Mapping[str, int]) -> Tree:
    """Make the first state of an optimizer that computes each leaf by itself, without all of it on the device at once.

    Args:
        start: makes the state of some parameters, where it is to be; the others are None.
        sizes: bytes of the moments of each parameter that are not to stay on the device.
    """
    groups = [*in_buckets(sizes, sizes.__getitem__, WINDOW_BYTES)]
    if len(groups) < 2:
        return start(params)
    # Without memory, this has the structure of the whole state.
    shape = start(tree.map(lambda x: like_leaf(x, local_of(x).to("meta")), params))
    return _merged(shape, (start(_only(params, group)) for group in groups))


def _groups(values: _Values, owners: Mapping[str, str], names: Collection[str]) -> list[set[str]]:
    """The parameters of each window; all in one where a leaf that is away belongs to no parameter."""
    sizes = dict.fromkeys(names, 0)
    for field, part in values._asdict().items():
        for path, x in tree.named_leaves(part, is_leaf=is_coded).items():
            owner = owners.get(path) if field == "state" else path
            if nbytes := sum(local_of(x).nbytes for x in tree.leaves(x) if is_away(x)):
                if owner is None:
                    return [{*names}]
                sizes[owner] += nbytes
    return [{*bucket} for bucket in in_buckets(sorted(sizes), sizes.__getitem__, WINDOW_BYTES)]


def _owners(state: Tree, names: Collection[str]) -> dict[str, str]:
    """The parameter of each moment, by their paths: a tree in a state that has all parameters is one of moments."""
    paths = {*tree.paths(state, is_leaf=is_coded)}
    has_all = functools.cache(lambda before: all(before + name in paths for name in names))
    result: dict[str, str] = {}
    for path in paths:
        parts = path.split(".")
        for i in range(len(parts)):
            name = ".".join(parts[i:])
            if name in names and has_all(path[: len(path) - len(name)]):
                result[path] = name
    return result


def _only(values: Tree, group: Collection[str]) -> Tree:
    return tree.map_with_path(lambda path, x: x if path in group else None, values)


def _of_window(values: _Values, group: Collection[str], owners: Mapping[str, str]) -> _Values:
    """Values with None for leaves of other windows; what belongs to no parameter, such as a count, stays."""
    state = tree.map_with_path(
        lambda path, x: x if path not in owners or owners[path] in group else None, values.state, is_leaf=is_coded
    )
    return _Values(_only(values.grads, group), state, _only(values.params, group))


def _merged(like_tree: Tree, parts: Iterable[Tree]) -> Tree:
    """One tree of the leaves of all windows."""
    found: dict[str, Any] = {}
    for part in parts:
        found |= tree.named_leaves(part, is_leaf=is_coded)
    return tree.map_with_path(lambda path, x: found.get(path, x), like_tree, is_leaf=is_coded)


_GRADS = f"{_Values._fields[0]}."


class _Windows:
    """Copies of the leaves of one update: a context, at whose end the compute stream and the host wait for them."""

    def __init__(self, away: Mapping[str, DTensor], *, donate: bool) -> None:
        self._away = away
        self._kinds: dict[str, MemoryKind] = {
            path: memory_of(local_of(x), x.device_mesh.device_type) for path, x in away.items()
        }
        self._donate = donate
        self._may_fail = "disk" in self._kinds.values()
        self._copies = Copies(compute_device(next(iter(away.values())).device_mesh.device_type))

    def __enter__(self) -> _Windows:
        return self

    def __exit__(self, *_: object) -> None:
        self._copies.close()

    def fetch(self, values: _Values) -> dict[str, Tensor]:
        """Start to copy a window to the device."""
        named = tree.named_leaves(values)
        return self._copies.fetch({path: local_of(x) for path, x in named.items() if path in self._away})

    def arrive(self, values: _Values, here: dict[str, Tensor]) -> _Values:
        """Return the window on the device; the compute stream waits for it."""
        found = self._copies.arrive(here)
        present = tree.map_with_path(lambda path, x: like(x, found[path]) if path in found else x, values)
        if self._may_fail and self._donate:
            # Leaves that stay would be overwritten, and a file may still fail.
            kept = {path: x for path, x in tree.named_leaves(values).items() if path not in found}
            kept = {path: copied(x) for path, x in kept.items() if not path.startswith(_GRADS)}
            present = tree.map_with_path(lambda path, x: kept.get(path, x), present)
        return present

    def send(self, params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Start to copy a window to where it rests, and free the one before."""
        values = _Values(None, state, params)
        given = {path: local_of(x) for path, x in tree.named_leaves(values).items() if path in self._away}
        reused = self._donate and not self._may_fail
        homes = {path: local_of(self._away[path]) for path in given} if reused else {}
        there = self._copies.send(given, self._kinds, homes)
        rest = tree.map_with_path(lambda path, x: like(x, there[path]) if path in there else x, values)
        return rest.params, rest.state
