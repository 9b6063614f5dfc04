"""Tensor-parallel linear maps, and entry and exit of their regions (Megatron-LM, Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fsharding.base.errors import SpecError, message
from fsharding.base.public import public
from fsharding.formats.quantized import Weight
from fsharding.mesh.device_mesh import Mesh, axis_index, axis_size
from fsharding.ops.collectives import all_gather, psum, pvary, reduce_scatter
from fsharding.ops.scaled_mm import scaled_matmul
from fsharding.sharding.boxes import chunk

__all__ = ["column_linear", "copy_to_tp", "reduce_from_tp", "row_linear", "split_fused"]


def copy_to_tp(x: Tensor, axis: str = "tp", *, sequence_dim: int | None = None, mesh: Mesh | None = None) -> Tensor:
    """Enter a tensor-parallel region: full activations, the same on all n ranks of the axis.

    Without `sequence_dim` it is `pvary`: `[..] -> [..]`. With it, `all_gather`: `[.., t, ..] -> [.., n t, ..]`, as in
    sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198). The transpose is `reduce_from_tp`.

    Args:
        x: Activations that are the same on all ranks of the axis; with `sequence_dim`, this rank's equal shard.
        axis: A mesh axis. Without a mesh, or on a mesh without it, it has one rank.
        sequence_dim: Dim along which activations are sharded outside the region (sequence parallelism), or None.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        The full activations, in the shape and dtype of `x` but for `sequence_dim`.

    Example:
        >>> def mlp(x, up, down):  # on two ranks of tp: up is [4, 4], down is [4, 4]
        ...     return fs.ops.reduce_from_tp(torch.relu(fs.ops.copy_to_tp(x) @ up) @ down)
        >>> mlp(torch.ones(2, 4), torch.ones(4, 8), torch.ones(8, 4)).shape
        torch.Size([2, 4])
    """
    if axis_size(axis, mesh) == 1:
        return x
    return pvary(x, axis, mesh=mesh) if sequence_dim is None else all_gather(x, axis, dim=sequence_dim, mesh=mesh)


@public
def reduce_from_tp(x: Tensor, axis: str = "tp", *, sequence_dim: int | None = None, mesh: Mesh | None = None) -> Tensor:
    """Leave a tensor-parallel region: sum the partial results of all n ranks of the axis.

    Without `sequence_dim` it is `psum`: `[..] -> [..]`. With it, `reduce_scatter`: `[.., n t, ..] -> [.., t, ..]`. Sums
    are computed in float32 at least. The transpose is `copy_to_tp`.

    Args:
        x: This rank's partial result, of the full shape.
        axis: A mesh axis. Without a mesh, or on a mesh without it, it has one rank.
        sequence_dim: Dim along which activations are sharded outside the region (sequence parallelism), or None.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        The sum in the dtype of `x`; with `sequence_dim`, this rank's shard of it.

    Raises:
        SpecError: The size of `sequence_dim` is not a multiple of the axis.

    Example:
        >>> x, weight = torch.ones(1, 4), torch.ones(4, 2)  # on two ranks of tp: [1, 2] and [2, 2]
        >>> fs.ops.reduce_from_tp(x @ weight)
        tensor([[4., 4.]])
    """
    size = axis_size(axis, mesh)
    if size == 1:
        return x
    if sequence_dim is None:
        return psum(x, axis, mesh=mesh)
    if x.shape[sequence_dim] % size:
        text = f"cannot shard dim {sequence_dim} of size {x.shape[sequence_dim]} over {axis} of size {size}."
        raise SpecError(message(text, mend=f"Make the number of tokens of each rank a multiple of {size}."))
    return reduce_scatter(x, axis, dim=sequence_dim, mesh=mesh)


def column_linear(
    x_D: Tensor, *weights_FD: Weight, axis: str = "tp", sequence_dim: int | None = None, mesh: Mesh | None = None
) -> tuple[Tensor, ...]:
    """Compute `x @ w.T` with column-parallel weights: `[.., D] -> [.., F]`, with F sharded over the axis.

    As in Megatron-LM (arXiv:1909.08053). All weights share one `copy_to_tp`: q, k and v cost one collective.

    Args:
        x_D: Activations [..., D], the same on all ranks of the axis, or sharded along `sequence_dim`.
        *weights_FD: This rank's rows of each weight, [F of this rank, D]; tensors or `Quantized`.
        axis: Mesh axis that shards F, as in `copy_to_tp`.
        sequence_dim: Dim along which activations are sharded outside the region (sequence parallelism), or None.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        One tensor [..., F of this rank] for each weight, in the dtype of x.

    Example:
        >>> x, q, k = torch.ones(3, 4), torch.ones(8, 4), torch.ones(2, 4)  # on two ranks of tp: q [4, 4], k [1, 4]
        >>> [y.shape for y in fs.ops.column_linear(x, q, k)]
        [torch.Size([3, 8]), torch.Size([3, 2])]
    """
    full = copy_to_tp(x_D, axis, sequence_dim=sequence_dim, mesh=mesh)
    return tuple(scaled_matmul(full, w, 1) for w in weights_FD)


@public
def split_fused(
    x: Tensor, sizes: Sequence[int], *, dim: int = -1, axis: str = "tp", mesh: Mesh | None = None
) -> tuple[Tensor, ...]:
    """Split a fused dim, such as q, k and v in one weight, into this rank's shard of each part.

    Args:
        x: A gathered weight or its product: along `dim`, this rank's shard of each part, or the full parts.
        sizes: Full size of each part, as in the leaf's `Fused` name.
        dim: The fused dim of x.
        axis: Mesh axis that shards each part, as in `copy_to_tp`.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        Views of x.

    Raises:
        SpecError: The size of `dim` matches neither this rank's shards nor the full parts.

    Example:
        >>> qkv = torch.arange(8.0)  # four of q, two of k, two of v
        >>> fs.ops.split_fused(qkv, (4, 2, 2))
        (tensor([0., 1., 2., 3.]), tensor([4., 5.]), tensor([6., 7.]))
    """
    shards = [chunk(size, axis_size(axis, mesh), axis_index(axis, mesh)) for size in sizes]
    here = [stop - start for start, stop in shards]
    has = x.shape[dim]
    if has not in (sum(here), sum(sizes)):
        text = f"cannot split dim {dim} of size {has} into parts of {tuple(sizes)}: this rank has {tuple(here)}."
        raise SpecError(message(text, mend="Pass the sizes of the leaf's Fused name."))
    return x.split(here if has == sum(here) else list(sizes), dim)


def row_linear(
    x_F: Tensor, weight_FD: Weight, *, axis: str = "tp", sequence_dim: int | None = None, mesh: Mesh | None = None
) -> Tensor:
    """Compute `x @ w` with a row-parallel weight, summed over the axis: `[.., F] -> [.., D]`, with F sharded.

    Args:
        x_F: Activations [..., F of this rank], as `column_linear` returns them.
        weight_FD: This rank's rows, [F of this rank, D]: a tensor or a `Quantized`.
        axis: Mesh axis that shards F, as in `copy_to_tp`.
        sequence_dim: Dim along which activations are sharded outside the region (sequence parallelism), or None.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        [..., D] in the dtype of x, the same on all ranks of the axis, or sharded along `sequence_dim`.

    Raises:
        SpecError: The size of `sequence_dim` is not a multiple of the axis.

    Example:
        >>> x, up, down = torch.ones(3, 4), torch.ones(8, 4), torch.ones(8, 4)  # on two ranks of tp: both [4, 4]
        >>> (hidden,) = fs.ops.column_linear(x, up)
        >>> fs.ops.row_linear(hidden.relu(), down).shape
        torch.Size([3, 4])
    """
    return reduce_from_tp(scaled_matmul(x_F, weight_FD, 0), axis, sequence_dim=sequence_dim, mesh=mesh)
