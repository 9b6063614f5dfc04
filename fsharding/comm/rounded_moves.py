"""Moves leaves between shardings, rounded to a format on their way: codes travel, and numbers arrive.

In: what `redistribute` takes, and for some leaves a `Rounding`. Out: what it gives. Where the way of such a leaf is one
gather, codes and scales are gathered, and decoded into the memory of the result; else the leaf is rounded where it is.
Layers of a stack have no block in common, so a stack travels in parts: layers that have the format as codes, at most a
bucket of them at a time, and layers that have none in the dtype of the result.
Law: the result is the whole leaf rounded, whatever the cut. Parts and buckets follow from shardings alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding import tree
from fsharding._compat import cache_on_mesh
from fsharding.calls import named
from fsharding.comm import codes
from fsharding.comm.bucket_queue import BucketQueue, Queued
from fsharding.comm.codes import CodePlan
from fsharding.comm.handles import Handle
from fsharding.comm.move import Move, axis_sizes
from fsharding.comm.redistribute import (
    BUCKET_BYTES,
    Moving,
    Route,
    in_buckets,
    memory_for,
    route_of,
    start_redistribute,
)
from fsharding.comm.steps import Step, kinds_of, plan_steps
from fsharding.comm.wires import Plain
from fsharding.formats.blocks import Blocks
from fsharding.formats.codec import Scales
from fsharding.mesh.device_mesh import Mesh, axis_group
from fsharding.sharding.named_sharding import NamedSharding, like, local_of, sharding_of
from fsharding.tree import Tree

__all__ = ["Part", "Rounding", "batches_of", "plan_parts", "start_rounded", "travels_as_codes"]


@dataclass(frozen=True)
class Rounding:
    """How a leaf is rounded.

    Attributes:
        format: to which.
        kept: of the rows that this rank has of a stack those that have no format; None where no rank has such rows.
        noise: for keyed rounding, the numbers in [0, 1) of the rows from one to another of this rank's shard.
    """

    format: Blocks
    kept: tuple[int, ...] | None = None
    noise: Callable[[int, int], Tensor] | None = None

    def of_rows(self, start: int, stop: int) -> Rounding:
        """That of some of the rows of a stack."""
        kept = self.kept
        noise = self.noise
        some = None if kept is None else tuple(row - start for row in kept if start <= row < stop)
        return Rounding(self.format, some, None if noise is None else lambda a, b: noise(start + a, start + b))


class Part(NamedTuple):
    """A part of a leaf that travels by itself, or is rounded where it is.

    Attributes:
        rows: from which to which row of the shard, and of the result; None for all of a leaf that is not cut in parts.
        steps: to where it goes.
        plan: of its codes; None for rows that have no format.
        dtype: of the result.
        bytes: of memory for all that arrives.
    """

    rows: tuple[int, int] | None
    steps: tuple[Step, ...]
    plan: CodePlan | None
    dtype: torch.dtype
    bytes: int


def travels_as_codes(steps: Sequence[Step], kept: Sequence[int] | None) -> bool:
    """Whether a leaf travels as codes: in one gather, and not of a stack whose rows it joins, some without a format."""
    return len(steps) == 1 and steps[0].kind == "gather" and not (kept is not None and steps[0].dim == 0)


def plan_parts(
    source: NamedSharding,
    target: NamedSharding,
    shape: tuple[int, ...],
    format: Blocks,
    kept: tuple[int, ...],
    dtype: torch.dtype,
    where: tuple[tuple[str, int], ...] | None = None,
) -> tuple[Part, ...]:
    """The parts of a leaf that travels as codes, or stays where it is.

    Args:
        source: without assignments, as the target is: on the slice of the mesh that has the leaf.
        target: on the same mesh.
        shape: of the leaf there, of at least two dims.
        format: of codes.
        kept: rows of this rank that have no format.
        dtype: of the result.
        where: the coordinate of the rank, by axis; by default that of this process.
    """
    return _plan_parts(source.mesh, source, target, shape, format, kept, dtype, where, BUCKET_BYTES)


@cache_on_mesh(1024)
def _plan_parts(
    mesh: Mesh,
    source: NamedSharding,
    target: NamedSharding,
    shape: tuple[int, ...],
    format: Blocks,
    kept: tuple[int, ...],
    dtype: torch.dtype,
    where: tuple[tuple[str, int], ...] | None,
    limit: int,
) -> tuple[Part, ...]:
    steps = plan_steps(source, target)
    coord = None if where is None else dict(where)
    if len(shape) == 2 or source.axes(0) != target.axes(0):
        plan = codes.plan_codes(mesh, source, target, shape, format, where)
        return (Part(None, steps, plan, dtype, codes.gathered_bytes(plan)),)
    count = target.local_shape(shape, coord)[0]
    source = _of_rows(source)
    target = _of_rows(target)
    row = math.prod(target.local_shape((1, *shape[1:]), coord))
    parts = list[Part]()
    of_a_row = codes.gathered_bytes(codes.plan_codes(mesh, source, target, (1, *shape[1:]), format, where))
    longest = max(1, limit // max(1, of_a_row))
    for is_kept, run in itertools.groupby(range(count), lambda i: i in kept):
        rows = [*run]
        for n in range(0, len(rows), len(rows) if is_kept else longest):
            some = rows[n:] if is_kept else rows[n : n + longest]
            part = (len(some), *shape[1:])
            plan = None
            size = len(some) * row * dtype.itemsize
            if not is_kept:
                plan = codes.plan_codes(mesh, source, target, part, format, where)
                size = codes.gathered_bytes(plan)
            parts.append(Part((some[0], some[-1] + 1), steps, plan, dtype, size))
    return tuple(parts)


def _of_rows(sharding: NamedSharding) -> NamedSharding:
    """The sharding of the rows that a rank has, as a leaf of their own."""
    owned = tuple(axis for axis in sharding.owned if axis not in sharding.spec.axes(0))
    return replace(sharding, spec=sharding.spec.replace(0, ()), owned=owned)


def batches_of(parts: Sequence[Part]) -> list[list[int]]:
    """Which parts travel together, by number, in the order in which they are sent: codes apart from each dtype."""
    groups: dict[object, list[int]] = {}
    for i, part in enumerate(parts):
        if part.steps:
            groups.setdefault((kinds_of(part.steps), None if part.plan is not None else part.dtype), []).append(i)
    return [
        batch for members in groups.values() for batch in in_buckets(members, lambda i: parts[i].bytes, BUCKET_BYTES)
    ]


# --------------------------------------------------------------------------------------------------------- what travels
class _Piece(NamedTuple):
    """A part of a leaf, with its values.

    Attributes:
        part: which.
        shard: of it, in the dtype of the leaf.
        result: where it goes.
        noise: for keyed rounding.
        scales: of its blocks; None without a format.
    """

    part: Part
    shard: Tensor
    result: Tensor
    noise: Callable[[], Tensor] | None
    scales: Scales | None = None


def _start(pieces: list[_Piece], mesh: Mesh) -> Handle[Any]:
    """Send pieces together; with plans, they are quantized now and decoded once they are gathered."""
    results = [piece.result for piece in pieces]
    steps = [piece.part.steps for piece in pieces]
    if pieces[0].part.plan is None:
        shards = [piece.shard.to(piece.part.dtype) for piece in pieces]
        lengths = tuple((x.shape[step.dim],) for x, (step,) in zip(results, steps, strict=True))
        dtype = shards[0].dtype
        return Move(mesh, tuple(steps), (), lengths, Plain(dtype), dtype).start(shards, results)
    axes = steps[0][0].axes
    plans, own = _encoded(pieces)
    bucket = codes.code_bucket(plans, [step.dim for (step,) in steps], axis_sizes(mesh, axes))
    handle = codes.gather_codes(bucket, own, axis_group(mesh, axes))
    return handle.then(lambda flat: codes.decoded(plans, codes.from_bytes(bucket, flat, own), results))


def _encoded(pieces: Sequence[_Piece]) -> tuple[list[CodePlan], list[codes.Coded]]:
    """Plans and codes of pieces, all of which have a format."""
    plans = [piece.part.plan for piece in pieces if piece.part.plan is not None]
    scales = [piece.scales for piece in pieces if piece.scales is not None]

    def noise(number: int) -> Tensor:
        draw = pieces[number].noise
        assert draw is not None
        return draw()

    return plans, codes.encode_shards(plans, [piece.shard for piece in pieces], scales, noise)


class _Leaf(NamedTuple):
    """A leaf on its way.

    Attributes:
        shard: in its own dtype.
        result: where it goes.
        rounding: of it.
        source: on the slice of the mesh that has it.
        target: the same.
        shape: of the leaf there.
    """

    shard: Tensor
    result: Tensor
    rounding: Rounding
    source: NamedSharding
    target: NamedSharding
    shape: tuple[int, ...]

    def pieces(self) -> list[_Piece]:
        """Its parts, without scales."""
        rounding = self.rounding
        parts = plan_parts(
            self.source, self.target, self.shape, rounding.format, rounding.kept or (), self.result.dtype
        )
        return [self._piece(part) for part in parts]

    def _piece(self, part: Part) -> _Piece:
        first, last = part.rows or (0, self.shard.shape[0])
        draw = self.rounding.noise
        noise = None if draw is None else lambda: draw(first, last)
        if part.rows is None:
            return _Piece(part, self.shard, self.result, noise)
        return _Piece(part, self.shard[first:last], self.result[first:last], noise)


@torch.no_grad()
def _batches(leaves: Sequence[_Leaf], mesh: Mesh) -> list[Queued]:
    """Rounds parts that stay where they are, and makes buckets of the others.

    Collective where ranks share blocks: they tell each other the largest magnitudes of all leaves at once.
    """
    pieces = [piece for leaf in leaves for piece in leaf.pieces()]
    plans = [piece.part.plan for piece in pieces if piece.part.plan is not None]
    shards = [piece.shard for piece in pieces if piece.part.plan is not None]
    scales = iter(codes.shared_scales(plans, shards, mesh))
    pieces = [piece if piece.part.plan is None else piece._replace(scales=next(scales)) for piece in pieces]
    for piece in (piece for piece in pieces if not piece.part.steps):
        if piece.part.plan is None:
            piece.result.copy_(piece.shard)
        else:
            codes.decoded(*_encoded([piece]), [piece.result])
    batches = [[pieces[i] for i in batch] for batch in batches_of([piece.part for piece in pieces])]
    return [
        Queued(sum(piece.part.bytes for piece in batch), functools.partial(_start, batch, mesh)) for batch in batches
    ]


# --------------------------------------------------------------------------------------------------------- whole trees
@named("fs.redistribute")
def start_rounded(
    values: Tree,
    shardings: Tree,
    roundings: Sequence[Rounding | None],
    queue: BucketQueue,
    *,
    dtypes: Tree,
    into: Tree = None,
) -> Moving:
    """`start_redistribute`, with leaves that are rounded on their way.

    Args:
        values: tree of DTensors, and so are the others; they must not change before `wait`.
        shardings: of the result.
        roundings: for each leaf in order; None for one that is only cast. Such a leaf is one that this rank has.
        queue: that starts the buckets.
        dtypes: of the result, and of a leaf with a rounding the one that codes are decoded to.
        into: memory for the result, also of what is only rounded.

    Raises:
        LayoutError: as `redistribute`.
        TreeError: the trees do not match.
    """
    leaves, spec = tree.flatten(values)
    targets, kinds = (tree.flatten_up_to(spec, x) for x in (shardings, dtypes))
    homes = [None] * len(leaves) if into is None else tree.flatten_up_to(spec, into)
    rounded: list[_Leaf] = []
    for i, rounding in enumerate(roundings):
        leaf = leaves[i]
        target = targets[i]
        dtype = kinds[i]
        route = route_of(leaf, target) if rounding is not None else None
        if rounding is None or route is None:
            continue
        travels = travels_as_codes(route.steps, rounding.kept)
        moved = _leaf(leaf, route, rounding, dtype, homes[i], travels=travels)
        rounded.append(moved)
        if travels:
            leaves[i], targets[i], kinds[i] = route.target.at_rest(moved.result, tuple(leaf.shape)), None, None
        else:
            leaves[i] = like(leaf, moved.result)
    # Nothing is in a bucket before all ranks know the scales.
    batches = _batches(rounded, rounded[0].target.mesh) if rounded else []
    queue.add(batches)
    values, shardings, dtypes = (tree.unflatten(spec, x) for x in (leaves, targets, kinds))
    return start_redistribute(values, shardings, queue, dtypes=dtypes, into=into)


def _leaf(leaf: DTensor, route: Route, rounding: Rounding, dtype: torch.dtype, home: Any, *, travels: bool) -> _Leaf:
    """A leaf to where it is whole, or rounded in its place before it travels in another way."""
    shard = local_of(leaf)
    target = route.target.slice_of_mesh()
    source = replace(sharding_of(leaf), mesh=target.mesh)
    if travels:
        result = memory_for(home, route.shape, dtype, shard.device)
    else:
        target = source
        result = memory_for(None if route.steps else home, tuple(shard.shape), dtype, shard.device)
    return _Leaf(shard, result, rounding, source, target, tuple(leaf.shape))
