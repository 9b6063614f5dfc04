"""Named models with settings that train them: what `--preset` takes.

In: a name. Out: a `Recipe`, a pure value. `tiny` learns Python from its own standard library on a laptop, `tiny-moe`
with experts; `bench-34m` is the model of the benchmarks.
Law: a recipe holds no tensors, so planning one of any size is free.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from fsharding.errors import ConfigError, message
from fsharding.models.decoder import DecoderConfig
from fsharding.models.experts import Experts

__all__ = ["RECIPES", "Recipe", "recipe"]


@dataclass(frozen=True)
class Recipe:
    """A model and how to train it.

    Attributes:
        config: sizes of the decoder.
        learning_rate: peak rate of AdamW.
        warmup: steps of linear warm-up.
        weight_decay: of matrices; norms have none.
    """

    config: DecoderConfig
    learning_rate: float = 3e-4
    warmup: int = 100
    weight_decay: float = 0.1


RECIPES = {
    "tiny": Recipe(DecoderConfig(), learning_rate=4e-3, warmup=20),
    "tiny-moe": Recipe(
        DecoderConfig(experts=Experts(8, 2, 192, shared=1, score="sigmoid", balance=1e-3, z=1e-3, bias_rate=1e-3)),
        learning_rate=4e-3,
        warmup=20,
    ),
    "bench-34m": Recipe(DecoderConfig(vocab=8192, dim=512, layers=8, heads=8, kv_heads=8, hidden=1408)),
}
"""Recipes by name."""


def recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        known = f"Presets are {', '.join(RECIPES)}.{hint}"
        raise ConfigError(message("fsharding train", f"knows no preset {name!r}.", mend=known))
    return RECIPES[name]
