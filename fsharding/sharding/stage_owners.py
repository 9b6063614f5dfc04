"""Stages: which `pp` coordinates own which layers, or a whole subtree, where ceil-chunks do not say enough.

Guarantee: every layer of a stack is owned by exactly one coordinate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from fsharding.sharding.assigned import Assigned

__all__ = ["Owners", "Stages", "assignment", "begins", "normal", "objection", "stage_of"]

Owners: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Coordinates that hold a leaf whole, or the layers of each coordinate."""

Stages: TypeAlias = tuple[tuple[str, Owners], ...]
"""Owners by path, longer paths first; hashable."""


def normal(stages: Mapping[str, int | Sequence[int] | Sequence[Sequence[int]]]) -> Stages:
    """The hashable form; an integer is the one coordinate that holds a leaf."""
    result: dict[str, Owners] = {}
    for path, owners in stages.items():
        entries = (owners,) if isinstance(owners, int) else tuple(owners)
        if all(isinstance(entry, int) for entry in entries):
            result[path] = tuple(entry for entry in entries if isinstance(entry, int))
        else:
            result[path] = tuple(tuple(entry) for entry in entries if not isinstance(entry, int))
    return tuple(sorted(result.items(), key=lambda item: (-len(item[0]), item[0])))


def begins(path: str, entry: str) -> bool:
    """Whether a dotted path is another or lies under it."""
    return path == entry or path.startswith(entry + ".")


def stage_of(stages: Stages, path: str) -> Owners | None:
    """The entry of the longest path that matches a leaf."""
    return next((owners for entry, owners in stages if begins(path, entry)), None)


def objection(owners: Owners, size: int, layers: int | None) -> str | None:
    """Why owners do not fit a leaf."""
    whole = [owner for owner in owners if isinstance(owner, int)]
    if len(whole) == len(owners):
        if not whole or not all(0 <= owner < size for owner in whole):
            return f"is to be on stages {owners}, but pp has coordinates 0 to {size - 1}"
        return None
    lists = [owner for owner in owners if not isinstance(owner, int)]
    if layers is None:
        return "has no dim 'layers', but its stages name layers"
    if len(lists) != size or sorted(layer for owned in lists for layer in owned) != list(range(layers)):
        return f"has {layers} layers over pp of size {size}, but its stages are {owners}"
    return None


def assignment(owners: Owners, size: int, dim: int | None) -> Assigned:
    """The ownership along `pp` of one leaf."""
    whole = [owner for owner in owners if isinstance(owner, int)]
    if len(whole) == len(owners):
        return Assigned.whole("pp", whole, size)
    assert dim is not None
    return Assigned.indices("pp", dim, [owner for owner in owners if not isinstance(owner, int)])
