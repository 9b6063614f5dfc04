"""The names of strategies, ours and other libraries', apart from the values that they stand for.

Guarantee: no torch is imported here.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from fsharding.base.errors import did_you_mean

__all__ = ["STRATEGY_NAMES", "StrategyName", "meant_strategy"]

StrategyName: TypeAlias = Literal[
    "zero0", "zero1", "zero2", "zero3", "hfsdp", "no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp"
]
"""The names in `STRATEGIES`, for type checkers; `Strategy.parse` takes any text."""

STRATEGY_NAMES: tuple[str, ...] = get_args(StrategyName)  # the same, as a value

_ELSEWHERE = {
    "ddp": "zero0", "dp": "zero0", "replicate": "zero0", "shardgradop": "zero2",
    "fsdp": "zero3", "fsdp1": "zero3", "fsdp2": "zero3", "fullshard": "zero3", "deepspeed": "zero3",
    "hybridshard": "hsdp", "hybridshardzero2": "hsdp",
    **{f"{name}{level}": f"zero{level}" for name in ("zero", "stage", "zerostage") for level in range(4)},
}  # fmt: skip
"""Our strategies by the names that other libraries give them, in small letters and without signs."""


def meant_strategy(name: str) -> str:
    """A sentence to put after others, about the strategy that an unknown name means; "" where none is near."""
    ours = _ELSEWHERE.get("".join(c for c in name.lower() if c.isalnum()))
    return f" Here that is {ours!r}." if ours else did_you_mean(name, STRATEGY_NAMES)
