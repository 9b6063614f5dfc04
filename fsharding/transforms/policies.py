"""Policies: values for `policy=` of `gather_unit`, `scan_units` and `remat`. Results don't depend on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fsharding.base.errors import ConfigError, message, report

__all__ = [
    "POLICIES", "Policy", "check_policy", "dots_saveable", "everything_saveable", "nothing_saveable", "offload",
    "offload_inputs", "save_except_gathered",
]  # fmt: skip


@dataclass(frozen=True)
class Policy:
    """Choice of what is kept between forward and backward.

    Attributes:
        name: Name in `fs.policies.POLICIES`.
        gathered: Whether gathered weights stay.
        activations: Activations that are kept: "all", "dots" (outputs of matrix products) or "inputs" (of the unit).
        memory: Memory of kept activations: "device", or "host" (pinned).

    Raises:
        ConfigError: An attribute has a different value.

    Example:
        >>> fs.policies.nothing_saveable
        Policy(name='nothing_saveable', gathered=False, activations='inputs', memory='device')
        >>> fs.policies.POLICIES["dots_saveable"].activations  # by name, from a command line
        'dots'
    """

    name: str
    gathered: bool
    activations: str
    memory: Literal["device", "host"] = "device"

    @property
    def offloads(self) -> bool:
        """Whether activations leave the device."""
        return self.memory != "device"

    def __post_init__(self) -> None:
        known: dict[str, tuple[Any, ...]] = {
            "gathered": (False, True), "activations": ("all", "dots", "inputs"), "memory": ("device", "host")
        }  # fmt: skip
        rows = [
            f"{name}={getattr(self, name)!r} isn't one of {', '.join(map(repr, values))}"
            for name, values in known.items()
            if not any(type(value) is type(getattr(self, name)) and value == getattr(self, name) for value in values)
        ]
        if rows:
            mend = "Pass activations='dots' to keep the results of matrix products; you can't choose single operators."
            mend = mend if any(row.startswith("activations") for row in rows) else "Pass one of these values."
            raise ConfigError(report("fs.policies.Policy got unknown values.", rows, mend))


save_except_gathered = Policy("save_except_gathered", gathered=False, activations="all")
"""The default: keep everything but gathered weights, which are gathered again."""

nothing_saveable = Policy("nothing_saveable", gathered=False, activations="inputs")
"""Keep only the inputs of the unit, and recompute everything else."""

dots_saveable = Policy("dots_saveable", gathered=False, activations="dots")
"""Keep outputs of matrix products, and recompute cheap operations."""

everything_saveable = Policy("everything_saveable", gathered=True, activations="all")
"""Keep gathered weights too: one all-gather a step, and the memory of all units at once."""

offload = Policy("offload", gathered=False, activations="all", memory="host")
"""Keep everything but gathered weights in pinned host memory, fetched in backward one unit ahead."""

offload_inputs = Policy("offload_inputs", gathered=False, activations="inputs", memory="host")
"""Keep only the inputs of the unit, in pinned host memory, and recompute everything else."""

POLICIES = {
    policy.name: policy
    for policy in (
        save_except_gathered, nothing_saveable, dots_saveable, everything_saveable, offload, offload_inputs
    )
}  # fmt: skip
"""Policies by name."""


def check_policy(policy: Any) -> None:
    """Check that a value is a `Policy`; names of policies aren't accepted.

    Args:
        policy: Value to check.

    Raises:
        ConfigError: It isn't a `Policy`.

    Example:
        >>> fs.policies.check_policy(fs.policies.dots_saveable)
        >>> try:
        ...     fs.policies.check_policy("dots_saveable")
        ... except ValueError as error:
        ...     print(str(error).splitlines()[0])
        fsharding got policy='dots_saveable'.
    """
    if not isinstance(policy, Policy):
        known = ", ".join(f"fs.policies.{name}" for name in POLICIES)
        raise ConfigError(message(f"got policy={policy!r}.", mend=f"Use one of {known}."))
