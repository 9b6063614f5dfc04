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
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
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
from fsharding.comm.streams import streams_for
from fsharding.comm.tier import DEVICE, tier_of
from fsharding.comm.wires import WholeLeaf
from fsharding.mesh import call_stacks
from fsharding.mesh.failures import order_here
from fsharding.sharding.named_sharding import Local, NamedSharding, typeof
from fsharding.transforms.gathered_unit import GatheredUnit, UnitState
from fsharding.transforms.grad_reducer import GradReducer, TapeLeaf
from fsharding.transforms.policies import Policy
from fsharding.transforms.run_options import RunOptions
from fsharding.transforms.saved_tensors import SavedTensors
from fsharding.transforms.unit_plan import LargeLeaf, UnitLeaf, UnitPlan, is_aligned, plan_unit, whole

__all__ = [
    "GatherContext", "check_depth", "current_context", "evaluating", "is_evaluating", "prefetch_depth",
    "without_context",
]  # fmt: skip

Kernel: TypeAlias = Callable[[Tensor], object]
"""Fills a tensor, whatever is in it."""


@dataclass(frozen=True, eq=False)
class _Sink:
    """Where the gradient of a leaf goes before backward leaves its unit: of a large one, or one with deferred terms."""

    context: GatherContext
    unit: GatheredUnit
    leaf: int  # its number in the unit
    shape: torch.Size
    large: LargeLeaf | None
    has_slot: bool  # a kernel may write a term of it to its bucket

    def put_term(self, dtype: torch.dtype, kernel: Kernel) -> bool:
        """Have a kernel write a term now, or note it for `run_deferred`; see `ops.grad_sink`."""
        if _context.get() is self.context:  # in forward: the loss itself takes a gradient, by torch.autograd.grad
            return False
        if self.context.deferred is None:
            return self.write(dtype, kernel)
        self.context.deferred.terms.setdefault(self.unit.order, []).append((self, dtype, kernel))
        return True

    def write(self, dtype: torch.dtype, kernel: Kernel) -> bool:
        """Have a kernel write a term to the bucket; False if there is no place for it."""
        return self.has_slot and self.context.reducer.write(self.unit, cast(LargeLeaf, self.large), dtype, kernel)

    def take(self, grad: Tensor) -> bool:
        """Copy the gradient of a large leaf to its bucket, unless terms are deferred that cannot be added there."""
        if self.large is None or not (self.has_slot or self.context.deferred is None):
            return False
        self.context.reducer.take(self.unit, self.large, grad)
        return True


class _Deferred(NamedTuple):
    """What a `deferring` backward has left: units with the gradients that they have, and by order of unit its terms."""

    units: list[tuple[GatheredUnit, Sequence[Tensor | None]]]
    terms: dict[int, list[tuple[_Sink, torch.dtype, Kernel]]]


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
        columns = self.unit.columns
        assert columns is not None
        self.context.bring(self.unit, columns)
        return columns.full[self.leaf]


class GatherContext:
    """The runtime of one call; `value_and_grad` makes it, and `gather_unit` finds it by `current_context`."""

    # `_units` has the units in the order of forward, `unit.order` being the position. `_current` is the last of them
    # that forward has reached and not released. `_prefetched` has those that were started for a later `gather`, which
    # are in neither. Backward goes from the end of `_units` to its beginning: `_reached` is the position after the unit
    # that it reached last, None before backward, so that all units from there on are done with. `deferred` is None but
    # in a `deferring` backward and after it: the units that it has left, in order, and the terms that each still lacks.

    def __init__(
        self,
        leaves: Mapping[int, TapeLeaf],  # by their numbers in the differentiated tree
        options: RunOptions,
        wires: LeafWires,
        pool: Pool | None = None,  # a pool of buffers that several contexts share; the caller closes it
        grad_pool: Pool | None = None,  # memory for large gradients that data axes don't shard, kept between calls
    ) -> None:
        precision = options.precision
        nodes = [leaf.node for leaf in leaves.values()]
        self.paths = {i: leaf.path for i, leaf in leaves.items()}
        self._targets = {i: leaf.target for i, leaf in leaves.items()}
        self.compute_dtype = precision.compute_dtype  # the dtype in which the loss function sees a leaf, by its own
        self._wires = wires
        # How many units are gathered ahead of the one that is computed with, in forward and in backward.
        self.depth = options.prefetch_depth
        tiers = {tier_of(node.value, node.sharding.device_type) for node in nodes} - {DEVICE}
        self._away = bool(tiers)
        # How many are gathered or read ahead: one more than `depth` if reads of leaves take long.
        self.horizon = self.depth + (self.depth > 0 and any(tier.can_fail for tier in tiers))
        # The dtype to which the precision casts all leaves; None if leaves keep their own dtypes.
        self.cast = precision.activation_dtype or precision.params
        self.counts = Counts()  # gathers, reductions and peaks of this call
        self.defers = options.defers
        # An input of every unit's node, so that backward reaches it although no leaf is an input.
        self.anchor = torch.zeros((), requires_grad=True)
        self._pool = pool or Pool()
        self._owns_pool = pool is None
        devices = (device_of(node.value, node.sharding.device_type) for node in nodes)
        self._device = next(devices, torch.device("cpu"))
        memory = self._pool.memory(self._device)
        self.reducer = GradReducer(leaves, memory, self._device, self._term_noise, grad_pool)
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
        self.deferred: _Deferred | None = None
        self._index: dict[int, tuple[Tensor, LeafIndex]] = {}
        values = [node.value for node in nodes]
        # On a CPU the memory of the device is the host's.
        on_host = None if self._device.type == "cpu" else functools.partial(OnHost, self._device, values)
        self.saved = SavedTensors(self.bring, on_host)
        for i, leaf in leaves.items():
            self.register(leaf.node.value, LeafIndex(i, None))

    # --------------------------------------------------------------------------------------- leaves and their names
    def register(self, value: Tensor, index: LeafIndex) -> None:
        """Notes that a tensor is a shard of the parameter tree, or a row of one."""
        self._index[id(value)] = (value, index)

    def index_of(self, value: Tensor) -> LeafIndex | None:
        """The index of a shard in the parameter tree; None for a tensor that is not one of its own."""
        known = self._index.get(id(value))
        return known[1] if known is not None and known[0] is value else None

    def indices_of(self, nodes: Iterable[Local]) -> tuple[LeafIndex, ...] | None:
        """The leaves of a unit in the parameter tree; None if one of them is not the tree's own shard."""
        indices = tuple(self.index_of(node.value) for node in nodes)
        return None if None in indices else cast("tuple[LeafIndex, ...]", indices)

    def grad_sharding(self, value: Tensor) -> NamedSharding | None:
        """The sharding of the gradient of a leaf of the parameter tree; None for other tensors and frozen leaves."""
        index = self.index_of(value)
        target = self._targets[index.leaf] if index is not None and index.row is None else None
        return None if target is None else target.sharding

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
        full = self._use(unit, policy)
        nodes = list(cast(Sequence[Tensor], _GatherUnit.apply(self.anchor, self, unit, full)))
        large = {leaf.leaf: leaf for leaf in unit.plan.large}
        for i in (i for b in unit.plan.reductions for i in b.leaves) if self.defers else large:
            nodes[i] = self._watched(unit, i, nodes[i], large.get(i))
        again = unit.plan.again[0] if unit.plan.again is not None else ()
        second = {i: _Columnwise(self, unit, number) for number, i in enumerate(again)}
        seen = [
            node if isinstance(x, Tensor) else x.carried_by(node, second.get(i))
            for i, (x, node) in enumerate(zip(full, nodes, strict=True))
        ]
        for i, of_node in unit.plan.seen:
            seen[i] = of_node(nodes[i])
        return seen

    def _watched(self, unit: GatheredUnit, leaf: int, full: Tensor, large: LargeLeaf | None) -> Tensor:
        """Return a leaf as the result of a node that has a sink for its gradient."""
        has_slot = large is not None and unit.plan.reductions[large.bucket].early.has_slots(full)
        sink = _Sink(self, unit, leaf, full.shape, large, has_slot)
        result = cast(Tensor, _LeafGrad.apply(full, sink))
        if large is not None and result.grad_fn is not None:
            _compat.visit_first(result.grad_fn)  # before others that are ready, so that its memory is free early
        return result

    def prefetch(self, units: Iterable[Sequence[Local]]) -> None:
        """Start to gather the next units, which `gather` will be called for; read those beyond the depth ahead."""
        for number, leaves in enumerate(itertools.islice(units, self.horizon)):
            index = self.indices_of(leaves)
            if index and number < self.depth:
                unit = self._prefetched.pop(index, None) or self._make_unit(leaves, index, None)
                self._prefetched[index] = unit
                unit.start()
            elif index:
                for leaf in leaves:
                    read_ahead(leaf.value, self._device.type)

    def _make_unit(
        self, leaves: Sequence[Local], index: tuple[LeafIndex, ...], dtype: torch.dtype | None
    ) -> GatheredUnit:
        described = tuple(self._described(leaf, place, dtype) for leaf, place in zip(leaves, index, strict=True))
        site = None if order_here() is None else call_stacks.site_here()

        def gathered(chosen: Sequence[int], plan: UnitPlan) -> GatheredUnit:
            shards = [leaves[i] for i in chosen]
            places = tuple(index[i] for i in chosen)
            # An owner of its own: a unit that owned its memory would live until the garbage collector runs.
            memory = self._pool.memory(self._device, owner=object())
            return GatheredUnit(
                plan, shards, places, memory, name=self.name_of(places), starts=self._note_gathers, noise=self._noise,
                site=site,
            )  # fmt: skip

        unit = gathered(range(len(leaves)), plan_unit(described))
        if unit.plan.again is not None:
            unit.columns = gathered(*unit.plan.again)
        return unit

    def _described(self, leaf: Local, place: LeafIndex, dtype: torch.dtype | None) -> UnitLeaf:
        """Plan how a leaf of a unit is gathered, and its gradient reduced."""
        stored = leaf.value.dtype
        compute = dtype if dtype and stored.is_floating_point else self.compute_dtype(stored)
        target = self._targets[place.leaf]
        if target is not None and place.row is not None:
            target = target.row
        slices = [leaf.shape] if target is None else target.slices(leaf.shape)
        # A frozen leaf has no target that tells the slices of other ranks; stages slice stacks by rows alone.
        known = target is not None or {*leaf.slices} <= {"pp"}
        aligned = known and all(is_aligned(leaf.sharding, shape, stored.itemsize) for shape in slices)
        misaligned = place.row is not None and not aligned
        away = self._away and tier_of(leaf.value, self._device.type) is not DEVICE
        sent = self._wires.gather(place, leaf.shape, compute)
        if target is not None and sent.terms is not None:
            target = replace(target, first_wire=sent.terms)
        return UnitLeaf(
            leaf.sharding, leaf.shape, stored, sent.wire, target, copied=misaligned or away,
            again=sent.again, seen=sent.seen,
        )  # fmt: skip

    def _note_gathers(self, unit: GatheredUnit, gathers: int) -> None:
        """Note a unit whose all-gathers start now, and count those that send something."""
        self._note("gathers", unit)
        self.counts.gathers += [unit.name] * gathers

    def _note(self, kind: str, unit: GatheredUnit) -> None:
        """Notes what starts now in the order of the call, whose ranks have to agree on it."""
        order = order_here()
        if order is not None:
            name = functools.partial(_leaves_of, self.paths, unit.index)
            order.note(kind, (unit.index, unit.plan.outline), name, unit.site)

    def _noise(self, unit: GatheredUnit, leaf: int) -> Tensor:
        node = unit.leaves[leaf]
        return self._wires.noise(unit.index[leaf], node.sharding, node.shape, self._device, of_term=False)

    def _term_noise(self, unit: GatheredUnit, leaf: int) -> Tensor:
        node = unit.leaves[leaf]
        sharding = whole(node.sharding)
        return self._wires.noise(unit.index[leaf], sharding, node.shape, self._device, of_term=True)

    @torch.no_grad()
    def _use(self, unit: GatheredUnit, policy: Policy) -> list[WholeLeaf]:
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
    def active(self) -> Generator[None]:
        """Inside, `gather_unit` finds this context, and autograd saves where gathered leaves are, not the leaves."""
        with scoped(_context, self), self.saved.hooked(), self._wires.noting(self.saved.note_values):
            yield

    def end_forward(self) -> None:
        """Forward is over, and backward comes later: releases the last unit, and those that were prefetched."""
        for unit in (self._current, *self._prefetched.values()):
            if unit is not None:
                unit.release()
        self._current = None
        self._prefetched.clear()
        self.saved.end_forward()

    # ------------------------------------------------------------------------------------------------------- backward
    def bring(self, unit: GatheredUnit, columns: GatheredUnit | None = None) -> None:
        """Backward needs a unit, or its columns: gather that again if need be, and start the units before it."""
        first = not unit.in_backward
        if first:
            unit.in_backward = True
            # Backward has passed the later ones, some of them without leaving them.
            for later in self._units[unit.order + 1 : self._reached]:
                if not later.in_backward or not later.plan.reductions:
                    later.release()
            self._reached = unit.order + 1
        if columns is not None and columns.state is not UnitState.ALIVE:
            columns.full = columns.wait()
        elif columns is None and unit.state is not UnitState.ALIVE:
            self._wait(unit)
        if first:
            self._prefetch_before(unit.order)

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
        assert self.defers and self.deferred is None, "a context defers once"
        self.deferred = _Deferred([], {})
        try:
            yield
        finally:
            for unit in self._units:
                unit.release()

    @torch.no_grad()
    def run_deferred(self) -> None:
        """Computes what a `deferring` backward has left, and reduces the gradients, in the order of that backward."""
        assert self.deferred is not None
        (units, terms), self.deferred = self.deferred, None
        for unit, grads in units:
            whole = list(grads)
            for sink, dtype, kernel in terms.pop(unit.order, ()):
                if not sink.write(dtype, kernel):
                    term = torch.empty(sink.shape, dtype=dtype, device=self._device)
                    kernel(term)
                    earlier = whole[sink.leaf]
                    whole[sink.leaf] = term if earlier is None else earlier + term
            self._reduce(unit, whole)

    def leave(self, unit: GatheredUnit, grads: Sequence[Tensor | None]) -> None:
        """Backward of a unit is over: releases its buffers and starts to reduce its gradients."""
        unit.release()
        if self.deferred is not None:
            self.deferred.units.append((unit, grads))
        else:
            self._reduce(unit, grads)

    def _reduce(self, unit: GatheredUnit, grads: Sequence[Tensor | None]) -> None:
        if unit.plan.reductions:
            self._note("reduces", unit)
        for b in unit.plan.reductions:
            if not (b.early.is_empty and b.late.is_empty):
                self.counts.reductions.append(self.name_of([unit.index[i] for i in b.leaves]))
        self.reducer.reduce(unit, grads)

    # ---------------------------------------------------------------------------------------------------------- the end
    def finish(self) -> dict[int, Tensor]:
        """Wait for all reductions, close, and return the local gradients by number of the leaf, but for frozen ones."""
        result = self.reducer.finish()
        self.counts.peak_units, self.counts.peak_bytes = self._pool.peak_owners, self._pool.peak_bytes
        record(self.counts)
        self.close()
        return result

    def close(self, *, failed: bool = False) -> None:
        """Breaks the references between context, units and buffers, so that nothing is alive after the call."""
        for unit in [*self._units, *self._prefetched.values()]:
            unit.release(failed=failed)
        self._units.clear()
        self._prefetched.clear()
        self.saved.close()
        self._index.clear()
        self._current = self.deferred = None
        self._streams.wait_all()
        self.reducer.close()
        if self._owns_pool:
            self._pool.close()


def _leaves_of(paths: Mapping[int, str], index: Sequence[LeafIndex]) -> str:
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
    """The node of a leaf with a sink, which takes the gradient when it is complete, before backward leaves the unit."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, sink: _Sink) -> Tensor:
        ctx.sink = sink
        if sink.has_slot or sink.context.defers:
            # Kernels of `ops` look for this attribute, and write their term of the gradient where it is sent from.
            ctx.put_term = sink.put_term
        ctx.set_materialize_grads(False)
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        taken = grads[0] is not None and ctx.sink.take(grads[0])
        return None if taken else grads[0], None


_context: ContextVar[GatherContext | None] = ContextVar("fsharding_gather_context", default=None)


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
