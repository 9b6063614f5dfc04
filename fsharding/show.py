"""Pictures of a run.

In: the `metrics.jsonl` that training writes. Out: `loss.png` beside it, written whole or not at all.
matplotlib is in the extra `plot`; without it there is a clear error before training starts.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from fsharding.errors import ConfigError, message

__all__ = ["plot_loss", "read_metrics", "require_matplotlib"]


def require_matplotlib(function: str) -> None:
    """Checks that plots can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        mend = "pip install 'fsharding[plot]', or pass --no-plot."
        raise ConfigError(message(function, "needs matplotlib to draw loss.png.", mend=mend))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The complete lines of a metrics file; a last line that was cut off is left out."""
    rows: list[dict[str, float]] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def plot_loss(metrics: Path, out: Path) -> None:
    """Draws loss and gradient norm over steps.

    Args:
        metrics: a `metrics.jsonl`.
        out: the PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # lazy: an extra, and slow to import
    from matplotlib.figure import Figure  # lazy: as above

    rows = read_metrics(metrics)
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, norm = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    loss.plot(steps, [row["loss"] for row in rows], linewidth=1.2)
    loss.set_ylabel("loss (nats a token)")
    loss.set_title(f"{metrics.parent.name}: {rows[-1]['loss']:.3f} after {len(rows)} steps" if rows else "no steps")
    norm.plot(steps, [row["grad_norm"] for row in rows], linewidth=0.8, color="tab:gray")
    norm.set_ylabel("gradient norm")
    norm.set_xlabel("step")
    for axes in (loss, norm):
        axes.grid(alpha=0.3)
    part = out.with_name(f".{out.name}.partial")
    figure.savefig(part, dpi=120, format="png")
    part.replace(out)
