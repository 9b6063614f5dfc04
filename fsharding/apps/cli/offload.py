"""`--offload`: which memory leaves and activations are in, as the command line takes it.

In: the text of an option, such as `activations=host,moments=host,main.blocks=disk`. Out: kinds by role for a strategy,
and the remat policy.
"""

from __future__ import annotations

from fsharding.base.calls import call_as
from fsharding.base.errors import ConfigError, report
from fsharding.sharding.memory_kinds import parse_memory
from fsharding.sharding.strategy import Strategy

__all__ = ["offloaded", "policy_of"]

_ACTIVATIONS = "activations"
_DEFAULT = "save_except_gathered"


def _split(text: str) -> tuple[list[str], str]:
    """Split the text into kinds of memory for activations, and the rest."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    own = [part for part in parts if part.partition("=")[0].strip() == _ACTIVATIONS]
    return [part.partition("=")[2].strip() for part in own], ",".join(part for part in parts if part not in own)


def offloaded(command: str, strategy: str, text: str) -> Strategy:
    """Return a strategy with the memory that `--offload` says.

    Raises:
        ConfigError: unknown roles or kinds, or an unknown strategy.
    """
    policy_of(command, text, _DEFAULT)
    return Strategy.parse(strategy).with_memory(**call_as(f"{command} --offload", parse_memory, _split(text)[1]))


def policy_of(command: str, text: str, policy: str) -> str:
    """Return the name of the remat policy: `offload` for activations on the host, else the one that is given.

    Raises:
        ConfigError: activations on disk, or another policy beside activations on the host.
    """
    kinds, _ = _split(text)
    if odd := [kind for kind in kinds if kind not in ("device", "host")]:
        mend = "Keep them on the host, activations=host; or recompute them, --policy nothing_saveable."
        raise ConfigError(report(f"{command} --offload got activations={odd[0]}: device or host.", mend=mend))
    if "host" not in kinds:
        return policy
    if policy not in (_DEFAULT, "offload", "offload_inputs"):
        mend = "Leave one of the two out, or write --policy offload_inputs, which keeps inputs of blocks on the host."
        raise ConfigError(report(f"{command} --offload got activations=host beside --policy {policy}.", mend=mend))
    return "offload" if policy == _DEFAULT else policy
