"""Phases that all ranks finish or none does: each rank does its work, then all tell each other how it went.

In: a function that runs on this rank alone. Out: what it returned on every rank, in rank order.
Law: if it raised on some rank, every rank raises the same `CheckpointError`, which says what happened on which rank.
Without a process group there is one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch.distributed as dist

from fsharding.errors import CheckpointError, FshardingError, message
from fsharding.mesh.device_mesh import world_size

__all__ = ["failure", "together"]

T = TypeVar("T")


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Runs `work` on every rank, without collectives in it, and gathers what it returned. Collective.

    Args:
        work: what this rank does; returns something small that can be pickled.
        group: of all ranks, for a thread that must not get between the collectives of another; by default the default.

    Raises:
        CheckpointError: on every rank, if `work` raised on one.
    """
    value: T | None = None
    problem: tuple[bool, str] | None = None
    cause: Exception | None = None
    try:
        value = work()
    except Exception as error:
        cause = error
        worded = isinstance(error, FshardingError)
        problem = worded, str(error) if worded else f"{type(error).__name__}: {error}"
    answers: list[Any] = [(value, problem)]
    if dist.is_initialized():
        answers = [None] * world_size()
        dist.all_gather_object(answers, (value, problem), group=group)
    problems = {r: problem for r, (_, problem) in enumerate(answers) if problem is not None}
    if problems:
        raise failure(problems) from cause
    return cast("list[T]", [value for value, _ in answers])


def failure(problems: Mapping[int, tuple[bool, str]]) -> CheckpointError:
    """Words what went wrong on some ranks.

    Args:
        problems: by rank: whether the text is a whole message of ours already, and the text.
    """
    by_text: dict[tuple[bool, str], list[int]] = {}
    for r, problem in sorted(problems.items()):
        by_text.setdefault(problem, []).append(r)
    whole, text = next(iter(by_text))
    if whole and len(problems) == world_size() and len(by_text) == 1:
        return CheckpointError(text)
    if world_size() == 1:
        return CheckpointError(message("failed.", [text]))
    rows = [
        f"rank{'s' * (len(where) > 1)} {', '.join(map(str, where))}: {text}" for (_, text), where in by_text.items()
    ]
    return CheckpointError(message(f"failed on {len(problems)} of {world_size()} ranks.", rows))
