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
    """Explicit ownership along one axis, where ceil-chunks do not say enough.

    Attributes:
        axis: the mesh axis whose coordinates own things.
        dim: the tensor dim whose indices are owned, or None when the leaf is owned whole.
        ranges: for each coordinate, the index ranges that it holds, in the order in which it holds them; with
            `dim=None`, `((0, 1),)` where the leaf is and `()` where it is not.

    Example:
        >>> layout = fs.plan_layout(
        ...     {"blocks": fs.random.normal(fs.random.key(0), (3, 4))},
        ...     fs.AbstractMesh(("pp",), (2,)),
        ...     names={"blocks": ("layers", None)},
        ...     stages={"blocks": [[0, 1], [2]]},
        ... )
        >>> [owned.axis for owned in layout.leaves[0].params.assigned]
        ['pp']
    """

    axis: str
    dim: int | None
    ranges: tuple[Runs, ...]

    @classmethod
    def indices(cls, axis: str, dim: int, owned: Sequence[Sequence[int]]) -> Assigned:
        """Ownership by index, in `owned` by coordinate: layers `((0, 2), (1, 3))` on two stages, say."""
        return cls(axis, dim, tuple(boxes.runs(indices) for indices in owned))

    @classmethod
    def whole(cls, axis: str, owners: Sequence[int], size: int) -> Assigned:
        """A leaf that some coordinates of an axis of a given size have whole, and the others not at all."""
        return cls(axis, None, tuple(((0, 1),) if c in owners else () for c in range(size)))

    @classmethod
    def parts(cls, axis: str, dim: int, sizes: Sequence[int], pieces: int) -> Assigned:
        """A fused dim: each of its parts, such as q, k and v, is cut in ceil-chunks over the axis."""
        return cls(axis, dim, tuple(boxes.parts(sum(sizes), sizes, pieces, c) for c in range(pieces)))
