"""Embedding tables over a model axis: each rank has some rows, and nobody ever has the whole table.

In: token ids, this rank's rows. Out: the vectors of all tokens, on every rank or cut along the sequence.
A rank looks up the ids that it has, and zeros for the others; the sum over ranks is the lookup.
Law: what comes out, and the gradient of the table, is that of the whole table on one process.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fsharding import boxes
from fsharding.mesh import Mesh, axis_index, axis_size
from fsharding.ops.linear import leave

__all__ = ["embedding"]


def embedding(
    tokens: Tensor,
    table_VD: Tensor,
    *,
    vocab: int | None = None,
    axis: str = "tp",
    sequence_dim: int | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """Looks up tokens in a table of which each rank has a ceil-chunk of the rows.

    Args:
        tokens: int64[...], the same on all ranks of the axis.
        table_VD: this rank's rows; all of them where nothing cuts the table.
        vocab: V, the number of rows of the whole table; by default those that are here.
        axis: that cuts the rows, if it does.
        sequence_dim: the dim of the result that is cut over the axis outside of regions, if it is.
        mesh: by default that of `fs.set_mesh`.

    Returns:
        [..., D] in the dtype of the table, the same on all ranks of the axis, or cut along `sequence_dim`.

    Raises:
        SpecError: the size of `sequence_dim` is not a multiple of the axis.
    """
    rows = table_VD.shape[0]
    size = axis_size(axis, mesh)
    if size == 1 or vocab is None or rows == vocab:
        return F.embedding(tokens, table_VD)
    start, stop = boxes.chunk(vocab, size, axis_index(axis, mesh))
    mine = (tokens >= start) & (tokens < stop)
    if start < stop:
        found = F.embedding((tokens - start).where(mine, 0), table_VD) * mine.unsqueeze(-1)
    else:
        found = table_VD.new_zeros(*tokens.shape, table_VD.shape[1]) + table_VD.sum()
    return leave(found, axis, sequence_dim=sequence_dim, mesh=mesh)
