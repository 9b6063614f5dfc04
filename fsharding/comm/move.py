"""Move a bucket of leaves from one sharding to another: the plan, whose table is in `comm.steps`, and its execution.

Guarantee: the bits of a result depend neither on the other leaves of its bucket nor on the order in which terms come.
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
from fsharding.comm.native import RowSum, as_bytes
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
    # Flat tensors of `memory` that gathered leaves view. A leaf views the same entry at every call.
    buffers: list[Tensor]


@dataclass(frozen=True)
class Move:
    """The plan of a bucket of leaves that are sent together."""

    # `outline` is equal on all ranks: it determines which collectives run, and in which order.

    mesh: Mesh
    leaves: tuple[LeafSteps, ...]  # their steps differ in dims only
    wires: tuple[Wire, ...]  # the wire of each leaf in the first step; all are equal if that is a sum
    dtype: torch.dtype  # dtype of sums, and of everything sent after the first step
    large: bool = False  # whether any leaf is large enough to be summed alone

    @functools.cached_property
    def outline(self) -> str:
        """The part of the plan that all ranks must share, as text: sizes of local shards may differ."""
        return repr(([leaf.steps for leaf in self.leaves], self.wires, self.dtype, self.large))

    @property
    def is_empty(self) -> bool:
        """Whether there are no steps."""
        return not self.leaves or not self.leaves[0].steps

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes of the first step; empty without steps."""
        return () if self.is_empty else self.leaves[0].steps[0].axes

    @functools.cached_property
    def sums_first(self) -> bool:
        """Whether the first step is a sum, so that terms are copied into its send buffer one by one."""
        return bool(self.leaves) and begins_with_sum(self.leaves[0].steps)

    @functools.cached_property
    def rest(self) -> Move:
        """The move after its first step; sums and gathered values are sent unquantized."""
        return replace(self.unrounded, leaves=tuple(leaf.rest for leaf in self.leaves), large=False)

    @functools.cached_property
    def unrounded(self) -> Move:
        """The same move with values sent in `dtype`."""
        # If the backend adds the terms of the first step, it adds those of later steps as well.
        native = any(wire.native for wire in self.wires)
        return replace(self, wires=(Plain(self.dtype, native),) * len(self.leaves))

    @functools.cached_property
    def parts(self) -> tuple[Parts, ...]:
        """The tensors sent for each leaf, if the first step is a gather or the move has no steps."""
        return tuple(leaf.parts(wire) for leaf, wire in zip(self.leaves, self.wires, strict=True))

    @functools.cached_property
    def bucket(self) -> Bucket:
        """The layout of all `parts`."""
        return plan_bucket(tuple(sent for parts in self.parts for sent in parts.sent), axis_sizes(self.mesh, self.axes))

    @functools.cached_property
    def decoded(self) -> Bucket | None:
        """The layout of the results if they are decoded into separate memory: either all of a bucket are, or none."""
        shapes = tuple((parts.decoded, 0) for parts in self.parts if parts.decoded is not None)
        return plan_bucket(shapes, ()) if shapes else None

    @functools.cached_property
    def terms(self) -> SumLayout:
        """The layout of terms, if the first step is a sum."""
        shapes = tuple((leaf.local, leaf.steps[0].dim) for leaf in self.leaves)
        scatter = self.leaves[0].steps[0].kind == "scatter"
        return self.wires[0].terms(shapes, axis_sizes(self.mesh, self.axes), scatter=scatter)

    def agree(self, group: Group, device_type: str) -> None:
        """Inside `fs.debug.compare_units`, check the plan of the first step and that all members have the same one."""
        if checks_plans():
            assert len({kinds_of(leaf.steps) for leaf in self.leaves}) == 1, self
            buckets.check_bucket(self.terms.bucket if self.sums_first else self.bucket)
            compare_plans(group, device_type, self.outline)

    def has_slots(self, leaf: Tensor) -> bool:
        """Whether a kernel can write a large leaf directly into its send buffer. Collective the first time."""
        # A quantized term has no slot: its scales are known only once the full term is computed.
        if not self.sums_first or not self.terms.as_is:
            return False
        transport = transport_for(reduction_group(self.mesh, self.axes), leaf.device)
        return transport.has_slots(leaf.numel(), scatter=self.terms.scatter)

    def open(self, device: torch.device, memory: Memory | None = None, noise: Noise | None = None) -> Filling:
        """Return a `Filling` that takes terms; nothing is sent. `noise(i)`: rounding noise of leaf i."""
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
        """Start the first collective; later steps run when the handle is waited for."""
        # `leaves` must not be written before `wait`: a shard that needs no cast is sent from its own memory. `into`
        # goes to the last step, which writes the results there; earlier steps use temporary memory. `agreed` has the
        # scales of the leaves if the caller has agreed on them already, for many buckets in one collective.
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
        """Take all steps and return the results; see `start`."""
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
            if into is None:
                into = buckets.whole_views(_compat.fresh((self.bucket.size,), dtype, device), self.bucket)
            handle = transport.all_gather_into(self.bucket, [x.to(dtype) for x in sent], into)
            return handle.then(lambda received: self._decode(received, given, None, None, []))

        def decode(flat: Tensor) -> Moved:
            return self._decode(buckets.whole_views(flat, self.bucket), given, memory, into, [flat])

        return transport.all_gather(self.bucket, sent, dtype, memory).then(decode)

    def _kept(self, sent: list[Tensor], given: Sequence[Any], memory: Memory, into: Sequence[Tensor] | None) -> Moved:
        """Decode leaves of a move without steps."""
        # Values that need no decoding are copied: results never alias the shards, which the caller may overwrite.
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
        """Decode leaves from received tensors, which view `buffers`."""
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
                # Scales that every rank has computed were not sent, so they are in storages outside of `buffers`. They
                # count as buffers too: the owner keeps them alive, and frees them, with the leaf.
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
) -> Move:
    """Plan a move of one or more leaves by one wire; their steps may differ in dims only."""
    leaves = tuple(steps_of(*leaf) for leaf in zip(sources, targets, shapes, strict=True))
    return Move(sources[0].mesh, leaves, (wire,) * len(leaves), dtype)


class Filling:
    """A `Reduction` of the leaves of a move: the first sum, and the steps after it."""

    def __init__(
        self, move: Move, device: torch.device, memory: Memory | None = None, noise: Noise | None = None
    ) -> None:
        # Leaves that have a term. If a kernel writes a slot, its caller adds the leaf here: a leaf not in the set
        # is overwritten by its next term, and zeroed by `start`.
        self.filled: set[int] = set()
        self._move = move
        self._device = device
        self._terms: dict[int, Tensor] = {}  # term of each leaf, used only if the first step isn't a sum
        self._first: Reduction | None = None  # the first step, if it is a sum
        if move.sums_first:
            transport = transport_for(reduction_group(move.mesh, move.axes), device)
            self._first = transport.reduction(move.terms, move.dtype, large=move.large, memory=memory, noise=noise)

    @property
    def sends(self) -> bool:
        """Whether the first step is a sum, which copies terms into a send buffer and communicates."""
        return self._first is not None

    @property
    def buffer(self) -> Tensor | None:
        """Send buffer as flat bytes, if nothing else is in its memory and no step follows the sum."""
        own = self._first.own if isinstance(self._first, RowSum) and self._move.rest.is_empty else None
        return None if own is None or own.storage_offset() else as_bytes(own)

    def slot(self, leaf: int, dtype: torch.dtype) -> Tensor | None:
        """See `Reduction`."""
        return None if self._first is None else self._first.slot(leaf, dtype)

    def add(self, leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
        """See `Reduction`; a second term is added in its slot if the move begins with a sum, else a leaf has one."""
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
        """See `Reduction`; leaves without a term are zeros."""
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
        """Return the terms, since nothing is reduced; with `into` they keep their dtype, and the caller casts them."""
        if into is None:
            return [self._value(i, self._move.dtype) for i in range(len(self._move.leaves))]
        return [self._terms[i] if i in self._terms else x.zero_() for i, x in enumerate(into)]

    def _value(self, leaf: int, sent: torch.dtype) -> Tensor:
        """Return a term that isn't summed first, rounded to the dtype in which other strategies would send it."""
        dtype = self._move.dtype
        term = self._terms.get(leaf)
        if term is None:
            return torch.zeros(self._move.leaves[leaf].local, dtype=dtype, device=self._device)
        return term.to(sent).to(dtype)


def axis_sizes(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the size of each axis."""
    return tuple(abstract(mesh).axis_size(axis) for axis in axes)
