"""Optimizers as pairs of pure functions over trees of sharded leaves; see `fsharding.optim.base`."""

from fsharding.optim import schedules
from fsharding.optim.adafactor import AdafactorState, adafactor
from fsharding.optim.adam import AdamState, adamw
from fsharding.optim.averages import EmaState, LookaheadState, ema, ema_of, lookahead
from fsharding.optim.base import (
    ContextTransformation,
    EmptyState,
    GradientTransformation,
    InitContext,
    UpdateContext,
    like,
    local_leaves,
)
from fsharding.optim.clip import clip_by_global_norm, global_norm
from fsharding.optim.combine import ChainState, MultiTransformState, chain, multi_transform
from fsharding.optim.from_torch import TorchState, from_torch
from fsharding.optim.lion import LionState, lion
from fsharding.optim.muon import MuonState, muon
from fsharding.optim.noise import NoiseState, add_noise, annealed
from fsharding.optim.schedules import Schedule
from fsharding.optim.sgd import SgdState, sgd
from fsharding.optim.stacked import label_matrices, sum_dims
from fsharding.optim.updates import apply_gradients, apply_updates

__all__ = [
    "AdafactorState",
    "AdamState",
    "ChainState",
    "ContextTransformation",
    "EmaState",
    "EmptyState",
    "GradientTransformation",
    "InitContext",
    "LionState",
    "LookaheadState",
    "MultiTransformState",
    "MuonState",
    "NoiseState",
    "Schedule",
    "SgdState",
    "TorchState",
    "UpdateContext",
    "adafactor",
    "adamw",
    "add_noise",
    "annealed",
    "apply_gradients",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "ema",
    "ema_of",
    "from_torch",
    "global_norm",
    "label_matrices",
    "like",
    "lion",
    "local_leaves",
    "lookahead",
    "multi_transform",
    "muon",
    "schedules",
    "sgd",
    "sum_dims",
]
