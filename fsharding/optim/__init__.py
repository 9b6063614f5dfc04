"""Optimizers as pairs of pure functions over trees of sharded leaves; see `fsharding.optim.base`."""

from fsharding.optim.adam import AdamState, adamw
from fsharding.optim.apply import apply_gradients, apply_updates
from fsharding.optim.balance import against_load, set_loads_apart
from fsharding.optim.base import (
    ChainState,
    EmptyState,
    GradientTransformation,
    MaskedState,
    chain,
    like,
    local_leaves,
    masked,
)
from fsharding.optim.clip import clip_by_global_norm, global_norm
from fsharding.optim.schedules import Schedule, constant, linear, warmup_cosine
from fsharding.optim.sgd import SgdState, sgd

__all__ = [
    "AdamState",
    "ChainState",
    "EmptyState",
    "GradientTransformation",
    "MaskedState",
    "Schedule",
    "SgdState",
    "adamw",
    "against_load",
    "apply_gradients",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "global_norm",
    "like",
    "linear",
    "local_leaves",
    "masked",
    "set_loads_apart",
    "sgd",
    "warmup_cosine",
]
