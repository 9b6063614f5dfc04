"""Buffers of a state after a step: the first rank's values on every rank, in new memory."""

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
    """Copy the buffers of a mesh's first rank to all of its ranks, as torch's DDP does. Collective.

    Every train step ends with this, because each rank computes statistics of its own rows. Buffers that are equal on
    all ranks already, such as those of `nn.SyncBatchNorm`, don't change.

    Args:
        buffers: Plain tensors by name, with the same names, shapes and dtypes on every rank.
        mesh: Mesh of the state.

    Returns:
        New tensors, bitwise identical on all ranks.

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
    # A sum of int64 in which all ranks but the first have zeros: it is exact, unlike one of floats (-0.0, NaN bits).
    if group.index == 0:
        torch.cat(rows, out=flat[:size])
    with naming_lost("fs.sync_buffers", mesh):
        total = start_sum(flat.view(torch.int64), group, torch.int64).wait()
    parts = total.view(torch.uint8)[:size].split([len(row) for row in rows])
    found = dict(zip(names, parts, strict=True))
    return {name: _tensor_of(found[name], x) for name, x in buffers.items()}


def _bytes_of(x: Tensor) -> Tensor:
    """View a tensor as bytes; a contiguous one isn't copied."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _tensor_of(part: Tensor, like: Tensor) -> Tensor:
    """Copy bytes, which may be in memory of the transport, to a tensor whose address is aligned for any dtype."""
    return part.clone().view(like.dtype).view(like.shape)
