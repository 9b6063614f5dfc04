"""Pictures of pipeline schedules, as a PNG or a reproducible SVG. matplotlib is an extra."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from fsharding.base.errors import ConfigError, message
from fsharding.base.local_paths import check_local
from fsharding.base.public import public
from fsharding.pipeline.actions import COMPUTES
from fsharding.pipeline.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_schedule", "has_matplotlib", "require_matplotlib", "save_figure"]

_MOST_LABELS = 800  # more are illegible, and take seconds to draw
_COLORS = {"F": "#6f9bd1", "B": "#7fb77e", "I": "#7fb77e", "W": "#e0a458"}


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib(picture: str, *, instead: str) -> None:
    """Check that matplotlib is installed; `instead`, the end of a sentence, is the alternative."""
    if not has_matplotlib():
        mend = f"pip install 'fsharding[plot]'{instead}."
        raise ConfigError(message(f"needs matplotlib to draw {picture}.", mend=mend))


@public
def draw_schedule(
    schedule: Schedule,
    path: str | Path,
    *,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    send: float = 0.0,
) -> None:
    """Draw the timeline of a pipeline schedule: a row per rank with its idle share, a bar for each F, B, I and W.

    Later stages of a rank are darker.

    Args:
        schedule: Schedule to draw.
        path: File to write: an SVG if the name ends with `.svg`, else a PNG.
        forward: Duration of F, as in `Schedule.simulate`.
        backward_input: Duration of I.
        backward_weight: Duration of W.
        send: Latency of a message.

    Raises:
        ConfigError: matplotlib isn't installed.
        ScheduleError: Some ranks would wait forever.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "schedule.png"
        >>> fs.pipeline.draw_schedule(fs.pipeline.plan_schedule("1f1b", ranks=2, microbatches=4), path)
        >>> path.exists()
        True
    """
    check_local(path)
    require_matplotlib("a schedule", instead=", or print(schedule.show())")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # lazy: an extra, and slow to import
    from matplotlib.figure import Figure  # lazy: as above

    times = schedule.simulate(forward, backward_input, backward_weight, send)
    figure = Figure(figsize=(min(40, max(8, 0.3 * times.total + 2)), 0.5 * schedule.ranks + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rows = [[span for span in row if span.action.kind in COMPUTES] for row in times.spans]
    for rank, row in enumerate(rows):
        stages = schedule.stages_on(rank)
        colors = [(_COLORS[a.kind], (1 + stages.index(a.stage)) / len(stages)) for a, _, _ in row]
        bars = [(begin, end - begin) for _, begin, end in row]
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=colors, edgecolors="white", linewidths=0.5)
        note = f" idle {times.idle_share(rank):.1%}, {times.in_flight[rank]} in flight"
        axes.text(times.total, rank, note, va="center", size=7)
        for action, begin, end in row if sum(map(len, rows)) <= _MOST_LABELS else ():
            label = f"{action.kind}{action.microbatch}"
            axes.text((begin + end) / 2, rank, label, ha="center", va="center", size=6)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, times.total * (1 + 2.2 / figure.get_figwidth()))
    axes.set_xlabel("time")
    axes.set_title(f"{schedule.name}, {schedule.microbatches} microbatches: {times.bubble_share:.1%} bubbles", size=9)
    save_figure(figure, Path(path))


def save_figure(figure: Figure, out: Path) -> None:
    """Write a picture to a temporary file and rename it."""
    import matplotlib  # lazy: an extra, and slow to import

    part = out.with_name(f".{out.name}.partial")
    try:
        if out.suffix == ".svg":
            # No date and a fixed salt for ids, so that equal pictures have equal bytes.
            with matplotlib.rc_context({"svg.hashsalt": "fsharding"}):
                figure.savefig(part, format="svg", metadata={"Date": None})
        else:
            figure.savefig(part, dpi=120, format="png")
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
