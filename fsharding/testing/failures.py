"""How a call on ranks failed, in words: which rank, what it said, and the call that repeats the example.

In: what is known of each failed rank, and the function with its arguments and seed. Out: one `RankFailure`.
Guarantee: ranks that failed alike share a row and a traceback, and the first row is of the rank that failed first.
"""

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
    """The outcome of one rank, as far as it is known.

    Attributes:
        what: what it did, as the rest of a sentence that begins with its number.
        detail: traceback or stack.
        exception: what it raised, if that can be pickled.
        died: whether its process has ended.
        status: its exit status then.
        late: whether it was given up.
        answered: whether it raised, reported that, and waits for the next call.
    """

    what: str
    detail: str = ""
    exception: BaseException | None = None
    died: bool = False
    status: int = 0
    late: bool = False
    answered: bool = False


def name_of(fn: Callable[..., Any]) -> str:
    """The full name of a function."""
    return f"{fn.__module__}.{fn.__qualname__}" if hasattr(fn, "__qualname__") else repr(fn)


def repeat(fn: Callable[..., Any], size: int, seed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The line that repeats an example; a very long one is cut, but for its seed."""
    given = [repr(arg) for arg in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    text = ", ".join([getattr(fn, "__qualname__", repr(fn)), str(size), *given])
    return f"To repeat it: run_ranks({text if len(text) <= _SHOWN else text[:_SHOWN] + ' ...'}, seed={seed})"


def worded(rule: str, failed: dict[int, Failure], mend: str) -> RankFailure:
    """Words what went wrong: a row and a traceback for all ranks that failed alike."""
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
