"""Timelines: begin and end of each action of a table, from compute durations and message latency."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fsharding.base.errors import ScheduleError, message
from fsharding.pipeline.actions import COMPUTES, Action, Owner, Table

__all__ = ["Durations", "Span", "Timeline", "in_flight", "simulate"]


class Durations(NamedTuple):
    """Durations of the actions of one stage and one microbatch, in any one unit."""

    forward: float = 1.0  # F
    backward_input: float = 1.0  # I; B takes this and `backward_weight`
    backward_weight: float = 1.0  # W
    send: float = 0.0  # from the end of a compute action to the arrival of its message; messages don't slow each other

    def of(self, action: Action) -> float:
        """Return how long an action keeps its rank busy; 0 if it overlaps with computes."""
        match action.kind:
            case "F":
                return self.forward
            case "B":
                return self.backward_input + self.backward_weight
            case "I":
                return self.backward_input
            case "W":
                return self.backward_weight
            case _:
                return 0.0


class Span(NamedTuple):
    """One action in time; a message ends when it arrives."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A table in time."""

    spans: tuple[tuple[Span, ...], ...]  # actions of each rank, in order
    durations: Durations
    total: float  # time from the first begin to the last end of a compute action
    busy: tuple[float, ...]  # compute time of each rank
    in_flight: tuple[int, ...]  # see `in_flight`

    @property
    def bubble_share(self) -> float:
        """Idle time of all ranks, as a share of ranks x total."""
        everything = self.total * len(self.busy)
        return (everything - sum(self.busy)) / everything if everything else 0.0

    def idle_share(self, rank: int) -> float:
        """Return the idle time of one rank, as a share of the total."""
        return 1 - self.busy[rank] / self.total if self.total else 0.0

    def show(self) -> str:
        """Draw one row per rank with its idle share and activations in flight, one column per slot of time.

        A slot is as long as the shortest action; `.` is idle, `--` continues the previous action. `F0` is microbatch 0;
        if ranks have several stages, `2F0` is microbatch 0 of stage 2.
        """
        rows = [[span for span in row if span.action.kind in COMPUTES and span.end > span.begin] for row in self.spans]
        slot = min((span.end - span.begin for row in rows for span in row), default=1.0)
        several = any(len({span.action.stage for span in row}) > 1 for row in rows)
        cells = [list(_cells(row, slot, round(self.total / slot), several)) for row in rows]
        width = max((len(cell) for row in cells for cell in row), default=1)
        label = len(f"rank {len(rows) - 1}")
        return "\n".join(
            f"{f'rank {rank}':<{label}} | {' '.join(f'{cell:<{width}}' for cell in row)} | "
            f"idle {self.idle_share(rank):.1%}, {self.in_flight[rank]} in flight"
            for rank, row in enumerate(cells)
        )


def _cells(row: list[Span], slot: float, slots: int, several: bool) -> Iterator[str]:
    """Yield the cell of each slot of a rank: the action in the middle of the slot."""
    spans = iter(row)
    shown = None
    span = next(spans, None)
    for i in range(slots):
        middle = (i + 0.5) * slot
        while span is not None and span.end <= middle:
            span = next(spans, None)
        if span is None or span.begin > middle:
            yield "."
        elif span is shown:
            yield "--"
        else:
            shown = span
            yield str(span.action) if several else str(span.action)[len(str(span.action.stage)) :]


def in_flight(table: Table) -> tuple[int, ...]:
    """Return each rank's peak number of (stage, microbatch) pairs whose F is done and whose B or W is not."""
    most: list[int] = []
    for row in table:
        now = 0
        top = 0
        for action in row:
            now += (action.kind == "F") - (action.kind in ("B", "W"))
            top = max(top, now)
        most.append(top)
    return tuple(most)


def simulate(owner: Owner, table: Table, durations: Durations) -> Timeline:
    """Run a table on simulated ranks; if it has no messages, each result is sent as soon as it is computed."""
    run = _Run(owner, table, durations)
    at = [0] * len(table)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table):
            start = at[rank]
            while at[rank] < len(row) and run.step(rank, row[at[rank]]):
                at[rank] += 1
            moved |= at[rank] > start
    rows = [f"rank {rank} waits at {row[at[rank]]}" for rank, row in enumerate(table) if at[rank] < len(row)]
    if rows:
        mend = "Order F after F of the previous stage, B or I after B or I of the next stage, and W after I."
        raise ScheduleError(message("never ends: these ranks wait forever.", rows, mend))
    busy = tuple(sum(map(durations.of, row)) for row in table)
    spans = tuple(tuple(run.with_latency(span) for span in row) for row in run.spans)
    return Timeline(spans, durations, max(run.clocks, default=0.0), busy, in_flight(table))


class _Run:
    """The ranks of a simulation: a clock each, and the arrival time of each result."""

    def __init__(self, owner: Owner, table: Table, durations: Durations):
        self.owner = owner
        self.durations = durations
        self.by_itself = not any(action.kind.startswith("SEND") for row in table for action in row)
        self.clocks = [0.0] * len(table)
        self.spans: list[list[Span]] = [[] for _ in table]
        self.done: set[Action] = set()
        self.arrived: dict[tuple[str, int, int | None], float] = {}

    def step(self, rank: int, action: Action) -> bool:
        """Run an action; return False if it must wait for another rank first."""
        begin = self.clocks[rank]
        kind, stage, microbatch = action
        if kind in COMPUTES:
            ready = self._arrival(action)
            if ready is None:
                return False
            begin = max(begin, ready)
            self.clocks[rank] = begin + self.durations.of(action)
            self.done.add(action)
            self._hand_over(action)
        elif kind.startswith("SEND"):
            to = stage + 1 if kind == "SEND_F" else stage - 1
            self.arrived[kind[-1], to, microbatch] = begin + self.durations.send
        self.spans[rank].append(Span(action, begin, self.clocks[rank]))
        return True

    def _arrival(self, action: Action) -> float | None:
        """Return the arrival time of a compute action's inputs; None if they haven't been sent."""
        kind, stage, microbatch = action
        if kind == "F":
            return 0.0 if stage == 0 else self.arrived.get(("F", stage, microbatch))
        if Action("I" if kind == "W" else "F", stage, microbatch) not in self.done:
            return None
        if kind == "W" or stage == len(self.owner) - 1:
            return 0.0
        return self.arrived.get(("B", stage, microbatch))

    def _hand_over(self, action: Action) -> None:
        """Pass a result to the neighbor stage on the same rank; if the table has no messages, on any rank."""
        step = {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
        to = action.stage + step
        if step == 0 or not 0 <= to < len(self.owner):
            return
        here = self.owner[action.stage]
        local = self.owner[to] == here
        if local or self.by_itself:
            name = "F" if step > 0 else "B"
            self.arrived[name, to, action.microbatch] = self.clocks[here] + (0.0 if local else self.durations.send)

    def with_latency(self, span: Span) -> Span:
        """Return the span of a message with its arrival as its end."""
        kind, stage, microbatch = span.action
        if kind.startswith("SEND"):
            return span._replace(end=span.begin + self.durations.send)
        if kind.startswith("RECV"):
            return span._replace(end=max(span.begin, self.arrived[kind[-1], stage, microbatch]))
        return span
