"""Kinds of memory: where a strategy keeps what a rank holds.

In: kinds by role. Out: the same, checked.
Guarantee: the kind of memory changes no bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, cast, get_args

from fsharding.base.errors import ConfigError, did_you_mean, message

__all__ = ["KINDS", "MemoryKind", "ROLES", "check_memory", "parse_memory"]

MemoryKind: TypeAlias = Literal["device", "host"]
"""Memory of the device, or pinned memory of the host."""

KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
ROLES = ("moments",)
"""What a strategy may keep elsewhere than on the device."""


def check_memory(memory: Mapping[str, str]) -> None:
    """Refuse roles and kinds that there are not.

    Raises:
        ConfigError: as said; all of them are listed.
    """
    rows = [f"{role}: roles are {', '.join(ROLES)}.{did_you_mean(role, ROLES)}" for role in memory if role not in ROLES]
    rows += [f"{role}={kind!r}: kinds are {', '.join(KINDS)}" for role, kind in memory.items() if kind not in KINDS]
    if rows:
        raise ConfigError(message("cannot keep this elsewhere.", rows, 'Write with_memory(moments="host").'))


def parse_memory(text: str) -> dict[str, MemoryKind]:
    """Read kinds by role, as the command line takes them.

    Raises:
        ConfigError: unknown roles or kinds.

    Example:
        >>> from fsharding.sharding.memory_kinds import parse_memory
        >>> parse_memory("moments=host"), parse_memory("")
        ({'moments': 'host'}, {})
    """
    pairs = (part.strip().partition("=") for part in text.split(",") if part.strip())
    memory = {role.strip(): kind.strip() for role, _, kind in pairs}
    check_memory(memory)
    return cast("dict[str, MemoryKind]", memory)
