"""How the time of a step grows with ranks, units and parameters, ours and FSDP2's.

For each number of ranks and width a line goes through the points, milliseconds a step + milliseconds a unit, with how
well it fits. Each number of ranks has its own processes, in which contenders run in turn as for `python -m bench step`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from bench.options import ScalingConfig, StepConfig
from bench.rounds import cell, own_mesh, print_rows, say
from bench.step import check as check_step
from bench.step import measure
from fsharding.base.errors import ConfigError, report
from fsharding.mesh.launch import launch_ranks
from fsharding.mesh.rendezvous import under_launcher
from fsharding.models.decoder import DecoderConfig

__all__ = ["bench_scaling", "check", "fit"]


def check(config: ScalingConfig) -> None:
    """Refuse unknown contenders, widths without full heads, and a launcher."""
    check_step(_step(config, config.contenders))
    if any(dim % 64 for dim in config.dims):
        raise ConfigError(report("cannot measure these points.", mend="Give dims that are multiples of 64."))
    if under_launcher():
        raise ConfigError(report("starts its own ranks.", mend="Run it without torchrun."))


def bench_scaling(config: ScalingConfig) -> None:
    """Start each number of ranks in turn, and print."""
    rows: list[dict[str, Any]] = []
    for ranks in config.ranks:
        rows += points(config) if ranks == 1 else launch_ranks(points, ranks, config)[0]
    _show(config, fit(rows))


def _step(config: ScalingConfig, contenders: tuple[str, ...]) -> StepConfig:
    return StepConfig(contenders=contenders, batch=config.batch, seq_len=config.seq_len, rounds=config.rounds)


def points(config: ScalingConfig) -> list[dict[str, Any]]:
    """Return a row for each contender, number of units and width, on the ranks that are there. Collective."""
    rows: list[dict[str, Any]] = []
    with own_mesh(dp=-1) as mesh:
        alone = mesh.size() == 1
        contenders = tuple(name for name in config.contenders if not alone or name.startswith("fsharding-zero"))
        step = _step(config, contenders)
        for dim in config.dims if contenders else ():
            for units in config.units:
                sizes = DecoderConfig(
                    vocab_size=256, dim=dim, layers=units, heads=2, kv_heads=2, intermediate_size=2 * dim
                )
                say(f"{mesh.size()} ranks, width {dim}, {units} units")
                rows += [{**row, "units": units, "dim": dim} for row in measure(step, mesh, sizes)]
    return rows


def fit(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row the least-squares line through all points of its contender, ranks and width."""
    lines: dict[tuple[Any, ...], list[tuple[int, float]]] = {}

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["contender"], row["ranks"], row["dim"]

    for row in rows:
        lines.setdefault(key(row), []).append((row["units"], row["median_ms"]))
    return [{**row, **_line(lines[key(row)])} for row in rows]


def _line(points: list[tuple[int, float]]) -> dict[str, float | None]:
    units, times = zip(*points, strict=True)
    if len(set(units)) < 2:
        return {"fixed_ms": None, "unit_ms": None, "r2": None}
    slope, start = statistics.linear_regression(units, times)
    left = sum((t - start - slope * n) ** 2 for n, t in points)
    spread = sum((t - statistics.fmean(times)) ** 2 for t in times)
    return {"fixed_ms": start, "unit_ms": slope, "r2": 1 - left / spread if spread else 1.0}


def _show(config: ScalingConfig, rows: list[dict[str, Any]]) -> None:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "contender": lambda row: row["contender"],
        "ranks": lambda row: str(row["ranks"]),
        "dim": lambda row: str(row["dim"]),
        "units": lambda row: str(row["units"]),
        "median ms": cell("median_ms", 1),
        "iqr ms": cell("iqr_ms", 1),
        "every byte sent": cell("sent_ms", 1),
        "line: ms a step": cell("fixed_ms", 1),
        "ms a unit": cell("unit_ms", 2),
        "r2": cell("r2", 3),
    }
    title = f"growth of a step, {config.batch} x {config.seq_len} tokens a rank"
    print_rows(title, columns, rows, as_json=config.json)
