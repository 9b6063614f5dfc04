"""Copy a state to the device while backward runs, and its results to other tiers while the next forward runs.

    forward    free what the last update left, oldest first, as activations need the memory
    backward   free the rest; copy windows of the state in, as activations free memory
    update     each window once it is here; copy it out

Copies use no memory that the step would not need without them: at most as many bytes are allocated as when forward was
at its last unit. Each host decides alone, since copies are not collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fsharding.comm.streams import streams_for
from fsharding.comm.tier import compute_device
from fsharding.comm.transfers import NOTHING, Between, InFlight, Transfer, Transfers
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.sharding.layout import Layout
from fsharding.sharding.named_sharding import local_of

__all__ = ["AT_ONCE", "Piece", "UpdateCopies", "copies_of"]

Piece: TypeAlias = tuple[str, tuple[int, int] | None]
"""The path of a leaf in the arguments of an update, and the rows of its local tensor; None for all."""


class UpdateCopies:
    """The copies of updates; this class begins them with an update, and the host waits for them at its end."""

    @contextmanager
    def running(self, leaves: Mapping[str, Any], leaving: InFlight | None) -> Generator[None]:
        """Run a step on a state inside the `with` block: its leaves by path, and its copies that are in flight."""
        if leaving is not None:
            leaving.shrink()
        yield

    def of_microbatch(self, *, last: bool) -> Between:
        """Return what to do between the units of a microbatch."""
        return NOTHING

    def plan(self, window: Mapping[Piece, int]) -> None:
        """Note the pieces of a window that the update copies in, with their bytes."""

    def has(self, piece: Piece) -> bool:
        """Return whether a piece is on the device, or on its way."""
        return False

    def take(self, piece: Piece) -> Tensor:
        """Return a piece that `has` said is there; the current stream waits for it."""
        raise KeyError(piece)

    def most(self, leaving: InFlight) -> int:
        """Return how many bytes that are copied out may stay on the device."""
        return 0

    def leave(self, leaving: InFlight) -> None:
        """End the update, whose last copies are in flight."""
        leaving.settle()

    def left(self) -> InFlight | None:
        """Return the copies that the last update left in flight; None if it waited for them."""
        return None


AT_ONCE = UpdateCopies()


def copies_of(layout: Layout) -> UpdateCopies:
    """Return the copies of the updates of a layout; tiers that can fail, and a CPU, have nothing to begin early."""
    choices = layout.strategy.memory
    if not choices or any(choice.tier.can_fail for choice in choices) or isinstance(layout.mesh, AbstractMesh):
        return AT_ONCE
    device = compute_device(layout.mesh.device_type)
    return _StateCopies(device) if streams_for(device).several else AT_ONCE


class _StateCopies(UpdateCopies, Between):
    """Copies that begin before an update and end after it."""

    # `_windows` has the pieces of the last update, in its order. `_here` has pieces that are on the device, or on their
    # way. `_highest` is the most that was allocated when a unit began or was left, without copies of the state.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams, self._transfers = streams_for(device), Transfers(device)
        self._windows: list[Mapping[Piece, int]] = []
        self._coming: deque[Mapping[Piece, int]] = deque()
        self._here: dict[Piece, tuple[Transfer, Tensor]] = {}
        self._leaving = InFlight(device)
        self._left: InFlight | None = None
        self._leaves: Mapping[str, Any] = {}
        self._runs = self._is_last = False
        self._highest = self._before = 0

    @contextmanager
    def running(self, leaves: Mapping[str, Any], leaving: InFlight | None) -> Generator[None]:
        """See `UpdateCopies`."""
        self._streams, self._transfers = streams_for(self._device), Transfers(self._device)
        if leaving is not self._leaving:
            self._leaving.shrink()
            self._leaving = InFlight(self._device) if leaving is None else leaving
        before, self._windows = self._windows, []
        self._leaves, self._coming = leaves, deque(before)
        self._before, self._runs = self._used(), True
        try:
            yield
        finally:
            self._windows = self._windows or before  # a step that is refused updates nothing
            for transfer, _ in self._here.values():
                self._transfers.wait(transfer)
            self._here.clear()
            self._leaves, self._runs = {}, False

    def of_microbatch(self, *, last: bool) -> Between:
        """See `UpdateCopies`."""
        self._is_last = last
        return self

    # ------------------------------------------------------------------------------------------------ between units
    def forward(self) -> None:
        """See `Between`: make room for the activations of a unit, as many bytes as those of the unit before."""
        if self._runs:
            room, growth = self._room()
            self._leaving.shrink(max(0, room - growth))

    def backward(self) -> None:
        """See `Between`: copy in windows that fit, after what is copied out, which may be the same memory."""
        if not self._runs:
            return
        self._leaving.shrink()
        room, growth = self._room()
        while self._is_last and self._coming and sum(self._coming[0].values()) <= room - growth:
            room -= self._start(self._coming.popleft())

    def _start(self, window: Mapping[Piece, int]) -> int:
        """Start to copy a window in; return its bytes."""
        chosen = {piece: local_of(self._leaves[piece[0]]) for piece in window if piece[0] in self._leaves}
        rows = [x if piece[1] is None else x[slice(*piece[1])] for piece, x in chosen.items()]
        transfer = self._transfers.fetch(rows, self._device)
        self._here |= {piece: (transfer, x) for piece, x in zip(chosen, transfer.values, strict=True)}
        return sum(x.nbytes for x in transfer.values)

    def _used(self) -> int:
        """Return the bytes that are allocated, without copies of the state."""
        return self._streams.allocated() - self._leaving.nbytes - self._arrived()

    def _arrived(self) -> int:
        return sum(x.nbytes for _, x in self._here.values())

    def _room(self) -> tuple[int, int]:
        """Return the bytes that copies of the state may still take, and the growth since the last unit."""
        used = self._used()
        growth, self._before = max(0, used - self._before), used
        self._highest = max(self._highest, used)
        return self._highest - used - self._arrived(), growth

    # ------------------------------------------------------------------------------------------------------- update
    def plan(self, window: Mapping[Piece, int]) -> None:
        """See `UpdateCopies`."""
        self._leaving.shrink()
        self._left = None
        self._windows.append(window)

    def has(self, piece: Piece) -> bool:
        """See `UpdateCopies`."""
        return piece in self._here

    def take(self, piece: Piece) -> Tensor:
        """See `UpdateCopies`."""
        transfer, x = self._here.pop(piece)
        self._transfers.wait(transfer)
        return x

    def most(self, leaving: InFlight) -> int:
        """See `UpdateCopies`."""
        return max(0, self._highest - self._streams.allocated() + leaving.nbytes)

    def leave(self, leaving: InFlight) -> None:
        """See `UpdateCopies`; the state that the update made waits for the copies when it is read."""
        self._leaving = self._left = leaving

    def left(self) -> InFlight | None:
        """See `UpdateCopies`."""
        return self._left
