"""Buffers of a state after a step: the values of one rank on all of them, in memory of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from fsharding.base.public import public
from fsharding.comm.transport import start_sum
from fsharding.mesh.device_mesh import Mesh, everyone
from fsharding.mesh.failures import naming_lost

__all__ = ["Buffers", "sync_buffers"]

Buffers: TypeAlias = Mapping[str, Tensor]
"""Tensors by name."""

_WORD = torch.int64.itemsize


@public
def sync_buffers(buffers: Buffers, mesh: Mesh) -> Buffers:
    """Copy the buffers of the first rank of a mesh to all of its ranks, as torch's DDP does. Collective.

    A train step does this at its end, since the statistics of each rank are of its own rows. What is the same on all
    ranks, such as sums over data ranks that `nn.SyncBatchNorm` takes, stays as it is.

    Args:
        buffers: plain tensors by name, with the same names, shapes and dtypes on every rank.
        mesh: of the state.

    Returns:
        New tensors, equal in every bit on all ranks.

    Example:
        >>> fs.sync_buffers({"mean": torch.ones(2)}, fs.make_mesh(dp=-1, device="cpu"))
        {'mean': tensor([1., 1.])}
    """
    if not buffers:
        return {}
    names = sorted(buffers)
    group = everyone(mesh)
    rows = [_bytes_of(buffers[name]) for name in names]
    size = sum(len(row) for row in rows)
    flat = torch.zeros(math.ceil(size / _WORD) * _WORD, dtype=torch.uint8, device=rows[0].device)
    if group.index == 0:
        torch.cat(rows, out=flat[:size])
    with naming_lost("fs.sync_buffers", mesh):
        total = start_sum(flat.view(torch.int64), group, torch.int64).wait()
    parts = total.view(torch.uint8)[:size].split([len(row) for row in rows])
    found = dict(zip(names, parts, strict=True))
    return {name: _tensor_of(found[name], x) for name, x in buffers.items()}


def _bytes_of(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _tensor_of(part: Tensor, like: Tensor) -> Tensor:
    """A tensor of bytes that may be the transport's; its copy begins at a multiple of any item's size."""
    return part.clone().view(like.dtype).view(like.shape)
