"""Reads a rank's Python stack: the user's line, the part of the work that it is in, and the call that it waits in.

In: a frame, the innermost one, or an error with its traceback. Out: short texts. A frame is the user's if it is neither
the library's, nor torch's, nor Python's own. Guarantee: a text has a bounded length, whatever the stack.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from fsharding.base.calls import LIBRARY
from fsharding.base.errors import printable

__all__ = [
    "DISTRIBUTED",
    "Line",
    "collective",
    "is_users",
    "lines",
    "lines_of",
    "outwards",
    "region",
    "shown",
    "site",
    "site_here",
    "describe",
]

_TORCH = str(Path(torch.__file__).parent) + os.sep
DISTRIBUTED = f"{_TORCH}distributed{os.sep}"
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
"""By file of the library; the innermost frame that has one says what its rank does."""


class Line(NamedTuple):
    """A frame and the line that runs in it."""

    frame: FrameType
    number: int


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_users(frame: FrameType) -> bool:
    """Whether a frame is neither the library's, nor torch's, nor Python's own."""
    return _is_users(frame.f_code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_users(name: str) -> bool:
    return not (name.startswith((LIBRARY, _TORCH)) or (name.startswith(_PYTHON) and "-packages" not in name))


def site_here() -> tuple[str, int] | None:
    """File and line of the user's innermost frame in this thread; None where all frames are others'."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def site(frame: FrameType | None) -> str:
    """File and line of the first frame, outwards, that is a user's."""
    for outer in outwards(frame):
        if is_users(outer):
            return _at(Line(outer, outer.f_lineno))
    return "a line that is not known"


def _at(line: Line) -> str:
    return shown(line.frame.f_code.co_filename, line.number)


def shown(file: str, number: int) -> str:
    """A file, relative to the working directory where it is below that, and a line."""
    path = Path(file)
    with suppress(OSError, ValueError):  # gone, or elsewhere
        path = path.relative_to(Path.cwd())
    return f"{path}:{number}"


def lines(frame: FrameType | None) -> list[Line]:
    """The lines that run in a frame and in its callers."""
    return [Line(outer, outer.f_lineno) for outer in outwards(frame)]


def lines_of(error: BaseException) -> list[Line]:
    """The lines from where an error was raised to where it has come up to, and on to the outermost, innermost first."""
    trace = error.__traceback__
    inside = list[Line]()
    while trace is not None:
        inside.insert(0, Line(trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return [*inside, *(lines(inside[-1].frame.f_back) if inside else ())]


def region(stack: Sequence[Line]) -> str:
    """The part of the work that a rank is in, such as "backward, gradient reduction"; "" where the stack says nothing.

    Args:
        stack: the lines of a stack, innermost first.
    """
    names = [(_in_library(line.frame), line.frame.f_code.co_name) for line in stack]
    backward = any(name in ("backward", "_engine_run_backward") for _, name in names)
    forward = ("transforms/value_and_grad", "forward") in names
    part = next((words for file, _ in names for start, words in _REGIONS if _fits(file, start)), "")
    return ", ".join(filter(None, ["backward" if backward else "forward" if forward else "", part]))


def _in_library(frame: FrameType) -> str:
    """The file of a frame of the library, without its ending; "" for others."""
    name = frame.f_code.co_filename
    return name.removeprefix(LIBRARY).removesuffix(".py") if name.startswith(LIBRARY) else ""


def _fits(file: str, start: str) -> bool:
    return file.startswith(start) if start.endswith("/") else file == start


def collective(stack: Sequence[Line]) -> str:
    """The collective that a stack is in: torch's own, or the outermost function of `ops` or `comm`; "" for none.

    Args:
        stack: the lines of a stack, innermost first.
    """
    for line in reversed(stack):
        file = _in_library(line.frame)
        code = line.frame.f_code
        if file.startswith(("ops/", "comm/")):
            return f"{file.replace('/', '.')}.{code.co_qualname.replace('<locals>.', '')}"
        if code.co_filename.startswith(DISTRIBUTED) and code.co_name != "wrapper":
            return f"torch's {code.co_name}"
    return ""


def describe(stack: Sequence[Line]) -> list[str]:
    """Ten lines at most, the user's first, both kinds innermost first: "train.py:88 in main".

    Args:
        stack: the lines of a stack, innermost first.
    """
    users = [line for line in stack if is_users(line.frame)][:_USERS]
    others = [line for line in stack if not is_users(line.frame)][: _ALL - len(users)]
    return [printable(f"{_at(line)} in {line.frame.f_code.co_qualname}", 200) for line in (*users, *others)]
