# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
"""What we ask torch.func about tensors and transforms: private API, as in `_compat`, each function with a canary test.

In: tensors, in or out of transforms. Out: what is inside them, and whether their transform is one that runs here.
A level is a transform that runs; a wrapper is what a tensor is in at a level, and may outlive it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

__all__ = ["batch_dims", "in_jvp", "innermost", "is_basis_of_jacfwd", "is_foreign", "shown"]


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
    """What is inside all wrappers of a tensor; another value, or a tensor without them, is its own."""
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
