"""Whether the order of what streams were given is safe on any device, and what each wait is there for.

In: rows of a log, of `fsharding.comm.stream_log` or of the simulated device. Out: what may happen too early, in words.
`violations` replays the rows with a vector clock for each stream. Memory that was freed belongs to the stream on which it
was taken, and may be what that stream takes next, as torch's allocator for CUDA has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from fsharding.comm.stream_log import COMPUTE, Row

Clock = dict[str, int]


class _Memory:
    """What was done to a storage: by stream, the latest read and write; and what is due of those that had its memory."""

    def __init__(self, stream, due):
        self.stream, self.due = stream, due
        self.reads: Clock = {}
        self.writes: Clock = {}


def _join(a: Clock, b: Clock) -> None:
    for stream, tick in b.items():
        a[stream] = max(a.get(stream, 0), tick)


def _missing(before: Clock, now: Clock) -> list[str]:
    """The streams whose operation is not known to be done."""
    return [stream for stream, tick in before.items() if now.get(stream, 0) < tick]


def _advance(row: Row, clocks: dict[str, Clock], events: dict[int, Clock]) -> Clock:
    """The clock of a row's stream, after what the row is of."""
    now = clocks.setdefault(row.stream, {})
    if row.kind == "record":
        events[row.event] = dict(now)
    elif row.kind == "wait":
        _join(now, events.get(row.event, {}))  # one from before the log was over when the log began
    elif row.kind == "run":
        now[row.stream] = now.get(row.stream, 0) + 1
    return now


def violations(rows: Iterable[Row]) -> list[str]:
    """Operations that a device may do too early, in words: reads before writes, and writes before reads."""
    clocks: dict[str, Clock] = {}
    events: dict[int, Clock] = {}
    memory: dict[int, _Memory] = defaultdict(lambda: _Memory("", {}))
    free: dict[str, Clock] = {}
    found: list[str] = []
    for row in rows:
        now = _advance(row, clocks, events)
        if row.kind == "take":
            memory[row.writes[0]] = _Memory(row.stream, dict(free.get(row.stream, {})))
        elif row.kind == "free":
            gone = memory.pop(row.writes[0])
            for done in (gone.reads, gone.writes, gone.due):
                _join(free.setdefault(gone.stream, {}), done)
        elif row.kind == "run":
            for number in row.reads:
                late = _missing(memory[number].writes, now) + _missing(memory[number].due, now)
                found += [f"{row}: storage {number} may not have been written by {stream}" for stream in late]
                _join(memory[number].reads, {row.stream: now[row.stream]})
            for number in row.writes:
                used = memory[number]
                late = [s for done in (used.reads, used.writes, used.due) for s in _missing(done, now)]
                found += [f"{row}: storage {number} is still used by {stream}" for stream in late]
                _join(used.writes, {row.stream: now[row.stream]})
    return found


def unjoined(rows: Iterable[Row]) -> list[str]:
    """The streams that still have something to do when the one that computes has done all that it was given."""
    clocks: dict[str, Clock] = {}
    events: dict[int, Clock] = {}
    for row in rows:
        _advance(row, clocks, events)
    done = clocks[COMPUTE]
    return [stream for stream, now in clocks.items() if _missing({stream: now.get(stream, 0)}, done)]


def without(rows: Iterable[Row], *waits: tuple[str, str]) -> list[Row]:
    """The same rows without some waits: which stream, and for which events."""
    return [row for row in rows if row.kind != "wait" or (row.stream, row.text) not in waits]


def waits_of(rows: Iterable[Row]) -> set[tuple[str, str]]:
    """Which stream waits for which events of others."""
    return {(row.stream, row.text) for row in rows if row.kind == "wait" and not row.text.endswith(f" on {row.stream}")}
