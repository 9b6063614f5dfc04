"""Where the gradients of a call come down: reduced, added to what is held, each at the place of its leaf.

In: gradients of whole leaves as backward finds them, the large ones one by one. Out: local gradients, each in the
sharding of its goal. Large ones are copied to where they travel from as soon as they are complete, and let go.
Rows of a large stack lie apart until all have come: when the first one does, activations take the memory of the others.
Law: a leaf that comes more than once is summed, one that does not come is zero, and what is held counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsharding import _compat
from fsharding.comm import steps as transition
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.transport import Empty
from fsharding.mesh.device_mesh import coordinate
from fsharding.sharding.named_sharding import Local
from fsharding.transforms.unit_plan import Early, Goal, Place, Reducing, UnitPlan, own_memory_from

__all__ = ["Landing"]


class _UnderWay(NamedTuple):
    """A reduction: whether it has come, and what is left to do then."""

    come: Callable[[], bool]
    finish: Callable[[], None]


class _Home(NamedTuple):
    """A local gradient: where it is, if somebody keeps memory for it, and whether its rows come one by one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: Pool | None
    grows: bool


class Landing:
    """See the module.

    Args:
        leaves: of the differentiated tree, in order; None for a leaf that is no DTensor.
        goals: where each gradient goes; None where there is none.
        held: gradients of earlier microbatches, which are added to in place; None where there are none.
        empty: makes flat buffers for what travels.
        device: of the leaves.
        memory: for large gradients that data axes do not cut, used again from call to call.
    """

    def __init__(
        self,
        leaves: Sequence[Local | None],
        goals: Sequence[Goal | None],
        held: Sequence[Tensor | None],
        empty: Empty,
        device: torch.device,
        memory: Pool | None = None,
    ) -> None:
        """Nothing has come down."""
        self._leaves, self._goals, self._held, self._memory = leaves, goals, held, memory
        self._empty, self._device = empty, device
        self._out: list[Tensor | None] = [
            h if h is not None and goal is not None and goal.held == goal.target else None
            for h, goal in zip(held, goals, strict=True)
        ]
        self._large = own_memory_from()
        self._homes: dict[int, _Home] = {}
        self._apart: dict[int, dict[int, Tensor]] = {}
        self._begun = {i for i, out in enumerate(self._out) if out is not None}
        self._written: dict[int, set[int | None]] = {}
        self._taken: dict[int, set[int | None]] = {}
        self._departing: dict[tuple[Hashable, int], transition.Departure] = {}
        self._under_way: list[_UnderWay] = []

    @torch.no_grad()
    def put(self, unit: Hashable, plan: UnitPlan, early: Early, grad: Tensor) -> None:
        """Takes the gradient of a whole leaf to where it travels from, so that nobody needs it any more.

        Args:
            unit: whose leaf it is; `reduce` comes later, with the others.
            plan: of the unit.
            early: which leaf.
            grad: whole, and complete but for the terms that came by themselves.
        """
        departure = self._open(unit, plan, early)
        with _compat.region("scatter"):
            departure.put(early.place, grad)

    @torch.no_grad()
    def put_term(
        self, unit: Hashable, plan: UnitPlan, early: Early, dtype: torch.dtype, write: Callable[[Tensor], object]
    ) -> bool:
        """Has a gradient of a whole leaf, or a term of it, written to where it travels from.

        Args:
            unit: as in `put`.
            plan: of the unit.
            early: which leaf.
            dtype: of the term.
            write: fills a tensor of the leaf's shape, whatever is in it.

        Returns:
            Whether it was; else it is to be `put`.
        """
        return self._open(unit, plan, early).put_term(early.place, dtype, write)

    def _open(self, unit: Hashable, plan: UnitPlan, early: Early) -> transition.Departure:
        """The reduction that a gradient goes with, which waits for others of its unit."""
        departure = self._departing.get((unit, early.reduction))
        if departure is None:
            self.settle(wait=False)
            departure = self._departure(plan, plan.reductions[early.reduction])
            self._departing[unit, early.reduction] = departure
        return departure

    def reduce(self, unit: Hashable, plan: UnitPlan, places: Sequence[Place], grads: Sequence[Tensor | None]) -> None:
        """Finishes what is under way, and starts to reduce the gradients of a unit.

        Args:
            unit: as in `put`.
            plan: of the unit.
            places: of its leaves.
            grads: of its leaves, whole; None for those that were put, or have none.
        """
        self.settle()
        with _compat.region("scatter"):
            for number, r in enumerate(plan.reductions):
                departure = self._departing.pop((unit, number), None) or self._departure(plan, r)
                first = departure.start([grads[i] for i in r.leaves])
                self._under_way.append(self._reduced(plan, r, [places[i] for i in r.leaves], first))

    def settle(self, *, wait: bool = True) -> None:
        """Finishes the reductions under way, or those that have come; in their order, of which sums depend."""
        with _compat.region("scatter"):
            while self._under_way and (wait or self._under_way[0].come()):
                self._under_way.pop(0).finish()

    def _departure(self, plan: UnitPlan, r: Reducing) -> transition.Departure:
        return transition.Departure(
            r.before, r.shapes, plan.mesh, wire_dtype=r.wire_dtype, dtype=r.dtype, device=self._device,
            wholes=r.wholes_before, large=r.large, empty=self._empty,
        )  # fmt: skip

    def _reduced(self, plan: UnitPlan, r: Reducing, places: Sequence[Place], first: transition.Transit) -> _UnderWay:
        """What is left to do when the first steps of a reduction have been started."""
        if not r.after[0]:
            return _UnderWay(first.come, lambda: self._land(places, first))

        def second() -> transition.Transit:
            terms = self._add_to_held(places, first.finish())
            departure = transition.Departure(
                r.after, [tuple(x.shape) for x in terms], plan.mesh, wire_dtype=r.held_wire_dtype, dtype=r.dtype,
                device=self._device, wholes=r.wholes_after, empty=self._empty,
            )  # fmt: skip
            return departure.start(terms)

        if r.before[0]:
            return _UnderWay(lambda: False, lambda: self._land(places, second()))
        under_way = second()
        return _UnderWay(under_way.come, lambda: self._land(places, under_way))

    def _add_to_held(self, places: Sequence[Place], terms: list[Tensor]) -> list[Tensor]:
        """Adds terms to what is held for their places; a leaf that comes more than once takes it along once."""
        result = list(terms)
        sums: list[int] = []
        for i, place in enumerate(places):
            held, taken = self._held[place.leaf], self._taken.setdefault(place.leaf, set())
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
        i, row = place
        out = self._out[i]
        if out is None:
            home = self._home(i)
            if row is not None and home.grows:
                rows = self._apart.setdefault(i, {})
                if row not in rows:
                    rows[row] = _compat.fresh(home.shape[1:], home.dtype, self._device)
                return rows[row]
            out = self._out[i] = self._whole(home)
            rows = self._apart.pop(i, {})
            _compat.foreach_copy_([out[number] for number in rows], [*rows.values()])
        return out if row is None else out[row]

    def _home(self, i: int) -> _Home:
        home = self._homes.get(i)
        if home is None:
            leaf, goal = self._leaves[i], self._goals[i]
            assert leaf is not None and goal is not None
            target, shape = goal.target, goal.target.local_shape(leaf.shape)
            large = math.prod(shape) >= self._large
            cut = any(axis in target.data_axes for axis in target.spec.all_axes)
            memory = self._memory if large and not cut else None
            home = self._homes[i] = _Home(shape, goal.dtype, memory, large and memory is None)
        return home

    def _whole(self, home: _Home) -> Tensor:
        if home.memory is None:
            return _compat.fresh(home.shape, home.dtype, self._device)
        return home.memory.take(math.prod(home.shape), home.dtype, self._device).view(home.shape)

    def _carry_over(self, i: int, leaf: Local, goal: Goal) -> None:
        out, held, taken = self._complete(i), self._held[i], self._taken.get(i, set())
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
        leaf, goal, out = self._leaves[i], self._goals[i], self._complete(i)
        assert leaf is not None and goal is not None
        source = leaf.sharding
        steps = transition.plan_steps(source, goal.target)
        wholes = [transition.whole_sizes(source, steps, leaf.shape)]
        where = coordinate(source.mesh)
        moved = transition.move([grad.to(goal.dtype)], [steps], source.mesh, wholes)[0]
        if all(where.get(axis, 0) == 0 for axis in goal.target.partial):
            out.add_(moved)

    def finish(self) -> list[Tensor | None]:
        """Settles everything, and carries over what is held for leaves that did not come.

        Returns:
            The local gradient of each leaf, zeros where nothing came, None where there is no goal.
        """
        self.settle()
        with _compat.region("scatter"):
            for i, (leaf, goal) in enumerate(zip(self._leaves, self._goals, strict=True)):
                if leaf is not None and goal is not None:
                    self._carry_over(i, leaf, goal)
        return list(self._out)

    def close(self) -> None:
        """Lets all gradients go, and what they travel in."""
        self._out.clear()
        self._apart.clear()
        self._departing.clear()
        self._under_way.clear()
