"""Memory of a training step beside its peers, and beside what a strategy has to hold.

In: a `MemoryConfig`. Out: one object of rows, printed as a table or as JSON by rank 0. Contenders train as for
`fsharding bench step`; what they keep and the most they have at once are counted by the allocator, and shared memory by
who made it. Guarantee: what a contender keeps between steps is its state and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import fsharding as fs
from fsharding.apps.bench.options import MemoryConfig, StepConfig
from fsharding.apps.bench.peers import Task, forward_bytes
from fsharding.apps.bench.rounds import cell, counted_rounds, print_rows
from fsharding.apps.bench.step import OURS, build, check, make_task, transport_of
from fsharding.mesh.device_mesh import make_mesh, own_rank
from fsharding.models.presets import recipe
from fsharding.models.stacks import stacks_of
from fsharding.sharding.layout import plan_layout
from fsharding.sharding.strategy import Strategy

__all__ = ["bench_memory", "check_memory"]


def bench_memory(config: MemoryConfig) -> None:
    """Measures on the ranks that are there, and prints on rank 0.

    Raises:
        ConfigError: a number below 1, an unknown contender, or one whose package is not there.
    """
    step = check_memory(config)
    mesh = make_mesh(dp=-1, timeout=timedelta(seconds=120))
    try:
        rows = measure(step, mesh)
        if own_rank() == 0:
            _show(config, rows)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def check_memory(config: MemoryConfig) -> StepConfig:
    """Refuses what cannot be measured.

    Returns:
        The step whose memory is measured.

    Raises:
        ConfigError: a number below 1, an unknown contender, or one whose package is not there; all are listed.
    """
    step = StepConfig(
        contenders=config.contenders, preset=config.preset, dtype=config.dtype,
        batch=config.batch, seq_len=config.seq_len,
    )  # fmt: skip
    check(step, "fsharding bench memory")
    return step


def measure(step: StepConfig, mesh: Any) -> list[dict[str, Any]]:
    """One row for each contender: bytes that it keeps, most at once, and what its strategy has to hold. Collective.

    Where ranks share memory, ours are counted a second time, with every byte sent.
    """
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
    """State, gradients, two whole units, and what a forward of the whole model keeps."""
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
    by_name = {row["contender"]: row["peak_bytes"] for row in rows}

    def ratio(peer: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row['peak_bytes'] / by_name[peer]:.2f}" if peer in by_name else "-"

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "contender": lambda row: row["contender"],
        "kept MiB": cell("kept_bytes", 0, 2**20),
        "peak MiB": cell("peak_bytes", 0, 2**20),
        "to fsdp2": ratio("fsdp2"),
        "to ddp": ratio("ddp"),
        "every byte sent": cell("sent_peak_bytes", 0, 2**20),
        "has to hold MiB": cell("needed_bytes", 0, 2**20),
        "to that": lambda row: f"{row['peak_bytes'] / row['needed_bytes']:.2f}" if row["needed_bytes"] else "-",
    }
    title = f"memory of a step of {config.preset}, {config.batch} x {config.seq_len} tokens a rank, {config.dtype}"
    print_rows(title, columns, rows, as_json=config.json)
