"""Schedules of a pipeline side by side: the same decoder on the same ranks of `pp`, one step of each schedule in turn.

Beside each time stands the idle share of `fs.pipeline.simulate` if all computes take equally long, and the ratio of
times that follows from it. Blocks that rest instead of computing show what a schedule gains if each rank has a device
of its own. Losses must agree before a time counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.distributed.device_mesh import DeviceMesh

from bench.options import PipelineConfig
from bench.rounds import agree, cell, own_mesh, print_rows, take_turns
from fsharding.base.errors import ConfigError, did_you_mean, report
from fsharding.models.decoder import decoder
from fsharding.models.model import Model
from fsharding.models.presets import recipe
from fsharding.ops.grad_sink import put_term, takes_terms
from fsharding.optim import adamw
from fsharding.pipeline.schedule import SCHEDULES, Schedule, plan_schedule
from fsharding.pipeline.stages import stages_of
from fsharding.sharding import random
from fsharding.sharding.layout import plan_layout
from fsharding.sharding.strategy import zero
from fsharding.train.state import init_state
from fsharding.train.step import make_train_step

__all__ = ["bench_pipeline", "check", "measure"]

_RATE = 1e-5


def bench_pipeline(config: PipelineConfig) -> None:
    """Measure on the ranks that are there, all of them along `pp`."""
    with own_mesh(pp=int(os.environ.get("WORLD_SIZE", "1"))) as mesh:
        _show(config, measure(config, mesh))


def check(config: PipelineConfig) -> None:
    """Refuse schedules that are unknown."""
    wrong = [f"{x}: not known.{did_you_mean(x, SCHEDULES)}" for x in config.schedules if x not in SCHEDULES]
    if wrong or not config.schedules:
        wrong = wrong or ["schedules: none"]
        raise ConfigError(report("cannot measure this.", wrong, f"Schedules are {', '.join(SCHEDULES)}."))
    recipe(config.preset)


def measure(config: PipelineConfig, mesh: DeviceMesh) -> list[dict[str, Any]]:
    """Return a row for each schedule: median and quartiles in milliseconds, idle share, loss. Collective."""
    model = resting(config.rest, 2 * mesh.size()) if config.rest else decoder(recipe(config.preset).config)
    tokens = _batch(config, mesh)
    schedules = {name: plan_schedule(name, mesh.size(), config.microbatches) for name in config.schedules}
    runs = {name: _run(model, schedule, mesh, config, tokens) for name, schedule in schedules.items()}
    steps = take_turns(runs, config.rounds)
    agree({name: result.losses for name, result in steps.items()}, 1e-5)
    times = {name: schedule.simulate() for name, schedule in schedules.items()}
    by_layer = {name: times[name].total / schedules[name].stages for name in schedules}
    first = config.schedules[0]
    return [
        {
            "schedule": name, "ranks": mesh.size(), "microbatches": config.microbatches, "median_ms": result.median,
            "iqr_ms": result.iqr, "ratio": result.median / steps[first].median, "loss": result.losses[-1],
            "idle": times[name].bubble_share, "simulated_ratio": by_layer[name] / by_layer[first],
        }
        for name, result in steps.items()
    ]  # fmt: skip


def _batch(config: PipelineConfig, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return random tokens, the same on all ranks."""
    source = torch.Generator().manual_seed(0)
    vocab = recipe(config.preset).config.vocab_size
    rows = config.batch * config.microbatches
    vocab = min(vocab, 256) if config.rest else vocab
    tokens = torch.randint(vocab, (rows, config.seq_len + 1), generator=source).to(mesh.device_type)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


class _Rest(Function):
    """A product with a weight whose forward and halves of a backward rest; the second half as W of a schedule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float, takes: bool) -> Tensor:
        time.sleep(seconds)
        ctx.seconds = seconds
        ctx.takes_terms = takes
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        time.sleep(ctx.seconds)
        towards_x = grads[0] @ weight.t()
        node = ctx.next_functions[1][0]

        def kernel(out: Tensor) -> None:
            time.sleep(ctx.seconds)
            torch.mm(x.flatten(0, -2).t(), grads[0].flatten(0, -2), out=out)

        if ctx.takes_terms and put_term(node, x.dtype, kernel):
            return towards_x, None, None, None
        term = torch.empty_like(weight)
        kernel(term)
        return towards_x, term, None, None


def resting(milliseconds: float, layers: int) -> Model:
    """Make a model of equal blocks, each of which sleeps in its forward and in each half of its backward."""
    dim = 8
    vocab = 256

    def block(params: Any, x: Tensor) -> Tensor:
        return cast(Tensor, _Rest.apply(x, params["w"], milliseconds / 1e3, takes_terms(params["w"])))

    def head(params: Any, x: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        logits = (x @ params["w"].t()).flatten(0, -2)
        targets = batch["targets"].flatten()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), torch.tensor(targets.numel())

    def init(key: Tensor) -> Any:
        keys = [random.fold_in(key, i) for i in range(3)]
        return {
            "embed": {"w": random.normal(keys[0], (vocab, dim))},
            "blocks": {"w": random.normal(keys[1], (layers, dim, dim), std=dim**-0.5)},
            "head": {"w": random.normal(keys[2], (vocab, dim))},
        }

    names = {"embed": {"w": ("vocab", "embed")}, "head": {"w": ("vocab", "embed")}}
    return Model(
        init, lambda params, batch: params["w"][batch["tokens"]], block, head,
        {**names, "blocks": {"w": ("layers", "embed", "mlp")}},
    )  # fmt: skip


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
        "median ms": cell("median_ms", 1),
        "iqr ms": cell("iqr_ms", 1),
        f"to {config.schedules[0]}": cell("ratio", 2),
        "idle of the table": lambda row: f"{row['idle']:.1%}",
        "its ratio": cell("simulated_ratio", 2),
    }
    what = f"blocks that rest {config.rest:g} ms" if config.rest else config.preset
    title = f"schedules: {what}, {rows[0]['ranks']} ranks along pp, {config.microbatches} microbatches"
    print_rows(title, columns, rows, as_json=config.json)
