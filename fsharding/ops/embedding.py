"""Embedding tables over a model axis: each rank stores some rows, and the full table is never gathered."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from fsharding.base import _functorch
from fsharding.base.dtypes import wide
from fsharding.base.errors import DataError, message
from fsharding.base.public import public
from fsharding.formats.quantized import Weight, dequantize
from fsharding.mesh.device_mesh import Mesh, axis_index, axis_size
from fsharding.ops.grad_sink import put_term, takes_terms
from fsharding.ops.linear import reduce_from_tp
from fsharding.sharding import boxes
from fsharding.sharding.leaf_plan import kind_text

__all__ = ["checked_ids", "embedding", "look_up"]

_SUMS_WIDE = ("cuda",)
"""Device types whose kernel for the gradient of an embedding sums in float32, whatever the dtype of the table."""

_ADDED_IN_ORDER = (torch.float32, torch.float64)
"""Dtypes in which `index_add_` sums the vectors of a token in the order of the gradient of `F.embedding`."""


@public
def embedding(
    tokens: Tensor,
    table_VD: Weight,
    *,
    vocab: int | None = None,
    axis: str = "tp",
    sequence_dim: int | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """Look up tokens in a table whose rows are sharded over an axis: `[..] -> [.., D]` (Megatron-LM, arXiv:1909.08053).

    The gradient of the table is summed in float32 at least and rounded once; `F.embedding` sums in bfloat16 on a CPU.

    Args:
        tokens: Integer ids [...], the same on all ranks of the axis.
        table_VD: This rank's ceil-chunk of rows, or all rows if nothing shards the table. A `Quantized` is dequantized.
        vocab: V, the number of rows of the full table; by default the rows here.
        axis: Mesh axis that shards the rows. Without a mesh, or on a mesh without it, it has one rank.
        sequence_dim: Dim of the result that is sharded over the axis (sequence parallelism), or None.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        [..., D] in the dtype of the table, the same on all ranks of the axis, or sharded along `sequence_dim`.

    Raises:
        SpecError: The size of `sequence_dim` is not a multiple of the axis.
        DataError: Tokens aren't integers, or, on the CPU, are outside the vocabulary.

    Example:
        >>> table = torch.tensor([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]])
        >>> fs.ops.embedding(torch.tensor([2, 0]), table)
        tensor([[2.0000, 2.5000],
                [0.0000, 0.5000]])
    """
    table_VD = dequantize(table_VD)
    rows = table_VD.shape[0]
    tokens = checked_ids("tokens", tokens, vocab or rows)
    size = axis_size(axis, mesh)
    if size == 1 or vocab is None or rows == vocab:
        return look_up(tokens, table_VD)
    start, stop = boxes.chunk(vocab, size, axis_index(axis, mesh))
    own = (tokens >= start) & (tokens < stop)
    if start < stop:
        result = look_up((tokens - start).where(own, 0), table_VD) * own.unsqueeze(-1)
    else:
        # A rank without rows: the sum of its empty table keeps the result in autograd's graph.
        result = table_VD.new_zeros(*tokens.shape, table_VD.shape[1]) + table_VD.sum()
    return reduce_from_tp(result, axis, sequence_dim=sequence_dim, mesh=mesh)


def look_up(tokens: Tensor, table_VD: Tensor, padding_idx: int | None = None) -> Tensor:
    """Look up rows as `F.embedding` does, but sum the gradient of the table in float32 at least."""
    tracked = table_VD.requires_grad or _functorch.in_functorch()
    if tracked and table_VD.dtype not in _ADDED_IN_ORDER and table_VD.device.type not in _SUMS_WIDE:
        # Torch's kernel adds row by row in the dtype of the table there: a sum of ones in bfloat16 stops at 256.
        return F.embedding(tokens, table_VD.to(wide(table_VD.dtype)), padding_idx).to(table_VD.dtype)
    if padding_idx is not None or table_VD.dtype not in _ADDED_IN_ORDER or not takes_terms(table_VD):
        return F.embedding(tokens, table_VD, padding_idx)
    return cast(Tensor, _LookUp.apply(tokens, table_VD))


class _LookUp(Function):
    """Autograd's own lookup, but with the gradient of the table written to its destination."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table_VD: Tensor) -> Tensor:
        ctx.rows = table_VD.shape[0]
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, table_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        ids = tokens.flatten()
        vectors = grads[0].reshape(tokens.numel(), grads[0].shape[-1])
        if put_term(ctx.next_functions[1][0], vectors.dtype, lambda home: home.zero_().index_add_(0, ids, vectors)):
            return None, None
        return None, torch.ops.aten.embedding_dense_backward(vectors, ids, ctx.rows, -1, False)


def checked_ids(name: str, ids: Tensor, vocab: int, *, ignore_index: int | None = None) -> Tensor:
    """Return ids as int64; check their range on the CPU only, since other devices would have to wait."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        text = f"needs {name} that are integers, got {kind_text(ids)}."
        raise DataError(message(text, mend=f"Pass {name}.long()."))
    ids = ids.long()
    # A tensor that a transform, a trace or a compiler has wrapped has no values to check.
    if torch.compiler.is_compiling() or type(ids) is not Tensor or ids.device.type != "cpu" or not ids.numel():
        return ids
    if _functorch.innermost(ids) is not ids:
        return ids
    values = ids.detach().numpy()  # ids on the CPU: the host waits for no device
    low = int(values.min())
    high = int(values.max())
    if low >= 0 and high < vocab:
        return ids
    outside = (values < 0) | (values >= vocab)
    wrong = values[outside if ignore_index is None else outside & (values != ignore_index)]
    if wrong.size:
        row = f"{wrong.size} of {ids.numel()}, the first is {int(wrong[0])}"
        mend = f"Ids are 0 to {vocab - 1}" + ("" if ignore_index is None else f", or {ignore_index} to ignore") + "."
        mend += f" Use a vocab_size of at least {high + 1}, or the tokenizer of this model." if high >= vocab else ""
        raise DataError(message(f"got {name} outside the vocabulary.", [row], mend))
    return ids
