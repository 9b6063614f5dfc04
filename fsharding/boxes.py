"""Index boxes: which part of a global tensor a rank holds, in pure Python.

In: shapes, numbers of pieces, coordinates. Out: half-open boxes `((start, stop), ...)`, one pair a dim.
The rule is DTensor's: a dim of n cut in k pieces gives pieces of ceil(n / k), the last ones shorter or empty.
Law: the boxes of all pieces tile the tensor, and nested cuts give nested boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

__all__ = ["Box", "chunk", "full", "intersect", "is_tiling", "nested_chunk", "relative", "runs", "shape_of", "volume"]

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open index ranges, one for each dim; `()` is the box of a scalar."""


def chunk(size: int, pieces: int, index: int) -> tuple[int, int]:
    """The `index`-th of `pieces` ceil-chunks of `range(size)`."""
    step = -(-size // pieces)
    start = min(index * step, size)
    return start, min(start + step, size)


def nested_chunk(size: int, cuts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Cuts `range(size)` by several (pieces, index) in turn, major first: each cuts what the one before left."""
    start, stop = 0, size
    for pieces, index in cuts:
        low, high = chunk(stop - start, pieces, index)
        start, stop = start + low, start + high
    return start, stop


def full(shape: Sequence[int]) -> Box:
    """The box of the whole tensor."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """The sizes of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """How many elements a box has."""
    return math.prod(shape_of(box))


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share; None when that is empty."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def relative(box: Box, origin: Box) -> tuple[slice, ...]:
    """The slices that cut `box` out of a tensor that holds `origin`."""
    return tuple(slice(b[0] - o[0], b[1] - o[0]) for b, o in zip(box, origin, strict=True))


def runs(indices: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Joins indices that follow each other: `(0, 1, 4)` gives `((0, 2), (4, 5))`."""
    result: list[tuple[int, int]] = []
    for index in indices:
        if result and result[-1][1] == index:
            result[-1] = (result[-1][0], index + 1)
        else:
            result.append((index, index + 1))
    return tuple(result)


def is_tiling(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Whether the boxes cover every element of a tensor exactly once; empty boxes do not count."""
    kept = [box for box in boxes if volume(box)]
    if sum(volume(box) for box in kept) != math.prod(shape):
        return False
    inside = all(intersect(box, full(shape)) == box for box in kept)
    return inside and all(intersect(a, b) is None for i, a in enumerate(kept) for b in kept[:i])
