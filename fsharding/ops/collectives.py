"""Collectives as linear maps with their transposes, valid under autograd and every transform of torch.func.

In type lines, "same" is a value that all n ranks of the axis share; other values differ from rank to rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self, TypeAlias, cast

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

Axis: TypeAlias = str | Sequence[str]


class Linear(Protocol):
    """A linear map of local tensors that all ranks of a group apply together."""

    def run(self, x: Tensor) -> Tensor:
        """Apply the map to a plain tensor, outside autograd."""
        ...

    def dual(self) -> Linear:
        """Return the transpose."""
        ...

    def batched(self) -> Linear:
        """Return the same map of tensors with a new first dim, which it leaves alone."""
        ...


class _Apply(Function):
    """Apply a linear map; its forward derivative is the map itself, its backward the dual."""

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
    """Apply a linear map so that autograd and torch.func can differentiate it; refuse a DTensor."""
    if isinstance(x, DTensor):
        mend = "Pass x.to_local(), or call it inside fs.shard_map, where leaves are local."
        raise TransformError(report("fs.ops takes local tensors, got a DTensor.", mend=mend))
    return cast(Tensor, _functorch.apply(_Apply, x, op))


@dataclass(frozen=True)
class _Map:
    """The base of all maps over a group."""

    # A vmap adds a first dim, so `batched` adds 1 to every field whose name ends with `dim`.
    group: Group

    def batched(self) -> Self:
        dims = {x.name: getattr(self, x.name) + 1 for x in fields(self) if x.name.endswith("dim")}
        return replace(self, **dims)


@dataclass(frozen=True)
class _Gather(_Map):
    """Join ceil-chunks along a dim; `size` is the full size, which may be less than the chunks' sum."""

    dim: int
    size: int

    def run(self, x: Tensor) -> Tensor:
        shape = (*x.shape[: self.dim], self.size, *x.shape[self.dim + 1 :])
        full = _compat.fresh(shape, x.dtype, x.device)
        bucket = plan_bucket(((shape, self.dim),), (self.group.size,))
        transport_for(self.group, x.device).all_gather_into(bucket, [x], [full]).wait()
        return full

    def dual(self) -> Linear:
        return _Scatter(self.group, self.dim, self.size)


@dataclass(frozen=True)
class _Scatter(_Map):
    """Sum over the group and keep this member's ceil-chunk along a dim."""

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
    """Sum over the group, on every member."""

    def run(self, x: Tensor) -> Tensor:
        return start_sum(x, self.group, wide(x.dtype)).wait().to(x.dtype)

    def dual(self) -> Linear:
        return _Vary(self.group)


@dataclass(frozen=True)
class _Vary(_Map):
    """Return a value that all members share; from here on each member uses it in its own way."""

    def run(self, x: Tensor) -> Tensor:
        # A view, not x itself: autograd needs a new output to attach this map's backward to.
        return x.view_as(x)

    def dual(self) -> Linear:
        return _Psum(self.group)


@dataclass(frozen=True)
class _AllToAll(_Map):
    """Split along one dim, send part i to member i, and join the received parts along a second dim."""

    split_dim: int
    concat_dim: int

    def run(self, x: Tensor) -> Tensor:
        k = self.group.size
        parts = x.unflatten(self.split_dim, (k, x.shape[self.split_dim] // k)).movedim(self.split_dim, 0)
        shape = parts.shape[1:]
        exchange = transport_for(self.group, x.device).all_to_all(math.prod(shape), x.dtype)
        # The transport's buffer is filled directly: the split makes no other copy.
        exchange.own.view(parts.shape).copy_(parts)
        handle = exchange.start()
        rows = handle.wait()
        if isinstance(rows, Tensor):
            length = shape[self.concat_dim]
            full = (*shape[: self.concat_dim], k * length, *shape[self.concat_dim + 1 :])
            joined = _compat.fresh(full, x.dtype, x.device)
            received = rows.view(parts.shape).movedim(0, self.concat_dim)
            joined.unflatten(self.concat_dim, (k, length)).copy_(received)
        else:
            joined = torch.cat([row.view(shape) for row in rows], self.concat_dim)
        handle.release()
        return joined

    def dual(self) -> Linear:
        return _AllToAll(self.group, self.concat_dim, self.split_dim)


@dataclass(frozen=True)
class _AllToAllRows(_Map):
    """Send the next `send[i]` indices along a dim to member i; join the `receive[i]` from each member i."""

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
    """Send along (source, target) pairs; a member without a source gets zeros."""

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


def _group(axis: Axis, mesh: Mesh | None) -> Group:
    if not isinstance(axis, str | tuple | list) or not all(isinstance(name, str) for name in axis):
        raise refuse("an axis or several", axis, 'Name them: "dp", or ("dp", "cp").')
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in axes:
        axis_size(name, mesh)  # refuses an unknown name, which `axis_group` would leave out
    return axis_group(mesh if mesh is not None else current_mesh(), axes)


def _dim(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        mend = f"Dims go from {-x.ndim} to {x.ndim - 1}." if x.ndim else "Pass a tensor of at least one dim."
        raise SpecError(message(f"got dim {dim} of a tensor of shape {tuple(x.shape)}.", mend=mend))
    return dim % x.ndim


@public
@_compat.outside_of_graphs
def all_gather(x: Tensor, axis: Axis, *, dim: int, size: int | None = None, mesh: Mesh | None = None) -> Tensor:
    """Join the shards of all ranks along a dim: `[.., d, ..] -> [.., n d, ..]` same.

    The backward is `reduce_scatter`. Use it where each rank computes something different with the full tensor.

    Args:
        x: This rank's chunk of ceil(size / n) along `dim`, of any dtype.
        axis: A mesh axis, or several, major first. An axis that the mesh lacks has one rank.
        dim: Dim to join, from -x.ndim to x.ndim - 1.
        size: Full size of that dim, if it isn't a multiple of n; by default n times the size here.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        The full tensor in the dtype of `x`.

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
def reduce_scatter(x: Tensor, axis: Axis, *, dim: int, mesh: Mesh | None = None) -> Tensor:
    """Sum over an axis and keep this rank's ceil-chunk along a dim: `[.., n d, ..] -> [.., d, ..]`.

    The backward is `all_gather`. Use it instead of `psum` if each rank needs only its shard of the sum: half the bytes.

    Args:
        x: This rank's summand, of the full shape.
        axis: A mesh axis, or several, major first. An axis that the mesh lacks has one rank.
        dim: Dim to shard, from -x.ndim to x.ndim - 1.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        This rank's chunk in the dtype of `x`, summed in float32 at least.

    Example:
        >>> part = fs.ops.reduce_scatter(torch.ones(4), "dp", dim=0, mesh=fs.make_mesh(dp=-1, device="cpu"))
        >>> part.sum()  # on two ranks a part is tensor([2., 2.])
        tensor(4.)
    """
    dim = _dim(x, dim)
    return apply_linear(x, _Scatter(_group(axis, mesh), dim, x.shape[dim]))


@public
@_compat.outside_of_graphs
def psum(x: Tensor, axis: Axis, *, mesh: Mesh | None = None) -> Tensor:
    """Sum over an axis: `[..] -> [..]` same (an all-reduce).

    The backward is `pvary`, the identity: the gradient of the sum is taken once per rank, not summed a second time.

    Args:
        x: This rank's summand, the same shape and dtype on all ranks.
        axis: A mesh axis, or several, major first. An axis that the mesh lacks has one rank.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        The sum in the dtype of `x`; floating point is summed in float32 at least.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> fs.ops.psum(torch.tensor(128 // mesh.size()), ("dp", "cp"), mesh=mesh)  # the tokens of all data ranks
        tensor(128)
    """
    return apply_linear(x, _Psum(_group(axis, mesh)))


@public
@_compat.outside_of_graphs
def pvary(x: Tensor, axis: Axis, *, mesh: Mesh | None = None) -> Tensor:
    """Mark that the ranks of an axis use a shared value differently: the identity, `[..]` same `-> [..]`.

    The backward is `psum`, as each rank's gradient covers only its own use. Call it on what the ranks of a model axis
    share, such as a norm's scale, before it meets values that differ. `gather_unit` does it for data axes.

    Args:
        x: A tensor with the same values on all ranks of the axis.
        axis: A mesh axis, or several, major first. An axis that the mesh lacks has one rank.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        A view of `x`.

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
def all_to_all(x: Tensor, axis: Axis, *, split_dim: int, concat_dim: int, mesh: Mesh | None = None) -> Tensor:
    """Split one dim over the ranks of an axis and join a different one: `[n s, c] -> [s, n c]`.

    Part i goes to rank i. The backward is the same with both dims swapped. Use it to shard heads instead of tokens.

    Args:
        x: This rank's tensor, of any dtype.
        axis: A mesh axis, or several, major first. An axis that the mesh lacks has one rank.
        split_dim: Dim to split, of a size that is a multiple of n.
        concat_dim: Dim along which received parts are joined.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        A tensor with `split_dim` n times shorter and `concat_dim` n times longer, in the dtype of `x`.

    Raises:
        SpecError: The size of `split_dim` is not a multiple of the axis.

    Example:
        >>> x_BHTE = torch.zeros(2, 8, 16, 4)  # all heads of this rank's tokens
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")  # with two ranks of cp: [2, 4, 32, 4]
        >>> fs.ops.all_to_all(x_BHTE, "cp", split_dim=1, concat_dim=2, mesh=mesh).shape
        torch.Size([2, 8, 16, 4])
    """
    group = _group(axis, mesh)
    split_dim, concat_dim = (_dim(x, d) for d in (split_dim, concat_dim))
    if x.shape[split_dim] % group.size:
        text = f"cannot split dim {split_dim} of size {x.shape[split_dim]} over {axis} of size {group.size}."
        raise SpecError(message(text, mend="Pad the dim to a multiple of the axis."))
    return apply_linear(x, _AllToAll(group, split_dim, concat_dim))


@public
@_compat.outside_of_graphs
def all_to_all_rows(
    x_M: Tensor, axis: Axis, *, send: Sequence[int], receive: Sequence[int], mesh: Mesh | None = None
) -> Tensor:
    """Send a different number of rows to each rank of an axis: `[sum(send), ..] -> [sum(receive), ..]`.

    The backward is the same exchange with `send` and `receive` swapped.

    Args:
        x_M: Rows `[M, ...]`, first the rows for rank 0 of the axis.
        axis: A mesh axis, or several, major first. An axis that the mesh lacks has one rank.
        send: Number of rows for each rank, 0 or more; they sum to M.
        receive: Number of rows from each rank: what that rank sends to this one.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        The received rows in the dtype of `x_M`, first those of rank 0.

    Raises:
        SpecError: `send` or `receive` does not have one number per rank, or `send` does not sum to M.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")  # one rank of ep: one number
        >>> fs.ops.all_to_all_rows(torch.arange(3.0), "ep", send=[3], receive=[3], mesh=mesh)
        tensor([0., 1., 2.])
    """
    group = _group(axis, mesh)
    if len(send) != group.size or len(receive) != group.size or sum(send) != (x_M.shape[0] if x_M.ndim else -1):
        text = f"cannot send {list(send)} and receive {list(receive)} rows over {axis} of size {group.size}."
        mend = "Pass one number for each rank; those in send sum to the size of dim 0."
        raise SpecError(message(text, [f"x has shape {tuple(x_M.shape)}"], mend))
    return apply_linear(x_M, _AllToAllRows(group, tuple(map(int, send)), tuple(map(int, receive))))


@public
@_compat.outside_of_graphs
def ppermute(x: Tensor, axis: str, pairs: Sequence[tuple[int, int]], *, mesh: Mesh | None = None) -> Tensor:
    """Send a tensor along (source, target) pairs of ranks: `[..] -> [..]`; a rank that isn't a target gets zeros.

    The backward sends along the reversed pairs. Use it for rings and shifts; one rank sends and receives at most once.

    Args:
        x: This rank's tensor, the same shape and dtype on all ranks.
        axis: A mesh axis. An axis that the mesh lacks has one rank.
        pairs: Coordinates along the axis, 0 to n - 1.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        The received tensor, or zeros.

    Raises:
        SpecError: A coordinate is outside the axis, or sends or receives twice.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> n = mesh.size()
        >>> fs.ops.ppermute(torch.arange(3), "dp", [(i, (i + 1) % n) for i in range(n)], mesh=mesh)  # to the next rank
        tensor([0, 1, 2])
    """
    group = _group(axis, mesh)
    sources = [a for a, _ in pairs]
    targets = [b for _, b in pairs]
    inside = all(0 <= c < group.size for c in sources + targets)
    if not inside or len(set(sources)) < len(pairs) or len(set(targets)) < len(pairs):
        text = f"got the pairs {list(pairs)} on axis {axis} of size {group.size}."
        raise SpecError(message(text, mend="Each coordinate may send once and receive once."))
    return apply_linear(x, _Ppermute(group, tuple((int(a), int(b)) for a, b in pairs)))
