"""Batches along dim 0: the part of a rank in a global batch, and microbatches in the part of a rank.

In: a tree of tensors `[B, ...]`. Out: trees of tensors with fewer rows.
Law: the parts of all data ranks, one after the other, are the global batch; so are the microbatches of a rank its part.
"""

from __future__ import annotations

from torch import Tensor

from fsharding import tree
from fsharding.errors import BatchError, message
from fsharding.mesh.device_mesh import Mesh, current_mesh, data_position
from fsharding.public import public
from fsharding.sharding.leaf_plan import kind_text
from fsharding.tree import Tree

__all__ = ["local_batch", "split_batch", "uncut", "uneven"]


@public("fs.local_batch")
def local_batch(batch: Tree, mesh: Mesh | None = None) -> Tree:
    """The rows of a global batch that this rank reads: part `index` of `count`, as `fs.data_position` gives the two.

    Ranks along `tp`, `pp` and `cp` have the same rows.

    Args:
        batch: tree of tensors `[B, ...]`, the same on every rank.
        mesh: by default the current one.

    Returns:
        The tree with tensors `[B / count, ...]`: views.

    Raises:
        BatchError: a leaf is no tensor, or its dim 0 is no multiple of the number of data ranks; all are listed.

    Example:
        >>> mesh = fs.make_mesh(device="cpu")
        >>> fs.local_batch({"x": torch.zeros(8, 3)}, mesh)["x"].shape  # one rank reads all 8 rows
        torch.Size([8, 3])
    """
    index, count = data_position(current_mesh("fs.local_batch") if mesh is None else mesh)
    if rows := uneven(batch, count):
        mend = f"Give a number of rows that is a multiple of {count}: drop the last ones, or pad."
        raise uncut("fs.local_batch", rows, "a global batch", f"{count} parts, one for each data rank", mend)
    return tree.map(lambda x: x.chunk(count)[index], batch)


_NO_TENSOR = ", which is no tensor"


def uneven(batch: Tree, parts: int) -> list[str]:
    """The leaves of a batch that cannot be cut into equal parts, in words."""
    return [
        f"{path} is {kind_text(x)}" + ("" if isinstance(x, Tensor) else _NO_TENSOR)
        for path, x in tree.named_leaves(batch).items()
        if not isinstance(x, Tensor) or x.ndim == 0 or x.shape[0] % parts
    ]


def uncut(
    function: str,
    rows: list[str],
    whose: str,
    parts: str,
    mend: str = "Choose microbatches that divide dim 0 of every leaf, or another global batch.",
) -> BatchError:
    """The error for leaves that cannot be cut; those that are no tensors alone, where there are some.

    Args:
        function: the public function.
        rows: what `uneven` gave.
        whose: the batch, in words.
        parts: what it cannot be cut into.
        mend: the advice, where all leaves are tensors.
    """
    odd = [row for row in rows if row.endswith(_NO_TENSOR)]
    if odd:
        mend = "Make tensors of them: fs.tree.map(torch.as_tensor, batch); of lists of numbers, one torch.tensor each."
        return BatchError(message(function, f"takes {whose} as trees of tensors.", odd, mend))
    return BatchError(message(function, f"cannot cut {whose} into {parts}.", rows, mend))


def split_batch(function: str, batch: Tree, microbatches: int) -> list[Tree]:
    """The microbatches of this rank's batch, along dim 0.

    Args:
        function: the public function, for the error.
        batch: tree of tensors `[B, ...]`.
        microbatches: how many.

    Raises:
        BatchError: a leaf is no tensor, or its dim 0 no multiple of `microbatches`.
    """
    if rows := uneven(batch, microbatches):
        raise uncut(function, rows, "this rank's batch", f"{microbatches} microbatches")
    if microbatches == 1:
        return [batch]
    return [tree.map(lambda x: x.chunk(microbatches)[i], batch) for i in range(microbatches)]  # noqa: B023
