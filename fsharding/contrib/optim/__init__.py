"""Optimizers that `fs.optim` imports at their first use: Adafactor, averages of parameters, noise, and torch's own."""

from fsharding.contrib.optim.adafactor import AdafactorState, adafactor
from fsharding.contrib.optim.from_torch import TorchState, from_torch
from fsharding.contrib.optim.wrappers import (
    EmaState,
    LookaheadState,
    NoiseState,
    add_noise,
    annealed,
    ema,
    ema_of,
    lookahead,
)

__all__ = [
    "AdafactorState", "EmaState", "LookaheadState", "NoiseState", "TorchState", "adafactor", "add_noise", "annealed",
    "ema", "ema_of", "from_torch", "lookahead",
]  # fmt: skip
