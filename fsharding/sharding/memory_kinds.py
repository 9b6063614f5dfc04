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

_COMPUTE = "compute"
_KINDS_OF = {**dict.fromkeys(ROLES, KINDS), _COMPUTE: KINDS[:2]}
"""The kinds of each role. `compute` is where an update is computed; it keeps nothing."""


class Choice(NamedTuple):
    """The kind of memory of some leaves in one role.

    Attributes:
        role: see `ROLES`; or "compute", the memory in which a leaf is updated.
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
    known = [*_KINDS_OF]
    rows = [f"{role}: roles are {', '.join(known)}.{did_you_mean(role, known)}" for role in memory if role not in known]
    choices = [
        Choice(role, path, cast(MemoryKind, kind)) for role, kinds in by_path.items() for path, kind in kinds.items()
    ]
    kinds_of = [(c, _KINDS_OF.get(c.role, KINDS)) for c in choices]
    rows += [f"{c.leaves}={c.kind!r}: kinds are {', '.join(kinds)}" for c, kinds in kinds_of if c.kind not in kinds]
    if rows:
        raise ConfigError(message("cannot keep this elsewhere.", rows, 'Write with_memory(moments="host").'))
    return choices


def chosen_kind(choices: Iterable[Choice], role: str, path: str) -> MemoryKind:
    """Return the kind of memory of a leaf: by the longest path that it begins with.

    By default moments are where the leaf is updated. `main` follows them if that is the host, else `params`.
    """
    known = [*choices]
    fitting = [c for c in known if c.role == role and (not c.path or begins(path, c.path))]
    if fitting:
        return max(fitting, key=lambda c: len(c.path)).kind
    if role == "moments":
        return chosen_kind(known, _COMPUTE, path)
    if role == "main":
        return chosen_kind(known, "moments" if chosen_kind(known, _COMPUTE, path) == "host" else "params", path)
    return "device"


def check_choices(choices: Iterable[Choice], paths: Iterable[str]) -> None:
    """Refuse paths that no leaf begins with, and updates on the host of what is on the device.

    Raises:
        ConfigError: there are such paths or updates; all of them are listed.
    """
    known = [*paths]
    unused = [c for c in choices if c.path and not any(begins(path, c.path) for path in known)]
    if unused:
        rows = [f"{c}: no leaf begins so.{did_you_mean(c.path, known)}" for c in unused]
        raise ConfigError(message("got memory of leaves that do not exist.", rows, f"Leaves are {listed(known)}."))
    given = [*choices]
    there = [path for path in known if chosen_kind(given, _COMPUTE, path) == "host"]
    split = [f"{role} of {path}" for path in there for role in ("moments", "main") if _stays(given, role, path)]
    if split:
        mend = "Leave moments= and main= out, which are on the host then, or keep them on the host or on disk."
        raise ConfigError(message("cannot compute an update on the host of leaves on the device.", split, mend))


def _stays(choices: Iterable[Choice], role: str, path: str) -> bool:
    return chosen_kind(choices, role, path) == "device"


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
