"""Products with weights, whose gradients are written where they are needed."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from fsharding.base import _compat, _functorch
from fsharding.base.errors import ConfigError, message
from fsharding.base.public import public
from fsharding.formats.blocks import Blocks
from fsharding.formats.codec import Scales
from fsharding.formats.quantized import Quantized, dequantize, numbers_of
from fsharding.ops.grad_sink import put_term, takes_terms
from fsharding.ops.once import differentiable_once
from fsharding.ops.scaled_mm import (
    Codes,
    ScaledKernel,
    codes_of,
    multiply_codes,
    scaled_kernel,
    takes_shapes,
    transposed,
)

__all__ = ["scaled_matmul"]


@public
def scaled_matmul(x: Tensor, weight: Tensor | Quantized, dim: int) -> Tensor:
    """Sums over the last dim of x and a dim of a weight.

    Args:
        x: floating point [..., D], the rows to multiply.
        weight: [F, D] for dim 1, [D, F] for dim 0; a `Quantized` too.
        dim: 1 for `x @ weight.T`, 0 for `x @ weight`.

    Returns:
        [..., F] in the dtype of both.

    Raises:
        ConfigError: a strict `Quantized` for which the device has no kernel.

    Example:
        >>> x, up, down = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 3)
        >>> fs.ops.scaled_matmul(fs.ops.scaled_matmul(x, up, 1), down, 0).shape
        torch.Size([2, 3])
    """
    return _of_quantized(x, weight, dim) if isinstance(weight, Quantized) else _of_tensor(x, weight, dim)


@_compat.outside_of_graphs
def _of_quantized(x: Tensor, weight: Quantized, dim: int) -> Tensor:
    kernel = _kernel_for(x, weight, dim)
    if kernel is None and not _takes_columns(x, weight, dim):
        return _of_tensor(x, dequantize(weight), dim)
    return cast(Tensor, _QuantizedProduct.apply(x, weight.carrier, weight, kernel, dim))


def _of_tensor(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    if not takes_terms(weight):
        return _multiply(x, weight, dim)
    if x.ndim < 2 or x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
        return _multiply(x, weight, dim)
    return cast(Tensor, _Product.apply(x, weight, dim))


def _multiply(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    return F.linear(x, weight) if dim else x @ weight


def _kernel_for(x: Tensor, weight: Quantized, dim: int) -> ScaledKernel | None:
    """Return the kernel for a product; None if the weight is dequantized. Refuse a strict precision without one."""
    device = weight.device.type
    if not (weight.strict or device != "cpu") or not _is_plain(x, weight) or _compat.is_fake(x):
        return None
    kernel = scaled_kernel(weight.format, device, x.dtype)
    columns, summed = weight.shape if dim else reversed(weight.shape)
    rows = x.numel() // max(1, x.shape[-1])
    why = "" if kernel.exists else kernel.reason
    why = why or takes_shapes(kernel, rows, summed, columns) or takes_shapes(kernel, rows, columns, summed)
    if any(s and s + n > b for s, n, b in zip(weight.start, weight.shape, weight.block, strict=True)):
        why = why or f"the part of this rank begins inside of a block, at {list(weight.start)}"
    if why and weight.strict:
        text = f"has no kernel for {weight.format} on {device}, which is asked for with strict=True."
        mend = "Leave strict out, and such products dequantize; `fsharding doctor` says which formats have one."
        raise ConfigError(message(text, [f"{weight!r}: {why}"], mend))
    return None if why or not (dim or kernel.transposes) else kernel


def _takes_columns(x: Tensor, weight: Quantized, dim: int) -> bool:
    """Whether backward gathers a weight once more for a product, in blocks along the dim that it sums."""
    return weight.columnwise is not None and dim == 1 and _is_plain(x, weight)


def _is_plain(x: Tensor, weight: Quantized) -> bool:
    """Whether a product is one of matrices in one dtype, outside of transforms and of autocast."""
    fits = x.ndim >= 2 and weight.ndim == 2 and x.dtype == weight.dtype
    return fits and not _functorch.in_functorch() and not torch.is_autocast_enabled(weight.device.type)


class _QuantizedProduct(Function):
    """A product that saves quantized values for backward, or nothing of a weight that is gathered once more."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, carrier: Tensor | None, weight: Quantized, kernel: ScaledKernel | None, dim: int
    ) -> Tensor:
        # The carrier is the input whose gradient is the weight's.
        values, scales, outer = weight.values, weight.scales, weight.outer
        ctx.kernel = kernel
        ctx.dim = dim
        ctx.static = (weight.format, weight.columns, weight.dtype, weight.block)
        ctx.columnwise = weight.columnwise if _takes_columns(x, weight, dim) else None
        if ctx.columnwise is None:
            ctx.save_for_backward(x, values, scales, outer, carrier if values is None else None)
        else:
            ctx.save_for_backward(x, None, None, None, None)
            if ctx.needs_input_grad[0]:
                ctx.columnwise.want()
        if kernel is None:
            return _multiply(x, numbers_of(weight), dim)
        codes = _codes(weight, values, scales, outer)
        y = multiply_codes(x.flatten(0, -2), codes if dim else codes.t(), kernel)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *held = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        with torch.no_grad():
            towards_x = _towards_x(ctx, grad, *held).view(x.shape) if ctx.needs_input_grad[0] else None
            found = towards_x, _towards_weight(ctx, grad, x)
        rule = "ops.scaled_matmul multiplies quantized values here, which autograd can differentiate once only."
        return *differentiable_once(rule, found, (grads[0], x, held[-1])), *(None,) * 3


def _towards_weight(ctx: Any, grad: Tensor, x: Tensor) -> Tensor | None:
    """The gradient of a weight; None if none is wanted, or if it has been written where it is needed."""
    # In a pipeline's B action the weight gradient is not wanted although the weight requires one.
    if not ctx.needs_input_grad[1] or not _compat.is_wanted(node := ctx.next_functions[1][0]):
        return None
    flat = x.flatten(0, -2)
    left, right = (grad.t(), flat) if ctx.dim else (flat.t(), grad)
    written = hasattr(node, "put_term") and put_term(node, left.dtype, lambda home: torch.mm(left, right, out=home))
    return None if written else left.mm(right)


def _towards_x(
    ctx: Any, grad: Tensor, values: Tensor | None, scales: Tensor | None, outer: Tensor | None, carrier: Tensor | None
) -> Tensor:
    """The gradient of the activations of a `_QuantizedProduct`, from what it has saved."""
    format, columns, dtype, block = ctx.static
    if ctx.columnwise is not None:
        return _by_columns(grad, ctx.columnwise.gathered(), format, ctx.kernel)
    weight = Quantized(values, scales, format, dtype, block, columns, outer, carrier)
    if ctx.dim and not ctx.kernel.transposes:
        return grad.mm(dequantize(weight))
    codes = _codes(weight, values, scales, outer)
    return multiply_codes(grad, codes.t() if ctx.dim else codes, ctx.kernel)


def _by_columns(grad: Tensor, weight: Quantized, format: Blocks, kernel: ScaledKernel | None) -> Tensor:
    """`grad @ weight`, whose blocks lie along the dim that is summed; by a kernel for `format`, or dequantized."""
    whole_blocks = not any(start % size for start, size in zip(weight.start, weight.block, strict=True))
    if kernel is None or not whole_blocks:
        return grad.mm(numbers_of(weight))
    return multiply_codes(grad, transposed(weight, format), kernel)


def _codes(weight: Quantized, values: Tensor | None, scales: Tensor | None, outer: Tensor | None) -> Codes:
    """The codes of a weight; of one that is held as its numbers, those that stand for them."""
    if values is None:
        assert weight.carrier is not None
        return codes_of(weight.carrier.detach(), weight.format)
    assert scales is not None
    return Codes(values, Scales(scales, outer), weight.format, weight.columns)


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
        towards_x = None if weight is None else grad.mm(weight if ctx.dim else weight.t()).view(x.shape)
        return towards_x, _towards_weight(ctx, grad, x), None
