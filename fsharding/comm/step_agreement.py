"""One number that a step adds to sums it computes anyway: does a rank want to stop, and do ranks differ?

Guarantee: each rank's bit is read once per step, so ranks that stepped together agree on whether to stop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.base._compat import cache_on_mesh
from fsharding.comm.transport import start_sum
from fsharding.mesh import preemption
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.consistency import compare, digest, gather_numbers
from fsharding.mesh.device_mesh import Group, Mesh, abstract, axis_group, coordinate, data_axes, everyone
from fsharding.mesh.failures import is_fake_world, order_here, world_size
from fsharding.mesh.meeting import meet
from fsharding.mesh.unit_order import Comparison, UnitOrder, UnlikeRanks

__all__ = [
    "SAME_ROWS", "StepAgreement", "checks_plans", "compare_facts", "compare_plans", "comparison_of", "numbers_of_all",
]  # fmt: skip

# Axes along which ranks read the same rows.
SAME_ROWS = ("pp", "tp")

# Integers of up to this many bits are exact in a float64 sum.
_EXACT = 52


class StepAgreement:
    """The number of a step, which is part of sums that the step computes anyway."""

    # A sum that includes `as_term` passes its result to `summed`. The term is computed once, before the first sum:
    # computed again, ranks that have already summed together could add different terms to a later sum over other axes.
    # How it is encoded: ranks that must agree on a hash h multiply it by factors that add up to 0, so the sum of their
    # terms is 0 if all hashes are equal. Bits to stop are added below `unit`, which is above any sum of them.

    __slots__ = ("_bit", "_coding", "_count", "_mesh", "_rows", "_total", "axes", "order")

    def __init__(
        self, mesh: Mesh, bit: Tensor | None = None, *, axes: Sequence[str] | None = None, rows: Tensor | None = None
    ) -> None:
        self._mesh = mesh
        self._bit = bit  # whether this rank wants to stop, float64, 0-d; None reads it when the term is computed
        self._rows = rows  # hash of this rank's rows, int64, 0-d, equal along `SAME_ROWS`; None compares none
        # Axes over which the term has not been summed yet; by default it is summed over all axes of the mesh.
        self.axes = _large(mesh) if axes is None else tuple(axes)
        self._coding = _coding(mesh, self.axes)
        self._count: Tensor | None = None
        self._total: Tensor | None = None
        self.order: UnitOrder | None = order_here()  # order of the call's units; None if one rank is alone

    def as_term(self, device: torch.device) -> Tensor:
        """Return the partial sum so far, float64, 0-d."""
        # The first call ends the hash of the units, so every unit must have been noted by then.
        if self._count is None:
            self._count = self._own(device)
        return self._count

    def _own(self, device: torch.device) -> Tensor:
        coding = self._coding
        units = 0
        compares = not is_fake_world()
        if self.order is not None and compares:
            self.order.end("units")
            units = (self.order.digest & coding.mask) * coding.units * coding.unit
        if self._bit is None:
            term = torch.full((), float(preemption.pending() + units), dtype=torch.float64, device=device)
        else:
            term = self._bit + float(units)
        if self._rows is not None and compares:
            hashes = (self._rows & coding.mask).double() * float(coding.rows * coding.unit)
            term = term + hashes.to(device, non_blocking=True)
        return term

    def summed(self, count: Tensor, axes: Sequence[str]) -> None:
        """Store the sum of `as_term` over some axes."""
        self._count, self.axes = count, tuple(axis for axis in self.axes if axis not in axes)

    def _sum(self, device: torch.device) -> Tensor:
        """Return the sum over all axes."""
        # The step may not have summed over some axes, for example with a custom loss function: sum over these now.
        if self._total is None:
            count = self.as_term(device)
            if self.axes:
                count = start_sum(count.reshape(1), axis_group(self._mesh, self.axes), torch.float64).wait()[0]
            self._total = count
        return self._total

    def stops(self, device: torch.device) -> Tensor:
        """Return the number of ranks that want to stop: float64, 0-d."""
        return torch.remainder(self._sum(device), float(self._coding.unit))

    def alike(self, device: torch.device) -> Tensor:
        """Return whether all hashes that must agree do: bool, 0-d, equal on all ranks."""
        total = self._sum(device)
        return (total >= 0) & (total < float(self._coding.unit))

    def settle(self, device: torch.device) -> None:
        """End the step with its decision to stop."""
        preemption.agree(self.stops(device))

    def refuse_unlike(self) -> None:
        """Raise if hashes differ. A sum on a device isn't read, since the host would have to wait for it."""
        count = self._count
        if count is None or count.device.type != "cpu" or _compat.is_fake(count):
            return
        if not self.axes and not bool(self.alike(count.device)):
            raise UnlikeRanks(axis_group(self._mesh, self._coding.axes).ranks)


def comparison_of(mesh: Mesh) -> Comparison | None:
    """Return how ranks that gather the same units compare hashes immediately; None if one rank is alone."""
    # Stages of a pipeline gather different units, so on a mesh with `pp` only data ranks compare.
    group = everyone(mesh) if abstract(mesh).axis_size("pp") == 1 else axis_group(mesh, data_axes(mesh))
    if group.process_group is None or is_fake_world():
        return None
    device_type = getattr(mesh, "device_type", "cpu")
    return Comparison(group.ranks, functools.partial(gather_numbers, group=group, device_type=device_type))


def checks_plans() -> bool:
    """Return whether plans are checked before they run, which they are inside `fs.debug.compare_units`."""
    order = order_here()
    return order is not None and order.always is not None


def compare_plans(group: Group, device_type: str, outline: str) -> None:
    """Check that members of a group plan the same collective. Collective."""
    # The outline has only what must be equal on all ranks: neither sizes of local shards nor memory.
    if group.process_group is not None and not is_fake_world():
        own = digest(outline)
        numbers = gather_numbers(own, group, device_type)
        assert all(other == own for other in numbers), f"{group.ranks} differ: {outline}"


def compare_facts(facts: Mapping[str, str], mesh: Mesh) -> dict[int, dict[str, str]]:
    """Compare facts over the ranks of a mesh, as `consistency.compare` does. Collective."""
    # A mesh of all ranks first checks that all of them are in the same call, by `meet`.
    ranks = everyone(mesh)
    ask = meet if ranks.size == world_size() else None
    return compare(facts, ranks, getattr(mesh, "device_type", "cpu"), ask=ask)


def numbers_of_all(mesh: Mesh, own: int) -> dict[int, int]:
    """Gather a 64-bit number from every rank of a mesh, by global rank. Collective. Fake ranks have this rank's."""
    group = everyone(mesh)
    if group.process_group is None or is_fake_world():
        return dict.fromkeys(group.ranks, own)
    numbers = gather_numbers(own, group, getattr(mesh, "device_type", "cpu"))
    return dict(zip(group.ranks, numbers, strict=True))


class _Coding(NamedTuple):
    """How numbers are encoded in a sum."""

    axes: tuple[str, ...]  # axes of the sum
    unit: int  # factor of all hashes: a power of two above the number of ranks
    mask: int  # the bits of a hash that are summed
    units: int  # this rank's factor of the hash of units
    rows: int  # this rank's factor of the hash of rows


@cache_on_mesh(256)
def _coding(mesh: Mesh, axes: tuple[str, ...]) -> _Coding:
    shape = abstract(mesh)
    own = coordinate(mesh)
    sizes = {axis: shape.axis_size(axis) for axis in axes}
    ranks = math.prod(sizes.values())
    # Of m ranks that share a hash, the first has the factor m - 1 and the others -1: together at most 2 (m - 1) hashes
    # in magnitude, for each of the two kinds. The mask keeps all sums exact in float64, in any order of additions.
    bits = max(_EXACT - 2 - 2 * ranks.bit_length(), 8)

    def factor(shared: Sequence[str]) -> int:
        members = math.prod(sizes[axis] for axis in shared)
        return members - 1 if not any(own.get(axis, 0) for axis in shared) else -1

    # Stages of a pipeline gather different units.
    units = factor([axis for axis in axes if axis != "pp"])
    rows = factor([axis for axis in axes if axis in SAME_ROWS])
    return _Coding(axes, 1 << ranks.bit_length(), (1 << bits) - 1, units, rows)


@cache_on_mesh(256)
def _large(mesh: Mesh) -> tuple[str, ...]:
    shape = abstract(mesh)
    return tuple(axis for axis in AXES if shape.axis_size(axis) > 1)
