"""The process of a local rank, which sends one answer, or none if it dies, and ends with its launcher."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from fsharding.base.errors import FshardingError

__all__ = ["Answer", "run_rank"]

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class Answer(NamedTuple):
    """The result of a rank."""

    value: Any = None  # the function's return value
    error: str = ""  # text of the exception, or ""
    blames_others: bool = False  # whether it failed because a different rank did


def run_rank(launcher: int, variables: Mapping[str, str], call: bytes, pipe: Connection) -> None:
    """Run a function on this rank and send its answer."""
    _end_with(launcher)
    os.environ.update(variables)
    answer = _answer(call)
    try:
        sent = pickle.dumps(answer)
    except Exception as error:
        answer = Answer(error=_described(error))
        sent = pickle.dumps(answer)
    # Not `send`: torch would send tensors as shared memory, which ends with this process.
    pipe.send_bytes(sent)
    pipe.close()
    if answer.error:
        # Python's shutdown would wait for threads that wait for lost ranks.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _answer(call: bytes) -> Answer:
    try:
        function, args = pickle.loads(call)
        return Answer(function(*args))
    except BaseException as error:
        return Answer(error=_described(error), blames_others=type(error).__name__ == "RankError")


def _described(error: BaseException) -> str:
    """Format an error, with its stack unless it is ours."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, FshardingError):
        return text
    return f"{text}\n{''.join(traceback.format_exception(error))}".rstrip()


def _end_with(launcher: int) -> None:
    """Have Linux kill this process when its launcher ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before the request
        os._exit(1)
