"""Which share of a step's communication is hidden behind compute, by strategy and prefetch depth, at given rates.

In: an `OverlapConfig`. Out: a row for each strategy and depth, printed as a table or as JSON. One step of one rank runs
on fake tensors, as for `fs.debug.expected_traffic`; its streams note what they are given, and `timeline_of` places that
in time. No device takes part.
"""

from __future__ import annotations

from collections.abc import Callable
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
from fsharding.models.decoder import decoder
from fsharding.models.presets import recipe
from fsharding.sharding.strategy import Strategy
from fsharding.testing.stream_log import recording_streams
from fsharding.train.foresight import fake_step

__all__ = ["bench_overlap", "step_timeline"]


@named("fsharding bench overlap")
def bench_overlap(config: OverlapConfig) -> None:
    """Runs each step on fake tensors, and prints.

    Raises:
        ConfigError: a number that is not above 0, or an unknown preset or strategy.
    """
    positive = ("ranks", "batch", "seq_len", "microbatches", "tflops", "memory_gbs", "link_gbs")
    wrong = [f"{name}: {value}" for name in positive if (value := getattr(config, name)) <= 0]
    wrong += [f"prefetch_depth: {depth}" for depth in config.depths if depth < 0]
    wrong += [f"latency_us: {config.latency_us}"] if config.latency_us < 0 else []
    if wrong:
        raise ConfigError(message("cannot place this in time.", wrong, "Rates and sizes are above 0."))
    rows: list[dict[str, Any]] = []
    for name in config.strategies:
        for depth in config.depths:
            line = step_timeline(config, name, depth)
            rows.append(
                {
                    "strategy": name,
                    "depth": depth,
                    "step_ms": line.seconds * 1e3,
                    "compute_ms": line.compute * 1e3,
                    "communication_ms": line.communication * 1e3,
                    "hidden": line.hidden,
                }
            )
            suffix = f"-{name}-{depth}"
            if config.trace is not None:
                write_trace(line, _named(config.trace, suffix))
            if config.plot is not None:
                title = f"{config.preset}, {name}, prefetch depth {depth}: {line.hidden:.0%} of communication hidden"
                draw_timeline(line, _named(config.plot, suffix), title)
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "strategy": lambda row: row["strategy"],
        "depth": lambda row: str(row["depth"]),
        "step ms": lambda row: f"{row['step_ms']:.2f}",
        "compute ms": lambda row: f"{row['compute_ms']:.2f}",
        "communication ms": lambda row: f"{row['communication_ms']:.2f}",
        "hidden": lambda row: f"{row['hidden']:.0%}",
    }
    title = f"{config.preset} on {config.ranks} ranks, {config.batch} x {config.seq_len} tokens a rank, as planned"
    print_rows(title, columns, rows, as_json=config.json)


def step_timeline(config: OverlapConfig, strategy: str, depth: int) -> Timeline:
    """Place one step of one rank in time.

    Args:
        strategy: by its name, such as "zero3".
        depth: as `prefetch_depth` of `fs.make_train_step`.
    """
    model = decoder(recipe(config.preset).config)
    mesh = fs.AbstractMesh(("dp",), (config.ranks,))
    precision = replace(fs.BF16, sums="native")
    layout = fs.plan_layout(model, mesh, strategy=Strategy.parse(strategy), precision=precision)
    tokens = torch.empty(config.batch, config.seq_len, dtype=torch.int64, device="meta")
    how: dict[str, Any] = {
        "microbatches": config.microbatches,
        "prefetch_depth": depth,
        "donate": True,
        "check": "async",
    }
    streams = fake_step(
        recording_streams(), model, fs.adamw(1e-3), layout, {"tokens": tokens, "targets": tokens}, **how
    )
    rates = Rates(config.tflops * 1e12, config.memory_gbs * 1e9, config.link_gbs * 1e9, config.latency_us * 1e-6)
    return timeline_of(streams.rows, rates)


def _named(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")
