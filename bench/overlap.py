"""Which share of a step's communication is hidden behind compute, by strategy, schedule and prefetch depth.

A step of one rank of each stage runs on fake tensors; `timeline_of` places what its streams are given in time, at given
rates. No device takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fsharding as fs
from bench.options import OverlapConfig
from bench.rounds import cell, print_rows
from bench.timelines import draw_timeline, write_trace
from fsharding.comm.stream_log import recording_streams
from fsharding.models.decoder import decoder
from fsharding.models.presets import recipe
from fsharding.sharding.strategy import Strategy
from fsharding.train.foresight import FakeRank, fake_step
from fsharding.train.timeline import Rates, Timeline, timeline_of

__all__ = ["bench_overlap", "step_timeline"]


def bench_overlap(config: OverlapConfig) -> None:
    """Run each step on fake tensors, and print."""
    rows: list[dict[str, Any]] = []
    orders: Sequence[int | str] = config.depths if config.stages == 1 else config.schedules
    kind = "depth" if config.stages == 1 else "schedule"
    for name in config.strategies:
        for order in orders:
            line = step_timeline(config, name, order)
            rows.append({
                "strategy": name, kind: order, "step_ms": line.seconds * 1e3, "compute_ms": line.compute * 1e3,
                "communication_ms": line.communication * 1e3, "hidden": line.hidden,
            })  # fmt: skip
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
        "step ms": cell("step_ms", 2),
        "compute ms": cell("compute_ms", 2),
        "communication ms": cell("communication_ms", 2),
        "hidden": lambda row: f"{row['hidden']:.0%}",
    }
    mesh = f"{config.ranks} ranks" if config.stages == 1 else f"{config.stages} stages of {config.ranks} ranks"
    title = f"{config.preset} on {mesh}, {config.batch} x {config.seq_len} tokens a rank, as planned"
    print_rows(title, columns, rows, as_json=config.json)


def step_timeline(config: OverlapConfig, strategy: str, order: int | str) -> Timeline:
    """Place one step of one rank of each stage in time; `order` is a `prefetch_depth`, or the name of a schedule."""
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
        fake_step(recording_streams, model, opt, layout, batch, rank=FakeRank({"pp": stage}), **how).rows
        for stage in range(config.stages)
    ]
    rates = Rates(config.tflops * 1e12, config.memory_gbs * 1e9, config.link_gbs * 1e9, config.latency_us * 1e-6)
    return timeline_of(logs, rates)


def _named(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")
