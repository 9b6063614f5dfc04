# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
"""Queries about tensors and transforms of torch.func: private API, as in `_compat`, each function with a canary test.

In: tensors, in or out of transforms. Out: what is inside them, and whether their transform is one that runs here.
A level is a transform that runs; a wrapper is what a tensor is in at a level, and may outlive it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._functorch import pyfunctorch

__all__ = [
    "batch_dims",
    "in_functorch",
    "in_jvp",
    "innermost",
    "is_basis_of_jacfwd",
    "is_foreign",
    "outside_transforms",
    "shown",
    "unwrapped",
    "without_own_graph",
]


def batch_dims(x: Tensor) -> list[int]:
    """Which dims of a tensor the vmaps around it have taken away, each of what the ones before had left."""
    dims: list[int] = []
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            dims.append(torch._C._functorch.maybe_get_bdim(x))
        x = torch._C._functorch.get_unwrapped(x)
    return dims[::-1]


def in_jvp() -> bool:
    """Whether a `torch.func.jvp` runs here."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


def innermost(x: Any) -> Any:
    """Removes all wrappers of a tensor; another value, or a tensor without them, is returned as it is."""
    while isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def is_foreign(x: Tensor) -> bool:
    """Whether a tensor belongs to a transform that does not run here, though it may around us."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        level = torch._C._functorch.maybe_get_level(x)
        batched = torch._C._functorch.is_batchedtensor(x)
        is_vmap = 0 < level <= len(stack) and stack[level - 1].key() == torch._C._functorch.TransformType.Vmap
        if level > len(stack) or (level > 0 and batched != is_vmap):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def shown(x: Tensor) -> Tensor:
    """A tensor before it goes to an autograd Function, which torch function modes do not see; a foreign one they do."""
    return x.view_as(x) if is_foreign(x) else x


def is_basis_of_jacfwd(tangent: Tensor, count: int) -> bool:
    """Whether a tangent is the basis that `torch.func.jacfwd` makes of the `count` elements of this rank."""
    frame: Any = sys._getframe()
    while frame is not None and not _is_jacfwd(frame.f_code):
        frame = frame.f_back
    if frame is None or not count:
        return False
    values = innermost(tangent)
    ones = values[values != 0]
    return values.numel() >= count * tangent.numel() and ones.numel() == count and bool((ones == 1).all())


def _is_jacfwd(code: Any) -> bool:
    return code.co_name == "push_jvp" and code.co_filename.endswith("eager_transforms.py")


def without_own_graph(xs: Sequence[Tensor]) -> list[Tensor]:
    """Tensors in a backward pass that need no graph of that pass at its own level; outer levels keep theirs.

    `torch.func.grad` asks for a graph of its backward so that outer transforms see it, and throws away what this makes
    at its own level. Only it does: the tensors come back as they are where anybody else runs the backward pass, and
    where that cannot be seen, since it runs on a thread of its own.
    """
    top = torch._C._functorch.peek_interpreter_stack()
    if top is None or not _in_last_step_of_grad():
        return list(xs)
    unwrap, wrap = torch._C._functorch._unwrap_for_grad, torch._C._functorch._wrap_for_grad
    return [wrap(unwrap(x, top.level()), top.level()) for x in xs]


_LAST_STEP = ("_engine_run_backward", "grad", "_autograd_grad", "grad_and_value_impl")


def _in_last_step_of_grad() -> bool:
    """Whether `torch.func.grad` itself runs the innermost backward pass."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != _LAST_STEP[0]:
        frame = frame.f_back
    names: list[str] = []
    while frame is not None and len(names) < len(_LAST_STEP):
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return tuple(names) == _LAST_STEP


def in_functorch() -> bool:
    """Whether we run under a torch.func transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """Under it we compute as outside all torch.func transforms; what is wrapped has to be `unwrapped` first."""
    return pyfunctorch.temporarily_clear_interpreter_stack()


def unwrapped(x: Tensor) -> Tensor | None:
    """The values of a tensor under torch.func transforms; None under a vmap over it, where there is no one value."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return None
        x = torch._C._functorch.get_unwrapped(x)
    return x
