"""How the time of a step grows with ranks, units and parameters, ours and FSDP2's.

In: a `ScalingConfig`. Out: one object of rows, printed as a table or as JSON: the time of each point, and for each
number of ranks and width the line through its points, milliseconds a step + milliseconds a unit. One set of processes
for each number of ranks; in it contenders take turns as for `fsharding bench step`.
Guarantee: a line says how well it fits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsharding.apps.bench.options import ScalingConfig, StepConfig
from fsharding.apps.bench.rounds import cell, print_rows, say
from fsharding.apps.bench.step import check, measure
from fsharding.base.calls import named
from fsharding.base.errors import ConfigError, message
from fsharding.mesh.device_mesh import make_mesh
from fsharding.mesh.launch import launch_ranks
from fsharding.mesh.rendezvous import under_launcher
from fsharding.models.decoder import DecoderConfig

__all__ = ["bench_scaling", "fit"]


@named("fsharding bench scaling")
def bench_scaling(config: ScalingConfig) -> None:
    """Starts each number of ranks in turn, and prints.

    Raises:
        ConfigError: a number below 1, an unknown contender, or one whose package is not there; or it runs under
            torchrun.
    """
    check(_step(config, config.contenders), "fsharding bench scaling")
    if min(*config.ranks, *config.units, *config.dims, 1) < 1 or any(dim % 64 for dim in config.dims):
        mend = "Numbers are at least 1; dims are multiples of 64."
        raise ConfigError(message("cannot measure these points.", mend=mend))
    if under_launcher():
        mend = "Run it without torchrun."
        raise ConfigError(message("starts its own ranks.", mend=mend))
    rows: list[dict[str, Any]] = []
    for ranks in config.ranks:
        rows += points(config) if ranks == 1 else launch_ranks(points, ranks, config)[0]
    _show(config, fit(rows))


def _step(config: ScalingConfig, contenders: tuple[str, ...]) -> StepConfig:
    return StepConfig(contenders=contenders, batch=config.batch, seq_len=config.seq_len, rounds=config.rounds)


def points(config: ScalingConfig) -> list[dict[str, Any]]:
    """One row for each contender, number of units and width, on the ranks that are there. Collective."""
    mesh = make_mesh(dp=-1, timeout=timedelta(seconds=120))
    alone = mesh.size() == 1
    contenders = tuple(name for name in config.contenders if not alone or name.startswith("fsharding-zero"))
    step = _step(config, contenders)
    rows: list[dict[str, Any]] = []
    try:
        for dim in config.dims if contenders else ():
            for units in config.units:
                sizes = DecoderConfig(
                    vocab_size=256, dim=dim, layers=units, heads=2, kv_heads=2, intermediate_size=2 * dim
                )
                say(f"{mesh.size()} ranks, width {dim}, {units} units")
                rows += [{**row, "units": units, "dim": dim} for row in measure(step, mesh, sizes)]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return rows


def fit(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to each row the line through all points of its contender, ranks and width.

    Returns:
        The rows with `fixed_ms`, `unit_ms` and `r2`, the share of the variance that the line explains (least squares);
        None where there is one point.
    """
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
