"""The work of one rank of many: how the time of forward and backward grows with ranks, ours and FSDP2's.

One process is rank 1 of W in a fake process group: it computes on real tensors, and nothing is sent, so results of
collectives have no meaning. A time is one rank's own, with the copies that the fake group makes instead of sending.
Contenders run in turn, on the same weights sharded along the same dims, with one thread.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fsharding as fs
from bench.options import RanksConfig
from bench.peers import Task, first_dims, fsdp2_module
from bench.rounds import cell, in_turn, print_rows
from fsharding.base import _compat
from fsharding.base.errors import ConfigError, report
from fsharding.comm.bucket import plan_bucket
from fsharding.comm.leaf_wires import UnitWire
from fsharding.comm.wires import Plain
from fsharding.formats.precision import Sums
from fsharding.mesh.rendezvous import under_launcher
from fsharding.models.decoder import DecoderConfig, decoder
from fsharding.sharding.layout import plan_layout
from fsharding.sharding.leaf_plan import LeafLayout
from fsharding.sharding.strategy import zero
from fsharding.train.state import init_params
from fsharding.train.step import model_loss
from fsharding.transforms.unit_plan import GradTarget, UnitLeaf, plan_unit
from fsharding.transforms.value_and_grad import value_and_grad

__all__ = ["bench_ranks", "check", "measure_ranks"]

_Level: TypeAlias = Literal[0, 1, 2, 3]

_OURS: dict[str, tuple[_Level, Sums]] = {
    "fsharding-zero3": (3, "ordered"),
    "fsharding-zero1": (1, "ordered"),
    "fsharding-zero3-native": (3, "native"),
    "fsharding-zero1-native": (1, "native"),
}
"""Our contenders: levels of ZeRO, and who adds up gradients: each rank in one order, or the backend, as on CUDA."""

_RANK = 1
"""Of the process that is measured: it has a part of every leaf that is cut in more than one."""


def check(config: RanksConfig) -> None:
    """Refuse a rank that is alone, a width without full heads, and a launcher."""
    if min(config.ranks, default=2) < 2 or config.dim % 64:
        raise ConfigError(report("cannot measure this.", mend="Ranks are at least 2; dim is a multiple of 64."))
    if under_launcher():
        raise ConfigError(report("is one process that stands for many.", mend="Run it without torchrun."))


def bench_ranks(config: RanksConfig) -> None:
    """Measure each number of ranks in turn, in this process, and print."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _show(config, [row for ranks in config.ranks for row in measure_ranks(config, ranks)])
    finally:
        torch.set_num_threads(threads)


def measure_ranks(config: RanksConfig, ranks: int) -> list[dict[str, Any]]:
    """Return a row for each contender. Begins and ends the default process group, so there must be none."""
    sizes = DecoderConfig(
        vocab_size=config.dim, dim=config.dim, layers=config.blocks, heads=config.dim // 64, kv_heads=config.dim // 64,
        intermediate_size=2 * config.dim,
    )  # fmt: skip
    planned = _planning(sizes, ranks)
    _compat.start_fake_group(_RANK, ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        tokens = torch.randint(sizes.vocab_size, (1, config.seq_len + 1), generator=torch.Generator().manual_seed(0))
        batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        task = Task(decoder(sizes), mesh, batch, torch.float32)
        contenders = {"fsdp2": _fsdp2(task), **{name: _ours(*kind, task) for name, kind in _OURS.items()}}
        first = {name: _timed(run) for name, run in contenders.items()}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        gc.collect()
        for number in range(config.rounds):
            for name in in_turn([*contenders], number):
                times[name].append(_timed(contenders[name]))
        group = {name: _in_group(run) for name, run in contenders.items()}
    finally:
        dist.destroy_process_group()
    peer = statistics.median(times["fsdp2"])
    return [
        {
            "contender": name, "ranks": ranks, "median_ms": statistics.median(of_name), "min_ms": min(of_name),
            "group_ms": group[name], "ratio": statistics.median(of_name) / peer, "first_ms": first[name],
            "first_ratio": first[name] / first["fsdp2"], "plan_ms": None if name == "fsdp2" else planned[name],
        }
        for name, of_name in times.items()
    ]  # fmt: skip


def _timed(run: Callable[[], object]) -> float:
    """Measure the milliseconds of a call."""
    began = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - began)


def _planning(sizes: DecoderConfig, ranks: int) -> dict[str, float]:
    """Measure the milliseconds of planning the layout of the model, and the buckets and steps of a block."""
    model = decoder(sizes)
    mesh = fs.AbstractMesh(("dp",), (ranks,))
    draws = model.init(fs.random.key(0))

    def of_row(leaf: LeafLayout) -> UnitLeaf:
        target = GradTarget(leaf.main.drop(), leaf.init)
        return UnitLeaf(leaf.params.drop(), leaf.shape[1:], leaf.init, UnitWire(Plain(leaf.init)), target)

    def plan(level: _Level) -> None:
        layout = plan_layout(draws, mesh, strategy=zero(level), names=first_dims(model.names))
        of_block = [leaf for leaf in layout.leaves if leaf.path.startswith("blocks.")]
        unit = plan_unit(tuple(map(of_row, of_block)))
        for b in unit.reductions:
            plan_bucket(tuple((leaf.local, leaf.steps[0].dim) for leaf in b.early.leaves), (ranks,))

    levels: dict[_Level, None] = {level: None for level, _ in _OURS.values()}
    by_level = {level: _timed(functools.partial(plan, level)) for level in levels}
    return {name: by_level[level] for name, (level, _) in _OURS.items()}


def _ours(level: _Level, sums: Sums, task: Task) -> Callable[[], object]:
    draws = task.draws()
    layout = plan_layout(draws, task.mesh, strategy=zero(level), names=first_dims(task.model.names))
    params = init_params(draws, layout)
    call = value_and_grad(model_loss(task.model), grads=layout.main, precision=fs.Precision(sums=sums))
    return lambda: call(params, task.batch)


def _fsdp2(task: Task) -> Callable[[], object]:
    module, _ = fsdp2_module(task, torch.float32)

    def run() -> None:
        loss: Tensor = module(task.batch)
        loss.backward()
        module.zero_grad()

    return run


class _GroupTime(TorchDispatchMode):
    """Adds up the seconds inside collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seconds += time.perf_counter() - began
        return result


def _in_group(run: Callable[[], object]) -> float:
    """Measure the milliseconds of a call that the fake group spends copying inputs to its results."""
    with _GroupTime() as measured:
        run()
    return 1e3 * measured.seconds


def _show(config: RanksConfig, rows: list[dict[str, Any]]) -> None:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "ranks": lambda row: f"{row['ranks']:,}",
        "contender": lambda row: row["contender"],
        "median ms": cell("median_ms", 1),
        "of it the fake group": cell("group_ms", 1),
        "to fsdp2": cell("ratio", 2),
        "first ms": cell("first_ms", 1),
        "to fsdp2's first": cell("first_ratio", 2),
        "plan ms": cell("plan_ms", 1),
    }
    title = f"forward and backward of one rank of many, {config.blocks} blocks of width {config.dim}"
    print_rows(title, columns, rows, as_json=config.json)
