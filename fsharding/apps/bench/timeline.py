"""When streams would do what a log says that they were given, on a device of given rates: a timeline of a step.

In: rows of a log, such as that of `recording_streams`, and rates. Out: spans, one for each operation, and which share
of communication is hidden.

A stream does one operation after the other, and each begins when the events that its stream waits for have happened.
An operation takes as long as its floating-point operations or its bytes take, whichever is more, and a collective its
latency and its bytes. Collectives share one link, so that two of them at once take as long as one after the other. The
host is ahead of the device at all times, and kernels reach the given rates, which those of small tensors do not.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fsharding.pipeline.plots import require_matplotlib
from fsharding.testing.stream_log import COLLECTIVES, COMPUTE, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Rates", "Span", "Timeline", "draw_timeline", "timeline_figure", "timeline_of", "write_trace"]


@dataclass(frozen=True)
class Rates:
    """What a device does in a second.

    Attributes:
        flops: floating-point operations of matrix products.
        memory: bytes of its memory that are read and written.
        link: bytes that a rank sends.
        latency: seconds that a collective takes besides its bytes.
    """

    flops: float
    memory: float
    link: float
    latency: float

    def seconds(self, row: Row) -> float:
        """How long an operation takes."""
        if row.stream.endswith(COLLECTIVES):
            return self.latency + row.nbytes / self.link
        return max(row.flops / self.flops, row.nbytes / self.memory)


class Span(NamedTuple):
    """An operation in time.

    Attributes:
        stream: which does it.
        text: the operator.
        unit: which unit of the step it is for, by the order in which units are gathered.
        begin: seconds after the begin of the step.
        end: the same.
    """

    stream: str
    text: str
    unit: int
    begin: float
    end: float


class Timeline(NamedTuple):
    """A step in time.

    Attributes:
        spans: in the order in which the host issues them.
        seconds: of the step.
        compute: seconds in which the compute stream computes.
        communication: seconds of all collectives.
    """

    spans: list[Span]
    seconds: float
    compute: float
    communication: float

    @property
    def hidden(self) -> float:
        """The share of communication during which the compute stream computes; 1 where nothing is sent."""
        exposed = self.seconds - self.compute
        return 1 - min(exposed / self.communication, 1.0) if self.communication else 1.0


def timeline_of(rows: Sequence[Row], rates: Rates) -> Timeline:
    """Place rows in time, in the order of events.

    Example:
        >>> from fsharding.apps.bench.timeline import Rates, timeline_of
        >>> from fsharding.testing.stream_log import Row
        >>> rates = Rates(flops=10.0, memory=1e9, link=2.0, latency=0.0)
        >>> sent = Row("gather's collectives", "run", "all-gather", nbytes=4)
        >>> line = timeline_of([sent, Row("compute", "run", "mm", flops=30)], rates)
        >>> line.seconds, line.communication, line.hidden
        (3.0, 2.0, 1.0)
    """
    units = _units(rows)
    queues: dict[str, deque[int]] = {}
    for number, row in enumerate(rows):
        if row.kind in ("run", "record", "wait"):
            queues.setdefault(row.stream, deque()).append(number)
    clock = dict.fromkeys(queues, 0.0)
    events: dict[int, float] = {}
    link = 0.0
    spans: dict[int, Span] = {}
    while any(queues.values()):
        for stream, queue in queues.items():  # what takes no time
            while queue and rows[queue[0]].kind != "run":
                row = rows[queue[0]]
                if row.kind == "wait" and row.event not in events:
                    break
                if row.kind == "record":
                    events[row.event] = clock[stream]
                else:
                    clock[stream] = max(clock[stream], events[row.event])
                queue.popleft()
        starts = {
            stream: max(clock[stream], link if stream.endswith(COLLECTIVES) else 0.0)
            for stream, queue in queues.items()
            if queue and rows[queue[0]].kind == "run"
        }
        if not starts:
            continue
        stream = min(starts, key=starts.__getitem__)
        number = queues[stream].popleft()
        end = starts[stream] + rates.seconds(rows[number])
        spans[number] = Span(stream, rows[number].text, units[number], starts[stream], end)
        clock[stream] = end
        if stream.endswith(COLLECTIVES):
            link = end
    placed = [spans[number] for number in sorted(spans)]
    of_links = sum(x.end - x.begin for x in placed if x.stream.endswith(COLLECTIVES))
    of_compute = sum(x.end - x.begin for x in placed if x.stream == COMPUTE)
    return Timeline(placed, max(clock.values(), default=0.0), of_compute, of_links)


def _units(rows: Sequence[Row]) -> list[int]:
    """The unit of each row: computed is the one that was gathered last, and gathered the one that is ready next."""
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


# ------------------------------------------------------------------------------------------------------------ pictures
def write_trace(line: Timeline, path: Path) -> None:
    """Write a timeline as a trace for Perfetto or chrome://tracing, with a row for each stream.

    Args:
        path: of a JSON file.
    """
    streams = [*dict.fromkeys(span.stream for span in line.spans)]
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": stream}}
        for number, stream in enumerate(streams)
    ]
    rows += [
        {
            "ph": "X", "name": span.text, "cat": f"unit {span.unit}", "pid": 0, "tid": streams.index(span.stream),
            "ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6, "args": {"unit": span.unit},
        }
        for span in line.spans
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": rows}), encoding="utf-8")


def draw_timeline(line: Timeline, path: Path, title: str) -> None:
    """Draw a timeline.

    Args:
        path: of a PNG or SVG.
        title: above it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib(path.name, instead=", or leave --plot out")
    path.parent.mkdir(parents=True, exist_ok=True)
    timeline_figure(line, title).savefig(path)


def timeline_figure(line: Timeline, title: str) -> Figure:
    """A timeline as a figure: streams are rows, units are colors. An operation of no length is not drawn."""
    from matplotlib import colormaps  # lazy: an extra, and slow to load
    from matplotlib.figure import Figure  # lazy: the same

    streams = sorted({span.stream for span in line.spans}, key=lambda name: (name != COMPUTE, name))
    colors = colormaps["tab10"].colors  # pyright: ignore[reportAttributeAccessIssue]
    figure = Figure(figsize=(10, 0.45 * len(streams) + 1.2), layout="constrained")
    axes = figure.subplots()
    for row, stream in enumerate(streams):
        bars = _bars([span for span in line.spans if span.stream == stream], line.seconds / 2000)
        spans = [(begin * 1e3, (end - begin) * 1e3) for _, begin, end in bars]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=[colors[unit % len(colors)] for unit, _, _ in bars])
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title)
    return figure


def _bars(spans: Sequence[Span], gap: float) -> list[tuple[int, float, float]]:
    """Unit, begin and end of what one stream does for a unit without a gap: a picture needs no more."""
    result: list[tuple[int, float, float]] = []
    for span in spans:
        if result and result[-1][0] == span.unit and span.begin - result[-1][2] < gap:
            result[-1] = span.unit, result[-1][1], span.end
        else:
            result.append((span.unit, span.begin, span.end))
    return [bar for bar in result if bar[2] > bar[1]]
