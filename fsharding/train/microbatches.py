"""Batches along dim 0: the part of a rank in a global batch, and microbatches in the part of a rank."""

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

__all__ = ["local_batch", "split_batch", "uncut", "uneven"]


@public
def local_batch(batch: Tree, mesh: Mesh | None = None) -> Tree:
    """Take the part of a global batch that this rank reads.

    Its rows are part `index` of `count`, as `fs.data_rank_and_size` gives the two, so ranks along `tp` and `pp` have
    equal parts. On a mesh with `cp` each rank along it has different tokens of the same rows, dim 1, as
    `fs.ops.cut_sequence` takes them.

    Args:
        batch: tree of tensors `[B, ...]`, with `cp` `[B, T, ...]`, the same on every rank; dataclasses and mappings,
            such as a `BatchEncoding`, are trees here too. `fs.Shared(x)` marks an entry that holds no rows.
        mesh: by default the current one.

    Returns:
        The tree with tensors `[B / count, ...]` on the device of the mesh: views where they are there already. With
        `cp` they are `[B / count, T / cp, ...]`, and new tensors.

    Raises:
        BatchError: a leaf is no tensor, its dim 0 is no multiple of the number of data ranks, or its dim 1 no multiple
            of twice the size of `cp`; all are listed.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> batch = fs.local_batch({"x": torch.zeros(8, 3)}, mesh)  # on one rank all 8 rows, on two ranks 4 each
        >>> len(batch["x"]) * mesh.size()
        8
    """
    mesh = current_mesh() if mesh is None else mesh
    index, count = data_rank_and_size(mesh)
    if rows := uneven(batch, count):
        mend = f"Give a number of rows that is a multiple of {count}: drop the last ones, or pad."
        raise uncut(rows, "a global batch", f"{count} parts, one for each data rank", mend)
    device = getattr(mesh, "device_type", None)
    own = tree.map(lambda x: x.to(device, non_blocking=True), map_rows(lambda x: x.chunk(count)[index], batch))
    return own if abstract(mesh).axis_size("cp") == 1 else cut_leaves(own, 1, "cp", mesh)


_UNUSABLE = {
    ", which yields batches": YIELDS,
    ", which is no tensor": (
        "Make tensors of them: fs.tree.map(torch.as_tensor, batch); of lists of numbers, one torch.tensor each."
    ),
    " on the meta device, without values": "Make them on a device, such as the device of the mesh.",
}
"""What makes a leaf unusable whatever its shape, as the end of its row, and the edit. Other ranks may read the row."""

_NO_ROWS = ", so it holds no rows"


def uneven(batch: Tree, parts: int) -> list[str]:
    """Describe the leaves of a batch that cannot be split into equal parts, one row each."""
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
    """Name a leaf of two dims and more if there is one, with as many rows as most leaves, or else more dims or rows."""
    counts = Counter(x.shape[0] for x in rows.values() if x.ndim)
    ranks = {path: (x.ndim > 1, counts[x.shape[0]], x.ndim, x.shape[0]) for path, x in rows.items() if x.ndim}
    return max(ranks, key=ranks.__getitem__, default="")


def _unusable(x: Any) -> str:
    """Give the reason, of those in `_UNUSABLE`; "" for a tensor with values."""
    yields, no_tensor, meta = _UNUSABLE
    if not isinstance(x, Tensor):
        return yields if yields_batches(x) else no_tensor
    return meta if x.is_meta else ""


def _register_containers(batch: Tree) -> None:
    """Make the dataclasses and mappings of a batch nodes of our trees, so that their tensors are its leaves."""
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


def uncut(
    rows: list[str],
    whose: str,
    parts: str,
    mend: str = "Choose microbatches that divide dim 0 of every leaf, or another global batch.",
) -> BatchError:
    """The error for leaves that cannot be cut; those that are no tensors alone, where there are some."""
    for kind, edit in _UNUSABLE.items():
        if odd := [row for row in rows if row.endswith(kind)]:
            return BatchError(message(f"takes {whose} as trees of tensors.", odd, edit))
    if odd := [row for row in rows if row.endswith(_NO_ROWS)]:
        rows, mend = odd, "Mark an entry that every rank and microbatch gets as it is: fs.Shared(x)."
    return BatchError(message(f"cannot cut {whose} into {parts}.", rows, mend))


def split_batch(batch: Tree, microbatches: int) -> list[Tree]:
    """The microbatches of this rank's batch, along dim 0, as a loss function gets them: without marks."""
    if rows := uneven(batch, microbatches):
        raise uncut(rows, "this rank's batch", f"{microbatches} microbatches")
    if microbatches == 1:
        return [unmarked(batch)]
    return [unmarked(map_rows(lambda x: x.chunk(microbatches)[i], batch)) for i in range(microbatches)]  # noqa: B023
