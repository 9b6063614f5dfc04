"""Memory of a training step beside its peers, and beside the required memory of its strategy.

The allocator counts what contenders keep between steps, which is their state, and the most they have at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import fsharding as fs
from bench.options import MemoryConfig, StepConfig
from bench.peers import Task, forward_bytes
from bench.rounds import cell, counted_rounds, own_mesh, print_rows, ratio
from bench.step import OURS, build, make_task, transport_of
from bench.step import check as check_step
from fsharding.models.presets import recipe
from fsharding.models.stacks import stacks_of
from fsharding.sharding.layout import plan_layout
from fsharding.sharding.strategy import Strategy

__all__ = ["bench_memory", "check", "measure"]


def bench_memory(config: MemoryConfig) -> None:
    """Measure on the ranks that are there."""
    with own_mesh(dp=-1) as mesh:
        _show(config, measure(_step(config), mesh))


def check(config: MemoryConfig) -> None:
    """Refuse contenders that are unknown or not installed."""
    check_step(_step(config))


def _step(config: MemoryConfig) -> StepConfig:
    """Return the step whose memory is measured."""
    return StepConfig(
        contenders=config.contenders, preset=config.preset, dtype=config.dtype,
        batch=config.batch, seq_len=config.seq_len,
    )  # fmt: skip


def measure(step: StepConfig, mesh: Any) -> list[dict[str, Any]]:
    """Return a row for each contender: bytes kept, most at once, and required by its strategy. Collective."""
    # If ranks share memory, ours are counted a second time, with every byte sent.
    task = make_task(step, mesh, recipe(step.preset).config)
    forward = forward_bytes(task)
    shares = transport_of(mesh) == "shared_memory"
    rows: list[dict[str, Any]] = []
    for number in counted_rounds(len(step.contenders) - 1, 1, "one contender a round"):
        name = step.contenders[number]
        built = build(task, name)
        needed = least_bytes(task, OURS[name].strategy, forward) if name in OURS else None
        rows.append(
            {
                "contender": name, "dtype": step.dtype, "ranks": mesh.size(), "kept_bytes": built.kept,
                "peak_bytes": built.peak, "needed_bytes": needed, "forward_bytes": forward, "loss": built.first,
            }
        )  # fmt: skip
        del built
        rows[-1]["sent_peak_bytes"] = build(task, name, sends=True).peak if shares and name in OURS else None
    return rows


def least_bytes(task: Task, strategy: Strategy, forward: int) -> int:
    """Add state, gradients, two full units, and what a forward of the full model keeps."""
    precision = fs.Precision(compute=task.dtype)
    layout = plan_layout(task.draws(), task.mesh, strategy=strategy, names=task.model.names, precision=precision)
    memory = layout.memory()
    # One microbatch: gradients are cut as the moments, of which there are two, in float32 all three.
    grads = memory.opt_state // 2
    draws = task.draws()
    blocks = [fs.tree.leaves(fs.tree.at(draws, path)) for path, _ in stacks_of(task.model)]
    units = [sum(math.prod(draw.shape[1:]) for draw in stack) for stack in blocks]
    units += [sum(math.prod(draw.shape) for draw in fs.tree.leaves(draws[name])) for name in ("embed", "head")]
    return memory.state + grads + 2 * max(units) * task.dtype.itemsize + forward


def _show(config: MemoryConfig, rows: list[dict[str, Any]]) -> None:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "contender": lambda row: row["contender"],
        "kept MiB": cell("kept_bytes", 0, 2**20),
        "peak MiB": cell("peak_bytes", 0, 2**20),
        "to fsdp2": ratio(rows, "peak_bytes", "fsdp2"),
        "to ddp": ratio(rows, "peak_bytes", "ddp"),
        "every byte sent": cell("sent_peak_bytes", 0, 2**20),
        "has to hold MiB": cell("needed_bytes", 0, 2**20),
        "to that": lambda row: f"{row['peak_bytes'] / row['needed_bytes']:.2f}" if row["needed_bytes"] else "-",
    }
    title = f"memory of a step of {config.preset}, {config.batch} x {config.seq_len} tokens a rank, {config.dtype}"
    print_rows(title, columns, rows, as_json=config.json)
