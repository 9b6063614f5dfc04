"""The public names of `fsharding`, which the package itself has from here when the first of them is asked for.

In: modules of every room. Out: their public names, in one place.
Guarantee: names in `__all__` are public, as `docs/reference/stability.md` says; all others may change.
"""

from fsharding import checkpoint, foreign, formats, models, ops, optim, pipeline
from fsharding.base import errors, tree
from fsharding.checkpoint.replicas import check_replicas
from fsharding.comm.counters import counting_bytes, recording
from fsharding.comm.redistribute import redistribute
from fsharding.formats import Blocks
from fsharding.formats.precision import BF16, FP8, FP8_BLOCK, FP16, FP32, MXFP8, NVFP4, LossScale, Precision
from fsharding.formats.quantized import Quantized, dequantize, quantize
from fsharding.interop import hf
from fsharding.interop.module.functionalize import functionalize
from fsharding.interop.module.model_from import model_from
from fsharding.mesh import preemption
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import data_position, is_main, is_member, make_mesh, print0, set_mesh
from fsharding.optim import adamw, global_norm, sgd
from fsharding.sharding import random
from fsharding.sharding.layout import Layout, plan_layout
from fsharding.sharding.named_sharding import Local, NamedSharding, typeof
from fsharding.sharding.partition_spec import DEFAULT_RULES, AxisRules, Fused, P
from fsharding.sharding.strategy import HFSDP, HSDP, Strategy, hybrid, parse_strategy, zero
from fsharding.testing import run_ranks
from fsharding.train.buffers import sync_buffers
from fsharding.train.capture import capture
from fsharding.train.evaluate import evaluate
from fsharding.train.foresight import expected_traffic
from fsharding.train.microbatches import local_batch
from fsharding.train.reshard import explain_reshard, reshard, shard, unshard
from fsharding.train.setup import setup
from fsharding.train.state import TrainState, init_state, main_params, spread_main, state_bytes, state_from
from fsharding.train.step import Metrics, make_train_step, model_loss
from fsharding.train.step_options import StepOptions
from fsharding.train.update import update
from fsharding.transforms import policies
from fsharding.transforms.compare_units import compare_units
from fsharding.transforms.gather_unit import gather_unit, scatter_grads, select_unit
from fsharding.transforms.jacobians import hessian, jacfwd
from fsharding.transforms.remat import remat
from fsharding.transforms.scan import scan, scan_units, stack_units, unstack_units
from fsharding.transforms.shard_map import shard_map
from fsharding.transforms.value_and_grad import Loss, value_and_grad

__all__ = [
    "AbstractMesh",
    "AxisRules",
    "BF16",
    "Blocks",
    "DEFAULT_RULES",
    "FP16",
    "FP32",
    "FP8",
    "FP8_BLOCK",
    "Fused",
    "HFSDP",
    "HSDP",
    "Layout",
    "Local",
    "Loss",
    "LossScale",
    "MXFP8",
    "Metrics",
    "NVFP4",
    "NamedSharding",
    "P",
    "Precision",
    "Quantized",
    "StepOptions",
    "Strategy",
    "TrainState",
    "adamw",
    "capture",
    "check_replicas",
    "checkpoint",
    "compare_units",
    "counting_bytes",
    "data_position",
    "dequantize",
    "errors",
    "evaluate",
    "expected_traffic",
    "explain_reshard",
    "foreign",
    "formats",
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
    "ops",
    "optim",
    "parse_strategy",
    "pipeline",
    "plan_layout",
    "policies",
    "preemption",
    "print0",
    "quantize",
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
    "sync_buffers",
    "tree",
    "typeof",
    "unshard",
    "unstack_units",
    "update",
    "value_and_grad",
    "zero",
]
