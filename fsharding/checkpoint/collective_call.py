"""Phases that all ranks finish or none does: each does its work, then all tell each other how it went.

Guarantee: if it raised on one rank, every rank raises the same `CheckpointError`, which says what happened where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from fsharding.base.errors import CheckpointError, FshardingError, message
from fsharding.checkpoint.background import watched
from fsharding.checkpoint.directory import PartialOutput
from fsharding.mesh.device_mesh import own_rank, world_size
from fsharding.mesh.failures import among

__all__ = ["UNLIKE", "UNLIKE_ROW", "agreed", "on_all", "together", "write_together"]

UNLIKE = "got different things on different ranks."
UNLIKE_ROW = "has another path, config, or leaves"
"""What `agreed` says of ranks that would write different things."""

Own = TypeVar("Own")
Answer = TypeVar("Answer")
Output = TypeVar("Output", bound=PartialOutput)


def together(
    work: Callable[[], tuple[Own, Answer]], group: dist.ProcessGroup | None = None
) -> tuple[Own, list[Answer]]:
    """Run `work` on every rank, without collectives in it, and gather what it answers. Collective."""
    done: tuple[Own, Answer] | None = None
    problem: tuple[bool, str] | None = None
    cause: Exception | None = None
    try:
        done = work()
    except Exception as error:
        cause = error
        worded = isinstance(error, FshardingError)
        problem = worded, str(error) if worded else f"{type(error).__name__}: {error}"
    answer = done[1] if done is not None else None
    answers: list[Any] = [(answer, problem)]
    if dist.is_initialized():
        answers = [None] * world_size()
        with among(range(world_size())):
            dist.all_gather_object(answers, (answer, problem), group=group)
    problems = {r: problem for r, (_, problem) in enumerate(answers) if problem is not None}
    if problems:
        raise _failure(problems) from cause
    assert done is not None
    return done[0], cast("list[Answer]", [answer for answer, _ in answers])


def on_all(work: Callable[[], Own], group: dist.ProcessGroup | None = None) -> Own:
    """Run `work` on every rank as `together` does, and return this rank's value; nothing but failures is sent."""
    return together(lambda: (work(), None), group)[0]


def agreed(work: Callable[[], tuple[Own, str]], rule: str, row: str, group: dist.ProcessGroup | None = None) -> Own:
    """Run `work` on every rank, and refuse ranks whose answers differ. Collective."""
    own, seen = together(work, group)
    if rows := [f"rank {r} {row} than rank 0" for r, theirs in enumerate(seen) if theirs != seen[0]]:
        raise CheckpointError(message(rule, rows))
    return own


def write_together(
    target: Path,
    begin: Callable[[], AbstractContextManager[Output]],
    write: Callable[[], Answer],
    commit: Callable[[Output, list[Answer]], None],
    group: dist.ProcessGroup | None = None,
) -> list[Answer]:
    """Write an output on all ranks; it is complete, or not there. Collective."""
    with ExitStack() as stack:

        def enter() -> Output | None:
            return stack.enter_context(begin()) if own_rank() == 0 else None

        output = on_all(watched(target, enter), group)
        _, written = together(watched(target, lambda: (None, write())), group)
        on_all(watched(target, lambda: None if output is None else commit(output, written)), group)
    return written


def _failure(problems: Mapping[int, tuple[bool, str]]) -> CheckpointError:
    """Word what went wrong on some ranks."""
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
