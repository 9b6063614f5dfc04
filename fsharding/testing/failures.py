"""The error of a failed call on ranks: the failed ranks, their tracebacks, and the call that repeats it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fsharding.base.errors import RankError, message

__all__ = ["Failure", "RankFailure", "name_of", "repeat", "worded"]

_SHOWN = 2000  # most characters of a call in a message


class RankFailure(RankError):
    """The `RankError` that `run_ranks` raises, with details of each failed rank.

    Attributes:
        errors: Traceback of each failed rank, or how it died, in the order of failure.
        exceptions: Exception of each failed rank; None if it raised none, or one that can't be pickled.

    Example:
        >>> from fsharding.testing import RankFailure
        >>> try:
        ...     fs.run_ranks(int, 1, "x")
        ... except RankFailure as failure:
        ...     failure.exceptions
        {0: ValueError("invalid literal for int() with base 10: 'x'")}
    """

    def __init__(
        self,
        text: str,
        errors: dict[int, str] | None = None,
        exceptions: dict[int, BaseException | None] | None = None,
    ) -> None:
        super().__init__(text)
        self.errors = errors or {}
        self.exceptions = exceptions or {}


@dataclasses.dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    what: str  # continues a sentence that begins with the rank
    detail: str = ""  # a traceback or a stack
    exception: BaseException | None = None  # None if it cannot be pickled
    died: bool = False
    status: int = 0
    late: bool = False


def name_of(fn: Callable[..., Any]) -> str:
    """Return the full name of a function."""
    return f"{fn.__module__}.{fn.__qualname__}" if hasattr(fn, "__qualname__") else repr(fn)


def repeat(fn: Callable[..., Any], size: int, seed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the line that repeats a call; a very long one is shortened, but keeps its seed."""
    given = [repr(arg) for arg in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    text = ", ".join([getattr(fn, "__qualname__", repr(fn)), str(size), *given])
    return f"To repeat it: run_ranks({text if len(text) <= _SHOWN else text[:_SHOWN] + ' ...'}, seed={seed})"


def worded(rule: str, failed: dict[int, Failure], mend: str) -> RankFailure:
    """Make the error: one row and one traceback for all ranks that failed alike, in the order of failure."""
    groups: dict[str, list[int]] = {}
    for rank, failure in failed.items():
        groups.setdefault(failure.what, []).append(rank)
    rows = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} {what}" for what, ranks in groups.items()
    ]
    details = [(ranks[0], failed[ranks[0]].detail.rstrip()) for ranks in groups.values()]
    traces = [f"Rank {rank}:\n{detail}" for rank, detail in details if detail]
    error = RankFailure(
        "\n\n".join([message(rule, rows, mend), *traces]),
        {rank: failure.detail or failure.what for rank, failure in failed.items()},
        {rank: failure.exception for rank, failure in failed.items()},
    )
    error.__cause__ = next((failure.exception for failure in failed.values() if failure.exception), None)
    return error
