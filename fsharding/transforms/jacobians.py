"""Jacobians and Hessians with respect to sharded trees, with one column per element of the full leaves.

Each rank gets its part of the result of torch.func for the full leaves on one process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as torch_pytree

from fsharding.base import tree
from fsharding.base.errors import TransformError, message
from fsharding.base.public import check_function, public
from fsharding.base.tree import Tree
from fsharding.sharding.named_sharding import Local, opened, typeof
from fsharding.sharding.partition_spec import P

__all__ = ["hessian", "jacfwd"]


@public
def jacfwd(fn: Callable[..., Any], *, chunk_size: int = 64) -> Callable[..., Any]:
    """Make a function that returns the Jacobian of `fn` with respect to its first argument, by forward mode.

    Call it inside `fs.shard_map`; like torch.func's, it can be inside torch.func transforms.

    Args:
        fn: Function `fn(params, *args)` of a tree of `Local` nodes and plain tensors (equal on all ranks). It returns a
            tree of `Local` nodes or plain tensors.
        chunk_size: Number of columns computed at once.

    Returns:
        A function of the same arguments. Each result x of `fn` becomes a tree like params: a leaf of shape [*W] gives
        [*X, *W], a `Local` if x is one, whose X dims are sharded as in x and whose W dims are full.

    Raises:
        TransformError: Leaves of params aren't floating point tensors, or are DTensors; all of them are listed.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(2)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, layout)
        >>> def f(params):
        ...     return fs.gather_unit(params)["w"] ** 2
        >>> fs.shard_map(lambda params: fs.jacfwd(f)(params)["w"])(params)
        tensor([[2., 0.],
                [0., 4.]])
    """
    check_function("a function (params, *args)", fn, 1)

    @functools.wraps(fn)
    @public
    def run(params: Tree, *args: Any) -> Tree:
        leaves, spec = tree.flatten(params)
        _check(tree.named_leaves(params))
        values, closed = opened(params)
        nodes: list[Any] = []
        structure: Any = None

        def flat(*values: Tensor) -> tuple[Tensor, ...]:
            nonlocal nodes, structure
            nodes, structure = tree.flatten(fn(closed(values), *args))
            return tuple(x.value if isinstance(x, Local) else x for x in nodes)

        def push(*tangents: Tensor) -> tuple[Tensor, ...]:
            return cast("tuple[Tensor, ...]", torch.func.jvp(flat, tuple(values), tangents)[1])

        sizes = [math.prod(x.shape) for x in leaves]
        own = [_indices(x) for x in leaves]
        columns: list[tuple[Tensor, ...]] = []
        for first in range(0, sum(sizes), chunk_size):
            last = min(first + chunk_size, sum(sizes))
            columns.append(torch.vmap(push)(*_seeds(values, own, sizes, first, last)))
        joined = [torch.cat(parts).movedim(0, -1).split(sizes, -1) for parts in zip(*columns, strict=True)]
        rows = [
            tree.unflatten(spec, [_block(part, node, x.shape) for part, x in zip(parts, leaves, strict=True)])
            for parts, node in zip(joined, nodes, strict=True)
        ]
        return tree.unflatten(structure, rows)

    return run


@public
def hessian(fn: Callable[..., Any], *, chunk_size: int = 64) -> Callable[..., Any]:
    """Make a function that returns the Hessian of `fn` with respect to its first argument, forward over reverse.

    It costs one Hessian-vector product per element of the full leaves; each rank holds its own rows.

    Args:
        fn: Function `fn(params, *args)` as in `jacfwd`, to a 0-d tensor. The sum over ranks is differentiated; a
            total that ends in an `ops.psum` counts once.
        chunk_size: Number of columns computed at once.

    Returns:
        A function of the same arguments to a tree of trees: leaves of shapes [*V] and [*W] give a node [*V, *W].

    Raises:
        TransformError: `fn` doesn't return a 0-d tensor, or leaves of params aren't floating point tensors.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(2)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, layout)
        >>> def f(params):
        ...     # This rank's part of the sum over all ranks.
        ...     return (fs.gather_unit(params)["w"] ** 3).sum() / layout.mesh.size()
        >>> fs.unshard(fs.shard_map(lambda params: fs.hessian(f)(params)["w"]["w"])(params))
        tensor([[ 6.,  0.],
                [ 0., 12.]])
    """
    check_function("a function (params, *args)", fn, 1)

    @functools.wraps(fn)
    @public
    def scalar(*args: Any) -> Tensor:
        result = fn(*args)
        if not isinstance(result, Tensor) or result.ndim:
            got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            mend = "Return a 0-d tensor, such as the sum of this rank's losses."
            raise TransformError(message(f"needs a function that returns a 0-d tensor, got {got}.", mend=mend))
        return result

    columns = jacfwd(torch.func.grad(scalar), chunk_size=chunk_size)

    @functools.wraps(fn)
    @public
    def run(params: Tree, *args: Any) -> Tree:
        # torch.func takes None for a leaf, and cannot differentiate with respect to it.
        if any(x is None for x in torch_pytree.tree_leaves(params)):
            mend = "Remove entries that are None from the tree."
            raise TransformError(message("got a tree that contains None.", mend=mend))
        return columns(params, *args)

    return run


def _check(leaves: dict[str, Any]) -> None:
    wrong: list[str] = [] if leaves else ["the tree has no leaf"]
    for path, x in leaves.items():
        value = x.value if isinstance(x, Local) else x
        if not isinstance(value, Tensor):
            wrong.append(f"{path or 'it'} is {type(value).__name__}")
        elif isinstance(value, DTensor) or not value.is_floating_point():
            wrong.append(f"{path or 'it'} is {typeof(x)}" + (" at rest" if isinstance(value, DTensor) else ""))
    if wrong:
        mend = "Call it inside fs.shard_map, on a tree of the leaves to differentiate with respect to."
        raise TransformError(message("needs floating point tensors or local nodes as leaves.", wrong, mend))


def _indices(x: Local | Tensor) -> Tensor:
    """Number the elements of the full leaf, and return the numbers of this rank's: int64[local elements]."""
    full = torch.arange(math.prod(x.shape)).view(tuple(x.shape))
    if isinstance(x, Local):
        full = full[tuple(slice(start, stop) for start, stop in x.sharding.box(x.shape))]
    return full.reshape(-1)


def _seeds(
    values: Sequence[Tensor], own: Sequence[Tensor], sizes: Sequence[int], first: int, last: int
) -> list[Tensor]:
    """Return one-hot tangents for elements `first` to `last` of all leaves in order; 0 if another rank holds it."""
    seeds: list[Tensor] = []
    for value, held, size in zip(values, own, sizes, strict=True):
        hit = held == torch.arange(first, last)[:, None]
        seeds.append(hit.to(value.device, value.dtype).view(last - first, *value.shape))
        first = first - size
        last = last - size
    return seeds


def _block(part: Tensor, node: Local | Tensor, shape: Sequence[int]) -> Local | Tensor:
    """Give the columns of one leaf their shape, and make them a node if the rows are one."""
    value = part.unflatten(-1, tuple(shape)) if shape else part.squeeze(-1)
    if not isinstance(node, Local):
        return value
    sharding = node.sharding
    padded = P(*(sharding.spec.axes(dim) for dim in range(len(node.shape))), *(None,) * len(shape))
    return Local(value, type(sharding)(sharding.mesh, padded, owned=sharding.owned), (*node.shape, *shape))
