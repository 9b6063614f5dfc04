"""Move the leaves of a tree between shardings that differ along data axes, in buckets.

Guarantee: values are only moved, except for the requested cast and rounding.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base._compat import cache_on_its_mesh, cache_on_mesh
from fsharding.base.errors import LayoutError, message
from fsharding.base.public import public, refuse
from fsharding.base.tree import Tree
from fsharding.comm.bucket_queue import BucketQueue
from fsharding.comm.handles import Handle, done
from fsharding.comm.leaf_memory import cast_to_memory, home_of, on_device, placed
from fsharding.comm.move import Move, Moved
from fsharding.comm.steps import LeafSteps, kinds_of, steps_of
from fsharding.comm.tier import DEVICE, tier_of
from fsharding.comm.wires import LeafWire, Plain, Wire
from fsharding.mesh.device_mesh import Mesh, is_member
from fsharding.sharding import mesh_view
from fsharding.sharding.named_sharding import NamedSharding, like, local_of, sharding_of

__all__ = ["BUCKET_BYTES", "in_buckets", "plan_rows", "redistribute", "send", "sends_encoded"]

Item = TypeVar("Item")

BUCKET_BYTES = 32 << 20
"""Largest bucket of full leaves that is gathered at once; a larger leaf is sent alone."""


class _Sent(NamedTuple):
    """A leaf, or rows of one, that are sent, or encoded where they are."""

    leaf: int  # its number
    local: Tensor  # local tensor, in any kind of memory
    steps: LeafSteps
    wire: Wire
    bytes: int  # of what is received
    home: Tensor | None = None  # memory for the result
    noise: Callable[[], Tensor] | None = None  # draws the numbers for stochastic rounding
    agreed: Any = None  # what its wire has agreed on
    is_result: bool = False  # what is received is the result; a leaf that is encoded has it in memory of its own

    def read(self) -> Tensor:
        """Return the local tensor as it is sent: on the device, unless it is only sliced."""
        sliced = all(step.kind == "slice" for step in self.steps.steps)
        x = self.local if sliced else on_device(self.local, self.steps.source.device_type)
        return x.to(self.wire.dtype) if isinstance(self.wire, Plain) else x


def memory_for(x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a result: the local tensor of `x` if shape and dtype match, else a new tensor."""
    # The outcome may differ between ranks, so it must not influence which leaves are sent together.
    local = local_of(x) if isinstance(x, DTensor) else None
    if local is not None and local.dtype == dtype and local.shape == shape and local.is_contiguous():
        return local
    return _compat.fresh(shape, dtype, device)


@public
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
    return send(values, shardings, BucketQueue(0), dtypes=dtypes, into=into).wait()


def send(
    values: Tree,
    shardings: Tree,
    queue: BucketQueue,
    *,
    dtypes: Tree = None,
    into: Tree = None,
    sources: Tree = None,
    wires: Sequence[LeafWire | None] | None = None,
    native: bool = False,
) -> Handle[Tree]:
    """Start a `redistribute` in a queue, as far as it has room, with sums and encodings on the way."""
    # Values must not change before `wait`. `sources`: shardings of values that are unreduced; they are summed on their
    # way, natively if `native`, and their local tensors may be overwritten. `wires`: by leaf, how it is rounded on its
    # way; None if it is only cast, or this rank has no part of it.
    leaves, spec = tree.flatten(values)
    targets = tree.flatten_up_to(spec, shardings, ("values", "shardings"))
    nothing = [None] * len(leaves)
    kinds = nothing if dtypes is None else tree.flatten_up_to(spec, dtypes, ("values", "dtypes"))
    homes = nothing if into is None else tree.flatten_up_to(spec, into, ("values", "into"))
    given: list[Any] = nothing if sources is None else tree.flatten_up_to(spec, sources)
    sending = _Sending(leaves, targets, native=native)
    wrong: list[int] = []
    for i, (leaf, target, dtype) in enumerate(zip(leaves, targets, kinds, strict=True)):
        if not isinstance(leaf, DTensor) or target is None:
            sending.result[i] = leaf if dtype is None else leaf.to(dtype)
            continue
        if not isinstance(target, NamedSharding):
            raise refuse("shardings", target, "Give a tree of NamedShardings, such as layout.main.")
        way = _way(leaf, target, given[i])
        if way is None:
            wrong.append(i)
            continue
        local = local_of(leaf)
        wire = None if wires is None else wires[i]
        # If a tier fails, what the result would overwrite is still needed.
        fails = tier_of(local, leaf.device_mesh.device_type).can_fail
        reuses = into is not None and home_of(target) is DEVICE and not fails
        sending.add(i, leaf, way, dtype or local.dtype, wire, homes[i], reuses=reuses)
    if wrong:
        text = "moves reduced leaves along data axes of one mesh only."
        named = tree.paths(values)
        rows = [f"{named[i]}: from {sharding_of(leaves[i])} to {targets[i].simplified()}" for i in wrong]
        raise LayoutError(message(text, rows))
    return sending.start(queue).then(lambda _: tree.unflatten(spec, sending.rebuilt()))


class _Sending:
    """Leaves of a tree that are sent, and their results."""

    def __init__(self, leaves: Sequence[Any], targets: Sequence[Any], *, native: bool) -> None:
        self.result = list(leaves)  # of each leaf; until it is there, the leaf
        self._targets = targets
        self._native = native
        self._sent: list[_Sent] = []
        self._ends: dict[int, Tensor] = {}  # results of leaves that are encoded on their way, until they are placed

    def add(
        self, i: int, leaf: DTensor, way: _Way, dtype: torch.dtype, wire: LeafWire | None, home: Any, *, reuses: bool
    ) -> None:
        """Plan how a leaf is sent; one that stays is placed now. With `reuses`, the memory of `home` may be used."""
        local = local_of(leaf)
        steps, stays = way
        device_type = leaf.device_mesh.device_type
        if wire is not None:
            assert wire.wire.dtype == dtype, (wire, dtype)
            parts, local = _encoded(i, on_device(local, device_type), steps, wire, home if reuses else None)
            self._sent += parts
            if not steps.steps or parts[0].steps.steps:
                self._ends[i] = local
                return
        if not steps.steps:
            target = self._targets[i]
            local = cast_to_memory(local, dtype, target) if is_member(target.mesh) else local.to(dtype)
            self.result[i] = like(leaf, local) if stays else target.simplified().at_rest(local, tuple(leaf.shape))
            return
        room = memory_for(home, steps.received, dtype, torch.device(device_type)) if reuses else None
        plain = Plain(dtype, self._native)
        self._sent.append(_Sent(i, local, steps, plain, steps.size * dtype.itemsize, room, is_result=True))

    def start(self, queue: BucketQueue) -> Handle[None]:
        """Encode leaves that stay, and queue the others. Return a handle that waits for all."""
        last: Handle[None] = done(lambda: None)
        # Nothing is in a bucket before all ranks have agreed how leaves are encoded.
        batches = _batches(self._agreed())
        self._sent = []  # a bucket that has been sent lets its shards go
        for batch in batches:
            last = queue.add(sum(s.bytes for s in batch), functools.partial(self._start, batch))
        return last

    @torch.no_grad()
    def _agreed(self) -> list[_Sent]:
        """Agree on how leaves are encoded, all at once; encode those that stay, and return the others."""
        sent = self._sent
        encoded = [i for i, s in enumerate(sent) if not isinstance(s.wire, Plain)]
        if encoded:
            first, parts = sent[encoded[0]], [sent[i].steps.parts(sent[i].wire) for i in encoded]
            agreed = first.wire.agree(parts, [sent[i].local for i in encoded], first.steps.source.mesh)
            for i, scales in zip(encoded, agreed, strict=True):
                sent[i] = sent[i]._replace(agreed=scales)
        for s in sent:
            if not s.steps.steps:
                self._start([s]).wait()
        return [s for s in sent if s.steps.steps]

    def _start(self, batch: list[_Sent]) -> Handle[None]:
        """Start to send leaves together, or encode them where they are."""
        mesh = batch[0].steps.source.mesh
        move = Move(mesh, tuple(s.steps for s in batch), tuple(s.wire for s in batch), batch[0].wire.dtype)
        homes = [s.home for s in batch if s.home is not None] or None

        def noise(number: int) -> Tensor:
            draw = batch[number].noise
            assert draw is not None
            return draw()

        handle = move.start([s.read() for s in batch], None, homes, noise=noise, agreed=[s.agreed for s in batch])
        return handle.then(lambda moved: self._take(batch, moved))

    def _take(self, batch: list[_Sent], moved: Moved) -> None:
        for s, local in zip(batch, moved.leaves, strict=True):
            if s.is_result:
                self._place(s.leaf, cast(Tensor, local))

    def _place(self, i: int, local: Tensor) -> None:
        target = self._targets[i].simplified()
        self.result[i] = placed(local, target, tuple(self.result[i].shape))

    def rebuilt(self) -> list[Any]:
        """Return all results, when the handle has been waited for."""
        for i, local in self._ends.items():
            self._place(i, local)
        return self.result


def _batches(sent: Sequence[_Sent]) -> list[list[_Sent]]:
    """Which leaves are sent together, in the order in which they are."""
    groups: dict[tuple[Any, ...], list[_Sent]] = {}
    for s in sent:
        key = s.steps.source.mesh, kinds_of(s.steps.steps), s.wire, s.home is None, s.is_result
        groups.setdefault(key, []).append(s)
    return [batch for group in groups.values() for batch in in_buckets(group, lambda s: s.bytes, BUCKET_BYTES)]


class _Way(NamedTuple):
    """How a leaf gets from one sharding to another."""

    steps: LeafSteps
    stays: bool  # the leaf is there already


def _way(leaf: DTensor, target: NamedSharding, term: NamedSharding | None) -> _Way | None:
    """Return how a leaf, or a term of one, gets to a sharding; None if no steps along data axes lead there."""
    if term is not None:
        return _Way(steps_of(term.slice_of_mesh(), target.slice_of_mesh(), tuple(leaf.shape)), False)
    base = mesh_view.base(leaf.device_mesh)
    # A cache of a mesh holds no other mesh, also none that is equal.
    find = _cached_way if (base.whole or base.mesh) is target.mesh else _find_way
    return find(target, sharding_of(leaf), tuple(leaf.shape))


def _find_way(target: NamedSharding, source: NamedSharding, shape: tuple[int, ...]) -> _Way | None:
    rest = target.simplified()
    if not is_member(rest.mesh):
        return _Way(LeafSteps(rest, rest, shape, ()), False)
    stays = (source.mesh, rest.placements()) == (rest.device_mesh(), source.placements())
    # On the slices of the mesh that own an assigned leaf, it is cut as any other.
    target = rest.slice_of_mesh()
    source = replace(source, mesh=target.mesh) if rest.assigned else source
    if source.mesh != target.mesh or source.owned != target.owned or source.partial:
        return None
    steps = steps_of(replace(source, mesh=target.mesh), target, shape)
    if any(axis not in source.data_axes for step in steps.steps for axis in step.axes):
        return None
    return _Way(steps, stays)


_cached_way = cache_on_its_mesh()(_find_way)


# ---------------------------------------------------------------------------------------------------- encoded leaves
class RowPart(NamedTuple):
    """Rows of a stack that one wire sends: from `start` to `stop` in the shard and in the result."""

    start: int
    stop: int
    steps: LeafSteps
    wire: Wire


def sends_encoded(steps: LeafSteps, kept: Sequence[int] | None) -> bool:
    """Whether a leaf is sent by its wire: in one gather, which does not join rows of a stack some of which are kept."""
    kinds = [(step.kind, step.dim) for step in steps.steps]
    return len(kinds) == 1 and kinds[0][0] == "gather" and not (kept is not None and kinds[0][1] == 0)


def plan_rows(steps: LeafSteps, wire: Wire, kept: tuple[int, ...]) -> tuple[RowPart, ...]:
    """Split a leaf that is one gather away, or stays, into parts of one wire, each at most a bucket or one row."""
    # Layers of a stack share nothing that ranks agree on, so a stack can be split. `kept`: rows of this rank that are
    # sent in the dtype of the wire.
    return _plan_rows(steps.source.mesh, steps, wire, kept, BUCKET_BYTES)


@cache_on_mesh(1024)
def _plan_rows(mesh: Mesh, steps: LeafSteps, wire: Wire, kept: tuple[int, ...], limit: int) -> tuple[RowPart, ...]:
    source, target, shape = steps.source, steps.target, steps.shape
    if len(shape) == 2 or source.axes(0) != target.axes(0):
        return (RowPart(0, steps.local[0], steps, wire),)
    ends = (_of_rows(source), _of_rows(target))
    rows = range(target.local_shape(shape)[0])
    longest = max(1, limit // max(1, steps_of(*ends, (1, *shape[1:])).parts(wire).bytes))
    parts = list[RowPart]()
    for is_kept, run in itertools.groupby(rows, lambda row: row in kept):
        some = [*run]
        at_once = len(some) if is_kept else longest
        for first in range(some[0], some[-1] + 1, at_once):
            stop = min(first + at_once, some[-1] + 1)
            of_rows = steps_of(*ends, (stop - first, *shape[1:]))
            parts.append(RowPart(first, stop, of_rows, Plain(wire.dtype) if is_kept else wire))
    return tuple(parts)


def _of_rows(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of the rows that a rank has, as a leaf of their own."""
    owned = tuple(axis for axis in sharding.owned if axis not in sharding.spec.axes(0))
    return replace(sharding, spec=sharding.spec.replace(0, ()), owned=owned)


def _encoded(leaf: int, shard: Tensor, steps: LeafSteps, sent: LeafWire, home: Any) -> tuple[list[_Sent], Tensor]:
    """Split a leaf into parts that are sent to the result, or encoded where they are if it gets there otherwise."""
    there = steps if sends_encoded(steps, sent.kept) else steps_of(steps.source, steps.source, steps.shape)
    home = home if there is steps or not steps.steps else None
    result = memory_for(home, there.received, sent.wire.dtype, shard.device)
    parts = list[_Sent]()
    for start, stop, of_rows, wire in plan_rows(there, sent.wire, sent.kept or ()):
        # A shard whose rows are gathered is one part, with more rows in the result.
        whole = of_rows == there
        into = result if whole else result[start:stop]
        noise = None if sent.noise is None else functools.partial(sent.noise, start, stop)
        local = shard if whole else shard[start:stop]
        parts.append(_Sent(leaf, local, of_rows, wire, of_rows.parts(wire).bytes, into, noise))
    return parts, result


def in_buckets(moves: Iterable[Item], size: Callable[[Item], int], limit: int = BUCKET_BYTES) -> Iterator[list[Item]]:
    """Cut a sequence, in order, into buckets of at most some bytes; what is larger is in one of its own."""
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
