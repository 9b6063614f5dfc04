"""Update the biases that balance experts by the sign of their load (Wang et al. 2024, arXiv:2408.15664)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.tree import Tree
from fsharding.comm.leaf_memory import on_device
from fsharding.optim.base import ContextTransformation, UpdateContext, like_leaf
from fsharding.sharding.named_sharding import like, local_of

__all__ = ["against_load", "split_loads"]


def split_loads(grads: Tree, paths: Collection[str]) -> tuple[Tree, dict[str, Tensor]]:
    """Split gradients into a tree with zeros instead of loads, and the loads by path."""
    # Loads are few numbers: those that are kept elsewhere are copied to the device and stay there.
    found = {path: x for path, x in tree.named_leaves(grads).items() if path in paths} if paths else {}
    loads: dict[str, Tensor] = {
        path: like(x, on_device(local_of(x), x.device_mesh.device_type)) if isinstance(x, DTensor) else x
        for path, x in found.items()
    }
    if not loads:
        return grads, loads
    zeros = {path: torch.zeros_like(local_of(x)) for path, x in loads.items()}
    return tree.map_with_path(lambda path, x: like_leaf(x, zeros[path]) if path in zeros else x, grads), loads


def against_load(
    opt: ContextTransformation, loads: Mapping[str, Tensor], rates: Mapping[str, float]
) -> ContextTransformation:
    """Change leaves with loads by `-rate * sign(load)`, whatever an optimizer computes from their zeros."""
    # No `apply`: biases are changed after the optimizer and before the sum, so the two can't be one pass.

    def update(
        updates: Tree, state: Tree, params: Tree = None, context: UpdateContext = UpdateContext()
    ) -> tuple[Tree, Tree]:
        updates, state = opt.update(updates, state, params, context)
        return tree.map_with_path(change, updates), state

    def change(path: str, x: Any) -> Any:
        if path not in loads:
            return x
        load = local_of(loads[path]).to(local_of(x).device)
        return like_leaf(loads[path], torch.sign(load) * -rates[path])

    return ContextTransformation(opt.init, update, by_element=opt.by_element, needs_norm=opt.needs_norm)
