"""Routes: which rank sends which part of a leaf to which rank, between any two shardings, in rounds of bounded size.

In: for each leaf its shape, the bytes of an element, and where it is and where it goes, on any two meshes.
Out: a cached, printable plan that is the same on every rank. What a rank already has it keeps; what several ranks have
is sent by each of them in turn. Law: the pieces that reach a rank, and those that it has, fill its target exactly once.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsharding import boxes
from fsharding.boxes import Grid, Overlap
from fsharding.mesh import AbstractMesh, abstract
from fsharding.sharding import NamedSharding

__all__ = ["BUDGET", "Holder", "Leaf", "Piece", "Plan", "everywhere", "grids", "holders", "plan_routes", "route"]

BUDGET = 64 << 20
"""Bytes a rank that the buffers of a plan take at most."""

_SMALLEST = 1 << 20
"""Pieces of a large leaf are not cut smaller than this many bytes."""


@dataclass(frozen=True)
class Leaf:
    """One leaf on its way.

    Attributes:
        shape: global shape.
        itemsize: bytes of an element on the wire.
        source: where it is; on an abstract mesh.
        target: where it goes; on an abstract mesh.
    """

    shape: tuple[int, ...]
    itemsize: int
    source: NamedSharding
    target: NamedSharding


@dataclass(frozen=True)
class Holder:
    """Ranks that hold the same part of a leaf."""

    grid: Grid
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """What one rank sends to another of one leaf at once.

    Attributes:
        leaf: its number.
        source: the rank that sends.
        target: the rank that receives.
        overlap: where it is in the local tensor of each.
        bytes: its size.
    """

    leaf: int
    source: int
    target: int
    overlap: Overlap
    bytes: int


@dataclass(frozen=True)
class Plan:
    """All that has to move.

    Attributes:
        leaves: what was asked.
        ranks: of both meshes, ascending.
        rounds: one all-to-all each; all pieces of a round have elements of one size.
    """

    leaves: tuple[Leaf, ...]
    ranks: tuple[int, ...]
    rounds: tuple[tuple[Piece, ...], ...]

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
        text = repr((self.leaves, self.ranks))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1

    def how(self, leaf: int) -> str:
        """In a word what happens to a leaf: "nothing", "slice" (no bytes sent), "gather" or "all-to-all"."""
        what = self.leaves[leaf]
        before, after = grids(what.source, what.shape), grids(what.target, what.shape)
        if not self.sent[leaf]:
            return "nothing" if before == after else "slice"
        grown = all(
            rank not in before
            or boxes.overlap_shape(boxes.overlap(before[rank], grid)) == boxes.grid_shape(before[rank])
            for rank, grid in after.items()
        )
        return "gather" if grown and set(before) <= set(after) else "all-to-all"


def everywhere(ranks: Sequence[int]) -> NamedSharding:
    """The sharding of a leaf that every one of some ranks has whole."""
    return NamedSharding(AbstractMesh(("dp",), (len(ranks),), tuple(ranks)))


@functools.lru_cache(maxsize=4096)
def holders(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[Holder, ...]:
    """Who holds what: ranks that hold the same part together, in the order of their first rank on the mesh."""
    mesh = abstract(sharding.mesh)
    found: dict[Grid, list[int]] = {}
    for coord in mesh.coordinates():
        grid = sharding.grid(shape, coord)
        if grid is not None:
            found.setdefault(grid, []).append(mesh.rank_at(coord))
    return tuple(Holder(grid, tuple(ranks)) for grid, ranks in found.items())


@functools.lru_cache(maxsize=4096)
def grids(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, Grid]:
    """What each rank holds; ranks that hold nothing at all are left out."""
    return {rank: holder.grid for holder in holders(sharding, shape) for rank in holder.ranks}


def route(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> Iterator[tuple[int, int, Overlap]]:
    """Every (sender, receiver, part) of one leaf; a rank that has a part already is its own sender."""
    turns: dict[Grid, int] = {}
    for goal in holders(target, shape):
        for have in holders(source, shape):
            shared = boxes.overlap(have.grid, goal.grid)
            if shared is None:
                continue
            for rank in goal.ranks:
                if rank in have.ranks:
                    yield rank, rank, shared
                else:
                    turn = turns.get(have.grid, 0)
                    turns[have.grid] = turn + 1
                    yield have.ranks[turn % len(have.ranks)], rank, shared


@functools.lru_cache(maxsize=256)
def plan_routes(leaves: tuple[Leaf, ...], budget: int = BUDGET) -> Plan:
    """Plans all leaves together.

    Buffers of at most a quarter of the budget, one to send and one to receive, are in use twice: one pair is filled
    while the other is on its way. Large leaves are cut so that all ranks have something to send in every round.

    Args:
        leaves: what moves; leaves with larger elements go first.
        budget: bytes a rank.
    """
    ranks = tuple(sorted({r for leaf in leaves for s in (leaf.source, leaf.target) for r in _ranks(s)}))
    limit = max(budget // 4, 1)
    most = min(max(limit // max(len(ranks), 1), _SMALLEST), limit)
    order = sorted(range(len(leaves)), key=lambda i: -leaves[i].itemsize)
    rounds: list[list[Piece]] = []
    begin, size = 0, 0
    filled: list[dict[tuple[str, int], int]] = []
    for i in order:
        leaf = leaves[i]
        if leaf.itemsize != size:
            begin, size = len(rounds), leaf.itemsize
        for source, target, shared in route(leaf.source, leaf.target, leaf.shape):
            if source == target:
                continue
            for part in boxes.split_overlap(shared, max(most // size, 1)):
                count = boxes.overlap_volume(part) * size
                keys = (("send", source), ("receive", target))
                place = _first_fit(filled, begin, keys, count, limit)
                while len(rounds) <= place:
                    rounds.append([])
                    filled.append({})
                rounds[place].append(Piece(i, source, target, part, count))
                for key in keys:
                    filled[place][key] = filled[place].get(key, 0) + count
    return Plan(leaves, ranks, tuple(tuple(pieces) for pieces in rounds))


def _first_fit(
    filled: Sequence[dict[tuple[str, int], int]], begin: int, keys: Sequence[tuple[str, int]], count: int, limit: int
) -> int:
    """The first round in which sender and receiver have room; a piece over the limit gets a round where they idle."""
    for place in range(begin, len(filled)):
        used = [filled[place].get(key, 0) for key in keys]
        if not any(used) or max(used) + count <= limit:
            return place
    return len(filled)


def _ranks(sharding: NamedSharding) -> Iterator[int]:
    mesh = abstract(sharding.mesh)
    return iter(mesh.ranks or range(mesh.size))
