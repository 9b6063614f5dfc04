"""Move the leaves of a tree between shardings that differ along data axes, in buckets."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

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

# Largest bucket of full leaves that is gathered at once; a larger leaf is sent alone.
BUCKET_BYTES = 32 << 20

# The steps of a leaf to its sharding, and whether it is there already, on the same mesh and with the same placements.
_Way: TypeAlias = tuple[LeafSteps, bool]


class _Sent(NamedTuple):
    """A leaf, or some rows of one, to send, or to encode locally if `steps` is empty."""

    leaf: int  # index of the leaf in the tree
    local: Tensor  # local tensor, in any tier
    steps: LeafSteps
    wire: Wire
    bytes: int  # size of the received data
    home: Tensor | None = None  # memory for the result
    noise: Callable[[], Tensor] | None = None  # draws the numbers for stochastic rounding
    agreed: Any = None  # the result of `Wire.agree`
    is_result: bool = False  # the received tensor is the result; False if the result is decoded into other memory

    def read(self) -> Tensor:
        """Return the local tensor in the form that is sent: on the device, unless it is only sliced."""
        sliced = all(step.kind == "slice" for step in self.steps.steps)
        x = self.local if sliced else on_device(self.local, self.steps.source.device_type)
        return x.to(self.wire.dtype) if isinstance(self.wire, Plain) else x


def memory_for(x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a result: the local tensor of `x` if shape and dtype match, else a new tensor."""
    # The outcome may differ between ranks, so it must not influence which leaves are batched.
    local = local_of(x) if isinstance(x, DTensor) else None
    if local is not None and local.dtype == dtype and local.shape == shape and local.is_contiguous():
        return local
    return _compat.fresh(shape, dtype, device)


@public
def redistribute(values: Tree, shardings: Tree, *, dtypes: Tree = None, into: Tree = None) -> Tree:
    """Move a tree of DTensors to different shardings on its mesh, by slices and all-gathers along data axes.

    Collective over the mesh. To change the mesh or shard over model axes, use `fs.reshard`.

    Args:
        values: Tree of DTensors without partial sums; plain tensors are returned unchanged.
        shardings: Tree of `NamedSharding`, such as `layout.main`; None keeps a leaf's sharding.
        dtypes: Tree of result dtypes; None keeps a leaf's dtype.
        into: Tree of DTensors in the new shardings. Their memory may be overwritten and returned as the result.

    Returns:
        The tree in its new shardings. Slices are views of the input; everything else is new, or in memory of `into`.

    Raises:
        LayoutError: A leaf would have to move along an axis that isn't a data axis, or to a different mesh.
        TreeError: The trees don't match.

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
    """Start a `redistribute` in a queue, as far as its limit allows; leaves may also be summed or quantized."""
    # The caller must not write to `values` before `wait` returns: a bucket that is still queued reads them when it
    # starts. `sources`: shardings of unreduced values, which are summed (by the backend if `native`) and whose local
    # tensors may be overwritten. `wires`: how each leaf is quantized; None if it is only cast, or has no local shard.
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
            raise refuse("shardings", target, "Pass a tree of NamedShardings, such as layout.main.")
        way = _way(leaf, target, given[i])
        if way is None:
            wrong.append(i)
            continue
        local = local_of(leaf)
        wire = None if wires is None else wires[i]
        # If a read from a tier may fail, `into` must stay intact: the caller still needs its values then.
        fails = tier_of(local, leaf.device_mesh.device_type).can_fail
        reuses = into is not None and home_of(target) is DEVICE and not fails
        sending.add(i, leaf, way, dtype or local.dtype, wire, homes[i], reuses=reuses)
    if wrong:
        text = "moves leaves without partial sums, along data axes of one mesh only."
        named = tree.paths(values)
        rows = [f"{named[i]}: from {sharding_of(leaves[i])} to {targets[i].simplified()}" for i in wrong]
        raise LayoutError(message(text, rows, "Call fs.reshard(values, layout) for a different mesh or model axes."))
    return sending.start(queue).then(lambda _: tree.unflatten(spec, sending.rebuilt()))


class _Sending:
    """The leaves of a tree that are sent, and their results."""

    def __init__(self, leaves: Sequence[Any], targets: Sequence[Any], *, native: bool) -> None:
        self.result = list(leaves)  # each entry is the input leaf until its result replaces it
        self._targets = targets
        self._native = native
        self._sent: list[_Sent] = []
        # Local results of quantized leaves, by leaf. Several buckets fill the rows of one, so it becomes a DTensor, in
        # the tier of its target, only in `rebuilt`, when all of them have finished.
        self._ends: dict[int, Tensor] = {}

    def add(
        self, i: int, leaf: DTensor, way: _Way, dtype: torch.dtype, wire: LeafWire | None, home: Any, *, reuses: bool
    ) -> None:
        """Plan how a leaf is sent; return one that needs no steps at once. `reuses`: `home` may be overwritten."""
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
        """Encode leaves without steps, and queue the others; the handle waits for all."""
        last: Handle[None] = done(lambda: None)
        # `agree` is a collective of its own: it runs for all leaves before the first bucket starts, on every rank.
        batches = _batches(self._agreed())
        self._sent = []  # only batches refer to shards from here on, so each shard is freed with its bucket
        for batch in batches:
            last = queue.add(sum(s.bytes for s in batch), functools.partial(self._start, batch))
        return last

    @torch.no_grad()
    def _agreed(self) -> list[_Sent]:
        """Agree on the scales of all leaves in one call, encode leaves without steps, and return the others."""
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
        """Start to send the leaves of a batch, or encode them locally if they have no steps."""
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
        """Return all results, once the handle has been waited for."""
        for i, local in self._ends.items():
            self._place(i, local)
        return self.result


def _batches(sent: Sequence[_Sent]) -> list[list[_Sent]]:
    """Batch the leaves that can share a collective, in the order in which the collectives start on every rank."""
    # The key and `bytes` must be equal on all ranks, so neither depends on sizes of local shards or on addresses.
    # Whether there is a `home` follows from `into` and tiers, which ranks share; what memory it is may differ.
    groups: dict[tuple[Any, ...], list[_Sent]] = {}
    for s in sent:
        key = s.steps.source.mesh, kinds_of(s.steps.steps), s.wire, s.home is None, s.is_result
        groups.setdefault(key, []).append(s)
    return [batch for group in groups.values() for batch in in_buckets(group, lambda s: s.bytes, BUCKET_BYTES)]


def _way(leaf: DTensor, target: NamedSharding, partial: NamedSharding | None) -> _Way | None:
    """Return how a leaf, unreduced if `partial` is given, gets to a sharding; None if no data-axis steps lead there."""
    if partial is not None:
        return steps_of(partial.slice_of_mesh(), target.slice_of_mesh(), tuple(leaf.shape)), False
    base = mesh_view.base(leaf.device_mesh)
    # A cache lives in its mesh, so it must not refer to a second mesh, even an equal one: it would keep that alive.
    find = _cached_way if (base.whole or base.mesh) is target.mesh else _find_way
    return find(target, sharding_of(leaf), tuple(leaf.shape))


def _find_way(target: NamedSharding, source: NamedSharding, shape: tuple[int, ...]) -> _Way | None:
    rest = target.simplified()
    if not is_member(rest.mesh):
        return LeafSteps(rest, rest, shape, ()), False
    stays = (source.mesh, rest.placements()) == (rest.device_mesh(), source.placements())
    # On the slices of the mesh that own an assigned leaf, it is sharded like any other.
    target = rest.slice_of_mesh()
    source = replace(source, mesh=target.mesh) if rest.assigned else source
    if source.mesh != target.mesh or source.owned != target.owned or source.partial:
        return None
    steps = steps_of(replace(source, mesh=target.mesh), target, shape)
    if any(axis not in source.data_axes for step in steps.steps for axis in step.axes):
        return None
    return steps, stays


_cached_way = cache_on_its_mesh(_find_way)


# ---------------------------------------------------------------------------------------------------- encoded leaves
class RowPart(NamedTuple):
    """The rows [start, stop) of a stacked leaf that are sent by one wire."""

    start: int
    stop: int
    steps: LeafSteps
    wire: Wire


def sends_encoded(steps: LeafSteps, kept: Sequence[int] | None) -> bool:
    """Whether a leaf is quantized before it is sent: one gather leads there, not of rows with different wires."""
    kinds = [(step.kind, step.dim) for step in steps.steps]
    return len(kinds) == 1 and kinds[0][0] == "gather" and not (kept is not None and kinds[0][1] == 0)


def plan_rows(steps: LeafSteps, wire: Wire, kept: tuple[int, ...]) -> tuple[RowPart, ...]:
    """Split a leaf that takes one gather or no step into parts with one wire each, of at most a bucket or one row."""
    # Layers of a stack share no scales, so splitting changes no bit. `kept`: rows of this rank that aren't quantized.
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
    """Return the sharding of this rank's rows as a separate leaf."""
    owned = tuple(axis for axis in sharding.owned if axis not in sharding.spec.axes(0))
    return replace(sharding, spec=sharding.spec.replace(0, ()), owned=owned)


def _encoded(leaf: int, shard: Tensor, steps: LeafSteps, sent: LeafWire, home: Any) -> tuple[list[_Sent], Tensor]:
    """Split a leaf into parts to send quantized, or to encode locally if the leaf is sent differently afterwards."""
    there = steps if sends_encoded(steps, sent.kept) else steps_of(steps.source, steps.source, steps.shape)
    home = home if there is steps or not steps.steps else None
    result = memory_for(home, there.received, sent.wire.dtype, shard.device)
    parts = list[_Sent]()
    for start, stop, of_rows, wire in plan_rows(there, sent.wire, sent.kept or ()):
        # If rows are gathered (dim 0), the leaf is one part, and the result has more rows than the shard.
        is_all = of_rows == there
        into = result if is_all else result[start:stop]
        noise = None if sent.noise is None else functools.partial(sent.noise, start, stop)
        local = shard if is_all else shard[start:stop]
        parts.append(_Sent(leaf, local, of_rows, wire, of_rows.parts(wire).bytes, into, noise))
    return parts, result


def in_buckets(moves: Iterable[Item], size: Callable[[Item], int], limit: int = BUCKET_BYTES) -> Iterator[list[Item]]:
    """Split a sequence, in order, into buckets of at most `limit` bytes; a larger item has a bucket to itself."""
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
