"""Strategies: which of params, grads and opt_state are sharded over the data axes, and over the outer `replica` axis.

Guarantee: a strategy changes memory and communication, never the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fsharding.base.errors import ConfigError, message
from fsharding.base.public import kind_of, public
from fsharding.sharding.memory_kinds import HERE, Choice, choices_of, chosen_kind
from fsharding.sharding.strategy_names import meant_strategy

__all__ = [
    "HFSDP", "HSDP", "NO_SHARD", "OPTIM", "OPTIM_GRADS", "OPTIM_GRADS_PARAMS", "STRATEGIES", "Strategy", "hybrid",
    "strategy_of", "zero",
]  # fmt: skip


@dataclass(frozen=True)
class Strategy:
    """What is sharded over the data axes `dp`, `ep` and `cp`, and over the outer `replica` axis.

    `fs.zero` and `fs.hybrid` make the usual ones (ZeRO, arXiv:1910.02054; MiCS, arXiv:2205.00119).

    Attributes:
        params: Whether parameters are sharded over the data axes.
        grads: Whether accumulated gradients are, which are then reduce-scattered per microbatch, not once per step.
        opt_state: Whether main parameters and moments are.
        replica_params, replica_grads, replica_opt_state: Whether each is sharded over `replica` as well.
        memory: Memory kinds other than the device's, by role and path; set by `with_memory`.

    Example:
        >>> print(fs.zero(2))
        zero2
        >>> fs.zero(2).grads, fs.zero(2).params
        (True, False)
    """

    params: bool
    grads: bool
    opt_state: bool
    replica_params: bool = False
    replica_grads: bool = False
    replica_opt_state: bool = False
    memory: tuple[Choice, ...] = ()

    @public
    def with_memory(self, **memory: str | Mapping[str, str]) -> Strategy:
        """Return this strategy with some roles in host memory or on disk.

        Units are copied to the device when they are gathered. An update runs on the device, chunk by chunk, or on the
        host. On a CPU, "host" changes nothing.

        Args:
            **memory: Memory kind by role: "device", "host" (pinned memory) or "disk" (a file in `$FSHARDING_DISK`). Or
                a dict of kinds by path prefix, as in `moments={"blocks": "host"}`; the longest prefix counts. Roles
                are `params`, `grads`, `moments`, `main` (main parameters; default: that of `params`; a separate copy
                if different) and `compute`. `compute="host"` updates leaves on the CPU, with moments and main
                parameters in host memory unless they are set to "disk".

        Returns:
            A `Strategy`; a role that is set replaces the earlier choice.

        Raises:
            ConfigError: Unknown roles or memory kinds, all listed.

        Example:
            >>> print(fs.zero(3).with_memory(moments="host", main={"blocks": "disk"}))
            zero3 with main of blocks on disk, moments on the host
        """
        choices = [*choices_of(memory), *(c for c in self.memory if c.role not in memory)]
        away = {c.role for c in choices if c.kind != HERE}
        away |= {"main"} if "params" in away else set()
        away |= {"main", "moments"} if "compute" in away else set()
        return replace(self, memory=tuple(sorted(c for c in choices if c.role in away)))

    def memory_of(self, role: str, path: str) -> str:
        """Return the memory kind of a leaf in a role."""
        return chosen_kind(self.memory, role, path)

    def cut(self, kind: str, axis: str) -> bool:
        """Return whether `kind` (params, grads, opt_state) is sharded over a data axis."""
        return bool(getattr(self, f"replica_{kind}" if axis == "replica" else kind))

    @staticmethod
    @public
    def parse(name: str) -> Strategy:
        """Return the strategy of a name.

        Args:
            name: "zero0" to "zero3", "hsdp", "hfsdp", or Megatron FSDP's "no_shard", "optim", "optim_grads" and
                "optim_grads_params". Others raise a `ConfigError`.

        Example:
            >>> fs.Strategy.parse("zero3") == fs.zero(3)
            True
        """
        return strategy_of(name)

    def __str__(self) -> str:
        if self.memory:
            return f"{replace(self, memory=())} with {', '.join(map(str, self.memory))}"
        named = {strategy: name for name, strategy in reversed(STRATEGIES.items())}  # the first name of each wins
        if self in named:
            return named[self]
        kinds = ("params", "grads", "opt_state")
        inner = ", ".join(f"{kind}={self.cut(kind, 'dp')}" for kind in kinds)
        name = named.get(Strategy(self.params, self.grads, self.opt_state), f"Strategy({inner})")
        outer = [f"{kind}=True" for kind in kinds if self.cut(kind, "replica")]
        return f"hybrid({', '.join([name, *outer])})" if outer else name


def strategy_of(name: Any) -> Strategy:
    """Return the strategy of a name, or raise in the name of the public call."""
    if not isinstance(name, str) or name not in STRATEGIES:
        given = kind_of(name) if callable(name) else repr(name)
        known = f"Strategies are {', '.join(STRATEGIES)}.{_hint(name)}"
        raise ConfigError(message(f"got an unknown strategy, {given}.", mend=known))
    return STRATEGIES[name]


NO_SHARD = Strategy(params=False, grads=False, opt_state=False)
OPTIM = Strategy(params=False, grads=False, opt_state=True)
OPTIM_GRADS = Strategy(params=False, grads=True, opt_state=True)
OPTIM_GRADS_PARAMS = Strategy(params=True, grads=True, opt_state=True)


_LEVELS = "Levels are 0 (nothing is sharded), 1 (optimizer state), 2 (gradients too) and 3 (parameters too)."


@public
def zero(level: Literal[0, 1, 2, 3]) -> Strategy:
    """Return a ZeRO stage (Rajbhandari et al. 2020, arXiv:1910.02054); `zero(3)` is FSDP.

    Args:
        level: 0 shards nothing (DDP), 1 the optimizer state, 2 gradients as well, 3 parameters as well.

    Returns:
        A `Strategy` that shards over `dp`, `ep` and `cp`, but not over `replica`.

    Raises:
        ConfigError: A level other than 0 to 3.

    Example:
        >>> fs.zero(3).params
        True
    """
    levels = (NO_SHARD, OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS)
    if type(level) is not int or level not in range(4):
        raise ConfigError(message(f"got an unknown level, {level!r}.", mend=_LEVELS))
    return levels[level]


@public
def hybrid(
    inner: Strategy = OPTIM_GRADS_PARAMS, *, params: bool = False, grads: bool = False, opt_state: bool = False
) -> Strategy:
    """Combine a strategy over the data axes with an outer `replica` axis.

    `hybrid()` is HSDP: sharded within a replica, copied across replicas (MiCS, Zhang et al. 2022, arXiv:2205.00119).
    `hybrid(opt_state=True)` is Megatron's HFSDP, with the optimizer state sharded over both. Any combination works.

    Args:
        inner: Strategy over `dp`, `ep` and `cp`; its memory kinds are kept.
        params, grads, opt_state: Whether each is sharded over `replica` as well.

    Returns:
        A `Strategy`.

    Example:
        >>> print(fs.hybrid(fs.zero(3), opt_state=True))
        hfsdp
    """
    return replace(inner, replica_params=params, replica_grads=grads, replica_opt_state=opt_state)


HSDP = hybrid()
HFSDP = hybrid(opt_state=True)

# Strategies by name, in the order of `STRATEGY_NAMES`; each prints its first name.
STRATEGIES: dict[str, Strategy] = {
    "zero0": NO_SHARD, "zero1": OPTIM, "zero2": OPTIM_GRADS, "zero3": OPTIM_GRADS_PARAMS, "hfsdp": HFSDP,
    "no_shard": NO_SHARD, "optim": OPTIM, "optim_grads": OPTIM_GRADS, "optim_grads_params": OPTIM_GRADS_PARAMS,
    "hsdp": HSDP,
}  # fmt: skip


def _hint(name: Any) -> str:
    """Return a sentence about the intended strategy."""
    if callable(name):
        return " Call it: fs.zero(3)."
    if not isinstance(name, str):
        level = name if type(name) is int and name in range(4) else 3
        return f" Pass a name or a value, such as fs.zero({level})."
    return meant_strategy(name)
