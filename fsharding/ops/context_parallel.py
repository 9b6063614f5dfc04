"""Sequence sharding for context parallelism: of 2n chunks, rank i of n has chunks i and 2n-1-i."""

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
"""Maps each live result of `cut_leaves` to its mesh axis. Sharding it a second time would drop tokens silently."""


@functools.lru_cache(maxsize=256)
def zigzag(size: int) -> tuple[tuple[int, int], ...]:
    """Return the two chunks of each of `size` ranks, out of `2 * size`; a single rank has both."""
    return tuple((index, 2 * size - 1 - index) for index in range(size))


def zigzag_order(length: int, size: int, device: torch.device | str | None = None) -> Tensor:
    """Return the global positions of all tokens of `size` ranks, one rank after another: int64[length]."""
    every = torch.arange(length, device=device)
    if size == 1:
        return every
    return every.view(2 * size, -1)[torch.tensor(zigzag(size), device=device).flatten()].flatten()


@public
def positions(
    length: int, *, axis: str = "cp", mesh: Mesh | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Return the global positions of this rank's tokens.

    Args:
        length: Number of tokens in the full sequence.
        axis: Mesh axis that shards the sequence. Without a mesh, or on a mesh without it, nothing is sharded.
        mesh: Device mesh; by default the one of `fs.set_mesh`.
        device: Device of the result; by default torch's default device.

    Returns:
        int64[tokens of this rank], ascending.

    Raises:
        BatchError: The length is not a multiple of twice the size of the axis.

    Example:
        >>> fs.ops.positions(8)  # on two ranks of cp: [0, 1, 6, 7] and [2, 3, 4, 5]
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    size = axis_size(axis, mesh)
    if why := _why_uneven(length, size):
        raise BatchError(message(f"cannot shard a sequence of {length} over {axis}: {size}.", mend=why))
    return zigzag_order(length, size, device).view(size, -1)[axis_index(axis, mesh)]


@public
def document_positions(documents_BT: Tensor, *, axis: str = "cp", mesh: Mesh | None = None) -> Tensor:
    """Return the position of each of this rank's tokens inside its document, from 0. Collective along the axis.

    Args:
        documents_BT: Integer [B, T], the document of each of this rank's tokens, in the order of `cut_sequence`. Tokens
            of a document are contiguous in the full sequence: a new number starts a new document.
        axis: Mesh axis that shards the sequence. Without a mesh, or on a mesh without it, nothing is sharded.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        int64[B, T].

    Raises:
        SpecError: `documents_BT` does not have two dims.

    Example:
        >>> fs.ops.document_positions(torch.tensor([[7, 7, 7, 8, 8]]))
        tensor([[0, 1, 2, 0, 1]])
    """
    if documents_BT.ndim != 2:
        mend = "Pass the document of each token, as [B, T]."
        raise SpecError(message("needs documents [B, T].", [kind_text(documents_BT)], mend))
    size = axis_size(axis, mesh)
    order = zigzag_order(documents_BT.shape[1] * size, size, documents_BT.device)
    if size > 1:
        documents_BT = all_gather(documents_BT, axis, dim=1, mesh=mesh).index_select(1, order.argsort())
    at_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.zeros_like(documents_BT, dtype=torch.int64)
    begins_BT[:, 1:] = at_T[1:] * (documents_BT[:, 1:] != documents_BT[:, :-1])
    return (at_T - begins_BT.cummax(1).values).index_select(1, order.view(size, -1)[axis_index(axis, mesh)])


@public
def cut_sequence(x: Tree, *, dim: int = 1, axis: str = "cp", mesh: Mesh | None = None) -> Tree:
    """Shard a batch along its tokens: this rank's tokens, targets and documents, in one call.

    Args:
        x: A tensor, or a tree of tensors, the same on all ranks of the axis; `fs.Shared` entries stay full.
        dim: Dim of the tokens, in every leaf.
        axis: Mesh axis that shards the sequence. Without a mesh, or on a mesh without it, nothing is sharded.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        A tree of contiguous tensors with this rank's tokens, in the order of `positions`; `x` itself on one rank.

    Raises:
        BatchError: A length is not a multiple of twice the size of the axis; or a leaf lacks the dim, or is already
            sharded, by this function or by `fs.local_batch`.

    Example:
        >>> batch = {"tokens": torch.tensor([[5, 3, 9, 4]]), "targets": torch.tensor([[3, 9, 4, 1]])}
        >>> fs.ops.cut_sequence(batch)["tokens"]  # on two ranks of cp: [[5, 4]] and [[3, 9]]
        tensor([[5, 3, 9, 4]])
    """
    return cut_leaves(x, dim, axis, mesh)


def cut_leaves(x: Tree, dim: int, axis: str, mesh: Mesh | None) -> Tree:
    """Shard leaves as `cut_sequence` does, for other public functions, whose name then begins the error."""
    size = axis_size(axis, mesh)
    wrong: list[str] = []
    ways: set[str] = set()
    for path, leaf in tree.named_leaves(rows_of(x)).items():
        what = f"{path or 'the tensor'} is {kind_text(leaf)}"
        if not isinstance(leaf, Tensor) or not -leaf.ndim <= dim < leaf.ndim:
            wrong.append(f"{what}: no dim {dim} to shard")
            ways.add("Pass the dim of tokens as dim=, and mark an entry without tokens: fs.Shared(x).")
        elif not torch.compiler.is_compiling() and _parts.get(leaf) == axis:
            wrong.append(f"{what}: it has only this rank's tokens already")
            ways.add("Shard a batch once: with fs.local_batch alone, or your own rows with fs.ops.cut_sequence.")
        elif why := _why_uneven(leaf.shape[dim], size):
            wrong.append(f"{what}: dim {dim} has {leaf.shape[dim]} tokens")
            ways.add(why)
    if wrong:
        rule = f"cannot shard {len(wrong)} of {len(tree.leaves(x))} leaves over {axis}: {size}."
        raise BatchError(message(rule, wrong, " ".join(sorted(ways))))
    if size == 1:
        return x
    numbers = zigzag(size)[axis_index(axis, mesh)]

    def part(leaf: Tensor) -> Tensor:
        # `chunk` returns a single empty tensor for an empty dim.
        chunks = leaf.chunk(2 * size, dim) if leaf.shape[dim] else (leaf,) * 2 * size
        own = torch.cat([chunks[number] for number in numbers], dim)
        if not torch.compiler.is_compiling():
            _parts[own] = axis
        return own

    return map_rows(part, x)


def _why_uneven(length: int, size: int) -> str:
    """Return which lengths to use instead; "" if this one can be sharded."""
    if size == 1 or length % (2 * size) == 0:
        return ""
    below = length - length % (2 * size)
    near = " or ".join(str(n) for n in (below, below + 2 * size) if n)
    return f"Each rank takes an early and a late chunk: make the length a multiple of {2 * size}, such as {near}."
