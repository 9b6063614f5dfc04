"""Draws the pictures of the pages, each from a layout or a schedule that the library planned.

`python -m docs.figures.draw` writes them as SVG files beside this one, which are kept under version control;
tests/unit/test_figures.py compares them with what this file draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import fsharding as fs
from bench.options import OverlapConfig
from bench.overlap import step_timeline
from bench.timelines import timeline_figure

HERE = Path(__file__).parent
COLORS = ["#6f9bd1", "#7fb77e", "#e0a458", "#c47fb0"]  # of rank 0, 1, 2, 3
SEVERAL, NOBODY = "#d9d2e9", "#eeeeee"
SHAPE = (8, 8)


def planned(strategy: Any, **axes: int) -> fs.Layout:
    """The layout of one leaf whose dim 0 `tp` cuts, and whose dim 1 the data axes cut."""
    mesh = fs.AbstractMesh(tuple(axes), tuple(axes.values()))
    leaf, rules = {"w": fs.random.zeros(SHAPE)}, fs.AxisRules(mlp="tp", embed=("replica", "dp"))
    return fs.plan_layout(leaf, mesh, rules, strategy, names={"w": ("mlp", "embed")})


def boxes(sharding: fs.NamedSharding, rank: int) -> Any:
    """The boxes of the leaf that a rank holds."""
    sizes, coord = sharding.mesh.sizes, {}
    for name, size in reversed(list(zip(sharding.mesh.names, sizes, strict=True))):
        rank, coord[name] = divmod(rank, size)
    return sharding.boxes(SHAPE, coord)


def leaf() -> Figure:
    """One leaf on four ranks under five layouts; a part of one rank has the rank's color."""
    cases = {
        "zero(0), dp=4: four copies": planned(fs.zero(0), dp=4),
        "zero(3), dp=4": planned(fs.zero(3), dp=4),
        "zero(3), replica=2, dp=2: two copies": planned(fs.zero(3), replica=2, dp=2),
        "zero(0), tp=4": planned(fs.zero(0), tp=4),
        "zero(3), dp=2, tp=2": planned(fs.zero(3), dp=2, tp=2),
    }
    figure = Figure(figsize=(11, 2.9), layout="constrained")
    for axes, (title, layout) in zip(figure.subplots(1, len(cases)), cases.items(), strict=True):
        sharding, holders = layout.params["w"], dict[Any, list[int]]()
        for rank in range(4):
            for box in boxes(sharding, rank):
                holders.setdefault(box, []).append(rank)
        for ((top, bottom), (left, right)), ranks in holders.items():
            alone = len(ranks) == 1
            color, label = COLORS[ranks[0]] if alone else SEVERAL, ("rank " if alone else "ranks\n")
            axes.add_patch(Rectangle((left, top), right - left, bottom - top, facecolor=color, edgecolor="white"))
            turn = 90 if right - left < 3 else 0
            text = label + ", ".join(map(str, ranks))
            axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", size=8, rotation=turn)
        axes.set_title(f"{title}\n{sharding.spec}", size=7.5)
        axes.set(xlim=(-0.2, SHAPE[1] + 0.2), ylim=(SHAPE[0] + 0.2, -0.2), aspect="equal", xticks=[], yticks=[])
        axes.set_xlabel("dim 1, embed", size=7)
        axes.set_ylabel("dim 0, mlp", size=7)
    return figure


def strategies() -> Figure:
    """Parameters, gradients and optimizer state of each of four ranks under each strategy."""
    rows = {
        "zero(0)": planned(fs.zero(0), dp=4),
        "zero(1)": planned(fs.zero(1), dp=4),
        "zero(2)": planned(fs.zero(2), dp=4),
        "zero(3)": planned(fs.zero(3), dp=4),
        "HSDP": planned(fs.hybrid(), replica=2, dp=2),
        "HFSDP": planned(fs.hybrid(opt_state=True), replica=2, dp=2),
    }
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    columns = ["parameters", "gradients between microbatches", "optimizer state"]
    for axes, column in zip(figure.subplots(1, 3, sharey=True), columns, strict=True):
        for y, layout in enumerate(rows.values()):
            at = {columns[0]: layout.params, columns[1]: layout.grads, columns[2]: layout.main}[column]["w"]
            for rank in range(4):
                held = boxes(at, rank)
                axes.add_patch(Rectangle((rank, y), 0.92, 0.8, facecolor=NOBODY))
                for _, (left, right) in held:
                    x, width = rank + 0.92 * left / SHAPE[1], 0.92 * (right - left) / SHAPE[1]
                    axes.add_patch(Rectangle((x, y), width, 0.8, facecolor=COLORS[rank]))
        axes.set(xlim=(-0.08, 4), ylim=(len(rows), -0.2))
        axes.set_yticks([y + 0.4 for y in range(len(rows))], list(rows), size=8)
        axes.set_xticks([rank + 0.46 for rank in range(4)], [f"rank {rank}" for rank in range(4)], size=8)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(column, size=9)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as SVG, without a date and with names of parts that do not change from one call to the next."""
    FigureCanvasSVG(figure)
    with matplotlib.rc_context({"svg.hashsalt": "fsharding"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def schedule(name: str, microbatches: int = 4, **options: Any) -> Callable[[Path], None]:
    """A schedule of 4 ranks as `fs.pipeline.draw_schedule` shows it."""

    def draw(path: Path) -> None:
        fs.pipeline.draw_schedule(fs.pipeline.plan_schedule(name, 4, microbatches, **options), path, send=0.1)

    return draw


def timeline(path: Path) -> None:
    """A step of a rank under zero(3), as `python -m bench overlap` places it in time."""
    config = OverlapConfig(preset="bench-34m", ranks=8, seq_len=2048, link_gbs=50.0)
    save(timeline_figure(step_timeline(config, "zero3", 1), "one step of a rank, zero(3)"), path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "leaf.svg": lambda path: save(leaf(), path),
    "strategies.svg": lambda path: save(strategies(), path),
    "schedule_1f1b.svg": schedule("1f1b"),
    "schedule_zbv.svg": schedule("zbv"),
    "schedule_dualpipev.svg": schedule("dualpipev", 8),
    "timeline.svg": timeline,
}


def main() -> None:
    """Draws all of them."""
    parser = argparse.ArgumentParser(description="Draws the pictures of the pages.")
    parser.add_argument("--out", type=Path, default=HERE)
    out = parser.parse_args().out
    for name, draw in PICTURES.items():
        draw(out / name)


if __name__ == "__main__":
    main()
