"""Dtypes of models, and the dtype in which their sums are accumulated."""

from __future__ import annotations

import torch

__all__ = ["FLOATS", "wide"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of floating point parameters, gradients and moments."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32, or `dtype` if that is wider."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
