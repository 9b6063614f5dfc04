"""Low-precision formats, and tensors stored as quantized values and scales."""

from fsharding.formats.blocks import (
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    ROWWISE,
    TENSORWISE,
    Blocks,
    E4M3_1x128,
    E4M3_128x128,
)
from fsharding.formats.elements import E2M1, E4M3, E5M2, Element, register_element
from fsharding.formats.philox import uniform_at
from fsharding.formats.precision import LossScale
from fsharding.formats.quantized import Quantized, dequantize, quantize

__all__ = [
    "E2M1", "E4M3", "E4M3_1x128", "E4M3_128x128", "E5M2", "MXFP4", "MXFP8", "MXFP8_E5M2", "NVFP4", "ROWWISE",
    "TENSORWISE", "Blocks", "Element", "LossScale", "Quantized", "dequantize", "quantize", "register_element",
    "uniform_at",
]  # fmt: skip
