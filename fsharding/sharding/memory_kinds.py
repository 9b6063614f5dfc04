"""Tiers: the kinds of memory in which a strategy keeps what a rank holds, and the choice of one for each leaf."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
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

HERE = "device"  # the name of the tier of a leaf that is not kept elsewhere

ROLES = ("params", "main", "moments", "grads")  # what a strategy may keep elsewhere than on the device

_COMPUTE = "compute"  # where an update is computed: a role that keeps nothing, so its tier cannot fail

LocalLeaf: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # the local shape of a leaf, and its dtype

Lacking: TypeAlias = Callable[[bool], list[int]]


class Tier:
    """A kind of memory. Here it is the device's, where a tensor is computed with, and nothing is ever copied."""

    # Copies are ordered by the current stream; the host waits for none but in `settle`.
    name: ClassVar[str] = HERE  # as users write it
    text: ClassVar[str] = "the device"  # in a sentence
    # a copy may fail or take long. So its tensors are never written in place, and reads start earlier
    can_fail: ClassVar[bool] = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory to be filled by the host or the device; `put` of it is then cheapest."""
        return _compat.fresh(shape, dtype, device)

    def put(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """Start to copy a tensor to the tier; `into` may be written if the tier cannot fail and it fits."""
        return x if into is None or _compat.is_same_view(into, x) else into.copy_(x)

    def get(self, x: Tensor, device: torch.device) -> Tensor:
        """Copy a tensor of the tier to a device."""
        return x

    def prefetch(self, x: Tensor, device: torch.device) -> None:
        """Start what the next `get` of the same tensor would have the host wait for."""

    def settle(self, x: Tensor, device: torch.device) -> None:
        """Have the host wait until a tensor, which was put from a device on the current stream, is there."""

    def reserve(
        self, state: Sequence[LocalLeaf], grads: Sequence[LocalLeaf], donated: Sequence[Tensor], lacking: Lacking
    ) -> None:
        """Take room for a state and its gradients, or raise on every rank; a device raises when it is out of memory."""
        # Tensors that are donated are freed before the state is written. Each rank tells the others by `lacking`
        # whether it lacks room, and gets the ranks that do.


@functools.cache
def tier_named(name: str) -> Tier:
    """Return the tier of a registered name."""
    return cast(Tier, find("tier", name))


class Choice(NamedTuple):
    """The kind of memory of some leaves in one role."""

    role: str  # see `ROLES`; or "compute", the memory in which a leaf is updated
    path: str  # of a leaf, or the beginning of several; "" for all
    kind: str  # the name of the tier

    @property
    def tier(self) -> Tier:
        """The tier itself."""
        return tier_named(self.kind)

    @property
    def leaves(self) -> str:
        """Which leaves, in words."""
        return f"{self.role} of {self.path}" if self.path else self.role

    def __str__(self) -> str:
        return f"{self.leaves} on {self.tier.text}"


def choices_of(memory: Mapping[str, str | Mapping[str, str]]) -> list[Choice]:
    """Return choices as `Strategy.with_memory` takes them."""
    by_path = {role: kinds if isinstance(kinds, Mapping) else {"": kinds} for role, kinds in memory.items()}
    known = [*ROLES, _COMPUTE]
    rows = [f"{role}: roles are {', '.join(known)}.{did_you_mean(role, known)}" for role in memory if role not in known]
    choices = [Choice(role, path, kind) for role, kinds in by_path.items() for path, kind in kinds.items()]
    for choice in choices:
        # An update is computed there, and cannot fail halfway.
        names = [name for name in names_of("tier") if choice.role != _COMPUTE or not tier_named(name).can_fail]
        if choice.kind not in names:
            rows.append(f"{choice.leaves}={choice.kind!r}: kinds are {', '.join(names)}")
    if rows:
        raise ConfigError(message("cannot keep this elsewhere.", rows, 'Write with_memory(moments="host").'))
    return choices


def chosen_kind(choices: Iterable[Choice], role: str, path: str) -> str:
    """Return the kind of memory of a leaf: by the longest path that it begins with."""
    # By default moments are where the leaf is updated. `main` follows them if that is the host, else `params`.
    known = [*choices]
    fitting = [c for c in known if c.role == role and (not c.path or begins(path, c.path))]
    if fitting:
        return max(fitting, key=lambda c: len(c.path)).kind
    if role == "moments":
        return chosen_kind(known, _COMPUTE, path)
    if role == "main":
        return chosen_kind(known, "params" if chosen_kind(known, _COMPUTE, path) == HERE else "moments", path)
    return HERE


def check_choices(choices: Iterable[Choice], paths: Iterable[str]) -> None:
    """Refuse paths that no leaf begins with, and updates on the host of what is on the device."""
    known = [*paths]
    unused = [c for c in choices if c.path and not any(begins(path, c.path) for path in known)]
    if unused:
        rows = [f"{c}: no leaf begins so.{did_you_mean(c.path, known)}" for c in unused]
        raise ConfigError(message("got memory of leaves that do not exist.", rows, f"Leaves are {listed(known)}."))
    given = [*choices]
    split = [
        f"{role} of {path}"
        for path in known
        for role in ("moments", "main")
        if chosen_kind(given, _COMPUTE, path) != HERE and chosen_kind(given, role, path) == HERE
    ]
    if split:
        mend = "Leave moments= and main= out, which are on the host then, or keep them elsewhere than on the device."
        raise ConfigError(message("cannot compute an update on the host of leaves on the device.", split, mend))


def parse_memory(text: str) -> dict[str, dict[str, str]]:
    """Read kinds of memory as the command line takes them: `role=kind` or `role.path=kind`, with commas between."""
    result: dict[str, dict[str, str]] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        leaves, _, kind = part.partition("=")
        role, _, path = leaves.strip().partition(".")
        result.setdefault(role, {})[path] = kind.strip()
    choices_of(result)
    return result
