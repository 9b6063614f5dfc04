"""Tiers: the memory kinds in which a rank stores leaves, and the choice of one for each leaf and role."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.base.errors import ConfigError, did_you_mean, listed, message
from fsharding.base.registry import find, names_of
from fsharding.sharding.leaf_names import begins

__all__ = [
    "HERE", "ROLES", "Choice", "Lacking", "LocalLeaf", "Tier", "check_choices", "choices_of", "chosen_kind",
    "parse_memory", "tier_named",
]  # fmt: skip

HERE = "device"  # the name of the default tier

ROLES = ("params", "main", "moments", "grads")  # what a strategy may store in a different tier

_COMPUTE = "compute"  # where an update is computed: a role that stores nothing, so its tier cannot fail

LocalLeaf: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # the local shape of a leaf, and its dtype

Lacking: TypeAlias = Callable[[bool], list[int]]


class Tier:
    """A memory kind; the base class is device memory, where nothing is ever copied."""

    # Copies are ordered by the current stream; the host waits only in `settle`.
    name: ClassVar[str] = HERE  # as users write it
    text: ClassVar[str] = "the device"  # in a sentence
    # Whether a copy may fail or take long: its tensors are then never written in place, and reads start earlier.
    can_fail: ClassVar[bool] = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory that the host or the device fills, and from which `put` is cheapest."""
        return _compat.fresh(shape, dtype, device)

    def put(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """Start copying a tensor to the tier, into `into` if the tier cannot fail and it fits."""
        return x if into is None or _compat.is_same_view(into, x) else into.copy_(x)

    def get(self, x: Tensor, device: torch.device) -> Tensor:
        """Copy a tensor from the tier to a device."""
        return x

    def prefetch(self, x: Tensor, device: torch.device) -> None:
        """Start the part of the next `get` of this tensor that the host would wait for."""

    def settle(self, x: Tensor, device: torch.device) -> None:
        """Wait on the host until a `put` from the device on the current stream has finished."""

    def reserve(
        self, state: Sequence[LocalLeaf], grads: Sequence[LocalLeaf], donated: Sequence[Tensor], lacking: Lacking
    ) -> None:
        """Reserve room for a state and its gradients, or raise on every rank; the device tier reserves nothing."""
        # Donated tensors are freed before the state is written. `lacking` is collective: each rank passes whether it
        # lacks room, and gets the ranks that do.


@functools.cache
def tier_named(name: str) -> Tier:
    """Return the tier of a registered name."""
    return cast(Tier, find("tier", name))


class Choice(NamedTuple):
    """The memory kind of some leaves in one role."""

    role: str  # see `ROLES`; or "compute", where a leaf is updated
    path: str  # path or path prefix of leaves; "" for all
    kind: str  # the name of the tier

    @property
    def tier(self) -> Tier:
        """The tier."""
        return tier_named(self.kind)

    @property
    def leaves(self) -> str:
        """The leaves, in words."""
        return f"{self.role} of {self.path}" if self.path else self.role

    def __str__(self) -> str:
        return f"{self.leaves} on {self.tier.text}"


def choices_of(memory: Mapping[str, str | Mapping[str, str]]) -> list[Choice]:
    """Parse the arguments of `Strategy.with_memory`."""
    by_path = {role: kinds if isinstance(kinds, Mapping) else {"": kinds} for role, kinds in memory.items()}
    known = [*ROLES, _COMPUTE]
    rows = [f"{role}: roles are {', '.join(known)}.{did_you_mean(role, known)}" for role in memory if role not in known]
    choices = [Choice(role, path, kind) for role, kinds in by_path.items() for path, kind in kinds.items()]
    for choice in choices:
        # An update must not fail halfway.
        names = [name for name in names_of("tier") if choice.role != _COMPUTE or not tier_named(name).can_fail]
        if choice.kind not in names:
            rows.append(f"{choice.leaves}={choice.kind!r}: kinds are {', '.join(names)}")
    if rows:
        raise ConfigError(message("got unknown roles or memory kinds.", rows, 'Write with_memory(moments="host").'))
    return choices


def chosen_kind(choices: Sequence[Choice], role: str, path: str) -> str:
    """Return the memory kind of a leaf in a role; the longest path prefix counts."""
    # Default: moments are where the leaf is updated; `main` follows moments if that is the host, else `params`.
    fitting = [c for c in choices if c.role == role and (not c.path or begins(path, c.path))]
    if fitting:
        return max(fitting, key=lambda c: len(c.path)).kind
    if role == "moments":
        return chosen_kind(choices, _COMPUTE, path)
    if role == "main":
        return chosen_kind(choices, "params" if chosen_kind(choices, _COMPUTE, path) == HERE else "moments", path)
    return HERE


def check_choices(choices: Sequence[Choice], paths: Sequence[str]) -> None:
    """Refuse prefixes of no leaf, and host updates of tensors on the device."""
    unused = [c for c in choices if c.path and not any(begins(path, c.path) for path in paths)]
    if unused:
        rows = [f"{c}: matches no leaf.{did_you_mean(c.path, paths)}" for c in unused]
        raise ConfigError(message("got memory kinds for unknown leaves.", rows, f"Leaves are {listed(paths)}."))
    split = [
        f"{role} of {path}"
        for path in paths
        for role in ("moments", "main")
        if chosen_kind(choices, _COMPUTE, path) != HERE and chosen_kind(choices, role, path) == HERE
    ]
    if split:
        mend = 'Leave moments= and main= out, which are then in host memory, or pass "host" or "disk" for them.'
        raise ConfigError(message("cannot update leaves on the host that are in device memory.", split, mend))


def parse_memory(text: str) -> dict[str, dict[str, str]]:
    """Parse memory kinds of the command line: `role=kind` or `role.path=kind`, separated by commas."""
    result: dict[str, dict[str, str]] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        leaves, _, kind = part.partition("=")
        role, _, path = leaves.strip().partition(".")
        result.setdefault(role, {})[path] = kind.strip()
    choices_of(result)
    return result
