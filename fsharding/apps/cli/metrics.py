"""The `metrics.jsonl` of a run: its rows, and a plot of its losses."""

from __future__ import annotations

import io
import math
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from fsharding.base.errors import ConfigError, report
from fsharding.base.untrusted import open_plain, parse_json
from fsharding.pipeline.plots import save_figure

__all__ = ["metrics_rows", "plot_loss"]


def metrics_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file, with None for non-finite values; stop at a truncated or malformed line."""
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
    """Parse a row of metrics: its step, an integer, and other numbers or None; None if the line is malformed."""
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
    """Draw the losses of training and validation, and the gradient norm, over steps."""
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
