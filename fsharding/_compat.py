# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportDeprecated=false
"""Every private or version-dependent torch API that we touch, in one place; each has a canary test.

In and out: plain tensors, storages, groups. Supports torch >= 2.11. When torch changes, this file changes and no other.
Nothing here knows about shardings.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "all_gather_flat",
    "drop_local",
    "foreach_add",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul",
    "foreach_mul_",
    "foreach_zero_",
    "fused_adamw_",
    "in_functorch",
    "local_tensor",
    "make_dtensor",
    "meshless_device_mesh",
    "reduce_scatter_flat",
    "set_group_timeout",
    "storage_id",
    "storage_users",
]


def foreach_add(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
    """Adds the tensors of two lists pairwise; unlike torch's, takes empty lists, as do the others here."""
    return list(torch._foreach_add(list(xs), list(ys))) if xs else []


def foreach_add_(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    """Adds the second list to the first in place."""
    if xs:
        torch._foreach_add_(list(xs), list(ys))


def foreach_copy_(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    """Copies the second list into the first, casting as needed."""
    if xs:
        torch._foreach_copy_(list(xs), list(ys))


def foreach_mul(xs: Sequence[Tensor], scalar: float) -> list[Tensor]:
    """Multiplies the tensors of a list by a number."""
    return list(torch._foreach_mul(list(xs), scalar)) if xs else []


def foreach_mul_(xs: Sequence[Tensor], scalar: float) -> None:
    """Multiplies the tensors of a list by a number in place."""
    if xs:
        torch._foreach_mul_(list(xs), scalar)


def foreach_zero_(xs: Sequence[Tensor]) -> None:
    """Sets the tensors of a list to zero."""
    if xs:
        torch._foreach_zero_(list(xs))


def local_tensor(x: DTensor) -> Tensor:
    """The local tensor of a DTensor itself, without the view and the graph node that `to_local` makes."""
    return x._local_tensor


def make_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]) -> DTensor:
    """A DTensor of a local tensor as it stands: `from_local` takes the shape `()` for none given, and is slower."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    meta = TensorMeta(torch.Size(shape), tuple(strides), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def drop_local(x: DTensor) -> None:
    """Leaves a DTensor without its local tensor, whose memory is free when nobody else has it."""
    x._local_tensor = x._local_tensor.new_empty(0)


def storage_id(x: Tensor) -> int:
    """Identity of a tensor's storage: equal for all views of one buffer, also for fake tensors."""
    return x.untyped_storage()._cdata


def storage_users(storage_cdata: int) -> int:
    """How many tensors and Python objects hold a storage."""
    return torch._C._storage_Use_Count(storage_cdata)


def in_functorch() -> bool:
    """Whether we run under a torch.func transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Gives a group that torch made with its 30 minute default another timeout."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def meshless_device_mesh(device_type: str, names: tuple[str, ...], grid: Tensor, rank: int) -> DeviceMesh:
    """A DeviceMesh without process groups, as seen by one of the ranks in its grid."""
    return DeviceMesh(device_type, grid, mesh_dim_names=names, _init_backend=False, _rank=rank)


def all_gather_flat(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts the backend's own all-gather of equal flat shards (renamed in torch 2.13)."""
    op: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return op(out, x, group=group, async_op=True)


def reduce_scatter_flat(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts the backend's own reduce-scatter of equal flat shards (renamed in torch 2.13)."""
    op: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return op(out, x, group=group, async_op=True)


def fused_adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    mu: list[Tensor],
    nu: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
) -> None:
    """torch's fused Adam kernel without weight decay: updates params, mu and nu in place."""
    torch._fused_adamw_(
        params, grads, mu, nu, [], steps,
        lr=lr, beta1=b1, beta2=b2, weight_decay=0.0, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
