"""Move the leaves of a tree between shardings that differ along data axes: slices and gathers, in buckets.

In: DTensors and a tree of `NamedSharding`s on the same mesh. Out: DTensors in those shardings, optionally in another
dtype. This brings gradients to the optimizer's shards, and updated shards back to parameters. A pipeline starts it for
a stage, computes, and takes the result later (`start_redistribute`, `start_reduce_grads`).
Guarantee: values are only moved, except for the requested cast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base._compat import cache_on_its_mesh
from fsharding.base.calls import named
from fsharding.base.errors import LayoutError, message
from fsharding.base.public import public, refuse
from fsharding.base.tree import Tree
from fsharding.comm.bucket_queue import BucketQueue, Queued
from fsharding.comm.handles import Handle
from fsharding.comm.leaf_memory import cast_to_memory, memory_of, on_device, to_memory
from fsharding.comm.move import Move
from fsharding.comm.steps import Step, full_lengths, kinds_of, plan_steps
from fsharding.comm.wires import Plain
from fsharding.mesh.device_mesh import Mesh, is_member
from fsharding.sharding import mesh_view
from fsharding.sharding.named_sharding import NamedSharding, like, local_of, sharding_of

__all__ = [
    "BUCKET_BYTES", "Moving", "Route", "in_buckets", "memory_for", "redistribute", "reduce_grads", "route_of",
    "start_redistribute", "start_reduce_grads",
]  # fmt: skip

Item = TypeVar("Item")

BUCKET_BYTES = 32 << 20
"""Largest bucket of whole leaves that is gathered at once; a larger leaf travels alone."""


class _Leaf(NamedTuple):
    """A leaf that is sent.

    Attributes:
        index: its number.
        local: the local tensor, in any kind of memory.
        dtype: in which it is sent.
        device_type: of its mesh.
        steps: as planned.
        lengths: `full_lengths` of the steps.
        bytes: of what is received.
        home: memory for the result.
    """

    index: int
    local: Tensor
    dtype: torch.dtype
    device_type: str
    steps: tuple[Step, ...]
    lengths: tuple[int, ...]
    bytes: int
    home: Tensor | None = None

    def read(self) -> Tensor:
        """The local tensor as it is sent: on the device, unless it is only sliced."""
        sliced = all(step.kind == "slice" for step in self.steps)
        return (self.local if sliced else on_device(self.local, self.device_type)).to(self.dtype)


def _queued(
    moves: list[_Leaf], mesh: Mesh, take: Callable[[list[_Leaf], list[Tensor]], None], *, native: bool = False
) -> Queued:
    """Leaves that are sent together; `take` gets them with their results."""

    def start() -> Handle[None]:
        at_home = [m.home for m in moves if m.home is not None] or None
        dtype = moves[0].dtype
        steps = tuple(m.steps for m in moves)
        lengths = tuple(m.lengths for m in moves)
        move = Move(mesh, steps, (), lengths, Plain(dtype), dtype, native)
        return move.start([m.read() for m in moves], at_home).then(lambda moved: take(moves, moved))

    return Queued(sum(move.bytes for move in moves), start)


class Moving(NamedTuple):
    """A tree on its way.

    Attributes:
        queue: in which its buckets are.
        last: the number of the last of them.
        result: makes the tree, when all have been finished.
    """

    queue: BucketQueue
    last: int
    result: Callable[[], Tree]

    def is_done(self) -> bool:
        """Whether `wait` has nothing to wait for."""
        return self.queue.is_finished(self.last)

    def wait(self) -> Tree:
        """The tree in its new shardings."""
        self.queue.finish(self.last)
        return self.result()


def memory_for(x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a result: the local tensor of `x` if shape and dtype match, else a new tensor.

    The outcome may differ between ranks, so it must not influence which leaves are sent together.

    Args:
        x: a DTensor whose memory may be used, or anything else.
    """
    local = local_of(x) if isinstance(x, DTensor) else None
    if local is not None and local.dtype == dtype and local.shape == shape and local.is_contiguous():
        return local
    return _compat.fresh(shape, dtype, device)


@public("fs.redistribute")
def redistribute(values: Tree, shardings: Tree, *, dtypes: Tree = None, into: Tree = None) -> Tree:
    """Move a tree of DTensors to other shardings on its mesh, by slices and all-gathers along data axes.

    Args:
        values: tree of DTensors; plain tensors stay where they are. Nothing may be partial.
        shardings: tree of `NamedSharding`; None leaves a leaf as it is.
        dtypes: tree of dtypes of the result; None keeps a leaf's own.
        into: tree of DTensors in the new shardings, whose memory a gather may fill and hand on as its result.

    Returns:
        The tree in its new shardings; slices are views of the input, everything else is new.

    Raises:
        LayoutError: a leaf would have to move along an axis that is not a data axis, or between meshes.
        TreeError: the trees do not match.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> params = fs.shard({"w": torch.ones(4)}, layout)
        >>> fs.redistribute(params, layout.main)["w"].shape
        torch.Size([4])
    """
    return start_redistribute(values, shardings, BucketQueue(0), dtypes=dtypes, into=into).wait()


@named("fs.redistribute")
def start_redistribute(
    values: Tree, shardings: Tree, queue: BucketQueue, *, dtypes: Tree = None, into: Tree = None
) -> Moving:
    """`redistribute` whose collectives are started in a queue, as far as it has room, and finished when waited for.

    Args:
        values: must not change before `wait`. All arguments are as in `redistribute`.

    Raises:
        LayoutError: as `redistribute`.
        TreeError: the trees do not match.
    """
    leaves, spec = tree.flatten(values)
    targets = tree.flatten_up_to(spec, shardings, ("values", "shardings"))
    kinds = tree.flatten_up_to(spec, dtypes, ("values", "dtypes")) if dtypes is not None else [None] * len(leaves)
    homes = tree.flatten_up_to(spec, into, ("values", "into")) if into is not None else [None] * len(leaves)
    result: list[Any] = list(leaves)
    groups: dict[tuple[Any, ...], list[_Leaf]] = {}
    wrong: list[int] = []
    for i, (leaf, target, dtype) in enumerate(zip(leaves, targets, kinds, strict=True)):
        if not isinstance(leaf, DTensor) or target is None:
            result[i] = leaf if dtype is None else leaf.to(dtype)
            continue
        local = local_of(leaf)
        dtype = dtype or local.dtype
        if not isinstance(target, NamedSharding):
            raise refuse("shardings", target, "Give a tree of NamedShardings, such as layout.main.")
        route = route_of(leaf, target)
        if route is None:
            wrong.append(i)
        elif not route.steps:
            local = cast_to_memory(local, dtype, target) if is_member(target.mesh) else local.to(dtype)
            result[i] = like(leaf, local) if route.stays else route.target.at_rest(local, tuple(leaf.shape))
        else:
            device_type = leaf.device_mesh.device_type
            # If a file fails, what the result would overwrite is still needed.
            fails = memory_of(local, device_type) == "disk"
            usable = into is not None and target.memory == "device" and not fails
            home = memory_for(homes[i], route.shape, dtype, torch.device(device_type)) if usable else None
            move = _Leaf(i, local, dtype, device_type, route.steps, route.lengths, route.size * dtype.itemsize, home)
            groups.setdefault((route.mesh, kinds_of(route.steps), dtype, usable), []).append(move)
    if wrong:
        text = "moves reduced leaves along data axes of one mesh only."
        named = tree.paths(values)
        rows = [f"{named[i]}: from {sharding_of(leaves[i])} to {targets[i].simplified()}" for i in wrong]
        raise LayoutError(message(text, rows))
    shapes = [tuple(leaf.shape) if isinstance(leaf, DTensor) else () for leaf in leaves]

    def take(moves: list[_Leaf], moved: list[Tensor]) -> None:
        for m, local in zip(moves, moved, strict=True):
            target = targets[m.index].simplified()
            result[m.index] = target.at_rest(to_memory(local, target), shapes[m.index])

    batches = [_queued(batch, mesh, take) for (mesh, *_), moves in groups.items() for batch in _batches(moves)]
    return Moving(queue, queue.add(batches), lambda: tree.unflatten(spec, result))


class Route(NamedTuple):
    """How a leaf gets from one sharding to another.

    Attributes:
        target: without axes of size 1.
        stays: the leaf is there already.
        mesh: of the steps.
        steps: as planned.
        lengths: `full_lengths` of the steps.
        shape: of what arrives on this rank.
        size: elements of what arrives on the first rank, by which leaves are sent together.
    """

    target: NamedSharding
    stays: bool
    mesh: Mesh
    steps: tuple[Step, ...] = ()
    lengths: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    size: int = 0


def route_of(leaf: DTensor, target: NamedSharding) -> Route | None:
    """How a leaf gets to a sharding; None where no steps along data axes of one mesh lead there."""
    base = mesh_view.base(leaf.device_mesh)
    # A cache of a mesh holds no other mesh, also none that is equal.
    find = _route if (base.whole or base.mesh) is target.mesh else _find_route
    return find(target, sharding_of(leaf), tuple(leaf.shape))


def _find_route(target: NamedSharding, source: NamedSharding, shape: tuple[int, ...]) -> Route | None:
    """See `route_of`."""
    rest = target.simplified()
    if not is_member(rest.mesh):
        return Route(rest, False, rest.mesh)
    stays = (source.mesh, rest.placements()) == (rest.device_mesh(), source.placements())
    # On the slices of the mesh that own an assigned leaf, it is cut as any other.
    target = rest.slice_of_mesh()
    source = replace(source, mesh=target.mesh) if rest.assigned else source
    if source.mesh != target.mesh or source.owned != target.owned or source.partial:
        return None
    steps = plan_steps(source, target)
    if any(axis not in source.data_axes for step in steps for axis in step.axes):
        return None
    lengths = full_lengths(source, steps, shape)
    size = math.prod(target.first_shape(shape))
    return Route(rest, stays, target.mesh, steps, lengths, target.local_shape(shape), size)


_route = cache_on_its_mesh()(_find_route)


def reduce_grads(values: Tree, sources: Tree, targets: Tree, *, native: bool = False) -> Tree:
    """Sum gradients over their unreduced axes and reshard them to `targets`. Collective over data axes.

    Args:
        values: tree of DTensors; their local tensors may be overwritten.
        sources: tree of `NamedSharding`, their current shardings.
        targets: tree of `NamedSharding` on the same mesh.
        native: sums are the backend's own.

    Raises:
        TreeError: the trees do not match.
    """
    return start_reduce_grads(values, sources, targets, BucketQueue(0), native=native).wait()


@named("fs.redistribute")
def start_reduce_grads(
    values: Tree, sources: Tree, targets: Tree, queue: BucketQueue, *, native: bool = False
) -> Moving:
    """`reduce_grads` whose collectives are started in a queue, as far as it has room, and finished when waited for.

    Args:
        values: must not change before `wait`. All arguments are as in `reduce_grads`.
        native: sums are the backend's own.

    Raises:
        TreeError: the trees do not match.
    """
    leaves, spec = tree.flatten(values)
    flat = [tree.flatten_up_to(spec, x) for x in (sources, targets)]
    result: list[Any] = list(leaves)
    groups: dict[tuple[Any, torch.dtype], list[_Leaf]] = {}
    for i, (leaf, source, target) in enumerate(zip(leaves, *flat, strict=True)):
        if leaf is None:
            continue
        where = source.slice_of_mesh().simplified()
        there = target.slice_of_mesh().simplified()
        steps = plan_steps(where, there)
        local = local_of(leaf)
        shape = tuple(leaf.shape)
        device_type = leaf.device_mesh.device_type
        lengths = full_lengths(where, steps, shape)
        size = math.prod(where.first_shape(shape))
        move = _Leaf(i, local, local.dtype, device_type, steps, lengths, size * local.itemsize)
        groups.setdefault((kinds_of(steps), local.dtype), []).append(move)
    shapes = [() if leaf is None else tuple(leaf.shape) for leaf in leaves]

    def take(moves: list[_Leaf], moved: list[Tensor]) -> None:
        for m, local in zip(moves, moved, strict=True):
            target = flat[1][m.index].simplified()
            result[m.index] = target.at_rest(to_memory(local, target), shapes[m.index])

    batches: list[Queued] = []
    for (route, _), moves in groups.items():
        if route:
            batches += [_queued(b, flat[1][b[0].index].mesh, take, native=native) for b in _batches(moves)]
        else:
            take(moves, [m.local for m in moves])
    return Moving(queue, queue.add(batches), lambda: tree.unflatten(spec, result))


def in_buckets(moves: Iterable[Item], size: Callable[[Item], int], limit: int = BUCKET_BYTES) -> Iterator[list[Item]]:
    """Cuts a sequence, in order, into buckets of at most some bytes; what is larger is in one of its own."""
    bucket = list[Item]()
    held = 0
    for move in moves:
        if bucket and held + size(move) > limit:
            yield bucket
            bucket = []
            held = 0
        bucket.append(move)
        held += size(move)
    if bucket:
        yield bucket


def _batches(moves: Sequence[_Leaf]) -> Iterator[list[_Leaf]]:
    return in_buckets(moves, lambda move: move.bytes, BUCKET_BYTES)
