"""Peers on the same decoder: torch alone, DDP and FSDP2, and by an extra SimpleFSDP and DeepSpeed.

Their modules hold the same weights and call the same pure functions as ours: only weights and gradients are sent in
another way, and what a contender computes is what `fsharding` computes, in the same dtype.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsharding as fs
from bench.rounds import allocated
from fsharding.models.model import Model
from fsharding.models.stacks import stacks_of
from fsharding.sharding.leaf_plan import LAYERS

__all__ = ["B1", "B2", "PEERS", "RATE", "Task", "first_dims", "forward_bytes", "fsdp2_module", "missing"]

RATE = 1e-4  # With 1e-3, bfloat16 sums of a GPU that come in any order part two equal runs by 1 % within 7 steps.
B1 = 0.9
B2 = 0.95
"""Of everyone's AdamW, without weight decay."""


@dataclass(frozen=True)
class Task:
    """The model and batch that all contenders train."""

    model: Model  # blocks may be compiled
    mesh: DeviceMesh  # of one axis, `dp`
    batch: dict[str, Tensor]  # of this rank
    dtype: torch.dtype  # of compute; weights, sums of gradients and moments are float32

    def draws(self) -> fs.tree.Tree:
        """Return the first weights of all, lazily: those that `init_state` draws with `random.key(0)`."""
        return self.model.init(fs.random.split(fs.random.key(0))[0])

    @functools.cached_property
    def weights(self) -> fs.tree.Tree:
        """Compute `draws` on the CPU, once for all contenders, which copy them."""
        return fs.tree.map(lambda draw: draw.tensor(), self.draws())


def first_dims(names: fs.tree.Tree) -> fs.tree.Tree:
    """Drop the names of dims but for layers, so that data axes shard the first dim of each leaf, as FSDP2 does."""
    return fs.tree.map(
        lambda of_leaf: tuple(name if name == LAYERS else None for name in of_leaf),
        names,
        is_leaf=lambda x: isinstance(x, tuple),
    )


class _Unit(nn.Module):
    """A pure function with its weights, cast to the dtype of compute."""

    def __init__(self, fn: Callable[..., Any], values: fs.tree.Tree, task: Task) -> None:
        super().__init__()
        leaves, self.structure = fs.tree.flatten(values)
        self.fn = fn
        self.dtype = task.dtype
        self.leaves = nn.ParameterList(nn.Parameter(x.to(task.mesh.device_type, copy=True)) for x in leaves)

    def forward(self, *args: Any) -> Any:
        return self.fn(fs.tree.unflatten(self.structure, [x.to(self.dtype) for x in self.leaves]), *args)


def _rows(stack: fs.tree.Tree) -> list[fs.tree.Tree]:
    leaves, structure = fs.tree.flatten(stack)
    return [fs.tree.unflatten(structure, row) for row in zip(*leaves, strict=True)]


class _Decoder(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        values = task.weights
        units = [(block, row) for path, block in stacks_of(task.model) for row in _rows(fs.tree.at(values, path))]
        self.embed = _Unit(task.model.embed, values["embed"], task)
        self.blocks = nn.ModuleList(_Unit(block, row, task) for block, row in units)
        self.head = _Unit(task.model.head, values["head"], task)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        total, weight = self.head(x, batch)
        return total.float() / weight


def _trained(module: nn.Module, task: Task) -> Callable[[], Tensor]:
    """Forward, backward and torch's fused AdamW."""
    opt = torch.optim.AdamW(module.parameters(), lr=RATE, betas=(B1, B2), weight_decay=0.0, fused=True)

    def run() -> Tensor:
        loss = cast(Tensor, module(task.batch))
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return run


def forward_bytes(task: Task) -> int:
    """Return the most bytes that a forward of the full, unsharded model allocates at once."""
    module = _Decoder(task)
    losses: list[Tensor] = []
    _, peak = allocated(lambda: losses.append(module(task.batch)))
    # Without the weights that are cast for compute: they are gathered units, which others count.
    cast_bytes = sum(x.numel() * task.dtype.itemsize for x in module.parameters() if x.dtype != task.dtype)
    return peak - cast_bytes


def _alone(task: Task) -> Callable[[], Tensor]:
    return _trained(_Decoder(task), task)


def _ddp(task: Task) -> Callable[[], Tensor]:
    return _trained(DistributedDataParallel(_Decoder(task), gradient_as_bucket_view=True), task)


def fsdp2_module(task: Task, sums: torch.dtype) -> tuple[nn.Module, list[FSDPModule]]:
    """Return the decoder sharded by FSDP2, and its units in the order of forward."""
    module = _Decoder(task)
    policy = MixedPrecisionPolicy(param_dtype=task.dtype, reduce_dtype=sums, cast_forward_inputs=False)
    units = [fully_shard(unit, mesh=task.mesh, mp_policy=policy) for unit in (module.embed, *module.blocks)]
    # Backward begins with the head, so it stays as it is between the two.
    units.append(fully_shard(module.head, mesh=task.mesh, mp_policy=policy, reshard_after_forward=False))
    fully_shard(module, mesh=task.mesh, mp_policy=policy)
    return module, units


def _fsdp2_default(task: Task) -> Callable[[], Tensor]:
    """Build FSDP2 as torch's tutorial does."""
    return _trained(fsdp2_module(task, torch.float32)[0], task)


def _fsdp2(task: Task, sums: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    """Build FSDP2 as its authors advise for a slow host: gathers start one unit ahead, in both directions."""
    module, units = fsdp2_module(task, sums)
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    train = _trained(module, task)

    def run() -> Tensor:
        units[0].unshard(async_op=True)
        return train()

    return run


def _simple_fsdp_module(task: Task) -> nn.Module:
    simple: Any = importlib.import_module("torchtitan.experiments.simple_fsdp.simple_fsdp")  # lazy: extra
    policy = simple.MixedPrecisionPolicy(param_dtype=task.dtype, reduce_dtype=torch.float32)
    return simple.data_parallel(_Decoder(task), task.mesh, mode="fully_shard", mp_policy=policy)


def _simple_fsdp(task: Task) -> Callable[[], Tensor]:
    return _trained(_simple_fsdp_module(task), task)


def _simple_fsdp_compiled(task: Task) -> Callable[[], Tensor]:
    """Compile the full step: the compiler sees the gathers as well."""
    return _trained(cast(nn.Module, torch.compile(_simple_fsdp_module(task))), task)


def _deepspeed(level: int, *, offload: bool = False) -> Callable[[Task], Callable[[], Tensor]]:
    def build(task: Task) -> Callable[[], Tensor]:
        deepspeed: Any = importlib.import_module("deepspeed")  # lazy: extra
        module = _Decoder(task)
        how: dict[str, Any] = {"lr": RATE, "betas": (B1, B2), "weight_decay": 0.0}
        if offload:
            opt = deepspeed.ops.adam.DeepSpeedCPUAdam(module.parameters(), **how)
        else:
            opt = torch.optim.AdamW(module.parameters(), fused=True, **how)
        settings = {
            "train_micro_batch_size_per_gpu": len(task.batch["tokens"]),
            "zero_optimization": {"stage": level, "overlap_comm": True, **(_OFFLOAD if offload else {})},
            "bf16": {"enabled": task.dtype == torch.bfloat16},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "wall_clock_breakdown": False,
        }
        engine = deepspeed.initialize(model=module, optimizer=opt, config=settings)[0]

        def run() -> Tensor:
            loss = engine(task.batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return run

    return build


_OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}

PEERS: dict[str, Callable[[Task], Callable[[], Tensor]]] = {
    "compute-only": _alone,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "fsdp2-default": _fsdp2_default,
    "fsdp2-bf16-sums": lambda task: _fsdp2(task, torch.bfloat16),
    "simple-fsdp": _simple_fsdp,
    "simple-fsdp-compiled": _simple_fsdp_compiled,
    **{f"deepspeed-zero{level}": _deepspeed(level) for level in (1, 2, 3)},
    "deepspeed-zero2-offload": _deepspeed(2, offload=True),
}
"""Makers of peers by name. `compute-only` sends nothing: each rank trains alone, which is the least time there is."""


_PACKAGES = {"simple-fsdp": "torchtitan", "deepspeed": "deepspeed"}


def missing(name: str) -> bool:
    """Return whether the package of a peer is not installed."""
    package = next((p for start, p in _PACKAGES.items() if name.startswith(start)), "torch")
    return importlib.util.find_spec(package) is None
