"""Linear maps over a model axis: columns or rows of a weight on each rank, and the regions between them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fsharding.base.errors import SpecError, message
from fsharding.base.public import public
from fsharding.formats.quantized import Weight
from fsharding.mesh.device_mesh import Mesh, axis_index, axis_size
from fsharding.ops.collectives import all_gather, psum, pvary, reduce_scatter
from fsharding.ops.matmul import scaled_matmul
from fsharding.sharding.boxes import chunk

__all__ = ["column_linear", "copy_to_tp", "reduce_from_tp", "row_linear", "split_fused"]


def copy_to_tp(x: Tensor, axis: str = "tp", *, sequence_dim: int | None = None, mesh: Mesh | None = None) -> Tensor:
    """Enter a region where each rank of an axis computes with its own shards. Transpose of `reduce_from_tp`.

    Args:
        x: the same on all ranks of the axis; with `sequence_dim` each rank's equal part along that dim.
        axis: of the mesh; one that the mesh lacks, or no mesh at all, is one rank.
        sequence_dim: the dim along which the activations are cut outside of the region, if they are.
        mesh: by default the mesh of `fs.set_mesh`.

    Returns:
        The whole activations, the same on all ranks.

    Example:
        >>> def mlp(x, up, down):  # on two ranks of tp: up is [4, 4], down is [4, 4]
        ...     return fs.ops.reduce_from_tp(torch.relu(fs.ops.copy_to_tp(x) @ up) @ down)
        >>> with fs.set_mesh(fs.make_mesh(dp=-1, device="cpu")):
        ...     mlp(torch.ones(2, 4), torch.ones(4, 8), torch.ones(8, 4)).shape
        torch.Size([2, 4])
    """
    if axis_size(axis, mesh) == 1:
        return x
    return pvary(x, axis, mesh=mesh) if sequence_dim is None else all_gather(x, axis, dim=sequence_dim, mesh=mesh)


@public
def reduce_from_tp(x: Tensor, axis: str = "tp", *, sequence_dim: int | None = None, mesh: Mesh | None = None) -> Tensor:
    """Leave a region: sum the terms of all ranks, and shard along `sequence_dim`. Transpose of `copy_to_tp`.

    Args:
        x: this rank's term of the sum, of the whole shape.
        axis: as in `copy_to_tp`.
        sequence_dim: as in `copy_to_tp`.
        mesh: by default the mesh of `fs.set_mesh`.

    Raises:
        SpecError: the size of `sequence_dim` is not a multiple of the axis.

    Example:
        >>> x, weight = torch.ones(1, 4), torch.ones(4, 2)  # on two ranks of tp: [1, 2] and [2, 2]
        >>> with fs.set_mesh(fs.make_mesh(dp=-1, device="cpu")):
        ...     fs.ops.reduce_from_tp(x @ weight)
        tensor([[4., 4.]])
    """
    size = axis_size(axis, mesh)
    if size == 1:
        return x
    if sequence_dim is None:
        return psum(x, axis, mesh=mesh)
    if x.shape[sequence_dim] % size:
        text = f"cannot cut dim {sequence_dim} of size {x.shape[sequence_dim]} over {axis} of size {size}."
        raise SpecError(message(text, mend=f"Make the sequence of each rank a multiple of {size}."))
    return reduce_scatter(x, axis, dim=sequence_dim, mesh=mesh)


def column_linear(
    x_D: Tensor,
    *weights_FD: Weight,
    axis: str = "tp",
    sequence_dim: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[Tensor, ...]:
    """`x @ w.T` for weights of which each rank has some rows, that is, some columns of the product.

    Args:
        x_D: [..., D], the same on all ranks of the axis, or cut along `sequence_dim`.
        *weights_FD: this rank's rows of each weight: [F of this rank, D], as a tensor or a `Quantized`. All of them
            share one `copy_to_tp`.
        axis: the mesh axis that shards F.
        sequence_dim: as in `copy_to_tp`.
        mesh: by default the mesh of `fs.set_mesh`.

    Returns:
        For each weight [..., F of this rank].

    Example:
        >>> x, q, k = torch.ones(3, 4), torch.ones(8, 4), torch.ones(2, 4)  # on two ranks of tp: q [4, 4], k [1, 4]
        >>> with fs.set_mesh(fs.make_mesh(dp=-1, device="cpu")):
        ...     [y.shape for y in fs.ops.column_linear(x, q, k)]
        [torch.Size([3, 8]), torch.Size([3, 2])]
    """
    whole = copy_to_tp(x_D, axis, sequence_dim=sequence_dim, mesh=mesh)
    return tuple(scaled_matmul(whole, w, 1) for w in weights_FD)


@public
def split_fused(
    x: Tensor, sizes: Sequence[int], *, dim: int = -1, axis: str = "tp", mesh: Mesh | None = None
) -> tuple[Tensor, ...]:
    """The parts of a dim that is named `Fused`, which each rank of an axis has some of: q, k and v of one product, say.

    Args:
        x: a weight at work, or its product: this rank's piece of each part, one after the other, along `dim`; or all of
            every part, where nothing cuts them.
        sizes: of the whole parts, as the `Fused` name says them.
        dim: the dim of x that holds the parts.
        axis: that cuts each part by itself, as evenly as it can.
        mesh: by default the mesh of `fs.set_mesh`.

    Returns:
        Views of x.

    Raises:
        SpecError: the size of `dim` is neither this rank's pieces nor all parts.

    Example:
        >>> qkv = torch.arange(8.0)  # four of q, two of k, two of v
        >>> with fs.set_mesh(fs.make_mesh(dp=-1, device="cpu")):
        ...     fs.ops.split_fused(qkv, (4, 2, 2))
        (tensor([0., 1., 2., 3.]), tensor([4., 5.]), tensor([6., 7.]))
    """
    pieces = [chunk(size, axis_size(axis, mesh), axis_index(axis, mesh)) for size in sizes]
    here = [stop - start for start, stop in pieces]
    has = x.shape[dim]
    if has not in (sum(here), sum(sizes)):
        text = f"cannot split dim {dim} of size {has} into parts of {tuple(sizes)}: this rank has {tuple(here)}."
        raise SpecError(message(text, mend="Give the sizes of the leaf's Fused name."))
    return x.split(here if has == sum(here) else list(sizes), dim)


def row_linear(
    x_F: Tensor,
    weight_FD: Weight,
    *,
    axis: str = "tp",
    sequence_dim: int | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """`x @ w` for a weight of which each rank has the rows that meet its part of x, summed over the axis.

    Args:
        x_F: [..., F of this rank], as `column_linear` makes it.
        weight_FD: this rank's rows: [F of this rank, D], as a tensor or a `Quantized`.
        axis: the mesh axis that shards F.
        sequence_dim: as in `copy_to_tp`.
        mesh: by default the mesh of `fs.set_mesh`.

    Returns:
        [..., D], the same on all ranks of the axis, or cut along `sequence_dim`.

    Raises:
        SpecError: as `reduce_from_tp`.

    Example:
        >>> x, up, down = torch.ones(3, 4), torch.ones(8, 4), torch.ones(8, 4)  # on two ranks of tp: both [4, 4]
        >>> with fs.set_mesh(fs.make_mesh(dp=-1, device="cpu")):
        ...     (hidden,) = fs.ops.column_linear(x, up)
        ...     fs.ops.row_linear(hidden.relu(), down).shape
        torch.Size([3, 4])
    """
    return reduce_from_tp(scaled_matmul(x_F, weight_FD, 0), axis, sequence_dim=sequence_dim, mesh=mesh)
