"""The update of AdamW beside torch's fused one, in one process: on the leaves of a model, and on many small ones.

Ours updates sharded leaves in place, as a train step with a donated state does. Both must have the same parameters
before a time counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fsharding as fs
from bench.options import OptimizerConfig
from bench.rounds import agree, cell, print_rows, take_turns
from fsharding.mesh.device_mesh import make_mesh
from fsharding.models.decoder import decoder
from fsharding.models.presets import recipe
from fsharding.sharding.layout import plan_layout
from fsharding.sharding.named_sharding import local_of
from fsharding.train.reshard import shard

__all__ = ["bench_optimizer"]

_RATE = 1e-3
_DECAY = 0.1


def bench_optimizer(config: OptimizerConfig) -> None:
    """Measure and print."""
    model = decoder(recipe(config.preset).config)
    shapes = [leaf.shape for leaf in plan_layout(model, make_mesh(dp=1)).leaves]
    rows = [*_measure(config, shapes), *_measure(config, [(config.size,)] * config.leaves)]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "contender": lambda row: row["contender"],
        "leaves": cell("leaves", 0),
        "elements": cell("elements", 0),
        "median ms": cell("median_ms", 2),
        "iqr ms": cell("iqr_ms", 2),
        "to torch": cell("ratio", 2),
    }
    print_rows("an update of AdamW", columns, rows, as_json=config.json)


def _measure(config: OptimizerConfig, shapes: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Return a row for each contender."""
    noise = torch.Generator().manual_seed(0)
    values, grads = ([torch.randn(shape, generator=noise) for shape in shapes] for _ in range(2))
    steps = take_turns({"fsharding": _ours(values, grads), "torch-fused": _torch(values, grads)}, config.rounds)
    agree({name: result.losses for name, result in steps.items()}, 1e-5)
    return [
        {
            "contender": name, "leaves": len(shapes), "elements": sum(map(math.prod, shapes)),
            "median_ms": result.median, "iqr_ms": result.iqr, "ratio": result.median / steps["torch-fused"].median,
        }
        for name, result in steps.items()
    ]  # fmt: skip


def _ours(values: Sequence[Tensor], grads: Sequence[Tensor]) -> Callable[[], Tensor]:
    whole = {f"w{i:05d}": x for i, x in enumerate(values)}
    layout = plan_layout(whole, make_mesh(dp=1))
    params = shard(whole, layout)
    given = shard(dict(zip(whole, grads, strict=True)), layout)
    opt = fs.optim.adamw(_RATE, weight_decay=_DECAY)
    state = opt.init(params)
    donated = fs.optim.UpdateContext(donate=True)

    def run() -> Tensor:
        nonlocal params, state
        params, state = fs.optim.apply_gradients(opt, given, state, params, donated)
        return local_of(params["w00000"]).view(-1)[0].clone()

    return run


def _torch(values: Sequence[Tensor], grads: Sequence[Tensor]) -> Callable[[], Tensor]:
    device = make_mesh(dp=1).device_type
    params = [x.to(device, copy=True).requires_grad_() for x in values]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(device)
    opt = torch.optim.AdamW(params, lr=_RATE, betas=(0.9, 0.95), weight_decay=_DECAY, fused=True)

    def run() -> Tensor:
        opt.step()
        return params[0].detach().view(-1)[0].clone()

    return run
