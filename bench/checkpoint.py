"""Saving and loading a state, beside plain `torch.distributed.checkpoint` on the same leaves in the same processes.

All files are synced, each contender loads into fresh memory, and both must load what both saved before a time counts.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh

import fsharding as fs
from bench.options import CheckpointConfig
from bench.rounds import cell, counted_rounds, give_back, in_turn, own_mesh, print_rows, shared_folder
from fsharding import checkpoint
from fsharding.checkpoint.state_leaves import content
from fsharding.sharding.layout import plan_layout
from fsharding.sharding.named_sharding import local_of, sharding_of
from fsharding.sharding.strategy import zero
from fsharding.train.state import TrainState, init_state

__all__ = ["bench_checkpoint"]

_LEAVES = 12


def bench_checkpoint(config: CheckpointConfig) -> None:
    """Measure on the ranks that are there."""
    with own_mesh(dp=-1) as mesh, shared_folder(config.dir) as folder:
        _show(config, _measured(_state(config, mesh), folder, config.rounds), mesh.size())


def _state(config: CheckpointConfig, mesh: DeviceMesh) -> TrainState:
    """Make parameters and two moments in float32, sharded over all ranks."""
    rows = max(1, round(config.mb * 1e6 / (3 * 4 * _LEAVES * 1024)))

    def init(key: Tensor) -> fs.tree.Tree:
        keys = fs.random.split(key, _LEAVES)
        return {f"w{i:02d}": fs.random.normal(keys[i], (rows, 1024)) for i in range(_LEAVES)}

    layout = plan_layout(init(fs.random.key(0)), mesh, strategy=zero(3))
    return init_state(init, fs.optim.adamw(1e-3), fs.random.key(0), layout)


def _empty(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Allocate fresh memory for every leaf."""
    return {
        path: torch.empty_like(x)
        if (local := local_of(x)) is x
        else sharding_of(x).to_dtensor(torch.empty_like(local), x.shape)  # pyright: ignore[reportArgumentType]
        for path, x in leaves.items()
    }


class _Time(NamedTuple):
    """Seconds of a call: on the clock, and of this rank's processor in all its threads."""

    wall: float
    cpu: float


def _values(state: TrainState) -> dict[str, Tensor]:
    return {path: leaf.at_rest() for path, leaf in content(state).items()}


def _measured(state: TrainState, folder: Path, rounds: int) -> dict[str, list[_Time]]:
    """Time each call, one of each contender in turn, after one round of warm-up."""
    leaves = _values(state)
    loaded: dict[str, dict[str, Tensor]] = {}

    def ours_load() -> None:
        loaded["ours"] = _values(checkpoint.load(folder / "ours", state.layout))

    def their_load() -> None:
        loaded["dcp"] = _empty(leaves)
        dcp_load(loaded["dcp"], checkpoint_id=folder / "dcp")

    contenders: dict[str, Callable[[], object]] = {
        "fs.checkpoint.save": lambda: checkpoint.save(folder / "ours", state),
        "dcp.save": lambda: dcp_save(dict(leaves), storage_writer=FileSystemWriter(folder / "dcp")),
        "fs.checkpoint.load": ours_load,
        "dcp.load": their_load,
    }
    times: dict[str, list[_Time]] = {name: [] for name in contenders}
    for number in counted_rounds(rounds, 1, ", ".join(contenders)):
        for name in in_turn([*contenders], number):
            times[name].append(_timed(contenders[name]))
        for path, x in leaves.items():
            for who, result in loaded.items():
                assert torch.equal(local_of(result[path]), local_of(x)), f"{who} has another {path}"
        loaded.clear()
        if number == 0:
            times = {name: [] for name in contenders}
    return times


def _timed(run: Callable[[], object]) -> _Time:
    give_back()
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    cpu = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
    cpu = time.process_time() - cpu
    if dist.is_initialized():
        dist.barrier()
    return _Time(time.perf_counter() - began, cpu)


def _show(config: CheckpointConfig, times: dict[str, list[_Time]], ranks: int) -> None:
    medians = {name: statistics.median(x.wall for x in result) for name, result in times.items()}
    rows: list[dict[str, Any]] = []
    for name, result in times.items():
        verb = name.rpartition(".")[2]
        rows.append({
            "call": name, "ranks": ranks, "mb": config.mb, "median_s": medians[name],
            "min_s": min(result).wall, "max_s": max(result).wall, "cpu_s": statistics.median(x.cpu for x in result),
            "speed_to_dcp": medians[f"dcp.{verb}"] / medians[name],
        })  # fmt: skip
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "call": lambda row: row["call"],
        "median s": cell("median_s", 3),
        "min s": cell("min_s", 3),
        "max s": cell("max_s", 3),
        "cpu s": cell("cpu_s", 3),
        "speed to dcp": cell("speed_to_dcp", 2),
    }
    title = f"a state of {config.mb} MB on {ranks} ranks, {config.rounds} rounds"
    print_rows(title, columns, rows, as_json=config.json)
