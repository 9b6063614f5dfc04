"""Plan which rank sends which part of a leaf to which rank, between any two shardings, in rounds of bounded size.

Guarantee: the pieces that a rank receives and those that it holds already fill its target exactly once.
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

# Most bytes of buffers per rank.
BUDGET = 64 << 20

# Most bytes that a rank sends in a round: few enough that packed data is still in a cache when it is sent.
_ROUND = 4 << 20

# Pieces are split until each is contiguous on one side, unless that makes them smaller than this many bytes.
_CONTIGUOUS = 1 << 18


@dataclass(frozen=True)
class MovedLeaf:
    """A leaf to reshard; both shardings are on abstract meshes."""

    shape: tuple[int, ...]  # global shape
    itemsize: int  # bytes of an element on the wire
    source: NamedSharding
    target: NamedSharding


@dataclass(frozen=True)
class Piece:
    """One message: a part of one leaf."""

    leaf: int  # index of the leaf
    source: int  # sending rank
    target: int  # receiving rank
    overlap: Overlap  # its position in the local tensors of both
    bytes: int
    number: int  # index among all pieces of the plan, which is also the tag of the message


@dataclass(frozen=True)
class Plan:
    """The plan of a reshard. Equal on all ranks, since each computes it from the same leaves."""

    leaves: tuple[MovedLeaf, ...]
    ranks: tuple[int, ...]  # ranks of both meshes, ascending
    rounds: tuple[tuple[Piece, ...], ...]  # one exchange each; all elements of a round have the same size

    @functools.cached_property
    def sent(self) -> tuple[dict[int, int], ...]:
        """For each leaf, the bytes that each rank sends, without ranks that send nothing."""
        result: tuple[dict[int, int], ...] = tuple({} for _ in self.leaves)
        for piece in (piece for pieces in self.rounds for piece in pieces):
            result[piece.leaf][piece.source] = result[piece.leaf].get(piece.source, 0) + piece.bytes
        return result

    @functools.cached_property
    def digest(self) -> int:
        """A 63-bit hash that ranks compare before they send anything."""
        return digest(repr((self.leaves, self.ranks)))

    def how(self, leaf: int) -> str:
        """Return what happens to a leaf: "nothing", "slice" (no bytes are sent), "gather" or "all-to-all"."""
        what = self.leaves[leaf]
        before = grids(what.source, what.shape)
        after = grids(what.target, what.shape)
        if not self.sent[leaf]:
            return "nothing" if before == after else "slice"
        grown = all(rank in after and boxes.covers(after[rank], grid) for rank, grid in before.items())
        return "gather" if grown else "all-to-all"


def check_routes(plan: Plan) -> None:
    """Assert that the parts that each rank receives or holds tile its target, and that sizes are right."""
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
    """Return the sharding of a leaf that is replicated on some ranks."""
    return NamedSharding(AbstractMesh(("dp",), (len(ranks),), tuple(ranks)))


@cache_on_its_mesh
def _holders(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Grid, list[int]]:
    """Return the ranks that hold each part, both in the order of the mesh."""
    mesh = abstract(sharding.mesh)
    result: dict[Grid, list[int]] = {}
    for coord in mesh.coordinates():
        grid = sharding.grid(shape, coord)
        if grid is not None:
            result.setdefault(grid, []).append(mesh.rank_at(coord))
    return result


@cache_on_its_mesh
def grids(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, Grid]:
    """Return the grid of each rank, without ranks that hold no part."""
    return {rank: grid for grid, ranks in _holders(sharding, shape).items() for rank in ranks}


def route(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> Iterator[tuple[int, int, Overlap]]:
    """Yield every (sender, receiver, part) of one leaf; a rank that holds a part already is its own sender."""
    # Ranks that hold the same part send in turns, so that each sends about as much.
    turns: dict[Grid, int] = {}
    having = _holders(source, shape)
    by_dim = [tuple(dict.fromkeys(grid[dim] for grid in having)) for dim in range(len(shape))]
    for wanted, members in _holders(target, shape).items():
        # Overlaps are found dim by dim, so that the cost grows with the number of ranges, not of pairs of ranks.
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
    # Each rank has two pairs of buffers, to send and to receive, of at most a quarter of the budget each: one pair is
    # filled while the other is in flight. Leaves are split so that every rank sends in every round, and so that
    # pieces are sent or received without a copy if possible.
    ranks = tuple(sorted({r for leaf in leaves for s in (leaf.source, leaf.target) for r in abstract(s.mesh).members}))
    limit = max(min(budget // 4, _ROUND), 1)
    most = max(limit // 4, 1)
    rounds = _Rounds(limit, most)
    number = 0
    for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].itemsize):
        leaf = leaves[i]
        for source, target, shared in route(leaf.source, leaf.target, leaf.shape):
            for part in _split(leaf, source, target, shared, most) if source != target else ():
                rounds.add(Piece(i, source, target, part, boxes.overlap_volume(part) * leaf.itemsize, number), leaf)
                number += 1
    return Plan(leaves, ranks, tuple(tuple(pieces) for pieces in rounds.pieces))


class _Rounds:
    """Assign each piece to the first round in which sender and receiver have room."""

    def __init__(self, limit: int, most: int) -> None:
        self.pieces: list[list[Piece]] = []  # by round
        self._limit = limit  # bytes that a rank may send, and receive, in a round
        self._most = most  # bytes of the largest piece
        self._filled: list[dict[tuple[str, int], int]] = []  # by round, the bytes that each rank sends and receives
        # All elements of a round have one size, so that offsets in its buffers are aligned; the next begins new rounds.
        self._size = 0
        self._begin = 0
        # The first round of this size in which the largest piece may still fit, by way and rank. It only moves on, so
        # the search takes time linear in the number of pieces.
        self._open: dict[tuple[str, int], int] = {}

    def add(self, piece: Piece, leaf: MovedLeaf) -> None:
        """Add a piece; one above the limit gets a round in which both sides are idle."""
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


def _split(leaf: MovedLeaf, source: int, target: int, shared: Overlap, most: int) -> Iterator[Overlap]:
    """Split a part to at most `most` bytes, each contiguous on one side if they stay large enough."""
    grids_of = grids(leaf.source, leaf.shape)[source], grids(leaf.target, leaf.shape)[target]
    sizes = [boxes.grid_shape(grid) for grid in grids_of]
    outer = min(boxes.outer_dims(shared, size) for size in sizes)
    parts = [shared]
    if boxes.overlap_volume(shared) * leaf.itemsize // boxes.overlap_volume(shared[:outer]) >= _CONTIGUOUS:
        parts = boxes.split_outer(shared, outer)
    for part in parts:
        yield from boxes.split_overlap(part, max(most // leaf.itemsize, 1))
