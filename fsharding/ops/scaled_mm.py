"""Products of quantized matrices by the scaled kernels of torch, and which of these a device has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsharding.base import _compat, devices
from fsharding.base.errors import ConfigError, message
from fsharding.formats import E4M3, Blocks, codec
from fsharding.formats.codec import Scales
from fsharding.formats.precision import Precision
from fsharding.formats.quantized import Quantized

__all__ = [
    "Codes", "ScaledKernel", "codes_of", "multiply_codes", "refuse_missing_kernel", "scaled_kernel", "takes_shapes",
    "transposed",
]  # fmt: skip

_WORST = 2.0**-6
"""Of the norm of a product: by how much a kernel that is right may differ from its reference."""


@dataclass(frozen=True)
class ScaledKernel:
    """Which kernel multiplies activations with a weight in a format.

    Attributes:
        format: the format in which the weight is quantized.
        activations: format of the other side.
        device: a type of device.
        recipe: torch's name for how both sides are scaled; "" where there is no kernel.
        transposes: it also sums over the rows of a weight, as the gradient of the activations does. Formats whose
            blocks lie along one dim cannot: such products are of dequantized weights.
        reason: why there is none.

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
        """Whether there is a kernel."""
        return bool(self.recipe)

    def __str__(self) -> str:
        if not self.exists:
            return f"{self.format} on {self.device}: none, {self.reason}"
        both = ", both ways" if self.transposes else ""
        return f"{self.format} on {self.device}: {self.recipe}, with activations in {self.activations}{both}"


class _Recipe(NamedTuple):
    name: str
    activations: Blocks
    transposes: bool


def _recipe(format: Blocks) -> _Recipe | None:
    """How torch names a format, and what goes with it; None for one that no kernel of torch takes."""
    nearest = format.with_rounding("nearest")
    bits = format.element.bits
    key = (format.block, format.scale)
    if bits == 8 and key in (("tensor", "float32"), ("row", "float32")):
        return _Recipe("RowWise", Blocks(E4M3, "row"), format.block == "tensor")
    if bits == 8 and key == ((128, 128), "float32"):
        return _Recipe("BlockWise128x128", Blocks(E4M3, (1, 128)), True)
    if bits == 8 and key == ((1, 128), "float32"):
        return _Recipe("BlockWise1x128", Blocks(E4M3, (1, 128)), False)
    if key == ((1, 32), "e8m0"):
        return _Recipe("BlockWise1x32", nearest if bits == 4 else Blocks(E4M3, (1, 32), "e8m0"), False)
    if bits == 4 and key == ((1, 16), "e4m3"):
        return _Recipe("BlockWise1x16", nearest, False)
    return None


def scaled_kernel(format: Blocks, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> ScaledKernel:
    """Which kernel a device has for products with weights in a format.

    It is tried out once in a process. On the CPU products do not use it unless they are strict: it dequantizes, too.

    Args:
        format: the format in which the weight is quantized.
        device: a type of device, such as "cpu" or "cuda".
        dtype: of activations and of the product.

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
        mend = "Leave strict out, and products dequantize; `fsharding doctor` says which formats have a kernel."
        raise ConfigError(message("has a strict precision without a kernel for it.", [str(kernel)], mend))


@functools.cache
def _scaled_kernel(format: Blocks, device: str, dtype: torch.dtype) -> ScaledKernel:
    recipe = _recipe(format)
    if recipe is None:
        return ScaledKernel(format, format, device, "", False, "torch has no recipe for it")
    kernel = ScaledKernel(format, recipe.activations, device, recipe.name, recipe.transposes)
    reason = _why_not(kernel, dtype)
    return replace(kernel, recipe="", transposes=False, reason=reason) if reason else kernel


def _why_not(kernel: ScaledKernel, dtype: torch.dtype) -> str:
    """Why a device lacks a kernel: it is tried on two matrices; "" if it is right."""
    if kernel.device == "cpu" and kernel.recipe != "RowWise":
        return "torch has no such kernel for the CPU"
    if kernel.device != "cpu" and not devices.is_here(kernel.device):
        return f"this machine has no {kernel.device} device"
    # A selective checkpoint would take this product for the first one of the function that it is to recompute.
    with _compat.outside_of_modes(), torch.no_grad():
        numbers = torch.arange(256 * 256, dtype=torch.float32)
        x = (numbers * 0.7).sin().view(256, 256).to(kernel.device, dtype)
        w = codes_of((numbers * 1.3).cos().view(256, 256).to(kernel.device), kernel.format)
        try:
            result = multiply_codes(x, w, kernel)
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            return str(error).strip().partition("\n")[0][:200] or type(error).__name__
        rounded = _numbers(codes_of(x, kernel.activations))
        want = rounded @ _numbers(w).t()
        away = float((result.double() - want).norm() / want.norm())
    return "" if away <= _WORST else f"it is {away:.1%} away from the dequantized product"


def takes_shapes(kernel: ScaledKernel, rows: int, summed: int, columns: int) -> str:
    """Why a kernel does not take matrices of a size; "" if it does."""
    if kernel.device == "cpu":
        return ""
    block = {"RowWise": 16, "BlockWise1x16": 32, "BlockWise1x32": 32}.get(kernel.recipe, 128)
    least = 16 if kernel.recipe != "BlockWise128x128" else 128
    if summed % block or columns % least:
        return f"[{columns}, {summed}] is not in multiples of [{least}, {block}]"
    if kernel.recipe != "RowWise" and rows % 16:
        return f"{rows} tokens are no multiple of 16"
    return ""


# ------------------------------------------------------------------------------------------------------------ products
class Codes(NamedTuple):
    """A matrix [rows, columns] in a format, and its scales."""

    values: Tensor  # uint8 holds two values of 4 bits
    scales: Scales
    format: Blocks
    columns: int  # of the matrix

    def t(self) -> Codes:
        """The transposed matrix, of a format whose blocks are square or all of it."""
        assert self.format.element.bits == 8, self.format
        return Codes(self.values.t(), Scales(self.scales.blocks.t()), self.format, self.values.shape[0])


def transposed(weight: Quantized, format: Blocks) -> Codes:
    """Transpose a weight [N, K] whose blocks lie along its rows, so that they lie along columns."""
    assert weight.values is not None and weight.scales is not None
    if weight.format.element.bits == 4:
        values = codec.pack(codec.unpack(weight.values, weight.columns).t().contiguous())
    else:
        values = weight.values.t().contiguous()
    return Codes(values, Scales(weight.scales.t().contiguous(), weight.outer), format, weight.shape[0])


def codes_of(x: Tensor, format: Blocks) -> Codes:
    """A matrix, rounded to the nearest number of a format."""
    format = format.with_rounding("nearest")
    values, scales = codec.coded(x, format)
    return Codes(codec.pack(values) if format.element.bits == 4 else values, scales, format, x.shape[-1])


def _numbers(codes: Codes) -> Tensor:
    values = codec.unpack(codes.values, codes.columns) if codes.format.element.bits == 4 else codes.values
    return codec.decode(values, codes.scales, codes.format, torch.float64)


def multiply_codes(x_MK: Tensor, w_NK: Codes, kernel: ScaledKernel) -> Tensor:
    """Return `x @ w.T` by a kernel, [M, N] in the dtype of x, with x rounded to its format of activations."""
    return _CALLS[kernel.recipe](codes_of(x_MK, kernel.activations), w_NK, x_MK.dtype)


def _typed(codes: Codes) -> Tensor:
    return codes.values.contiguous().view(codes.format.dtype)


def _product(
    a: Tensor,
    b: Tensor,
    scales: tuple[list[Tensor], list[Tensor]],
    recipes: tuple[list[str], list[str]],
    swizzles: list[str] | None,
    dtype: torch.dtype,
) -> Tensor:
    """`torch.nn.functional.scaled_mm` of [M, K] and [K, N], with recipes and swizzles by torch's names."""
    first, second = ([getattr(F.ScalingType, name) for name in names] for names in recipes)
    swizzle = None if swizzles is None else [getattr(F.SwizzleType, name) for name in swizzles]
    return F.scaled_mm(a, b, scales[0], first, scales[1], second, swizzle, swizzle, output_dtype=dtype)


def _by_rows(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    count = b.values.shape[0]
    columns = b.scales.blocks.expand(count, 1).reshape(1, count).contiguous()
    return _product(_typed(a), _typed(b).t(), ([a.scales.blocks], [columns]), (["RowWise"], ["RowWise"]), None, dtype)


def _by_squares(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    """Scales of tokens are given token by token; scales of squares column by column, in fours."""
    squares = F.pad(b.scales.blocks, (0, -b.scales.blocks.shape[-1] % 4)).contiguous().t()
    tokens = a.scales.blocks.t().contiguous().t()
    recipes = (["BlockWise1x128"], ["BlockWise128x128"])
    return _product(_typed(a), _typed(b).t(), ([tokens], [squares]), recipes, None, dtype)


def _by_stripes(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    scales = [x.scales.blocks.t().contiguous().t() for x in (a, b)]
    recipes = (["BlockWise1x128"], ["BlockWise1x128"])
    return _product(_typed(a), _typed(b).t(), ([scales[0]], [scales[1]]), recipes, None, dtype)


def _by_bytes(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    scales = [[swizzled(x.scales.blocks).view(torch.float8_e8m0fnu)] for x in (a, b)]
    recipes = (["BlockWise1x32"], ["BlockWise1x32"])
    return _product(_typed(a), _typed(b).t(), (scales[0], scales[1]), recipes, ["SWIZZLE_32_4_4"], dtype)


def _by_bytes_and_outer(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    scales: list[list[Tensor]] = []
    for x in (a, b):
        assert x.scales.outer is not None
        scales.append([swizzled(x.scales.blocks).view(torch.float8_e4m3fn), x.scales.outer])
    recipes = (["BlockWise1x16", "TensorWise"], ["BlockWise1x16", "TensorWise"])
    swizzles = ["SWIZZLE_32_4_4", "NO_SWIZZLE"]
    return _product(_typed(a), _typed(b).t(), (scales[0], scales[1]), recipes, swizzles, dtype)


_CALLS: dict[str, Callable[[Codes, Codes, torch.dtype], Tensor]] = {
    "RowWise": _by_rows,
    "BlockWise128x128": _by_squares,
    "BlockWise1x128": _by_stripes,
    "BlockWise1x32": _by_bytes,
    "BlockWise1x16": _by_bytes_and_outer,
}


def swizzled(scales: Tensor) -> Tensor:
    """Return scales of rows [rows, blocks] as Blackwell reads them: flat tiles of 128 x 4, padded with zeros."""
    # Scale (r, c) of a tile is at 16 (r mod 32) + 4 (r div 32) + c.
    rows, blocks = scales.shape
    tiles = F.pad(scales, (0, -blocks % 4, 0, -rows % 128))
    return tiles.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4)).permute(0, 3, 2, 1, 4).flatten()
