"""`apply_updates` adds updates to parameters in their shardings; `apply_gradients` is a full optimizer step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.public import check_optimizer, public, refuse, refuse_state
from fsharding.base.tree import Tree
from fsharding.comm.leaf_memory import sharding_here
from fsharding.comm.redistribute import redistribute
from fsharding.optim import base
from fsharding.optim.base import ContextTransformation, GradientTransformation, UpdateContext
from fsharding.optim.chunked_update import rounds_by_key, step_key, write_param
from fsharding.optim.chunks import chunk_size
from fsharding.optim.clip import global_norm
from fsharding.optim.coded_moment import leaves_of
from fsharding.optim.windows import through_windows
from fsharding.sharding import named_sharding
from fsharding.sharding.named_sharding import local_of

__all__ = ["add_updates", "apply_gradients", "apply_updates", "change_slices"]


@public
def apply_gradients(
    opt: GradientTransformation,
    grads: Tree,
    state: Tree,
    params: Tree,
    context: UpdateContext = UpdateContext(),
    *,
    scale: float | Tensor = 1.0,
) -> tuple[Tree, Tree]:
    """Run one optimizer step: `opt.update` and `apply_updates`, or the optimizer's `apply`, which does both at once.

    Args:
        opt: Optimizer, such as `fs.adamw(1e-3)`.
        grads: Mean gradients; None at a leaf keeps the parameter.
        state: Optimizer state, as `opt.init` returns it.
        params: Tree of DTensors or plain tensors.
        context: Facts about this step. With `donate`, all arguments may be overwritten; `norm` is the norm after
            scaling; if `finite` is false, parameters and state keep every bit.
        scale: Factor of the gradients, a number or a 0-d tensor.

    Returns:
        (parameters, state), in the shardings and dtypes of the inputs.

    Raises:
        ConfigError: `opt` isn't a `GradientTransformation`.

    Example:
        >>> params, opt = {"w": torch.ones(2)}, fs.sgd(0.5)
        >>> params, state = fs.optim.apply_gradients(opt, {"w": torch.ones(2)}, opt.init(params), params)
        >>> params, int(state.count)
        ({'w': tensor([0.5000, 0.5000])}, 1)
    """
    check_optimizer(opt)
    transformation = opt.with_context()
    if transformation.by_element and transformation.needs_norm and context.norm is None:
        norm = global_norm(grads, shardings=context.shardings).double() * scale
        context = replace(context, norm=norm.float())
    change = functools.partial(_apply, transformation)
    return through_windows(change, grads, state, params, context, scale, by_element=transformation.by_element)


def _apply(
    transformation: ContextTransformation,
    grads: Tree,
    state: Tree,
    params: Tree,
    context: UpdateContext,
    scale: float | Tensor,
) -> tuple[Tree, Tree]:
    """Run `apply_gradients` on leaves that are where the update is computed."""
    finite, donate = context.finite, context.donate
    masks = finite is None or (transformation.apply is not None and transformation.masks)
    if not masks:
        # A transformation that does not mask may not overwrite values that `where_finite` may have to restore.
        context = replace(context, donate=False, finite=None)
    if transformation.apply is not None:
        new_params, new_state = transformation.apply(grads, state, params, context, scale=scale)
    else:
        updates = base.multiply(grads, scale, donate=donate)
        updates, new_state = transformation.update(updates, state, params, context)
        new_params = add_updates(params, updates, context, donate=context.donate)
    if masks:
        return new_params, new_state
    return base.where_finite(finite, new_params, params), base.where_finite(finite, new_state, state)


@public
def apply_updates(params: Tree, updates: Tree, *, donate: bool = False) -> Tree:
    """Add updates to parameters.

    Args:
        params: Tree of DTensors or plain tensors.
        updates: The same tree, in any data sharding; None at a leaf keeps the parameter.
        donate: Whether the parameters may be overwritten.

    Returns:
        New parameters in the shardings and dtypes of `params`.

    Raises:
        TreeError: Parameters and updates differ in paths or shapes; all such leaves are listed.
        ArgumentError: `params` is a full state, or `updates` is the pair that `opt.update` returns.

    Example:
        >>> params = {"w": torch.ones(2), "frozen": torch.ones(1)}
        >>> fs.optim.apply_updates(params, {"w": torch.full((2,), -0.5), "frozen": None})
        {'w': tensor([0.5000, 0.5000]), 'frozen': tensor([1.])}
    """
    refuse_state(params)
    if type(updates) is tuple and type(params) is not tuple:
        mend = "opt.update returns two things: updates, opt_state = opt.update(gradients, opt_state, params)."
        raise refuse("a tree of updates", updates, mend)
    return add_updates(params, updates, UpdateContext(), donate=donate)


def add_updates(params: Tree, updates: Tree, context: UpdateContext, *, donate: bool = False) -> Tree:
    """Apply updates as `apply_updates` does, with parameters rounded as the context requires."""
    deltas = base.local_leaves(updates)
    stochastic = rounds_by_key(tree.leaves(params), context)
    leaves = leaves_of(updates, context.shardings) if stochastic else []
    key = functools.cache(lambda: step_key(context, torch.zeros((), dtype=torch.int64)))

    def added(i: int, param: Tensor) -> Tensor:
        delta = deltas[i]
        if not stochastic or param.dtype != torch.bfloat16:
            return param.add_(delta) if donate and param.dtype == delta.dtype else (param + delta).to(param.dtype)
        new = param if donate else base.clone(param)
        for chunk in leaves[i].chunks(chunk_size(new.device)):
            value = chunk.of(new)
            wide_sum = value.to(torch.float32) + chunk.of(delta).to(torch.float32)
            write_param(value, wide_sum, context, leaves[i], chunk, key)
        return new

    def add(slices: list[Tensor]) -> list[Tensor]:
        assert len(slices) == len(deltas)
        return [added(i, param) for i, param in enumerate(slices)]

    return change_slices(params, updates, add, ("parameters", "updates"), donate=donate)


def change_slices(
    params: Tree,
    where: Tree,
    change: Callable[[list[Tensor]], list[Tensor]],
    labels: tuple[str, str] = ("parameters", "moments"),
    *,
    donate: bool = False,
) -> Tree:
    """Change parameters in a different sharding: reshard them to it and back. None in `where` keeps a leaf."""
    leaves, spec = tree.flatten(params)
    marks = tree.flatten_up_to(spec, where, labels)
    unlike = (
        mark is not None
        and (getattr(mark, "shape", None) != leaf.shape or isinstance(mark, DTensor) != isinstance(leaf, DTensor))
        for leaf, mark in zip(leaves, marks, strict=True)
    )
    if any(unlike):
        base.refuse_other_shapes(tree.prune(params, where, labels), where, labels)
    targets = tree.unflatten(spec, [sharding_here(m) if isinstance(m, DTensor) else None for m in marks])
    slices = tree.leaves(redistribute(params, targets))
    changed = iter(change([local_of(x) for x, mark in zip(slices, marks, strict=True) if mark is not None]))
    resharded: list[Any] = []
    for leaf, part, mark in zip(leaves, slices, marks, strict=True):
        new = next(changed) if mark is not None else leaf
        resharded.append(named_sharding.like(part, new) if mark is not None and isinstance(part, DTensor) else new)
    return redistribute(tree.unflatten(spec, resharded), base.shardings_of(params), into=params if donate else None)
