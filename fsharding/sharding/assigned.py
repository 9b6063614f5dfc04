"""Explicit ownership along one mesh axis, which ceil-chunks cannot express: layers of stages, parts of fused dims.

Guarantee: the ranges of all coordinates tile the dim, and exactly one coordinate owns each layer of a stack.
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
"""The coordinates that own the full leaf, or the layers of each coordinate."""

Stages: TypeAlias = tuple[tuple[str, Owners], ...]  # owners by path prefix, longer ones first; hashable


@dataclass(frozen=True)
class Assigned:
    """Explicit ownership along one axis: layers of pipeline stages, parts of `Fused` dims."""

    axis: str
    dim: int | None  # the dim whose indices are owned; None if coordinates own the full leaf
    # The index ranges of each coordinate, in the order of its local tensor. With `dim=None`, `((0, 1),)` at an owner
    # and `()` elsewhere.
    ranges: tuple[Runs, ...]

    @classmethod
    def indices(cls, axis: str, dim: int, owned: Sequence[Sequence[int]]) -> Assigned:
        """Assign indices by coordinate, such as layers `((0, 2), (1, 3))` on two stages."""
        return cls(axis, dim, tuple(boxes.runs(indices) for indices in owned))

    @classmethod
    def whole(cls, axis: str, owners: Sequence[int], size: int) -> Assigned:
        """Assign the full leaf to some coordinates of an axis of a given size."""
        return cls(axis, None, tuple(((0, 1),) if c in owners else () for c in range(size)))

    @classmethod
    def parts(cls, axis: str, dim: int, sizes: Sequence[int], pieces: int) -> Assigned:
        """Split each part of a fused dim, such as q, k and v, into ceil-chunks over the axis."""
        return cls(axis, dim, tuple(boxes.parts(sizes, pieces, c) for c in range(pieces)))


def normal(stages: Mapping[str, int | Sequence[int] | Sequence[Sequence[int]]]) -> Stages:
    """Make stages hashable; an integer is the only owner of a leaf."""
    result: dict[str, Owners] = {}
    for path, owners in stages.items():
        entries = (owners,) if isinstance(owners, int) else tuple(owners)
        if all(isinstance(entry, int) for entry in entries):
            result[path] = tuple(entry for entry in entries if isinstance(entry, int))
        else:
            result[path] = tuple(tuple(entry) for entry in entries if not isinstance(entry, int))
    return tuple(sorted(result.items(), key=lambda item: (-len(item[0]), item[0])))


def stage_of(stages: Stages, path: str) -> Owners | None:
    """Return the owners of the longest matching path prefix."""
    return next((owners for entry, owners in stages if begins(path, entry)), None)


def objection(owners: Owners, size: int, layers: int | None) -> str | None:
    """Return why owners do not fit a leaf, or None."""
    coordinates, lists = _split(owners)
    if not lists:
        if not coordinates or not all(0 <= owner < size for owner in coordinates):
            return f"has stages {owners}, but pp has coordinates 0 to {size - 1}"
        return None
    if layers is None:
        return "has no dim 'layers', but its stages list layers"
    if len(lists) != size or sorted(layer for owned in lists for layer in owned) != list(range(layers)):
        return f"has {layers} layers over pp of size {size}, but its stages are {owners}"
    return None


def assignment(owners: Owners, size: int, dim: int | None) -> Assigned:
    """Return the ownership of a leaf along `pp`."""
    coordinates, lists = _split(owners)
    if not lists:
        return Assigned.whole("pp", coordinates, size)
    assert dim is not None
    return Assigned.indices("pp", dim, lists)


def _split(owners: Owners) -> tuple[list[int], list[tuple[int, ...]]]:
    """Separate coordinates that own the full leaf from layers by coordinate; one list is empty."""
    return [x for x in owners if isinstance(x, int)], [x for x in owners if not isinstance(x, int)]
