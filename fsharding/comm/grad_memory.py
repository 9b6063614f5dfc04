"""The memory of one gradient while backward adds to it: the full local tensor, or rows of it as units are reduced."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.tier import DEVICE, tier_of, tier_on

__all__ = ["GradMemory"]


class GradMemory:
    """The memory of a local gradient in a tier. A part is a row of dim 0, or None for all rows."""

    # Invariants: a row is either in `_all` or in `_rows`, which has rows with separate memory; both are in the tier.
    # `_here` has the parts on the device, each between its `begin` and its `end`. `_written` has the rows with a value,
    # or None for all. Tensors in a tier that can fail are never written in place: a new tensor replaces them.

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
        self._all = None if given is None else self._kept(given)
        self._rows: dict[int, Tensor] = {}
        self._here: dict[int | None, Tensor] = {}
        self._written: set[int | None] = {None} if given is not None else set()

    def _kept(self, given: Tensor) -> Tensor:
        """Return a gradient in the tier: itself if it is there."""
        tier = tier_of(given, self._device.type)
        return given if tier is self._tier else self._tier.put(tier.get(given, self._device))

    def begin(self, row: int | None) -> tuple[Tensor, bool]:
        """Return device memory for a part, and whether it has a value; otherwise it is uninitialized."""
        # In one unit a row may occur twice, or with the full leaf, which then begins first: one memory serves both.
        if row in self._here:
            return self._here[row], True
        if None in self._here:
            return self._here[None][row], True
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
        """Store a part in its tier after it has been added to."""
        here = self._here.pop(row, None)
        if here is None or self._tier is DEVICE:  # it has been stored, or is the part
            return
        if not self._tier.can_fail:
            self._tier.put(here, self._part(row))
        elif row is None:
            self._all = self._tier.put(here)
        else:
            if self._all is not None:
                self._rows, self._all = dict(enumerate(self._all.unbind(0))), None
            self._rows[row] = self._tier.put(here)

    def result(self) -> Tensor:
        """Return the gradient in its tier, with zeros in rows without a value; the host waits for no copy."""
        blank: list[int | None] = [] if self._written else [None]
        if self._written and None not in self._written:
            blank = [row for row in range(self._shape[0]) if row not in self._written]
        if self._tier.can_fail:
            for row in blank:
                self.begin(row)[0].zero_()
                self.end(row)
            if self._all is None:
                self._all = torch.stack([self._rows.pop(row) for row in range(self._shape[0])])
        else:
            full = self._part(None)
            # Zeroing races with no copy: only parts that were added to are ever copied to the tier.
            _compat.foreach_zero_([full if row is None else full[row] for row in blank])
        self._written.add(None)
        return self._part(None)

    def _part(self, row: int | None) -> Tensor:
        """Return a part in its tier; as long as only rows are requested, each has separate memory."""
        if self._all is None and row is not None and (self._by_row or self._tier.can_fail):
            if row not in self._rows:
                self._rows[row] = _compat.fresh(self._shape[1:], self._dtype, self._device)
            return self._rows[row]
        if self._all is None:
            if self._pool is None or self._tier is not DEVICE:
                self._all = self._tier.empty(self._shape, self._dtype, self._device)
            else:
                self._all = self._pool.take(math.prod(self._shape), self._dtype, self._device).view(self._shape)
            _compat.foreach_copy_([self._all[i] for i in self._rows], [*self._rows.values()])
            self._rows.clear()
        return self._all if row is None else self._all[row]
