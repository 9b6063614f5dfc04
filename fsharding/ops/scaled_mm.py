"""Products with quantized weights: by torch's scaled kernels where the device has one, else dequantized."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from fsharding.base import _compat, _functorch, devices
from fsharding.base.errors import ConfigError, message
from fsharding.base.public import public
from fsharding.formats import E4M3, Blocks, codec
from fsharding.formats.codec import Scales
from fsharding.formats.precision import Precision
from fsharding.formats.quantized import Quantized, Weight, dequantize, numbers_of
from fsharding.ops.matmul import multiply, product, weight_gradient
from fsharding.ops.once import differentiable_once

__all__ = [
    "Matrix", "ScaledKernel", "multiply_quantized", "quantized_matrix", "refuse_missing_kernel", "scaled_kernel",
    "scaled_matmul", "takes_shapes", "transposed",
]  # fmt: skip


@public
def scaled_matmul(x: Tensor, weight: Weight, dim: int) -> Tensor:
    """Multiply activations with a weight, quantized or not: `[.., D] -> [.., F]`.

    A `Quantized` weight is multiplied by the device's scaled kernel (see `scaled_kernel`), or dequantized first.

    Args:
        x: Floating point [..., D].
        weight: [F, D] for dim 1, [D, F] for dim 0: a tensor or a `Quantized`.
        dim: Dim of the weight that is summed over: 1 for `x @ weight.T`, 0 for `x @ weight`.

    Returns:
        [..., F] in the dtype of both.

    Raises:
        ConfigError: A `Quantized` is strict, and the device has no kernel for it.

    Example:
        >>> x, up, down = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 3)
        >>> fs.ops.scaled_matmul(fs.ops.scaled_matmul(x, up, 1), down, 0).shape
        torch.Size([2, 3])
    """
    return _of_quantized(x, weight, dim) if isinstance(weight, Quantized) else product(x, weight, dim)


@_compat.outside_of_graphs
def _of_quantized(x: Tensor, weight: Quantized, dim: int) -> Tensor:
    kernel = _kernel_for(x, weight, dim)
    if kernel is None and not _takes_columns(x, weight, dim):
        return product(x, dequantize(weight), dim)
    return cast(Tensor, _QuantizedProduct.apply(x, weight.carrier, weight, kernel, dim))


def _kernel_for(x: Tensor, weight: Quantized, dim: int) -> ScaledKernel | None:
    """Return the kernel for a product; None if the weight is dequantized. Refuse a strict precision without one."""
    device = weight.device.type
    if not (weight.strict or device != "cpu") or not _is_plain(x, weight) or _compat.is_fake(x):
        return None
    kernel = scaled_kernel(weight.format, device, x.dtype)
    columns, summed = weight.shape if dim else reversed(weight.shape)
    rows = x.numel() // max(1, x.shape[-1])
    why = kernel.reason or takes_shapes(kernel, rows, summed, columns) or takes_shapes(kernel, rows, columns, summed)
    if any(s and s + n > b for s, n, b in zip(weight.start, weight.shape, weight.block, strict=True)):
        why = why or f"this rank's shard begins inside a block, at {list(weight.start)}"
    if why and weight.strict:
        text = f"has no kernel for {weight.format} on {device}, which strict=True requires."
        mend = "Leave strict out to dequantize instead; `fsharding doctor` lists the formats that have a kernel."
        raise ConfigError(message(text, [f"{weight!r}: {why}"], mend))
    return None if why or not (dim or kernel.transposes) else kernel


def _takes_columns(x: Tensor, weight: Quantized, dim: int) -> bool:
    """Return whether backward gathers the weight a second time, in blocks along the dim that it sums."""
    return weight.columnwise is not None and dim == 1 and _is_plain(x, weight)


def _is_plain(x: Tensor, weight: Quantized) -> bool:
    """Return whether a product multiplies matrices of one dtype, outside transforms and autocast."""
    fits = x.ndim >= 2 and weight.ndim == 2 and x.dtype == weight.dtype
    return fits and not _functorch.in_functorch() and not torch.is_autocast_enabled(weight.device.type)


class _QuantizedProduct(Function):
    """A product that saves quantized values for backward, or nothing of a weight that is gathered a second time."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, carrier: Tensor | None, weight: Quantized, kernel: ScaledKernel | None, dim: int
    ) -> Tensor:
        # The carrier is the tensor of autograd's graph whose gradient is the weight's.
        values, scales, outer = weight.values, weight.scales, weight.outer
        ctx.kernel = kernel
        ctx.dim = dim
        ctx.static = (weight.format, weight.columns, weight.dtype, weight.block)
        ctx.columns = None
        if weight.columnwise is None or not _takes_columns(x, weight, dim):
            ctx.save_for_backward(x, values, scales, outer, carrier if values is None else None)
        else:
            ctx.save_for_backward(x, None, None, None, None)
            ctx.columns = weight.columnwise() if ctx.needs_input_grad[0] else None
        if kernel is None:
            return multiply(x, numbers_of(weight), dim)
        matrix = _matrix_of(weight)
        y = multiply_quantized(x.flatten(0, -2), matrix if dim else matrix.t(), kernel)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *held = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        with torch.no_grad():
            towards_x = _towards_x(ctx, grad, *held).view(x.shape) if ctx.needs_input_grad[0] else None
            found = towards_x, weight_gradient(ctx, grad, x)
        rule = "ops.scaled_matmul multiplies quantized values here, which autograd can differentiate once only."
        return *differentiable_once(rule, found, (grads[0], x, held[-1])), *(None,) * 3


def _towards_x(
    ctx: Any, grad: Tensor, values: Tensor | None, scales: Tensor | None, outer: Tensor | None, carrier: Tensor | None
) -> Tensor:
    """Return the gradient of the activations of a `_QuantizedProduct`, from what it has saved."""
    format, columns, dtype, block = ctx.static
    if ctx.columns is not None:
        return _by_columns(grad, ctx.columns(), format, ctx.kernel)
    weight = Quantized(values, scales, format, dtype, block, columns, outer, carrier)
    if ctx.dim and not ctx.kernel.transposes:
        return grad.mm(dequantize(weight))
    matrix = _matrix_of(weight)
    return multiply_quantized(grad, matrix.t() if ctx.dim else matrix, ctx.kernel)


def _by_columns(grad: Tensor, weight: Quantized, format: Blocks, kernel: ScaledKernel | None) -> Tensor:
    """Compute `grad @ weight` with blocks along the summed dim; by a kernel for `format`, or dequantized."""
    at_blocks = not any(start % size for start, size in zip(weight.start, weight.block, strict=True))
    if kernel is None or not at_blocks:
        return grad.mm(numbers_of(weight))
    return multiply_quantized(grad, transposed(weight, format), kernel)


def _matrix_of(weight: Quantized) -> Matrix:
    """Return the values and scales of a weight; quantize it if it is held as rounded numbers."""
    if weight.values is None:
        assert weight.carrier is not None
        return quantized_matrix(weight.carrier.detach(), weight.format)
    assert weight.scales is not None
    return Matrix(weight.values, Scales(weight.scales, weight.outer), weight.format, weight.columns)


# -------------------------------------------------------------------------------------------- which kernels there are
_WORST = 2.0**-6
"""Largest relative error, in the norm of a product, of a kernel that counts as correct."""


@dataclass(frozen=True)
class ScaledKernel:
    """The kernel that multiplies activations with weights in a format.

    Attributes:
        format: Format of the quantized weight.
        activations: Format of the other operand.
        device: Device type, such as "cuda".
        recipe: Torch's name for the scaling of both operands; "" if the device has no kernel.
        transposes: Whether it also sums over rows of a weight, as the gradient of x does; that else dequantizes.
        reason: Reason why there is no kernel; "" if there is one.

    Example:
        >>> kernel = fs.ops.scaled_kernel(fs.formats.NVFP4)
        >>> kernel.exists, kernel.device
        (False, 'cpu')
    """

    format: Blocks
    activations: Blocks
    device: str
    recipe: str
    transposes: bool
    reason: str = ""

    @property
    def exists(self) -> bool:
        """Whether the device has a kernel."""
        return bool(self.recipe)

    def __str__(self) -> str:
        if not self.exists:
            return f"{self.format} on {self.device}: none, {self.reason}"
        both = ", both ways" if self.transposes else ""
        return f"{self.format} on {self.device}: {self.recipe}, with activations in {self.activations}{both}"


def _recipe(format: Blocks, device: str) -> ScaledKernel:
    """Return the kernel that torch has for a format, untried; it has a reason if torch has none."""
    nearest = format.with_rounding("nearest")
    bits = format.element.bits
    key = (format.block, format.scale)
    if bits == 8 and key in (("tensor", "float32"), ("row", "float32")):
        return ScaledKernel(format, Blocks(E4M3, "row"), device, "RowWise", format.block == "tensor")
    if bits == 8 and key == ((128, 128), "float32"):
        return ScaledKernel(format, Blocks(E4M3, (1, 128)), device, "BlockWise128x128", True)
    if bits == 8 and key == ((1, 128), "float32"):
        return ScaledKernel(format, Blocks(E4M3, (1, 128)), device, "BlockWise1x128", False)
    if key == ((1, 32), "e8m0"):
        activations = nearest if bits == 4 else Blocks(E4M3, (1, 32), "e8m0")
        return ScaledKernel(format, activations, device, "BlockWise1x32", False)
    if bits == 4 and key == ((1, 16), "e4m3"):
        return ScaledKernel(format, nearest, device, "BlockWise1x16", False)
    return ScaledKernel(format, format, device, "", False, "torch has no recipe for it")


def scaled_kernel(format: Blocks, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> ScaledKernel:
    """Return the kernel that a device has for products with weights in a format, tried out once per process.

    On the CPU only strict products use it: there the kernel dequantizes, too.

    Args:
        format: Format of the quantized weight.
        device: Device type, such as "cpu" or "cuda".
        dtype: Dtype of the activations and of the product.

    Returns:
        A `ScaledKernel`; its `reason` explains why there is none.

    Example:
        >>> print(fs.ops.scaled_kernel(fs.formats.MXFP8))
        float8_e4m3fn[1x32, e8m0] on cpu: none, torch has no such kernel for the CPU
    """
    return _scaled_kernel(format.with_rounding("nearest"), device, dtype)


def refuse_missing_kernel(precision: Precision, device: str) -> None:
    """Refuse a strict precision on a device without a kernel for its format."""
    if not precision.strict or not isinstance(precision.compute, Blocks) or _compat.makes_fakes():
        return
    kernel = scaled_kernel(precision.compute, device, precision.activation_dtype or torch.bfloat16)
    if not kernel.exists:
        mend = "Leave strict out to dequantize instead; `fsharding doctor` lists the formats that have a kernel."
        raise ConfigError(message("has a strict precision without a kernel for it.", [str(kernel)], mend))


@functools.cache
def _scaled_kernel(format: Blocks, device: str, dtype: torch.dtype) -> ScaledKernel:
    kernel = _recipe(format, device)
    reason = _why_not(kernel, dtype) if kernel.exists else ""
    return replace(kernel, recipe="", transposes=False, reason=reason) if reason else kernel


def _why_not(kernel: ScaledKernel, dtype: torch.dtype) -> str:
    """Try a kernel on two matrices; return why it can't be used, or "" if it is correct."""
    if kernel.device == "cpu" and kernel.recipe != "RowWise":
        return "torch has no such kernel for the CPU"
    if kernel.device != "cpu" and not devices.is_here(kernel.device):
        return f"this machine has no {kernel.device} device"
    # A selective checkpoint would mistake this product for the first one of the function that it recomputes.
    with _compat.outside_of_modes(), torch.no_grad():
        numbers = torch.arange(256 * 256, dtype=torch.float32)
        x = (numbers * 0.7).sin().view(256, 256).to(kernel.device, dtype)
        w = quantized_matrix((numbers * 1.3).cos().view(256, 256).to(kernel.device), kernel.format)
        try:
            result = multiply_quantized(x, w, kernel)
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            return str(error).strip().partition("\n")[0][:200] or type(error).__name__
        rounded = _numbers(quantized_matrix(x, kernel.activations))
        want = rounded @ _numbers(w).t()
        away = float((result.double() - want).norm() / want.norm())
    return "" if away <= _WORST else f"it is {away:.1%} away from the dequantized product"


def takes_shapes(kernel: ScaledKernel, rows: int, summed: int, columns: int) -> str:
    """Return why a kernel does not take matrices of a size; "" if it does."""
    if kernel.device == "cpu":
        return ""
    block = {"RowWise": 16, "BlockWise1x16": 32, "BlockWise1x32": 32}.get(kernel.recipe, 128)
    least = 16 if kernel.recipe != "BlockWise128x128" else 128
    if summed % block or columns % least:
        return f"[{columns}, {summed}] is not in multiples of [{least}, {block}]"
    if kernel.recipe != "RowWise" and rows % 16:
        return f"{rows} tokens are not a multiple of 16"
    return ""


# --------------------------------------------------------------------------------------------------- quantized matrices
class Matrix(NamedTuple):
    """A quantized matrix [rows, columns], and its scales."""

    values: Tensor  # uint8 holds two values of 4 bits
    scales: Scales
    format: Blocks
    columns: int

    def t(self) -> Matrix:
        """Transpose a matrix whose format has square blocks, or one block."""
        assert self.format.element.bits == 8, self.format
        return Matrix(self.values.t(), Scales(self.scales.blocks.t()), self.format, self.values.shape[0])


def transposed(weight: Quantized, format: Blocks) -> Matrix:
    """Transpose a weight [N, K] with blocks along its rows, which then lie along the columns."""
    assert weight.values is not None and weight.scales is not None
    if weight.format.element.bits == 4:
        values = codec.pack(codec.unpack(weight.values, weight.columns).t().contiguous())
    else:
        values = weight.values.t().contiguous()
    return Matrix(values, Scales(weight.scales.t().contiguous(), weight.outer), format, weight.shape[0])


def quantized_matrix(x: Tensor, format: Blocks) -> Matrix:
    """Quantize a matrix to nearest."""
    format = format.with_rounding("nearest")
    values, scales = codec.coded(x, format)
    return Matrix(codec.pack(values) if format.element.bits == 4 else values, scales, format, x.shape[-1])


def _numbers(x: Matrix) -> Tensor:
    values = codec.unpack(x.values, x.columns) if x.format.element.bits == 4 else x.values
    return codec.decode(values, x.scales, x.format, torch.float64)


def multiply_quantized(x_MK: Tensor, w_NK: Matrix, kernel: ScaledKernel) -> Tensor:
    """Compute `x @ w.T` by a kernel, [M, N] in the dtype of x; x is quantized to the kernel's format."""
    return _CALLS[kernel.recipe](quantized_matrix(x_MK, kernel.activations), w_NK, x_MK.dtype)


def _typed(x: Matrix) -> Tensor:
    return x.values.contiguous().view(x.format.dtype)


_T = TypeVar("_T")
_Pair: TypeAlias = tuple[list[_T], list[_T]]


def _product(
    a: Tensor, b: Tensor, scales: _Pair[Tensor], recipes: _Pair[str], swizzles: list[str] | None, dtype: torch.dtype
) -> Tensor:
    """Call `torch.nn.functional.scaled_mm` on [M, K] and [K, N], with recipes and swizzles by torch's names."""
    first, second = ([getattr(F.ScalingType, name) for name in names] for names in recipes)
    swizzle = None if swizzles is None else [getattr(F.SwizzleType, name) for name in swizzles]
    return F.scaled_mm(a, b, scales[0], first, scales[1], second, swizzle, swizzle, output_dtype=dtype)


def _by_rows(a: Matrix, b: Matrix, dtype: torch.dtype) -> Tensor:
    count = b.values.shape[0]
    columns = b.scales.blocks.expand(count, 1).reshape(1, count).contiguous()
    return _product(_typed(a), _typed(b).t(), ([a.scales.blocks], [columns]), (["RowWise"], ["RowWise"]), None, dtype)


def _by_squares(a: Matrix, b: Matrix, dtype: torch.dtype) -> Tensor:
    """Multiply with square blocks: the kernel takes scales of tokens by row, of squares by column in fours."""
    squares = F.pad(b.scales.blocks, (0, -b.scales.blocks.shape[-1] % 4)).contiguous().t()
    tokens = a.scales.blocks.t().contiguous().t()
    recipes = (["BlockWise1x128"], ["BlockWise128x128"])
    return _product(_typed(a), _typed(b).t(), ([tokens], [squares]), recipes, None, dtype)


def _by_stripes(a: Matrix, b: Matrix, dtype: torch.dtype) -> Tensor:
    scales = [x.scales.blocks.t().contiguous().t() for x in (a, b)]
    recipes = (["BlockWise1x128"], ["BlockWise1x128"])
    return _product(_typed(a), _typed(b).t(), ([scales[0]], [scales[1]]), recipes, None, dtype)


def _by_bytes(a: Matrix, b: Matrix, dtype: torch.dtype) -> Tensor:
    scales = [[swizzled(x.scales.blocks).view(torch.float8_e8m0fnu)] for x in (a, b)]
    recipes = (["BlockWise1x32"], ["BlockWise1x32"])
    return _product(_typed(a), _typed(b).t(), (scales[0], scales[1]), recipes, ["SWIZZLE_32_4_4"], dtype)


def _by_bytes_and_outer(a: Matrix, b: Matrix, dtype: torch.dtype) -> Tensor:
    scales: list[list[Tensor]] = []
    for x in (a, b):
        assert x.scales.outer is not None
        scales.append([swizzled(x.scales.blocks).view(torch.float8_e4m3fn), x.scales.outer])
    recipes = (["BlockWise1x16", "TensorWise"], ["BlockWise1x16", "TensorWise"])
    swizzles = ["SWIZZLE_32_4_4", "NO_SWIZZLE"]
    return _product(_typed(a), _typed(b).t(), (scales[0], scales[1]), recipes, swizzles, dtype)


_CALLS: dict[str, Callable[[Matrix, Matrix, torch.dtype], Tensor]] = {
    "RowWise": _by_rows,
    "BlockWise128x128": _by_squares,
    "BlockWise1x128": _by_stripes,
    "BlockWise1x32": _by_bytes,
    "BlockWise1x16": _by_bytes_and_outer,
}


def swizzled(scales: Tensor) -> Tensor:
    """Return scales of rows [rows, blocks] in Blackwell's layout: flat tiles of 128 x 4, padded with zeros."""
    # Scale (r, c) of a tile is at 16 (r mod 32) + 4 (r div 32) + c.
    rows, blocks = scales.shape
    tiles = F.pad(scales, (0, -blocks % 4, 0, -rows % 128))
    return tiles.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4)).permute(0, 3, 2, 1, 4).flatten()
