"""`public`: a function of the library that says which argument it cannot use when something unforeseen fails in it.

In: a function with annotations. Out: the same function. A failure of Python or torch inside the library is looked at
once more: an argument that is not what its annotation says, or a leaf of a tree that is no tensor, is named.
What raises in functions of the user goes on as it is. Law: a call that succeeds pays nothing for it.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fsharding import tree
from fsharding.arguments import is_optimizer, kind_of
from fsharding.errors import ArgumentError, FshardingError, message

__all__ = ["public"]

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

_PACKAGE = str(Path(__file__).parent)
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(tree.optree.__file__).parent))


def public(name: str) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """Marks a public function.

    Args:
        name: how users call it, such as "fs.reshard".
    """

    def mark(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        @functools.wraps(function)
        def call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            try:
                return function(*args, **kwargs)
            except FshardingError:
                raise
            except Exception as error:
                if (found := _explanation(name, function, args, kwargs, error)) is None:
                    raise
                raise ArgumentError(found) from error

        return call

    return mark


def _is_ours(error: BaseException) -> bool:
    """Whether the library raised, or a library that it called; not a function of the user that it called."""
    trace, files = error.__traceback__, list[str]()
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    inside = [file for file in files if not file.startswith(_LIBRARIES)]
    return bool(inside) and inside[-1].startswith(_PACKAGE)


def _explanation(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> str | None:
    """What is wrong with the arguments of a call; None where nothing can be told."""
    signature = inspect.signature(function)
    mend = f"Call it as {name}{_short(signature)}."
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as unfit:
        return message(name, f"cannot be called so: {unfit}.", mend=mend)
    if not _is_ours(error) or not _is_about_arguments(error):
        return None
    given.pop("self", None)  # of a method
    hints = _hints(function)
    wrong = {arg: x for arg, x in given.items() if not _fits(x, hints.get(arg, Any))}
    rows = [f"{arg} is {kind_of(x)}, not {_words(hints[arg])}" for arg, x in wrong.items()]
    trees = [arg for arg, hint in function.__annotations__.items() if "Tree" in str(hint) and arg in given]
    odd = [
        row
        for arg in trees
        if arg not in wrong and given[arg] is not None
        for row in _odd_leaves(arg, given[arg], error)
    ]
    for first in wrong:
        for second in wrong:
            if first < second and _fits(wrong[first], hints[second]) and _fits(wrong[second], hints[first]):
                mend = f"Swap {first} and {second}. {mend}"
    if rows:
        return message(name, "got arguments of another kind.", rows, mend)
    if odd:
        rows = [*odd, f"so it failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"]
        return message(name, "got leaves that it cannot use.", rows, "Give trees of tensors on the device of the mesh.")
    return None


def _short(signature: inspect.Signature) -> str:
    """The parameters that have to be given."""
    parameters = (p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name != "self")
    needed = [p.name for p in parameters if p.default is p.empty]
    return f"({', '.join(needed)})"


@functools.lru_cache(maxsize=512)
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(function)


def _fits(x: Any, hint: Any) -> bool:
    """Whether a value can be what an annotation says; what an annotation does not say, every value can be."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, TypeVar | ParamSpec):
        return True
    if hint is None or hint is type(None):
        return x is None
    if origin in (typing.Union, types.UnionType):
        return any(_fits(x, option) for option in inner)
    if origin is typing.Literal:
        return x in inner
    if origin is collections.abc.Callable:
        return callable(x) and not isinstance(x, Tensor)
    if origin is type:
        return isinstance(x, type)
    if isinstance(origin, type):
        return _holds(x, origin, inner)
    return _is_a(x, hint) if isinstance(hint, type) else True


def _holds(x: Any, kind: type, inner: tuple[Any, ...]) -> bool:
    """Whether something is a container of a kind; of short ones, whether what is in it fits."""
    if not isinstance(x, kind) or (isinstance(x, str) and kind is collections.abc.Sequence and inner != (str,)):
        return False
    if isinstance(x, collections.abc.Mapping):
        return all(_fits(value, inner[-1]) for value in typing.cast("dict[Any, Any]", x).values()) if inner else True
    if isinstance(x, tuple | list) and len(typing.cast("list[Any]", x)) <= 100 and len(inner) == 1:
        return all(_fits(value, inner[0]) for value in typing.cast("list[Any]", x))
    return True


def _is_a(x: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(x, int | float) and not isinstance(x, bool)
    if kind is int:
        return isinstance(x, int) and not isinstance(x, bool)
    if getattr(kind, "_is_protocol", False):
        return True
    if set(getattr(kind, "__dataclass_fields__", ())) >= {"init", "update"}:
        return is_optimizer(x)
    return isinstance(x, kind)


def _words(hint: Any) -> str:
    """An annotation in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(option) for option in inner))
    if hint is None or hint is type(None):
        return "None"
    if origin is collections.abc.Callable:
        return "a function"
    if origin is not None and isinstance(origin, type) and len(inner) in (1, 2):
        return f"a {origin.__name__} of {_words(inner[0]).partition(' ')[2] or inner[0]}"
    name = getattr(hint, "__name__", str(hint))
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _is_about_arguments(error: Exception) -> bool:
    """Whether an error can come of arguments; those of communication have types, texts or marks of their own."""
    if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
        return type(error) is RuntimeError and "gloo/" not in str(error) and not hasattr(error, "_fsharding_peers")
    return isinstance(error, TypeError | AttributeError | ValueError | LookupError | NotImplementedError)


def _odd_leaves(name: str, x: Any, error: Exception) -> Iterator[str]:
    """The leaves of a tree that are no tensors or hold no values; where the error speaks of it, of other dtypes too."""
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
