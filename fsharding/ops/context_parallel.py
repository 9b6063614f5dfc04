"""How context parallelism shards a sequence: of 2n chunks, rank i of n has chunks i and 2n-1-i."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fsharding.base import tree
from fsharding.base.errors import BatchError, SpecError, message
from fsharding.base.public import public
from fsharding.base.shared import map_rows, rows_of
from fsharding.base.tree import Tree
from fsharding.mesh.device_mesh import Mesh, axis_index, axis_size
from fsharding.ops.collectives import all_gather
from fsharding.sharding.leaf_plan import kind_text

__all__ = ["cut_leaves", "cut_sequence", "document_positions", "positions", "zigzag", "zigzag_order"]

_parts = WeakTensorKeyDictionary()
"""Maps each result of `cut_leaves` that is alive to its mesh axis. A second cut would drop tokens silently."""


@functools.lru_cache(maxsize=256)
def zigzag(size: int) -> tuple[tuple[int, int], ...]:
    """The two chunks of each of `size` ranks, out of `2 * size`; the only rank of one has both."""
    return tuple((index, 2 * size - 1 - index) for index in range(size))


def zigzag_order(length: int, size: int, device: torch.device | str | None = None) -> Tensor:
    """Return the global positions of all tokens of `size` ranks, one rank after another: int64[length]."""
    whole = torch.arange(length, device=device)
    if size == 1:
        return whole
    return whole.view(2 * size, -1)[torch.tensor(zigzag(size), device=device).flatten()].flatten()


@public
def positions(
    length: int, *, axis: str = "cp", mesh: Mesh | None = None, device: torch.device | str | None = None
) -> Tensor:
    """The global positions of this rank's tokens.

    Args:
        length: T of the whole sequence.
        axis: the mesh axis that cuts it.
        mesh: by default the mesh of `fs.set_mesh`; where there is none, or it lacks the axis, the sequence is whole.
        device: where the result is; by default where torch makes tensors.

    Returns:
        int64[T_local], ascending.

    Raises:
        BatchError: the length is no multiple of twice the size of the axis.

    Example:
        >>> with fs.set_mesh(fs.make_mesh(dp=-1, device="cpu")):
        ...     fs.ops.positions(8)  # on two ranks of cp: [0, 1, 6, 7] and [2, 3, 4, 5]
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    size, index = _place(axis, mesh)
    if why := _uncut(length, size):
        raise BatchError(message(f"cannot cut a sequence of {length} over {axis}: {size}.", mend=why))
    return zigzag_order(length, size, device).view(size, -1)[index]


@public
def document_positions(documents_BT: Tensor, *, axis: str = "cp", mesh: Mesh | None = None) -> Tensor:
    """Positions that begin anew at 0 with each document, of this rank's tokens.

    Args:
        documents_BT: integer [B, T], the document of each token of this rank, as `cut_sequence` takes them. The tokens
            of a document stand together: where the number changes, the next one begins.
        axis: the mesh axis that cuts the sequence; its ranks tell each other their documents.
        mesh: by default the mesh of `fs.set_mesh`; where there is none, or it lacks the axis, the sequence is whole.

    Returns:
        int64[B, T].

    Raises:
        SpecError: documents are not [B, T].

    Example:
        >>> fs.ops.document_positions(torch.tensor([[7, 7, 7, 8, 8]]))
        tensor([[0, 1, 2, 0, 1]])
    """
    if documents_BT.ndim != 2:
        mend = "Give the document of each token, as [B, T]."
        raise SpecError(message("needs documents [B, T].", [kind_text(documents_BT)], mend))
    size, index = _place(axis, mesh)
    order = zigzag_order(documents_BT.shape[1] * size, size, documents_BT.device)
    if size > 1:
        documents_BT = all_gather(documents_BT, axis, dim=1, mesh=mesh).index_select(1, order.argsort())
    at_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.zeros_like(documents_BT, dtype=torch.int64)
    begins_BT[:, 1:] = at_T[1:] * (documents_BT[:, 1:] != documents_BT[:, :-1])
    return (at_T - begins_BT.cummax(1).values).index_select(1, order.view(size, -1)[index])


@public
def cut_sequence(x: Tree, *, dim: int = 1, axis: str = "cp", mesh: Mesh | None = None) -> Tree:
    """Takes this rank's tokens out of whole tensors: tokens, targets and documents of a batch, in one call.

    Args:
        x: a tensor, or a tree of them, the same on all ranks of the axis; entries that are `fs.Shared` stay whole.
        dim: the dim of tokens, in every leaf.
        axis: the mesh axis that cuts it.
        mesh: by default the mesh of `fs.set_mesh`; where there is none, or it lacks the axis, `x` comes back as it is.

    Returns:
        A tree of contiguous tensors, each with this rank's part of `dim`, in the order of `positions`.

    Raises:
        BatchError: a length is no multiple of twice the size of the axis, or a leaf has no such dim, or is a result of
            this function or of `fs.local_batch`.

    Example:
        >>> batch = {"tokens": torch.tensor([[5, 3, 9, 4]]), "targets": torch.tensor([[3, 9, 4, 1]])}
        >>> with fs.set_mesh(fs.make_mesh(dp=-1, device="cpu")):
        ...     fs.ops.cut_sequence(batch)["tokens"]  # on two ranks of cp: [[5, 4]] and [[3, 9]]
        tensor([[5, 3, 9, 4]])
    """
    return cut_leaves(x, dim, axis, mesh)


def cut_leaves(x: Tree, dim: int, axis: str, mesh: Mesh | None) -> Tree:
    """`cut_sequence` as a part of a public function, which errors name."""
    size, index = _place(axis, mesh)
    wrong: list[str] = []
    ways: set[str] = set()
    for path, leaf in tree.named_leaves(rows_of(x)).items():
        what = f"{path or 'the tensor'} is {kind_text(leaf)}"
        if not isinstance(leaf, Tensor) or not -leaf.ndim <= dim < leaf.ndim:
            wrong.append(f"{what}: no dim {dim} to cut")
            ways.add("Say where tokens are with dim=, and mark an entry without tokens: fs.Shared(x).")
        elif not torch.compiler.is_compiling() and _parts.get(leaf) == axis:
            wrong.append(f"{what}: it has only this rank's tokens already")
            ways.add("Cut a batch once: with fs.local_batch alone, or rows of your own with fs.ops.cut_sequence.")
        elif why := _uncut(leaf.shape[dim], size):
            wrong.append(f"{what}: dim {dim} has {leaf.shape[dim]} tokens")
            ways.add(why)
    if wrong:
        rule = f"cannot cut {len(wrong)} of {len(tree.leaves(x))} leaves over {axis}: {size}."
        raise BatchError(message(rule, wrong, " ".join(sorted(ways))))
    if size == 1:
        return x

    def part(leaf: Tensor) -> Tensor:
        chunks = leaf.chunk(2 * size, dim) if leaf.shape[dim] else (leaf,) * 2 * size
        own = torch.cat([chunks[number] for number in zigzag(size)[index]], dim)
        if not torch.compiler.is_compiling():
            _parts[own] = axis
        return own

    return map_rows(part, x)


def _place(axis: str, mesh: Mesh | None) -> tuple[int, int]:
    """The size of an axis, and this rank's coordinate along it."""
    return axis_size(axis, mesh), axis_index(axis, mesh)


def _uncut(length: int, size: int) -> str:
    """Which lengths would do, where this one does not."""
    if size == 1 or length % (2 * size) == 0:
        return ""
    below = length - length % (2 * size)
    near = " or ".join(str(n) for n in (below, below + 2 * size) if n)
    return f"Each rank takes an early and a late chunk: make the length a multiple of {2 * size}, such as {near}."
