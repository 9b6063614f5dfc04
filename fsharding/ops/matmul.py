"""Products with weights, whose gradients are computed where they go.

In: activations, a weight of two dims. Out: their product. In backward the gradient of a large weight that
`gather_unit` has made is written by the product itself to where others read it; every other one is a fresh tensor.
Law: values and gradients are those of torch's own product, bit for bit.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from fsharding import _compat
from fsharding.formats.quantised import Quantised, dequantise
from fsharding.ops.grad_sink import put_term, takes_terms

__all__ = ["product"]


def product(x: Tensor, weight: Tensor | Quantised, dim: int) -> Tensor:
    """Sums over the last dim of x and a dim of a weight.

    Args:
        x: [..., D].
        weight: [F, D] for dim 1, [D, F] for dim 0; a `Quantised` too.
        dim: 1 for `x @ weight.T`, 0 for `x @ weight`.

    Returns:
        [..., F] in the dtype of both.

    Example:
        >>> x, up, down = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 3)
        >>> fs.ops.product(fs.ops.product(x, up, 1), down, 0).shape
        torch.Size([2, 3])
    """
    if isinstance(weight, Quantised):
        weight = dequantise(weight)
    if not takes_terms(weight):
        return _multiply(x, weight, dim)
    if x.ndim < 2 or x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
        return _multiply(x, weight, dim)
    return cast(Tensor, _Product.apply(x, weight, dim))


def _multiply(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    return F.linear(x, weight) if dim else x @ weight


class _Product(Function):
    """As autograd's own, operation by operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        return _multiply(x, weight, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        towards_x = None
        if weight is not None:
            towards_x = grad.mm(weight if ctx.dim else weight.t()).view(x.shape)
        node = ctx.next_functions[1][0]
        if not _compat.is_wanted(node):
            return towards_x, None, None
        flat = x.flatten(0, -2)
        left, right = (grad.t(), flat) if ctx.dim else (flat.t(), grad)
        if put_term(node, left.dtype, lambda home: torch.mm(left, right, out=home)):
            return towards_x, None, None
        return towards_x, left.mm(right), None
