"""Which rank writes which box, so that every element is written once and ranks write about the same number of bytes.

Guarantee: all ranks compute the same from the shardings, without a collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fsharding.base._compat import cache_on_its_mesh
from fsharding.checkpoint.state_leaves import StateLeaf
from fsharding.mesh.device_mesh import abstract
from fsharding.sharding import boxes
from fsharding.sharding.named_sharding import NamedSharding

__all__ = ["holders_of", "shares"]

Corner = tuple[int, ...]


def shares(leaves: Mapping[str, StateLeaf], ranks: Sequence[int]) -> dict[str, dict[Corner, int]]:
    """Return the rank that writes each box by path and corner: boxes with few holders come first, then large ones."""
    every = tuple(ranks)
    open_boxes = [
        (volume * x.local.dtype.itemsize, path, corner, holders)
        for path, x in leaves.items()
        for corner, (volume, holders) in holders_of(x, every).items()
    ]
    load: dict[int, int] = {}
    result: dict[str, dict[Corner, int]] = {path: {} for path in leaves}
    for size, path, corner, holders in sorted(open_boxes, key=lambda b: (len(b[3]), -b[0], b[1], b[2])):
        writer = min(holders, key=lambda rank: (load.get(rank, 0), rank))
        load[writer] = load.get(writer, 0) + size
        result[path][corner] = writer
    return result


def holders_of(x: StateLeaf, ranks: tuple[int, ...]) -> dict[Corner, tuple[int, tuple[int, ...]]]:
    """For each box of a leaf by its corner: how many elements it has, and which ranks hold it."""
    return _holders(x.sharding, x.shape) if x.sharding is not None else _whole(x.shape, ranks)


def _whole(shape: tuple[int, ...], ranks: tuple[int, ...]) -> dict[Corner, tuple[int, tuple[int, ...]]]:
    return {(0,) * len(shape): (math.prod(shape), ranks)}


@cache_on_its_mesh()
def _holders(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Corner, tuple[int, tuple[int, ...]]]:
    """For each box of a leaf by its corner: how many elements it has, and which ranks hold it."""
    mesh = abstract(sharding.mesh)
    empty = not math.prod(shape)
    held: dict[Corner, tuple[int, tuple[int, ...]]] = {}
    for coord in mesh.coordinates():
        for box in sharding.boxes(shape, coord):
            volume = boxes.volume(box)
            if volume or empty:
                corner = tuple(start for start, _ in box)
                held[corner] = volume, (*held.get(corner, (0, ()))[1], mesh.rank_at(coord))
    return held
