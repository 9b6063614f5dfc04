"""`Assigned`: explicit ownership along one mesh axis: layers of a pipeline stage, or parts of a fused dim.

Guarantee: the ranges of all coordinates tile the dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsharding.sharding import boxes
from fsharding.sharding.boxes import Runs

__all__ = ["Assigned"]


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
