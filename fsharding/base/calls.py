"""The public calls of each thread; the name of the innermost one begins error messages."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import get_ident
from types import FrameType, ModuleType
from typing import Any, ParamSpec, TypeVar

from fsharding.base.registry import find, loaded

__all__ = ["CALLS", "LIBRARY", "call_as", "call_of", "callers", "path_of", "public_name"]

_Args = ParamSpec("_Args")
_T = TypeVar("_T")

LIBRARY = f"{Path(__file__).parents[1]}{os.sep}"  # files that begin with it are the package's


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


class _OfThreads(dict[int, list[Any]]):
    # Not a defaultdict: other threads read a thread's calls, and `setdefault` gives both the same list in a race.
    def __missing__(self, thread: int) -> list[Any]:
        return self.setdefault(thread, [])


CALLS = _OfThreads()  # public functions and names, innermost last; only `public` and `call_as` change it


def call_as(name: str, fn: Callable[_Args, _T], *args: _Args.args, **kwargs: _Args.kwargs) -> _T:
    """Call a function whose errors begin with `name`: a command, or work for a call of a different thread."""
    calls = CALLS[get_ident()]
    calls.append(name)
    try:
        return fn(*args, **kwargs)
    finally:
        calls.pop()


def call_of(thread: int, depth: int = 1) -> str:
    """Return the name of a thread's public call, by default the innermost; "" outside of any."""
    call = next(iter(CALLS[thread][-depth:]), "") if depth else ""
    return call if isinstance(call, str) else path_of(call)


def public_name() -> str:
    """Return the name that begins this thread's errors; "fsharding" outside of any public call."""
    return call_of(get_ident()) or "fsharding"


@functools.cache
def path_of(fn: Callable[..., Any]) -> str:
    """Return the name by which users call a function, such as "fs.adamw", "fs.Layout.with_mesh" or "train step"."""
    first, *rest = fn.__qualname__.split(".")
    owner = getattr(sys.modules[fn.__module__], first)
    path = _path_in_fs(owner)
    if not isinstance(owner, type):
        return path
    if rest[0] == "__call__":  # of an object in the user's variable: the class name in words, such as "train step"
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", first).lower()
    return path if rest[0].startswith("__") else f"{path}.{rest[0]}"


def _path_in_fs(found: Any) -> str:
    """Return the shortest path of a function or class in `fs`, or else its name."""
    api, others = find("api", "fs"), loaded("later")
    spaces = [("fs", {**vars(api), **others}, [*api.__all__, *others])]
    for path, members, names in spaces:
        for name in names:
            member = members.get(name)
            if member is found:
                return f"{path}.{name}"
            if isinstance(member, ModuleType):
                spaces.append((f"{path}.{name}", vars(member), member.__all__))  # shorter paths come first
    room = sys.modules[".".join(found.__module__.split(".")[:2])]
    public = found.__name__ in getattr(room, "__all__", ())
    return f"fs.{room.__name__.partition('.')[2]}.{found.__name__}" if public else found.__name__
