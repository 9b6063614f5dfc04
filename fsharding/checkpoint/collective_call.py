"""Phases that succeed on all ranks or on none: each rank works, then all exchange results and errors.

Guarantee: if one rank fails, every rank raises the same `CheckpointError`, which shows what failed where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from fsharding.base.errors import CheckpointError, FshardingError, message
from fsharding.checkpoint.background import watched
from fsharding.mesh.consistency import differences, digest
from fsharding.mesh.device_mesh import is_member, own_rank, world_size
from fsharding.mesh.failures import among
from fsharding.train.state import TrainState

__all__ = ["agreed", "merged", "on_all", "step_of", "together", "write_together"]

Own = TypeVar("Own")
Answer = TypeVar("Answer")


def together(
    work: Callable[[], tuple[Own, Answer]], group: dist.ProcessGroup | None = None
) -> tuple[Own, list[Answer]]:
    """Run `work`, without collectives in it, on every rank, and all-gather its answers. Collective."""
    own = answer = problem = cause = None
    try:
        own, answer = work()
    except Exception as error:
        cause = error
        worded = isinstance(error, FshardingError)
        problem = worded, str(error) if worded else f"{type(error).__name__}: {error}"
    # A rank that failed takes part too, so that none waits for it. It sends text: not every exception can be pickled.
    answers: list[Any] = [(answer, problem)]
    if dist.is_initialized():
        answers = [None] * world_size()
        with among(range(world_size())):
            dist.all_gather_object(answers, (answer, problem), group=group)
    if problems := {r: problem for r, (_, problem) in enumerate(answers) if problem is not None}:
        raise _failure(problems) from cause
    return cast(Own, own), [answer for answer, _ in answers]


def on_all(work: Callable[[], Own], group: dist.ProcessGroup | None = None) -> Own:
    """Run `work` on every rank as `together` does, and return this rank's value; only errors are sent. Collective."""
    return together(lambda: (work(), None), group)[0]


def agreed(
    work: Callable[[], Own],
    facts: Callable[[Own], object],
    rule: str = "got different things on different ranks.",
    row: str = "has a different path, config, or leaves",
    group: dist.ProcessGroup | None = None,
) -> Own:
    """Run `work` on every rank, and refuse ranks that find other facts in its result. Collective."""
    own, seen = together(lambda: (own := work(), digest(repr(facts(own)))), group)
    if rows := [f"rank {r} {row} than rank 0" for r, theirs in enumerate(seen) if theirs != seen[0]]:
        raise CheckpointError(message(rule, rows))
    return own


def merged(facts_of_ranks: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the facts of all ranks, each from the first that has it; refuse those that differ."""
    facts = {name: value for own in reversed(facts_of_ranks) for name, value in own.items()}
    if rows := differences({r: facts | own for r, own in enumerate(facts_of_ranks)}, each=True):
        mend = "Give all ranks the same; what differs between them belongs into a sharded leaf, or files of your own."
        raise CheckpointError(message("got different values on different ranks.", rows, mend))
    return facts


def step_of(state: TrainState, group: dist.ProcessGroup | None = None) -> int:
    """Return the step of a state on all ranks: those outside its mesh have an outdated one. Collective."""
    own = {"step": str(int(state.step))} if is_member(state.layout.mesh) else {}
    return int(merged(together(lambda: (None, own), group)[1])["step"])


def write_together(
    target: Path,
    begin: Callable[[], AbstractContextManager[object]],
    write: Callable[[], Answer],
    commit: Callable[[list[Answer]], None],
    group: dist.ProcessGroup | None = None,
) -> list[Answer]:
    """Write an output on all ranks; rank 0 begins and commits it. It ends up complete or absent. Collective."""
    # Each phase ends with a synchronization: no rank writes before the directory exists, and rank 0 commits only after
    # all ranks have synced their files. If a phase fails on one rank it raises on all, and rank 0 cleans up.
    is_first = own_rank() == 0
    with ExitStack() as stack:
        on_all(watched(target, lambda: stack.enter_context(begin()) if is_first else None), group)
        _, written = together(watched(target, lambda: (None, write())), group)
        on_all(watched(target, lambda: commit(written) if is_first else None), group)
    return written


def _failure(problems: Mapping[int, tuple[bool, str]]) -> CheckpointError:
    """Build one error from those of some ranks."""
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
