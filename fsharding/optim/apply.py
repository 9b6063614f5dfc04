"""`apply_updates`: parameters plus updates, wherever the two are cut.

In: parameters, and updates in the sharding of the optimizer state. Out: parameters in their own sharding.
Where updates are cut further than parameters, each rank adds its slice and the slices are gathered once.
Law: without `donate` the parameters that came in are unchanged.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding import sharding, tree
from fsharding.optim.base import shardings_of
from fsharding.redistribute import redistribute
from fsharding.sharding import local_of, sharding_of
from fsharding.tree import Tree

__all__ = ["apply_updates"]


def apply_updates(params: Tree, updates: Tree, *, donate: bool = False) -> Tree:
    """Adds updates to parameters.

    Args:
        params: tree of DTensors or plain tensors.
        updates: the same tree, in any data sharding; None at a leaf leaves the parameter as it is.
        donate: the parameters may be overwritten.

    Returns:
        The new parameters in the shardings and dtypes of `params`.
    """
    leaves, spec = tree.flatten(params)
    deltas = tree.flatten_up_to(spec, updates, "fs.apply_updates")
    targets = tree.unflatten(spec, [sharding_of(d) if isinstance(d, DTensor) else None for d in deltas])
    slices = tree.flatten_up_to(spec, redistribute(params, targets), "fs.apply_updates")
    moved: list[Any] = []
    for leaf, part, delta in zip(leaves, slices, deltas, strict=True):
        if delta is None:
            moved.append(leaf)
            continue
        new = _add(local_of(part), local_of(delta), donate)
        moved.append(sharding.like(part, new) if isinstance(part, DTensor) else new)
    return redistribute(tree.unflatten(spec, moved), shardings_of(params))


def _add(param: Tensor, delta: Tensor, donate: bool) -> Tensor:
    if donate and param.dtype == delta.dtype:
        return param.add_(delta)
    return param.add(delta.to(param.dtype)) if param.dtype == delta.dtype else (param + delta).to(param.dtype)
