"""Element dtypes of low precision: the values that each represents, and rounding to them.

Guarantee: the encoding of a value depends only on the value and its noise.
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

_EXPONENT = 0xFF  # the exponent bits of a float32, shifted down
_VALUES_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Element(Protocol):
    """The interface of an element dtype: which values it represents (symmetric around 0), and how to encode them.

    Example:
        >>> from fsharding.formats.elements import ELEMENTS
        >>> element = ELEMENTS[fs.formats.E4M3]
        >>> element.bits, element.largest, element.exponent
        (8, 448.0, 8)
    """

    @property
    def bits(self) -> int:
        """Bits of an element, 8 or 4; 4-bit elements are sent two per byte."""
        ...

    @property
    def largest(self) -> float:
        """Largest finite value."""
        ...

    @property
    def exponent(self) -> int:
        """Floor of log2(`largest`)."""
        ...

    def round(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Round to representable values.

        Args:
            x: Values, float32; magnitudes above `largest` saturate.
            noise: Uniform random values in [0, 1), in the shape of `x`: an element is rounded up if its noise is below
                its distance to the next lower value, in units of the gap. None rounds to nearest, ties to even.

        Returns:
            float32; NaN may become anything, since the scale of its block is NaN.
        """
        ...

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Round as `round` does, and return the bits as uint8; `x` may be overwritten."""
        ...

    def decode(self, codes: Tensor) -> Tensor:
        """Return the float32 values of encoded elements."""
        ...


@dataclass(frozen=True)
class Float8:
    """An 8-bit floating point dtype of torch."""

    dtype: torch.dtype
    mantissa: int  # bits of the mantissa
    least: int  # the exponent of the smallest normal value
    exponent: int  # see `Element`
    largest: float  # see `Element`
    bits: int = 8  # see `Element`

    def round(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """See `Element`; NaN is preserved."""
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
        """Round magnitudes to multiples of the gap between representable values at their exponent."""
        size = x.abs()
        # Clamping the exponent gives subnormals the gap of the smallest normal value.
        exponent = ((size.view(torch.int32) >> 23) & _EXPONENT).clamp(127 + self.least) - self.mantissa
        step = (exponent << 23).view(torch.float32)
        steps = size / step
        if noise is None:
            rounded = steps.round()
        else:
            rounded = steps.floor()
            rounded += noise < steps - rounded
        return torch.copysign((rounded * step).clamp(max=self.largest), x)


@dataclass(frozen=True)
class Float4(Float8):
    """The 4-bit dtype e2m1, for which torch has no arithmetic."""

    bits: int = 4

    def round(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """See `Element`."""
        return self._rounded(x, noise)

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """See `Element`; e2m1 has no NaN, which becomes 0."""
        numbers = self._rounded(x, noise)
        size = numbers.abs().nan_to_num(0.0)
        # 0 to 1.5 in steps of 0.5, 2 and 3 in steps of 1, 4 and 6 in steps of 2: the index in `_VALUES_E2M1`.
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
"""By dtype: OCP 8-bit floating point (OFP8 1.0, 2023) and the 4-bit element of OCP Microscaling (MX 1.0, 2023)."""

_OWN = frozenset(ELEMENTS)


@public
def register_element(dtype: torch.dtype, element: Element) -> None:
    """Register an element dtype for `fs.formats.Blocks`, and so for gathers, gradient sums and moments.

    Call it on every rank.

    Args:
        dtype: Key of the element: any dtype of one byte, even if torch has no arithmetic for it.
        element: Values and rounding of the dtype; replaces an earlier registration.

    Raises:
        ConfigError: A built-in dtype; a dtype of more than one byte; elements that have neither 8 nor 4 bits.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Int8:
        ...     bits: int = 8
        ...     largest: float = 127.0
        ...     exponent: int = 6
        ...     def round(self, x, noise=None):
        ...         rounded = x.round() if noise is None else (x + noise).floor()
        ...         return rounded.clamp(-127, 127)
        ...     def encode(self, x, noise=None):
        ...         return self.round(x, noise).nan_to_num(0.0).to(torch.int8).view(torch.uint8)
        ...     def decode(self, codes):
        ...         return codes.view(torch.int8).to(torch.float32)
        >>> fs.formats.register_element(torch.int8, Int8())
        >>> fs.formats.Blocks(torch.int8, (1, 128)).bytes((128, 256))
        33792
    """
    if dtype.itemsize != 1 or element.bits not in (4, 8):
        mend = "Use a dtype of one byte, and elements of 8 or 4 bits."
        raise ConfigError(message(f"got {dtype} with elements of {element.bits} bits.", mend=mend))
    if dtype in _OWN:
        raise ConfigError(message(f"got {dtype}, which is built in.", mend="Use a different dtype of one byte."))
    ELEMENTS[dtype] = element
