"""Kinds of memory: where a strategy keeps what a rank holds.

In: kinds by role, for all leaves or by path. Out: the same, checked, and the kind of a leaf.
Guarantee: the kind of memory changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

from fsharding.base.errors import ConfigError, did_you_mean, listed, message
from fsharding.sharding.stage_owners import begins

__all__ = [
    "IN_WORDS", "KINDS", "ROLES", "Choice", "MemoryKind", "check_choices", "choices_of", "chosen_kind", "parse_memory",
]  # fmt: skip

MemoryKind: TypeAlias = Literal["device", "host", "disk"]
"""Memory of the device, pinned memory of the host, or a file."""

KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
IN_WORDS = {"device": "the device", "host": "the host", "disk": "disk"}
ROLES = ("params", "main", "moments", "grads")
"""What a strategy may keep elsewhere than on the device."""


class Choice(NamedTuple):
    """The kind of memory of some leaves in one role.

    Attributes:
        role: see `ROLES`.
        path: of a leaf, or the beginning of several; "" for all.
        kind: of memory.
    """

    role: str
    path: str
    kind: MemoryKind

    @property
    def leaves(self) -> str:
        """Which leaves, in words."""
        return f"{self.role} of {self.path}" if self.path else self.role

    def __str__(self) -> str:
        return f"{self.leaves} on {IN_WORDS[self.kind]}"


def choices_of(memory: Mapping[str, MemoryKind | Mapping[str, MemoryKind]]) -> list[Choice]:
    """Return choices as `Strategy.with_memory` takes them.

    Raises:
        ConfigError: unknown roles or kinds; all of them are listed.
    """
    by_path = {role: kinds if isinstance(kinds, Mapping) else {"": kinds} for role, kinds in memory.items()}
    rows = [f"{role}: roles are {', '.join(ROLES)}.{did_you_mean(role, ROLES)}" for role in memory if role not in ROLES]
    choices = [
        Choice(role, path, cast(MemoryKind, kind)) for role, kinds in by_path.items() for path, kind in kinds.items()
    ]
    rows += [f"{c.leaves}={c.kind!r}: kinds are {', '.join(KINDS)}" for c in choices if c.kind not in KINDS]
    if rows:
        raise ConfigError(message("cannot keep this elsewhere.", rows, 'Write with_memory(moments="host").'))
    return choices


def chosen_kind(choices: Iterable[Choice], role: str, path: str) -> MemoryKind:
    """Return the kind of memory of a leaf: by the longest path that it begins with. `main` follows `params`."""
    known = [*choices]
    fitting = [c for c in known if c.role == role and (not c.path or begins(path, c.path))]
    if not fitting:
        return chosen_kind(known, "params", path) if role == "main" else "device"
    return max(fitting, key=lambda c: len(c.path)).kind


def check_choices(choices: Iterable[Choice], paths: Iterable[str]) -> None:
    """Refuse paths that no leaf begins with.

    Raises:
        ConfigError: there are such paths; all of them are listed.
    """
    known = [*paths]
    unused = [c for c in choices if c.path and not any(begins(path, c.path) for path in known)]
    if unused:
        rows = [f"{c}: no leaf begins so.{did_you_mean(c.path, known)}" for c in unused]
        raise ConfigError(message("got memory of leaves that do not exist.", rows, f"Leaves are {listed(known)}."))


def parse_memory(text: str) -> dict[str, dict[str, MemoryKind]]:
    """Read kinds of memory as the command line takes them: `role=kind` or `role.path=kind`, with commas between.

    Raises:
        ConfigError: unknown roles or kinds.

    Example:
        >>> from fsharding.sharding.memory_kinds import parse_memory
        >>> parse_memory("moments=host,main.blocks=disk"), parse_memory("")
        ({'moments': {'': 'host'}, 'main': {'blocks': 'disk'}}, {})
    """
    result: dict[str, dict[str, MemoryKind]] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        leaves, _, kind = part.partition("=")
        role, _, path = leaves.strip().partition(".")
        result.setdefault(role, {})[path] = kind.strip()  # pyright: ignore[reportArgumentType]
    choices_of(result)
    return result
