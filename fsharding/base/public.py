"""Public functions: checks of arguments, and explanations of failures that no check foresees."""

from __future__ import annotations

import builtins
import collections.abc
import functools
import inspect
import os
import re
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from threading import get_ident
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.data import DataLoader, Dataset

from fsharding.base import _compat, calls, tree  # `calls` as a module: cloudpickle sends a function's globals by value
from fsharding.base.calls import LIBRARY, public_name
from fsharding.base.errors import (
    ArgumentError,
    FrozenError,
    FshardingError,
    MissingNameError,
    TransformError,
    did_you_mean,
    listed,
    message,
    report,
)
from fsharding.base.local_paths import check_local

__all__ = [
    "YIELDS", "Immutable", "check_function", "check_optimizer", "check_path", "check_timeout", "is_optimizer",
    "kind_of", "missing_name", "public", "refuse", "refuse_compiled", "refuse_module", "refuse_state",
    "without_parameters", "yields_batches",
]  # fmt: skip

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(tree.optree.__file__).parent))


def public(fn: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Mark a public function: its name begins the errors raised in it, and wrong arguments are explained."""
    # A function made in a public call has that call's name: a user who calls fs.adamw(1e-3).update has typed fs.adamw.
    mark = (calls.call_of(get_ident()) or fn) if "<locals>" in fn.__qualname__ else fn

    @functools.wraps(fn)
    def call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if is_compiling():
            return fn(*args, **kwargs)
        under_way = calls.CALLS[get_ident()]
        under_way.append(mark)
        try:
            return fn(*args, **kwargs)
        except FshardingError:
            raise
        except Exception as error:
            # The call is still on the list: its name begins the explanation.
            if (result := _explanation(fn, args, kwargs, error)) is None:
                raise
            raise ArgumentError(result) from error
        finally:
            under_way.pop()

    return _compat.left_to_python(call)


def _is_ours(error: BaseException) -> bool:
    """Return whether an error came up in the library, torch or optree, and not in a function of the user."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [file for file in files if not file.startswith(_LIBRARIES)]
    return bool(inside) and inside[-1].startswith(LIBRARY)


def _explanation(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> str | None:
    """Explain which arguments of a failed call are wrong; return None if the cause is unknown."""
    signature = inspect.signature(fn)
    name = public_name()
    if "<locals>" in fn.__qualname__:  # such as fs.value_and_grad(...) and fs.adamw(...).update
        name += "(...)" if fn.__name__ == "run" else f"(...).{fn.__name__}"
    mend = f"Call it as {name.rpartition(' ')[2]}{_short(signature)}."
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as unfit:
        if _holds_parameters(signature, args):
            return str(without_parameters())
        if "too many positional" in str(unfit) and (call := _call_of(typing.get_type_hints(fn).get("return"))):
            mend = f"It returns a function that takes the rest: {name}{_short(signature)}{call}."
        verb = "is" if str(unfit).startswith("missing") else "got"
        return report(f"{name} {verb} {str(unfit).removeprefix('got ')}.", mend=mend + _other_names(signature, kwargs))
    if not _is_ours(error) or not _is_about_arguments(error):
        return None
    given.pop("self", None)  # of a method
    classes = {arg: _classes(fn, arg) for arg in given}
    wrong = [arg for arg, x in given.items() if classes[arg] and not _is_one_of(x, classes[arg])]
    if wrong:
        rows = [f"{arg} is {kind_of(given[arg])}, not {fn.__annotations__[arg]}" for arg in wrong]
        return report(f"{name} got arguments of the wrong type.", rows, mend)
    trees = [arg for arg, hint in fn.__annotations__.items() if "Tree" in str(hint) and given.get(arg) is not None]
    odd = [row for arg in trees for row in _odd_leaves(arg, given[arg], error)]
    if odd:
        rows = [*odd, f"so it failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"]
        mend = "Pass trees of tensors on the device of the mesh."
        return report(f"{name} got leaves that it cannot use.", rows, mend)
    return None


def _is_one_of(x: Any, classes: tuple[type, ...]) -> bool:
    """Return whether an argument has one of some classes; a string doesn't count as a sequence."""
    return isinstance(x, classes) and (not isinstance(x, str) or str in classes)


def _short(signature: inspect.Signature) -> str:
    """Return the parameters without a default, such as "(params, batch)"."""
    parameters = (p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name != "self")
    needed = [f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name for p in parameters if p.default is p.empty]
    return f"({', '.join(needed)})"


def _call_of(result: Any) -> str:
    """Return the arguments of a function by its type; "" for results that are not functions."""
    if isinstance(result, type) and "__call__" in vars(result):
        return _short(inspect.signature(vars(result)["__call__"]))
    return "(...)" if typing.get_origin(result) is collections.abc.Callable else ""


_ACCUMULATION = "accumulate", "accumulation_steps", "grad_accum", "gradient_accumulation_steps"
_ALIASES = {
    "lr": ("learning_rate",),
    "betas": ("b1", "b2"),
    "beta1": ("b1",),
    "beta2": ("b2",),
    "epsilon": ("eps",),
    **dict.fromkeys(("wd", "decay"), ("weight_decay",)),
    **dict.fromkeys(_ACCUMULATION, ("microbatches",)),
    "loss_fn": ("model", "fn"),
    "optimizer": ("opt",),
    "seed": ("key",),
    "donate_argnums": ("donate",),
    "dtype": ("precision",),
}
"""Our arguments, by their names in other libraries."""


def _other_names(signature: inspect.Signature, kwargs: dict[str, Any]) -> str:
    """Word which argument each unknown keyword means, or list all arguments."""
    named = [p.name for p in signature.parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    unknown = [name for name in kwargs if name not in named]
    if not unknown or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return ""
    hints: list[str] = []
    for name in unknown:
        ours = [other for other in _ALIASES.get(name, ()) if other in named]
        use = " and ".join(f"{other}=" for other in ours)
        hints.append(f" Use {use} instead of {name}=." if ours else did_you_mean(name, named))
    return "".join(hint for hint in hints if hint) or f" Its arguments are {', '.join(named)}."


def without_parameters() -> ArgumentError:
    """Make the error for an optimizer that got parameters, as torch's optimizers do."""
    mend = f"Write {public_name()}(1e-3): opt.init(params), or fs.init_state, makes the state for parameters."
    return ArgumentError(message("takes a learning rate, not parameters.", mend=mend))


def _holds_parameters(signature: inspect.Signature, args: tuple[Any, ...]) -> bool:
    """Return whether an optimizer got parameters instead of its learning rate."""
    first = next(iter(signature.parameters), "")
    return first == "learning_rate" and bool(args) and isinstance(args[0], Iterable) and not isinstance(args[0], str)


def _classes(fn: Callable[..., Any], arg: str) -> tuple[type, ...]:
    """Return the classes of an annotation such as "Layout | None" or "Sequence[Tree]"; () for other annotations."""
    known = {**vars(builtins), **inspect.unwrap(fn).__globals__, "None": type(None)}
    named = [known.get(word.partition("[")[0]) for word in str(fn.__annotations__.get(arg, "")).split(" | ")]
    # An alias such as Mesh is a union.
    found = [x for one in named for x in (typing.get_args(one) if isinstance(one, types.UnionType) else (one,))]
    classes = tuple(x for x in found if isinstance(x, type) and x is not Any and not getattr(x, "_is_protocol", False))
    return (*classes, *((int,) if float in classes else ())) if len(classes) == len(found) else ()


def _is_about_arguments(error: Exception) -> bool:
    """Return whether arguments can be the cause: not if it is a communication error, by its type, text or mark."""
    if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
        return type(error) is RuntimeError and "gloo/" not in str(error) and not hasattr(error, "_fsharding_peers")
    return isinstance(error, TypeError | AttributeError | ValueError | LookupError | NotImplementedError)


def _odd_leaves(name: str, x: Any, error: Exception) -> Iterator[str]:
    """Describe the leaves that aren't tensors, have no values, or have a property that the error mentions."""
    text = str(error)
    for path, leaf in tree.named_leaves(x).items():
        place = f"{name}.{path}" if path else name
        if not isinstance(leaf, Tensor) and not (hasattr(leaf, "shape") and hasattr(leaf, "sharding")):
            yield f"{place} is {kind_of(leaf)}"
        elif isinstance(leaf, Tensor) and leaf.is_meta:
            yield f"{place} is {kind_of(leaf)} on the meta device, without values"
        elif isinstance(leaf, Tensor) and leaf.requires_grad and "grad" in text:
            yield f"{place} is {kind_of(leaf)} that requires grad; detach it"
        elif isinstance(leaf, Tensor) and not leaf.is_floating_point() and re.search("dtype|type|Long|Int", text):
            yield f"{place} is {kind_of(leaf)}, not floating point"


# ----------------------------------------------------------------------------------------------- checks of arguments
def kind_of(x: Any) -> str:
    """Describe a value for an error."""
    name = type(x).__name__
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if isinstance(x, nn.Module):
        return f"an nn.Module, {name}"
    if isinstance(x, torch.optim.Optimizer):
        return f"a torch optimizer, {name}"
    if isinstance(x, Tensor):
        on_meta = " on meta" if x.is_meta else ""
        return f"a tensor {str(x.dtype).removeprefix('torch.')}{list(x.shape)}{on_meta}"
    if inspect.isroutine(x):
        return f"the function {x.__name__}"
    if x is None or isinstance(x, int | float | str | bytes):
        return repr(x)[:60]
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


YIELDS = "Call it for each batch: for batch in loader: state, metrics = step(state, batch)."


def yields_batches(x: Any) -> bool:
    """Return whether `x` is a data loader, a data set or a generator of batches instead of one batch."""
    return isinstance(x, Iterator | DataLoader | Dataset)


def refuse(what: str, x: Any, mend: str) -> ArgumentError:
    """Make the error for an argument of the wrong type."""
    return ArgumentError(message(f"takes {what}, got {kind_of(x)}.", mend=mend))


@_compat.left_to_python
def refuse_compiled(mend: str) -> None:
    """Raise if a compiled function calls the public function."""
    if _compat.is_compiled_caller():
        raise TransformError(message("cannot run inside of torch.compile.", mend=mend))


def missing_name(owner: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> AttributeError:
    """Make the error for an unknown attribute; for a private one Python's, because many tools probe for those."""
    if name.startswith("_"):
        return AttributeError(f"{owner} has no attribute {name!r}")
    known = [*known]
    hint = elsewhere.get(name) or did_you_mean(name, known).strip()
    mend = hint or f"Its names are {listed(known)}."
    return MissingNameError(report(f"{owner} has no {name!r}.", mend=mend))


class Immutable:
    """A base class whose public attributes can't be assigned or deleted; constructors write to `vars(self)`."""

    _instead: ClassVar[str]  # the code that makes a new value; `{name}` is the attribute

    def __init_subclass__(cls, *, instead: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if instead is not None:
            cls._instead = instead

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise self._frozen(name, "assign")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if not name.startswith("_"):
            raise self._frozen(name, "delete")
        super().__delattr__(name)

    def _frozen(self, name: str, verb: str) -> FrozenError:
        mend = f"Write {self._instead.format(name=name)}."
        return FrozenError(report(f"{type(self).__name__} is immutable: cannot {verb} {name!r}.", mend=mend))


def refuse_module(x: Any) -> None:
    """Raise for an `nn.Module`, whose parameters aren't a tree."""
    if isinstance(x, nn.Module) or (isinstance(x, type) and issubclass(x, nn.Module)):
        mend = "Convert it first, net = fs.functionalize(module), and pass net instead."
        raise refuse("a pure function or a tree", x, mend)


def refuse_state(x: Any) -> None:
    """Raise for a state instead of a tree of parameters or gradients."""
    if hasattr(x, "opt_state"):
        raise refuse("a tree of parameters", x, "Pass the parameters alone: state.params.")


def check_path(what: str, path: Any, call: str) -> None:
    """Raise if the first argument isn't a path, or is a URL."""
    if not isinstance(path, str | os.PathLike):
        raise refuse(what, path, f"Pass the directory first: {call}.")
    check_local(path)


def check_timeout(timeout: Any) -> None:
    """Raise if a timeout isn't a timedelta."""
    if not isinstance(timeout, timedelta):
        raise refuse("timeout= as a timedelta", timeout, f"Write timeout=datetime.timedelta(seconds={timeout}).")


def is_optimizer(x: Any) -> bool:
    """Return whether `x` can be the optimizer of a step: a pair of functions, `init` and `update`."""
    if isinstance(x, type | nn.Module | Tensor):
        return False
    needed = all(callable(getattr(x, name, None)) for name in ("init", "update", "start"))
    return needed and all(getattr(x, name, None) is None or callable(getattr(x, name)) for name in ("apply", "factor"))


def check_optimizer(opt: Any) -> None:
    """Raise if `opt` isn't a pair of functions `init` and `update`."""
    if is_optimizer(opt):
        return
    pair = not isinstance(opt, type | nn.Module) and all(callable(getattr(opt, n, None)) for n in ("init", "update"))
    if isinstance(opt, torch.optim.Optimizer) or (isinstance(opt, type) and issubclass(opt, torch.optim.Optimizer)):
        name = opt.__name__ if isinstance(opt, type) else type(opt).__name__
        ours = {**dict.fromkeys(("Adam", "AdamW"), "fs.adamw(1e-3)"), "SGD": "fs.sgd(0.1)"}
        ours |= {"Muon": "fs.optim.muon(1e-2)", "Adafactor": "fs.optim.adafactor(1e-2)"}
        ours = ours.get(name, f"fs.optim.from_torch(torch.optim.{name})")
        mend = f"Use {ours}: its state is part of the TrainState."
    elif inspect.isroutine(opt) and getattr(opt, "__module__", "").startswith("fsharding.optim"):
        mend = f"Call it: fs.{opt.__name__}(...)."
    elif isinstance(opt, torch.optim.lr_scheduler.LRScheduler):
        mend = "Pass a schedule as the learning rate: fs.adamw(fs.optim.schedules.warmup_cosine(3e-4, 9, 99))."
    elif pair:
        mend = "Wrap its functions: fs.optim.GradientTransformation(opt.init, opt.update)."
    else:
        mend = "Pass an optimizer such as fs.adamw(1e-3) or fs.optim.chain(...)."
    raise refuse("an optax-style optimizer, a pair of functions", opt, mend)


def check_function(what: str, fn: Callable[..., Any], count: int, *, exactly: bool = False) -> None:
    """Raise if `fn` can't be called with `count` arguments."""
    refuse_module(fn)
    if not callable(fn) or isinstance(fn, type):
        raise refuse(what, fn, f"Pass {what}.")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # a function in C may have no signature
    try:
        (signature.bind if exactly else signature.bind_partial)(*[None] * count)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise ArgumentError(message(f"takes {what}, got {name}{signature}.", mend=f"Pass {what}.")) from error
