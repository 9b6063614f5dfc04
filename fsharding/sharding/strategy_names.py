"""Names of strategies, ours and other libraries', without importing torch, so that the command line starts fast."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from fsharding.base.errors import did_you_mean

__all__ = ["STRATEGY_NAMES", "StrategyName", "meant_strategy"]

StrategyName: TypeAlias = Literal[
    "zero0", "zero1", "zero2", "zero3", "hfsdp", "no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp"
]
"""The names in `STRATEGIES`, for type checkers; `Strategy.parse` accepts any text."""

STRATEGY_NAMES: tuple[str, ...] = get_args(StrategyName)

# Our strategies by their names in other libraries, in lower case and without punctuation.
_ELSEWHERE = {
    "ddp": "zero0", "dp": "zero0", "replicate": "zero0", "shardgradop": "zero2",
    "fsdp": "zero3", "fsdp1": "zero3", "fsdp2": "zero3", "fullshard": "zero3", "deepspeed": "zero3",
    "hybridshard": "hsdp", "hybridshardzero2": "hsdp",
    **{f"{name}{level}": f"zero{level}" for name in ("zero", "stage", "zerostage") for level in range(4)},
}  # fmt: skip


def meant_strategy(name: str) -> str:
    """Return a sentence, after a space, about the strategy that an unknown name means; "" if none is close."""
    ours = _ELSEWHERE.get("".join(c for c in name.lower() if c.isalnum()))
    return f" Here that is {ours!r}." if ours else did_you_mean(name, STRATEGY_NAMES)
