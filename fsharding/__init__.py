"""JAX-style functional sharding over torch: pure functions over sharded parameter pytrees.

`docs/tour.md` teaches all of it on one page. Start with `make_mesh`, `plan_layout`, `init_state`, `make_train_step`.
"""

from fsharding import checkpoint, data, families, hf, models, ops, optim, policies, preemption, random, recipes, tree
from fsharding.actions import Action
from fsharding.autodiff import value_and_grad
from fsharding.axes import AbstractMesh
from fsharding.checkpoint.replicas import check_replicas
from fsharding.counts import Traffic, counting_bytes, recording
from fsharding.decoder_traffic import expected_traffic
from fsharding.functionalize import PureModule, functionalize
from fsharding.in_flight import shard_map
from fsharding.jacobians import hessian, jacfwd
from fsharding.layout import Layout, Memory, plan_layout
from fsharding.mesh import data_position, is_member, make_mesh, set_mesh
from fsharding.models.base import Model
from fsharding.optim import (
    GradientTransformation,
    adamw,
    apply_updates,
    chain,
    clip_by_global_norm,
    constant,
    global_norm,
    linear,
    masked,
    sgd,
    warmup_cosine,
)
from fsharding.pipeline import pipeline_grads
from fsharding.precision import BF16, FP16, FP32, LossScale, Precision
from fsharding.redistribute import redistribute
from fsharding.remat import remat
from fsharding.reshard import explain_reshard, reshard, shard, unshard
from fsharding.scan import scan, scan_units, stack_units, unstack_units
from fsharding.schedule import Schedule, check_schedule, layers_of, make_schedule, plan_schedule, stages_for
from fsharding.sharding import Assigned, Local, NamedSharding, typeof
from fsharding.show import draw_schedule
from fsharding.spec import DEFAULT_RULES, AxisRules, Fused, P, PartitionSpec
from fsharding.stacks import scan_stacks
from fsharding.staged_module import model_from
from fsharding.staging import stages_of
from fsharding.state import TrainState, init_state, main_params, spread_main, state_bytes, state_from
from fsharding.step import Metrics, make_train_step, model_loss
from fsharding.strategy import (
    HFSDP,
    HSDP,
    NO_SHARD,
    OPTIM,
    OPTIM_GRADS,
    OPTIM_GRADS_PARAMS,
    Strategy,
    hybrid,
    parse_strategy,
    zero,
)
from fsharding.testing import run_ranks
from fsharding.transforms import gather_unit, scatter_grads, select_unit

__all__ = [
    "BF16", "DEFAULT_RULES", "FP16", "FP32", "HFSDP", "HSDP", "NO_SHARD", "OPTIM", "OPTIM_GRADS", "OPTIM_GRADS_PARAMS",
    "P", "AbstractMesh", "Action", "Assigned", "AxisRules", "Fused", "GradientTransformation", "Layout", "Local",
    "LossScale", "Memory", "Metrics", "Model", "NamedSharding", "PartitionSpec", "Precision", "Schedule", "Strategy",
    "PureModule", "Traffic", "TrainState", "adamw", "apply_updates", "chain", "check_schedule", "checkpoint",
    "check_replicas", "clip_by_global_norm",
    "constant", "counting_bytes", "data", "data_position", "draw_schedule", "expected_traffic", "explain_reshard",
    "families", "functionalize", "gather_unit", "global_norm", "hessian", "hf", "hybrid", "init_state",
    "is_member", "jacfwd", "layers_of", "linear", "main_params", "make_mesh", "make_schedule", "make_train_step",
    "masked", "model_from", "model_loss", "models", "ops", "optim", "parse_strategy", "pipeline_grads", "plan_layout",
    "plan_schedule", "policies", "preemption", "random", "recipes",
    "recording", "redistribute", "remat", "reshard", "run_ranks", "scan", "scan_stacks", "scan_units", "scatter_grads",
    "select_unit", "set_mesh", "sgd", "shard", "shard_map", "spread_main", "stack_units", "stages_of", "stages_for",
    "state_bytes", "state_from", "tree", "typeof", "unshard", "unstack_units", "value_and_grad", "warmup_cosine",
    "zero",
]  # fmt: skip
