"""Updates of moments that are kept in memory of the host: through windows of leaves on the device.

In: gradients, a state and parameters as they are at rest, and a function that updates some of the leaves. Out: the
same, updated. While a window is updated the next one is copied in and the one before copied out, on two more streams:

    in         ?wanted   copy in   !in
    compute    ?in       update    !updated
    out        ?updated  copy out  !out
    compute    ?out, when the window after the next has been updated: only then is the memory free

An optimizer that computes each leaf by itself has windows of some leaves; any other one has all leaves in one.
Guarantee: the bits are those of an update without windows. The host waits for the last copy, so that a state between
steps can be read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base.tree import Tree
from fsharding.comm.host_memory import empty_on_host
from fsharding.comm.redistribute import in_buckets
from fsharding.comm.streams import streams_for
from fsharding.optim.base import like_leaf
from fsharding.optim.coded_moment import is_coded
from fsharding.sharding.named_sharding import like, local_of

__all__ = ["WINDOW_BYTES", "start_in_windows", "through_windows"]

WINDOW_BYTES = 64 << 20
"""Most bytes of moments in a window; a larger leaf is in one of its own."""

_Change: TypeAlias = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
"""`change(grads, state, params) -> (params, state)`, on trees with None for the leaves of other windows."""


def through_windows(change: _Change, grads: Tree, state: Tree, params: Tree, *, by_leaf: bool, donate: bool) -> Any:
    """Run an update on leaves whose moments are on the device.

    Args:
        change: updates the leaves that it is given.
        by_leaf: each leaf is updated by itself.
        donate: memory of the state may be overwritten.

    Returns:
        (parameters, state), in the memory that they were in.
    """
    if not any(map(_is_parked, tree.leaves(state))):
        return change(grads, state, params)
    parked = {path: x for path, x in tree.named_leaves(state).items() if _is_parked(x)}
    names = {*tree.paths(params)}
    owners = _owners(state, names)
    groups = _groups(state, owners, names) if by_leaf else [names]
    with _Windows(parked, local_of(tree.leaves(grads)[0]).device, donate=donate) as windows:
        if len(groups) == 1:
            new_params, new_state = change(grads, windows.wait(state, windows.fetch(state)), params)
            return new_params, windows.send(new_state)
        selected = [_of_window(state, group, owners) for group in groups]
        coming = windows.fetch(selected[0])
        found: list[tuple[Tree, Tree]] = []
        for number, group in enumerate(groups):
            present = windows.wait(selected[number], coming)
            coming = windows.fetch(selected[number + 1]) if number + 1 < len(groups) else {}
            new_params, new_state = change(_only(grads, group), present, _only(params, group))
            found.append((new_params, windows.send(new_state)))
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


def _groups(state: Tree, owners: Mapping[str, str], names: Collection[str]) -> list[set[str]]:
    """The parameters of each window; all in one where a leaf that is parked is no moment of a parameter."""
    sizes = dict.fromkeys(names, 0)
    for path, x in tree.named_leaves(state, is_leaf=is_coded).items():
        if nbytes := sum(local_of(part).nbytes for part in tree.leaves(x) if _is_parked(part)):
            if path not in owners:
                return [{*names}]
            sizes[owners[path]] += nbytes
    return [{*bucket} for bucket in in_buckets(sorted(sizes), sizes.__getitem__, WINDOW_BYTES)]


def _is_parked(x: Any) -> bool:
    """Whether a leaf is in memory of the host, though its mesh is of another device."""
    return isinstance(x, DTensor) and _compat.local_tensor(x).is_cpu and x.device_mesh.device_type != "cpu"


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


def _of_window(state: Tree, group: Collection[str], owners: Mapping[str, str]) -> Tree:
    """A state with None for the moments of other windows; what belongs to no parameter, such as a count, stays."""
    return tree.map_with_path(
        lambda path, x: x if path not in owners or owners[path] in group else None, state, is_leaf=is_coded
    )


def _merged(like_tree: Tree, parts: Iterable[Tree]) -> Tree:
    """One tree of the leaves of all windows."""
    found: dict[str, Any] = {}
    for part in parts:
        found |= tree.named_leaves(part, is_leaf=is_coded)
    return tree.map_with_path(lambda path, x: found.get(path, x), like_tree, is_leaf=is_coded)


class _Windows:
    """Copies of the moments of one update: a context, at whose end the compute stream and the host wait for them."""

    # `_coming` is the event of the window that is fetched. `_leaving` has the tensors of the window that was sent last.

    def __init__(self, parked: Mapping[str, DTensor], device: torch.device, *, donate: bool) -> None:
        self._parked, self._device, self._donate = parked, device, donate
        self._streams = streams_for(device)
        self._coming: Any = None
        self._leaving: tuple[list[Tensor], Any] | None = None

    def __enter__(self) -> _Windows:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrive()
        if self._leaving is not None:
            event = self._leaving[1]
            self._let_go()
            self._streams.settle(event)

    def _arrive(self) -> None:
        """Have the compute stream wait for the window that is fetched."""
        if self._coming is not None:
            self._streams.wait(self._coming)
            self._coming = None

    def _let_go(self) -> None:
        """Free the window that was sent last, when it is on the host."""
        if self._leaving is not None:
            self._streams.wait(self._leaving[1])
            self._leaving = None

    def fetch(self, state: Tree) -> dict[str, Tensor]:
        """Start to copy a window to the device."""
        wanted = {path: local_of(x) for path, x in tree.named_leaves(state).items() if path in self._parked}
        here = {path: _compat.fresh(tuple(x.shape), x.dtype, self._device) for path, x in wanted.items()}
        event = self._streams.record("wanted")
        with self._streams.on("in"):
            self._streams.wait(event)
            for path, x in wanted.items():
                here[path].copy_(x, non_blocking=True)
            self._coming = self._streams.record("in")
        return here

    def wait(self, state: Tree, here: Mapping[str, Tensor]) -> Tree:
        """The window on the device; the compute stream waits for it."""
        self._arrive()
        return tree.map_with_path(lambda path, x: like(x, here[path]) if path in here else x, state)

    def send(self, state: Tree) -> Tree:
        """Start to copy a window back to the host, and free the one before."""
        given = {path: x for path, x in tree.named_leaves(state).items() if path in self._parked}
        homes = {path: self._home(path, x) for path, x in given.items()}
        updated = self._streams.record("updated")
        with self._streams.on("out"):
            self._streams.wait(updated)
            for path, x in given.items():
                homes[path].copy_(local_of(x), non_blocking=True)
            done = self._streams.record("out")
        self._let_go()
        self._leaving = [local_of(x) for x in given.values()], done
        return tree.map_with_path(lambda path, x: like(x, homes[path]) if path in homes else x, state)

    def _home(self, path: str, x: Tensor) -> Tensor:
        old, new = local_of(self._parked[path]), local_of(x)
        return old if self._donate and old.dtype == new.dtype else empty_on_host(tuple(new.shape), new.dtype)
