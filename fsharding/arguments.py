"""Arguments of another kind than a public function takes: says which, and the line to type instead.

In: an argument as a user gave it. Out: nothing, or an `ArgumentError`.
It looks at types alone, before anything is computed; people who come from torch pass modules and optimizers, others
swap two arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsharding.errors import ArgumentError, message

__all__ = ["check_function", "check_optimizer", "is_optimizer", "kind_of", "refuse", "refuse_module"]


def kind_of(x: Any) -> str:
    """What something is, for an error."""
    name = type(x).__name__
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if isinstance(x, nn.Module):
        return f"an nn.Module, {name}"
    if isinstance(x, torch.optim.Optimizer):
        return f"an optimizer of torch, {name}"
    if isinstance(x, Tensor):
        on_meta = " on meta" if x.is_meta else ""
        return f"a tensor {str(x.dtype).removeprefix('torch.')}{list(x.shape)}{on_meta}"
    if inspect.isroutine(x):
        return f"the function {x.__name__}"
    if x is None or isinstance(x, int | float | str | bytes):
        return repr(x)[:60]
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def refuse(function: str, what: str, x: Any, mend: str) -> ArgumentError:
    """The error for an argument of another kind.

    Args:
        function: the public function.
        what: it takes, such as "a mesh".
        x: what it was given.
        mend: the edit that makes it work.
    """
    return ArgumentError(message(function, f"takes {what}, got {kind_of(x)}.", mend=mend))


def refuse_module(function: str, x: Any) -> None:
    """Refuses a module, whose parameters are no tree.

    Raises:
        ArgumentError: it is an `nn.Module`.
    """
    if isinstance(x, nn.Module) or (isinstance(x, type) and issubclass(x, nn.Module)):
        mend = "Make a function of it first, net = fs.functionalize(module); it takes the place of the module."
        raise refuse(function, "a pure function or a tree", x, mend)


def is_optimizer(x: Any) -> bool:
    """Whether something can be the optimizer of a step: a pair of functions, `init` and `update`."""
    if isinstance(x, type | nn.Module | Tensor):
        return False
    needed = all(callable(getattr(x, name, None)) for name in ("init", "update", "start"))
    return needed and all(getattr(x, name, None) is None or callable(getattr(x, name)) for name in ("apply", "factor"))


def check_optimizer(function: str, opt: Any) -> None:
    """Refuses what is no pair of functions `init` and `update`.

    Raises:
        ArgumentError: it is not; an optimizer of torch is told what does the same.
    """
    if is_optimizer(opt):
        return
    pair = not isinstance(opt, type | nn.Module) and all(callable(getattr(opt, n, None)) for n in ("init", "update"))
    if isinstance(opt, torch.optim.Optimizer) or (isinstance(opt, type) and issubclass(opt, torch.optim.Optimizer)):
        name = opt.__name__ if isinstance(opt, type) else type(opt).__name__
        ours = {**dict.fromkeys(("Adam", "AdamW"), "fs.adamw(1e-3)"), "SGD": "fs.sgd(0.1)"}
        ours |= {"Muon": "fs.optim.muon(1e-2)", "Adafactor": "fs.optim.adafactor(1e-2)"}
        ours = ours.get(name, f"fs.optim.from_torch(torch.optim.{name})")
        mend = f"Use {ours}: it holds no parameters, its state is part of the TrainState."
    elif inspect.isroutine(opt) and getattr(opt, "__module__", "").startswith("fsharding.optim"):
        mend = f"Call it: fs.{opt.__name__}(...)."
    elif isinstance(opt, torch.optim.lr_scheduler.LRScheduler):
        rate = "fs.optim.schedules.warmup_cosine(3e-4, 9, 99)"
        mend = f"A learning rate may be a function of the number of updates: fs.adamw({rate})."
    elif pair:
        mend = "Its functions are of the same form: fs.GradientTransformation(opt.init, opt.update)."
    else:
        mend = "Give a pair such as fs.adamw(1e-3) or fs.chain(...), whose init and update are functions."
    raise refuse(function, "an optimizer that is a pair of functions", opt, mend)


def check_function(function: str, what: str, fn: Callable[..., Any], count: int, *, exactly: bool = False) -> None:
    """Refuses what cannot be called with so many arguments.

    Args:
        function: the public function.
        what: it takes, such as "a loss function (params, batch)".
        fn: what it was given.
        count: of positional arguments.
        exactly: it must not ask for more.

    Raises:
        ArgumentError: it is no function, or one of other arguments.
    """
    refuse_module(function, fn)
    if not callable(fn) or isinstance(fn, type):
        raise refuse(function, what, fn, f"Give {what}.")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # One that is written in C does not say.
    try:
        (signature.bind if exactly else signature.bind_partial)(*[None] * count)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        text = f"takes {what}, got {name}{signature}."
        raise ArgumentError(message(function, text, mend=f"Give {what}.")) from error
