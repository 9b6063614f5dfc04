"""Strategies: which of params, grads and opt_state are cut over the data axes, and over the outer `replica` axis.

Guarantee: the strategy never changes a loss, only where bytes live and when they move.
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
    """Says which tensors are cut over the data axes, and which of them over `replica` as well.

    Attributes:
        params: cut the parameters over `dp`, `ep`, `cp`.
        grads: cut the accumulated gradients; also: reduce them every microbatch instead of once a step.
        opt_state: cut the optimizer's main parameters and moments.
        replica_params: cut the parameters over `replica` too.
        replica_grads: the same for accumulated gradients.
        replica_opt_state: the same for main parameters and moments.
        memory: what is kept elsewhere than on the device; see `with_memory`.

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
        """Return the same strategy with other memory for some roles.

        Units are copied to the device when they are gathered, and an update runs through windows of leaves there, or
        on the host.

        Args:
            **memory: by role, "device", "host" (pinned memory) or "disk" (a file in the directory `FSHARDING_DISK`).
                Roles are `params`, `main` (main parameters), `moments` and `grads`. Main parameters are where the
                parameters are unless it is said; in other memory they are kept apart. With `compute="host"` the CPU
                updates leaves: moments and main parameters are on the host, or on disk if that is said. A dict gives
                kinds by the path of a leaf or the beginning of several, as in `moments={"blocks": "host"}`; the
                longest one counts. On a CPU, "host" changes nothing.

        Raises:
            ConfigError: another role or kind; all of them are listed.

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
        """Return the kind of memory of a leaf in a role."""
        return chosen_kind(self.memory, role, path)

    def cut(self, kind: str, axis: str) -> bool:
        """Whether `kind` (params, grads, opt_state) is cut over a data axis."""
        return bool(getattr(self, f"replica_{kind}" if axis == "replica" else kind))

    @staticmethod
    @public
    def parse(name: str) -> Strategy:
        """Return the strategy of a name: "zero0" to "zero3", "hsdp", "hfsdp", or a name of Megatron FSDP's.

        Raises:
            ConfigError: an unknown name.

        Example:
            >>> fs.Strategy.parse("zero3") == fs.zero(3)
            True
        """
        return strategy_of(name)

    def __str__(self) -> str:
        if self.memory:
            return f"{replace(self, memory=())} with {', '.join(map(str, self.memory))}"
        for name, strategy in STRATEGIES.items():
            if strategy == self:
                return name
        kinds = ("params", "grads", "opt_state")
        inner = Strategy(self.params, self.grads, self.opt_state)
        name = next((name for name, strategy in STRATEGIES.items() if strategy == inner), None)
        cut = ", ".join(f"{kind}={self.cut(kind, 'dp')}" for kind in kinds)
        name = name or f"Strategy({cut})"
        outer = [f"{kind}=True" for kind in kinds if self.cut(kind, "replica")]
        return f"hybrid({', '.join([name, *outer])})" if outer else name


def strategy_of(name: Any) -> Strategy:
    """Return the strategy of a name, or refuse it in the name of the public call."""
    if not isinstance(name, str) or name not in STRATEGIES:
        given = kind_of(name) if callable(name) else repr(name)
        known = f"Strategies are {', '.join(STRATEGIES)}.{_hint(name)}"
        raise ConfigError(message(f"knows no strategy {given}.", mend=known))
    return STRATEGIES[name]


NO_SHARD = Strategy(params=False, grads=False, opt_state=False)
OPTIM = Strategy(params=False, grads=False, opt_state=True)
OPTIM_GRADS = Strategy(params=False, grads=True, opt_state=True)
OPTIM_GRADS_PARAMS = Strategy(params=True, grads=True, opt_state=True)


_LEVELS = "Levels are 0, which cuts nothing, 1, the optimizer state, 2, gradients too, and 3, parameters too."


@public
def zero(level: Literal[0, 1, 2, 3]) -> Strategy:
    """ZeRO stage 0 to 3: nothing cut, optimizer state, and gradients, and parameters (Rajbhandari et al. 2020).

    Raises:
        ConfigError: another level.

    Example:
        >>> fs.zero(3).params
        True
    """
    levels = (NO_SHARD, OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS)
    if type(level) is not int or level not in range(4):
        raise ConfigError(message(f"knows no level {level!r}.", mend=_LEVELS))
    return levels[level]


@public
def hybrid(
    inner: Strategy = OPTIM_GRADS_PARAMS, *, params: bool = False, grads: bool = False, opt_state: bool = False
) -> Strategy:
    """A strategy over the data axes, with an outer `replica` axis over which each part is cut or not.

    `hybrid()` is HSDP: shards inside, copies across `replica`. `hybrid(opt_state=True)` is HFSDP: the optimizer state
    is cut over both. Every combination is allowed.

    Args:
        inner: what is cut over `dp`, `ep`, `cp`.
        params: cut the parameters over `replica` too.
        grads: cut accumulated gradients over `replica` too.
        opt_state: cut main parameters and moments over `replica` too.

    Example:
        >>> print(fs.hybrid(fs.zero(3), opt_state=True))
        hfsdp
    """
    return replace(inner, replica_params=params, replica_grads=grads, replica_opt_state=opt_state)


HSDP = hybrid()
HFSDP = hybrid(opt_state=True)

STRATEGIES: dict[str, Strategy] = {
    "zero0": NO_SHARD,
    "zero1": OPTIM,
    "zero2": OPTIM_GRADS,
    "zero3": OPTIM_GRADS_PARAMS,
    "hfsdp": HFSDP,
    "no_shard": NO_SHARD,
    "optim": OPTIM,
    "optim_grads": OPTIM_GRADS,
    "optim_grads_params": OPTIM_GRADS_PARAMS,
    "hsdp": HSDP,
}
"""Strategies by the names that the command line takes."""


def _hint(name: Any) -> str:
    """A sentence about the strategy that is meant."""
    if callable(name):
        return " Call it: fs.zero(3)."
    if not isinstance(name, str):
        level = name if type(name) is int and name in range(4) else 3
        return f" Give a name or a value, such as fs.zero({level})."
    return meant_strategy(name)
