"""Move leaves together from one sharding to another: the plan, and its execution.

Guarantee: a result has the same bits whether its terms are added one by one or all at once, and whatever else is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fsharding.base import _compat, tree
from fsharding.comm import bucket as buckets
from fsharding.comm.bucket import Bucket, plan_bucket
from fsharding.comm.handles import Handle, Memory, Places, Reduction, done, nowhere
from fsharding.comm.reduce import Noise, SumLayout
from fsharding.comm.step_agreement import checks_plans, compare_plans
from fsharding.comm.steps import LeafSteps, begins_with_sum, kinds_of, steps_of
from fsharding.comm.transport import transport_for
from fsharding.comm.wires import Parts, Plain, WholeLeaf, Wire
from fsharding.mesh.device_mesh import Group, Mesh, abstract, axis_group, reduction_group
from fsharding.sharding.named_sharding import NamedSharding

__all__ = ["Filling", "Move", "Moved", "axis_sizes", "plan_move"]


class Moved(NamedTuple):
    """The result of a move."""

    leaves: Sequence[WholeLeaf]  # in the new sharding, as their wires decode them
    buffers: list[Tensor]  # flat tensors of `memory` that gathered leaves view; a leaf views the same one each time


@dataclass(frozen=True)
class Move:
    """Leaves that are sent together. The same value on every rank of a mesh."""

    mesh: Mesh
    leaves: tuple[LeafSteps, ...]  # whose steps differ in dims only
    wires: tuple[Wire, ...]  # how each leaf is sent in the first step; a sum has one wire for all
    dtype: torch.dtype  # of sums, and of what steps after the first one send
    large: bool = False  # leaves are worth being added one by one

    @functools.cached_property
    def outline(self) -> str:
        """What determines the order of collectives, as text: equal on all ranks, whose shards may differ in size."""
        return repr(([leaf.steps for leaf in self.leaves], self.wires, self.dtype, self.large))

    @property
    def is_empty(self) -> bool:
        """Whether there are no steps."""
        return not self.leaves or not self.leaves[0].steps

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes of the first step; none without steps."""
        return () if self.is_empty else self.leaves[0].steps[0].axes

    @functools.cached_property
    def sums_first(self) -> bool:
        """Whether the first step is a sum, so that terms are copied one by one to where they are sent from."""
        return bool(self.leaves) and begins_with_sum(self.leaves[0].steps)

    @functools.cached_property
    def rest(self) -> Move:
        """The move after its first step. What has been summed or gathered is sent as it is."""
        return replace(self.unrounded, leaves=tuple(leaf.rest for leaf in self.leaves), large=False)

    @functools.cached_property
    def unrounded(self) -> Move:
        """The same move of values that are sent in `dtype`; a backend that adds the first terms adds all."""
        native = any(wire.native for wire in self.wires)
        return replace(self, wires=(Plain(self.dtype, native),) * len(self.leaves))

    @functools.cached_property
    def parts(self) -> tuple[Parts, ...]:
        """What is sent of each leaf, if the first step is a gather or there is none."""
        return tuple(leaf.parts(wire) for leaf, wire in zip(self.leaves, self.wires, strict=True))

    @functools.cached_property
    def bucket(self) -> Bucket:
        """The layout of all `parts`."""
        return plan_bucket(tuple(sent for parts in self.parts for sent in parts.sent), axis_sizes(self.mesh, self.axes))

    @functools.cached_property
    def decoded(self) -> Bucket | None:
        """The layout of the results, if they are decoded to memory of their own: all of a bucket are, or none."""
        shapes = tuple((parts.decoded, 0) for parts in self.parts if parts.decoded is not None)
        return plan_bucket(shapes, ()) if shapes else None

    @functools.cached_property
    def terms(self) -> SumLayout:
        """The layout of terms, if the first step is a sum."""
        step = self.leaves[0].steps[0]
        cuts = tuple((leaf.local, leaf.steps[0].dim) for leaf in self.leaves)
        return self.wires[0].terms(cuts, axis_sizes(self.mesh, step.axes), scatter=step.kind == "scatter")

    def agree(self, group: Group, device_type: str) -> None:
        """Check the plan of the first step on this rank, and that all members have it, where plans are checked."""
        if checks_plans():
            assert len({kinds_of(leaf.steps) for leaf in self.leaves}) == 1, self
            buckets.check_bucket(self.terms.bucket if self.sums_first else self.bucket)
            compare_plans(group, device_type, self.outline)

    def has_slots(self, leaf: Tensor) -> bool:
        """Whether a kernel can write a large leaf to where it is sent from. Collective the first time."""
        # An encoded term has no slot: it is encoded when all of it is there.
        if not self.sums_first or not self.terms.as_is:
            return False
        transport = transport_for(reduction_group(self.mesh, self.axes), leaf.device)
        return transport.has_slots(leaf.numel(), scatter=self.terms.scatter)

    def open(self, device: torch.device, memory: Memory | None = None, noise: Noise | None = None) -> Filling:
        """Make room for the terms of a sum; nothing is sent. `noise` is by number of the leaf, for rounding."""
        return Filling(self, device, memory, noise)

    def start(
        self,
        leaves: Sequence[Tensor],
        memory: Memory | None = None,
        into: Sequence[Tensor] | None = None,
        *,
        noise: Noise | None = None,
        agreed: Sequence[Any] | None = None,
    ) -> Handle[Moved]:
        """Start the first collective; those that follow it are done when the handle is waited for."""
        kind = "gather" if self.is_empty else self.leaves[0].steps[0].kind
        last = self.is_empty or self.rest.is_empty
        if kind == "slice":
            views = [x.narrow(*leaf.slice) for x, leaf in zip(leaves, self.leaves, strict=True)]
            return done(lambda: Moved(views, [])) if last else self.rest.start(views, memory, into)
        if kind != "gather":
            terms = self.open(leaves[0].device)
            terms.add(range(len(leaves)), leaves)
            return terms.start(lambda: into).then(lambda sums: Moved(sums, []))
        first = self._gather(leaves, memory, into if last else None, noise, agreed)
        if last:
            return first
        return first.then(
            lambda moved: Moved(self.rest.run(cast(Sequence[Tensor], moved.leaves), into), []), communicates=True
        )

    def run(self, leaves: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Take the steps one after the other; see `start`."""
        return cast("list[Tensor]", [*self.start(leaves, None, into).wait().leaves]) if not self.is_empty else [*leaves]

    def _gather(
        self,
        leaves: Sequence[Tensor],
        memory: Memory | None,
        into: Sequence[Tensor] | None,
        noise: Noise | None,
        agreed: Sequence[Any] | None,
    ) -> Handle[Moved]:
        given = self.wires[0].agree(self.parts, leaves, self.mesh) if agreed is None else agreed
        sent = list[Tensor]()
        for i, (wire, parts, x) in enumerate(zip(self.wires, self.parts, leaves, strict=True)):
            sent += wire.encode(parts, x, given[i], None if noise is None else functools.partial(noise, i))
        device = leaves[0].device
        dtype = self.parts[0].dtype
        if not self.axes:
            return done(lambda: self._kept(sent, given, memory or Memory(device), into))
        group = axis_group(self.mesh, self.axes)
        self.agree(group, device.type)
        transport = transport_for(group, device)
        if self.decoded is None and memory is None:
            flat = None if into is not None else _compat.fresh((self.bucket.size,), dtype, device)
            results = into if flat is None else buckets.whole_views(flat, self.bucket)
            assert results is not None
            handle = transport.all_gather_into(self.bucket, [x.to(dtype) for x in sent], results)
            return handle.then(lambda received: self._decode(received, given, None, None, []))

        def decode(flat: Tensor) -> Moved:
            return self._decode(buckets.whole_views(flat, self.bucket), given, memory, into, [flat])

        return transport.all_gather(self.bucket, sent, dtype, memory).then(decode)

    def _kept(self, sent: list[Tensor], given: Sequence[Any], memory: Memory, into: Sequence[Tensor] | None) -> Moved:
        """Decode leaves that no rank sends. If nothing is decoded, they are copied: the shards are not the results."""
        if self.decoded is not None:
            return self._decode(sent, given, memory, into, [])
        buffers = list[Tensor]()
        if into is None:
            buffers.append(memory.empty(self.bucket.size, self.parts[0].dtype))
            into = buckets.whole_views(buffers[0], self.bucket)
        _compat.foreach_copy_([*into], sent)
        return self._decode(into, given, memory, None, buffers)

    def _decode(
        self,
        received: Sequence[Tensor],
        given: Sequence[Any],
        memory: Memory | None,
        into: Sequence[Tensor] | None,
        buffers: list[Tensor],
    ) -> Moved:
        """Decode leaves of what was received, which views `buffers`."""
        outs = into
        if self.decoded is not None:
            buffers = []
            if outs is None:
                memory = memory or Memory(received[0].device)
                buffers = [memory.empty(self.decoded.size, self.wires[0].dtype)]
                outs = buckets.whole_views(buffers[0], self.decoded)
        results = list[WholeLeaf]()
        first = 0
        for i, (wire, parts) in enumerate(zip(self.wires, self.parts, strict=True)):
            last = first + len(parts.sent)
            leaf = wire.decode(parts, received[first:last], given[i], None if outs is None else outs[i])
            if not isinstance(leaf, Tensor):
                # What was not sent but computed by every rank is in memory of its own.
                known = {_compat.storage_id(x) for x in buffers}
                buffers += [x.view(-1) for x in tree.leaves(leaf) if _compat.storage_id(x) not in known]
            results.append(leaf)
            first = last
        return Moved(results, buffers)


def plan_move(
    sources: Sequence[NamedSharding],
    targets: Sequence[NamedSharding],
    shapes: Sequence[tuple[int, ...]],
    wire: Wire,
    dtype: torch.dtype,
    *,
    large: bool = False,
) -> Move:
    """Plan a move of leaves, at least one, whose steps differ in dims only, all by one wire."""
    leaves = tuple(steps_of(*leaf) for leaf in zip(sources, targets, shapes, strict=True))
    return Move(sources[0].mesh, leaves, (wire,) * len(leaves), dtype, large)


class Filling:
    """A `Reduction` of the leaves of a move: the first sum, and the steps after it."""

    def __init__(
        self,
        move: Move,
        device: torch.device,
        memory: Memory | None = None,
        noise: Noise | None = None,  # by number of the leaf, for a wire whose rounding is stochastic
    ) -> None:
        self.memory = memory  # the same
        self.filled: set[int] = set()  # the leaves that have a term. A kernel that writes into a slot adds its leaf
        self._move = move
        self._device = device
        self._terms: dict[int, Tensor] = {}
        """By leaf, where the first step is no sum."""
        self._first: Reduction | None = None
        if move.sums_first:
            transport = transport_for(reduction_group(move.mesh, move.axes), device)
            self._first = transport.reduction(move.terms, move.dtype, large=move.large, memory=memory, noise=noise)

    @property
    def sends(self) -> bool:
        """Whether the first step is a sum, whose terms are copied to where they are sent from."""
        return self._first is not None

    def slot(self, leaf: int, dtype: torch.dtype) -> Tensor | None:
        """See `Reduction`."""
        return None if self._first is None else self._first.slot(leaf, dtype)

    def add(self, leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
        """See `Reduction`; a leaf that is filled has a slot, and the term is added there."""
        first = self._first
        if first is None:
            self._terms.update({i: x for i, x in zip(leaves, terms, strict=True) if x is not None})
            return
        new = [(i, x) for i, x in zip(leaves, terms, strict=True) if i not in self.filled]
        first.add([i for i, _ in new], [x for _, x in new])
        for i, x in zip(leaves, terms, strict=True):
            if i in self.filled and x is not None:
                slot = first.slot(i, self._move.wires[0].dtype)
                assert slot is not None, "only slots take a second term"
                slot.add_(x)
        self.filled.update(leaves)

    def start(self, places: Places = nowhere) -> Handle[list[Tensor]]:
        """See `Reduction`; leaves without a term count as zeros."""
        move = self._move
        first = self._first
        if first is None and move.is_empty:
            return done(lambda: self._own(places()), communicates=True)
        if first is None:
            values = [self._value(i, move.wires[0].dtype) for i in range(len(move.leaves))]
            return done(lambda: move.unrounded.run(values, places()), communicates=True)
        if len(self.filled) < len(move.leaves):
            empty = [i for i in range(len(move.leaves)) if i not in self.filled]
            first.add(empty, [None] * len(empty))
        move.agree(reduction_group(move.mesh, move.axes), self._device.type)
        if move.rest.is_empty:
            return first.start(places)
        return first.start().then(lambda sums: move.rest.run(sums, places()), communicates=True)

    def _own(self, into: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the terms unreduced, since the move has no steps. With `into`, the caller's copy casts them."""
        if into is None:
            return [self._value(i, self._move.dtype) for i in range(len(self._move.leaves))]
        return [self._terms[i] if i in self._terms else x.zero_() for i, x in enumerate(into)]

    def _value(self, leaf: int, sent: torch.dtype) -> Tensor:
        """The term of a leaf that no collective sums first, rounded to the dtype in which it would be sent."""
        dtype = self._move.dtype
        term = self._terms.get(leaf)
        if term is None:
            return torch.zeros(self._move.leaves[leaf].local, dtype=dtype, device=self._device)
        return term.to(sent).to(dtype)


def axis_sizes(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return how many ranks there are along each of some axes."""
    return tuple(abstract(mesh).axis_size(axis) for axis in axes)
