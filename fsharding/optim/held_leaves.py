"""Leaves whose gradient is None in one call: the parameter and its moments stay as they are.

In: an update of all leaves, and gradients with None at some that have moments. Out: the update of all other leaves,
beside the old values of these. Numbers that belong to no leaf, such as a count of updates, go on.
Guarantee: an update in which no leaf is held is called with its own arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fsharding.base import tree
from fsharding.base.tree import Tree
from fsharding.optim.coded_moment import is_coded

__all__ = ["holding"]


def holding(
    change: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]], grads: Tree, state: Tree, params: Tree
) -> tuple[Tree, Tree]:
    """Run `change(grads, state, params)`, which returns a tree like `params` or `grads` and a state."""
    given, wanted = tree.leaves(grads), tree.leaves(params)
    if not given or len(given) >= len(wanted):
        return change(grads, state, params)
    names = {*tree.paths(params)}
    held = names - {*tree.paths(grads)}
    moments = {
        path: x
        for path, x in tree.named_leaves(state, is_leaf=is_coded).items()
        if is_coded(x) or isinstance(x, Tensor)
    }
    kept = {path: x for path, x in moments.items() if _owner(path, names) in held}
    if not kept:
        return change(grads, state, params)
    pruned = tree.map_with_path(lambda path, x: None if path in kept else x, state, is_leaf=is_coded)
    changed, after = change(grads, pruned, tree.map_with_path(lambda path, x: None if path in held else x, params))
    new = tree.named_leaves(after, is_leaf=is_coded)
    state = tree.map_with_path(lambda path, x: x if path in kept else new.get(path, x), state, is_leaf=is_coded)
    return changed, state


def _owner(path: str, names: set[str]) -> str:
    """The longest path of a parameter with which the path of a moment ends; "" if there is none."""
    parts = path.split(".")
    return next((name for i in range(1, len(parts)) if (name := ".".join(parts[i:])) in names), "")
