"""A training step beside its peers, and beside the least time that it can take.

In: a `StepConfig`. Out: one object of rows, printed as a table or as JSON by rank 0, and a chart. Every contender
trains the same decoder on the same tokens from the same weights, in the same processes, one step each in turn.
Guarantee: losses agree before a time counts.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fsharding as fs
from fsharding.apps.bench.options import StepConfig
from fsharding.apps.bench.peers import B1, B2, PEERS, RATE, Task, first_dims, missing
from fsharding.apps.bench.rounds import Steps, agree, allocated, print_rows, take_turns
from fsharding.base import devices
from fsharding.base.calls import named
from fsharding.base.errors import ConfigError, message, report
from fsharding.comm.counters import count_bytes
from fsharding.comm.native import Native
from fsharding.comm.transport import choice_for
from fsharding.contrib.pairwise import Pairwise
from fsharding.mesh.device_mesh import axis_group, make_mesh, own_rank
from fsharding.models.decoder import DecoderConfig, decoder
from fsharding.models.model import Model
from fsharding.models.presets import recipe
from fsharding.models.stacks import stacks_of
from fsharding.pipeline.plots import Bar, draw_bars, require_matplotlib
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
    """A contender of ours.

    Attributes:
        strategy: its own.
        replicas: how many the mesh has.
        captured: the step is one CUDA graph.
        first: data axes cut the first dim of each leaf, as FSDP2 does, and not the one that the default rules name.
    """

    strategy: Strategy
    replicas: int = 1
    captured: bool = False
    first: bool = False


OURS: dict[str, Ours] = {f"fsharding-zero{level}": Ours(Strategy.parse(f"zero{level}")) for level in range(4)}
"""Our contenders by name."""
OURS["fsharding-zero3-first-dims"] = Ours(Strategy.parse("zero3"), first=True)
OURS["fsharding-zero2-host"] = Ours(Strategy.parse("zero2").with_memory(moments="host"))
OURS["fsharding-zero2-disk"] = Ours(Strategy.parse("zero2").with_memory(moments="disk"))
OURS["fsharding-zero3-captured"] = Ours(Strategy.parse("zero3"), captured=True)
OURS["fsharding-hybrid"] = Ours(HSDP, 2)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


@named("fsharding bench step")
def bench_step(config: StepConfig) -> None:
    """Measures on the ranks that are there, and prints on rank 0.

    Raises:
        ConfigError: a number below 1, an unknown contender, or one whose package is not there.
    """
    check(config, "fsharding bench step")
    replica = 2 if "fsharding-hybrid" in config.contenders else 1
    mesh = make_mesh(dp=-1, timeout=timedelta(seconds=120))
    try:
        if mesh.size() % replica:
            text = f"cannot run fsharding-hybrid on {mesh.size()} ranks."
            raise ConfigError(message(text, mend="Use an even number of ranks."))
        rows = measure(config, mesh)
        if own_rank() == 0:
            _show(config, rows)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def check(config: StepConfig, command: str) -> None:
    """Refuses what cannot be measured.

    Raises:
        ConfigError: a number below 1, an unknown contender, or one whose package is not there; all are listed.
    """
    wrong = [f"{name}: {n}" for name in ("batch", "seq_len", "rounds") if (n := getattr(config, name)) < 1]
    wrong += [f"{name}: not known" for name in config.contenders if name not in PEERS and name not in OURS]
    wrong += [f"{name}: its package is not installed" for name in config.contenders if name in PEERS and missing(name)]
    without = not devices.records_graphs(devices.accelerator())
    wrong += [
        f"{name}: needs a device that records graphs, such as CUDA"
        for name in config.contenders
        if name in OURS and OURS[name].captured and without
    ]
    if not config.contenders:
        wrong.append("contenders: none")
    if wrong:
        mend = f"Numbers are at least 1; contenders are {', '.join([*PEERS, *OURS])}."
        raise ConfigError(report(f"{command} cannot measure this.", wrong, mend))
    recipe(config.preset)
    if config.plot is not None:
        require_matplotlib("bars", instead=", or leave --plot out")


def transport_of(mesh: Any) -> str:
    """How the ranks of `dp` send, such as `shared_memory`. Collective."""
    return choice_for(axis_group(mesh, ("dp",)), torch.device(mesh.device_type)).kind.name


def sending_mesh(replicas: int = 1) -> Any:
    """All ranks along `replica` and `dp`, which send every byte, as between machines, also where they share memory."""
    return make_mesh(replica=replicas, dp=-1, transport="pairwise")


def measure(config: StepConfig, mesh: Any, sizes: DecoderConfig | None = None) -> list[dict[str, Any]]:
    """One row for each contender: time, memory, loss, and the least time of ours. Collective.

    Where ranks share memory, ours are measured a second time in turn, with every byte sent.

    Args:
        mesh: with the one axis `dp`.
        sizes: of the decoder; by default the preset's.
    """
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
    """The model and batch that all contenders train."""
    return Task(_model(config, sizes), mesh, _batch(config, sizes, mesh), _DTYPES[config.dtype])


def _model(config: StepConfig, sizes: DecoderConfig) -> Model:
    model = decoder(sizes)
    if not config.compiled:
        return model
    if callable(model.block):
        return model._replace(block=torch.compile(model.block))
    return model._replace(block={name: torch.compile(block) for name, block in model.block.items()})


def _batch(config: StepConfig, sizes: DecoderConfig, mesh: Any) -> dict[str, Tensor]:
    """Random tokens of this rank."""
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
    """A contender that has done two steps.

    Attributes:
        run: does one more.
        kept: bytes that it holds between steps, on the fullest rank.
        peak: most bytes that it had allocated at once, on the fullest rank.
        first: its first loss, the mean over ranks.
        sent: bytes that this rank sent in a step, as far as `count_bytes` sees them.
    """

    run: Callable[[], Tensor]
    kept: int
    peak: int
    first: float
    sent: int


def build(task: Task, name: str, *, sends: bool = False) -> Built:
    """Makes a contender and lets it do two steps. Collective.

    What it keeps is what building it and its first step left behind; what it needs besides shows in its second.

    Args:
        sends: one of ours sends every byte, as between machines, also where ranks share memory.
    """
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
    """Profiles one step; rank 0 writes what it saw."""
    with torch.profiler.profile() as profile:
        run()
    if own_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))


def _wire_time(task: Task, sent: int) -> float:
    """Milliseconds that so many bytes take alone: all-to-alls of one block between warm buffers, in a row."""
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
    """The losses that must agree; who trains alone has the first one, before its ranks go apart."""
    together = {name: [built[name].first, *result.losses] for name, result in steps.items() if name != "compute-only"}
    if "compute-only" in steps:
        together["compute-only"] = [built["compute-only"].first]
    return together


def _show(config: StepConfig, rows: list[dict[str, Any]]) -> None:
    by_name = {row["contender"]: row["median_ms"] for row in rows}

    def ratio(peer: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row['median_ms'] / by_name[peer]:.2f}" if peer in by_name else "-"

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "contender": lambda row: row["contender"],
        "median ms": lambda row: f"{row['median_ms']:.1f}",
        "iqr ms": lambda row: f"{row['iqr_ms']:.1f}",
        "to fsdp2": ratio("fsdp2"),
        "to ddp": ratio("ddp"),
        "every byte sent": lambda row: f"{row['sent_ms']:.1f}" if row["sent_ms"] else "-",
        "floor ms": lambda row: f"{row['floor_ms']:.1f}" if row["floor_ms"] else "-",
        "to floor": lambda row: f"{row['median_ms'] / row['floor_ms']:.2f}" if row["floor_ms"] else "-",
        "peak MiB": lambda row: f"{row['peak_bytes'] / 2**20:.0f}",
        "loss": lambda row: f"{row['loss']:.4f}",
    }
    precision = f"{config.dtype}, compiled" if config.compiled else config.dtype
    hosts = f" on {rows[0]['hosts']} hosts" if rows[0]["hosts"] > 1 else ""
    size = f"{config.batch} x {config.seq_len} tokens a rank, {rows[0]['ranks']} ranks{hosts} ({rows[0]['transport']})"
    title = f"a step of {config.preset}, {size}, {precision}"
    print_rows(title, columns, rows, as_json=config.json)
    if config.plot is not None:
        bars = [Bar(row["contender"], row["median_ms"], row["iqr_ms"], row["floor_ms"]) for row in rows]
        draw_bars(bars, config.plot, title=title, unit="ms a step", limit="compute alone + bytes alone")
