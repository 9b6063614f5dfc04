"""Write gradients of weights where they are needed, instead of copying them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

__all__ = ["TakesTerms", "put_term", "takes_terms"]


class TakesTerms(Protocol):
    """The node of a weight that knows where its gradient goes."""

    def put_term(self, dtype: torch.dtype, write: Callable[[Tensor], object]) -> bool:
        """Has a term of the gradient written; or does not, and says so."""
        ...


def takes_terms(weight: Tensor) -> bool:
    """Whether a weight's node knows where its gradient goes; a compiler does not see it."""
    return not torch.compiler.is_compiling() and hasattr(weight.grad_fn, "put_term")


def put_term(node: Node, dtype: torch.dtype, write: Callable[[Tensor], object]) -> bool:
    """Have backward write a term of a gradient where it is needed; return False if the term must be returned."""
    # If backward is itself differentiated, the term is always to be returned.
    return not torch.is_grad_enabled() and cast(TakesTerms, node).put_term(dtype, write)
