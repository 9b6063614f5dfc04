"""Low-precision formats: the element dtype, the blocks that share a scale, and the rounding of both.

Guarantee: an element's block depends only on its index in the full tensor, never on the sharding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch

from fsharding.base.errors import ConfigError, message
from fsharding.base.public import public
from fsharding.formats.elements import E2M1, E4M3, E5M2, ELEMENTS, Element

__all__ = [
    "E4M3_1x128", "E4M3_128x128", "MXFP4", "MXFP8", "MXFP8_E5M2", "NVFP4", "ROWWISE", "TENSORWISE", "Blocks",
    "Rounding", "ScaleKind",
]  # fmt: skip

ScaleKind: TypeAlias = Literal["float32", "e8m0", "e4m3"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Blocks:
    """A low-precision format: elements of 8 or 4 bits, with one scale per block.

    A block is a rectangle of the last two dims; leading dims are batch dims, and a 1-D tensor is one row. Blocks at the
    edges are smaller. `fs.formats` has constants for OCP Microscaling (MX) 1.0 (2023), DeepSeek-V3 (arXiv:2412.19437)
    and NVIDIA's NVFP4.

    Attributes:
        dtype: Element dtype: `torch.float8_e4m3fn`, `torch.float8_e5m2`, `torch.float4_e2m1fn_x2`, or one added by
            `fs.formats.register_element`.
        block: Rows and columns of a block, "row" (a full row) or "tensor" (a full matrix).
        scale: Encoding of the scales. "float32": amax of the block divided by the largest value of `dtype`. "e8m0"
            (MX): a power of two in one byte. "e4m3" (NVFP4): one byte, relative to a float32 scale per matrix.
        rounding: Rounding of elements: "nearest" (ties to even), or "stochastic", which is unbiased. Its random bits
            are a function of a key, a name and the element's index in the full tensor.

    Raises:
        ConfigError: An unknown dtype, scale or rounding; an empty block.

    Example:
        >>> weights = fs.formats.Blocks(torch.float8_e4m3fn, (128, 128))
        >>> weights.grid((256, 200))
        (2, 2)
        >>> fs.formats.MXFP8.bytes((64, 64)) / (64 * 64)
        1.03125
    """

    dtype: torch.dtype
    block: tuple[int, int] | Literal["row", "tensor"] = "tensor"
    scale: ScaleKind = "float32"
    rounding: Rounding = "nearest"

    @public
    def __post_init__(self) -> None:
        rows: list[str] = []
        if self.dtype not in ELEMENTS:
            rows.append(f"dtype={self.dtype}: use one of {', '.join(map(str, ELEMENTS))}")
        if self.scale not in get_args(ScaleKind):
            rows.append(f"scale={self.scale!r}: use one of {', '.join(get_args(ScaleKind))}")
        if self.rounding not in get_args(Rounding):
            rows.append(f"rounding={self.rounding!r}: use one of {', '.join(get_args(Rounding))}")
        sizes = self.block if isinstance(self.block, tuple) else ()
        if self.block not in ("row", "tensor") and not (
            len(sizes) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes)
        ):
            rows.append(f'block={self.block!r}: use rows and columns from 1, such as (1, 32), or "row" or "tensor"')
        if rows:
            raise ConfigError(message("got invalid arguments.", rows, "Write fs.formats.MXFP8 for a common format."))

    @property
    def element(self) -> Element:
        """Values and rounding of the element dtype."""
        return ELEMENTS[self.dtype]

    @property
    def stochastic(self) -> bool:
        """Whether rounding is stochastic and needs a key."""
        return self.rounding == "stochastic"

    @property
    def has_outer(self) -> bool:
        """Whether each matrix has an outer float32 scale as well."""
        return self.scale == "e4m3"

    @property
    def for_moments(self) -> bool:
        """Whether optimizer moments can use it: 8-bit elements and no outer scale."""
        return self.element.bits == 8 and not self.has_outer

    @property
    def scale_dtype(self) -> torch.dtype:
        """Storage dtype of the block scales; uint8 holds their bits for "e8m0" and "e4m3"."""
        return torch.float32 if self.scale == "float32" else torch.uint8

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows and columns of a block in a tensor of this shape, at least 1 each."""
        rows, columns = (1, *shape)[-2:]
        if self.block == "tensor":
            return max(1, rows), max(1, columns)
        if self.block == "row":
            return 1, max(1, columns)
        return self.block

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor of at least one dim."""
        rows, columns = self.sizes(shape)
        of_rows, of_columns = (1, *shape)[-2:]
        last = -(-of_columns // columns)
        return (last,) if len(shape) == 1 else (*shape[:-2], -(-of_rows // rows), last)

    def code_shape(self, shape: tuple[int, ...], *, packed: bool = True) -> tuple[int, ...]:
        """Return the shape of the uint8 values; packed 4-bit values share a byte in pairs along the last dim."""
        return (*shape[:-1], -(-shape[-1] // 2)) if packed and self.element.bits == 4 else shape

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of quantized values and scales of a tensor of this shape."""
        scales = math.prod(self.grid(shape)) * self.scale_dtype.itemsize
        outer = 4 * math.prod(shape[:-2]) if self.has_outer else 0
        return math.prod(self.code_shape(shape)) + scales + outer

    @property
    def one_way(self) -> bool:
        """Whether blocks extend along one dim only, so only a matmul that contracts that dim can use them."""
        return self.block == "row" or (isinstance(self.block, tuple) and (1 in self.block) and self.block != (1, 1))

    def across(self, shape: tuple[int, ...]) -> Blocks:
        """Return this format with blocks along the other of the last two dims: the format of the transposed tensor.

        Args:
            shape: Shape of the tensor, at least two dims; it sets the block length if `block` is "row".

        Example:
            >>> fs.formats.MXFP8.across((64, 96)).block, fs.formats.ROWWISE.across((64, 96)).block
            ((32, 1), (64, 1))
        """
        rows, columns = (max(1, shape[-2]), 1) if self.block == "row" else self.sizes(shape)[::-1]
        return replace(self, block=(rows, columns))

    def with_rounding(self, rounding: Rounding) -> Blocks:
        """Return this format with a different rounding of elements."""
        return replace(self, rounding=rounding)

    @property
    def block_text(self) -> str:
        """Text of the block, such as "1x32" or "row"."""
        return self.block if isinstance(self.block, str) else "x".join(map(str, self.block))

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}[{self.block_text}, {self.scale}{', stochastic' if self.stochastic else ''}]"


TENSORWISE = Blocks(E4M3)
"""One float32 scale per matrix."""
ROWWISE = Blocks(E4M3, "row")
"""One float32 scale per row."""
E4M3_1x128 = Blocks(E4M3, (1, 128))
"""Activations and gradients of DeepSeek-V3 (2024, arXiv:2412.19437)."""
E4M3_128x128 = Blocks(E4M3, (128, 128))
"""Weights of DeepSeek-V3: square blocks serve a matmul and its transpose."""
MXFP8 = Blocks(E4M3, (1, 32), "e8m0")
"""8-bit microscaling, OCP MX 1.0 (2023)."""
MXFP8_E5M2 = Blocks(E5M2, (1, 32), "e8m0")
"""MXFP8 with a wider exponent, for gradients."""
MXFP4 = Blocks(E2M1, (1, 32), "e8m0")
"""4-bit microscaling, OCP MX 1.0 (2023)."""
NVFP4 = Blocks(E2M1, (1, 16), "e4m3")
"""NVIDIA's 4-bit format: blocks of 16 with e4m3 scales, and a float32 scale per matrix."""
