"""The runtime of one `value_and_grad` call: gather units ahead of their use, release them, reduce their gradients.

The order, for three units, a policy that frees gathered weights and a prefetch depth of 1; `>` starts a collective,
which overlaps with the computation after it, and `wait` ends one:

    forward    >gather 0, wait 0, >gather 1, compute 0
               release 0, wait 1, >gather 2, compute 1
               release 1, wait 2,            compute 2                   (2 is not released: backward begins with it)
    backward   >gather 1, compute 2; release 2, >reduce 2
               wait 1, >gather 0, compute 1; release 1, wait reduce 2, >reduce 1
               wait 0,            compute 0; release 0, wait reduce 1, >reduce 0
    finish     wait reduce 0; add accumulated gradients of leaves that backward gave none; close

Autograd drives backward: `_GatherUnit` is the node of a unit in the graph, and its backward is `>reduce`. If the bucket
of a large leaf has a slot that kernels can write, its gradient is there as soon as it is complete, and has no memory of
its own while the rest of the unit's backward runs. If autograd saves a view of a gathered buffer, its place replaces
it; the first one that backward unpacks gathers the unit again. A product with a weight of `Precision.columnwise` saves
no view: its backward uses `unit.columns`, a second gather of that weight in blocks along its other dim, which is
prefetched and released with the unit.

Unless the policy keeps gathered weights, at most `depth + 1` units are alive at once. None is after the call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import Function

from fsharding.base import _compat, _functorch
from fsharding.base.errors import ConfigError, TransformError, listed, message, report
from fsharding.base.public import kind_of
from fsharding.base.scoped import scoped
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.counters import Counts, record
from fsharding.comm.host_memory import OnHost
from fsharding.comm.leaf_memory import device_of, is_aligned, read_ahead
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
from fsharding.transforms.unit_plan import LargeLeaf, UnitLeaf, UnitPlan, plan_unit

__all__ = [
    "GatherContext", "check_depth", "current_context", "evaluating", "is_evaluating", "prefetch_depth",
    "without_context",
]  # fmt: skip

Kernel: TypeAlias = Callable[[Tensor], object]
"""Function that fills a tensor, whose values it doesn't read."""


@dataclass(frozen=True, eq=False)
class _Sink:
    """Destination of a leaf's gradient before backward leaves its unit: for large leaves, and for deferred products."""

    context: GatherContext
    unit: GatheredUnit
    leaf: int  # its number in the unit
    shape: torch.Size
    large: LargeLeaf | None  # None if the bucket has no slot that kernels may write a partial gradient into

    def put_term(self, dtype: torch.dtype, kernel: Kernel) -> bool:
        """Have a kernel write a partial gradient now, or defer it to `run_deferred`; see `ops.grad_sink`."""
        if _context.get() is self.context:  # still in forward: the loss function itself calls torch.autograd.grad
            return False
        if self.context.deferred is None:
            return self.write(dtype, kernel)
        self.context.deferred.terms.setdefault(self.unit.order, []).append((self, dtype, kernel))
        return True

    def write(self, dtype: torch.dtype, kernel: Kernel) -> bool:
        """Have a kernel write a partial gradient into the bucket; return False if it has no slot."""
        return self.large is not None and self.context.reducer.write(self.unit, self.large, dtype, kernel)

    def take(self, grad: Tensor) -> bool:
        """Copy the gradient of a large leaf into its bucket; return False if that has no slot."""
        if self.large is None:
            return False
        self.context.reducer.take(self.unit, self.large, grad)
        return True


class _Deferred(NamedTuple):
    """Units that a `deferring` backward left, with their gradients so far; deferred products by order of the unit."""

    units: list[tuple[GatheredUnit, Sequence[Tensor | None]]]
    terms: dict[int, list[tuple[_Sink, torch.dtype, Kernel]]]


class GatherContext:
    """The runtime of one call; `value_and_grad` makes it, and `gather_unit` finds it by `current_context`."""

    # A unit is in `_prefetched` (started for a later `gather`), then in `_units` (used by forward, in that order:
    # `unit.order` is the position). `_current` is the last of `_units`, until forward releases it. Backward goes
    # through `_units` from the end, and is done with those from position `_reached` on (None before backward).
    # `deferred` is set by a `deferring` backward, until `run_deferred`.

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
        # Not in `leaves`: notes of the order of collectives have the paths, and outlive the call.
        self.paths = {i: leaf.path for i, leaf in leaves.items()}
        self._targets = {i: leaf.target for i, leaf in leaves.items()}
        self.compute_dtype = precision.compute_dtype  # maps a stored dtype to the one that the loss function sees
        self._wires = wires
        self.depth = options.prefetch_depth
        tiers = {tier_of(node.value, node.sharding.device_type) for node in nodes} - {DEVICE}
        # Number of units to gather or read ahead: one more than `depth` if leaves are on disk, whose reads take long.
        self.horizon = self.depth + (self.depth > 0 and any(tier.can_fail for tier in tiers))
        # The dtype to which the precision casts all leaves; None if leaves keep their dtypes.
        self.cast = precision.activation_dtype or precision.params
        self.counts = Counts()
        self.defers = options.defers
        self._between = options.between
        # An input of every unit's node, so that backward reaches the node: leaves aren't inputs.
        self.anchor = torch.zeros((), requires_grad=True)
        self._pool = pool or Pool()
        self._owns_pool = pool is None
        devices = (device_of(node.value, node.sharding.device_type) for node in nodes)
        self._device = next(devices, torch.device("cpu"))
        memory = self._pool.memory(self._device)
        # It doesn't refer to the context, which would make a cycle, alive until the collector runs.
        self.reducer = GradReducer(leaves, memory, grad_pool)
        self._streams = streams_for(self._device)
        if self._streams.several:
            # Both side streams begin after the compute stream, so that in a captured step they are part of the graph.
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
        self._plans: dict[tuple[Any, ...], UnitPlan] = {}
        values = [node.value for node in nodes]
        # On a CPU, offloaded activations stay where they are: device memory is host memory.
        on_host = None if self._device.type == "cpu" else functools.partial(OnHost, self._device, values)
        self.saved = SavedTensors(self.bring, on_host)
        for i, leaf in leaves.items():
            self.register(leaf.node.value, LeafIndex(i, None))

    # --------------------------------------------------------------------------------------- leaves and their names
    def register(self, value: Tensor, index: LeafIndex) -> None:
        """Note that a tensor is a shard of the parameter tree, or a row of one."""
        self._index[id(value)] = (value, index)  # with the tensor, so that its id isn't reused

    def index_of(self, value: Tensor) -> LeafIndex | None:
        """Return the index of a shard in the parameter tree; None for other tensors."""
        known = self._index.get(id(value))
        return None if known is None else known[1]

    def indices_of(self, nodes: Iterable[Local]) -> tuple[LeafIndex, ...] | None:
        """Return the leaves of a unit in the parameter tree; None if one of them isn't a shard of the tree."""
        indices = tuple(self.index_of(node.value) for node in nodes)
        return None if None in indices else cast("tuple[LeafIndex, ...]", indices)

    def grad_sharding(self, value: Tensor) -> NamedSharding | None:
        """Return the sharding of a parameter's gradient; None for other tensors and frozen leaves."""
        index = self.index_of(value)
        target = self._targets[index.leaf] if index is not None and index.row is None else None
        return None if target is None else target.sharding

    def name_of(self, index: Sequence[LeafIndex]) -> str:
        """Name a unit by the path of its first leaf, with the row of a stack."""
        leaf, row = index[0]
        path = self.paths[leaf].rpartition(".")[0] or self.paths[leaf]
        return path if row is None else f"{path}[{row}]"

    def path_of(self, index: LeafIndex) -> str:
        """Name a leaf of the parameters in an error."""
        return f"params.{self.paths[index.leaf]}{'' if index.row is None else f'[{index.row}]'}"

    def gathered_leaves(self) -> list[str]:
        """List the leaves of all gathered units with their types, the last unit first, for an error."""
        return [
            f"{self.path_of(index)} is {typeof(leaf)}"
            for unit in reversed(self._units)
            for index, leaf in zip(unit.index, unit.leaves, strict=True)
        ]

    def row_of_stack(self) -> str:
        """Return the path of the last gathered row of a stack, such as "params.w[1]"; "" if there is none."""
        rows = (index for unit in reversed(self._units) for index in unit.index if index.row is not None)
        return next(map(self.path_of, rows), "")

    # --------------------------------------------------------------------------------------------------------- forward
    def gather(
        self, leaves: Sequence[Local], index: tuple[LeafIndex, ...], dtype: torch.dtype | None, policy: Policy
    ) -> list[WholeLeaf]:
        """Gather a unit as a node of the autograd graph, release the one before it, and return the full leaves."""
        # A leaf passes the node of its unit, and one with a sink if its gradient is large or deferred. A quantized
        # leaf isn't a tensor: a stand-in passes, and carries the gradient.
        unit = None if dtype else self._prefetched.pop(index, None)  # prefetched in the compute dtype
        unit = unit or self._make_unit(leaves, index, dtype)
        full = self._use(unit, policy)
        nodes = list(cast(Sequence[Tensor], _GatherUnit.apply(self.anchor, self, unit, full)))
        # Without slots a gradient stays where autograd has put it until its unit is left: a bucket has memory for all
        # gradients of the unit, which would then be there before most of them are.
        large = {x.leaf: x for x in unit.plan.large if unit.plan.reductions[x.bucket].early.has_slots(nodes[x.leaf])}
        for i in (i for b in unit.plan.reductions for i in b.leaves) if self.defers else large:
            nodes[i] = self._watched(unit, i, nodes[i], large.get(i))
        again = unit.plan.again[0] if unit.plan.again is not None else ()
        second = {i: functools.partial(self._columns, unit, number) for number, i in enumerate(again)}
        seen = [
            node if isinstance(x, Tensor) else x.carried_by(node, second.get(i))
            for i, (x, node) in enumerate(zip(full, nodes, strict=True))
        ]
        for i, of_node in unit.plan.seen:
            seen[i] = of_node(nodes[i])
        return seen

    def _columns(self, unit: GatheredUnit, leaf: int) -> Callable[[], Any]:
        """See `Columnwise`; `leaf` counts the leaves of `unit.columns`."""
        columns = unit.columns
        assert columns is not None
        columns.saved_views += 1

        def gathered() -> Any:
            self.bring(unit, columns)
            return columns.full[leaf]

        return gathered

    def _watched(self, unit: GatheredUnit, leaf: int, full: Tensor, large: LargeLeaf | None) -> Tensor:
        """Pass a leaf through a node that has a sink for its gradient."""
        result = cast(Tensor, _LeafGrad.apply(full, _Sink(self, unit, leaf, full.shape, large)))
        if large is not None and result.grad_fn is not None:
            _compat.visit_first(result.grad_fn)  # before other ready nodes, so that the gradient is freed early
        return result

    def prefetch(self, units: Iterable[Sequence[Local]]) -> None:
        """Start to gather the units of later `gather` calls, up to the depth; read the one after them from disk."""
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
        # All rows of a stack have one plan, but for those that a precision keeps.
        kind = dtype, tuple((i.leaf, i.row is None, self._wires.is_kept(i)) for i in index)
        if kind not in self._plans:
            described = (self._described(leaf, place, dtype) for leaf, place in zip(leaves, index, strict=True))
            self._plans[kind] = plan_unit(tuple(described))
        site = None if order_here() is None else call_stacks.site_here()

        def gathered(chosen: Sequence[int], plan: UnitPlan) -> GatheredUnit:
            shards = [leaves[i] for i in chosen]
            places = tuple(index[i] for i in chosen)
            # The owner is a fresh object. If it were the unit, which holds the memory, the cycle would keep both alive
            # until the garbage collector runs.
            memory = self._pool.memory(self._device, owner=object())
            return GatheredUnit(
                plan, shards, places, memory, name=self.name_of(places), starts=self._note_gathers, wires=self._wires,
                site=site,
            )  # fmt: skip

        unit = gathered(range(len(leaves)), self._plans[kind])
        if unit.plan.again is not None:
            unit.columns = gathered(*unit.plan.again)
        return unit

    def _described(self, leaf: Local, place: LeafIndex, dtype: torch.dtype | None) -> UnitLeaf:
        """Describe how a leaf of a unit is gathered, and its gradient reduced."""
        stored = leaf.value.dtype
        compute = dtype if dtype and stored.is_floating_point else self.compute_dtype(stored)
        target = self._targets[place.leaf]
        if target is not None and place.row is not None:
            target = target.row
        slices = [leaf.shape] if target is None else target.slices(leaf.shape)
        # All ranks must plan alike, so a row counts as aligned only if it is on every rank. A frozen leaf has no target
        # that describes the slices of other ranks; pipeline stages slice stacks by rows only, which keeps alignment.
        known = target is not None or {*leaf.slices} <= {"pp"}
        aligned = known and all(is_aligned(leaf.sharding, shape, stored.itemsize) for shape in slices)
        misaligned = place.row is not None and not aligned
        away = tier_of(leaf.value, self._device.type) is not DEVICE
        sent = self._wires.gather(place, leaf.shape, compute)
        return UnitLeaf(leaf.sharding, leaf.shape, stored, sent, target, copied=misaligned or away)

    def _note_gathers(self, unit: GatheredUnit, gathers: int) -> None:
        """Note that the all-gathers of a unit start now, and count those that send something."""
        self._note("gathers", unit)
        self.counts.gathers += [unit.name] * gathers

    def _note(self, kind: str, unit: GatheredUnit) -> None:
        """Note that collectives of a unit start now: ranks compare the order of these notes."""
        order = order_here()
        if order is not None:
            name = functools.partial(_leaves_of, self.paths, unit.index)
            order.note(kind, (unit.index, unit.plan.outline), name, unit.site)

    @torch.no_grad()
    def _use(self, unit: GatheredUnit, policy: Policy) -> list[WholeLeaf]:
        """Release the unit before this one, wait for this one, and return its full leaves."""
        if self._current is not None:
            self._current.release()  # before the wait, which may start this unit's gathers in the freed buffers
        self.saved.forget_freed()
        self.saved.enter(offloads=policy.offloads)
        self._between.forward()
        self._current, unit.kept, unit.order = unit, policy.gathered, len(self._units)
        self._units.append(unit)
        full: list[WholeLeaf] = [leaf.value for leaf in unit.leaves]
        for i, dtype in unit.plan.aliases:
            # A view, so that autograd refuses in-place writes to the state's tensor.
            value = unit.leaves[i].value
            full[i] = value.view_as(value).to(dtype)
        for i, leaf in self._wait(unit).items():
            full[i] = leaf
        return full

    def _wait(self, unit: GatheredUnit) -> dict[int, WholeLeaf]:
        """Wait for a unit, and watch for views of it that autograd saves."""
        full = unit.wait()
        self.saved.watch(unit)
        return full

    @contextmanager
    def active(self) -> Generator[None]:
        """Inside the block, `gather_unit` finds this context, and autograd saves places in buffers, not leaves."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self.saved.pack, self.saved.unpack)
        with scoped(_context, self), hooks, self._wires.noting(self.saved.note_values):
            yield

    def end_forward(self) -> None:
        """Release the last unit, and prefetched ones, between a forward and a backward that comes later."""
        for unit in (self._current, *self._prefetched.values()):
            if unit is not None:
                unit.release()
        self._current = None
        self._prefetched.clear()
        self.saved.end_forward()

    # ------------------------------------------------------------------------------------------------------- backward
    def bring(self, unit: GatheredUnit, columns: GatheredUnit | None = None) -> None:
        """Make a unit, or its columns, alive for backward, and start the units before it."""
        first = not unit.in_backward
        if first:
            unit.in_backward = True
            # Backward has passed the later units. `leave` has released those that it left; a unit without trained
            # leaves, or one whose gradients were not needed, has no such call and is released here.
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
        """Start to gather the units that backward needs after the one at `order`, up to the depth."""
        before = itertools.islice((u for u in reversed(self._units[:order]) if u.again), self.horizon)
        # A gather follows the last reduction on the same communicator, so it loses no time if it waits for the memory
        # of that one: the weights that are ahead and the terms that are sent take the bytes of one unit together.
        with self._pool.lending(self.reducer.spare()):
            for number, earlier in enumerate(before):
                # Backward ends at the first unit with trained leaves: frozen units before it are not needed again.
                if not any(u.plan.reductions for u in self._units[: earlier.order + 1]):
                    continue
                if number < self.depth:
                    earlier.start_again()
                else:
                    earlier.read_ahead()

    def prefetch_backward(self) -> None:
        """Start to gather the unit that backward needs first, unless the depth is 0."""
        last = next((unit for unit in reversed(self._units) if unit.again), None)
        if last is not None and self.depth:
            last.start_again()

    @contextmanager
    def deferring(self) -> Generator[None]:
        """Let a backward inside defer products that give weight gradients to `run_deferred`, and reduce nothing."""
        assert self.defers and self.deferred is None, "a context defers once"
        self.deferred = _Deferred([], {})
        try:
            yield
        finally:
            for unit in self._units:
                unit.release()

    @torch.no_grad()
    def run_deferred(self) -> None:
        """Compute the products that a `deferring` backward left, and reduce gradients in the order of that backward."""
        assert self.deferred is not None
        (units, terms), self.deferred = self.deferred, None
        for unit, grads in units:
            sums = list(grads)
            for sink, dtype, kernel in terms.pop(unit.order, ()):
                if not sink.write(dtype, kernel):
                    term = torch.empty(sink.shape, dtype=dtype, device=self._device)
                    kernel(term)
                    earlier = sums[sink.leaf]
                    sums[sink.leaf] = term if earlier is None else earlier + term
            self._reduce(unit, sums)

    def leave(self, unit: GatheredUnit, grads: Sequence[Tensor | None]) -> None:
        """Release the buffers of a unit whose backward is over, and start to reduce its gradients."""
        unit.release()
        if self.deferred is not None:
            self.deferred.units.append((unit, grads))
        else:
            self._reduce(unit, grads)
        self._between.backward()

    def _reduce(self, unit: GatheredUnit, grads: Sequence[Tensor | None]) -> None:
        if unit.plan.reductions:
            self._note("reduces", unit)
        for b in unit.plan.reductions:
            if not (b.early.is_empty and b.late.is_empty):
                self.counts.reductions.append(self.name_of([unit.index[i] for i in b.leaves]))
        self.reducer.reduce(unit, grads)

    # ---------------------------------------------------------------------------------------------------------- the end
    def finish(self) -> dict[int, Tensor]:
        """Wait for all reductions, close, and return the local gradients by number of the leaf, without frozen ones."""
        result = self.reducer.finish()
        self.counts.peak_units, self.counts.peak_bytes = self._pool.peak_owners, self._pool.peak_bytes
        record(self.counts)
        self.close()
        return result

    def close(self, *, failed: bool = False) -> None:
        """Break the references between context, units and buffers, so that nothing is alive after the call."""
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
    """Name a unit by its leaves, such as `blocks[3] (w, b)`."""
    named = [(paths[leaf], "" if row is None else f"[{row}]") for leaf, row in index]
    folders = {(path.rpartition(".")[0], row) for path, row in named}
    if len(named) == 1 or len(folders) > 1:
        return listed(f"{path}{row}" for path, row in named)
    folder, row = folders.pop()
    inside = listed(path.rpartition(".")[2] for path, _ in named)
    return f"{folder}{row} ({inside})" if folder else f"{inside}{row}"


class _GatherUnit(Function):
    """The node of a unit in the graph: its forward passes the full leaves on, its backward reduces their gradients."""

    # Shards aren't inputs: their gradients go to the reducer. The anchor brings backward here.

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
    """The node of a leaf with a sink, which takes the complete gradient before backward leaves the unit."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, sink: _Sink) -> Tensor:
        ctx.sink = sink
        # Kernels of `ops` look for this attribute, and write their partial gradient right into the send buffer.
        ctx.put_term = sink.put_term
        ctx.set_materialize_grads(False)
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        taken = grads[0] is not None and ctx.sink.take(grads[0])
        return None if taken else grads[0], None


_context: ContextVar[GatherContext | None] = ContextVar("fsharding_gather_context", default=None)


def without_context() -> AbstractContextManager[None]:
    """Hide the context from a function that may run again after it is closed."""
    return scoped(_context, None)


def current_context() -> GatherContext | None:
    """Return the context of the innermost `value_and_grad` in its forward; None outside, and under torch.func."""
    context = _context.get()
    if context is not None and _functorch.linearizing():
        rule = "cannot run inside fs.value_and_grad: torch treats its linear map as a constant there."
        mend = "Use torch.func.jvp, or torch.func.linearize inside fs.shard_map."
        raise TransformError(report(f"torch.func.linearize {rule}", mend=mend))
    return None if _functorch.in_functorch() else context


def prefetch_depth() -> int:
    """Return the number of units that the innermost `value_and_grad` gathers or reads ahead; 0 without a context."""
    context = current_context()
    return 0 if context is None else context.horizon


_evaluating: ContextVar[bool] = ContextVar("fsharding_evaluating", default=False)


@contextmanager
def evaluating() -> Generator[None]:
    """Run functionalized modules in eval mode inside the `with` block, under torch.func transforms too."""
    # Not in inference mode: train steps reuse what a call caches, such as buffers and constants of modules.
    with torch.inference_mode(False), scoped(_evaluating, True):
        yield


def is_evaluating() -> bool:
    """Return whether this is inside `evaluating`."""
    return _evaluating.get()


def check_depth(prefetch_depth: Any) -> None:
    """Refuse a number of units to gather ahead that isn't an integer from 0."""
    if not isinstance(prefetch_depth, int) or isinstance(prefetch_depth, bool) or prefetch_depth < 0:
        mend = "Pass the number of units to gather ahead: 1, or 0 for none. The units go to fs.gather_unit(next_unit=)."
        raise ConfigError(message(f"got prefetch_depth={kind_of(prefetch_depth)}.", mend=mend))
