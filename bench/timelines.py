"""Timelines of steps as pictures, and as traces for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsharding.comm.stream_log import COMPUTE
from fsharding.pipeline.plots import require_matplotlib
from fsharding.train.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_timeline", "timeline_figure", "write_trace"]


def write_trace(line: Timeline, path: Path) -> None:
    """Write a timeline as a trace for Perfetto or chrome://tracing, a process for each rank, a row for each stream."""
    streams = [*dict.fromkeys((span.rank, span.stream) for span in line.spans)]
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": stream}}
        for number, (rank, stream) in enumerate(streams)
    ]
    rows += [
        {
            "ph": "X", "name": span.text, "cat": f"unit {span.unit}", "pid": span.rank,
            "tid": streams.index((span.rank, span.stream)),
            "ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6, "args": {"unit": span.unit},
        }
        for span in line.spans
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": rows}), encoding="utf-8")


def draw_timeline(line: Timeline, path: Path, title: str) -> None:
    """Draw a timeline as a PNG or SVG."""
    require_matplotlib(path.name, instead=", or leave --plot out")
    path.parent.mkdir(parents=True, exist_ok=True)
    timeline_figure(line, title).savefig(path)


def timeline_figure(line: Timeline, title: str) -> Figure:
    """Make a figure: streams are rows, units are colors. Operations of no length are not drawn."""
    from matplotlib import colormaps  # lazy: an extra, and slow to load
    from matplotlib.figure import Figure  # lazy: the same

    order = {(span.rank, span.stream != COMPUTE, span.stream) for span in line.spans}
    streams = [(rank, stream) for rank, _, stream in sorted(order)]
    several = len({rank for rank, _ in streams}) > 1
    colors = colormaps["tab10"].colors  # pyright: ignore[reportAttributeAccessIssue]
    figure = Figure(figsize=(10, 0.45 * len(streams) + 1.2), layout="constrained")
    axes = figure.subplots()
    for row, stream in enumerate(streams):
        bars = _bars([span for span in line.spans if (span.rank, span.stream) == stream], line.seconds / 2000)
        spans = [(begin * 1e3, (end - begin) * 1e3) for _, begin, end in bars]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=[colors[unit % len(colors)] for unit, _, _ in bars])
    axes.set_yticks(range(len(streams)), [f"rank {rank}: {name}" if several else name for rank, name in streams])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title)
    return figure


def _bars(spans: Sequence[Span], gap: float) -> list[tuple[int, float, float]]:
    """Merge the spans of one stream and unit that have no gap between them; return unit, begin and end."""
    result: list[tuple[int, float, float]] = []
    for span in spans:
        if result and result[-1][0] == span.unit and span.begin - result[-1][2] < gap:
            result[-1] = span.unit, result[-1][1], span.end
        else:
            result.append((span.unit, span.begin, span.end))
    return [bar for bar in result if bar[2] > bar[1]]
