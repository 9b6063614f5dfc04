"""Which dims of a leaf are stacked units, which leaves are matrices, and sums over dims that ranks share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base.errors import LayoutError, message
from fsharding.base.tree import Tree
from fsharding.comm.handles import Handle
from fsharding.comm.transport import start_sum
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import Mesh, abstract, axis_group
from fsharding.sharding.boxes import length
from fsharding.sharding.leaf_names import begins
from fsharding.sharding.mesh_view import base
from fsharding.sharding.named_sharding import NamedSharding, local_of, sharding_of, to_local

__all__ = [
    "assigned_shardings", "label_matrices", "no_decay", "of_one_layer", "stacked_dims", "sum_dims", "whole_shape",
]  # fmt: skip

STACKS = ("blocks",)
"""The paths of the stacks of a `Model`."""


def stacked_dims(path: str, stacks: Sequence[str]) -> int:
    """Return how many first dims of a leaf count units: 1 under the path of a stack, else 0."""
    return int(any(begins(path, entry) for entry in stacks))


def label_matrices(stacks: Sequence[str] = STACKS) -> Callable[[str, Any], str]:
    """Make labels for `multi_transform`: "matrix" for matrices of stacked units, "other" for all other leaves.

    Args:
        stacks: Dotted paths, or their beginnings, of leaves whose first dim counts units; in a `Model`, `blocks`.

    Returns:
        A function `(path, leaf) -> label`.

    Example:
        >>> label = fs.optim.label_matrices()
        >>> label("blocks.wq", torch.zeros(2, 4, 4)), label("blocks.norm1", torch.zeros(2, 4))
        ('matrix', 'other')
        >>> label("embed.table", torch.zeros(16, 4))
        'other'
    """

    def label(path: str, leaf: Any) -> str:
        return "matrix" if stacked_dims(path, stacks) and leaf.ndim + isinstance(leaf, _Layer) >= 3 else "other"

    return label


def no_decay(path: str, leaf: Any) -> str:
    """Label a leaf for `multi_transform`: "decay" for two dims or more, "no_decay" for norms, biases and scalars.

    This is the usual rule of torch training loops, `p.ndim >= 2`, for the parameters of one layer.

    Args:
        path: Dotted path of the leaf.
        leaf: A tensor. If a leaf stacks layers (its first dim is named "layers" in `names=`, or, without names, it is
            under `blocks`), `multi_transform` passes the leaf of one layer.

    Returns:
        "decay" or "no_decay".

    Example:
        >>> groups = {"decay": fs.adamw(0.1, weight_decay=0.1), "no_decay": fs.adamw(0.1)}
        >>> opt = fs.optim.multi_transform(groups, fs.optim.no_decay)
        >>> state = opt.init({"blocks": {"w": torch.ones(2, 3, 3), "norm": torch.ones(2, 3)}})
        >>> list(fs.tree.named_leaves(state.groups["no_decay"].mu))
        ['blocks.norm']
    """
    return "decay" if leaf.ndim >= 2 else "no_decay"


class _Layer(Tensor):
    """The leaf of one layer of a stack, without values."""


@functools.lru_cache(maxsize=1024)
def _layer(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    with _compat.with_values():
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(_Layer)


def of_one_layer(path: str, leaf: Tensor, stacked: Mapping[str, bool] | None) -> Tensor:
    """Return the leaf as labels see it: of one layer, without values, if its first dim counts layers."""
    known = (stacked or {}).get(path)
    if known is None:
        # A list of blocks isn't stacked; its paths have numbers.
        known = stacked_dims(path, STACKS) and not any(part.isdigit() for part in path.split("."))
    return _layer(leaf.shape[1:], leaf.dtype) if known and leaf.ndim else leaf


def assigned_shardings(
    values: Tree, shardings: Tree = None, *, known: Sequence[str] = ()
) -> list[NamedSharding | None]:
    """Return the sharding of each leaf, with assignments that its DTensor lacks; None for a plain tensor."""
    named = tree.named_leaves(values)
    given: list[Any] = [None] * len(named)
    if shardings is not None:
        pruned = tree.prune(shardings, values, ("shardings", "leaves"))
        given = tree.flatten_up_to(tree.flatten(values)[1], pruned, ("leaves", "shardings"))
    result: list[NamedSharding | None] = []
    rows: list[str] = []
    for (path, x), sharding in zip(named.items(), given, strict=True):
        mesh = base(x.device_mesh) if isinstance(x, DTensor) else None
        if not isinstance(x, DTensor) or mesh is None or mesh.whole is None:
            result.append(sharding_of(x) if isinstance(x, DTensor) else None)
            continue
        of_leaf = sharding_of(x)
        hidden = [a for a in abstract(mesh.whole).names if a not in abstract(mesh.mesh).names]
        if sharding is not None and {a.axis for a in sharding.assigned} == {*hidden}:
            of_leaf = replace(of_leaf, mesh=mesh.whole, assigned=sharding.assigned)
            shape = whole_shape(x, of_leaf)
            local_shape = tuple(local_of(x).shape)
            want = of_leaf.local_shape(shape)
            if want != local_shape:
                text = f"{of_leaf} of {list(shape)} does not match this rank's shard"
                rows.append(f"{path}: {text}: {list(want)}, but it has {list(local_shape)}")
        elif sharding is not None or not {*hidden} <= {*known}:
            rows.append(f"{path} is assigned over {', '.join(a for a in hidden if a not in known)}")
        result.append(of_leaf)
    if rows:
        mend = (
            "Pass their shardings, as the train step does: fs.optim.InitContext(shardings=layout.main) to opt.init,"
            " fs.optim.UpdateContext(shardings=layout.main) to opt.update."
        )
        raise LayoutError(message("cannot tell which ranks own leaves with assignments.", rows, mend))
    return result


def whole_shape(x: Tensor, sharding: NamedSharding | None) -> tuple[int, ...]:
    """Return the shape of a full leaf; its first size is 0 on a rank that does not own a leaf of other ranks."""
    if sharding is None or sharding.grid(x.shape) is None:
        return tuple(x.shape)
    sizes = {a.dim: sum(map(length, a.ranges)) for a in sharding.assigned}
    return tuple(sizes.get(dim, size) for dim, size in enumerate(x.shape))


def sum_dims(
    terms: Iterable[Tensor],
    leaves: Sequence[Tensor],
    dims: Sequence[tuple[int, ...]],
    *,
    shardings: Sequence[NamedSharding | None] | None = None,
) -> list[Tensor]:
    """Sum over dims of full leaves, from the shards of all ranks. Collective over the axes that shard these dims.

    Args:
        terms: This rank's shards of the summands; a generator makes them one at a time.
        leaves: A leaf with the sharding of each term: a DTensor, or a full plain tensor.
        dims: Dims to sum over, for each term; they stay, with size 1.
        shardings: Sharding of each leaf, as in `layout.main`. Without it, a leaf with assignments is summed over its
            slice of the mesh.

    Returns:
        float64 sums, the same on all ranks that have the same range of the other dims.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(2, 3)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> w = fs.shard({"w": torch.ones(2, 3)}, layout)["w"]
        >>> (columns,) = fs.optim.sum_dims([w.to_local().square()], [w], [(0,)])  # also over the ranks along this dim
        >>> columns
        tensor([[2., 2., 2.]], dtype=torch.float64)
    """
    sums = [x.sum(d, keepdim=True, dtype=torch.float64) if d else x.double() for x, d in zip(terms, dims, strict=True)]
    groups: dict[tuple[Mesh, tuple[str, ...]], list[int]] = {}
    given = [None] * len(leaves) if shardings is None else shardings
    for i, (leaf, over, with_owners) in enumerate(zip(leaves, dims, given, strict=True)):
        if isinstance(leaf, DTensor):
            # On the full mesh, not its slice: all ranks have its groups.
            sharding: NamedSharding = to_local(leaf).sharding
            owners = with_owners.assigned if with_owners is not None else ()
            axes = {axis for dim in over for axis in sharding.axes(dim)} | {a.axis for a in owners if a.dim in over}
            if axes:
                groups.setdefault((sharding.mesh, tuple(a for a in AXES if a in axes)), []).append(i)
    totals: list[Handle[Tensor]] = []
    for (mesh, axes), members in groups.items():
        flat = torch.cat([sums[i].reshape(-1) for i in members])
        totals.append(start_sum(flat, axis_group(mesh, axes), torch.float64))
    for members, total in zip(groups.values(), totals, strict=True):
        parts = total.wait().split([sums[i].numel() for i in members])
        for i, part in zip(members, parts, strict=True):
            sums[i] = part.view(sums[i].shape)
    return sums
