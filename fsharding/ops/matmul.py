"""Products with weights in a plain dtype, whose gradients are written to their destinations."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from fsharding.base import _compat
from fsharding.ops.grad_sink import put_term, takes_terms

__all__ = ["multiply", "product", "weight_gradient"]


def product(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    """Multiply a matrix of rows with a weight; its gradient goes to its destination, if it has one."""
    if not takes_terms(weight) or x.ndim < 2 or x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
        return multiply(x, weight, dim)
    return cast(Tensor, _Product.apply(x, weight, dim))


def multiply(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    """Compute `x @ weight.T` for dim 1, `x @ weight` for dim 0."""
    return F.linear(x, weight) if dim else x @ weight


def weight_gradient(ctx: Any, grad: Tensor, x: Tensor) -> Tensor | None:
    """Return the gradient of a weight; None if it isn't wanted, or was written to its destination."""
    # In a pipeline's B action the weight gradient must not be computed, although the weight requires one.
    if not ctx.needs_input_grad[1] or not _compat.is_wanted(node := ctx.next_functions[1][0]):
        return None
    flat = x.flatten(0, -2)
    left, right = (grad.t(), flat) if ctx.dim else (flat.t(), grad)
    written = hasattr(node, "put_term") and put_term(node, left.dtype, lambda home: torch.mm(left, right, out=home))
    return None if written else left.mm(right)


class _Product(Function):
    """Autograd's own product, operation by operation, but for where the weight's gradient goes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        return multiply(x, weight, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        towards_x = None if weight is None else grad.mm(weight if ctx.dim else weight.t()).view(x.shape)
        return towards_x, weight_gradient(ctx, grad, x), None
