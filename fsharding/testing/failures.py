"""The error of a failed call on ranks: which rank failed, its traceback, and the call that repeats the example."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fsharding.base.errors import RankError, message

__all__ = ["Failure", "RankFailure", "name_of", "repeat", "worded"]

_SHOWN = 2000


class RankFailure(RankError):
    """What `run_ranks` raises: a `RankError` that keeps what is known of each failed rank.

    Attributes:
        errors: rank to traceback, or to what was seen of it from outside, the first to fail first.
        exceptions: rank to the exception itself; `None` where there is none or it cannot be pickled.

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

    what: str  # the rest of a sentence that begins with the rank's number
    detail: str = ""  # a traceback or a stack
    exception: BaseException | None = None  # None if it cannot be pickled
    died: bool = False
    status: int = 0
    late: bool = False


def name_of(fn: Callable[..., Any]) -> str:
    """Return the full name of a function."""
    return f"{fn.__module__}.{fn.__qualname__}" if hasattr(fn, "__qualname__") else repr(fn)


def repeat(fn: Callable[..., Any], size: int, seed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the line that repeats an example; a very long one is shortened, but keeps its seed."""
    given = [repr(arg) for arg in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    text = ", ".join([getattr(fn, "__qualname__", repr(fn)), str(size), *given])
    return f"To repeat it: run_ranks({text if len(text) <= _SHOWN else text[:_SHOWN] + ' ...'}, seed={seed})"


def worded(rule: str, failed: dict[int, Failure], mend: str) -> RankFailure:
    """Make the error: a row and a traceback for all ranks that failed alike, the first to fail first."""
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
