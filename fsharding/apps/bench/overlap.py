"""Which share of a step's communication is hidden behind compute, by strategy, schedule and prefetch depth.

In: an `OverlapConfig`. Out: a row for each strategy and depth or schedule, printed as a table or as JSON. One step of a
rank of each pipeline stage runs on fake tensors, as for `fs.debug.expected_traffic`; its streams note what they are
given, and `timeline_of` places that in time at given rates. No device takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fsharding as fs
from fsharding.apps.bench.options import OverlapConfig
from fsharding.apps.bench.rounds import print_rows
from fsharding.apps.bench.timeline import Rates, Timeline, draw_timeline, timeline_of, write_trace
from fsharding.base.calls import named
from fsharding.base.errors import ConfigError, message
from fsharding.comm.stream_log import recording_streams
from fsharding.models.decoder import decoder
from fsharding.models.presets import recipe
from fsharding.sharding.strategy import Strategy
from fsharding.train.foresight import fake_step

__all__ = ["bench_overlap", "step_timeline"]


@named("fsharding bench overlap")
def bench_overlap(config: OverlapConfig) -> None:
    """Runs each step on fake tensors, and prints.

    Raises:
        ConfigError: a number that is not above 0, or an unknown preset or strategy.
    """
    positive = ("ranks", "stages", "batch", "seq_len", "microbatches", "tflops", "memory_gbs", "link_gbs")
    given = {name: value for name in positive if (value := getattr(config, name)) is not None}
    wrong = [f"{name}: {value}" for name, value in given.items() if value <= 0]
    wrong += [f"prefetch_depth: {depth}" for depth in config.depths if depth < 0]
    wrong += [f"latency_us: {config.latency_us}"] if config.latency_us < 0 else []
    if wrong:
        raise ConfigError(message("cannot place this in time.", wrong, "Rates and sizes are above 0."))
    rows: list[dict[str, Any]] = []
    orders: Sequence[int | str] = config.depths if config.stages == 1 else config.schedules
    kind = "depth" if config.stages == 1 else "schedule"
    for name in config.strategies:
        for order in orders:
            line = step_timeline(config, name, order)
            rows.append(
                {
                    "strategy": name,
                    kind: order,
                    "step_ms": line.seconds * 1e3,
                    "compute_ms": line.compute * 1e3,
                    "communication_ms": line.communication * 1e3,
                    "hidden": line.hidden,
                }
            )
            suffix = f"-{name}-{order}"
            if config.trace is not None:
                write_trace(line, _named(config.trace, suffix))
            if config.plot is not None:
                what = f"prefetch depth {order}" if config.stages == 1 else order
                title = f"{config.preset}, {name}, {what}: {line.hidden:.0%} of communication hidden"
                draw_timeline(line, _named(config.plot, suffix), title)
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "strategy": lambda row: row["strategy"],
        kind: lambda row: str(row[kind]),
        "step ms": lambda row: f"{row['step_ms']:.2f}",
        "compute ms": lambda row: f"{row['compute_ms']:.2f}",
        "communication ms": lambda row: f"{row['communication_ms']:.2f}",
        "hidden": lambda row: f"{row['hidden']:.0%}",
    }
    mesh = f"{config.ranks} ranks" if config.stages == 1 else f"{config.stages} stages of {config.ranks} ranks"
    title = f"{config.preset} on {mesh}, {config.batch} x {config.seq_len} tokens a rank, as planned"
    print_rows(title, columns, rows, as_json=config.json)


def step_timeline(config: OverlapConfig, strategy: str, order: int | str) -> Timeline:
    """Place one step in time: of one rank of each stage.

    Args:
        strategy: by its name, such as "zero3".
        order: `prefetch_depth` of `fs.make_train_step`, or the name of a schedule.
    """
    model = decoder(recipe(config.preset).config)
    mesh = fs.AbstractMesh(("pp", "dp"), (config.stages, config.ranks))
    microbatches = config.microbatches or (1 if config.stages == 1 else 2 * config.stages)
    how: dict[str, Any] = {"microbatches": microbatches, "donate": True, "check": "async"}
    stages = None
    if isinstance(order, str):
        how["schedule"] = fs.pipeline.plan_schedule(order, config.stages, microbatches)
        stages = fs.pipeline.stages_of(model, how["schedule"])
    else:
        how["prefetch_depth"] = order
    precision = replace(fs.BF16, sums="native")
    layout = fs.plan_layout(model, mesh, strategy=Strategy.parse(strategy), precision=precision, stages=stages)
    tokens = torch.empty(config.batch, config.seq_len, dtype=torch.int64, device="meta")
    batch, opt = {"tokens": tokens, "targets": tokens}, fs.adamw(1e-3)
    logs = [
        fake_step(recording_streams, model, opt, layout, batch, coord={"pp": stage}, **how).rows
        for stage in range(config.stages)
    ]
    rates = Rates(config.tflops * 1e12, config.memory_gbs * 1e9, config.link_gbs * 1e9, config.latency_us * 1e-6)
    return timeline_of(logs, rates)


def _named(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")
