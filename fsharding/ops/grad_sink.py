"""Gradients of weights that are computed where they go, instead of being copied there.

In: a weight whose node in autograd's graph knows where its gradient goes, as those of `gather_unit` do. Out: nothing;
a term of the gradient is in place. Guarantee: terms are added in the order in which autograd would.
"""

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
    """Has a term of a gradient written where it goes, in backward.

    Args:
        node: of a weight that `takes_terms`, as `ctx.next_functions` has it.
        write: fills a tensor of the weight's shape, whatever is in it.

    Returns:
        Whether it was; else, and always if backward is itself differentiated, the term is to be returned.
    """
    return not torch.is_grad_enabled() and cast(TakesTerms, node).put_term(dtype, write)
