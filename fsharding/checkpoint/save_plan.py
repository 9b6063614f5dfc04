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
from fsharding.sharding.boxes import Box
from fsharding.sharding.named_sharding import NamedSharding

__all__ = ["holders_of", "shares"]


def shares(leaves: Mapping[str, StateLeaf], ranks: Sequence[int]) -> dict[str, dict[Box, int]]:
    """Return the rank that writes each box by path: boxes with few holders are given away first, then large ones."""
    every = tuple(ranks)
    open_boxes = [
        (boxes.volume(box) * x.local.dtype.itemsize, path, box, holders)
        for path, x in leaves.items()
        for box, holders in holders_of(x, every).items()
    ]
    load: dict[int, int] = {}
    result: dict[str, dict[Box, int]] = {path: {} for path in leaves}
    for size, path, box, holders in sorted(open_boxes, key=lambda b: (len(b[3]), -b[0], b[1], b[2])):
        writer = min(holders, key=lambda rank: (load.get(rank, 0), rank))
        load[writer] = load.get(writer, 0) + size
        result[path][box] = writer
    return result


def holders_of(x: StateLeaf, ranks: tuple[int, ...]) -> dict[Box, tuple[int, ...]]:
    """Return the ranks that hold each box of a leaf."""
    return _holders(x.sharding, x.shape) if x.sharding is not None else {boxes.full(x.shape): ranks}


@cache_on_its_mesh()
def _holders(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Box, tuple[int, ...]]:
    mesh = abstract(sharding.mesh)
    empty = not math.prod(shape)
    held: dict[Box, tuple[int, ...]] = {}
    for coord in mesh.coordinates():
        for box in sharding.boxes(shape, coord):
            # Empty boxes have no bytes; only an empty leaf is written as one, so that the files name it.
            if boxes.volume(box) or empty:
                held[box] = (*held.get(box, ()), mesh.rank_at(coord))
    return held
