"""The memory of one gradient while backward adds to it: the whole leaf, or rows of a stack, as units are reduced."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.tier import DEVICE, tier_of, tier_on

__all__ = ["GradMemory"]


class GradMemory:
    """The memory of a local gradient in a tier. A part is a row of dim 0, or None for all of it."""

    # `_whole` is the gradient, `_rows` are the rows that have memory of their own; a row is in one of the two. Both are
    # in the tier, `_here` has the parts that are on the device, between `begin` and `end`. `_written` has the rows that
    # have a value, or None for all. What is in a tier that can fail is never written: a part replaces the one before.

    def __init__(
        self,
        tier: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        pool: Pool | None,
        by_row: bool,
        given: Tensor | None,
    ) -> None:
        self._tier = tier_on(tier, device.type)
        self._shape, self._dtype, self._device = shape, dtype, device
        self._pool, self._by_row = pool, by_row and self._tier is DEVICE
        self._whole = None if given is None else self._kept(given)
        self._rows: dict[int, Tensor] = {}
        self._here: dict[int | None, Tensor] = {}
        self._written: set[int | None] = {None} if given is not None else set()

    def _kept(self, given: Tensor) -> Tensor:
        """Return a gradient in the tier: itself if it is there."""
        tier = tier_of(given, self._device.type)
        return given if tier is self._tier else self._tier.put(tier.get(given, self._device))

    def begin(self, row: int | None) -> tuple[Tensor, bool]:
        """Return memory of the device for a part, and whether it has a value; else it holds garbage."""
        if row is None and self._written:
            self.result()
        has_value = None in self._written or row in self._written
        if has_value:
            here = self._tier.get(self._part(row), self._device)
        elif self._tier is DEVICE:
            here = self._part(row)
        else:
            here = _compat.fresh(self._shape[row is not None :], self._dtype, self._device)
        self._here[row] = here
        self._written.add(row)
        return here, has_value

    def end(self, row: int | None) -> None:
        """Keep a part that has been added to."""
        here = self._here.pop(row)
        if not self._tier.can_fail:
            self._tier.put(here, self._part(row))
        elif row is None:
            self._whole = self._tier.put(here)
        else:
            if self._whole is not None:
                self._rows, self._whole = dict(enumerate(self._whole.unbind(0))), None
            self._rows[row] = self._tier.put(here)

    def result(self) -> Tensor:
        """Return the gradient in its tier, with zeros where nothing was added; the host waits for no copy."""
        blank: list[int | None] = [] if self._written else [None]
        if self._written and None not in self._written:
            blank = [row for row in range(self._shape[0]) if row not in self._written]
        if self._tier.can_fail:
            for row in blank:
                self.begin(row)[0].zero_()
                self.end(row)
            if self._whole is None:
                self._whole = torch.stack([self._rows.pop(row) for row in range(self._shape[0])])
        else:
            whole = self._part(None)
            # No copy is under way to a part that nothing was added to.
            _compat.foreach_zero_([whole if row is None else whole[row] for row in blank])
        self._written.add(None)
        return self._part(None)

    def _part(self, row: int | None) -> Tensor:
        """Return a part in its tier: with memory of its own while all rows have that, else in the whole."""
        if self._whole is None and row is not None and (self._by_row or self._tier.can_fail):
            if row not in self._rows:
                self._rows[row] = _compat.fresh(self._shape[1:], self._dtype, self._device)
            return self._rows[row]
        if self._whole is None:
            self._whole = self._allocate()
            _compat.foreach_copy_([self._whole[i] for i in self._rows], [*self._rows.values()])
            self._rows.clear()
        return self._whole if row is None else self._whole[row]

    def _allocate(self) -> Tensor:
        if self._pool is None or self._tier is not DEVICE:
            return self._tier.empty(self._shape, self._dtype, self._device)
        return self._pool.take(math.prod(self._shape), self._dtype, self._device).view(self._shape)
