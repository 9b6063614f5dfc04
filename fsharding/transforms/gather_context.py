"""The runtime of one `value_and_grad` call: gathers units ahead of their use, releases them, reduces their gradients.

In: the shards of the parameters and the targets of their gradients. Out: whole leaves for each unit, gradients, counts.

The order, for three units under a policy that does not keep weights and a prefetch depth of 1; `>` starts a
collective, which runs under the computation after it, and `wait` ends one:

    forward    >gather 0, wait 0, >gather 1, compute 0
               release 0, wait 1, >gather 2, compute 1
               release 1, wait 2,            compute 2                   (2 is not released: backward begins with it)
    backward   >gather 1, compute 2; release 2, >reduce 2
               wait 1, >gather 0, compute 1; release 1, wait reduce 2, >reduce 1
               wait 0,            compute 0; release 0, wait reduce 1, >reduce 0
    finish     wait reduce 0; add what earlier microbatches have accumulated for leaves without a gradient; close

The gradient of a large leaf does not wait for `>reduce`: it is copied into its bucket as soon as it is complete, so
that its memory is free while the rest of the unit's backward runs. Autograd drives backward: `_GatherUnit` is the node
of a unit in the graph, and its backward is `>reduce`. A tensor that autograd saves, and that views a gathered buffer,
is replaced by a `SavedView`; the first one of a unit that backward unpacks gathers the unit again. A product with a
weight of `Precision.columnwise` saves no view: its backward uses `unit.columns`, a second gather of that weight in
blocks along its other dim, which is prefetched and released with the unit.

Guarantees: under policies that free gathered weights at most `depth + 1` units are alive at once; none is after the
call; the depth changes no number; every
gather and every reduction is counted.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import Function

from fsharding.base import _compat, _functorch
from fsharding.base.errors import ConfigError, TransformError, listed, message, report
from fsharding.base.scoped import scoped
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.counters import Counts, record
from fsharding.comm.host_memory import OnHost
from fsharding.comm.leaf_memory import device_of, read_ahead
from fsharding.comm.leaf_wires import LeafIndex, LeafWires
from fsharding.comm.reduce import Noise
from fsharding.comm.streams import streams_for
from fsharding.comm.tier import DEVICE, tier_of
from fsharding.comm.wires import WholeLeaf
from fsharding.mesh import call_stacks
from fsharding.mesh.failures import order_here
from fsharding.sharding.named_sharding import Local, NamedSharding, typeof
from fsharding.transforms.gathered_unit import GatheredUnit, UnitState
from fsharding.transforms.grad_reducer import GradReducer
from fsharding.transforms.policies import Policy
from fsharding.transforms.run_options import RunOptions
from fsharding.transforms.saved_tensors import SavedTensors
from fsharding.transforms.unit_plan import GradTarget, LargeLeaf, UnitLeaf, UnitPlan, is_aligned, plan_unit, whole

__all__ = [
    "GatherContext", "TapeLeaf", "activate", "check_depth", "current_context", "evaluating", "is_evaluating",
    "prefetch_depth", "without_context",
]  # fmt: skip

Kernel: TypeAlias = Callable[[Tensor], object]
"""Fills a tensor, whatever is in it."""

PutTerm: TypeAlias = Callable[[torch.dtype, Kernel], bool]
"""Has a kernel write a term of a dtype to where a gradient is sent from, or does not, and says so."""


class TapeLeaf(NamedTuple):
    """A leaf of the tree that is differentiated."""

    path: str  # its name
    node: Local | None  # what the loss function sees; None for a leaf that isn't a DTensor
    target: GradTarget | None  # where its gradient goes; None for a frozen leaf
    accumulated: Tensor | None  # the local gradient of earlier microbatches, added to in place; None without any


class _Term(NamedTuple):
    """A term of the gradient of a weight that is to be computed: which leaf of its unit, and how."""

    leaf: int
    shape: torch.Size
    dtype: torch.dtype
    put: PutTerm | None
    kernel: Kernel


class _Deferred(NamedTuple):
    """What a `deferring` backward has left: units with the gradients that they have, and by order of unit its terms."""

    units: list[tuple[GatheredUnit, Sequence[Tensor | None]]]
    terms: dict[int, list[_Term]]


@dataclass(frozen=True, eq=False)
class _Columnwise:
    """A weight of a unit in blocks along its other dim: `leaf` is its number in `unit.columns`."""

    context: GatherContext
    unit: GatheredUnit
    leaf: int

    def want(self) -> None:
        """See `Columnwise`."""
        assert self.unit.columns is not None
        self.unit.columns.saved_views += 1

    def gathered(self) -> Any:
        """See `Columnwise`."""
        return self.context.columns_of(self.unit, self.leaf)


class GatherContext:
    """The runtime of one call; `value_and_grad` makes it, and `gather_unit` finds it by `current_context`."""

    # `_units` has the units in the order of forward, `unit.order` being the position. `_current` is the last of them
    # that forward has reached and not released. `_prefetched` has those that were started for a later `gather`, which
    # are in neither. Backward goes from the end of `_units` to its beginning: `_reached` is the position after the unit
    # that it reached last, None before backward, so that all units from there on are done with. `_deferred` is None but
    # in a `deferring` backward and after it: the units that it has left, in order, and the terms that each still lacks.

    def __init__(
        self,
        leaves: Sequence[TapeLeaf],  # all leaves of the differentiated tree, in order
        options: RunOptions,
        wires: LeafWires,
        pool: Pool | None = None,  # a pool of buffers that several contexts share; the caller closes it
        grad_pool: Pool | None = None,  # memory for large gradients that data axes don't shard, kept between calls
    ) -> None:
        precision = options.precision
        nodes = [leaf.node for leaf in leaves]
        self.paths = [leaf.path for leaf in leaves]
        self._targets = [leaf.target for leaf in leaves]
        self._compute = precision.compute_dtype
        self._wires = wires
        # How many units are gathered ahead of the one that is computed with, in forward and in backward.
        self.depth = options.prefetch_depth
        tiers = {tier_of(node.value, node.sharding.device_type) for node in nodes if node is not None} - {DEVICE}
        self._away = bool(tiers)
        # How many are gathered or read ahead: one more than `depth` if reads of leaves take long.
        self.horizon = self.depth + (self.depth > 0 and any(tier.can_fail for tier in tiers))
        # The dtype to which the precision casts all leaves; None if leaves keep their own dtypes.
        self.cast = precision.activation_dtype or precision.params
        self._row_targets = [
            target.row() if target is not None and node is not None and node.shape else None
            for target, node in zip(self._targets, nodes, strict=True)
        ]
        self.counts = Counts()  # gathers, reductions and peaks of this call
        self._defers = options.defers
        # An input of every unit's node, so that backward reaches it although no leaf is an input.
        self.anchor = torch.zeros((), requires_grad=True)
        self._pool = pool or Pool()
        self._owns_pool = pool is None
        devices = (device_of(node.value, node.sharding.device_type) for node in nodes if node is not None)
        self._device = next(devices, torch.device("cpu"))
        memory = self._pool.memory(self._device)
        accumulated = [leaf.accumulated for leaf in leaves]
        # The reducer of gradients.
        self.reducer = GradReducer(
            nodes, self._targets, accumulated, memory, self._device, grad_pool, self._term_noise_of
        )
        self._streams = streams_for(self._device)
        if self._streams.several:
            # Both side streams wait for the compute stream: it may still write shards or read recycled buffers.
            begun = self._streams.record("begun")
            for name in ("gather", "reduce"):
                with self._streams.on(name):
                    self._streams.wait(begun)
        self._units: list[GatheredUnit] = []
        self._current: GatheredUnit | None = None
        self._prefetched: dict[tuple[LeafIndex, ...], GatheredUnit] = {}
        self._reached: int | None = None
        self._deferred: _Deferred | None = None
        self._index: dict[int, tuple[Tensor, LeafIndex]] = {}
        values = [node.value for node in nodes if node is not None]
        # On a CPU the memory of the device is the host's.
        on_host = None if self._device.type == "cpu" else functools.partial(OnHost, self._device, values)
        self.saved = SavedTensors(self._bring, on_host)
        for i, node in enumerate(nodes):
            if node is not None:
                self.register(node.value, LeafIndex(i, None))

    # --------------------------------------------------------------------------------------- leaves and their names
    def register(self, value: Tensor, index: LeafIndex) -> None:
        """Notes that a tensor is a shard of the parameter tree, or a row of one."""
        self._index[id(value)] = (value, index)

    def index_of(self, value: Tensor) -> LeafIndex | None:
        """The index of a shard in the parameter tree; None for a tensor that is not one of its own."""
        known = self._index.get(id(value))
        return known[1] if known is not None and known[0] is value else None

    def grad_sharding(self, value: Tensor) -> NamedSharding | None:
        """The sharding of the gradient of a leaf of the parameter tree; None for other tensors and frozen leaves."""
        index = self.index_of(value)
        target = self._targets[index.leaf] if index is not None and index.row is None else None
        return None if target is None else target.sharding

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which the loss function sees a leaf."""
        return self._compute(stored)

    def name_of(self, index: Sequence[LeafIndex]) -> str:
        """A readable name for a unit: the path of its first leaf, with the row of a stack."""
        leaf, row = index[0]
        path = self.paths[leaf].rpartition(".")[0] or self.paths[leaf]
        return path if row is None else f"{path}[{row}]"

    def path_of(self, index: LeafIndex) -> str:
        """A leaf of the parameters, as an error names it."""
        return f"params.{self.paths[index.leaf]}{'' if index.row is None else f'[{index.row}]'}"

    def gathered_leaves(self) -> list[str]:
        """The leaves of all units that were gathered, with their types, the last unit first; for an error."""
        return [
            f"{self.path_of(index)} is {typeof(leaf)}"
            for unit in reversed(self._units)
            for index, leaf in zip(unit.index, unit.leaves, strict=True)
        ]

    def row_of_stack(self) -> str:
        """The path of a row of a stack that was gathered, such as "params.w[1]"; "" if there is none."""
        rows = (index for unit in reversed(self._units) for index in unit.index if index.row is not None)
        return next(map(self.path_of, rows), "")

    # --------------------------------------------------------------------------------------------------------- forward
    def gather(
        self, leaves: Sequence[Local], index: tuple[LeafIndex, ...], dtype: torch.dtype | None, policy: Policy
    ) -> list[WholeLeaf]:
        """Gather a unit as a node of the autograd graph, release the one before it, and return the full leaves."""
        unit = self._prefetched.pop(index, None) or self._make_unit(leaves, index, dtype)
        full = self.enter(unit, policy)
        nodes = list(cast(Sequence[Tensor], _GatherUnit.apply(self.anchor, self, unit, full)))
        large = {leaf.leaf: leaf for leaf in unit.plan.large}
        for i in (i for b in unit.plan.reductions for i in b.leaves) if self._defers else large:
            nodes[i] = _LeafGrad.watch(nodes[i], self, unit, i, large.get(i))
        again = unit.plan.again[0] if unit.plan.again is not None else ()
        second = {i: _Columnwise(self, unit, number) for number, i in enumerate(again)}
        seen = [
            node if isinstance(x, Tensor) else x.carried_by(node, second.get(i))
            for i, (x, node) in enumerate(zip(full, nodes, strict=True))
        ]
        for i, of_node in unit.plan.seen:
            seen[i] = of_node(nodes[i])
        return seen

    def prefetch(self, leaves: Sequence[Local], index: tuple[LeafIndex, ...]) -> None:
        """Starts the all-gathers of a unit, for which `gather` will be called later."""
        unit = self._prefetched.pop(index, None) or self._make_unit(leaves, index, None)
        self._prefetched[index] = unit
        unit.start()

    def read_ahead(self, leaves: Sequence[Local]) -> None:
        """Start to read the shards of a unit that will be gathered after those that are prefetched."""
        for leaf in leaves:
            read_ahead(leaf.value, self._device.type)

    def _make_unit(
        self, leaves: Sequence[Local], index: tuple[LeafIndex, ...], dtype: torch.dtype | None
    ) -> GatheredUnit:
        described: list[UnitLeaf] = []
        for leaf, (number, row) in zip(leaves, index, strict=True):
            stored = leaf.value.dtype
            compute = dtype if dtype and stored.is_floating_point else self._compute(stored)
            target = (self._targets if row is None else self._row_targets)[number]
            slices = [leaf.shape] if target is None else target.slices(leaf.shape)
            # A frozen leaf has no target that tells the slices of other ranks; stages slice stacks by rows alone.
            known = target is not None or {*leaf.slices} <= {"pp"}
            aligned = known and all(is_aligned(leaf.sharding, shape, stored.itemsize) for shape in slices)
            misaligned = row is not None and not aligned
            away = self._away and tier_of(leaf.value, self._device.type) is not DEVICE
            place = LeafIndex(number, row)
            sent = self._wires.gather(place, leaf.shape, compute)
            terms = self._wires.terms(place, len(leaf.shape), compute)
            if target is not None and terms is not None:
                target = replace(target, first_wire=terms)
            described.append(
                UnitLeaf(
                    leaf.sharding, leaf.shape, stored, sent.wire, target, copied=misaligned or away,
                    again=sent.again, seen=sent.seen,
                )
            )  # fmt: skip

        site = None if order_here() is None else call_stacks.site_here()

        def gathered(chosen: Sequence[int], plan: UnitPlan, columns: GatheredUnit | None) -> GatheredUnit:
            shards = [leaves[i] for i in chosen]
            places = tuple(index[i] for i in chosen)
            noise = self._noise_of(shards, places)
            # An owner of its own: a unit that owned its memory would live until the garbage collector runs.
            memory = self._pool.memory(self._device, owner=object())
            return GatheredUnit(plan, shards, places, memory, self, site=site, noise=noise, columns=columns)

        plan = plan_unit(tuple(described))
        columns = None if plan.again is None else gathered(*plan.again, None)
        return gathered(range(len(leaves)), plan, columns)

    def starts(self, unit: GatheredUnit) -> None:
        """Notes that a unit is gathered now."""
        self._note("gathers", unit)

    def counts_gather(self, unit: GatheredUnit) -> None:
        """Counts an all-gather."""
        self.counts.gathers.append(self.name_of(unit.index))

    def _note(self, kind: str, unit: GatheredUnit) -> None:
        """Notes what starts now in the order of the call, whose ranks have to agree on it."""
        order = order_here()
        if order is not None:
            name = functools.partial(_leaves_of, self.paths, unit.index)
            order.note(kind, (unit.index, unit.plan.outline), name, unit.site)

    def _noise_of(self, leaves: Sequence[Local], index: tuple[LeafIndex, ...]) -> Noise:
        wires = self._wires
        device = self._device
        return lambda i: wires.noise(index[i], leaves[i].sharding, leaves[i].shape, device)

    def _term_noise_of(self, unit: GatheredUnit) -> Noise:
        wires = self._wires
        device = self._device
        index = unit.index
        leaves = unit.leaves
        return lambda i: wires.term_noise(index[i], whole(leaves[i].sharding), leaves[i].shape, device)

    @torch.no_grad()
    def enter(self, unit: GatheredUnit, policy: Policy) -> list[WholeLeaf]:
        """Release the unit before this one, wait for this one, and return its full leaves."""
        if self._current is not None:
            self._current.release()
        self.saved.forget_freed()
        self.saved.enter(offloads=policy.offloads)
        self._current, unit.kept, unit.order = unit, policy.gathered, len(self._units)
        self._units.append(unit)
        wholes: list[WholeLeaf] = [leaf.value for leaf in unit.leaves]
        for i, dtype in unit.plan.aliases:
            # A view, so that autograd refuses to write where the state itself is.
            value = unit.leaves[i].value
            wholes[i] = value.view_as(value).to(dtype)
        for i, leaf in self._wait(unit).items():
            wholes[i] = leaf
        return wholes

    def _wait(self, unit: GatheredUnit) -> dict[int, WholeLeaf]:
        """Waits for a unit, and watches for tensors that autograd saves of it."""
        full = unit.wait()
        self.saved.watch(unit)
        return full

    @contextmanager
    def saved_as_views(self) -> Generator[None]:
        """Inside, autograd saves where gathered leaves are, and not the leaves."""
        with self.saved.hooked(), self._wires.noting(self.saved.note_values):
            yield

    def end_forward(self) -> None:
        """Forward is over, and backward comes later: releases the last unit, and those that were prefetched."""
        for unit in (self._current, *self._prefetched.values()):
            if unit is not None:
                unit.abandon()
        self._current = None
        self._prefetched.clear()
        self.saved.end_forward()

    # ------------------------------------------------------------------------------------------------------- backward
    def _bring(self, unit: GatheredUnit) -> None:
        """Backward needs a buffer of a unit: gathers it again if need be, and starts the units before it."""
        first = self._reach(unit)
        if unit.state is not UnitState.ALIVE:
            self._wait(unit)
        if first:
            self._prefetch_before(unit.order)

    def columns_of(self, unit: GatheredUnit, leaf: int) -> Any:
        """A weight in blocks along its other dim, which backward gathers."""
        assert unit.columns is not None
        first = self._reach(unit)
        unit.columns.wait_for_full()
        if first:
            self._prefetch_before(unit.order)
        return unit.columns.full[leaf]

    def _reach(self, unit: GatheredUnit) -> bool:
        """Backward needs a unit; returns whether that is the first time."""
        if unit.in_backward:
            return False
        unit.in_backward = True
        self._abandon_passed(unit)
        return True

    def _abandon_passed(self, unit: GatheredUnit) -> None:
        """Backward has reached a unit: lets go the later ones that it has passed without leaving them."""
        for later in self._units[unit.order + 1 : self._reached]:
            if not later.in_backward or not later.plan.reductions:
                later.abandon()
        self._reached = unit.order + 1

    def _prefetch_before(self, order: int) -> None:
        """Starts to gather the units that backward needs after the one of this order, as many as the depth says."""
        before = itertools.islice((u for u in reversed(self._units[:order]) if u.again), self.horizon)
        for number, earlier in enumerate(before):
            # Backward goes no further than the first unit that has gradients.
            if not any(u.plan.reductions for u in self._units[: earlier.order + 1]):
                continue
            if number < self.depth:
                earlier.start_again()
            else:
                earlier.read_ahead()

    def prefetch_backward(self) -> None:
        """Starts to gather the unit that backward needs first, unless the depth is 0."""
        last = next((unit for unit in reversed(self._units) if unit.again), None)
        if last is not None and self.depth:
            last.start_again()

    @contextmanager
    def deferring(self) -> Generator[None]:
        """A backward inside leaves products that give gradients of weights to `run_deferred`, and reduces nothing."""
        assert self._defers and self._deferred is None, "a context defers once"
        self._deferred = _Deferred([], {})
        try:
            yield
        finally:
            for unit in self._units:
                unit.abandon()

    def put_term(self, unit: GatheredUnit, leaf: int, shape: torch.Size, put: PutTerm | None) -> PutTerm | None:
        """Return the callback by which a kernel adds its term of a weight's gradient (see `ops.grad_sink`), or None."""
        if put is None and not self._defers:
            return None

        def put_or_defer(dtype: torch.dtype, kernel: Kernel) -> bool:
            if _context.get() is self:  # in forward: the loss itself takes a gradient, by torch.autograd.grad
                return False
            if self._deferred is None:
                return put is not None and put(dtype, kernel)
            self._deferred.terms.setdefault(unit.order, []).append(_Term(leaf, shape, dtype, put, kernel))
            return True

        return put_or_defer

    def is_complete(self, *, has_slot: bool) -> bool:
        """Whether a large leaf's gradient may enter its bucket now: nothing is deferred, or the rest is added later."""
        return self._deferred is None or has_slot

    @torch.no_grad()
    def run_deferred(self) -> None:
        """Computes what a `deferring` backward has left, and reduces the gradients, in the order of that backward."""
        assert self._deferred is not None
        (units, terms), self._deferred = self._deferred, None
        for unit, grads in units:
            whole = list(grads)
            for leaf, shape, dtype, put, kernel in terms.pop(unit.order, ()):
                if put is not None and put(dtype, kernel):
                    continue
                term = torch.empty(shape, dtype=dtype, device=self._device)
                kernel(term)
                earlier = whole[leaf]
                whole[leaf] = term if earlier is None else earlier + term
            self._reduce(unit, whole)

    def leave(self, unit: GatheredUnit, grads: Sequence[Tensor | None]) -> None:
        """Backward of a unit is over: releases its buffers and starts to reduce its gradients."""
        unit.release()
        if self._deferred is not None:
            self._deferred.units.append((unit, grads))
        else:
            self._reduce(unit, grads)

    def _reduce(self, unit: GatheredUnit, grads: Sequence[Tensor | None]) -> None:
        if unit.plan.reductions:
            self._note("reduces", unit)
        for b in unit.plan.reductions:
            if not (b.early.is_empty and b.late.is_empty):
                self.counts.reductions.append(self.name_of([unit.index[i] for i in b.leaves]))
        self.reducer.reduce(unit, unit.plan, unit.index, grads)

    # ---------------------------------------------------------------------------------------------------------- the end
    def finish(self) -> list[Tensor | None]:
        """Wait for all reductions, close, and return the local gradient of each leaf; None for frozen ones."""
        result = self.reducer.finish()
        self.counts.peak_units, self.counts.peak_bytes = self._pool.peak_owners, self._pool.peak_bytes
        record(self.counts)
        self.close()
        return result

    def close(self, *, failed: bool = False) -> None:
        """Breaks the references between context, units and buffers, so that nothing is alive after the call."""
        for unit in [*self._units, *self._prefetched.values()]:
            unit.abandon(failed=failed)
        self._units.clear()
        self._prefetched.clear()
        self.saved.close()
        self._index.clear()
        self._current = self._deferred = None
        self._streams.wait_all()
        self.reducer.close()
        if self._owns_pool:
            self._pool.close()


def _leaves_of(paths: Sequence[str], index: Sequence[LeafIndex]) -> str:
    """The leaves of a unit in words: `blocks[3] (w, b)`."""
    named = [(paths[leaf], "" if row is None else f"[{row}]") for leaf, row in index]
    folders = {(path.rpartition(".")[0], row) for path, row in named}
    if len(named) == 1 or len(folders) > 1:
        return listed(f"{path}{row}" for path, row in named)
    folder, row = folders.pop()
    inside = listed(path.rpartition(".")[2] for path, _ in named)
    return f"{folder}{row} ({inside})" if folder else f"{inside}{row}"


class _GatherUnit(Function):
    """The node of a unit in the graph: forward gathers, backward reduces."""

    # Shards are no inputs, since gradients go to the reducer; the anchor brings backward here.

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, context: GatherContext, unit: GatheredUnit, full: list[WholeLeaf]
    ) -> tuple[Tensor, ...]:
        ctx.context = context
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        nodes = [x if isinstance(x, Tensor) else x.stand_in() for x in full]
        reduced = {i for b in unit.plan.reductions for i in b.leaves}
        ctx.mark_non_differentiable(*(x for i, x in enumerate(nodes) if i not in reduced))
        return tuple(nodes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.context.leave(ctx.unit, grads)
        return None, None, None, None


class _LeafGrad(Function):
    """Takes the gradient of a large leaf when it is complete, not when backward leaves the unit."""

    # Products of `ops` may write their term of any leaf's gradient elsewhere, or leave it for later; see `put_term`.

    @staticmethod
    def watch(full: Tensor, context: GatherContext, unit: GatheredUnit, leaf: int, large: LargeLeaf | None) -> Tensor:
        """Return the leaf as the result of a node; backward visits one of a large leaf before others that are ready."""
        result = cast(Tensor, _LeafGrad.apply(full, context, unit, leaf, large))
        if large is not None and result.grad_fn is not None:
            _compat.visit_first(result.grad_fn)
        return result

    @staticmethod
    def forward(
        ctx: Any, full: Tensor, context: GatherContext, unit: GatheredUnit, leaf: int, large: LargeLeaf | None
    ) -> Tensor:
        put = ctx.take = None
        if large is not None:
            ctx.take = functools.partial(context.reducer.take, unit, unit.plan, large)
            if unit.plan.reductions[large.bucket].early.has_slots(full):
                put = functools.partial(context.reducer.write, unit, unit.plan, large)
            ctx.is_complete = functools.partial(context.is_complete, has_slot=put is not None)
        # Kernels of `ops` look for this attribute, and write their term of the gradient where it is sent from.
        if (put_term := context.put_term(unit, leaf, full.shape, put)) is not None:
            ctx.put_term = put_term
        ctx.set_materialize_grads(False)
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad = grads[0]
        if grad is not None and ctx.take is not None and ctx.is_complete():
            ctx.take(grad)
            grad = None
        return grad, None, None, None, None


_context: ContextVar[GatherContext | None] = ContextVar("fsharding_gather_context", default=None)


@contextmanager
def activate(context: GatherContext) -> Generator[None]:
    """Makes a context the one that `gather_unit` finds, and hooks it into what autograd saves."""
    with scoped(_context, context), context.saved_as_views():
        yield


def without_context() -> AbstractContextManager[None]:
    """Hides the context, from functions that may run again when it has been closed."""
    return scoped(_context, None)


def current_context() -> GatherContext | None:
    """Return the context of the innermost `value_and_grad` in its forward; None outside, and under torch.func."""
    context = _context.get()
    if context is not None and _functorch.linearizing():
        rule = "cannot run inside fs.value_and_grad: torch takes its linear map for a constant there."
        mend = "Use torch.func.jvp, or torch.func.linearize inside fs.shard_map."
        raise TransformError(report(f"torch.func.linearize {rule}", mend=mend))
    return None if _functorch.in_functorch() else context


def prefetch_depth() -> int:
    """How many units the innermost `value_and_grad` gathers or reads ahead; 0 where no context could keep them."""
    context = current_context()
    return 0 if context is None else context.horizon


_evaluating: ContextVar[bool] = ContextVar("fsharding_evaluating", default=False)


@contextmanager
def evaluating() -> Generator[None]:
    """Run functionalized modules in eval mode inside the `with` block, under torch.func transforms too."""
    # Not in inference mode: what a call caches, such as memory and constants of modules, is used by train steps too.
    with torch.inference_mode(False), scoped(_evaluating, True):
        yield


def is_evaluating() -> bool:
    """Whether this is inside `evaluating`."""
    return _evaluating.get()


def check_depth(prefetch_depth: Any) -> None:
    """Refuse a number of units to gather ahead that isn't an integer from 0."""
    if not isinstance(prefetch_depth, int) or isinstance(prefetch_depth, bool) or prefetch_depth < 0:
        shown = prefetch_depth if isinstance(prefetch_depth, int | float | str) else type(prefetch_depth).__name__
        rule = f"got prefetch_depth={shown!r}."
        mend = (
            "Give the number of units to gather ahead: 1, or 0 for none. Units are named in fs.gather_unit(next_unit=)."
        )
        raise ConfigError(message(rule, mend=mend))
