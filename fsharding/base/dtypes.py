"""The dtypes of numbers that models compute with, and that in which their sums are taken.

Guarantee: a sum has at least the precision of its terms, and at least float32.
"""

from __future__ import annotations

import torch

__all__ = ["FLOATS", "wide"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of floating point parameters, gradients and moments."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or the leaf's own when that is wider."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
