"""JAX-style functional sharding over torch: pure functions over sharded parameter pytrees.

Start with `make_mesh`, `plan_layout`, `init_state`, `make_train_step`; `docs/tutorials/mlp.md` uses all four.
"""

from typing import TYPE_CHECKING

from fsharding import checkpoint, models, notebook, ops, optim, pipeline, random, tree
from fsharding.checkpoint.replicas import check_replicas
from fsharding.checkpoint.saving import own_version
from fsharding.comm.counters import counting_bytes, recording
from fsharding.comm.redistribute import redistribute
from fsharding.interop import hf
from fsharding.interop.module.functionalize import functionalize
from fsharding.interop.module.model_from import model_from
from fsharding.mesh import preemption
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import data_position, is_main, is_member, make_mesh, print0, set_mesh
from fsharding.optim import adamw, global_norm, sgd
from fsharding.precision import BF16, FP16, FP32, LossScale, Precision
from fsharding.public import missing_name as _missing_name
from fsharding.sharding.layout import Layout, plan_layout
from fsharding.sharding.named_sharding import Local, NamedSharding, typeof
from fsharding.sharding.partition_spec import DEFAULT_RULES, AxisRules, Fused, P
from fsharding.sharding.strategy import HFSDP, HSDP, Strategy, hybrid, parse_strategy, zero
from fsharding.testing import run_ranks
from fsharding.train import data
from fsharding.train.decoder_traffic import expected_traffic
from fsharding.train.evaluate import evaluate
from fsharding.train.microbatches import local_batch
from fsharding.train.reshard import explain_reshard, reshard, shard, unshard
from fsharding.train.setup import setup
from fsharding.train.state import TrainState, init_state, main_params, spread_main, state_bytes, state_from
from fsharding.train.step import Metrics, make_train_step, model_loss
from fsharding.train.update import update
from fsharding.transforms import policies
from fsharding.transforms.gather_unit import gather_unit, scatter_grads, select_unit
from fsharding.transforms.jacobians import hessian, jacfwd
from fsharding.transforms.remat import remat
from fsharding.transforms.scan import scan, scan_units, stack_units, unstack_units
from fsharding.transforms.shard_map import shard_map
from fsharding.transforms.value_and_grad import Loss, value_and_grad

__version__ = own_version()

__all__ = [
    "AbstractMesh",
    "AxisRules",
    "BF16",
    "DEFAULT_RULES",
    "FP16",
    "FP32",
    "Fused",
    "HFSDP",
    "HSDP",
    "Layout",
    "Local",
    "Loss",
    "LossScale",
    "Metrics",
    "NamedSharding",
    "P",
    "Precision",
    "Strategy",
    "TrainState",
    "adamw",
    "check_replicas",
    "checkpoint",
    "counting_bytes",
    "data",
    "data_position",
    "evaluate",
    "expected_traffic",
    "explain_reshard",
    "functionalize",
    "gather_unit",
    "global_norm",
    "hessian",
    "hf",
    "hybrid",
    "init_state",
    "is_main",
    "is_member",
    "jacfwd",
    "local_batch",
    "main_params",
    "make_mesh",
    "make_train_step",
    "model_from",
    "model_loss",
    "models",
    "notebook",
    "ops",
    "optim",
    "parse_strategy",
    "pipeline",
    "plan_layout",
    "policies",
    "preemption",
    "print0",
    "random",
    "recording",
    "redistribute",
    "remat",
    "reshard",
    "run_ranks",
    "scan",
    "scan_units",
    "scatter_grads",
    "select_unit",
    "set_mesh",
    "setup",
    "sgd",
    "shard",
    "shard_map",
    "spread_main",
    "stack_units",
    "state_bytes",
    "state_from",
    "tree",
    "typeof",
    "unshard",
    "unstack_units",
    "update",
    "value_and_grad",
    "zero",
]

_SHARD = "Plan it: layout = fs.plan_layout(model, mesh, strategy={}), then fs.init_state(model, opt, key, layout)."
_LOSS_GRAD = "Call fs.value_and_grad(loss_fn)(params, batch), which returns (value, grads)."
_COLLECTIVE = "Inside a loss function call {}, by the name of an axis."
_CLIP = "Write fs.optim.chain(fs.optim.clip_by_global_norm(1.0), opt)."
_ELSEWHERE = {
    **dict.fromkeys(("grad", "grad_and_value", "jacrev"), _LOSS_GRAD),
    "jit": "Nothing has to be traced: call the function. torch.compile(block) compiles a block.",
    "compile": "Use torch.compile on a block, or on a loss function.",
    **dict.fromkeys(("pmap", "vmap"), "Use torch.func.vmap inside fs.shard_map(fn), which gives each rank its part."),
    "Mesh": "Make one: fs.make_mesh(dp=-1).",
    **dict.fromkeys(("DeviceMesh", "init_device_mesh", "init_process_group"), "Call fs.make_mesh(dp=-1)."),
    "PartitionSpec": "Write fs.P.",
    **dict.fromkeys(("fully_shard", "fsdp", "FSDP", "FullyShardedDataParallel"), _SHARD.format("fs.zero(3)")),
    **dict.fromkeys(("DDP", "DistributedDataParallel"), _SHARD.format("fs.zero(0)")),
    **{f"zero{level}": f"Write fs.zero({level})." for level in range(4)},
    "device_put": "Call fs.shard(tree, layout).",
    "with_sharding_constraint": "Call fs.redistribute(tree, shardings).",
    **dict.fromkeys(("save", "load"), "Call fs.checkpoint.save(path, state), and fs.checkpoint.load(path, layout)."),
    **dict.fromkeys(("adam", "Adam", "AdamW"), "Write fs.adamw(1e-3)."),
    "SGD": "Write fs.sgd(0.1).",
    **dict.fromkeys(("clip_grad_norm_", "clip_grad_norm"), _CLIP),
    "no_sync": "Give make_train_step(..., microbatches=n), which accumulates gradients.",
    **dict.fromkeys(("tree_map", "map"), "Call fs.tree.map."),
    **dict.fromkeys(("PRNGKey", "key", "manual_seed"), "Make a key: fs.random.key(0)."),
    "psum": _COLLECTIVE.format("fs.ops.psum(x, axis)"),
    "all_gather": _COLLECTIVE.format("fs.ops.gather(x, axis, dim=0)"),
    "reduce_scatter": _COLLECTIVE.format("fs.ops.scatter(x, axis, dim=0)"),
    "all_reduce": _COLLECTIVE.format("fs.ops.psum(x, axis)"),
}

if not TYPE_CHECKING:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> object:
        raise _missing_name("fs", name, __all__, _ELSEWHERE)
