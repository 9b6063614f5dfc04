"""Policies: what is kept for backward. Values for `policy=` of `gather_unit`, `scan_units` and `remat`.

Guarantee: results do not depend on the policy.
"""

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
    """Says which gathered weights and activations are kept between forward and backward.

    Attributes:
        name: as in `policies`.
        gathered: gathered weights stay.
        activations: "all", "dots" (outputs of matrix products) or "inputs" (of the unit).
        memory: where activations wait for backward, "device" or "host".

    Raises:
        ConfigError: an attribute has another value than these.

    Example:
        >>> fs.policies.nothing_saveable
        Policy(name='nothing_saveable', gathered=False, activations='inputs', memory='device')
        >>> fs.policies.POLICIES["dots_saveable"].activations  # by name, as of a command line
        'dots'
    """

    name: str
    gathered: bool
    activations: str
    memory: Literal["device", "host"] = "device"

    @property
    def offloads(self) -> bool:
        """Whether activations wait elsewhere than on the device."""
        return self.memory != "device"

    def __post_init__(self) -> None:
        known: dict[str, tuple[Any, ...]] = {
            "gathered": (False, True), "activations": ("all", "dots", "inputs"), "memory": ("device", "host")
        }  # fmt: skip
        rows = [
            f"{name}={getattr(self, name)!r} is none of {', '.join(map(repr, values))}"
            for name, values in known.items()
            if not any(type(value) is type(getattr(self, name)) and value == getattr(self, name) for value in values)
        ]
        if rows:
            mend = "activations='dots' keeps the results of matrix products; single operators cannot be chosen."
            mend = mend if any(row.startswith("activations") for row in rows) else "Give one of these values."
            raise ConfigError(report("fs.policies.Policy cannot keep what it is asked to.", rows, mend))


save_except_gathered = Policy("save_except_gathered", gathered=False, activations="all")
"""The default: everything but gathered weights, which are gathered again."""

nothing_saveable = Policy("nothing_saveable", gathered=False, activations="inputs")
"""Only the inputs of the unit; everything else is computed again."""

dots_saveable = Policy("dots_saveable", gathered=False, activations="dots")
"""Outputs of matrix products stay, cheap operations are computed again."""

everything_saveable = Policy("everything_saveable", gathered=True, activations="all")
"""Gathered weights stay too: one gather a step, and the memory of all units at once."""

offload = Policy("offload", gathered=False, activations="all", memory="host")
"""Everything but gathered weights, in pinned memory of the host: fetched in backward, one unit ahead."""

offload_inputs = Policy("offload_inputs", gathered=False, activations="inputs", memory="host")
"""Only the inputs of the unit, in pinned memory of the host; everything else is computed again."""

POLICIES = {
    policy.name: policy
    for policy in (
        save_except_gathered, nothing_saveable, dots_saveable, everything_saveable, offload, offload_inputs
    )
}  # fmt: skip
"""Policies by name."""


def check_policy(policy: Any) -> None:
    """Check that a value is a policy; names of policies are not accepted.

    Raises:
        ConfigError: it isn't a `Policy`.

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
