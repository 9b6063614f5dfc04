"""The ledger of one `value_and_grad` call: which units are gathered, which are gathered again, where gradients go.

In: the local leaves of a state and the goals of their gradients. Out: whole weights for a unit, gradients, counts.
A tensor saved for backward that views a gathered buffer becomes (unit, offset, size, stride) and is gathered again.
Laws: at most two units are alive at once, none after the step; every gather and reduction is counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from fsharding import _compat, _functorch
from fsharding.counts import Counts, record
from fsharding.gathering import Unit
from fsharding.mesh import coordinate
from fsharding.ops import transition
from fsharding.ops.pool import Pool
from fsharding.ops.unit import Goal, LeafPlan, Place, Reducing, plan_unit
from fsharding.policies import Policy
from fsharding.sharding import Local

__all__ = ["Ledger", "current_ledger", "opened", "without_ledger"]

_ALIGN = 64
"""Bytes at whose multiples fresh tensors begin."""

_LARGE = 1 << 18
"""Elements of a gradient from which on its memory is worth keeping."""


class _Saved(NamedTuple):
    """What a saved view of a gathered buffer is replaced by."""

    unit: Unit
    gather: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Ledger:
    """See the module. Opened by `value_and_grad`, found by `gather_unit`, closed after backward."""

    def __init__(
        self,
        leaves: Sequence[Local | None],
        paths: Sequence[str],
        goals: Sequence[Goal | None],
        compute: Callable[[torch.dtype], torch.dtype],
        held: Sequence[Tensor | None],
        pool: Pool | None = None,
        memory: Pool | None = None,
    ) -> None:
        """Opens a ledger over the leaves of the differentiated tree.

        Args:
            leaves: in order; None for a leaf that is no DTensor.
            paths: their names.
            goals: where each gradient goes; None where there is none.
            compute: the dtype in which the loss function sees a leaf.
            held: gradients of earlier microbatches, which are added to in place; None where there are none.
            pool: of buffers, for ledgers that share one; whoever gave it closes it.
            memory: for large gradients that data axes do not cut, used again from ledger to ledger.
        """
        self.leaves, self.paths, self.goals, self.compute, self.held = leaves, paths, goals, compute, held
        self._row_goals = [
            goal.row() if goal is not None and leaf is not None and leaf.shape else None
            for goal, leaf in zip(goals, leaves, strict=True)
        ]
        self.counts = Counts()
        self.anchor = torch.zeros((), requires_grad=True)
        self.out: list[Tensor | None] = [
            h if h is not None and goal is not None and goal.held == goal.target else None
            for h, goal in zip(held, goals, strict=True)
        ]
        self._pool, self._owns_pool, self._memory = pool or Pool(), pool is None, memory
        self._device = next((leaf.value.device for leaf in leaves if leaf is not None), torch.device("cpu"))
        self._units: list[Unit] = []
        self._back: int | None = None
        self._places: dict[int, tuple[Tensor, Place]] = {}
        self._ahead: dict[tuple[Place, ...], Unit] = {}
        self._watched: dict[int, tuple[Unit, int]] = {}
        self._current: Unit | None = None
        self._returning: list[Callable[[], None]] = []
        self._written: dict[int, set[int | None]] = {}
        self._taken: dict[int, set[int | None]] = {}
        self._begun = {i for i, out in enumerate(self.out) if out is not None}
        for i, leaf in enumerate(leaves):
            if leaf is not None:
                self.register(leaf.value, Place(i, None))

    def register(self, value: Tensor, place: Place) -> None:
        """Notes that a tensor is a leaf of the state, or one row of a stacked leaf."""
        self._places[id(value)] = (value, place)

    def place_of(self, value: Tensor) -> Place | None:
        """Where a tensor stands in the state; None for one that is not the state's own."""
        known = self._places.get(id(value))
        return known[1] if known is not None and known[0] is value else None

    def name_of(self, places: Sequence[Place]) -> str:
        """A readable name for a unit: the path of its first leaf, with the row of a stack."""
        leaf, row = places[0]
        path = self.paths[leaf].rpartition(".")[0] or self.paths[leaf]
        return path if row is None else f"{path}[{row}]"

    def take(self, size: int, dtype: torch.dtype, owner: Unit | None = None) -> Tensor:
        """A flat buffer from the pool."""
        buffer = self._pool.take(size, dtype, self._device, owner)
        self._watched.pop(_compat.storage_id(buffer), None)
        return buffer

    def lend(self, memory: object, nbytes: int, owner: Unit) -> None:
        """Counts a buffer that is not the pool's own, as long as its memory lives."""
        self._pool.lend(memory, nbytes, owner)

    def watch(self, flat: Tensor, unit: Unit, number: int, memory: object | None = None) -> None:
        """Notes that views of a buffer are weights of a unit, as long as its memory lives, if not the pool has it."""
        self._watched[_compat.storage_id(flat)] = (unit, number)
        if memory is not None:
            finalize(memory, self._watched.pop, _compat.storage_id(flat), None)

    def unit(self, leaves: Sequence[Local], places: tuple[Place, ...], dtype: torch.dtype | None) -> Unit:
        """The unit of some leaves: the one that was started ahead, or a new one."""
        ahead = self._ahead.pop(places, None)
        if ahead is not None:
            return ahead
        plans: list[LeafPlan] = []
        for leaf, place in zip(leaves, places, strict=True):
            rest = leaf.value.dtype
            compute = dtype if dtype and rest.is_floating_point else self.compute(rest)
            goals = self.goals if place.row is None else self._row_goals
            misaligned = place.row is not None and leaf.value.nbytes % _ALIGN != 0
            plans.append(LeafPlan(leaf.sharding, leaf.shape, rest, compute, goals[place.leaf], misaligned))
        return Unit(self, plan_unit(tuple(plans)), leaves, places)

    def start_ahead(self, unit: Unit) -> None:
        """Starts the gather of a unit that will be asked for next."""
        self._ahead[unit.places] = unit
        unit.start()

    def enter(self, unit: Unit, policy: Policy) -> list[Tensor]:
        """Makes a unit the current one and returns its whole leaves; the one before it is let go."""
        if self._current is not None:
            self._current.release()
        self._current, unit.kept, unit.order = unit, policy.gathered, len(self._units)
        self._units.append(unit)
        wholes = [leaf.value for leaf in unit.leaves]
        for i, dtype in unit.plan.aliases:
            wholes[i] = wholes[i].detach().to(dtype)
        for g, gathered in zip(unit.plan.gathers, unit.wait(), strict=True):
            for i, leaf in zip(g.leaves, gathered, strict=True):
                wholes[i] = leaf
        return wholes

    def pack(self, x: Tensor) -> Tensor | _Saved:
        """Saved-tensors hook: a view of a gathered buffer becomes a note."""
        known = self._watched.get(_compat.storage_id(x))
        if known is None or known[0].kept:
            # A node that keeps its own result with its history keeps itself: only a backward through it would free it.
            return x if x.grad_fn is None else x.detach()
        unit, number = known
        unit.saved += 1
        return _Saved(unit, number, x.dtype, int(x.storage_offset()), x.size(), x.stride())

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        """Saved-tensors hook: a note becomes a view of the unit, gathered again if need be."""
        if isinstance(saved, Tensor):
            return saved
        flats = self._revive(saved.unit)
        return flats[saved.gather].view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def _revive(self, unit: Unit) -> list[Tensor]:
        if not unit.returned:
            unit.returned = True
            for later in self._units[unit.order + 1 : self._back]:
                if not later.returned or not later.plan.reductions:
                    later.abandon()
            self._back = unit.order + 1
            if unit.flats is None:
                unit.wait()
            earlier = next((u for u in reversed(self._units[: unit.order]) if u.saved), None)
            # Backward goes no further than the first unit that has gradients.
            if earlier is not None and any(u.plan.reductions for u in self._units[: earlier.order + 1]):
                earlier.start()
        elif unit.flats is None:
            unit.wait()
        assert unit.flats is not None
        return unit.flats

    def start_back(self) -> None:
        """Starts to gather again the unit that backward will ask for first."""
        last = next((unit for unit in reversed(self._units) if unit.saved), None)
        if last is not None:
            last.start()

    def rest(self) -> None:
        """Forward is over, and backward comes later: lets the last unit go, and what was started ahead."""
        for unit in (self._current, *self._ahead.values()):
            if unit is not None:
                unit.abandon()
        self._current = None
        self._ahead.clear()

    def rewind(self) -> None:
        """There will be another backward of the same graph: lets go what this one has gathered."""
        for unit in self._units:
            unit.abandon()
            unit.returned = False
        self._back = None

    def leave(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        """Backward of a unit is over: drops its buffers and starts to reduce its gradients."""
        unit.release()
        self.settle()
        with _compat.region("scatter"):
            for plan in unit.plan.reductions:
                self._returning.append(self._reduce(unit, plan, [grads[i] for i in plan.leaves]))

    def settle(self) -> None:
        """Finishes the reductions under way."""
        with _compat.region("scatter"):
            for finish in self._returning:
                finish()
        self._returning.clear()

    def _reduce(self, unit: Unit, plan: Reducing, grads: list[Tensor | None]) -> Callable[[], None]:
        places = [unit.places[i] for i in plan.leaves]
        if plan.before[0] or plan.after[0]:
            self.counts.reductions.append(self.name_of(places))
        begin = functools.partial(
            transition.start, mesh=unit.plan.mesh, dtype=plan.dtype, device=self._device, empty=self.take
        )
        first = begin(grads, plan.before, plan.shapes, wire_dtype=plan.wire_dtype, wholes=plan.wholes_before)
        if not plan.after[0]:
            return lambda: self._land(places, first)

        def second() -> transition.Transit:
            terms = self._add_to_held(places, first.finish())
            shapes = [tuple(x.shape) for x in terms]
            return begin(terms, plan.after, shapes, wire_dtype=plan.held_wire_dtype, wholes=plan.wholes_after)

        if plan.before[0]:
            return lambda: self._land(places, second())
        under_way = second()
        return lambda: self._land(places, under_way)

    def _add_to_held(self, places: Sequence[Place], terms: list[Tensor]) -> list[Tensor]:
        """Adds terms to what is held for their places; a leaf that comes more than once takes it along once."""
        result = list(terms)
        sums: list[int] = []
        for i, place in enumerate(places):
            held, taken = self.held[place.leaf], self._taken.setdefault(place.leaf, set())
            if held is None or None in taken or place.row in taken:
                continue
            if place.row is None and taken:
                rest = [row for row in range(held.shape[0]) if row not in taken]
                result[i] = terms[i].clone()
                result[i][rest] += held[rest]
            else:
                result[i] = held if place.row is None else held[place.row]
                sums.append(i)
            taken.add(place.row)
        if sums:
            _compat.foreach_add_([result[i] for i in sums], [terms[i] for i in sums])
        return result

    def _land(self, places: Sequence[Place], transit: transition.Transit) -> None:
        """Adds reduced gradients to what is at their place; where nothing can be there they are summed into it."""
        begun: list[bool] = []
        for place in places:
            rows = self._written.setdefault(place.leaf, set())
            if place.row is None and rows:
                self._complete(place.leaf)
            begun.append(place.leaf in self._begun or None in rows or place.row in rows)
            rows.add(place.row)
        targets = [self._target(place) for place in places]
        terms = transit.finish(None if any(begun) else targets)
        pairs = list(zip(begun, targets, terms, strict=True))
        copies = [(to, term) for added, to, term in pairs if not added and term is not to]
        _compat.foreach_copy_([to for to, _ in copies], [term for _, term in copies])
        _compat.foreach_add_([to for added, to, _ in pairs if added], [term for added, _, term in pairs if added])

    def _complete(self, i: int) -> Tensor:
        """The gradient of a leaf, with zeros wherever nothing was written."""
        out, rows = self._target(Place(i, None)), self._written.setdefault(i, set())
        if i not in self._begun and None not in rows:
            blank = [out[row] for row in range(out.shape[0]) if row not in rows] if rows else [out]
            _compat.foreach_zero_(blank)
            rows.add(None)
        return out

    def _target(self, place: Place) -> Tensor:
        """Where a gradient goes; what it holds before the first one is garbage."""
        out = self.out[place.leaf]
        if out is None:
            leaf, goal = self.leaves[place.leaf], self.goals[place.leaf]
            assert leaf is not None and goal is not None
            shape = goal.target.local_shape(leaf.shape)
            cut = any(axis in goal.target.data_axes for axis in goal.target.spec.all_axes)
            if self._memory is None or cut or math.prod(shape) < _LARGE:
                out = _compat.fresh(shape, goal.dtype, self._device)
            else:
                out = self._memory.take(math.prod(shape), goal.dtype, self._device).view(shape)
            self.out[place.leaf] = out
        return out if place.row is None else out[place.row]

    def finish(self) -> list[Tensor | None]:
        """Settles everything, carries over what is held for leaves that this call did not touch, and closes.

        Returns:
            The local gradient of each leaf, zeros where the loss does not depend on it, None where there is no goal.
        """
        self.settle()
        for i, (leaf, goal) in enumerate(zip(self.leaves, self.goals, strict=True)):
            if leaf is not None and goal is not None:
                self._carry_over(i, leaf, goal)
        self.counts.peak_units, self.counts.peak_bytes = self._pool.peak_owners, self._pool.peak_bytes
        record(self.counts)
        result = list(self.out)
        self.close()
        return result

    def _carry_over(self, i: int, leaf: Local, goal: Goal) -> None:
        out, held, taken = self._complete(i), self.held[i], self._taken.get(i, set())
        if held is None or goal.held is None or goal.held == goal.target or None in taken:
            return
        for row in (row for row in range(held.shape[0]) if row not in taken) if taken else (None,):
            source, target, shape = goal.held, goal.target, leaf.shape
            if row is not None:
                source, target, shape = source.drop(0), target.drop(0), shape[1:]
            steps = transition.plan_steps(source, target)
            wholes = [transition.whole_sizes(source, steps, shape)]
            part = held if row is None else held[row]
            moved = transition.move([part], [steps], leaf.sharding.mesh, wholes)[0]
            (out if row is None else out[row]).add_(moved)

    def add_reduced(self, i: int, grad: Tensor) -> None:
        """Adds a gradient that came through plain autograd, in the sharding of the leaf and summed over its ranks."""
        leaf, goal, out = self.leaves[i], self.goals[i], self._complete(i)
        assert leaf is not None and goal is not None
        source = leaf.sharding
        steps = transition.plan_steps(source, goal.target)
        wholes = [transition.whole_sizes(source, steps, leaf.shape)]
        where = coordinate(source.mesh)
        moved = transition.move([grad.to(goal.dtype)], [steps], source.mesh, wholes)[0]
        if all(where.get(axis, 0) == 0 for axis in goal.target.partial):
            out.add_(moved)

    def close(self, *, failed: bool = False) -> None:
        """Breaks the references between units and buffers, so that nothing is alive after the step."""
        for unit in [*self._units, *self._ahead.values()]:
            unit.abandon(failed=failed)
        self._units.clear()
        self._ahead.clear()
        self._watched.clear()
        self._places.clear()
        self._current = None
        if self._owns_pool:
            self._pool.close()


_ledger: ContextVar[Ledger | None] = ContextVar("fsharding_ledger", default=None)


@contextmanager
def opened(ledger: Ledger) -> Generator[None]:
    """Makes a ledger the one that `gather_unit` finds, and hooks it into what autograd saves."""
    token = _ledger.set(ledger)
    try:
        with torch.autograd.graph.saved_tensors_hooks(ledger.pack, ledger.unpack):
            yield
    finally:
        _ledger.reset(token)


@contextmanager
def without_ledger() -> Generator[None]:
    """Hides the ledger, from what may be computed again when it is no longer there."""
    token = _ledger.set(None)
    try:
        yield
    finally:
        _ledger.reset(token)


def current_ledger() -> Ledger | None:
    """The ledger of the innermost `value_and_grad` that is running its forward; None outside and under torch.func."""
    return None if _functorch.in_functorch() else _ledger.get()
