"""Elements of low precision: the numbers that one code can stand for, and how others are rounded to them.

Guarantee: the code of a number depends on the number and its noise alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fsharding.base.errors import ConfigError, message
from fsharding.base.public import public

__all__ = ["E2M1", "E4M3", "E5M2", "ELEMENTS", "Element", "register_element"]

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
E2M1 = torch.float4_e2m1fn_x2

_EXPONENT = 0xFF
"""The exponent bits of a float32, shifted down."""

_VALUES_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Element(Protocol):
    """The numbers that a code can stand for: zero, some positive ones, and their negatives.

    Example:
        >>> from fsharding.formats.elements import ELEMENTS
        >>> element = ELEMENTS[fs.formats.E4M3]
        >>> element.bits, element.largest, element.exponent
        (8, 448.0, 8)
    """

    @property
    def bits(self) -> int:
        """The bits of a code, 8 or 4; codes of 4 bits are sent two in a byte."""
        ...

    @property
    def largest(self) -> float:
        """The largest number."""
        ...

    @property
    def exponent(self) -> int:
        """The largest power of two that is at most `largest`, as its exponent."""
        ...

    def round(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Round numbers to those that a code can stand for.

        Args:
            x: float32; larger numbers become the largest.
            noise: for each of them a number in [0, 1): it is rounded up if its distance to the number below is larger.
                None rounds to the nearest, ties to even.

        Returns:
            float32; NaN may become anything, since the scale of its block is NaN.
        """
        ...

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the codes of rounded numbers, uint8. `x` may be overwritten; otherwise as `round`."""
        ...

    def decode(self, codes: Tensor) -> Tensor:
        """Return the numbers that codes stand for, float32."""
        ...


@dataclass(frozen=True)
class Float8:
    """A sign, an exponent and a mantissa, as torch has them; subnormal below the least exponent."""

    dtype: torch.dtype
    mantissa: int  # bits of it
    least: int  # the exponent of the smallest normal number
    exponent: int  # see `Element`
    largest: float  # see `Element`
    bits: int = 8  # see `Element`

    def round(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """See `Element`; NaN stays."""
        if noise is None:
            return x.clamp(-self.largest, self.largest).to(self.dtype).to(torch.float32)
        return self._rounded(x, noise)

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """See `Element`."""
        numbers = x.clamp_(-self.largest, self.largest) if noise is None else self._rounded(x, noise)
        return numbers.to(self.dtype).view(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """See `Element`."""
        return codes.view(self.dtype).to(torch.float32)

    def _rounded(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Numbers in whole steps of their exponent's mantissa."""
        size = x.abs()
        exponent = ((size.view(torch.int32) >> 23) & _EXPONENT).clamp(127 + self.least) - self.mantissa
        step = (exponent << 23).view(torch.float32)
        steps = size / step
        if noise is None:
            whole = steps.round()
        else:
            whole = steps.floor()
            whole += noise < steps - whole
        return torch.copysign((whole * step).clamp(max=self.largest), x)


@dataclass(frozen=True)
class Float4(Float8):
    """Four bits, for which torch has no arithmetic."""

    bits: int = 4

    def round(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """See `Element`."""
        return self._rounded(x, noise)

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """See `Element`; there is no code for NaN."""
        numbers = self._rounded(x, noise)
        size = numbers.abs().nan_to_num(0.0)
        code = torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, 4 + size / 2)).to(torch.uint8)
        code = torch.where(size == 6, 7, code)
        return code | (torch.signbit(numbers).to(torch.uint8) << 3)

    def decode(self, codes: Tensor) -> Tensor:
        """See `Element`."""
        table = torch.tensor([*_VALUES_E2M1, *(-x for x in _VALUES_E2M1)], device=codes.device)
        return table[codes.to(torch.int64)]


ELEMENTS: dict[torch.dtype, Element] = {
    E4M3: Float8(E4M3, mantissa=3, least=-6, exponent=8, largest=448.0),
    E5M2: Float8(E5M2, mantissa=2, least=-14, exponent=15, largest=57344.0),
    E2M1: Float4(E2M1, mantissa=1, least=0, exponent=2, largest=6.0),
}
"""By dtype: OCP 8-bit floating point (OFP8, 2023), and the 4-bit type of OCP Microscaling Formats (MX, 2023)."""


_OWN = frozenset(ELEMENTS)


@public
def register_element(dtype: torch.dtype, element: Element) -> None:
    """Make a dtype usable in `fs.formats.Blocks`: for gathers, sums of gradients and moments. Call it on every rank.

    Args:
        dtype: of one byte; a key, also where torch has no arithmetic for it.
        element: what its codes stand for; it replaces one that was registered before.

    Raises:
        ConfigError: the dtype is one of the library's own, or has more than a byte.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Int8:
        ...     bits: int = 8
        ...     largest: float = 127.0
        ...     exponent: int = 6
        ...     def round(self, x, noise=None):
        ...         whole = x.round() if noise is None else (x + noise).floor()
        ...         return whole.clamp(-127, 127)
        ...     def encode(self, x, noise=None):
        ...         return self.round(x, noise).nan_to_num(0.0).to(torch.int8).view(torch.uint8)
        ...     def decode(self, codes):
        ...         return codes.view(torch.int8).to(torch.float32)
        >>> fs.formats.register_element(torch.int8, Int8())
        >>> fs.formats.Blocks(torch.int8, (1, 128)).bytes((128, 256))
        33792
    """
    if dtype.itemsize != 1 or element.bits not in (4, 8):
        mend = "Use a dtype of one byte, and codes of 8 or 4 bits."
        raise ConfigError(message(f"got {dtype} with codes of {element.bits} bits.", mend=mend))
    if dtype in _OWN:
        raise ConfigError(message(f"got {dtype}, whose element is defined.", mend="Use another dtype of one byte."))
    ELEMENTS[dtype] = element
