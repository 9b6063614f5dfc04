"""The memory of one gradient while backward adds to it: the whole leaf, or rows of a stack, as units are reduced.

In: which part is to be added to. Out: memory of the device for it, and the gradient at the end.
Rows of a large stack have separate memory until all of them are reduced, so that the stacked gradient does not exist
beside the activations. A gradient that is kept elsewhere is on the device only while a part of it is added to.
Guarantee: a part that nothing was added to is zero at the end.
"""

from __future__ import annotations

import math
from typing import Protocol, cast

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.disk import OnDisk, joined
from fsharding.comm.leaf_memory import empty_on_host, kind_here, on_device, put_away
from fsharding.sharding.memory_kinds import MemoryKind

__all__ = ["GradHere", "GradMemory", "GradOnDisk", "GradOnHost", "grad_memory"]


class GradMemory(Protocol):
    """The memory of a local gradient. A part is a row of dim 0, or None for all of it."""

    def begin(self, row: int | None) -> tuple[Tensor, bool]:
        """Return memory of the device for a part, and whether it has a value; else it holds garbage."""
        ...

    def end(self, row: int | None) -> None:
        """A part has been added to."""
        ...

    def result(self) -> Tensor:
        """Return the gradient where it is kept."""
        ...


def _fill(whole: Tensor, written: set[int | None]) -> Tensor:
    """Write zeros where nothing was written, and note it."""
    if None not in written:
        blank = [whole[row] for row in range(whole.shape[0]) if row not in written] if written else [whole]
        _compat.foreach_zero_(blank)
        written.add(None)
    return whole


class GradHere:
    """A `GradMemory` on the device.

    Args:
        shape: local.
        pool: memory that is kept between calls; None for fresh memory.
        by_row: rows have memory of their own until all are asked for.
        given: a gradient to add to, in its own memory.
    """

    # `_written` has the rows that have a value, or None for all of them.

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        pool: Pool | None,
        by_row: bool,
        given: Tensor | None,
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._pool, self._by_row = pool, by_row
        self._whole = given
        self._rows: dict[int, Tensor] = {}
        self._written: set[int | None] = {None} if given is not None else set()

    def begin(self, row: int | None) -> tuple[Tensor, bool]:
        """See `GradMemory`."""
        if row is None and self._written:
            _fill(self._part(None), self._written)
        has_value = None in self._written or row in self._written
        self._written.add(row)
        return self._part(row), has_value

    def end(self, row: int | None) -> None:
        """See `GradMemory`."""

    def result(self) -> Tensor:
        """See `GradMemory`."""
        return _fill(self._part(None), self._written)

    def _part(self, row: int | None) -> Tensor:
        if self._whole is None and row is not None and self._by_row:
            if row not in self._rows:
                self._rows[row] = _compat.fresh(self._shape[1:], self._dtype, self._device)
            return self._rows[row]
        if self._whole is None:
            self._whole = whole = self._allocate()
            _compat.foreach_copy_([whole[number] for number in self._rows], [*self._rows.values()])
            self._rows.clear()
        return self._whole if row is None else self._whole[row]

    def _allocate(self) -> Tensor:
        if self._pool is None:
            return _compat.fresh(self._shape, self._dtype, self._device)
        return self._pool.take(math.prod(self._shape), self._dtype, self._device).view(self._shape)


class GradOnHost:
    """A `GradMemory` in pinned memory of the host.

    Args:
        shape: local.
        given: a gradient to add to, in its own memory.
    """

    # `_here` has the parts that are on the device, `_written` is as in `GradHere`.

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, given: Tensor | None) -> None:
        self._device = device
        self._host = empty_on_host(shape, dtype) if given is None else given
        self._here: dict[int | None, Tensor] = {}
        self._written: set[int | None] = {None} if given is not None else set()

    def begin(self, row: int | None) -> tuple[Tensor, bool]:
        """See `GradMemory`."""
        if row is None and self._written:
            _fill(self._host, self._written)
        kept = self._part(row)
        has_value = None in self._written or row in self._written
        self._here[row] = here = _compat.fresh(tuple(kept.shape), kept.dtype, self._device)
        return here.copy_(kept, non_blocking=True) if has_value else here, has_value

    def end(self, row: int | None) -> None:
        """See `GradMemory`."""
        self._part(row).copy_(self._here.pop(row), non_blocking=True)
        self._written.add(row)

    def result(self) -> Tensor:
        """See `GradMemory`; the host waits for no copy, and none is under way where it writes zeros."""
        return _fill(self._host, self._written)

    def _part(self, row: int | None) -> Tensor:
        return self._host if row is None else self._host[row]


class GradOnDisk:
    """A `GradMemory` in a file.

    Args:
        shape: local.
        given: a gradient to add to; it is not changed.
    """

    # `_kept` has the parts that have a value: rows, or all of them at None.

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, given: Tensor | None) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._kept: dict[int | None, OnDisk] = {None: given} if isinstance(given, OnDisk) else {}
        self._here: dict[int | None, Tensor] = {}

    def begin(self, row: int | None) -> tuple[Tensor, bool]:
        """See `GradMemory`."""
        if row is None and self._kept:
            self.result()
        elif None in self._kept:
            self._kept = dict(enumerate(cast("tuple[OnDisk, ...]", self._kept[None].unbind(0))))
        kept = self._kept.get(row)
        if kept is None:
            self._here[row] = _compat.fresh(self._shape[row is not None :], self._dtype, self._device)
        else:
            self._here[row] = on_device(kept, self._device.type)
        return self._here[row], kept is not None

    def end(self, row: int | None) -> None:
        """See `GradMemory`."""
        self._kept[row] = cast(OnDisk, put_away(self._here.pop(row), "disk")[0])

    def result(self) -> Tensor:
        """See `GradMemory`; the host waits for no write."""
        if None not in self._kept:
            for row in [row for row in range(self._shape[0]) if row not in self._kept] if self._kept else [None]:
                self.begin(row)[0].zero_()
                self.end(row)
        if None not in self._kept:
            self._kept = {None: joined([self._kept[row] for row in range(self._shape[0])], self._shape)}
        return self._kept[None]


def grad_memory(
    kind: MemoryKind,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    pool: Pool | None,
    by_row: bool,
    given: Tensor | None,
) -> GradMemory:
    """Return memory of a kind for a gradient; see the classes."""
    kind = kind_here(kind, device.type)
    if kind == "device":
        return GradHere(shape, dtype, device, pool=pool, by_row=by_row, given=given)
    return (GradOnDisk if kind == "disk" else GradOnHost)(shape, dtype, device, given)
