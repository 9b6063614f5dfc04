"""A training step beside its peers, and beside the least time that it can take.

All contenders train the same decoder on the same tokens from the same weights, in the same processes, one step each in
turn. Losses must agree before a time counts.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fsharding as fs
from bench.options import StepConfig
from bench.peers import B1, B2, PEERS, RATE, Task, first_dims, missing
from bench.rounds import Steps, agree, allocated, cell, own_mesh, print_rows, ratio, take_turns
from fsharding.base import devices
from fsharding.base.errors import ConfigError, report
from fsharding.comm.counters import count_bytes
from fsharding.comm.native import Native
from fsharding.comm.transport import choice_for
from fsharding.contrib.pairwise import Pairwise
from fsharding.mesh.device_mesh import axis_group, make_mesh, own_rank
from fsharding.models.decoder import DecoderConfig, decoder
from fsharding.models.model import Model
from fsharding.models.presets import recipe
from fsharding.models.stacks import stacks_of
from fsharding.pipeline.plots import require_matplotlib, save_figure
from fsharding.sharding.layout import plan_layout
from fsharding.sharding.strategy import HSDP, Strategy
from fsharding.train.state import init_state
from fsharding.train.step import make_train_step

__all__ = [
    "OURS",
    "Built",
    "Ours",
    "bench_step",
    "build",
    "check",
    "make_task",
    "measure",
    "sending_mesh",
    "transport_of",
]


class Ours(NamedTuple):
    """A contender of ours."""

    strategy: Strategy
    replicas: int = 1
    captured: bool = False  # the step is one CUDA graph
    first: bool = False  # data axes cut the first dim of each leaf, as FSDP2 does, not the one of the default rules


OURS: dict[str, Ours] = {f"fsharding-zero{level}": Ours(Strategy.parse(f"zero{level}")) for level in range(4)}
"""Our contenders by name."""
OURS["fsharding-zero3-first-dims"] = Ours(Strategy.parse("zero3"), first=True)
OURS["fsharding-zero2-host"] = Ours(Strategy.parse("zero2").with_memory(moments="host"))
OURS["fsharding-zero2-disk"] = Ours(Strategy.parse("zero2").with_memory(moments="disk"))
OURS["fsharding-zero3-captured"] = Ours(Strategy.parse("zero3"), captured=True)
OURS["fsharding-hybrid"] = Ours(HSDP, 2)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


def bench_step(config: StepConfig) -> None:
    """Measure on the ranks that are there."""
    with own_mesh(dp=-1) as mesh:
        if "fsharding-hybrid" in config.contenders and mesh.size() % 2:
            text = f"cannot run fsharding-hybrid on {mesh.size()} ranks."
            raise ConfigError(report(text, mend="Use an even number of ranks."))
        _show(config, measure(config, mesh))


def check(config: StepConfig) -> None:
    """Refuse contenders that are unknown or not installed, all in one error."""
    without = not devices.records_graphs(devices.accelerator())
    wrong: list[str] = []
    for name in config.contenders:
        if name not in PEERS and name not in OURS:
            wrong.append(f"{name}: not known")
        elif name in PEERS and missing(name):
            wrong.append(f"{name}: its package is not installed")
        elif name in OURS and OURS[name].captured and without:
            wrong.append(f"{name}: needs a device that records graphs, such as CUDA")
    if not config.contenders:
        wrong.append("contenders: none")
    if wrong:
        raise ConfigError(report("cannot measure this.", wrong, f"Contenders are {', '.join([*PEERS, *OURS])}."))
    recipe(config.preset)
    if config.plot is not None:
        require_matplotlib("bars", instead=", or leave --plot out")


def transport_of(mesh: Any) -> str:
    """Return how the ranks of `dp` send, such as `shared_memory`. Collective."""
    return choice_for(axis_group(mesh, ("dp",)), torch.device(mesh.device_type)).kind.name


def sending_mesh(replicas: int = 1) -> Any:
    """Make a mesh whose ranks send every byte, as between machines, even if they share memory."""
    return make_mesh(replica=replicas, dp=-1, transport="pairwise")


def measure(config: StepConfig, mesh: Any, sizes: DecoderConfig | None = None) -> list[dict[str, Any]]:
    """Return a row for each contender: time, memory, loss, and the least time of ours. Collective."""
    # If ranks share memory, ours are measured a second time in turn, with every byte sent.
    task = make_task(config, mesh, recipe(config.preset).config if sizes is None else sizes)
    transport = transport_of(mesh)
    built: dict[str, Built] = {}
    wires: dict[str, float] = {}
    sending: dict[str, str] = {}
    for name in config.contenders:
        built[name] = build(task, name)
        if name in OURS and not OURS[name].captured:  # in a graph nothing is counted
            wires[name] = _wire_time(task, built[name].sent)
            if transport == "shared_memory":
                sending[name] = f"{name}, every byte sent"
                built[sending[name]] = build(task, name, sends=True)
    steps = take_turns({name: result.run for name, result in built.items()}, config.rounds)
    agree(_together(built, steps), _TOLERANCE[config.dtype])
    if config.trace is not None:
        _trace(built[config.contenders[-1]].run, config.trace)
    alone = steps["compute-only"].median if "compute-only" in steps else None
    # Of a launcher for several machines, torchrun.
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    return [
        {
            "contender": name, "compiled": config.compiled, "dtype": config.dtype, "ranks": mesh.size(),
            "hosts": hosts, "transport": transport,
            "median_ms": result.median, "iqr_ms": result.iqr, "peak_bytes": built[name].peak, "loss": result.losses[-1],
            "wire_ms": wires.get(name),
            "floor_ms": alone + wires[name] if alone is not None and name in wires else None,
            "sent_ms": steps[sending[name]].median if name in sending else None,
        }
        for name, result in ((name, steps[name]) for name in config.contenders)
    ]  # fmt: skip


def make_task(config: StepConfig, mesh: Any, sizes: DecoderConfig) -> Task:
    """Return the model and batch that all contenders train."""
    return Task(_model(config, sizes), mesh, _batch(config, sizes, mesh), _DTYPES[config.dtype])


def _model(config: StepConfig, sizes: DecoderConfig) -> Model:
    model = decoder(sizes)
    if not config.compiled:
        return model
    if callable(model.block):
        return model._replace(block=torch.compile(model.block))
    return model._replace(block={name: torch.compile(block) for name, block in model.block.items()})


def _batch(config: StepConfig, sizes: DecoderConfig, mesh: Any) -> dict[str, Tensor]:
    """Return random tokens of this rank."""
    source = torch.Generator().manual_seed(own_rank())
    tokens = torch.randint(sizes.vocab_size, (config.batch, config.seq_len + 1), generator=source).to(mesh.device_type)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def _ours(kind: Ours, task: Task, *, sends: bool = False) -> Callable[[], Tensor]:
    mesh = task.mesh
    if sends:
        mesh = sending_mesh(kind.replicas)
    elif kind.replicas > 1:
        mesh = make_mesh(replica=kind.replicas, dp=-1)
    precision = fs.Precision(compute=task.dtype)
    names = first_dims(task.model.names) if kind.first else task.model.names
    layout = plan_layout(task.draws(), mesh, strategy=kind.strategy, names=names, precision=precision)
    opt = fs.optim.adamw(RATE, b1=B1, b2=B2)
    state = init_state(lambda _: fs.tree.map(torch.clone, task.weights), opt, fs.random.key(0), layout)
    step: Callable[..., Any] = make_train_step(task.model, opt, donate=True)
    step = fs.capture(step, state, task.batch) if kind.captured else step

    def run() -> Tensor:
        nonlocal state
        state, metrics = step(state, task.batch)
        return metrics.loss

    return run


class Built(NamedTuple):
    """A contender that has done two steps; bytes are those of the fullest rank."""

    run: Callable[[], Tensor]  # does one more step
    kept: int  # between steps
    peak: int  # most bytes at once
    first: float  # its first loss, the mean over ranks
    sent: int  # bytes that this rank sent in a step, as `count_bytes` counts them


def build(task: Task, name: str, *, sends: bool = False) -> Built:
    """Make a contender and let it do two steps; with `sends`, ours sends every byte. Collective."""
    # What it keeps is what building it and its first step leave; its second shows what it needs besides.
    _ = task.weights  # Drawn before anything is counted.
    ours = name not in PEERS
    make = functools.partial(functools.partial(_ours, OURS[name], sends=sends) if ours else PEERS[name], task)
    made: list[Callable[[], Tensor]] = []
    losses: list[Tensor] = []
    kept, _ = allocated(lambda: made.append(make()))
    warm, _ = allocated(lambda: losses.append(made[0]()))
    with count_bytes() as traffic:
        _, peak = allocated(made[0])
    state = kept + warm
    result = torch.tensor([float(losses[0]), state, state + peak], dtype=torch.float64)
    if dist.is_initialized():
        everyone = [torch.empty_like(result) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, result)
        result = torch.stack(everyone)
    else:
        result = result[None]
    state, peak = map(int, result[:, 1:].amax(0))
    return Built(made[0], state, peak, float(result[:, 0].mean()), traffic.bytes)


def _trace(run: Callable[[], Tensor], path: Path) -> None:
    """Profile one step; rank 0 writes the trace."""
    with torch.profiler.profile() as profile:
        run()
    if own_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))


def _wire_time(task: Task, sent: int) -> float:
    """Measure how many milliseconds so many bytes take alone: all-to-alls of one block between warm buffers."""
    if not sent:
        return 0.0
    group = axis_group(task.mesh, ("dp",))
    draws = fs.tree.leaves(fs.tree.at(task.draws(), stacks_of(task.model)[-1][0]))
    width = -(-sum(math.prod(draw.shape[1:]) for draw in draws) // group.size)
    # Written once: memory that was never written is one page of zeros, which stays in the cache.
    kind = Pairwise if task.mesh.device_type == "cpu" else Native
    exchange = kind(group, torch.device(task.mesh.device_type)).all_to_all(width, task.dtype)
    exchange.own.fill_(1)
    messages = max(1, round(sent / ((group.size - 1) * exchange.own[0].nbytes)))
    times: list[float] = []
    for _ in range(4):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(messages):
            exchange.start().wait()
        times.append(1e3 * (time.perf_counter() - began))
    slowest = torch.tensor(statistics.median(times[1:]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _together(built: dict[str, Built], steps: dict[str, Steps]) -> dict[str, list[float]]:
    """Return the losses that must agree; `compute-only` has the first alone, before its ranks diverge."""
    together = {name: [built[name].first, *result.losses] for name, result in steps.items() if name != "compute-only"}
    if "compute-only" in steps:
        together["compute-only"] = [built["compute-only"].first]
    return together


def _show(config: StepConfig, rows: list[dict[str, Any]]) -> None:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "contender": lambda row: row["contender"],
        "median ms": cell("median_ms", 1),
        "iqr ms": cell("iqr_ms", 1),
        "to fsdp2": ratio(rows, "median_ms", "fsdp2"),
        "to ddp": ratio(rows, "median_ms", "ddp"),
        "every byte sent": cell("sent_ms", 1),
        "floor ms": cell("floor_ms", 1),
        "to floor": lambda row: f"{row['median_ms'] / row['floor_ms']:.2f}" if row["floor_ms"] else "-",
        "peak MiB": cell("peak_bytes", 0, 2**20),
        "loss": cell("loss", 4),
    }
    precision = f"{config.dtype}, compiled" if config.compiled else config.dtype
    hosts = f" on {rows[0]['hosts']} hosts" if rows[0]["hosts"] > 1 else ""
    size = f"{config.batch} x {config.seq_len} tokens a rank, {rows[0]['ranks']} ranks{hosts} ({rows[0]['transport']})"
    title = f"a step of {config.preset}, {size}, {precision}"
    print_rows(title, columns, rows, as_json=config.json)
    if config.plot is not None and own_rank() == 0:
        _draw(rows, config.plot, title)


def _draw(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw a bar for each row, with its spread, and the floor as a line across it."""
    from matplotlib.figure import Figure  # lazy: an extra, and slow to import

    figure = Figure(figsize=(8, 0.4 * len(rows) + 1.4), layout="constrained")
    axes = figure.subplots()
    spreads = [row["iqr_ms"] / 2 for row in rows]
    axes.barh(range(len(rows)), [row["median_ms"] for row in rows], xerr=spreads, height=0.7, color="#6f9bd1")
    floors = [(i, row["floor_ms"]) for i, row in enumerate(rows) if row["floor_ms"] is not None]
    if floors:
        ends = [i - 0.45 for i, _ in floors], [i + 0.45 for i, _ in floors]
        label = "compute alone + bytes alone"
        axes.vlines([at for _, at in floors], *ends, color="#e0a458", linewidth=2, label=label)
        axes.legend(fontsize=7)
    axes.set_yticks(range(len(rows)), [row["contender"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.set_title(title, size=9)
    save_figure(figure, path)
