"""The public name of a call: errors begin with it, and no function passes it down.

Guarantee: a call that succeeds pays nothing for its name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

__all__ = ["LIBRARY", "call_as", "name_of", "named", "public_name"]

_Args = ParamSpec("_Args")
_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


LIBRARY = f"{Path(__file__).parents[1]}{os.sep}"
"""The folder of the package: files below it are ours."""

_names: dict[CodeType, str] = {}
"""By the code of a function: the name by which users call it."""


def named(name: str) -> Callable[[_F], _F]:
    """Mark a function as the one that users call by `name`, which begins the errors that it raises."""
    # Nothing is wrapped, so calls cost nothing: the name is looked for on the stack when an error is worded. The errors
    # of "fs.adamw(...).update" begin with "fs.adamw", which is all that a user has typed.

    def mark(fn: _F) -> _F:
        _names[fn.__code__] = name.partition("(")[0]
        return fn

    return mark


def name_of(code: CodeType) -> str:
    """Return the public name of a function; "" if it isn't marked."""
    return _names.get(code, "")


def call_as(name: str, fn: Callable[_Args, _T], *args: _Args.args, **kwargs: _Args.kwargs) -> _T:
    """Call a function whose errors begin with `name`: for names that are known at the call alone."""
    return fn(*args, **kwargs)


def public_name(frame: FrameType | None = None) -> str:
    """Return the name of the innermost public call on a stack, by default the caller's; "fsharding" outside of any."""
    inner = frame or sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while inner is not None:
        if inner.f_code is call_as.__code__:
            return inner.f_locals["name"]
        if name := name_of(inner.f_code):
            return name
        inner = inner.f_back
    return "fsharding"
