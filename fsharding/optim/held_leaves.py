"""Updates in which the gradient of some leaves is None: these leaves and their moments keep their values."""

from __future__ import annotations

from collections.abc import Callable

from fsharding.base import tree
from fsharding.base.tree import Tree
from fsharding.sharding.block_scales import is_coded
from fsharding.sharding.entries import places

__all__ = ["holding"]


def holding(
    change: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]], grads: Tree, state: Tree, params: Tree
) -> tuple[Tree, Tree]:
    """Run `change(grads, state, params)`, which returns a tree like `params` or `grads` and a state."""
    given, wanted = tree.leaves(grads), tree.leaves(params)
    if not given or len(given) >= len(wanted):
        return change(grads, state, params)
    held = {*tree.paths(params)} - {*tree.paths(grads)}
    found = places(state, params)
    kept = {
        path: x
        for path, x in tree.named_leaves(state, is_leaf=is_coded).items()
        if path in found and found[path].param in held
    }
    if not kept:
        return change(grads, state, params)
    pruned = tree.map_with_path(lambda path, x: None if path in kept else x, state, is_leaf=is_coded)
    changed, after = change(grads, pruned, tree.map_with_path(lambda path, x: None if path in held else x, params))
    new = tree.named_leaves(after, is_leaf=is_coded)
    state = tree.map_with_path(lambda path, x: x if path in kept else new.get(path, x), state, is_leaf=is_coded)
    return changed, state
