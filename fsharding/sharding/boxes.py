"""Index boxes and grids: which part of a global tensor a rank stores, in pure Python.

Guarantee: the boxes of all shards tile the tensor, and nested sharding gives nested boxes.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TypeAlias

__all__ = [
    "Box", "Grid", "Overlap", "Runs", "chunk", "contiguous_strides", "common_step", "covers",
    "cut_runs", "ends_on", "full", "grid_boxes", "grid_of", "grid_shape", "intersect", "is_tiling", "length", "meet",
    "nested_chunk", "outer_dims", "overlap", "overlap_shape", "overlap_slices", "overlap_volume", "parts", "relative",
    "runs", "shape_of", "split_outer", "split_overlap", "volume",
]  # fmt: skip

Box: TypeAlias = tuple[tuple[int, int], ...]  # a half-open index range per dim; `()` is the box of a scalar

# Half-open ranges of one dim, in the order of a local tensor; only a single range may be empty.
Runs: TypeAlias = tuple[tuple[int, int], ...]

Grid: TypeAlias = tuple[Runs, ...]  # runs per dim; a rank stores their product. `()` is the grid of a scalar

# For each dim, (start in one local tensor, start in the other, length) of the ranges that both store.
Overlap: TypeAlias = tuple[tuple[tuple[int, int, int], ...], ...]


def chunk(size: int, pieces: int, index: int) -> tuple[int, int]:
    """Return the `index`-th of `pieces` ceil-chunks of `range(size)`."""
    step = -(-size // pieces)
    start = min(index * step, size)
    return start, min(start + step, size)


def nested_chunk(size: int, cuts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return a nested ceil-chunk: each (pieces, index), major first, splits the chunk of the one before."""
    start = 0
    stop = size
    for pieces, index in cuts:
        low, high = chunk(stop - start, pieces, index)
        start, stop = start + low, start + high
    return start, stop


def common_step(size: int, pieces: Sequence[int]) -> int:
    """Return the greatest common divisor of all boundaries of nested ceil-chunks inside of `range(size)`; 0 if none."""
    if not pieces or size == 0:
        return 0
    step = -(-size // pieces[0])
    inner = math.gcd(common_step(step, pieces[1:]), common_step(size % step, pieces[1:]))
    return math.gcd(step if step < size else 0, inner)


def ends_on(size: int, pieces: Sequence[int], multiple: int) -> bool:
    """Return whether nested ceil-chunks of `range(size)` all end at a multiple, or at the end of the range."""
    # If so, the same chunks of the range of multiples are these chunks, divided by the multiple.
    return common_step(size, pieces) % multiple == 0


def full(shape: Sequence[int]) -> Box:
    """Return the box of the full tensor."""
    return tuple((0, size) for size in shape)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as torch computes them."""
    return tuple(math.prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the sizes of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Count the elements of a box."""
    return math.prod(shape_of(box))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def relative(box: Box, origin: Box) -> tuple[slice, ...]:
    """Return the slices that select `box` from a tensor that stores `origin`."""
    return tuple(slice(b[0] - o[0], b[1] - o[0]) for b, o in zip(box, origin, strict=True))


def runs(indices: Sequence[int]) -> Runs:
    """Join consecutive indices: `(0, 1, 4)` gives `((0, 2), (4, 5))`."""
    return _joined((index, index + 1) for index in indices)


def parts(sizes: Sequence[int], pieces: int, index: int) -> Runs:
    """Return the ranges of the `index`-th of `pieces` in a fused dim, whose parts are chunked separately."""
    runs: list[tuple[int, int]] = []
    start = 0
    for part in sizes:
        low, high = chunk(part, pieces, index)
        runs += [(start + low, start + high)] if high > low else []
        start += part
    return _joined(runs)


def _joined(ranges: Iterable[tuple[int, int]]) -> Runs:
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def length(runs: Runs) -> int:
    """Count the indices of runs."""
    return sum(stop - start for start, stop in runs)


def cut_runs(runs: Runs, start: int, stop: int) -> Runs:
    """Return the part `[start, stop)` of concatenated runs."""
    shared = tuple((low, low, high - low) for low, high in runs)
    return tuple((low, low + n) for low, _, n in _cut_overlap(shared, start, stop))


def grid_of(shape: Sequence[int]) -> Grid:
    """Return the grid of the full tensor."""
    return tuple(((0, size),) for size in shape)


def grid_shape(grid: Grid) -> tuple[int, ...]:
    """Return the shape of the local tensor of a grid."""
    return tuple(length(runs) for runs in grid)


def grid_boxes(grid: Grid) -> tuple[tuple[Box, tuple[slice, ...]], ...]:
    """Return the boxes of a grid, each with its slices of the local tensor; a scalar has one."""
    places: list[list[tuple[tuple[int, int], slice]]] = []
    for runs in grid:
        stops = [length(runs[: i + 1]) for i in range(len(runs))]
        places.append([(r, slice(stop - (r[1] - r[0]), stop)) for r, stop in zip(runs, stops, strict=True)])
    return tuple((tuple(r for r, _ in both), tuple(s for _, s in both)) for both in product(*places))


def meet(a: Runs, b: Runs) -> tuple[tuple[int, int, int], ...]:
    """Intersect two runs: (start in concatenated `a`, start in concatenated `b`, length), in the order of `b`."""
    result: list[tuple[int, int, int]] = []
    at_b = 0
    for low_b, high_b in b:
        at_a = 0
        for low_a, high_a in a:
            start = max(low_a, low_b)
            stop = min(high_a, high_b)
            if start < stop:
                result.append((at_a + start - low_a, at_b + start - low_b, stop - start))
            at_a += high_a - low_a
        at_b += high_b - low_b
    return tuple(sorted(result, key=lambda shared: shared[1]))


def overlap(a: Grid, b: Grid) -> Overlap | None:
    """Intersect two grids, dim by dim; None if nothing is shared."""
    shared = tuple(meet(x, y) for x, y in zip(a, b, strict=True))
    return shared if all(shared) else None


def covers(a: Grid, b: Grid) -> bool:
    """Return whether a grid includes all of a second one that isn't empty."""
    shared = overlap(a, b)
    return shared is not None and overlap_shape(shared) == grid_shape(b)


def overlap_shape(shared: Overlap) -> tuple[int, ...]:
    """Return the shape of an overlap."""
    return tuple(sum(n for _, _, n in dim) for dim in shared)


def overlap_volume(shared: Overlap) -> int:
    """Count the elements of an overlap."""
    return math.prod(overlap_shape(shared))


@functools.lru_cache(maxsize=1 << 14)
def overlap_slices(shared: Overlap) -> tuple[tuple[tuple[slice, ...], tuple[slice, ...], tuple[slice, ...]], ...]:
    """Return the boxes of an overlap as slices of the first local tensor, the second, and a dense tensor of both."""
    dims: list[list[tuple[slice, slice, slice]]] = []
    for shared_dim in shared:
        start = 0
        dim = list[tuple[slice, slice, slice]]()
        for a, b, n in shared_dim:
            dim.append((slice(a, a + n), slice(b, b + n), slice(start, start + n)))
            start += n
        dims.append(dim)
    return tuple(
        (tuple(x for x, _, _ in p), tuple(y for _, y, _ in p), tuple(z for *_, z in p)) for p in product(*dims)
    )


def split_overlap(shared: Overlap, most: int) -> tuple[Overlap, ...]:
    """Split an overlap along its first dims into parts of at most `most` elements."""
    size = overlap_volume(shared)
    if size <= most:
        return (shared,)
    dim = next(d for d, ranges in enumerate(shared) if sum(n for _, _, n in ranges) > 1)
    total = sum(n for _, _, n in shared[dim])
    pieces = min(total, -(-size // most))
    ranges_by_part = [_cut_overlap(shared[dim], *chunk(total, pieces, i)) for i in range(pieces)]
    smaller = [(*shared[:dim], ranges, *shared[dim + 1 :]) for ranges in ranges_by_part if ranges]
    return tuple(part for one in smaller for part in split_overlap(one, most))


def outer_dims(shared: Overlap, size: tuple[int, ...]) -> int:
    """Count the first dims to split into single indices until an overlap is contiguous in a tensor of a size."""
    inner = len(shared)
    while inner and sum(n for _, _, n in shared[inner - 1]) == size[inner - 1]:
        inner -= 1
    return max(inner - 1, 0)


def split_outer(shared: Overlap, dims: int) -> list[Overlap]:
    """Split the first dims of an overlap into single indices."""
    singles = [[((a + i, b + i, 1),) for a, b, n in dim for i in range(n)] for dim in shared[:dims]]
    return [(*first, *shared[dims:]) for first in product(*singles)]


def _cut_overlap(ranges: tuple[tuple[int, int, int], ...], start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
    """Return the part `[start, stop)` of concatenated shared ranges."""
    result: list[tuple[int, int, int]] = []
    place = 0
    for a, b, n in ranges:
        first = max(start - place, 0)
        last = min(stop - place, n)
        result += [(a + first, b + first, last - first)] if first < last else []
        place += n
    return tuple(result)


_MOST_CORNERS = 1 << 21  # boxes with more count as no tiling: they come from files, which may be crafted


def is_tiling(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Return whether boxes cover each element of a tensor exactly once; empty boxes are ignored."""
    # How often an element is covered is a sum over the corners before it, each with the sign of inclusion-exclusion:
    # minus for an odd number of stops. Boxes tile the tensor if their signed corners and the full box's cancel.
    whole = full(shape)
    covered = [(box, 1) for box in boxes if volume(box)]
    covered += [(whole, -1)] if volume(whole) else []
    split = [dim for dim, ends in enumerate(whole) if any(box[dim] != ends for box, _ in covered)]
    if len(covered) << len(split) > _MOST_CORNERS:
        return False
    sides = [*product((0, 1), repeat=len(split))]
    corners: Counter[tuple[int, ...]] = Counter()
    for box, count in covered:
        for side in sides:
            corner = tuple(box[dim][end] for dim, end in zip(split, side, strict=True))
            corners[corner] += -count if sum(side) % 2 else count
    return not any(corners.values())
