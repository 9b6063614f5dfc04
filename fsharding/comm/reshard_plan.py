"""Routes: which rank sends which part of a leaf to which rank, between any two shardings, in rounds of bounded size.

Guarantee: the pieces that a rank receives, and those that it has, fill its target exactly once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from fsharding.base._compat import cache_on_its_mesh
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.consistency import digest
from fsharding.mesh.device_mesh import abstract
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Grid, Overlap, Runs
from fsharding.sharding.named_sharding import NamedSharding

__all__ = ["BUDGET", "MovedLeaf", "Piece", "Plan", "check_routes", "everywhere", "grids", "plan_routes", "route"]

BUDGET = 64 << 20
"""Bytes a rank that the buffers of a plan take at most."""

_ROUND = 4 << 20
"""Bytes that a rank sends in a round: so little that what was packed is still in a cache when it is sent."""

_STRETCH = 1 << 18
"""Pieces are cut so that they lie in one stretch of memory on one side, unless that makes them smaller than this."""


@dataclass(frozen=True)
class MovedLeaf:
    """One leaf on its way."""

    shape: tuple[int, ...]  # global shape
    itemsize: int  # bytes of an element on the wire
    source: NamedSharding  # where it is; on an abstract mesh
    target: NamedSharding  # where it goes; on an abstract mesh


@dataclass(frozen=True)
class Piece:
    """One message: a part of one leaf from one rank to another."""

    leaf: int  # its number
    source: int  # the rank that sends
    target: int  # the rank that receives
    overlap: Overlap  # where it is in the local tensor of each
    bytes: int  # its size
    number: int  # its place among all pieces of the plan


@dataclass(frozen=True)
class Plan:
    """All that has to move."""

    leaves: tuple[MovedLeaf, ...]  # what was asked
    ranks: tuple[int, ...]  # of both meshes, ascending
    rounds: tuple[tuple[Piece, ...], ...]  # one all-to-all each; all pieces of a round have elements of one size

    @functools.cached_property
    def sent(self) -> tuple[dict[int, int], ...]:
        """For each leaf, the bytes that each rank sends; ranks that send nothing are left out."""
        result: tuple[dict[int, int], ...] = tuple({} for _ in self.leaves)
        for piece in (piece for pieces in self.rounds for piece in pieces):
            result[piece.leaf][piece.source] = result[piece.leaf].get(piece.source, 0) + piece.bytes
        return result

    @functools.cached_property
    def digest(self) -> int:
        """A number of 63 bits that ranks compare before anything moves."""
        return digest(repr((self.leaves, self.ranks)))

    def how(self, leaf: int) -> str:
        """In a word what happens to a leaf: "nothing", "slice" (no bytes sent), "gather" or "all-to-all"."""
        what = self.leaves[leaf]
        before = grids(what.source, what.shape)
        after = grids(what.target, what.shape)
        if not self.sent[leaf]:
            return "nothing" if before == after else "slice"
        grown = all(rank in after and boxes.covers(after[rank], grid) for rank, grid in before.items())
        return "gather" if grown else "all-to-all"


def check_routes(plan: Plan) -> None:
    """Assert that what each rank receives, and what it has, fill its target once, and that sizes are right."""
    received: dict[tuple[int, int], list[Overlap]] = {}
    for piece in (piece for pieces in plan.rounds for piece in pieces):
        assert piece.bytes == boxes.overlap_volume(piece.overlap) * plan.leaves[piece.leaf].itemsize, piece
        received.setdefault((piece.leaf, piece.target), []).append(piece.overlap)
    for number, leaf in enumerate(plan.leaves):
        sources = grids(leaf.source, leaf.shape)
        for rank, grid in grids(leaf.target, leaf.shape).items():
            own = boxes.overlap(sources[rank], grid) if rank in sources else None
            parts = [*received.pop((number, rank), []), *([] if own is None else [own])]
            places = [place for part in parts for _, place, _ in boxes.overlap_slices(part)]
            filled = [tuple((one.start, one.stop) for one in place) for place in places]
            assert boxes.is_tiling(filled, boxes.grid_shape(grid)), (leaf, rank)
    assert not received, received


def everywhere(ranks: Sequence[int]) -> NamedSharding:
    """The sharding of a leaf that every one of some ranks has whole."""
    return NamedSharding(AbstractMesh(("dp",), (len(ranks),), tuple(ranks)))


@cache_on_its_mesh()
def _holders(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Grid, list[int]]:
    """Return the ranks that hold each part, in the order of their first rank on the mesh."""
    mesh = abstract(sharding.mesh)
    result: dict[Grid, list[int]] = {}
    for coord in mesh.coordinates():
        grid = sharding.grid(shape, coord)
        if grid is not None:
            result.setdefault(grid, []).append(mesh.rank_at(coord))
    return result


@cache_on_its_mesh()
def grids(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, Grid]:
    """The grid of each rank; ranks that hold nothing at all are left out."""
    return {rank: grid for grid, ranks in _holders(sharding, shape).items() for rank in ranks}


def route(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> Iterator[tuple[int, int, Overlap]]:
    """Every (sender, receiver, part) of one leaf; a rank that has a part already is its own sender."""
    turns: dict[Grid, int] = {}
    having = _holders(source, shape)
    by_dim = [tuple(dict.fromkeys(grid[dim] for grid in having)) for dim in range(len(shape))]
    for wanted, members in _holders(target, shape).items():
        # Ranges meet dim by dim, so that the cost grows with the ranges, not with all pairs of ranks.
        met = [_meeting(by_dim[dim], held) for dim, held in enumerate(wanted)]
        for several in product(*met):
            grid = tuple(held for held, _ in several)
            shared = tuple(common for _, common in several)
            ranks = having.get(grid, ())
            for rank in members if ranks else ():
                if rank in ranks:
                    yield rank, rank, shared
                else:
                    turn = turns.get(grid, 0)
                    turns[grid] = turn + 1
                    yield ranks[turn % len(ranks)], rank, shared


@functools.lru_cache(maxsize=1 << 14)
def _meeting(sources: tuple[Runs, ...], held: Runs) -> tuple[tuple[Runs, tuple[tuple[int, int, int], ...]], ...]:
    """Return the source runs that overlap `held`, each with its overlap."""
    return tuple((runs, shared) for runs in sources if (shared := boxes.meet(runs, held)))


@functools.lru_cache(maxsize=256)
def plan_routes(leaves: tuple[MovedLeaf, ...], budget: int = BUDGET) -> Plan:
    """Plan all leaves together; leaves with larger elements go first."""
    # There are two pairs of buffers, to send and to receive, each of at most a quarter of the budget: one pair is
    # filled while the other is in flight. Leaves are split so that every rank sends in every round, and so that
    # pieces are sent or received without a copy where possible.
    ranks = tuple(sorted({r for leaf in leaves for s in (leaf.source, leaf.target) for r in abstract(s.mesh).members}))
    limit = max(min(budget // 4, _ROUND), 1)
    most = max(limit // 4, 1)
    rounds = _Rounds(limit, most)
    number = 0
    for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].itemsize):
        leaf = leaves[i]
        for source, target, shared in route(leaf.source, leaf.target, leaf.shape):
            for part in _cut(leaf, source, target, shared, most) if source != target else ():
                rounds.add(Piece(i, source, target, part, boxes.overlap_volume(part) * leaf.itemsize, number), leaf)
                number += 1
    return Plan(leaves, ranks, tuple(tuple(pieces) for pieces in rounds.pieces))


class _Rounds:
    """Puts pieces in the first round in which sender and receiver have room, elements of one size in each round."""

    def __init__(self, limit: int, most: int) -> None:
        self.pieces: list[list[Piece]] = []
        self._limit = limit
        self._most = most
        self._filled: list[dict[tuple[str, int], int]] = []
        self._size = 0
        self._open: dict[tuple[str, int], int] = {}
        self._begin = 0

    def add(self, piece: Piece, leaf: MovedLeaf) -> None:
        """Adds a piece; one over the limit gets a round where both sides idle."""
        if leaf.itemsize != self._size:
            self._size, self._begin, self._open = leaf.itemsize, len(self.pieces), {}
        keys = (("send", piece.source), ("receive", piece.target))
        place = max(self._open.get(key, self._begin) for key in keys)
        while not self._has_room(place, keys, piece.bytes):
            place += 1
        while len(self.pieces) <= place:
            self.pieces.append([])
            self._filled.append({})
        self.pieces[place].append(piece)
        for key in keys:
            self._filled[place][key] = self._filled[place].get(key, 0) + piece.bytes
            first = self._open.get(key, self._begin)
            while first < len(self._filled) and self._filled[first].get(key, 0) + self._most > self._limit:
                first += 1
            self._open[key] = first

    def _has_room(self, place: int, keys: Sequence[tuple[str, int]], count: int) -> bool:
        if place >= len(self._filled):
            return True
        used = [self._filled[place].get(key, 0) for key in keys]
        return not any(used) or max(used) + count <= self._limit


def _cut(leaf: MovedLeaf, source: int, target: int, shared: Overlap, most: int) -> Iterator[Overlap]:
    """Parts of at most so many bytes, each in one stretch of memory on one side if that leaves them large enough."""
    grids_of = grids(leaf.source, leaf.shape)[source], grids(leaf.target, leaf.shape)[target]
    sizes = [boxes.grid_shape(grid) for grid in grids_of]
    outer = min(boxes.outer_dims(shared, size) for size in sizes)
    parts = [shared]
    if boxes.overlap_volume(shared) * leaf.itemsize // boxes.overlap_volume(shared[:outer]) >= _STRETCH:
        parts = boxes.split_outer(shared, outer)
    for part in parts:
        yield from boxes.split_overlap(part, max(most // leaf.itemsize, 1))
