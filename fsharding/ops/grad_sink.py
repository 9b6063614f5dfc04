"""Write gradients of weights where they are needed, instead of copying them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

__all__ = ["put_term", "takes_terms"]


def takes_terms(weight: Tensor) -> bool:
    """Return whether a weight's node has a destination for its gradient; always False in a compiler."""
    return not torch.compiler.is_compiling() and hasattr(weight.grad_fn, "put_term")


def put_term(node: Node, dtype: torch.dtype, write: Callable[[Tensor], object]) -> bool:
    """Have backward write a partial gradient to its destination; return False if it must be returned."""
    # If backward is itself differentiated, the partial gradient must be returned.
    return not torch.is_grad_enabled() and bool(cast(Any, node).put_term(dtype, write))
