"""Explicit ownership along one mesh axis, where ceil-chunks do not say enough: layers of stages, parts of fused dims.

Guarantee: the ranges of all coordinates tile the dim, and every layer of a stack is owned by exactly one coordinate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsharding.sharding import boxes
from fsharding.sharding.boxes import Runs
from fsharding.sharding.leaf_names import begins

__all__ = ["Assigned", "Owners", "Stages", "assignment", "normal", "objection", "stage_of"]

Owners: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Coordinates that hold a leaf whole, or the layers of each coordinate."""

Stages: TypeAlias = tuple[tuple[str, Owners], ...]  # owners by path, longer paths first; hashable


@dataclass(frozen=True)
class Assigned:
    """Explicit ownership along one axis: layers of pipeline stages, parts of `Fused` dims."""

    axis: str
    dim: int | None  # whose indices are owned; None if a leaf is owned in full
    # For each coordinate the index ranges that it holds, in their order there. With `dim=None` they are `((0, 1),)` at
    # an owner, else `()`.
    ranges: tuple[Runs, ...]

    @classmethod
    def indices(cls, axis: str, dim: int, owned: Sequence[Sequence[int]]) -> Assigned:
        """Assign indices by coordinate, such as layers `((0, 2), (1, 3))` on two stages."""
        return cls(axis, dim, tuple(boxes.runs(indices) for indices in owned))

    @classmethod
    def whole(cls, axis: str, owners: Sequence[int], size: int) -> Assigned:
        """Assign a full leaf to some coordinates of an axis of a given size."""
        return cls(axis, None, tuple(((0, 1),) if c in owners else () for c in range(size)))

    @classmethod
    def parts(cls, axis: str, dim: int, sizes: Sequence[int], pieces: int) -> Assigned:
        """Split each part of a fused dim, such as q, k and v, in ceil-chunks over the axis."""
        return cls(axis, dim, tuple(boxes.parts(sum(sizes), sizes, pieces, c) for c in range(pieces)))


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
