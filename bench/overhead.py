"""Host overhead of a step: many tiny units and next to no compute, beside torch's FSDP2.

Contenders run in the same processes on the same values, one step each in turn. Losses must agree before a time counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fsharding as fs
from bench.options import OverheadConfig
from bench.rounds import agree, cell, own_mesh, print_rows, ratio, take_turns
from bench.step import sending_mesh, transport_of
from fsharding.sharding.layout import plan_layout
from fsharding.sharding.strategy import zero
from fsharding.train.state import init_state
from fsharding.train.step import make_train_step

__all__ = ["bench_overhead", "measure"]

_RATE = 1e-5
"""Low enough that no loss comes near zero, where it would have no digits left to compare."""
_SENT = "fsharding-zero3, every byte sent"


def bench_overhead(config: OverheadConfig) -> None:
    """Measure on the ranks that are there."""
    with own_mesh(dp=-1) as mesh:
        _show(config, measure(config, mesh), mesh.size())


def measure(config: OverheadConfig, mesh: DeviceMesh) -> list[dict[str, Any]]:
    """Return a row for each contender: median and quartiles in milliseconds, and the last loss. Collective."""
    # If ranks share memory, ours is measured a second time in turn, with every byte sent.
    contenders = {"fsharding-zero3": _ours(config, mesh)}
    if dist.is_initialized():
        contenders["fsdp2"] = _fsdp2(config, mesh)
        if transport_of(mesh) == "shared_memory":
            contenders[_SENT] = _ours(config, sending_mesh())
    steps = take_turns(contenders, config.rounds)
    agree({name: result.losses for name, result in steps.items()}, 1e-5)
    return [
        {
            "contender": name, "ranks": mesh.size(), "units": config.units, "leaves": config.leaves,
            "median_ms": result.median, "iqr_ms": result.iqr, "loss": result.losses[-1],
            "sent_ms": steps[_SENT].median if name == "fsharding-zero3" and _SENT in steps else None,
        }
        for name, result in steps.items() if name != _SENT
    ]  # fmt: skip


def _ours(config: OverheadConfig, mesh: DeviceMesh) -> Callable[[], Tensor]:
    names = [f"w{i:02d}" for i in range(config.leaves)]

    def init(key: Tensor) -> fs.tree.Tree:
        return {name: fs.random.full((config.units, 8, 8), 0.01) for name in names}

    def block(params: fs.tree.Tree, x: Tensor) -> Tensor:
        return torch.stack([x, *(w[0, 0] for w in params.values())]).sum()

    def loss_fn(params: fs.tree.Tree, batch: Tensor) -> Tensor:
        return fs.scan_units(block, params, batch).square()

    shapes = dict.fromkeys(names, ("layers", "embed", None))
    layout = plan_layout(init(fs.random.key(0)), mesh, strategy=zero(3), names=shapes)
    opt = fs.optim.adamw(_RATE)
    state = init_state(init, opt, fs.random.key(0), layout)
    step = make_train_step(lambda p, batch: (loss_fn(p, batch["x"].sum()), 1.0), opt, donate=True)
    batch = {"x": torch.ones(1, device=mesh.device_type)}

    def run() -> Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics.loss

    return run


class _Unit(nn.Module):
    def __init__(self, leaves: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.full((8, 8), 0.01)) for _ in range(leaves)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x, *(w[0, 0] for w in self.weights)]).sum()


def _fsdp2(config: OverheadConfig, mesh: DeviceMesh) -> Callable[[], Tensor]:
    model = nn.Sequential(*(_Unit(config.leaves) for _ in range(config.units))).to(mesh.device_type)
    for unit in model:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)
    batch = torch.ones((), device=mesh.device_type)

    def run() -> Tensor:
        loss = cast(Tensor, model(batch)).square()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return run


def _show(config: OverheadConfig, rows: list[dict[str, Any]], ranks: int) -> None:
    peer = next((row["median_ms"] for row in rows if row["contender"] == "fsdp2"), None)
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "contender": lambda row: row["contender"],
        "median ms": cell("median_ms", 1),
        "iqr ms": cell("iqr_ms", 1),
        "a unit, us": lambda row: f"{1e3 * row['median_ms'] / config.units:.0f}",
        "to fsdp2": ratio(rows, "median_ms", "fsdp2"),
        "every byte sent": cell("sent_ms", 1),
        "that to fsdp2": lambda row: f"{row['sent_ms'] / peer:.2f}" if row["sent_ms"] and peer else "-",
    }
    title = f"host overhead of a step: {config.units} units of {config.leaves} leaves, {ranks} ranks"
    print_rows(title, columns, rows, as_json=config.json)
