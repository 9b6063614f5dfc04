"""Describe a rank by its Python stack: the user's line, the phase of the step, and the collective it waits in."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch

from fsharding.base.calls import LIBRARY, call_of, callers
from fsharding.base.errors import printable

__all__ = ["Call", "Line", "doing", "innermost", "lines", "lines_of", "loose_call", "shown", "site", "site_here"]

_TORCH = str(Path(torch.__file__).parent) + os.sep
_DISTRIBUTED = f"{_TORCH}distributed{os.sep}"
_PYTHON = str(Path(os.__file__).parent) + os.sep
_USERS = 6
_ALL = 10

_REGIONS = (
    ("transforms/grad_reducer", "gradient reduction"),
    ("transforms/gathered_unit", "gather of a unit"),
    ("transforms/norms", "gradient norm"),
    ("optim/", "optimizer update"),
    ("mesh/consistency", "comparison of settings"),
    ("checkpoint/loading", "load"),
    ("foreign/importing", "load"),
    ("checkpoint/", "save"),
    ("interop/hf/loading", "load"),
    ("interop/hf/saving", "save"),
    ("train/reshard_leaves", "reshard"),
    ("train/reshard", "reshard"),
    ("comm/redistribute", "reshard"),
    ("mesh/device_mesh", "making process groups"),
)
"""Phases by file of the library; the innermost frame in one of these files decides."""


class Call(NamedTuple):
    """A call of a collective."""

    function: str  # "" outside of a collective
    text: str  # the function, with the number of the step
    site: str  # file and line of the caller

    def __str__(self) -> str:
        return f"{self.text} at {self.site}" if self.function else f"in no collective, at {self.site}"


Line: TypeAlias = tuple[FrameType, int]  # a frame and its current line, as `traceback` yields them


@functools.lru_cache(maxsize=4096)
def _is_users(name: str) -> bool:
    """Return whether a file is neither the library's, nor torch's, nor Python's."""
    return not (name.startswith((LIBRARY, _TORCH)) or (name.startswith(_PYTHON) and "-packages" not in name))


def _users_site(frame: FrameType | None) -> tuple[str, int] | None:
    """Return file and line of the first user frame, outwards; None without one."""
    sites = ((outer.f_code.co_filename, outer.f_lineno) for outer in callers(frame))
    return next((place for place in sites if _is_users(place[0])), None)


def site_here() -> tuple[str, int] | None:
    """Return file and line of the user's innermost frame in this thread; None without one."""
    return _users_site(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]


def site(frame: FrameType | None) -> str:
    """Return file and line of the first user frame, outwards, as text."""
    place = _users_site(frame)
    return "an unknown line" if place is None else shown(*place)


def shown(file: str, number: int) -> str:
    """Format a file, relative to the working directory if it is inside, and a line."""
    path = Path(file)
    with suppress(OSError, ValueError):  # the working directory is deleted, or the file is outside
        path = path.relative_to(Path.cwd())
    return f"{path}:{number}"


def lines(frame: FrameType | None) -> list[Line]:
    """Return the current lines of a frame and its callers."""
    return [(outer, outer.f_lineno) for outer in callers(frame)]


def lines_of(error: BaseException) -> list[Line]:
    """Return the lines from where an error was raised to where it is caught, then the callers', innermost first."""
    inside = [*traceback.walk_tb(error.__traceback__)]
    return [*reversed(inside), *(lines(inside[0][0].f_back) if inside else ())]


def _region(stack: Sequence[Line]) -> str:
    """Return the phase of a stack, such as "backward, gradient reduction"; "" if unknown."""
    names = [(_in_library(frame), frame.f_code.co_name) for frame, _ in stack]
    backward = any(name in ("backward", "_engine_run_backward") for _, name in names)
    forward = ("transforms/value_and_grad", "forward") in names
    part = next((words for file, _ in names for start, words in _REGIONS if _fits(file, start)), "")
    return ", ".join(filter(None, ["backward" if backward else "forward" if forward else "", part]))


def _in_library(frame: FrameType) -> str:
    """Return the file of a frame, relative to the library and without its suffix; "" outside of the library."""
    name = frame.f_code.co_filename
    return name.removeprefix(LIBRARY).removesuffix(".py") if name.startswith(LIBRARY) else ""


def _fits(file: str, start: str) -> bool:
    return file.startswith(start) if start.endswith("/") else file == start


def _collective(stack: Sequence[Line]) -> str:
    """Return the collective of a stack: torch's, or the outermost function of `ops` or `comm`; "" for none."""
    for frame, _ in reversed(stack):
        file = _in_library(frame)
        code = frame.f_code
        if file.startswith(("ops/", "comm/")):
            return f"{file.replace('/', '.')}.{code.co_qualname.replace('<locals>.', '')}"
        if code.co_filename.startswith(_DISTRIBUTED) and code.co_name != "wrapper":
            return f"torch's {code.co_name}"
    return ""


def _describe(stack: Sequence[Line]) -> list[str]:
    """Format at most ten lines as "train.py:88 in main": first the user's, then others, both innermost first."""
    users = [line for line in stack if _is_users(line[0].f_code.co_filename)][:_USERS]
    others = [line for line in stack if not _is_users(line[0].f_code.co_filename)][: _ALL - len(users)]
    rows = [
        f"{shown(frame.f_code.co_filename, number)} in {frame.f_code.co_qualname}"
        for frame, number in (*users, *others)
    ]
    return [printable(row, 200) for row in rows]


def doing(stack: Sequence[Line], what: str) -> dict[str, Any]:
    """Describe a stack: its phase, its collective, and its lines."""
    region = ", ".join(filter(None, [_region(stack), what]))
    return {"region": region, "collective": _collective(stack), "stack": _describe(stack)}


def innermost(frame: FrameType | None) -> str:
    """Format the file, line and function of a frame."""
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


def loose_call(frame: FrameType | None, thread: int, *, waits: bool) -> Call:
    """Return the call of the library, or of torch, of a thread that is in no `naming_lost`."""
    # If the thread doesn't wait in an `among` block, only a collective of torch is recognizable.
    inside = [*takewhile(lambda outer: not _is_users(outer.f_code.co_filename), callers(frame))]
    where = LIBRARY if waits else _DISTRIBUTED
    codes = [outer.f_code for outer in reversed(inside) if outer.f_code.co_filename.startswith(where)]
    if waits:
        backward = any(code.co_name == "backward" for code in codes)
        inner = "a backward pass" if backward else codes[0].co_qualname.replace("<locals>.", "") if codes else ""
        # Each public call has one frame in these files: their number selects the outermost call below user code.
        depth = sum(_in_library(f) in ("base/public", "base/calls") for f in inside)
        function = call_of(thread, depth) or inner
    else:
        function = next((f"torch's {code.co_name}" for code in codes if code.co_name != "wrapper"), "")
    return Call(function, function, site(frame))
