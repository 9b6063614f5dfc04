"""Formats of low precision as values: the type of an element, which elements share a scale, how both are rounded.

Guarantee: which block an element is in depends on its place in the whole tensor alone, never on who holds it.
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
    """A format: codes of 8 or 4 bits, and a scale for each block of elements.

    A block is a rectangle of the last two dims of a tensor; other dims are matrices side by side. Blocks at the edge of
    a tensor are smaller. A tensor of one dim is one row.

    Attributes:
        dtype: of an element: `torch.float8_e4m3fn`, `torch.float8_e5m2`, `torch.float4_e2m1fn_x2`, or one that
            `fs.formats.register_element` has added.
        block: rows and columns of a block; "row" for a whole row, "tensor" for a whole matrix.
        scale: "float32": the largest magnitude of the block over the largest number of the dtype. "e8m0": the power of
            two below it by exponents, in a byte (MX). "e4m3": a byte, relative to a float32 of the whole matrix
            (NVFP4).
        rounding: of elements: "nearest", ties to even; or "stochastic", up or down with the probability that makes
            the mean exact, by bits that follow from a key, a name and the place of the element in the whole tensor.

    Raises:
        ConfigError: no such dtype, scale or rounding, or a block without elements.

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
            raise ConfigError(message("cannot be made so.", rows))

    @property
    def element(self) -> Element:
        """What a code of its dtype stands for."""
        return ELEMENTS[self.dtype]

    @property
    def stochastic(self) -> bool:
        """Whether rounding wants a key."""
        return self.rounding == "stochastic"

    @property
    def has_outer(self) -> bool:
        """Whether there is a scale of the whole matrix beside the blocks' scales."""
        return self.scale == "e4m3"

    @property
    def for_moments(self) -> bool:
        """Whether moments of optimizers can be kept in it: codes of a byte, and no scale but the blocks'."""
        return self.element.bits == 8 and not self.has_outer

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype in which scales are stored; bytes are codes of their own."""
        return torch.float32 if self.scale == "float32" else torch.uint8

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of a block of a tensor of this shape; at least 1 each."""
        rows, columns = (1, *shape)[-2:]
        if self.block == "tensor":
            return max(1, rows), max(1, columns)
        if self.block == "row":
            return 1, max(1, columns)
        return self.block

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a tensor of at least one dim."""
        rows, columns = self.sizes(shape)
        of_rows, of_columns = (1, *shape)[-2:]
        last = -(-of_columns // columns)
        return (last,) if len(shape) == 1 else (*shape[:-2], -(-of_rows // rows), last)

    def code_shape(self, shape: tuple[int, ...], *, packed: bool = True) -> tuple[int, ...]:
        """The shape of the codes as uint8: two of 4 bits in a byte of the last dim, if they are packed."""
        return (*shape[:-1], -(-shape[-1] // 2)) if packed and self.element.bits == 4 else shape

    def bytes(self, shape: tuple[int, ...]) -> int:
        """The bytes of codes and scales of a tensor of this shape."""
        scales = math.prod(self.grid(shape)) * self.scale_dtype.itemsize
        outer = 4 * math.prod(shape[:-2]) if self.has_outer else 0
        return math.prod(self.code_shape(shape)) + scales + outer

    @property
    def one_way(self) -> bool:
        """Whether blocks lie along one dim, so that they serve sums along that dim alone."""
        return self.block == "row" or (isinstance(self.block, tuple) and (1 in self.block) and self.block != (1, 1))

    def across(self, shape: tuple[int, ...]) -> Blocks:
        """The same format with blocks along the other one of the last two dims: the format of the transposed tensor.

        Args:
            shape: of a tensor of at least two dims, whose rows are a block where a block is a row.

        Example:
            >>> fs.formats.MXFP8.across((64, 96)).block, fs.formats.ROWWISE.across((64, 96)).block
            ((32, 1), (64, 1))
        """
        rows, columns = (max(1, shape[-2]), 1) if self.block == "row" else self.sizes(shape)[::-1]
        return replace(self, block=(rows, columns))

    def with_rounding(self, rounding: Rounding) -> Blocks:
        """The same format with another rounding of elements."""
        return replace(self, rounding=rounding)

    @property
    def block_text(self) -> str:
        """The block in words, such as "1x32" or "row"."""
        return self.block if isinstance(self.block, str) else "x".join(map(str, self.block))

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}[{self.block_text}, {self.scale}{', stochastic' if self.stochastic else ''}]"


TENSORWISE = Blocks(E4M3)
"""One float32 scale for a matrix."""
ROWWISE = Blocks(E4M3, "row")
"""A float32 scale for each row."""
E4M3_1x128 = Blocks(E4M3, (1, 128))
"""Activations and gradients of DeepSeek-V3 (2024)."""
E4M3_128x128 = Blocks(E4M3, (128, 128))
"""Weights of DeepSeek-V3 (2024): blocks that serve a product and its transpose."""
MXFP8 = Blocks(E4M3, (1, 32), "e8m0")
"""Microscaling, OCP MX 1.0 (2023)."""
MXFP8_E5M2 = Blocks(E5M2, (1, 32), "e8m0")
"""The same with a wider exponent, for gradients."""
MXFP4 = Blocks(E2M1, (1, 32), "e8m0")
"""The same with four bits."""
NVFP4 = Blocks(E2M1, (1, 16), "e4m3")
"""Four bits, blocks of 16 with scales in e4m3, and a float32 for the matrix."""
