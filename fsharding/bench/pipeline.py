"""Schedules of a pipeline side by side: the same decoder on the same ranks of `pp`, one step of each schedule in turn.

In: a `PipelineConfig`. Out: one object of rows, printed as a table or as JSON by rank 0; beside each time the share of
it in which the schedule has a rank wait if all computes take equally long, as `fs.pipeline.simulate` counts it.
Law: losses agree before a time counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsharding import random
from fsharding.bench.options import PipelineConfig
from fsharding.bench.rounds import agree, print_rows, take_turns
from fsharding.errors import ConfigError, did_you_mean, message
from fsharding.mesh.device_mesh import make_mesh, own_rank
from fsharding.models.decoder import decoder
from fsharding.models.model import Model
from fsharding.models.presets import recipe
from fsharding.optim import adamw
from fsharding.pipeline.schedule import SCHEDULES, Schedule, plan_schedule
from fsharding.pipeline.stages import stages_of
from fsharding.sharding.layout import plan_layout
from fsharding.sharding.strategy import zero
from fsharding.train.state import init_state
from fsharding.train.step import make_train_step

__all__ = ["bench_pipeline", "check_pipeline", "measure"]

_RATE = 1e-5


def bench_pipeline(config: PipelineConfig) -> None:
    """Measures on the ranks that are there, all of them along `pp`, and prints on rank 0.

    Raises:
        ConfigError: a number below 1, an unknown schedule, or none.
        ScheduleError: a schedule cannot have so many ranks or microbatches.
    """
    check_pipeline(config)
    mesh = make_mesh(pp=int(os.environ.get("WORLD_SIZE", "1")), timeout=timedelta(minutes=5))
    try:
        rows = measure(config, mesh)
        if own_rank() == 0:
            _show(config, rows)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def check_pipeline(config: PipelineConfig) -> None:
    """Refuses what cannot be measured.

    Args:
        config: what was asked for.

    Raises:
        ConfigError: a number below 1, an unknown schedule, or none; all are listed.
    """
    wrong = [
        f"{name}: {n}" for name in ("microbatches", "batch", "seq_len", "rounds") if (n := getattr(config, name)) < 1
    ]
    wrong += [
        f"{name}: not known.{did_you_mean(name, SCHEDULES)}" for name in config.schedules if name not in SCHEDULES
    ]
    if not config.schedules:
        wrong.append("schedules: none")
    if wrong:
        mend = f"Numbers are at least 1; schedules are {', '.join(SCHEDULES)}."
        raise ConfigError(message("fsharding bench pipeline", "cannot measure this.", wrong, mend))
    recipe(config.preset)


def measure(config: PipelineConfig, mesh: DeviceMesh) -> list[dict[str, Any]]:
    """One row for each schedule: its median and quartiles in milliseconds, its idle share, its loss. Collective."""
    model, tokens = decoder(recipe(config.preset).config), _batch(config, mesh)
    schedules = {name: plan_schedule(name, mesh.size(), config.microbatches) for name in config.schedules}
    runs = {name: _run(model, schedule, mesh, config, tokens) for name, schedule in schedules.items()}
    steps = take_turns(runs, config.rounds)
    agree({name: result.losses for name, result in steps.items()}, 1e-5)
    first = steps[config.schedules[0]].median
    return [
        {
            "schedule": name, "ranks": mesh.size(), "microbatches": config.microbatches, "median_ms": result.median,
            "iqr_ms": result.iqr, "ratio": result.median / first, "loss": result.losses[-1],
            "idle": schedules[name].simulate().bubble_share,
        }
        for name, result in steps.items()
    ]  # fmt: skip


def _batch(config: PipelineConfig, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Random tokens, the same on all ranks."""
    source, vocab = torch.Generator().manual_seed(0), recipe(config.preset).config.vocab
    rows = config.batch * config.microbatches
    tokens = torch.randint(vocab, (rows, config.seq_len + 1), generator=source).to(mesh.device_type)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def _run(
    model: Model, schedule: Schedule, mesh: DeviceMesh, config: PipelineConfig, tokens: dict[str, Tensor]
) -> Callable[[], Tensor]:
    layout = plan_layout(model, mesh, strategy=zero(1), stages=stages_of(model, schedule))
    opt = adamw(_RATE)
    state = init_state(model, opt, random.key(0), layout)
    step = make_train_step(model, opt, microbatches=config.microbatches, schedule=schedule, donate=True)

    def run() -> Tensor:
        nonlocal state
        state, metrics = step(state, tokens)
        return metrics.loss

    return run


def _show(config: PipelineConfig, rows: list[dict[str, Any]]) -> None:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "schedule": lambda row: row["schedule"],
        "median ms": lambda row: f"{row['median_ms']:.1f}",
        "iqr ms": lambda row: f"{row['iqr_ms']:.1f}",
        f"to {config.schedules[0]}": lambda row: f"{row['ratio']:.2f}",
        "idle of the table": lambda row: f"{row['idle']:.1%}",
    }
    title = f"schedules: {config.preset}, {rows[0]['ranks']} ranks along pp, {config.microbatches} microbatches"
    print_rows(title, columns, rows, as_json=config.json)
