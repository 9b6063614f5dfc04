"""`value_and_grad`: gradients of a loss over sharded parameters, with plain `torch.autograd.grad`.

In: a loss function of (params, ...) that returns a scalar, or (sum, weight). Out: the mean over all data ranks, and a
tree of gradients in the shardings that were asked for. DTensors go in and come out; the loss function sees `Local`
nodes only. Laws: inputs are never changed; the mean is over all weights, whatever mesh, strategy and microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding import _compat, tree
from fsharding.errors import TransformError, message
from fsharding.ledger import Ledger, opened
from fsharding.mesh import AXES, Mesh, axis_group, data_axes, set_mesh
from fsharding.ops import wire
from fsharding.ops.unit import Goal
from fsharding.precision import FP32, Precision
from fsharding.sharding import Local, sharding_of, to_local
from fsharding.tree import Tree

__all__ = ["GradFn", "value_and_grad"]


class GradFn(Protocol):
    """What `value_and_grad` returns."""

    def __call__(self, params: Tree, *args: Any, accumulate: Tree = None) -> tuple[Any, Tree]:
        """Loss and gradients; `accumulate` holds summed gradients to add to."""
        ...


class _Loss(NamedTuple):
    """A loss function's result, taken apart."""

    total: Tensor
    weight: Tensor | None
    aux: Any


def value_and_grad(
    fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    grads: Tree = None,
    precision: Precision = FP32,
    mean: bool = True,
) -> GradFn:
    """Makes a function that returns a loss and its gradient with respect to the first argument.

    `fn(params, *args)` returns a 0-d tensor, or `(sum, weight)`: the sum of the losses of this rank's tokens, and their
    number. What is differentiated is the global mean, `psum(sum) / psum(weight)` over all data axes; a bare tensor
    counts as the mean of its rank, with weight 1.

    Args:
        fn: the loss function; it gets the parameters as `Local` nodes, to be opened by `gather_unit` or `scan_units`.
        has_aux: `fn` returns `(loss, aux)`; aux is handed on as it is.
        grads: tree of `NamedSharding` for the gradients; None at a leaf freezes it. By default gradients are sharded as
            the parameters. Axes that are partial in it are left unreduced.
        precision: dtypes of compute, wire and gradients.
        mean: divide by the global weight; else loss and gradients are sums.

    Returns:
        A function `(params, *args, accumulate=None) -> ((loss, weight), grads)`; `(loss, grads)` when `fn` returns a
        bare tensor; with `has_aux` the first item is `(that, aux)`. Loss and weight are 0-d float32, the same on all
        data ranks. `accumulate` holds summed gradients of earlier calls, which are added to and must not be used again.

    Raises:
        TransformError: the loss is not a 0-d floating point tensor.
        TreeError: `grads` or `accumulate` does not match the parameters.
    """

    def run(params: Tree, *args: Any, accumulate: Tree = None) -> tuple[Any, Tree]:
        leaves, spec = tree.flatten(params)
        targets = tree.flatten_up_to(spec, grads, "fs.value_and_grad") if grads is not None else None
        held = tree.flatten_up_to(spec, accumulate, "fs.value_and_grad") if accumulate is not None else None
        goals = [
            _goal(leaf, targets[i] if targets else _same, held[i] if held else None, precision)
            for i, leaf in enumerate(leaves)
        ]
        flying = [_fly(leaf, goal is not None) for leaf, goal in zip(leaves, goals, strict=True)]
        locals_ = [x if isinstance(x, Local) else None for x in flying]
        held_local = [_compat.local_tensor(h) if isinstance(h, DTensor) else None for h in held or [None] * len(leaves)]
        ledger = Ledger(locals_, tree.paths(params), goals, precision.compute_dtype, held_local)
        mesh = next((x.sharding.mesh for x in locals_ if x is not None), None)
        try:
            with torch.enable_grad(), _on(mesh), opened(ledger):
                loss = _take_apart(fn(tree.unflatten(spec, flying), *args), has_aux)
            inputs = [x.value if isinstance(x, Local) else x for x in flying]
            with _on(mesh):  # what is computed again there asks for the mesh too
                raw = _backward(loss.total, ledger.anchor, inputs)
            totals = _global_sums(loss, mesh)
            for i, grad in enumerate(raw):
                if grad is not None and locals_[i] is not None:
                    ledger.add_reduced(i, grad)
            found = ledger.finish()
        except BaseException:
            ledger.close(failed=True)
            raise
        found = [g if locals_[i] is not None else _plain(raw[i], leaves[i], goals[i]) for i, g in enumerate(found)]
        if mean:
            _compat.foreach_mul_([g for g in found if g is not None], float(1.0 / totals[1]))
        wrapped = [
            goal.target.to_dtensor(g, x.shape) if g is not None and goal is not None and isinstance(x, Local) else g
            for g, goal, x in zip(found, goals, flying, strict=True)
        ]
        return _result(loss, totals, mean, has_aux), tree.unflatten(spec, wrapped)

    return run


_same = object()


def _goal(leaf: Any, target: Any, held: Any, precision: Precision) -> Goal | None:
    """The goal of a leaf's gradient; None for frozen leaves and for what cannot be differentiated."""
    if target is None or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return None
    if not isinstance(leaf, DTensor):
        return Goal(_NOWHERE, leaf.dtype)
    want = sharding_of(leaf) if target is _same else target
    have = sharding_of(held) if isinstance(held, DTensor) else None
    return Goal(want.simplified(), precision.grad_dtype(leaf.dtype), precision.reduce, have)


_NOWHERE: Any = None


def _fly(leaf: Any, differentiated: bool) -> Any:
    """The in-flight form of a leaf: fresh tensors, so that autograd never touches the state's own."""
    if isinstance(leaf, DTensor):
        local = to_local(leaf)
        return Local(local.value.requires_grad_(differentiated), local.sharding, local.shape)
    if isinstance(leaf, Tensor):
        return leaf.detach().requires_grad_(differentiated)
    return leaf


def _on(mesh: Mesh | None) -> Any:
    return set_mesh(mesh) if mesh is not None else torch.enable_grad()


def _take_apart(result: Any, has_aux: bool) -> _Loss:
    if has_aux and not (isinstance(result, tuple) and len(cast(tuple[Any, ...], result)) == 2):
        mend = "Return (loss, aux), or leave has_aux out."
        raise TransformError(message("fs.value_and_grad", f"needs (loss, aux); got {_kind(result)}.", mend=mend))
    loss, aux = result if has_aux else (result, None)
    total, weight = loss if isinstance(loss, tuple) and len(cast(tuple[Any, ...], loss)) == 2 else (loss, None)
    is_number = weight is None or isinstance(weight, int | float) or (isinstance(weight, Tensor) and not weight.ndim)
    if not isinstance(total, Tensor) or total.ndim or not total.is_floating_point() or not is_number:
        text = message(
            "fs.value_and_grad",
            f"needs a loss that is a 0-d floating point tensor, or (sum, weight); got {_kind(loss)}.",
            mend="Sum the losses of the batch and return (losses.sum(), number of tokens), or pass has_aux=True.",
        )
        raise TransformError(text)
    if weight is not None:
        weight = torch.as_tensor(weight, dtype=torch.float64, device=total.device).detach()
    return _Loss(total, weight, aux)


def _kind(x: Any) -> str:
    """What something is, for an error."""
    if isinstance(x, tuple):
        return f"({', '.join(map(_kind, cast(tuple[Any, ...], x)))})"
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _backward(total: Tensor, anchor: Tensor, inputs: list[Any]) -> list[Tensor | None]:
    """Runs backward; units write their gradients through the ledger, whatever was used otherwise comes back here."""
    if not total.requires_grad:
        return [None] * len(inputs)
    used = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
    with torch.autograd.set_multithreading_enabled(False):
        found = torch.autograd.grad(total, [anchor, *(inputs[i] for i in used)], allow_unused=True)
    result: list[Tensor | None] = [None] * len(inputs)
    for i, grad in zip(used, found[1:], strict=True):
        result[i] = grad
    return result


def _global_sums(loss: _Loss, mesh: Mesh | None) -> Tensor:
    """(sum, weight) over all data ranks: float64[2]."""
    one = torch.ones((), dtype=torch.float64, device=loss.total.device)
    mine = torch.stack((loss.total.detach().double(), one if loss.weight is None else loss.weight))
    if mesh is None:
        return mine
    axes = tuple(sorted(data_axes(mesh), key=AXES.index))
    return wire.start_sum(mine, axis_group(mesh, axes), torch.float64).wait()


def _plain(grad: Tensor | None, leaf: Any, goal: Goal | None) -> Tensor | None:
    if goal is None:
        return None
    return torch.zeros_like(leaf) if grad is None else grad


def _result(loss: _Loss, totals: Tensor, mean: bool, has_aux: bool) -> Any:
    value = (totals[0] / totals[1] if mean else totals[0]).float()
    result = value if loss.weight is None else (value, totals[1].float())
    return (result, loss.aux) if has_aux else result
