"""Collectives as linear maps with their transposes, valid under autograd and every transform of torch.func."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, _functorch
from fsharding.base.dtypes import wide
from fsharding.base.errors import SpecError, TransformError, message, report
from fsharding.base.public import public, refuse
from fsharding.comm.bucket import plan_bucket
from fsharding.comm.native import Message
from fsharding.comm.reduce import plain_terms
from fsharding.comm.transport import send_recv, start_sum, transport_for
from fsharding.mesh.device_mesh import Group, Mesh, axis_group, axis_size, current_mesh

__all__ = [
    "Linear", "all_to_all", "all_to_all_rows", "apply_linear", "all_gather", "ppermute", "psum", "reduce_scatter",
    "pvary",
]  # fmt: skip


class Linear(Protocol):
    """A linear map between local tensors that all ranks of a group apply together."""

    def run(self, x: Tensor) -> Tensor:
        """The map itself, of a plain tensor, outside autograd."""
        ...

    def dual(self) -> Linear:
        """Its transpose."""
        ...

    def batched(self) -> Linear:
        """The same map of tensors with a new first dim, which it leaves alone."""
        ...


class _Apply(Function):
    """Applies a linear map; its derivative in every direction is the map or its dual."""

    @staticmethod
    def forward(x: Tensor, op: Linear) -> Tensor:
        def linear(x: Tensor) -> Tensor:
            return apply_linear(x, op)

        return _functorch.recorded(x, op.run, linear)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear], output: Tensor) -> None:
        ctx.op = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return apply_linear(grads[0], ctx.op.dual()), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return apply_linear(tangents[0], ctx.op)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], x: Tensor, op: Linear) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        return apply_linear(x.movedim(in_dims[0], 0), op.batched()), 0


@_compat.outside_of_graphs
def apply_linear(x: Tensor, op: Linear) -> Tensor:
    """Apply a linear map so that autograd and torch.func know its derivatives; refuse a DTensor."""
    if isinstance(x, DTensor):
        mend = "Give it x.to_local(); or call it inside fs.shard_map, where leaves are local."
        raise TransformError(report("fs.ops takes local tensors, got a DTensor.", mend=mend))
    return cast(Tensor, _functorch.apply(_Apply, x, op))


@dataclass(frozen=True)
class _Map:
    """What the maps of a group have in common."""

    # Fields whose names end with `dim` count dims of the tensor: under a vmap, which adds a first one, they go up.
    group: Group

    def batched(self) -> Self:
        dims = {x.name: getattr(self, x.name) + 1 for x in fields(self) if x.name.endswith("dim")}
        return replace(self, **dims)


@dataclass(frozen=True)
class _Gather(_Map):
    """Joins shards along a dim; `size` is the global size, cut in ceil-chunks."""

    dim: int
    size: int

    def run(self, x: Tensor) -> Tensor:
        shape = (*x.shape[: self.dim], self.size, *x.shape[self.dim + 1 :])
        whole = _compat.fresh(shape, x.dtype, x.device)
        bucket = plan_bucket(((shape, self.dim),), (self.group.size,))
        transport_for(self.group, x.device).all_gather_into(bucket, [x], [whole]).wait()
        return whole

    def dual(self) -> Linear:
        return _Scatter(self.group, self.dim, self.size)


@dataclass(frozen=True)
class _Scatter(_Map):
    """Sums over the group and keeps this member's ceil-chunk along a dim."""

    dim: int
    size: int

    def run(self, x: Tensor) -> Tensor:
        terms = plain_terms(((tuple(x.shape), self.dim),), (self.group.size,), x.dtype, scatter=True)
        reduction = transport_for(self.group, x.device).reduction(terms, wide(x.dtype))
        reduction.add([0], [x])
        return reduction.start().wait()[0].to(x.dtype)

    def dual(self) -> Linear:
        return _Gather(self.group, self.dim, self.size)


@dataclass(frozen=True)
class _Psum(_Map):
    """The sum over the group, on every member."""

    def run(self, x: Tensor) -> Tensor:
        return start_sum(x, self.group, wide(x.dtype)).wait().to(x.dtype)

    def dual(self) -> Linear:
        return _Vary(self.group)


@dataclass(frozen=True)
class _Vary(_Map):
    """The identity on a value that all members share; where it goes each member takes its own way."""

    def run(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    def dual(self) -> Linear:
        return _Psum(self.group)


@dataclass(frozen=True)
class _AllToAll(_Map):
    """Cuts along one dim, sends piece i to member i, joins what comes along another dim."""

    split_dim: int
    concat_dim: int

    def run(self, x: Tensor) -> Tensor:
        k = self.group.size
        pieces = x.unflatten(self.split_dim, (k, x.shape[self.split_dim] // k)).movedim(self.split_dim, 0)
        shape = pieces.shape[1:]
        exchange = transport_for(self.group, x.device).all_to_all(math.prod(shape), x.dtype)
        exchange.own.view(pieces.shape).copy_(pieces)
        handle = exchange.start()
        rows = handle.wait()
        if isinstance(rows, Tensor):
            length = shape[self.concat_dim]
            whole = (*shape[: self.concat_dim], k * length, *shape[self.concat_dim + 1 :])
            joined = _compat.fresh(whole, x.dtype, x.device)
            received = rows.view(pieces.shape).movedim(0, self.concat_dim)
            joined.unflatten(self.concat_dim, (k, length)).copy_(received)
        else:
            joined = torch.cat([row.view(shape) for row in rows], self.concat_dim)
        handle.release()
        return joined

    def dual(self) -> Linear:
        return _AllToAll(self.group, self.concat_dim, self.split_dim)


@dataclass(frozen=True)
class _AllToAllRows(_Map):
    """Sends the next `send[i]` indices along a dim to member i, joins the `receive[i]` that come from member i."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    dim: int = 0

    def run(self, x: Tensor) -> Tensor:
        front = x.movedim(self.dim, 0).contiguous()
        handle = transport_for(self.group, x.device).all_to_all_v(front, self.send, self.receive)
        return handle.wait().movedim(0, self.dim)

    def dual(self) -> Linear:
        return replace(self, send=self.receive, receive=self.send)


@dataclass(frozen=True)
class _Ppermute(_Map):
    """Sends to the partner of each (source, target) pair; who has no source gets zeros."""

    pairs: tuple[tuple[int, int], ...]

    def run(self, x: Tensor) -> Tensor:
        group = self.group
        x = x.contiguous()
        target = dict(self.pairs).get(group.index)
        source = {to: sender for sender, to in self.pairs}.get(group.index)
        out = torch.zeros_like(x)
        if source == group.index:
            out.copy_(x)
        sends = [Message(group.ranks[target], 0, x)] if target not in (None, group.index) else []
        receives = [Message(group.ranks[source], 0, out)] if source not in (None, group.index) else []
        send_recv(sends, receives, group, x.device).wait()
        return out

    def dual(self) -> Linear:
        return _Ppermute(self.group, tuple((to, sender) for sender, to in self.pairs))


def _group(axis: str | Sequence[str], mesh: Mesh | None) -> Group:
    if not isinstance(axis, str | tuple | list) or not all(isinstance(name, str) for name in axis):
        raise refuse("an axis or several", axis, 'Name them: "dp", or ("dp", "cp").')
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in axes:
        axis_size(name, mesh)  # refuses a name that no mesh can have; a group would leave it out
    return axis_group(mesh if mesh is not None else current_mesh(), axes)


def _dim(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        text = f"got dim {dim} of a tensor of shape {tuple(x.shape)}."
        raise SpecError(message(text, mend=f"Dims go from {-x.ndim} to {x.ndim - 1}." if x.ndim else ""))
    return dim % x.ndim


@public
@_compat.outside_of_graphs
def all_gather(
    x: Tensor, axis: str | Sequence[str], *, dim: int, size: int | None = None, mesh: Mesh | None = None
) -> Tensor:
    """Joins the shards of all ranks along an axis. Transpose of `reduce_scatter`.

    Args:
        x: this rank's ceil-chunk along `dim`, any dtype.
        axis: one axis or several, major first.
        dim: the tensor dim that is cut.
        size: its global size; by default all shards are as long as this one.
        mesh: by default the mesh of `fs.set_mesh`.

    Returns:
        The whole tensor, the same on every rank of the group; dtype of `x`.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> params = fs.shard({"w": torch.arange(4.0)}, layout)
        >>> fs.shard_map(lambda p: fs.ops.all_gather(p["w"].value, "dp", dim=0))(params)
        tensor([0., 1., 2., 3.])
    """
    group = _group(axis, mesh)
    dim = _dim(x, dim)
    return apply_linear(x, _Gather(group, dim, x.shape[dim] * group.size if size is None else size))


@public
@_compat.outside_of_graphs
def reduce_scatter(x: Tensor, axis: str | Sequence[str], *, dim: int, mesh: Mesh | None = None) -> Tensor:
    """Sums over an axis and keeps this rank's ceil-chunk (a reduce-scatter). Transpose of `all_gather`.

    Args:
        x: this rank's term of the sum, of the whole shape.
        axis: one axis or several, major first.
        dim: the tensor dim to cut.
        mesh: by default the mesh of `fs.set_mesh`.

    Returns:
        This rank's chunk of the sum; summed in float32 at least, dtype of `x`.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> with fs.set_mesh(mesh):
        ...     part = fs.ops.reduce_scatter(torch.ones(4), "dp", dim=0)  # on two ranks tensor([2., 2.])
        >>> part.sum()
        tensor(4.)
    """
    dim = _dim(x, dim)
    return apply_linear(x, _Scatter(_group(axis, mesh), dim, x.shape[dim]))


@public
@_compat.outside_of_graphs
def psum(x: Tensor, axis: str | Sequence[str], *, mesh: Mesh | None = None) -> Tensor:
    """The sum over an axis, on every rank. Transpose of `pvary`.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> with fs.set_mesh(mesh):
        ...     fs.ops.psum(torch.tensor(128 // mesh.size()), ("dp", "cp"))  # the tokens of all data ranks
        tensor(128)
    """
    return apply_linear(x, _Psum(_group(axis, mesh)))


@public
@_compat.outside_of_graphs
def pvary(x: Tensor, axis: str | Sequence[str], *, mesh: Mesh | None = None) -> Tensor:
    """Marks that ranks along an axis will use a shared value in different ways. The identity; transpose of `psum`.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> scale = torch.ones(2, requires_grad=True)  # the same on all ranks of tp, each of which has other tokens
        >>> (fs.ops.pvary(scale, "tp", mesh=mesh) * torch.tensor([3.0, 4.0])).sum().backward()
        >>> scale.grad  # summed over tp
        tensor([3., 4.])
    """
    return apply_linear(x, _Vary(_group(axis, mesh)))


@public
@_compat.outside_of_graphs
def all_to_all(
    x: Tensor, axis: str | Sequence[str], *, split_dim: int, concat_dim: int, mesh: Mesh | None = None
) -> Tensor:
    """Cuts along `split_dim`, sends piece i to rank i of the axis, joins along `concat_dim`.

    Its transpose is itself with the dims exchanged.

    Raises:
        SpecError: the size of `split_dim` is not a multiple of the axis.

    Example:
        >>> x_BHTE = torch.zeros(2, 8, 16, 4)  # all heads of this rank's tokens
        >>> with fs.set_mesh(fs.make_mesh(dp=-1, device="cpu")):
        ...     fs.ops.all_to_all(x_BHTE, "cp", split_dim=1, concat_dim=2).shape  # on two ranks: [2, 4, 32, 4]
        torch.Size([2, 8, 16, 4])
    """
    group = _group(axis, mesh)
    split_dim, concat_dim = (_dim(x, d) for d in (split_dim, concat_dim))
    if x.shape[split_dim] % group.size:
        text = f"cannot cut dim {split_dim} of size {x.shape[split_dim]} over {axis} of size {group.size}."
        raise SpecError(message(text, mend="Pad the dim to a multiple of the axis."))
    return apply_linear(x, _AllToAll(group, split_dim, concat_dim))


@public
@_compat.outside_of_graphs
def all_to_all_rows(
    x_M: Tensor,
    axis: str | Sequence[str],
    *,
    send: Sequence[int],
    receive: Sequence[int],
    mesh: Mesh | None = None,
) -> Tensor:
    """An uneven all-to-all: the next `send[i]` rows go to rank i of the axis, in order of ranks.

    Its transpose is itself with `send` and `receive` exchanged.

    Args:
        x_M: rows `[M, ...]`, those for rank 0 first.
        axis: one axis or several, major first.
        send: how many rows go to each rank; they sum to M.
        receive: how many come from each: what that rank sends to this one.
        mesh: by default the mesh of `fs.set_mesh`.

    Returns:
        The rows that came, rank 0's first; any of the numbers may be 0.

    Raises:
        SpecError: a number for each rank is needed, and they have to sum to M.

    Example:
        >>> rows = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
        >>> with fs.set_mesh(fs.make_mesh(dp=-1, device="cpu")):
        ...     fs.ops.all_to_all_rows(rows, "ep", send=[3], receive=[3])  # a number for each rank
        tensor([[1., 1.],
                [2., 2.],
                [3., 3.]])
    """
    group = _group(axis, mesh)
    if len(send) != group.size or len(receive) != group.size or sum(send) != (x_M.shape[0] if x_M.ndim else -1):
        text = f"cannot send {list(send)} and receive {list(receive)} rows over {axis} of size {group.size}."
        mend = "Give a number for each rank; the numbers in send sum to dim 0."
        raise SpecError(message(text, [f"x has shape {tuple(x_M.shape)}"], mend))
    return apply_linear(x_M, _AllToAllRows(group, tuple(map(int, send)), tuple(map(int, receive))))


@public
@_compat.outside_of_graphs
def ppermute(x: Tensor, axis: str, pairs: Sequence[tuple[int, int]], *, mesh: Mesh | None = None) -> Tensor:
    """Sends `x` along (source, target) pairs of coordinates; ranks that are no target get zeros.

    Its transpose sends along the reversed pairs.

    Raises:
        SpecError: a coordinate outside the axis, or one that sends or receives twice.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> n = mesh.size()
        >>> with fs.set_mesh(mesh):
        ...     fs.ops.ppermute(torch.arange(3), "dp", [(i, (i + 1) % n) for i in range(n)])  # to the next rank
        tensor([0, 1, 2])
    """
    group = _group(axis, mesh)
    sources = [a for a, _ in pairs]
    targets = [b for _, b in pairs]
    inside = all(0 <= c < group.size for c in sources + targets)
    if not inside or len(set(sources)) < len(pairs) or len(set(targets)) < len(pairs):
        text = f"got the pairs {list(pairs)} on axis {axis} of size {group.size}."
        raise SpecError(message(text, mend="Each coordinate sends at most once and receives at most once."))
    return apply_linear(x, _Ppermute(group, tuple((int(a), int(b)) for a, b in pairs)))
