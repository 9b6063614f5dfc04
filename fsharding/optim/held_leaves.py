"""Updates in which the gradient of some leaves is None: these leaves and their moments keep their values."""

from __future__ import annotations

from collections.abc import Callable

from fsharding.base import tree
from fsharding.base.tree import Tree
from fsharding.sharding.entries import places, state_leaves, with_leaves

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
    kept = {path: x for path, x in state_leaves(state).items() if path in found and found[path].param in held}
    if not kept:
        return change(grads, state, params)
    pruned = with_leaves(state, dict.fromkeys(kept))
    changed, after = change(grads, pruned, tree.map_with_path(lambda path, x: None if path in held else x, params))
    return changed, with_leaves(state, state_leaves(after) | kept)
