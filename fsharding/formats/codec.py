"""Codes and scales of tensors in low precision: plain functions on plain tensors.

Guarantee: a piece has the codes that the whole tensor has there, if it is given the scales of the whole.
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

_EXPONENT = 0xFF
"""The exponent bits of a float32, shifted down; all ones is what is not finite."""
_NAN_E8M0 = 255
_TINY = 2.0**-126
_LEAST_E4M3 = 2.0**-9


class Scales(NamedTuple):
    """The scales of a tensor."""

    blocks: Tensor  # one for each block: float32, or a byte as the format says
    # of whole matrices: float32 in the shape of the dims before the last two; None for most formats
    outer: Tensor | None = None


# --------------------------------------------------------------------------------------------------------------- blocks
def touched(start: int, size: int, block: int) -> tuple[int, int]:
    """The blocks of a dim that a part of it touches, first and last plus 1; none if it is empty."""
    return start // block, -(-(start + size) // block) if size else start // block


def _bounds(shape: Sequence[int], block: tuple[int, int], start: tuple[int, int]) -> tuple[int, int, int, int]:
    """The blocks that a piece touches: first and last row of blocks, then columns."""
    (r0, r1), (c0, c1) = (touched(s, n, b) for s, n, b in zip(start, (1, *shape)[-2:], block, strict=True))
    return r0, r1, c0, c1


def amaxes(x: Tensor, block: tuple[int, int], start: tuple[int, int] = (0, 0)) -> Tensor:
    """The largest magnitude in each block that a piece touches, of its own elements."""
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
            size = F.pad(size, (before, after, above, below))
        result = size.reshape(*matrix.shape[:-2], r1 - r0, block[0], c1 - c0, block[1]).amax((-3, -1))
    return result[0] if x.ndim == 1 else result


def of_matrices(amax: Tensor) -> Tensor:
    """The largest magnitudes of whole matrices, from the blocks' magnitudes: [..., rows, columns] to [...]."""
    flat = amax.flatten(-2)
    return flat.amax(-1) if flat.shape[-1] else flat.new_zeros(flat.shape[:-1])


def scales_of(amax: Tensor, format: Blocks, outer_amax: Tensor | None = None) -> Scales:
    """The scales of blocks, from the largest magnitudes in them."""
    finite = amax.isfinite()
    element = format.element
    if format.scale == "e8m0":
        exponent = (amax.view(torch.int32) >> 23) & _EXPONENT
        scale = (exponent - element.exponent).clamp(0, _NAN_E8M0 - 1)
        return Scales(torch.where(finite, scale, _NAN_E8M0).to(torch.uint8))
    if format.scale == "float32":
        return Scales(_over(amax, element.largest))
    assert outer_amax is not None
    largest = torch.finfo(torch.float8_e4m3fn).max
    outer = _over(outer_amax, largest * element.largest)
    inner = (amax / element.largest) / outer[..., None, None].reshape(*outer.shape, *(1,) * (amax.ndim - outer.ndim))
    inner = torch.where(finite, inner, torch.nan).clamp(_LEAST_E4M3, largest)
    return Scales(inner.to(torch.float8_e4m3fn).view(torch.uint8), outer)


def _over(amax: Tensor, largest: float) -> Tensor:
    """The factor by which a number of that size becomes `largest`; 1 for zeros, NaN for what is not finite."""
    scale = torch.where(amax > 0, (amax / largest).clamp(min=_TINY), 1.0)
    return torch.where(amax.isfinite(), scale, torch.nan)


def factors(scales: Scales, format: Blocks) -> Tensor:
    """Scales as float32: what a code is multiplied by, one for each block."""
    blocks = scales.blocks
    if format.scale == "float32":
        return blocks
    if format.scale == "e8m0":
        exponent = blocks.to(torch.int32)
        bits = torch.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is a subnormal number
        return torch.where(exponent == _NAN_E8M0, 0x7FC00000, bits).view(torch.float32)
    assert scales.outer is not None
    inner = blocks.view(torch.float8_e4m3fn).to(torch.float32)
    return inner * scales.outer.reshape(*scales.outer.shape, *(1,) * (inner.ndim - scales.outer.ndim))


def _apply(x: Tensor, factor: Tensor, block: tuple[int, int], start: tuple[int, int], *, divide: bool) -> Tensor:
    """A piece, times or over the factors of the blocks that it touches."""
    matrix, of_block = (x.unsqueeze(0), factor.unsqueeze(0)) if x.ndim == 1 else (x, factor)
    rows, columns = matrix.shape[-2:]
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
    dropped = 1 << (16 if dtype == torch.bfloat16 else 13)  # of the 23 bits of a mantissa, 7 or 10 stay
    # A carry goes from the mantissa into the exponent, as it should.
    bits = x.view(torch.int32) + (noise * dropped).to(torch.int32)
    rounded = torch.where(x.isfinite(), (bits & -dropped).view(torch.float32), x)
    if dtype == torch.float16:
        # Below its normal numbers float16 has steps of 2^-24.
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
    """The codes of a tensor, or of a piece of one, one a byte."""
    assert (noise is not None) == format.stochastic, format
    block = block or format.sizes(tuple(x.shape))
    over = _apply(x.to(torch.float32), factors(scales, format), block, start, divide=True)
    return format.element.encode(over, noise)


def coded(
    x: Tensor, format: Blocks, *, block: tuple[int, int] | None = None, noise: Tensor | None = None
) -> tuple[Tensor, Scales]:
    """The codes of a whole tensor, one a byte, and its scales; arguments as in `encode`."""
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
    """The numbers that codes stand for, times their scales: computed in float32 and rounded once."""
    block = block or format.sizes(tuple(codes.shape))
    return _apply(format.element.decode(codes), factors(scales, format), block, start, divide=False).to(dtype)


def as_bytes(scales: Tensor) -> Tensor:
    """Scales as bytes, in a last dim of their own: uint8[..., bytes of one]."""
    return scales.contiguous().unsqueeze(-1).view(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """Two codes of 4 bits in a byte, the first one low; the last byte of an odd row has one."""
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """The codes of `pack`, one a byte; `columns` says how many there are in a row."""
    both = torch.stack((packed & 0xF, packed >> 4), -1)
    return both.flatten(-2)[..., :columns]
