"""Timelines: begin and end of each action of a table, from compute durations and message latency."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fsharding.base.errors import ScheduleError, message
from fsharding.pipeline.actions import COMPUTES, MESSAGES, Action, Owner, Table, blocked, needs, partner, send_of

__all__ = ["Durations", "Span", "Timeline", "in_flight", "simulate"]


class Durations(NamedTuple):
    """Durations of the actions of one stage and one microbatch, in any one unit."""

    forward: float = 1.0  # F
    backward_input: float = 1.0  # I; B takes this and `backward_weight`
    backward_weight: float = 1.0  # W
    send: float = 0.0  # from the end of a compute action to the arrival of its message; messages don't slow each other

    def of(self, action: Action) -> float:
        """Return how long an action keeps its rank busy; 0 if it overlaps with computes."""
        backward = self.backward_input + self.backward_weight
        busy = {"F": self.forward, "B": backward, "I": self.backward_input, "W": self.backward_weight}
        return busy.get(action.kind, 0.0)


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
    has_messages = any(action.kind in MESSAGES for row in table for action in row)
    clocks = [0.0] * len(table)
    spans: list[list[Span]] = [[] for _ in table]
    there: dict[Action, float] = {}  # by compute or receive: the time from which its rank has the result

    def step(rank: int, action: Action) -> bool:
        begin = clocks[rank]
        if action.kind in COMPUTES:
            ready = [
                min((there[x] for x in choices if x in there), default=math.inf) for choices in needs(action, owner)
            ]
            begin = max([begin, *ready])
            if begin == math.inf:
                return False
            clocks[rank] = there[action] = begin + durations.of(action)
        send = action if action.kind.startswith("SEND") else None if has_messages else send_of(action, owner)
        if send is not None:
            there[partner(send)] = clocks[rank] + durations.send
        spans[rank].append(Span(action, begin, clocks[rank]))
        return True

    def with_latency(span: Span) -> Span:
        """End a message when it arrives, which only the end of the simulation tells."""
        if span.action.kind not in MESSAGES:
            return span
        received = span.action if span.action.kind.startswith("RECV") else partner(span.action)
        return span._replace(end=max(span.begin, there[received]))

    if rows := [f"rank {rank} waits at {action}" for rank, action in blocked(table, step)]:
        mend = "Order F after F of the previous stage, B or I after B or I of the next stage, and W after I."
        raise ScheduleError(message("never ends: these ranks wait forever.", rows, mend))
    busy = tuple(sum(map(durations.of, row)) for row in table)
    rows_of_spans = tuple(tuple(map(with_latency, row)) for row in spans)
    return Timeline(rows_of_spans, durations, max(clocks, default=0.0), busy, in_flight(table))
