"""Pictures of a run and of a pipeline schedule.

In: the `metrics.jsonl` that training writes, or a `Schedule`. Out: a PNG, written whole or not at all; a schedule
may also be an SVG, which has the same bytes each time, so that it can be kept under version control.
matplotlib is in the extra `plot`; without it there is a clear error, before training starts.
"""

from __future__ import annotations

import importlib.util
import io
import math
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fsharding.base.calls import named
from fsharding.base.errors import ConfigError, message, report
from fsharding.base.local_paths import check_local
from fsharding.base.untrusted import open_plain, parse_json
from fsharding.pipeline.actions import COMPUTES
from fsharding.pipeline.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_schedule", "metrics_rows", "plot_loss", "read_metrics", "require_matplotlib", "save_figure"]

_MOST_LABELS = 800  # more than this cannot be read, and take seconds to draw
_COLORS = {"F": "#6f9bd1", "B": "#7fb77e", "I": "#7fb77e", "W": "#e0a458"}


def has_matplotlib() -> bool:
    """Whether plots can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib(picture: str = "loss.png", *, instead: str = ", or pass --no-plot") -> None:
    """Checks that plots can be drawn.

    Args:
        instead: what to do without matplotlib, as the end of a sentence.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if not has_matplotlib():
        mend = f"pip install 'fsharding[plot]'{instead}."
        raise ConfigError(message(f"needs matplotlib to draw {picture}.", mend=mend))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; see `metrics_rows`."""
    return [*metrics_rows(path)]


def metrics_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file, with None for non-finite values; stop at a truncated or malformed line.

    Raises:
        ConfigError: it is no file that can be read.
    """
    try:
        if not path.exists():
            return
        with io.BufferedReader(cast("io.RawIOBase", open_plain(os.path.realpath(path)))) as file:
            while (line := file.readline(_LONGEST_ROW)) and (row := _row(line)) is not None:
                yield row
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        text = report(f"fsharding train cannot read {path}.", [why], "Move it away, or give another --out.")
        raise ConfigError(text) from error


_LONGEST_ROW = 1 << 16
_MOST_ENTRIES = 1000


def _row(line: bytes) -> dict[str, Any] | None:
    """A row of metrics: its step, a whole number, and other numbers or None; None if the line is malformed."""
    try:
        row = parse_json(line, values=_MOST_ENTRIES)
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or abs(row["step"]) > 1 << 62:
        return None
    result = cast("dict[str, Any]", row)
    plain = all(isinstance(x, float | None) or (isinstance(x, int) and abs(x) < 1 << 62) for x in result.values())
    return result if plain else None


def plot_loss(metrics: Path, out: Path) -> None:
    """Draws loss, of training and of validation where there is one, and gradient norm over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # lazy: an extra, and slow to import
    from matplotlib.figure import Figure  # lazy: as above

    steps = array("q")
    losses = array("d")
    norms = array("d")
    validated = array("q")
    validations = array("d")
    for row in metrics_rows(metrics):
        steps.append(row["step"])
        if "val_loss" in row:
            validated.append(row["step"])
            validations.append(_number(row, "val_loss"))
        losses.append(_number(row, "loss"))
        norms.append(_number(row, "grad_norm"))
    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, norm = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    loss.plot(steps, losses, linewidth=1.2, label="training")
    if validated:
        loss.plot(validated, validations, marker=".", linewidth=1.2, label="validation")
        loss.legend()
    loss.set_ylabel("loss (nats a token)")
    last = f"{losses[-1]:.3f} after {len(steps)} steps" if steps else "no steps"
    loss.set_title(f"{metrics.parent.name}: {last}")
    norm.plot(steps, norms, linewidth=0.8, color="tab:gray")
    norm.set_ylabel("gradient norm")
    norm.set_xlabel("step")
    for axes in (loss, norm):
        axes.grid(alpha=0.3)
    save_figure(figure, out)


def _number(row: dict[str, Any], key: str) -> float:
    return math.nan if row.get(key) is None else row[key]


@named("fs.pipeline.draw_schedule")
def draw_schedule(
    schedule: Schedule,
    path: str | Path,
    *,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    send: float = 0.0,
) -> None:
    """Draws the timeline of a pipeline schedule: one row a rank, a bar for each F, B, I and W.

    Later stages of a rank are darker. Idle share and activations in flight stand at the end of each row.

    Args:
        schedule: a `Schedule`, one row for each rank.
        path: the PNG to write, or the SVG if it ends with `.svg`.
        forward: as in `Schedule.simulate`, and so for the others.
        backward_input: of I.
        backward_weight: of W.
        send: of a message.

    Raises:
        ConfigError: matplotlib is not installed.
        ScheduleError: the schedule has no end.

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
            # Without a date, and with names of parts that do not change from one call to the next.
            with matplotlib.rc_context({"svg.hashsalt": "fsharding"}):
                figure.savefig(part, format="svg", metadata={"Date": None})
        else:
            figure.savefig(part, dpi=120, format="png")
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
