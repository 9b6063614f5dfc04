"""Optimizers as pairs of pure functions over trees of sharded leaves; see `fsharding.optim.base`."""

from fsharding.optim.adafactor import AdafactorState, adafactor
from fsharding.optim.adam import AdamState, adamw
from fsharding.optim.averages import EmaState, LookaheadState, ema, ema_of, lookahead
from fsharding.optim.base import (
    ChainState,
    EmptyState,
    GradientTransformation,
    MaskedState,
    chain,
    like,
    local_leaves,
    masked,
    multi_transform,
)
from fsharding.optim.clip import clip_by_global_norm, global_norm
from fsharding.optim.from_torch import TorchState, from_torch
from fsharding.optim.lion import LionState, lion
from fsharding.optim.muon import MuonState, muon
from fsharding.optim.noise import NoiseState, add_noise, annealed
from fsharding.optim.router_bias import against_load, set_loads_apart
from fsharding.optim.schedules import Schedule, constant, linear, warmup_cosine
from fsharding.optim.sgd import SgdState, sgd
from fsharding.optim.stacked import label_matrices, sum_dims
from fsharding.optim.updates import apply_gradients, apply_updates

__all__ = [
    "AdafactorState",
    "AdamState",
    "ChainState",
    "EmaState",
    "EmptyState",
    "GradientTransformation",
    "LionState",
    "LookaheadState",
    "MaskedState",
    "MuonState",
    "NoiseState",
    "Schedule",
    "SgdState",
    "TorchState",
    "adafactor",
    "adamw",
    "add_noise",
    "against_load",
    "annealed",
    "apply_gradients",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "ema",
    "ema_of",
    "from_torch",
    "global_norm",
    "label_matrices",
    "like",
    "linear",
    "lion",
    "local_leaves",
    "lookahead",
    "masked",
    "multi_transform",
    "muon",
    "set_loads_apart",
    "sgd",
    "sum_dims",
    "warmup_cosine",
]
