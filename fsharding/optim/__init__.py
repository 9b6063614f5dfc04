"""Optimizers as pairs of pure functions over trees of sharded leaves."""

from typing import TYPE_CHECKING

from fsharding.base import registry as _registry
from fsharding.base.public import missing_name as _missing_name
from fsharding.optim import schedules
from fsharding.optim.adam import AdamState, adamw
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
from fsharding.optim.lion import LionState, lion
from fsharding.optim.muon import MuonState, muon
from fsharding.optim.schedules import Schedule
from fsharding.optim.sgd import SgdState, sgd
from fsharding.optim.stacked import label_matrices, no_decay, sum_dims
from fsharding.optim.updates import apply_gradients, apply_updates

__all__ = [
    "AdamState", "ChainState", "CodedMoment", "ContextTransformation", "ElementwiseState", "EmptyState",
    "GradientTransformation", "InitContext", "LionState", "MultiTransformState", "MuonState", "Schedule", "SgdState",
    "UpdateContext", "adamw", "apply_gradients", "apply_updates", "chain", "clip_by_global_norm", "elementwise",
    "global_norm", "label_matrices", "like", "lion", "local_leaves", "multi_transform", "muon", "no_decay",
    "schedules", "sgd", "sum_dims",
]  # fmt: skip

_ELSEWHERE = {
    **dict.fromkeys(("adam", "Adam", "AdamW"), "Write fs.adamw(1e-3)."),
    "SGD": "Write fs.sgd(0.1).",
    "RMSprop": "Write fs.optim.from_torch(torch.optim.RMSprop).",
    **dict.fromkeys(("Muon", "Lion", "Adafactor"), "Write its name in lower case, such as fs.optim.muon."),
    **dict.fromkeys(
        ("clip", "clip_grad_norm_", "clip_grad_norm"), "Write fs.optim.chain(fs.optim.clip_by_global_norm(1.0), opt)."
    ),
    "masked": "Write fs.optim.multi_transform.",
    **dict.fromkeys(
        ("lr_scheduler", "warmup_cosine_decay_schedule", "cosine_decay_schedule", "inject_hyperparams"),
        "Pass a schedule as the learning rate: fs.adamw(fs.optim.schedules.warmup_cosine(3e-4, 9, 99)).",
    ),
}

for _name in _ELSEWHERE:  # such as the modules `adam` and `clip`: calling a module would raise a useless error
    globals().pop(_name, None)

if TYPE_CHECKING:
    from fsharding.contrib.optim import adafactor as _adafactor
    from fsharding.contrib.optim import from_torch as _from_torch
    from fsharding.contrib.optim import wrappers as _wrappers
    from fsharding.contrib.optim.adafactor import *  # noqa: F403
    from fsharding.contrib.optim.from_torch import *  # noqa: F403
    from fsharding.contrib.optim.wrappers import *  # noqa: F403

    __all__ += _adafactor.__all__
    __all__ += _from_torch.__all__
    __all__ += _wrappers.__all__
else:  # with __getattr__, a type checker would accept any name
    __all__ += _registry.names_of("optimizer")

    def __getattr__(name: str) -> object:
        if name in _registry.names_of("optimizer"):
            return globals().setdefault(name, _registry.find("optimizer", name))
        raise _missing_name("fs.optim", name, __all__, _ELSEWHERE)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
