"""Split batches along dim 0: a global batch into parts of ranks, and a rank's part into microbatches."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fsharding.base import tree
from fsharding.base.errors import BatchError, message
from fsharding.base.public import YIELDS, public, yields_batches
from fsharding.base.shared import map_rows, rows_of, unmarked
from fsharding.base.tree import Tree
from fsharding.mesh.device_mesh import Mesh, abstract, current_mesh, data_rank_and_size
from fsharding.ops.context_parallel import cut_leaves
from fsharding.sharding.leaf_plan import kind_text

__all__ = ["local_batch", "split_batch", "uneven", "unsplit"]


@public
def local_batch(batch: Tree, mesh: Mesh | None = None) -> Tree:
    """Take this rank's part of a global batch.

    With `index, count = fs.data_rank_and_size(mesh)` it is the `index`-th of `count` blocks of rows. Ranks along `tp`
    and `pp` have equal parts, ranks along `cp` different tokens of the same rows, as from `fs.ops.cut_sequence`.

    Args:
        batch: Tree of tensors `[B, ...]`, with `cp` `[B, T, ...]`, equal on every rank. Dataclasses and mappings, such
            as a `BatchEncoding`, are trees here too. `fs.Shared(x)` marks an entry without rows.
        mesh: Device mesh. Default: the current one.

    Returns:
        The tree with tensors `[B / count, ...]` on the device of the mesh, views if they are there already. With `cp`
        new tensors `[B / count, T / cp, ...]`.

    Raises:
        BatchError: A leaf isn't a tensor, its dim 0 isn't a multiple of the number of data ranks, or its dim 1 isn't a
            multiple of twice the size of `cp`; all are listed.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> batch = fs.local_batch({"x": torch.zeros(8, 3)}, mesh)  # on one rank all 8 rows, on two ranks 4 each
        >>> len(batch["x"]) * mesh.size()
        8
    """
    mesh = current_mesh() if mesh is None else mesh
    index, count = data_rank_and_size(mesh)
    if rows := uneven(batch, count):
        mend = f"Pass a number of rows that is a multiple of {count}: drop the last ones, or pad."
        raise unsplit(rows, "a global batch", f"{count} parts, one for each data rank", mend)
    device = getattr(mesh, "device_type", None)
    own = tree.map(lambda x: x.to(device, non_blocking=True), map_rows(lambda x: x.chunk(count)[index], batch))
    return own if abstract(mesh).axis_size("cp") == 1 else cut_leaves(own, 1, "cp", mesh)


_UNUSABLE = {
    ", which yields batches": YIELDS,
    ", which isn't a tensor": (
        "Make them tensors: fs.tree.map(torch.as_tensor, batch); for lists of numbers, one torch.tensor each."
    ),
    " on the meta device, without values": "Make them on a device, such as the device of the mesh.",
}
"""Reasons why a leaf is unusable whatever its shape: the end of its row (which other ranks may match), and the fix."""

_NO_ROWS = ", so it holds no rows"


def uneven(batch: Tree, parts: int) -> list[str]:
    """Describe the leaves of a batch that can't be split into equal parts, one row each."""
    _register_containers(batch)
    named = tree.named_leaves(batch)
    why = {path: _unusable(x) for path, x in named.items()}
    rows = {path: x for path, x in tree.named_leaves(rows_of(batch)).items() if not why[path]}
    like = _usual_leaf(rows)
    for path, x in rows.items():
        if not x.ndim:
            why[path] = _NO_ROWS
        elif parts > 1 and x.shape[0] != rows[like].shape[0]:
            why[path] = f": dim 0 of {like} is {rows[like].shape[0]}{_NO_ROWS}"
    return [
        f"{path or 'the batch'} is {kind_text(x)}{why[path]}"
        for path, x in named.items()
        if why[path] or (path in rows and x.shape[0] % parts)
    ]


def _usual_leaf(rows: Mapping[str, Tensor]) -> str:
    """Return the leaf whose number of rows is most likely right: one of two dims and more that agrees with most."""
    counts = Counter(x.shape[0] for x in rows.values() if x.ndim)
    ranks = {path: (x.ndim > 1, counts[x.shape[0]], x.ndim, x.shape[0]) for path, x in rows.items() if x.ndim}
    return max(ranks, key=ranks.__getitem__, default="")


def _unusable(x: Any) -> str:
    """Return the reason in `_UNUSABLE`; "" for a tensor with values."""
    yields, no_tensor, meta = _UNUSABLE
    if not isinstance(x, Tensor):
        return yields if yields_batches(x) else no_tensor
    return meta if x.is_meta else ""


def _register_containers(batch: Tree) -> None:
    """Register the dataclasses and mappings of a batch as tree nodes; repeat for what is inside of them."""
    while new := {type(x) for x in tree.leaves(batch) if _is_container(x)}:
        for kind in new:
            _register(kind)


def _is_container(x: Any) -> bool:
    return isinstance(x, Mapping) or (dataclasses.is_dataclass(x) and not isinstance(x, type | Tensor))


def _register(kind: Any) -> None:
    has_fields: bool = dataclasses.is_dataclass(kind)
    names = tuple(x.name for x in dataclasses.fields(kind) if x.init) if has_fields else None
    if names is None:
        tree.register_node(
            kind,
            lambda x: (tuple(x.values()), tuple(x.keys()), tuple(map(str, x))),
            lambda keys, children: kind(dict(zip(keys, children, strict=True))),
        )
        return
    tree.register_node(
        kind,
        lambda x: (tuple(getattr(x, name) for name in names), None, names),
        lambda _, children: kind(**dict(zip(names, children, strict=True))),
        fields=True,
    )


def unsplit(
    rows: list[str],
    whose: str,
    parts: str,
    mend: str = "Choose a number of microbatches that divides dim 0 of every leaf, or a different global batch.",
) -> BatchError:
    """Make the error for leaves that can't be split; if any are unusable, list only those."""
    for kind, edit in _UNUSABLE.items():
        if odd := [row for row in rows if row.endswith(kind)]:
            return BatchError(message(f"takes {whose} as trees of tensors.", odd, edit))
    if odd := [row for row in rows if row.endswith(_NO_ROWS)]:
        rows, mend = odd, "Mark an entry that every rank and microbatch gets in full: fs.Shared(x)."
    return BatchError(message(f"cannot split {whose} into {parts}.", rows, mend))


def split_batch(batch: Tree, microbatches: int) -> list[Tree]:
    """Split this rank's batch along dim 0 into microbatches, without `Shared` marks."""
    if rows := uneven(batch, microbatches):
        raise unsplit(rows, "this rank's batch", f"{microbatches} microbatches")
    if microbatches == 1:
        return [unmarked(batch)]
    return [unmarked(map_rows(lambda x: x.chunk(microbatches)[i], batch)) for i in range(microbatches)]  # noqa: B023
