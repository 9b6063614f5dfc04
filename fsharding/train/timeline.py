"""Simulate the operations of stream logs on devices of given rates: a timeline of a step, and how much is hidden."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, NamedTuple, TypeAlias

from fsharding.comm.stream_log import COMPUTE, Row, communicates, messages

__all__ = ["Rates", "Span", "Timeline", "timeline_of"]


@dataclass(frozen=True)
class Rates:
    """Rates of a device, per second."""

    flops: float  # floating-point operations of matrix products
    memory: float  # bytes of device memory read and written
    link: float  # bytes that a rank sends
    latency: float  # seconds of a collective without its bytes
    host: float = math.inf  # bytes copied to or from the host

    def seconds(self, row: Row, link: Link) -> float:
        """Return how long an operation takes on its link."""
        if communicates(row.stream):
            return self.latency + row.nbytes / self.link
        if link in _COPIES:
            return row.nbytes / 2 / self.host  # a copy reads its bytes and writes them
        return max(row.flops / self.flops, row.nbytes / self.memory)


Link: TypeAlias = Literal["", "sent", "from host", "to host"]
"""The link that an operation uses."""

_COPIES = ("from host", "to host")


class Span(NamedTuple):
    """An operation in time."""

    rank: int  # by the order of the logs
    stream: str
    text: str
    unit: int  # by the order in which units are gathered
    begin: float  # seconds after the step's
    end: float
    link: Link = ""


class Timeline(NamedTuple):
    """A step in time; of several ranks, means."""

    spans: list[Span]  # in the order in which the host of each rank issues them
    seconds: float
    compute: float  # seconds in which the compute stream computes
    communication: float  # seconds of all collectives and messages
    hidden: float  # share of communication during which the compute stream computes; 1 if nothing is sent
    copies: float = 0.0  # seconds of all copies to and from the host
    copies_hidden: float = 1.0  # share during which the compute stream computes; 1 if nothing is copied


def timeline_of(logs: Sequence[Sequence[Row]], rates: Rates) -> Timeline:
    """Place the rows of each rank in time; several logs are those of one group, in its order."""
    clock = _Clock(logs, rates)
    while clock.advance():
        pass
    spans = clock.spans()
    of_compute = sum(x.end - x.begin for x in spans if _computes(x))
    count = max(len(logs), 1)
    seconds = max((x.end for x in spans), default=0.0)
    sent, hidden = _hidden(spans, lambda x: communicates(x.stream))
    copied, copies_hidden = _hidden(spans, _is_copy)
    return Timeline(spans, seconds, of_compute / count, sent / count, hidden, copied / count, copies_hidden)


def _is_copy(span: Span) -> bool:
    return span.link in _COPIES


def _computes(span: Span) -> bool:
    return span.stream == COMPUTE and not _is_copy(span)


def _hidden(spans: Sequence[Span], chosen: Callable[[Span], bool]) -> tuple[float, float]:
    """Return the seconds of some spans, and their share during which the compute stream of their rank computes."""
    busy: dict[int, list[tuple[float, float]]] = {}
    for x in spans:
        if _computes(x) and x.end > x.begin:
            busy.setdefault(x.rank, []).append((x.begin, x.end))
    total = hidden = 0.0
    for span in filter(chosen, spans):
        total += span.end - span.begin
        of_rank = busy.get(span.rank, [])
        first = max(bisect_right(of_rank, span.begin, key=itemgetter(0)) - 1, 0)
        for begin, end in of_rank[first : bisect_left(of_rank, span.end, key=itemgetter(0))]:
            hidden += max(0.0, min(end, span.end) - max(begin, span.begin))
    return total, hidden / total if total else 1.0


def _sends(stream: str) -> bool:
    """Return whether the stream uses this rank's link; the sender's link carries a message, not the receiver's."""
    return communicates(stream) and not stream.startswith("messages from ")


_Queue: TypeAlias = tuple[int, str]


class _Clock:
    """The streams of all ranks, each at its place in its log."""

    # A stream runs one operation after the other, and each begins when the events that its stream waits for have fired.
    # An operation takes as long as its floating-point operations or its bytes take, whichever is more, and a collective
    # its latency and its bytes. All that a rank sends shares one link, and so do copies to the host, and copies from
    # it. A message begins when its sender and its receiver have reached it. Ranks without a log are assumed to be where
    # this one is. The host is always ahead of the device, and kernels reach the given rates; small tensors do not.

    def __init__(self, logs: Sequence[Sequence[Row]], rates: Rates) -> None:
        self._logs, self._rates = logs, rates
        self._queues: dict[_Queue, deque[int]] = {}
        for rank, rows in enumerate(logs):
            for number, row in enumerate(rows):
                if row.kind in ("run", "record", "wait"):
                    self._queues.setdefault((rank, row.stream), deque()).append(number)
        self._copies = [_copies(rows) for rows in logs]
        self._units = [_units(rows) for rows in logs]
        self._now = dict.fromkeys(self._queues, 0.0)
        self._links: dict[tuple[int, Link], float] = {}
        self._events: dict[tuple[int, int], float] = {}
        self._placed: dict[tuple[int, int], Span] = {}  # by rank, and number of the row

    def advance(self) -> bool:
        """Place the operation that begins first; return False if none is left."""
        while sum(self._follow(queue) for queue in self._queues):
            pass
        begins = {queue: begin for queue in self._queues if (begin := self._begin(queue)) is not None}
        if not begins:
            if waiting := [f"rank {rank}, {stream}" for (rank, stream), rows in self._queues.items() if rows]:
                raise ValueError(f"streams wait for each other: {'; '.join(waiting)}")
            return False
        first = min(begins, key=begins.__getitem__)
        begin = begins[first]
        end = begin + self._rates.seconds(self._next(first), self._link(first))
        for queue in {first, self._peer(first) or first}:
            self._place(queue, begin, end)
        return True

    def _next(self, queue: _Queue) -> Row:
        return self._logs[queue[0]][self._queues[queue][0]]

    def _link(self, queue: _Queue) -> Link:
        """Return the link that the next operation uses."""
        rank, stream = queue
        return "sent" if _sends(stream) else self._copies[rank].get(self._queues[queue][0], "")

    def _follow(self, queue: _Queue) -> int:
        """Pass what takes no time; return how many rows."""
        rows = self._queues[queue]
        before = len(rows)
        while rows and (row := self._next(queue)).kind != "run":
            event = queue[0], row.event
            if row.kind == "record":
                self._events[event] = self._now[queue]
            elif event in self._events:
                self._now[queue] = max(self._now[queue], self._events[event])
            else:
                break
            rows.popleft()
        return before - len(rows)

    def _peer(self, queue: _Queue) -> _Queue | None:
        """Return the other end of the next message, if its rank has a log."""
        rank, row = queue[0], self._next(queue)
        if row.peer < 0 or len(self._logs) == 1:
            return None
        return row.peer, messages("from" if _sends(queue[1]) else "to", rank)

    def _begin(self, queue: _Queue) -> float | None:
        """Return when the next operation could begin; None if there is none, or its peer has not reached it."""
        if not self._queues[queue] or self._next(queue).kind != "run":
            return None
        ends = [queue]
        if (peer := self._peer(queue)) is not None:
            if not self._queues.get(peer) or self._next(peer).kind != "run":
                return None
            ends.append(peer)
        links = [self._links.get((end[0], link), 0.0) for end in ends if (link := self._link(end))]
        return max(*(self._now[end] for end in ends), *links, 0.0)

    def _place(self, queue: _Queue, begin: float, end: float) -> None:
        rank, link, row = queue[0], self._link(queue), self._next(queue)
        number = self._queues[queue].popleft()
        copied = self._copies[rank].get(number, "")
        self._placed[rank, number] = Span(rank, row.stream, row.text, self._units[rank][number], begin, end, copied)
        self._now[queue] = end
        if link:
            self._links[rank, link] = end

    def spans(self) -> list[Span]:
        """Return all operations, in the order of the logs."""
        return [self._placed[place] for place in sorted(self._placed)]


def _copies(rows: Sequence[Row]) -> dict[int, Link]:
    """Find operations that copy memory of the host to a device, or the reverse."""
    on_host = {row.writes[0]: row.text == "cpu" for row in rows if row.kind == "take"}
    if all(on_host.values()):
        return {}
    result: dict[int, Link] = {}
    for number, row in enumerate(rows):
        if row.kind == "run" and row.reads and row.writes:
            read, written = ({on_host.get(x, False) for x in numbers} for numbers in (row.reads, row.writes))
            if read != written and len(read) == len(written) == 1:
                result[number] = "from host" if read == {True} else "to host"
    return result


def _units(rows: Sequence[Row]) -> list[int]:
    """Return the unit of each row: computed is the one gathered last, gathered the one that is ready next."""
    recorded = {row.event: row.stream for row in rows if row.kind == "record"}
    waits = [row.kind == "wait" and row.stream == COMPUTE and recorded.get(row.event) == "gather" for row in rows]
    ready = {row.event for row, is_ready in zip(rows, waits, strict=True) if is_ready}
    computed = gathered = 0
    result = list[int]()
    for row, is_ready in zip(rows, waits, strict=True):
        computed += is_ready
        result.append(gathered if row.stream.startswith("gather") else max(computed - 1, 0))
        gathered += row.kind == "record" and row.event in ready
    return result
