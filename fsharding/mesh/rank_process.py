"""A process that is one local rank, from its first instruction to its answer.

Guarantee: a rank ends with its launcher, however that ends; a rank answers once, or its end is the answer.
"""

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
    """The answer of a rank."""

    value: Any = None  # what its function returned
    error: str = ""  # why it failed; "" if it did not
    blames_others: bool = False  # whether it failed because another rank did


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
    # Not `send`: torch would share the memory of a tensor, which ends with this process.
    pipe.send_bytes(sent)
    pipe.close()
    if answer.error:
        # The end of Python would wait for threads that wait for lost ranks.
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
    """An error in its own words, with the stack if it is none of ours."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, FshardingError):
        return text
    return f"{text}\n{''.join(traceback.format_exception(error))}".rstrip()


def _end_with(launcher: int) -> None:
    """Have Linux kill this process when its launcher ends, which may have happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)
