"""Pipeline schedules as values: the actions of each rank of the axis `pp`, in order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, cast, get_args

from fsharding.base import _compat
from fsharding.base.errors import ScheduleError, did_you_mean, message
from fsharding.base.public import public
from fsharding.pipeline import simulation, validation
from fsharding.pipeline.actions import Action, Kind, Owner, Table, peer
from fsharding.pipeline.lowering import Frequency, lower
from fsharding.pipeline.simulation import Durations, Timeline

__all__ = [
    "SCHEDULES", "Schedule", "check_schedule", "forward_only", "layers_of", "make_schedule", "plan_schedule",
    "stages_for",
]  # fmt: skip


@dataclass(frozen=True, repr=False)
class Schedule:
    """The actions of every rank of a pipeline in one step.

    Attributes:
        name: Kind of schedule, such as "1f1b".
        ranks: Size of the axis `pp`.
        stages: Number of stages of the model; stage 0 has the embedding, the last one the head and the loss.
        microbatches: Number of microbatches of the batch.
        owner: Rank of each stage.
        table: Actions of each rank, in order; see `Action`.

    Example:
        >>> fs.pipeline.plan_schedule("1f1b", ranks=2, microbatches=4)
        Schedule(1f1b: 2 ranks, 2 stages, 4 microbatches, 36 actions)
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    owner: Owner
    table: Table

    def __hash__(self) -> int:
        # Without the table, which has thousands of entries; equality compares it.
        return hash((self.name, self.ranks, self.stages, self.microbatches, self.owner))

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name}: {_count(self.ranks, 'rank')}, {_count(self.stages, 'stage')}, "
            f"{_count(self.microbatches, 'microbatch', 'es')}, {_count(sum(map(len, self.table)), 'action')})"
        )

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in order."""
        return tuple(stage for stage, owner in enumerate(self.owner) if owner == rank)

    def actions_on(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of a rank, in order."""
        return self.table[rank]

    def peer(self, action: Action) -> int:
        """Return the rank at the other end of a send or receive, as a coordinate of `pp`."""
        return peer(action, self.owner)

    def is_local(self, stage: int) -> bool:
        """Return whether a stage and the next one are on one rank, and need no messages."""
        return stage + 1 < self.stages and self.owner[stage] == self.owner[stage + 1]

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Peak number of (stage, microbatch) pairs of each rank whose F is done and whose B or W is not."""
        return simulation.in_flight(self.table)

    @public
    def simulate(
        self, forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0, send: float = 0.0
    ) -> Timeline:
        """Compute the timeline from the durations of one stage and one microbatch, in any one unit.

        Args:
            forward: Duration of F.
            backward_input: Duration of I. B takes this and `backward_weight`.
            backward_weight: Duration of W.
            send: Latency of a message after its compute action. Messages don't slow each other; gathers and scatters
                take no time.

        Returns:
            A timeline with `total`, `bubble_share` and `idle_share(rank)`.

        Raises:
            ScheduleError: Some ranks would wait forever, or a duration is negative or infinite.
        """
        durations = Durations(forward, backward_input, backward_weight, send)
        rows = [f"{name} is {x}" for name, x in durations._asdict().items() if not 0 <= x < float("inf")]
        if rows:
            mend = "Pass finite durations that aren't negative."
            raise ScheduleError(message("cannot use these durations.", rows, mend))
        return simulation.simulate(self.owner, self.table, durations)

    def show(
        self, forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0, send: float = 0.0
    ) -> str:
        """Draw the timeline as text: one row per rank, one column per slot of time.

        Args:
            forward: Duration of F, as in `simulate`.
            backward_input: Duration of I.
            backward_weight: Duration of W.
            send: Latency of a message.

        Returns:
            The text, which ends with the total time and the share of bubbles.
        """
        times = self.simulate(forward, backward_input, backward_weight, send)
        return f"{self}\n{times.show()}\ntotal {times.total:g}, bubbles {times.bubble_share:.1%}"


def _count(n: int, what: str, plural: str = "s") -> str:
    return f"{n} {what}{'' if n == 1 else plural}"


# ------------------------------------------------------------------------------------------------------------- planning
Computes: TypeAlias = Sequence[Sequence[tuple[str, int, int]]]
"""(kind, stage, microbatch) of each rank's computes."""


class _Plan(NamedTuple):
    """A kind of schedule: stages per rank, whether they form a V, and the order of computes."""

    least: int
    most: int | None
    is_v: bool
    order: Callable[[int, int, int], Computes]


def _gpipe(ranks: int, local: int, microbatches: int) -> Computes:
    """Order all forwards, then all backwards."""
    return [[(kind, r, m) for kind in "FB" for m in range(microbatches)] for r in range(ranks)]


def _one_forward_one_backward(ranks: int, local: int, microbatches: int) -> Computes:
    """Order one forward per later stage first, then a forward and a backward in turn."""
    rows: list[list[tuple[str, int, int]]] = []
    for r in range(ranks):
        early = min(ranks - 1 - r, microbatches)
        row = [("F", r, m) for m in range(early)]
        for m in range(early, microbatches):
            row += [("F", r, m), ("B", r, m - early)]
        rows.append(row + [("B", r, m) for m in range(microbatches - early, microbatches)])
    return rows


def _torch(name: str) -> Callable[[int, int, int], Computes]:
    return functools.partial(_compat.torch_pipeline_order, name)


_PLANS = {
    "gpipe": _Plan(1, 1, False, _gpipe),
    "1f1b": _Plan(1, 1, False, _one_forward_one_backward),
    "interleaved": _Plan(2, None, False, _torch("ScheduleInterleaved1F1B")),
    "interleaved_zero_bubble": _Plan(2, None, False, _torch("ScheduleInterleavedZeroBubble")),
    "zbv": _Plan(2, 2, True, _torch("ScheduleZBVZeroBubble")),
    "dualpipev": _Plan(2, 2, True, _torch("ScheduleDualPipeV")),
}

SCHEDULES: tuple[str, ...] = tuple(_PLANS)
"""The names that `plan_schedule` takes."""


@public
def plan_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    stages_per_rank: int | None = None,
    gather: Frequency = "step",
    scatter: Frequency | None = None,
    ahead: int = 1,
) -> Schedule:
    """Plan a pipeline schedule. Pure and cached.

    | name | stages per rank | stage s is on rank | idle time of a rank |
    |---|---|---|---|
    | gpipe, 1f1b | 1 | s | (p-1)·(F+I+W) [1, 2] |
    | interleaved | v >= 2 | s mod p | (p-1)·(F+I+W), if m >= p [2] |
    | interleaved_zero_bubble | v >= 2 | s mod p | (p-1)·(F+I-W), if m >= p and I >= W [3] |
    | zbv | 2 | as a V: 0 1 1 0 | (p-1)·F, if F = I = W and m >= 2p-1 [3] |
    | dualpipev | 2 | as a V: 0 1 1 0 | (p-1)·F, if F = I = W and m >= 2p [4] |

    p is ranks, m is microbatches; F, I and W are the durations of one stage; messages take no time. A rank is busy for
    v·m·(F+I+W), so the bubble share (idle over idle + busy) is (p-1)/(m+p-1) for gpipe and 1f1b, and (p-1)/(v·m+p-1)
    for interleaved; [2] divides by busy alone: (p-1)/(v·m). With m < p interleaved idles for
    (p-1+(v-1)(p-m))·(F+I+W). If a condition doesn't hold, use `Schedule.simulate`. In [4], dualpipev overlaps forwards
    with backwards, and ranks idle for (p-1)·(F+2I-W); here a forward's result is sent before the backward starts.

    [1] Huang et al. 2019, arXiv:1811.06965. [2] Narayanan et al. 2021, arXiv:2104.04473. [3] Qi et al. 2023,
    arXiv:2401.10241 (ZB-H1 with v stages per rank; ZB-V, without the time until a rank's first input). [4] DeepSeek-AI
    2024, arXiv:2412.19437, and its DualPipe repository.

    All orders but gpipe and 1f1b are torch's. Each adds a stage's gradients in the order of microbatches.

    Args:
        name: Name of the schedule, one of `SCHEDULES`.
        ranks: Size of the axis `pp`, p.
        microbatches: Number of microbatches, m: at least 2p for dualpipev, a multiple of max(1, m // p) for
            interleaved ones.
        stages_per_rank: Number of stages per rank, v. Default: the least of the schedule.
        gather: When to gather sharded parameters: once per "step", and keep them, or again for each F, B and I of a
            "microbatch".
        scatter: When to reduce gradients: once per "step", or each "microbatch" to `layout.grads`. Default: `gather`.
        ahead: Number of computes before its use at which a receive or gather is posted, to overlap. A receive never
            passes an earlier message of its two ranks. With `gather="microbatch"` each keeps one more unit alive.

    Returns:
        The schedule.

    Raises:
        ScheduleError: The schedule doesn't exist, or can't have these numbers; all of them are listed.

    Example:
        >>> fs.pipeline.plan_schedule("1f1b", ranks=2, microbatches=4)
        Schedule(1f1b: 2 ranks, 2 stages, 4 microbatches, 36 actions)
    """
    plan = _PLANS.get(name)
    if plan is None:
        mend = f"Use one of {', '.join(SCHEDULES)}.{did_you_mean(str(name), SCHEDULES, cutoff=0.4)}"
        raise ScheduleError(message(f"knows no schedule {name!r}.", mend=mend))
    local = plan.least if stages_per_rank is None else stages_per_rank
    rows = _wrong_numbers(ranks=ranks, microbatches=microbatches, stages_per_rank=local)
    rows += _wrong_options(gather, scatter, ahead)
    mend = "Pass integers from 1, and ahead from 0." if rows else ""
    rows = rows or _misfits(name, plan, ranks, local, microbatches)
    if rows:
        raise ScheduleError(message(f"cannot plan {name} with these numbers.", rows, mend))
    return _plan(name, ranks, microbatches, local, gather, scatter or gather, ahead)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _wrong_numbers(**numbers: int) -> list[str]:
    return [f"{what} is {value!r}, not an integer from 1" for what, value in numbers.items() if not _is_count(value, 1)]


def _wrong_options(gather: str, scatter: str | None, ahead: int) -> list[str]:
    options = {"gather": gather} if scatter is None else {"gather": gather, "scatter": scatter}
    rows = [
        f"{what} is {frequency!r}, not 'step' or 'microbatch'"
        for what, frequency in options.items()
        if frequency not in get_args(Frequency)
    ]
    return rows if _is_count(ahead, 0) else [*rows, f"ahead is {ahead!r}, not an integer from 0"]


def _misfits(name: str, plan: _Plan, ranks: int, local: int, microbatches: int) -> list[str]:
    """Return objections to the arguments of a kind of schedule."""
    rows: list[str] = []
    if local < plan.least or (plan.most is not None and local > plan.most):
        wanted = f"at least {plan.least}" if plan.most is None else f"{plan.least}"
        rows.append(f"stages_per_rank is {local}, but {name} has {wanted}")
    if name == "dualpipev" and microbatches < 2 * ranks:
        rows.append(f"microbatches is {microbatches}, but {name} on {ranks} ranks needs at least {2 * ranks}")
    if name.startswith("interleaved") and not _in_rounds(ranks, microbatches):
        rounds = microbatches // ranks
        below = next(m for m in range(microbatches, 0, -1) if _in_rounds(ranks, m))
        above = next(m for m in range(microbatches, 2 * microbatches + ranks) if _in_rounds(ranks, m))
        rows.append(
            f"microbatches is {microbatches}, but {name} on {ranks} ranks runs {rounds} equal rounds: "
            f"use {below} or {above}"
        )
    return rows


def _in_rounds(ranks: int, microbatches: int) -> bool:
    return microbatches % max(1, microbatches // ranks) == 0


@functools.lru_cache(maxsize=64)
def _plan(
    name: str, ranks: int, microbatches: int, local: int, gather: Frequency, scatter: Frequency, ahead: int
) -> Schedule:
    plan = _PLANS[name]
    owner = (*range(ranks), *reversed(range(ranks))) if plan.is_v else tuple(range(ranks)) * local
    order = plan.order(ranks, local, microbatches)
    computes = tuple(tuple(Action(cast(Kind, kind), stage, m) for kind, stage, m in row) for row in order)
    table = lower(owner, computes, gather=gather, scatter=scatter, ahead=ahead)
    return check_schedule(Schedule(name, ranks, ranks * local, microbatches, owner, table))


@functools.lru_cache(maxsize=64)
def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule in their order; each stage is gathered once."""
    computes = tuple(tuple(a for a in row if a.kind == "F") for row in schedule.table)
    table = lower(schedule.owner, computes, gather="step", scatter="step", ahead=1)
    return replace(schedule, name=f"{schedule.name}, forward only", table=table)


# ------------------------------------------------------------------------------------------------------ tables of users
@public
def make_schedule(
    computes: Sequence[Sequence[Action | str]],
    *,
    name: str = "custom",
    gather: Frequency = "step",
    scatter: Frequency | None = None,
    ahead: int = 1,
) -> Schedule:
    """Make a schedule from a custom order of computes; messages, gathers and scatters are inserted.

    Args:
        computes: Actions F, B, I and W of each rank in order, or their texts: `[["0F0", "0B0"]]`. A stage is on the
            rank where it appears.
        name: Name of the schedule.
        gather: When to gather parameters, as in `plan_schedule`.
        scatter: When to reduce gradients.
        ahead: How early to post receives and gathers.

    Returns:
        The schedule.

    Raises:
        ScheduleError: Computes are missing, in an order in which ranks wait forever, or a stage is on several ranks.

    Example:
        >>> fs.pipeline.make_schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
        Schedule(custom: 2 ranks, 2 stages, 2 microbatches, 20 actions)
    """
    table = tuple(tuple(Action.parse(a) if isinstance(a, str) else a for a in row) for row in computes)
    places = {action.stage: rank for rank, row in reversed(list(enumerate(table))) for action in row}
    owner = tuple(places.get(stage, -1) for stage in range(max(places, default=-1) + 1))
    microbatches = 1 + max((a.microbatch for row in table for a in row if a.microbatch is not None), default=-1)
    rows = _wrong_options(gather, scatter, ahead) or validation.compute_faults(owner, microbatches, table)
    if rows:
        mend = "Pass F and B, or F, I and W, of every stage and microbatch once, each stage on one rank."
        raise ScheduleError(message("cannot use these computes.", rows, mend))
    full = lower(owner, table, gather=gather, scatter=scatter or gather, ahead=ahead)
    return check_schedule(Schedule(name, len(table), len(owner), microbatches, owner, full))


@public
def check_schedule(schedule: Schedule) -> Schedule:
    """Check that a schedule can run, and computes the full gradient.

    It must be complete (F and B, or F, I and W, of every stage and microbatch once) and ordered: every action after its
    prerequisites, messages in one order on both sides, parameters gathered before use, gradients scattered after the
    last one. And it must end, with the messages of a pair of ranks in order, each when both ranks have posted it.

    Args:
        schedule: Schedule to check.

    Returns:
        The schedule.

    Raises:
        ScheduleError: The schedule is wrong; all faults are listed, those between ranks if each rank alone is right.

    Example:
        >>> schedule = fs.pipeline.check_schedule(fs.pipeline.plan_schedule("1f1b", ranks=2, microbatches=4))
        >>> schedule
        Schedule(1f1b: 2 ranks, 2 stages, 4 microbatches, 36 actions)
    """
    rows = _wrong_numbers(ranks=schedule.ranks, stages=schedule.stages, microbatches=schedule.microbatches)
    if schedule.ranks != len(schedule.table):
        rows.append(f"ranks is {schedule.ranks}, but the table has {len(schedule.table)} rows")
    if schedule.stages != len(schedule.owner):
        rows.append(f"stages is {schedule.stages}, but owner has {len(schedule.owner)}")
    rows = rows or validation.faults(schedule.owner, schedule.microbatches, schedule.table)
    if rows:
        mend = "Pass computes to fs.pipeline.make_schedule, which inserts messages, gathers and scatters."
        raise ScheduleError(message(f"refuses {schedule.name}.", rows, mend))
    return schedule


# --------------------------------------------------------------------------------------------------------------- layers
@public
def layers_of(schedule: Schedule, layers: int, *, counts: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """Assign layers to stages: contiguous, in order.

    Args:
        schedule: Schedule with the stages.
        layers: Number of layers of the full model.
        counts: Number of layers of each stage, which may be 0. Default: as even as possible, with leftover layers on
            the middle stages, as the first stage has the embedding and the last one the head.

    Returns:
        The layers of each stage.

    Raises:
        ScheduleError: There are more stages than layers, or `counts` doesn't match.

    Example:
        >>> fs.pipeline.layers_of(fs.pipeline.plan_schedule("1f1b", ranks=2, microbatches=2), layers=3)
        ((0, 1), (2,))
    """
    stages = schedule.stages
    if counts is None:
        if not _is_count(layers, stages):
            mend = f"Use at most {layers} stages, or pass counts= with 0 for the stages without layers."
            rule = f"cannot put {layers} layers on the {stages} stages of {schedule.name}."
            raise ScheduleError(message(rule, mend=mend))
        least, left = divmod(layers, stages)
        first = (stages - left) // 2
        counts = [least + (first <= stage < first + left) for stage in range(stages)]
    if len(counts) != stages or sum(counts) != layers or not all(_is_count(n, 0) for n in counts):
        rule = f"cannot put {layers} layers on the {stages} stages of {schedule.name} as {list(counts)}."
        raise ScheduleError(message(rule, mend=f"Pass {stages} counts that sum to {layers}."))
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return tuple(tuple(range(end - n, end)) for n, end in zip(counts, ends, strict=True))


def stages_for(schedule: Schedule, layers: int, *, counts: Sequence[int] | None = None) -> list[list[int]]:
    """Assign layers to the coordinates of `pp`, for `plan_layout(stages=)`.

    Args:
        schedule: Schedule with the stages.
        layers: Number of layers of the full model.
        counts: Number of layers of each stage, as in `layers_of`.

    Returns:
        The layers of each coordinate, in order of its stages.

    Raises:
        ScheduleError: There are more stages than layers, or `counts` doesn't match.

    Example:
        >>> fs.pipeline.stages_for(fs.pipeline.plan_schedule("1f1b", ranks=2, microbatches=2), layers=3)
        [[0, 1], [2]]
    """
    by_stage = layers_of(schedule, layers, counts=counts)
    return [[i for stage in schedule.stages_on(rank) for i in by_stage[stage]] for rank in range(schedule.ranks)]
