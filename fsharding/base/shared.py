"""`Shared`: the mark of a batch entry without rows, such as class weights; loss functions get the value only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsharding.base import tree
from fsharding.base.tree import Tree

__all__ = ["Shared", "map_rows", "rows_of", "unmarked"]


class Shared:
    """A batch entry that every rank and every microbatch receives unsplit.

    `fs.local_batch`, microbatches, `fs.ops.cut_sequence` and `fs.evaluate` split all other entries along dim 0, whose
    size must be the same in all of them. The loss function receives the value, without this mark.

    Args:
        value: Tensor of any shape and dtype, or a tree of them. `fs.local_batch` moves it to the device of the mesh.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> borders = torch.tensor([0, 3, 5, 8])  # three documents in eight tokens
        >>> batch = fs.local_batch({"tokens": torch.arange(8), "borders": fs.Shared(borders)}, mesh)
        >>> batch["borders"]
        Shared(tensor([0, 3, 5, 8]))
    """

    __slots__ = ("value",)

    def __init__(self, value: Tree) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Shared({self.value!r})"


tree.register_node(
    Shared, lambda node: ((node.value,), None, ("value",)), lambda _, children: Shared(*children), fields=True
)


def map_rows(fn: Callable[[Any], Any], batch: Tree) -> Tree:
    """Apply a function to the entries of a batch that have rows, and keep the others."""
    return tree.map(lambda x: x if isinstance(x, Shared) else fn(x), batch, is_leaf=_is_shared)


def rows_of(batch: Tree) -> Tree:
    """Replace the entries without rows by None."""
    return tree.map(lambda x: None if isinstance(x, Shared) else x, batch, is_leaf=_is_shared)


def unmarked(batch: Tree) -> Tree:
    """Replace marks by their values; a batch without marks is returned itself, not a copy."""
    if not any(map(_is_shared, tree.leaves(batch, is_leaf=_is_shared))):
        return batch
    return tree.map(lambda x: x.value if isinstance(x, Shared) else x, batch, is_leaf=_is_shared)


def _is_shared(x: Any) -> bool:
    return isinstance(x, Shared)
