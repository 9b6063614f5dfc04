"""The ledger of one `value_and_grad` call: which units are gathered, which are gathered again, what became of them.

In: the local leaves of a state and the goals of their gradients. Out: whole weights for a unit, gradients, counts.
A tensor saved for backward that views a gathered buffer becomes (unit, offset, size, stride) and is gathered again.
Laws: at most two units are alive at once, none after the step; every gather and reduction is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from fsharding import _compat, _functorch
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.counters import Counts, record
from fsharding.sharding.named_sharding import Local, typeof
from fsharding.transforms.gathered_unit import Unit
from fsharding.transforms.grad_reducer import Landing
from fsharding.transforms.policies import Policy
from fsharding.transforms.unit_plan import Early, Goal, LeafPlan, Place, plan_unit

__all__ = ["Ledger", "current_ledger", "opened", "without_ledger"]

_ALIGN = 64
"""Bytes at whose multiples fresh tensors begin."""


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
        self.paths, self.goals, self.compute = paths, goals, compute
        self._row_goals = [
            goal.row() if goal is not None and leaf is not None and leaf.shape else None
            for goal, leaf in zip(goals, leaves, strict=True)
        ]
        self.counts = Counts()
        self.anchor = torch.zeros((), requires_grad=True)
        self._pool, self._owns_pool = pool or Pool(), pool is None
        self._device = next((leaf.value.device for leaf in leaves if leaf is not None), torch.device("cpu"))
        # Not self.take: what refers to itself is there until Python looks for such things.
        empty = functools.partial(self._pool.take, device=self._device)
        self.landing = Landing(leaves, goals, held, empty, self._device, memory)
        self._units: list[Unit] = []
        self._back: int | None = None
        self._places: dict[int, tuple[Tensor, Place]] = {}
        self._ahead: dict[tuple[Place, ...], Unit] = {}
        self._watched: dict[int, tuple[Unit, int]] = {}
        self._current: Unit | None = None
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

    def gathered(self) -> list[str]:
        """The leaves of all units that were gathered, with their types, the last unit first; for an error."""
        return [
            f"params.{self.paths[place.leaf]}{'' if place.row is None else f'[{place.row}]'} is {typeof(leaf)}"
            for unit in reversed(self._units)
            for place, leaf in zip(unit.places, unit.leaves, strict=True)
        ]

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
            # A view, so that autograd refuses to write where the state itself is.
            wholes[i] = wholes[i].view_as(wholes[i]).to(dtype)
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

    def put(self, unit: Unit, early: Early, grad: Tensor) -> None:
        """Takes the gradient of one large leaf, before the unit is left."""
        self.landing.put(unit, unit.plan, early, grad)

    def put_term(self, unit: Unit, early: Early, dtype: torch.dtype, write: Callable[[Tensor], object]) -> bool:
        """Has the gradient of one large leaf, or a term of it, written where it goes; or does not, and says so."""
        return self.landing.put_term(unit, unit.plan, early, dtype, write)

    def leave(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        """Backward of a unit is over: drops its buffers and starts to reduce its gradients."""
        unit.release()
        for plan in unit.plan.reductions:
            if plan.before[0] or plan.after[0]:
                self.counts.reductions.append(self.name_of([unit.places[i] for i in plan.leaves]))
        self.landing.reduce(unit, unit.plan, unit.places, grads)

    def finish(self) -> list[Tensor | None]:
        """Lets all gradients come down, and closes.

        Returns:
            The local gradient of each leaf, zeros where the loss does not depend on it, None where there is no goal.
        """
        result = self.landing.finish()
        self.counts.peak_units, self.counts.peak_bytes = self._pool.peak_owners, self._pool.peak_bytes
        record(self.counts)
        self.close()
        return result

    def close(self, *, failed: bool = False) -> None:
        """Breaks the references between units and buffers, so that nothing is alive after the step."""
        for unit in [*self._units, *self._ahead.values()]:
            unit.abandon(failed=failed)
        self._units.clear()
        self._ahead.clear()
        self._watched.clear()
        self._places.clear()
        self._current = None
        self.landing.close()
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
