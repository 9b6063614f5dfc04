"""The public names of `fsharding`, which the package has from here when the first of them is asked for."""

from fsharding import formats, ops, optim, pipeline
from fsharding.base import errors, tree
from fsharding.base.shared import Shared
from fsharding.comm.redistribute import redistribute
from fsharding.formats.precision import BF16, FP8, FP8_BLOCK, FP16, FP32, MXFP8, NVFP4, Precision
from fsharding.mesh import preemption
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import data_rank_and_size, is_member, is_rank0, make_mesh, print0, set_mesh
from fsharding.optim import adamw, global_norm, sgd
from fsharding.sharding import random
from fsharding.sharding.layout import Layout, plan_layout
from fsharding.sharding.named_sharding import Local, NamedSharding, typeof
from fsharding.sharding.partition_spec import DEFAULT_RULES, AxisRules, Fused, P
from fsharding.sharding.strategy import Strategy, hybrid, zero
from fsharding.train.buffers import sync_buffers
from fsharding.train.capture import capture
from fsharding.train.evaluate import evaluate
from fsharding.train.microbatches import local_batch
from fsharding.train.reshard import reshard, shard, unshard
from fsharding.train.setup import setup
from fsharding.train.state import TrainState, init_state, main_params, params_from_main, state_from_params
from fsharding.train.step import Metrics, make_train_step, model_loss
from fsharding.train.step_options import StepOptions
from fsharding.train.update import update
from fsharding.transforms import policies
from fsharding.transforms.gather_unit import gather_unit, scatter_grads, select_unit
from fsharding.transforms.jacobians import hessian, jacfwd
from fsharding.transforms.remat import remat
from fsharding.transforms.scan import scan, scan_units, stack_units, unstack_units
from fsharding.transforms.shard_map import shard_map
from fsharding.transforms.value_and_grad import Loss, value_and_grad

__all__ = [
    "AbstractMesh", "AxisRules", "BF16", "DEFAULT_RULES", "FP16", "FP32", "FP8", "FP8_BLOCK", "Fused", "Layout",
    "Local", "Loss", "MXFP8", "Metrics", "NVFP4", "NamedSharding", "P", "Precision", "Shared", "StepOptions",
    "Strategy", "TrainState", "adamw", "capture", "data_rank_and_size", "errors", "evaluate", "formats", "gather_unit",
    "global_norm", "hessian", "hybrid", "init_state", "is_member", "is_rank0", "jacfwd", "local_batch", "main_params",
    "make_mesh", "make_train_step", "model_loss", "ops", "optim", "params_from_main", "pipeline", "plan_layout",
    "policies", "preemption", "print0", "random", "redistribute", "remat", "reshard", "scan", "scan_units",
    "scatter_grads", "select_unit", "set_mesh", "setup", "sgd", "shard", "shard_map", "stack_units",
    "state_from_params", "sync_buffers", "tree", "typeof", "unshard", "unstack_units", "update", "value_and_grad",
    "zero",
]  # fmt: skip
