"""Updates of leaves that are kept elsewhere than on the device: through windows of leaves there, or on the host.

In: gradients, a state and parameters as they are at rest, and a function that updates some of the leaves. Out: the
same, updated, each leaf in its kind of memory. While a window is updated the next one is copied in and the one before
copied out, on two more streams:

    in         ?wanted   copy in   !in
    compute    ?in       update    !updated
    out        ?updated  copy out  !out
    compute    ?out, when the window after the next has been updated: only then is the memory free

Files are read and written by threads besides. An optimizer that computes each leaf by itself has windows of some
leaves; any other one has all leaves in one. A window of leaves that are updated on the host has their gradients copied
there, which the host waits for; moments and main parameters are there.
Guarantees: the bits are those of an update without windows. The host waits for the last copy, so that a state between
steps can be read. If a file fails, all leaves are as they were.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fsharding.base import tree
from fsharding.base.errors import ConfigError, listed, message
from fsharding.base.tree import Tree
from fsharding.comm.disk import OnDisk
from fsharding.comm.leaf_memory import Copies, compute_device, copied, is_away, memory_of
from fsharding.comm.redistribute import in_buckets
from fsharding.optim.base import UpdateContext, like_leaf
from fsharding.optim.coded_moment import is_coded
from fsharding.sharding.memory_kinds import MemoryKind
from fsharding.sharding.named_sharding import like, local_of

__all__ = ["WINDOW_BYTES", "start_in_windows", "through_windows"]

WINDOW_BYTES = 32 << 20
"""Most bytes of leaves that are copied in for a window; a larger leaf is in one of its own."""

_Factor: TypeAlias = float | Tensor

_Change: TypeAlias = Callable[[Tree, Tree, Tree, UpdateContext, _Factor], tuple[Tree, Tree]]
"""`change(grads, state, params, context, scale) -> (params, state)`, with None for the leaves of other windows."""


class _Values(NamedTuple):
    """What an update reads, a tree."""

    grads: Tree
    state: Tree
    params: Tree


def through_windows(
    change: _Change, grads: Tree, state: Tree, params: Tree, context: UpdateContext, scale: _Factor, *, by_leaf: bool
) -> Any:
    """Run an update on leaves that are where it is computed.

    Args:
        change: updates the leaves that it is given, with the context and the scale, whose numbers are there too.
        context: says whether the state is donated, and which leaves are updated on the host.
        by_leaf: each leaf is updated by itself.

    Returns:
        (parameters, state), in the kinds of memory that they were in.

    Raises:
        ConfigError: leaves are updated on the host, but not each by itself.
    """
    values = _Values(grads, state, params)
    if context.on_host and not by_leaf:
        mend = "Leave compute= out, which updates them on the device, or use an optimizer such as fs.adamw."
        text = (
            f"cannot update {listed(context.on_host)} on the host: this optimizer does not update each leaf by itself."
        )
        raise ConfigError(message(text, mend=mend))
    away = {path: x for path, x in tree.named_leaves(values).items() if is_away(x)}
    if not away:
        return change(grads, state, params, context, scale)
    names = {*tree.paths(params)}
    owners = _owners(state, names)
    groups = _groups(values, owners, names, context.on_host) if by_leaf else [_Group(names, on_host=False)]
    found: list[tuple[Tree, Tree]] = []
    facts = {False: (context, scale)}
    if any(group.on_host for group in groups):
        facts[True] = _on_host(context, scale)
    with _Windows(away, donate=context.donate) as windows:
        selected = [_of_window(values, group.names, owners) for group in groups] if len(groups) > 1 else [values]
        coming = windows.fetch(selected[0], groups[0])
        for number, (group, present) in enumerate(zip(groups, selected, strict=True)):
            present = windows.arrive(present, coming, group)
            coming = windows.fetch(selected[number + 1], groups[number + 1]) if number + 1 < len(selected) else {}
            found.append(windows.send(*change(*present, *facts[group.on_host]), group))
    if len(found) == 1:
        return found[0]
    return _merged(params, (x for x, _ in found)), _merged(state, (x for _, x in found))


def _on_host(context: UpdateContext, scale: _Factor) -> tuple[UpdateContext, _Factor]:
    """The numbers of an update on the host, which waits for them."""
    norm, finite, key, step, scale = (
        x.cpu() if isinstance(x, Tensor) else x
        for x in (context.norm, context.finite, context.key, context.step, scale)
    )
    return replace(context, norm=norm, finite=finite, key=key, step=step), scale


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


class _Group(NamedTuple):
    """The parameters of a window, and whether they are updated on the host."""

    names: Collection[str]
    on_host: bool


def _groups(
    values: _Values, owners: Mapping[str, str], names: Collection[str], on_host: Collection[str]
) -> list[_Group]:
    """The parameters of each window, the same on all ranks; all in one where a leaf that is away belongs to none."""
    sizes = dict.fromkeys(sorted(names), 0)
    for field, part in values._asdict().items():
        for path, x in tree.named_leaves(part, is_leaf=is_coded).items():
            owner = owners.get(path) if field == "state" else path
            if nbytes := sum(_most_bytes(x) for x in tree.leaves(x) if is_away(x)):
                if owner is None:
                    return [_Group(names, on_host=False)]
                sizes[owner] += nbytes
    parts = {there: [name for name in sizes if (name in on_host) == there] for there in (True, False)}
    return [
        _Group({*bucket}, there)
        for there, part in parts.items()
        for bucket in in_buckets(part, sizes.__getitem__, WINDOW_BYTES)
    ]


def _most_bytes(x: DTensor) -> int:
    """Bytes that a rank may have of a leaf: ranks agree on windows, since an update may communicate."""
    parts = math.prod(x.device_mesh.size(dim) for dim, p in enumerate(x.placements) if isinstance(p, Shard))
    return -(-x.numel() // parts) * x.element_size()


def _owners(state: Tree, names: Collection[str]) -> dict[str, str]:
    """The parameter of each moment, whose path ends with that of the parameter.

    Of several such parameters it is the one in a tree that has all of them, or else that with the longest path.
    """
    held = tree.named_leaves(state, is_leaf=is_coded)
    paths = {path for path, x in held.items() if is_coded(x) or isinstance(x, DTensor)}
    has_all = functools.cache(lambda before: all(before + name in paths for name in names))
    result: dict[str, str] = {}
    for path in paths:
        parts = path.split(".")
        fitting = [name for name in (".".join(parts[i:]) for i in range(len(parts))) if name in names]
        whole = [name for name in fitting if has_all(path[: len(path) - len(name)])]
        if fitting:
            result[path] = (whole or fitting)[0]
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
        device = compute_device(next(iter(away.values())).device_mesh.device_type)
        self._copies = {on_host: Copies(device, on_host=on_host) for on_host in (False, True)}

    def __enter__(self) -> _Windows:
        return self

    def __exit__(self, *_: object) -> None:
        for copies in self._copies.values():
            copies.close()

    def fetch(self, values: _Values, group: _Group) -> dict[str, Tensor]:
        """Start to copy a window to where it is updated."""
        named = tree.named_leaves(values)
        if group.on_host:
            wanted = {path: x for path, x in named.items() if isinstance(x, Tensor) and _is_off_host(x)}
        else:
            wanted = {path: x for path, x in named.items() if path in self._away}
        return self._copies[group.on_host].fetch({path: local_of(x) for path, x in wanted.items()})

    def arrive(self, values: _Values, here: dict[str, Tensor], group: _Group) -> _Values:
        """Return the window where it is updated; the compute stream waits for it, or the host."""
        found = self._copies[group.on_host].arrive(here)
        present = tree.map_with_path(lambda path, x: like_leaf(x, found[path]) if path in found else x, values)
        if self._may_fail and self._donate:
            # Leaves that stay would be overwritten, and a file may still fail.
            kept = {path: x for path, x in tree.named_leaves(values).items() if path not in found}
            kept = {path: copied(x) for path, x in kept.items() if not path.startswith(_GRADS)}
            present = tree.map_with_path(lambda path, x: kept.get(path, x), present)
        return present

    def send(self, params: Tree, state: Tree, group: _Group) -> tuple[Tree, Tree]:
        """Start to copy a window to where it rests, and free the one before."""
        values = _Values(None, state, params)
        given = {path: local_of(x) for path, x in tree.named_leaves(values).items() if path in self._away}
        reused = self._donate and not self._may_fail
        homes = {path: local_of(self._away[path]) for path in given} if reused else {}
        there = self._copies[group.on_host].send(given, self._kinds, homes)
        rest = tree.map_with_path(lambda path, x: like(x, there[path]) if path in there else x, values)
        return rest.params, rest.state


def _is_off_host(x: Tensor) -> bool:
    local = local_of(x)
    return isinstance(local, OnDisk) or not local.is_cpu
