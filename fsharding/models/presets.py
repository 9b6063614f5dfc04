"""Published models and settings to train them, for `--preset`; each family has a tiny version for a laptop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fsharding.base.errors import ConfigError, did_you_mean, message
from fsharding.base.public import public
from fsharding.models.decoder import DecoderConfig, Stack, decoder
from fsharding.models.latent_attention import MLA
from fsharding.models.model import Model
from fsharding.models.moe import Experts
from fsharding.ops.rotary import LlamaScaling, YarnScaling

__all__ = [
    "RECIPES", "Recipe", "deepseek_v3", "llama3_8b", "llama3_70b", "llama3_405b", "mixtral_8x7b", "qwen2_5_72b",
    "recipe", "tiny_deepseek_v3", "tiny_llama3", "tiny_mixtral", "tiny_qwen2_5",
]  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A model and settings to train it with AdamW.

    Attributes:
        config: Sizes of the decoder.
        learning_rate: Peak learning rate.
        warmup: Number of steps of linear warm-up.
        weight_decay: Weight decay of matrices; norms and biases have none.

    Example:
        >>> chosen = fs.models.presets.tiny_llama3()
        >>> chosen.learning_rate, chosen.warmup
        (0.004, 20)
    """

    config: DecoderConfig
    learning_rate: float = 3e-4
    warmup: int = 100
    weight_decay: float = 0.1

    def model(self, **options: Any) -> Model:
        """Build the `Model` of the config, with options of `models.decoder`, such as `sequence=True`."""
        return decoder(self.config, **options)


# ---------------------------------------------------------------------------------------------------- published models
def llama3_8b() -> Recipe:
    """Build the recipe of Llama 3.1 8B (Grattafiori et al. 2024, arXiv:2407.21783, table 3): 8,030,261,248 parameters.

    Example:
        >>> fs.models.presets.llama3_8b().config.layers
        32
    """
    return Recipe(_llama3(4096, 32, 32, 14_336), 3e-4, warmup=8000)


def llama3_70b() -> Recipe:
    """Build the recipe of Llama 3.1 70B (arXiv:2407.21783, table 3): 70,553,706,496 parameters.

    Example:
        >>> fs.models.presets.llama3_70b().config.layers
        80
    """
    return Recipe(_llama3(8192, 80, 64, 28_672), 1.5e-4, warmup=8000)


def llama3_405b() -> Recipe:
    """Build the recipe of Llama 3.1 405B (arXiv:2407.21783, table 3): 405,853,388,800 parameters.

    Example:
        >>> fs.models.presets.llama3_405b().config.layers
        126
    """
    return Recipe(_llama3(16_384, 126, 128, 53_248), 8e-5, warmup=8000)


def _llama3(dim: int, layers: int, heads: int, hidden: int) -> DecoderConfig:
    scaling = LlamaScaling()
    return DecoderConfig(128_256, dim, layers, heads, 8, hidden, rope_base=500_000.0, rope_scaling=scaling)


def qwen2_5_72b() -> Recipe:
    """Build the recipe of Qwen2.5 72B (Qwen Team 2024, arXiv:2412.15115): 72,706,203,648 parameters.

    Example:
        >>> fs.models.presets.qwen2_5_72b().config.layers
        80
    """
    return Recipe(DecoderConfig(152_064, 8192, 80, 64, 8, 29_568, bias=True, rope_base=1_000_000.0))


def mixtral_8x7b() -> Recipe:
    """Build the recipe of Mixtral 8x7B (Jiang et al. 2024, arXiv:2401.04088, table 1): 46,702,792,704 parameters.

    The authors don't publish the factor of the balance loss; this one is from Switch (arXiv:2101.03961).

    Example:
        >>> fs.models.presets.mixtral_8x7b().config.layers
        32
    """
    experts = Experts(8, 2, 14_336, balance=1e-2)
    return Recipe(DecoderConfig(32_000, 4096, 32, 32, 8, 14_336, rope_base=1_000_000.0, experts=experts))


def deepseek_v3() -> Recipe:
    """Build the recipe of DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437, sec. 4.2): 671,026,419,200 parameters.

    Three dense blocks, then 58 with experts, balanced by 58 x 256 router biases (in the count). Without the multi-token
    prediction module and the sequence-wise balance loss.

    Example:
        >>> [stack.layers for stack in fs.models.presets.deepseek_v3().config.stacks]
        [3, 58]
    """
    latent = MLA(128, 1536, 512, plain_dim=128, rotary_dim=64, value_dim=128, rope_scaling=YarnScaling())
    experts = Experts(256, 8, 2048, shared=1, score="sigmoid", scale=2.5, groups=8, kept_groups=4, bias_rate=1e-3)
    stacks = (Stack("dense", 3), Stack("routed", 58, experts=experts))
    config = DecoderConfig(129_280, 7168, 61, intermediate_size=18_432, eps=1e-6, attention=latent, stacks=stacks)
    return Recipe(config, 2.2e-4, warmup=2000)


# ------------------------------------------------------------------------------------------------------- tiny versions
def tiny_llama3() -> Recipe:
    """Build the recipe of a tiny Llama 3.1, with an original context of 64 tokens: short rows use the rotary scaling.

    Example:
        >>> fs.models.presets.tiny_llama3().config.layers
        4
    """
    scaling = LlamaScaling(length=64)
    return _tiny(DecoderConfig(heads=8, kv_heads=2, rope_base=500_000.0, rope_scaling=scaling))


def tiny_qwen2_5() -> Recipe:
    """Build the recipe of a tiny Qwen2.5.

    Example:
        >>> fs.models.presets.tiny_qwen2_5().config.layers
        4
    """
    return _tiny(DecoderConfig(heads=8, kv_heads=2, bias=True, rope_base=1_000_000.0))


def tiny_mixtral() -> Recipe:
    """Build the recipe of a tiny Mixtral.

    Example:
        >>> fs.models.presets.tiny_mixtral().config.layers
        4
    """
    experts = Experts(8, 2, 192, balance=1e-2)
    return _tiny(DecoderConfig(heads=8, intermediate_size=192, rope_base=1_000_000.0, experts=experts))


def tiny_deepseek_v3() -> Recipe:
    """Build the recipe of a tiny DeepSeek-V3, with an original context of 64 tokens.

    Example:
        >>> [stack.layers for stack in fs.models.presets.tiny_deepseek_v3().config.stacks]
        [1, 3]
    """
    scaling = YarnScaling(length=64, fast=8.0)
    latent = MLA(4, 48, 32, plain_dim=16, rotary_dim=16, value_dim=24, rope_scaling=scaling)
    experts = Experts(16, 4, 64, shared=1, score="sigmoid", scale=2.5, groups=4, kept_groups=2, bias_rate=1e-3)
    stacks = (Stack("dense", 1), Stack("routed", 3, experts=experts))
    return _tiny(DecoderConfig(eps=1e-6, attention=latent, stacks=stacks))


def _tiny(config: DecoderConfig) -> Recipe:
    return Recipe(config, learning_rate=4e-3, warmup=20)


_MAKERS = (
    llama3_8b, llama3_70b, llama3_405b, qwen2_5_72b, mixtral_8x7b, deepseek_v3,
    tiny_llama3, tiny_qwen2_5, tiny_mixtral, tiny_deepseek_v3,
)  # fmt: skip

_BENCH = DecoderConfig(8192, 512, 8, 8, 8, 1408)
_TINY_EXPERTS = Experts(8, 2, 192, shared=1, score="sigmoid", balance=1e-3, z=1e-3, bias_rate=1e-3)

RECIPES = {
    "tiny": _tiny(DecoderConfig()),
    "tiny-moe": _tiny(DecoderConfig(experts=_TINY_EXPERTS)),
    "bench-1b": Recipe(DecoderConfig(32_768, 2048, 16, 16, 16, 5632)),
    "bench-34m": Recipe(_BENCH),
    "bench-deep": Recipe(replace(_BENCH, dim=256, layers=16, heads=4, kv_heads=4, intermediate_size=704)),
    "bench-wide": Recipe(replace(_BENCH, dim=1024, layers=4, heads=16, kv_heads=16, intermediate_size=2816)),
    "bench-moe": Recipe(replace(_BENCH, experts=Experts(8, 2, 352))),
    **{make.__name__: make() for make in _MAKERS},
}
"""Recipes by name."""


@public
def recipe(name: str) -> Recipe:
    """Look up a recipe by name.

    Args:
        name: Key of `RECIPES`; `-` and `.` match `_`.

    Returns:
        The `Recipe`.

    Raises:
        ConfigError: The name is unknown.

    Example:
        >>> fs.models.presets.recipe("llama3-8b") == fs.models.presets.llama3_8b()
        True
    """
    underscores = str.maketrans("-.", "__")
    for known, found in RECIPES.items():
        if known.translate(underscores) == name.translate(underscores):
            return found
    mend = f"Presets are {', '.join(RECIPES)}.{did_you_mean(name, RECIPES)}"
    raise ConfigError(message(f"has no preset {name!r}.", mend=mend))
