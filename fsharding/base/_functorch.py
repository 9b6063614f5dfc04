# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
"""Queries about tensors and transforms of torch.func: private API like `_compat`, each with a canary test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import dropwhile, islice
from typing import Any

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad
from torch.autograd.function import Function
from torch.fx.experimental import proxy_tensor

from fsharding.base.calls import callers
from fsharding.base.errors import TransformError, report

__all__ = [
    "apply", "batch_dims", "in_functorch", "in_jvp", "innermost", "is_called_by_jacfwd", "is_foreign", "linearizing",
    "outside_transforms", "recorded", "shown", "unwrapped", "without_own_graph",
]  # fmt: skip


def apply(function: type[Function], *args: Any) -> Any:
    """Apply an autograd Function under any transform; its tensors may be foreign (see `shown`)."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    if any(level.key() == torch._C._functorch.TransformType.Functionalize for level in stack):
        rule = "cannot transform functions with custom derivatives, such as fs.gather_unit and fs.ops."
        mend = "Apply it to functions of gathered tensors: torch.func.functionalize(f)(fs.gather_unit(params))."
        raise TransformError(report(f"torch.func.functionalize {rule}", mend=mend))
    if stack and linearizing() and _is_linearize_inside():
        rule = "cannot run inside a different transform: there, torch treats its linear map as a constant."
        mend = "Use torch.func.jvp, or make torch.func.linearize the outermost transform."
        raise TransformError(report(f"torch.func.linearize {rule}", mend=mend))
    return function.apply(*(shown(x) if isinstance(x, Tensor) else x for x in args))


def _is_linearize_inside() -> bool:
    """Return whether a transformed function has called the current `torch.func.linearize`."""
    outwards = callers(sys._getframe())
    # One iterator for both searches: the second one looks at the callers of `linearize` only.
    return any(frame.f_code is torch.func.linearize.__code__ for frame in outwards) and any(
        frame.f_code.co_filename.endswith(_OF_TRANSFORMS) for frame in outwards
    )


_OF_TRANSFORMS = "_functorch/eager_transforms.py", "_functorch/vmap.py"


def batch_dims(x: Tensor) -> list[int]:
    """Return the dim that each vmap around a tensor has removed, outermost first; each counts in what was left."""
    dims: list[int] = []
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            dims.append(torch._C._functorch.maybe_get_bdim(x))
        x = torch._C._functorch.get_unwrapped(x)
    return dims[::-1]


def in_jvp() -> bool:
    """Return whether `torch.func.jvp` is active."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


def innermost(x: Any) -> Any:
    """Remove all functorch wrappers of a tensor; other values are returned unchanged."""
    while isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def is_called_by_jacfwd() -> bool:
    """Return whether `torch.func.jacfwd` itself, which `hessian` uses, is building the current tree."""
    frames = (frame.f_code for frame in callers(sys._getframe(1)))
    code = next((code for code in frames if code.co_filename.endswith("eager_transforms.py")), None)
    return code is not None and code.co_qualname == "jacfwd.<locals>.wrapper_fn"


def is_foreign(x: Tensor) -> bool:
    """Return whether a tensor belongs to a transform that isn't active here, though it may be further out."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        level = torch._C._functorch.maybe_get_level(x)
        batched = torch._C._functorch.is_batchedtensor(x)
        is_vmap = 0 < level <= len(stack) and stack[level - 1].key() == torch._C._functorch.TransformType.Vmap
        if level > len(stack) or (level > 0 and batched != is_vmap):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def recorded(x: Tensor, run: Callable[[Tensor], Tensor], call: Callable[[Tensor], Tensor]) -> Tensor:
    """Run an operation; if `make_fx` traces it, as in `torch.func.linearize`, record a call in the graph."""
    # Otherwise the graph would contain this rank's computation during the trace, and never communicate again.
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return run(x)
    proxy = mode.tracer.unwrap_proxy(x)
    with proxy_tensor.disable_proxy_modes_tracing():
        out = run(x)
    if isinstance(proxy, Tensor):  # it doesn't depend on inputs of the graph
        return out
    result = mode.tracer.create_proxy("call_function", call, (proxy,), {})
    return proxy_tensor.track_tensor_tree(out, result, constant=None, tracer=mode.tracer)


def shown(x: Tensor) -> Tensor:
    """Make a foreign tensor visible to torch function modes, which don't see the calls of autograd Functions."""
    return x.view_as(x) if is_foreign(x) else x


def without_own_graph(xs: Sequence[Tensor]) -> list[Tensor]:
    """Detach tensors of a backward pass from its own level's graph; outer levels keep theirs."""
    # `torch.func.grad` creates a graph of its backward, for outer transforms, and discards the part of its own level.
    # If anything else runs the backward, or a separate thread does, whose caller can't be seen, tensors are unchanged.
    top = torch._C._functorch.peek_interpreter_stack()
    if top is None or not _in_last_step_of_grad():
        return list(xs)
    unwrap = torch._C._functorch._unwrap_for_grad
    wrap = torch._C._functorch._wrap_for_grad
    return [wrap(unwrap(x, top.level()), top.level()) for x in xs]


_LAST_STEP = ("_engine_run_backward", "grad", "_autograd_grad", "grad_and_value_impl")


def _in_last_step_of_grad() -> bool:
    """Return whether `torch.func.grad` itself runs the innermost backward pass."""
    names = (frame.f_code.co_name for frame in callers(sys._getframe()))
    return tuple(islice(dropwhile(lambda name: name != _LAST_STEP[0], names), len(_LAST_STEP))) == _LAST_STEP


def in_functorch() -> bool:
    """Return whether a torch.func transform is active; `linearize` has no level, but uses forward mode."""
    # Not `peek_interpreter_stack() is not None`, which is always true under torch.compile.
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def linearizing() -> bool:
    """Return whether `torch.func.linearize`, or forward mode without torch.func, is active."""
    return forward_ad._current_level >= 0 and not in_jvp()


def outside_transforms() -> AbstractContextManager[Any]:
    """Suspend all torch.func transforms in this block; wrapped tensors have to be `unwrapped` first."""
    return pyfunctorch.temporarily_clear_interpreter_stack()


def unwrapped(x: Tensor) -> Tensor | None:
    """Return a tensor's values under torch.func transforms; None under a vmap over it, which has one per sample."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return None
        x = torch._C._functorch.get_unwrapped(x)
    return x
