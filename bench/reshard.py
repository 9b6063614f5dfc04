"""Resharding in memory on 4 ranks, beside one raw all-to-all of the same bytes and beside a save and a load.

The raw all-to-all sends between warm buffers; the reshard packs, sends, unpacks and allocates its results. The result
must be right bit by bit, and the bytes sent those of the plan, before a time counts.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsharding as fs
from bench.options import ReshardConfig
from bench.rounds import cell, counted_rounds, give_back, in_turn, print_rows, shared_folder
from fsharding import checkpoint
from fsharding.comm.counters import count_bytes
from fsharding.mesh.device_mesh import make_mesh
from fsharding.sharding.layout import Layout, plan_layout
from fsharding.sharding.strategy import NO_SHARD, OPTIM_GRADS_PARAMS
from fsharding.testing import assert_bitwise_equal
from fsharding.train.reshard import explain_reshard, reshard
from fsharding.train.state import TrainState, init_state, state_bytes

__all__ = ["bench_reshard"]

_NAMES = ("layers", "embed", "heads")
_LEAVES = 4
_LAYERS = 8
_WIDTH = 1024
_CASES = {"dp4 -> tp4": ({"dp": 4}, {"tp": 4}), "dp2·tp2 -> pp2·dp2": ({"dp": 2, "tp": 2}, {"pp": 2, "dp": 2})}


def bench_reshard(config: ReshardConfig) -> None:
    """Measure on 4 ranks."""
    rows: list[dict[str, Any]] = []
    try:
        for name, (source, target) in _CASES.items():
            rows.append({"case": name, "mb": config.mb, **_case(config, source, target)})
        _show(config, rows)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def _layout(config: ReshardConfig, axes: dict[str, int]) -> Layout:
    size: dict[str, Any] = dict(axes)
    mesh = make_mesh(timeout=timedelta(seconds=120), **size)
    strategy = OPTIM_GRADS_PARAMS if "dp" in axes else NO_SHARD
    names = dict.fromkeys(_leaf_names(), _NAMES)
    return plan_layout(_draws(config, fs.random.key(0)), mesh, strategy=strategy, names=names)


def _leaf_names() -> list[str]:
    return [f"w{i}" for i in range(_LEAVES)]


def _draws(config: ReshardConfig, key: torch.Tensor) -> fs.tree.Tree:
    width = max(4, (config.mb << 20) // (4 * _LEAVES * _LAYERS * _WIDTH) // 4 * 4)
    return {name: fs.random.normal(key, (_LAYERS, _WIDTH, width)) for name in _leaf_names()}


def _case(config: ReshardConfig, source: dict[str, int], target: dict[str, int]) -> dict[str, Any]:
    a = _layout(config, source)
    b = _layout(config, target)
    opt = fs.optim.sgd(1e-3)
    state = init_state(lambda key: _draws(config, key), opt, fs.random.key(0), a)
    budget = config.budget_mb << 20
    plan = explain_reshard(state, b, budget=budget)
    with count_bytes() as traffic:
        moved = reshard(state, b, budget=budget)
    assert traffic.bytes == plan.sent, (traffic.bytes, plan.sent)
    assert_bitwise_equal(reshard(moved, a), state)
    del moved
    with shared_folder(config.dir) as folder:
        contenders: dict[str, Callable[[], object]] = {
            "reshard": lambda: reshard(state, b, budget=budget),
            "raw": _raw(plan.plan.rounds),
            "save_load": lambda: _save_and_load(folder, state, b),
        }
        times = _interleaved(contenders, config.rounds)
        extra = _extra_memory(state, b, budget)
    return {
        "bytes_sent": plan.total, "rounds": len(plan.plan.rounds),
        **{f"{name}_ms": 1e3 * result for name, result in times.items()},
        "speed_to_raw": times["raw"] / times["reshard"], "speed_to_save_load": times["save_load"] / times["reshard"],
        "extra_bytes": extra, "budget_bytes": budget,
    }  # fmt: skip


def _save_and_load(folder: Path, state: TrainState, layout: Layout) -> None:
    checkpoint.save(folder / "state", state)
    checkpoint.load(folder / "state", layout)


def _raw(rounds: Any) -> Callable[[], object]:
    """Return one all-to-all with the sizes of all rounds together."""
    ranks = range(dist.get_world_size())
    me = dist.get_rank()
    pieces = [piece for one in rounds for piece in one]
    out = [sum(p.bytes for p in pieces if p.source == me and p.target == r) for r in ranks]
    come = [sum(p.bytes for p in pieces if p.target == me and p.source == r) for r in ranks]
    # Written once: memory that was never written is one page of zeros, which stays in the cache.
    send, received = (torch.empty(sum(sizes), dtype=torch.uint8).fill_(1) for sizes in (out, come))
    return lambda: dist.all_to_all_single(received, send, come, out)


def _interleaved(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each, one of each in turn, after one round of warm-up; the slowest rank counts."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in counted_rounds(rounds, 1, ", ".join(contenders)):
        for name in in_turn([*contenders], number):
            give_back()
            dist.barrier()
            began = time.perf_counter()
            result = contenders[name]()
            dist.barrier()
            if number:
                times[name].append(time.perf_counter() - began)
            del result
    return {name: statistics.median(results) for name, results in times.items()}


def _extra_memory(state: TrainState, layout: Layout, budget: int) -> int:
    """Return the most bytes that were resident on any rank, besides the old and the new state."""
    give_back()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    moved = reshard(state, layout, budget=budget)
    extra = torch.tensor([_status("VmHWM") - before - state_bytes(moved)])
    dist.all_reduce(extra, dist.ReduceOp.MAX)
    return int(extra)


def _status(name: str) -> int:
    result = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert result is not None, "Linux says how much memory is resident"
    return 1024 * int(result[1])


def _show(config: ReshardConfig, rows: list[dict[str, Any]]) -> None:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "case": lambda row: row["case"],
        "MiB sent": cell("bytes_sent", 0, 2**20),
        "reshard ms": cell("reshard_ms", 0),
        "raw ms": cell("raw_ms", 0),
        "speed to raw": cell("speed_to_raw", 2),
        "save + load ms": cell("save_load_ms", 0),
        "times faster": cell("speed_to_save_load", 1),
        "extra MiB": cell("extra_bytes", 0, 2**20),
    }
    title = f"{config.mb} MiB of parameters on 4 ranks, {config.rounds} rounds"
    print_rows(title, columns, rows, as_json=config.json)
