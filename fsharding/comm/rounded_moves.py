"""Move leaves between shardings and round some of them to a format: quantized values are sent, and dequantized.

In: what `redistribute` takes, and for some leaves a `Rounding`. Out: what it returns. A leaf that is one gather away is
sent quantized and dequantized into the memory of the result; any other leaf is rounded where it is, and then moved.
Layers of a stack share no block, so a stack is sent in parts: layers that have a format, at most a bucket of them at a
time, and layers that have none in the dtype of the result.
Guarantee: the result is the full leaf rounded, however it is sharded. Parts and buckets follow from shardings alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base._compat import cache_on_mesh
from fsharding.base.calls import named
from fsharding.base.tree import Tree
from fsharding.comm.bucket_queue import BucketQueue, Queued
from fsharding.comm.handles import Handle
from fsharding.comm.leaf_memory import memory_of, on_device, to_memory
from fsharding.comm.move import axis_sizes
from fsharding.comm.redistribute import (
    BUCKET_BYTES,
    Moving,
    Route,
    in_buckets,
    memory_for,
    route_of,
    start_redistribute,
)
from fsharding.comm.step_agreement import compare_plans
from fsharding.comm.steps import Step, plan_steps
from fsharding.comm.wires import Plain, Quantizing, SentLeaf, agree, start_gather
from fsharding.formats.blocks import Blocks
from fsharding.mesh.device_mesh import Mesh, axis_group
from fsharding.sharding.named_sharding import NamedSharding, like, local_of, sharding_of

__all__ = ["Part", "Rounding", "batches_of", "plan_parts", "start_rounded", "travels_as_codes"]


@dataclass(frozen=True)
class Rounding:
    """How a leaf is rounded.

    Attributes:
        kept: indices of this rank's rows of a stack that are not quantized; None if no rank has any.
        noise: `noise(start, stop)` returns the numbers in [0, 1) by which these rows of the shard are rounded.
    """

    format: Blocks
    kept: tuple[int, ...] | None = None
    noise: Callable[[int, int], Tensor] | None = None

    def of_rows(self, start: int, stop: int) -> Rounding:
        """Restrict the rounding to some rows of a stack."""
        kept = self.kept
        noise = self.noise
        some = None if kept is None else tuple(row - start for row in kept if start <= row < stop)
        return Rounding(self.format, some, None if noise is None else lambda a, b: noise(start + a, start + b))


class Part(NamedTuple):
    """A part of a leaf that is sent by itself, or rounded where it is.

    Attributes:
        rows: start and stop in the shard and in the result; None for a leaf that is not split.
        leaf: how it is sent.
        axes: the axes over which it is gathered; none if it stays.
        bytes: memory for everything that is received.
    """

    rows: tuple[int, int] | None
    leaf: SentLeaf
    axes: tuple[str, ...]
    bytes: int


def travels_as_codes(steps: Sequence[Step], kept: Sequence[int] | None) -> bool:
    """Whether a leaf is sent quantized: in one gather, which does not join rows of a stack some of which are kept."""
    return len(steps) == 1 and steps[0].kind == "gather" and not (kept is not None and steps[0].dim == 0)


def plan_parts(
    source: NamedSharding,
    target: NamedSharding,
    shape: tuple[int, ...],
    wire: Quantizing,
    kept: tuple[int, ...],
) -> tuple[Part, ...]:
    """Split a leaf that is sent quantized, or quantized where it is, into parts of one wire.

    Args:
        source: without assignments, as the target is: on the slice of the mesh that has the leaf.
        target: on the same mesh; one gather away, or the same.
        shape: of the leaf there, of at least two dims.
        wire: of the rows that have a format.
        kept: rows of this rank that have none.
    """
    return _plan_parts(source.mesh, source, target, shape, wire, kept, BUCKET_BYTES)


@cache_on_mesh(1024)
def _plan_parts(
    mesh: Mesh,
    source: NamedSharding,
    target: NamedSharding,
    shape: tuple[int, ...],
    wire: Quantizing,
    kept: tuple[int, ...],
    limit: int,
) -> tuple[Part, ...]:
    steps = plan_steps(source, target)
    axes = steps[0].axes if steps else ()
    dim = steps[0].dim if steps else 0

    def part(rows: tuple[int, int] | None, leaf: SentLeaf) -> Part:
        return Part(rows, leaf, axes, leaf.wire.gathered_bytes(leaf))

    if len(shape) == 2 or source.axes(0) != target.axes(0):
        return (part(None, SentLeaf(wire, source, target, shape, dim)),)
    a_row = SentLeaf(wire, _of_rows(source), _of_rows(target), (1, *shape[1:]), dim)
    longest = max(1, limit // max(1, wire.gathered_bytes(a_row)))
    parts = list[Part]()
    for is_kept, run in itertools.groupby(range(target.local_shape(shape)[0]), lambda row: row in kept):
        rows = [*run]
        at_once = len(rows) if is_kept else longest
        for first in range(rows[0], rows[-1] + 1, at_once):
            stop = min(first + at_once, rows[-1] + 1)
            of_rows = a_row._replace(shape=(stop - first, *shape[1:]))
            parts.append(part((first, stop), of_rows._replace(wire=Plain(wire.dtype)) if is_kept else of_rows))
    return tuple(parts)


def _of_rows(sharding: NamedSharding) -> NamedSharding:
    """The sharding of the rows that a rank has, as a leaf of their own."""
    owned = tuple(axis for axis in sharding.owned if axis not in sharding.spec.axes(0))
    return replace(sharding, spec=sharding.spec.replace(0, ()), owned=owned)


def batches_of(parts: Sequence[Part]) -> list[list[int]]:
    """Which parts are sent together, by number, in the order in which they are sent."""
    groups: dict[object, list[int]] = {}
    for i, part in enumerate(parts):
        if part.axes:
            wire = part.leaf.wire
            groups.setdefault((part.axes, type(wire), wire.bucket_key), []).append(i)
    return [
        batch for members in groups.values() for batch in in_buckets(members, lambda i: parts[i].bytes, BUCKET_BYTES)
    ]


# ------------------------------------------------------------------------------------------------------- what is sent
class _Piece(NamedTuple):
    """A part of a leaf, with its values.

    Attributes:
        part: which.
        shard: of it, in the dtype of the leaf.
        result: where it goes.
        noise: for keyed rounding.
    """

    part: Part
    shard: Tensor
    result: Tensor
    noise: Callable[[], Tensor] | None


def _start(pieces: Sequence[_Piece], agreed: Sequence[Any], mesh: Mesh) -> Handle[Any]:
    """Send pieces together, or round them where they are."""
    leaves = [piece.part.leaf for piece in pieces]
    axes = pieces[0].part.axes
    if axes:
        device_type = pieces[0].shard.device.type
        outline = lambda: repr([(piece.part.rows, piece.part.leaf.wire) for piece in pieces])  # noqa: E731
        compare_plans(axis_group(mesh, axes), device_type, outline)
    payload = leaves[0].wire.payload(leaves, axis_sizes(mesh, axes))

    def noise(number: int) -> Tensor:
        draw = pieces[number].noise
        assert draw is not None
        return draw()

    shards = [piece.shard for piece in pieces]
    results = [piece.result for piece in pieces]
    return start_gather(payload, shards, mesh, axes, noise=noise, agreed=agreed, into=results)


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
        """Its parts, with their values."""
        wire = Quantizing(self.result.dtype, self.rounding.format)
        parts = plan_parts(self.source, self.target, self.shape, wire, self.rounding.kept or ())
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
    """Round parts that stay where they are, and make buckets of the others.

    Collective where ranks share blocks: they tell each other the largest magnitudes of all leaves at once.
    """
    pieces = [piece for leaf in leaves for piece in leaf.pieces()]
    agreed = agree([piece.part.leaf for piece in pieces], [piece.shard for piece in pieces], mesh)
    for piece, scales in zip(pieces, agreed, strict=True):
        if not piece.part.axes:
            _start([piece], [scales], mesh).wait()

    def queued(batch: list[int]) -> Queued:
        sent = [pieces[i] for i in batch]
        start = functools.partial(_start, sent, [agreed[i] for i in batch], mesh)
        return Queued(sum(piece.part.bytes for piece in sent), start)

    return [queued(batch) for batch in batches_of([piece.part for piece in pieces])]


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
        values: tree of DTensors, which must not change before `wait`; other arguments are trees as well.
        roundings: one per leaf; None if the leaf is only cast, or this rank has no part of it.
        dtypes: dtypes of the result; quantized values are decoded to them.
        into: memory for the result, also for leaves that are only rounded.

    Raises:
        LayoutError: as `redistribute`.
        TreeError: the trees do not match.
    """
    leaves, spec = tree.flatten(values)
    targets, kinds = (tree.flatten_up_to(spec, x) for x in (shardings, dtypes))
    wanted = [*targets]
    numbers: list[int] = []  # of leaves that are rounded on the device and kept elsewhere
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
        away = target.memory != "device"
        fails = memory_of(local_of(leaf), leaf.device_mesh.device_type) == "disk"
        moved = _leaf(leaf, route, rounding, dtype, None if away or fails else homes[i], travels=travels)
        rounded.append(moved)
        if away:
            numbers.append(i)
        if travels:
            leaves[i], targets[i], kinds[i] = route.target.at_rest(moved.result, tuple(leaf.shape)), None, None
        else:
            leaves[i] = like(leaf, moved.result)
    # Nothing is in a bucket before all ranks know the scales.
    batches = _batches(rounded, rounded[0].target.mesh) if rounded else []
    queue.add(batches)
    values, shardings, dtypes = (tree.unflatten(spec, x) for x in (leaves, targets, kinds))
    moving = start_redistribute(values, shardings, queue, dtypes=dtypes, into=into)

    def placed() -> Tree:
        flat = tree.leaves(moving.result())
        for i in numbers:
            flat[i] = like(flat[i], to_memory(local_of(flat[i]), wanted[i]))
        return tree.unflatten(spec, flat)

    return moving._replace(result=placed) if numbers else moving


def _leaf(leaf: DTensor, route: Route, rounding: Rounding, dtype: torch.dtype, home: Any, *, travels: bool) -> _Leaf:
    """A leaf to where it is whole, or rounded in its place before it travels in another way."""
    shard = on_device(local_of(leaf), leaf.device_mesh.device_type)
    target = route.target.slice_of_mesh()
    source = replace(sharding_of(leaf), mesh=target.mesh)
    if travels:
        result = memory_for(home, route.shape, dtype, shard.device)
    else:
        target = source
        result = memory_for(None if route.steps else home, tuple(shard.shape), dtype, shard.device)
    return _Leaf(shard, result, rounding, source, target, tuple(leaf.shape))
