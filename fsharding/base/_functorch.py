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
        rule = "cannot run over functions with derivatives of their own, such as fs.gather_unit and fs.ops."
        mend = "Functionalize what computes on gathered tensors: torch.func.functionalize(f)(fs.gather_unit(params))."
        raise TransformError(report(f"torch.func.functionalize {rule}", mend=mend))
    if stack and linearizing() and _is_linearize_inside():
        rule = "cannot run inside another transform: torch takes its linear map for a constant there."
        mend = "Use torch.func.jvp, or put torch.func.linearize outside."
        raise TransformError(report(f"torch.func.linearize {rule}", mend=mend))
    return function.apply(*(shown(x) if isinstance(x, Tensor) else x for x in args))


def _is_linearize_inside() -> bool:
    """Whether the `torch.func.linearize` that runs here was called by a function that is transformed."""
    outwards = callers(sys._getframe())
    # The first search leaves the frames that called `linearize` to the second one.
    return any(frame.f_code is torch.func.linearize.__code__ for frame in outwards) and any(
        frame.f_code.co_filename.endswith(_OF_TRANSFORMS) for frame in outwards
    )


_OF_TRANSFORMS = "_functorch/eager_transforms.py", "_functorch/vmap.py"


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


def is_called_by_jacfwd() -> bool:
    """Whether `torch.func.jacfwd`, on which `hessian` is built, itself makes the tree that is made here."""
    frames = (frame.f_code for frame in callers(sys._getframe(1)))
    code = next((code for code in frames if code.co_filename.endswith("eager_transforms.py")), None)
    return code is not None and code.co_qualname == "jacfwd.<locals>.wrapper_fn"


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


def recorded(x: Tensor, run: Callable[[Tensor], Tensor], call: Callable[[Tensor], Tensor]) -> Tensor:
    """Run an operation; if `make_fx` traces here, as in `torch.func.linearize`, its graph makes a call instead."""
    # Without this the graph has what this rank computes while it is traced, and never communicates again.
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return run(x)
    proxy = mode.tracer.unwrap_proxy(x)
    with proxy_tensor.disable_proxy_modes_tracing():
        out = run(x)
    if isinstance(proxy, Tensor):  # It does not depend on an input of the graph.
        return out
    result = mode.tracer.create_proxy("call_function", call, (proxy,), {})
    return proxy_tensor.track_tensor_tree(out, result, constant=None, tracer=mode.tracer)


def shown(x: Tensor) -> Tensor:
    """A tensor before it goes to an autograd Function, which torch function modes do not see; a foreign one they do."""
    return x.view_as(x) if is_foreign(x) else x


def without_own_graph(xs: Sequence[Tensor]) -> list[Tensor]:
    """Tensors in a backward pass that need no graph of that pass at its own level; outer levels keep theirs."""
    # `torch.func.grad` asks for a graph of its backward so that outer transforms see it, and throws away what this
    # makes at its own level. Only it does: the tensors come back as they are where anybody else runs the backward pass,
    # and where that cannot be seen, since it runs on a thread of its own.
    top = torch._C._functorch.peek_interpreter_stack()
    if top is None or not _in_last_step_of_grad():
        return list(xs)
    unwrap = torch._C._functorch._unwrap_for_grad
    wrap = torch._C._functorch._wrap_for_grad
    return [wrap(unwrap(x, top.level()), top.level()) for x in xs]


_LAST_STEP = ("_engine_run_backward", "grad", "_autograd_grad", "grad_and_value_impl")


def _in_last_step_of_grad() -> bool:
    """Whether `torch.func.grad` itself runs the innermost backward pass."""
    names = (frame.f_code.co_name for frame in callers(sys._getframe()))
    return tuple(islice(dropwhile(lambda name: name != _LAST_STEP[0], names), len(_LAST_STEP))) == _LAST_STEP


def in_functorch() -> bool:
    """Whether we run under a torch.func transform; `linearize` has no level, but uses forward mode."""
    # Not `peek_interpreter_stack() is not None`: to torch.compile that is true everywhere.
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def linearizing() -> bool:
    """Whether `torch.func.linearize` runs here, or forward mode without torch.func."""
    return forward_ad._current_level >= 0 and not in_jvp()


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
