"""Quantize and dequantize plain tensors: amax -> scales -> values, and back.

Guarantee: given the scales of the full tensor, a slice gets the values that the full tensor has there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsharding.formats.blocks import Blocks

__all__ = [
    "Scales", "amaxes", "as_bytes", "coded", "decode", "encode", "factors", "of_matrices", "pack",
    "round_stochastic", "scales_of", "touched", "unpack",
]  # fmt: skip

_EXPONENT = 0xFF  # the exponent bits of a float32, shifted down; all ones means inf or NaN
_NAN_E8M0 = 255
_TINY = 2.0**-126  # the smallest normal float32
_LEAST_E4M3 = 2.0**-9  # the smallest positive e4m3 scale


class Scales(NamedTuple):
    """The scales of a tensor."""

    blocks: Tensor  # one per block, in `Blocks.scale_dtype`
    outer: Tensor | None = None  # float32, one per matrix, in the shape of the leading dims; None for most formats


# --------------------------------------------------------------------------------------------------------------- blocks
def touched(start: int, size: int, block: int) -> tuple[int, int]:
    """Return the half-open range of blocks along a dim that a slice of it touches; empty for an empty slice."""
    return start // block, -(-(start + size) // block) if size else start // block


def _bounds(shape: Sequence[int], block: tuple[int, int], start: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the blocks that a slice touches: rows of blocks, then columns."""
    (r0, r1), (c0, c1) = (touched(s, n, b) for s, n, b in zip(start, (1, *shape)[-2:], block, strict=True))
    return r0, r1, c0, c1


def amaxes(x: Tensor, block: tuple[int, int], start: tuple[int, int] = (0, 0)) -> Tensor:
    """Return the amax of each block that a slice touches, over the slice's elements only."""
    matrix = x.unsqueeze(0) if x.ndim == 1 else x
    r0, r1, c0, c1 = _bounds(matrix.shape, block, start)
    above = start[0] - r0 * block[0]
    before = start[1] - c0 * block[1]
    below = (r1 - r0) * block[0] - above - matrix.shape[-2]
    after = (c1 - c0) * block[1] - before - matrix.shape[-1]
    size = matrix.abs().to(torch.float32)
    if size.numel() == 0:
        result = size.new_zeros(*matrix.shape[:-2], r1 - r0, c1 - c0)
    else:
        if above or below or before or after:
            # Zeros don't change an amax, so partial blocks at the edges are padded to full ones.
            size = F.pad(size, (before, after, above, below))
        result = size.reshape(*matrix.shape[:-2], r1 - r0, block[0], c1 - c0, block[1]).amax((-3, -1))
    return result[0] if x.ndim == 1 else result


def of_matrices(amax: Tensor) -> Tensor:
    """Reduce block amaxes [..., rows, columns] to the amax of each matrix [...]."""
    flat = amax.flatten(-2)
    return flat.amax(-1) if flat.shape[-1] else flat.new_zeros(flat.shape[:-1])


def scales_of(amax: Tensor, format: Blocks, outer_amax: Tensor | None = None) -> Scales:
    """Compute the scales of blocks from their amaxes."""
    finite = amax.isfinite()
    element = format.element
    if format.scale == "e8m0":
        # MX 1.0: the exponent of amax minus that of the largest element, both read from the bits: no log2 rounds.
        exponent = (amax.view(torch.int32) >> 23) & _EXPONENT
        scale = (exponent - element.exponent).clamp(0, _NAN_E8M0 - 1)
        return Scales(torch.where(finite, scale, _NAN_E8M0).to(torch.uint8))
    if format.scale == "float32":
        return Scales(_over(amax, element.largest))
    assert outer_amax is not None
    # NVFP4: the outer scale maps the largest block scale of the matrix to the largest e4m3 value. The lower clamp keeps
    # a block of small values from a scale of 0.
    largest = torch.finfo(torch.float8_e4m3fn).max
    outer = _over(outer_amax, largest * element.largest)
    inner = (amax / element.largest) / outer[..., None, None].reshape(*outer.shape, *(1,) * (amax.ndim - outer.ndim))
    inner = torch.where(finite, inner, torch.nan).clamp(_LEAST_E4M3, largest)
    return Scales(inner.to(torch.float8_e4m3fn).view(torch.uint8), outer)


def _over(amax: Tensor, largest: float) -> Tensor:
    """Return the scale that maps `amax` to `largest`: 1 for zero, NaN for inf and NaN."""
    scale = torch.where(amax > 0, (amax / largest).clamp(min=_TINY), 1.0)
    return torch.where(amax.isfinite(), scale, torch.nan)


def factors(scales: Scales, format: Blocks) -> Tensor:
    """Decode scales to float32, the factor of each block's values."""
    blocks = scales.blocks
    if format.scale == "float32":
        return blocks
    if format.scale == "e8m0":
        exponent = blocks.to(torch.int32)
        bits = torch.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is subnormal
        return torch.where(exponent == _NAN_E8M0, 0x7FC00000, bits).view(torch.float32)
    assert scales.outer is not None
    inner = blocks.view(torch.float8_e4m3fn).to(torch.float32)
    return inner * scales.outer.reshape(*scales.outer.shape, *(1,) * (inner.ndim - scales.outer.ndim))


def _apply(x: Tensor, factor: Tensor, block: tuple[int, int], start: tuple[int, int], *, divide: bool) -> Tensor:
    """Multiply or divide a slice by the factors of the blocks that it touches."""
    matrix, of_block = (x.unsqueeze(0), factor.unsqueeze(0)) if x.ndim == 1 else (x, factor)
    rows, columns = matrix.shape[-2:]
    # Full blocks broadcast their factor over a reshape; otherwise each row and column selects its factor.
    if rows % block[0] == 0 and columns % block[1] == 0 and start[0] % block[0] == 0 and start[1] % block[1] == 0:
        parts = matrix.reshape(*matrix.shape[:-2], rows // block[0], block[0], columns // block[1], block[1])
        each = of_block[..., :, None, :, None]
        return (parts / each if divide else parts * each).reshape(x.shape)
    for dim, first, size, along in ((-2, start[0], rows, block[0]), (-1, start[1], columns, block[1])):
        place = torch.arange(first, first + size, device=x.device) // along - first // along
        of_block = of_block.index_select(dim, place)
    return (matrix / of_block if divide else matrix * of_block).reshape(x.shape)


def round_stochastic(x: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Round to bfloat16 or float16, up or down with the probability that makes the mean exact."""
    dropped = 1 << (16 if dtype == torch.bfloat16 else 13)  # 7 or 10 of the 23 mantissa bits are kept
    # A carry out of the mantissa increments the exponent, which is the correct rounding up.
    bits = x.view(torch.int32) + (noise * dropped).to(torch.int32)
    rounded = torch.where(x.isfinite(), (bits & -dropped).view(torch.float32), x)
    if dtype == torch.float16:
        # float16 subnormals are multiples of 2^-24, so dropping mantissa bits would round them on a wrong grid.
        steps = x.abs() * 2.0**24
        down = steps.floor()
        small = ((down + (noise < steps - down)) * 2.0**-24).copysign(x)
        rounded = torch.where(x.abs() < 2.0**-14, small, rounded)
    return rounded.to(dtype)


def encode(
    x: Tensor,
    scales: Scales,
    format: Blocks,
    *,
    block: tuple[int, int] | None = None,
    start: tuple[int, int] = (0, 0),
    noise: Tensor | None = None,
) -> Tensor:
    """Quantize a tensor, or a slice of one, with given scales; one value per byte."""
    assert (noise is not None) == format.stochastic, format
    block = block or format.sizes(tuple(x.shape))
    over = _apply(x.to(torch.float32), factors(scales, format), block, start, divide=True)
    return format.element.encode(over, noise)


def coded(
    x: Tensor, format: Blocks, *, block: tuple[int, int] | None = None, noise: Tensor | None = None
) -> tuple[Tensor, Scales]:
    """Quantize a full tensor: values, one per byte, and scales."""
    block = block or format.sizes(tuple(x.shape))
    amax = amaxes(x, block)
    scales = scales_of(amax, format, of_matrices(amax) if format.has_outer else None)
    return encode(x, scales, format, block=block, noise=noise), scales


def decode(
    codes: Tensor,
    scales: Scales,
    format: Blocks,
    dtype: torch.dtype = torch.float32,
    *,
    block: tuple[int, int] | None = None,
    start: tuple[int, int] = (0, 0),
) -> Tensor:
    """Dequantize: values times scales, computed in float32 and rounded once to `dtype`."""
    block = block or format.sizes(tuple(codes.shape))
    return _apply(format.element.decode(codes), factors(scales, format), block, start, divide=False).to(dtype)


def as_bytes(scales: Tensor) -> Tensor:
    """View scales as bytes, along a new last dim: uint8[..., itemsize]."""
    return scales.contiguous().unsqueeze(-1).view(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """Pack two 4-bit values per byte, the first in the low half; an odd row is padded with 0."""
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """Undo `pack`: one value per byte, `columns` per row."""
    both = torch.stack((packed & 0xF, packed >> 4), -1)
    return both.flatten(-2)[..., :columns]
