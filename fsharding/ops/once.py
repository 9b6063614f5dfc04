"""Gradients that autograd can differentiate only once: a second derivative raises, where torch may return 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function

from fsharding.base.errors import TransformError, report

__all__ = ["differentiable_once"]

Grads = tuple[Tensor | None, ...]


def differentiable_once(rule: str, grads: Grads, inputs: Sequence[Tensor | None]) -> Grads:
    """Make gradients depend on tensors, through a node that raises an error with `rule` in a second backward."""
    return cast(Grads, _Once.apply(rule, len(grads), *grads, *inputs)) if torch.is_grad_enabled() else grads


class _Once(Function):
    @staticmethod
    def forward(rule: str, count: int, *tensors: Tensor | None) -> Grads:
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rule = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise TransformError(report(ctx.rule, mend="Take second derivatives with torch.func."))
