"""Optimizers as pairs of pure functions over trees of sharded leaves; see `fsharding.optim.base`."""

from typing import TYPE_CHECKING

from fsharding.base.public import missing_name as _missing_name
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
from fsharding.optim.coded_moment import CodedMoment
from fsharding.optim.combine import ChainState, MultiTransformState, chain, multi_transform
from fsharding.optim.elementwise import ElementwiseState, elementwise
from fsharding.optim.from_torch import TorchState, from_torch
from fsharding.optim.lion import LionState, lion
from fsharding.optim.muon import MuonState, muon
from fsharding.optim.noise import NoiseState, add_noise, annealed
from fsharding.optim.schedules import Schedule
from fsharding.optim.sgd import SgdState, sgd
from fsharding.optim.stacked import label_matrices, no_decay, sum_dims
from fsharding.optim.updates import apply_gradients, apply_updates

__all__ = [
    "AdafactorState",
    "AdamState",
    "ChainState",
    "CodedMoment",
    "ContextTransformation",
    "ElementwiseState",
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
    "elementwise",
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
    "no_decay",
    "schedules",
    "sgd",
    "sum_dims",
]

_ELSEWHERE = {
    **dict.fromkeys(("adam", "Adam", "AdamW"), "Write fs.adamw(1e-3)."),
    "SGD": "Write fs.sgd(0.1).",
    "RMSprop": "Write fs.optim.from_torch(torch.optim.RMSprop).",
    **dict.fromkeys(("Muon", "Lion", "Adafactor"), "Its name is in small letters, such as fs.optim.muon."),
    **dict.fromkeys(
        ("clip", "clip_grad_norm_", "clip_grad_norm"), "Write fs.optim.chain(fs.optim.clip_by_global_norm(1.0), opt)."
    ),
    "masked": "Write fs.optim.multi_transform.",
    **dict.fromkeys(
        ("lr_scheduler", "warmup_cosine_decay_schedule", "cosine_decay_schedule", "inject_hyperparams"),
        "A learning rate may be a function of the number of updates: fs.optim.schedules.warmup_cosine(3e-4, 9, 99).",
    ),
}

for _name in _ELSEWHERE:  # such as the modules `adam` and `clip`: a call of a module says nothing
    globals().pop(_name, None)

if not TYPE_CHECKING:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> object:
        raise _missing_name("fs.optim", name, __all__, _ELSEWHERE)
