"""Copy a state to the device while backward runs, and its results to other tiers while the next forward runs.

    forward    free what the last update left, oldest first, as activations need the memory
    backward   free the rest; copy windows of the state in, as activations free memory
    update     each window once it is here; copy it out

Copies use no memory that a step would not need without them: a window fits below the most that the step before needed,
beside all that it needed until its update. Each host decides alone, since copies are not collective.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.tree import Tree
from fsharding.comm.streams import streams_for
from fsharding.comm.tier import compute_device
from fsharding.comm.transfers import NOTHING, Between, InFlight, Transfer, Transfers
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.sharding.layout import Layout
from fsharding.sharding.memory_kinds import HERE
from fsharding.sharding.named_sharding import local_of

__all__ = ["AT_ONCE", "Piece", "UpdateCopies", "copies_of"]

Piece: TypeAlias = tuple[str, tuple[int, int] | None]
"""The path of a leaf in the arguments of an update, and the rows of its local tensor; None for all."""


class UpdateCopies:
    """The copies of updates; this class begins them with an update, and the host waits for them at its end."""

    __slots__ = ()

    @contextmanager
    def running(self, held: Mapping[str, Tree], leaving: InFlight | None) -> Generator[None]:
        """Run a step inside the `with` block: `state` and `params` of its update, and their copies in flight."""
        if leaving is not None:
            leaving.settle()
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
        """Return a piece for which `has` is true; the current stream waits for it."""
        raise KeyError(piece)

    def most(self, leaving: InFlight) -> int:
        """Return how many bytes that are copied out may stay on the device."""
        return 0

    def cast(self, param: str) -> torch.dtype | None:
        """Return the dtype in which a main parameter is needed on the device when it is updated; None if it isn't."""
        return None

    def leave(self, leaving: InFlight, casts: Mapping[str, DTensor]) -> None:
        """End the update, whose last copies are in flight, with the casts of main parameters on the device."""
        leaving.settle()

    def on_device(self, main: Tree) -> Tree:
        """Return main parameters with the casts of the last update in place of those that it has."""
        return main

    def left(self) -> InFlight | None:
        """Return the copies that the last update left in flight; None if it waited for them."""
        return None

    def release(self) -> None:
        """Free the memory of copies that are in flight, when no step follows soon."""


AT_ONCE = UpdateCopies()


def copies_of(layout: Layout) -> UpdateCopies:
    """Return the copies of the updates of a layout: at once on a CPU, with tiers that can fail, and on the host."""
    choices = layout.strategy.memory
    late = layout.updated_on_host or any(choice.tier.can_fail for choice in choices)
    if not choices or late or isinstance(layout.mesh, AbstractMesh):
        return AT_ONCE
    device = compute_device(layout.mesh.device_type)
    return _StateCopies(device, layout) if streams_for(device).several else AT_ONCE


class _StateCopies(UpdateCopies, Between):
    """Copies that begin before an update and end after it."""

    # `_windows` has the pieces of the last update, in its order; `_here` has pieces that are on the device, or coming.
    # `_forward` and `_backward` have what was allocated, without copies of the state, when a unit began, and when
    # backward had left one; `_before` has both lists of the step before. `_casts` has parameters from main ones.

    def __init__(self, device: torch.device, layout: Layout) -> None:
        self._device = device
        self._dtypes = {
            leaf.path: layout.param_dtype(leaf)
            for leaf in layout.leaves
            if leaf.params.memory == HERE != leaf.main.memory and layout.rounds(leaf) is None
        }
        self._casts: Mapping[str, DTensor] = {}
        self._streams, self._transfers = streams_for(device), Transfers(device)
        self._windows: list[Mapping[Piece, int]] = []
        self._coming: deque[Mapping[Piece, int]] = deque()
        self._here: dict[Piece, tuple[Transfer, Tensor]] = {}
        self._leaving = InFlight(device)
        self._left: InFlight | None = None
        self._leaves: Mapping[str, Any] = {}
        self._runs = self._is_last = False
        self._forward: list[int] = []
        self._backward: list[int] = []
        self._before: tuple[list[int], list[int]] = [], []

    @contextmanager
    def running(self, held: Mapping[str, Tree], leaving: InFlight | None) -> Generator[None]:
        """See `UpdateCopies`."""
        self._streams, self._transfers = streams_for(self._device), Transfers(self._device)
        if leaving is not self._leaving:
            self._leaving.shrink()
            self._leaving = InFlight(self._device) if leaving is None else leaving
        planned, self._windows = self._windows, []
        self._before, self._forward, self._backward = (self._forward, self._backward), [], []
        try:
            self._leaves, self._coming = tree.named_leaves(held), deque(planned)
            self._left, self._runs = None, True
            yield
        finally:
            self._windows = self._windows or planned  # a step that is refused updates nothing
            for transfer, _ in self._here.values():
                self._transfers.wait(transfer)
            self._here.clear()
            self._leaves, self._runs = {}, False

    def of_microbatch(self, *, last: bool) -> Between:
        """See `UpdateCopies`."""
        self._is_last = last
        return self

    def forward(self) -> None:
        """See `Between`: make room for the activations of a unit, as many bytes as in the step before."""
        if self._runs:
            used = self._used()
            self._forward.append(used)
            after = self._before[0][len(self._forward) :][:1]
            self._leaving.shrink(max(0, self._highest() - max(used, *after, 0)))

    def backward(self) -> None:
        """See `Between`: copy in windows that fit until the update, after copies out, which may be the same memory."""
        if not self._runs:
            return
        self._leaving.shrink()
        used = self._used()
        self._backward.append(used)
        after = self._before[1][len(self._backward) :]
        room = self._highest() - max(used, *after, 0) - self._arrived()
        while self._is_last and self._coming and sum(self._coming[0].values()) <= room:
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

    def _highest(self) -> int:
        """Return the most bytes that were allocated without copies of the state, in the step before or in this one."""
        return max([*itertools.chain(*self._before), *self._forward, *self._backward], default=0)

    def plan(self, window: Mapping[Piece, int]) -> None:
        """See `UpdateCopies`."""
        self._leaving.shrink()
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
        highest = max([*self._forward, *self._backward], default=0)
        return max(0, highest - self._streams.allocated() + leaving.nbytes)

    def cast(self, param: str) -> torch.dtype | None:
        """See `UpdateCopies`."""
        return self._dtypes.get(param)

    def leave(self, leaving: InFlight, casts: Mapping[str, DTensor]) -> None:
        """See `UpdateCopies`; the state that the update made waits for the copies when it is read."""
        self._leaving = self._left = leaving
        self._casts = casts

    def on_device(self, main: Tree) -> Tree:
        """See `UpdateCopies`."""
        casts, self._casts = self._casts, {}
        return tree.map_with_path(lambda path, x: casts.get(path, x), main) if casts else main

    def left(self) -> InFlight | None:
        """See `UpdateCopies`."""
        return self._left

    def release(self) -> None:
        """See `UpdateCopies`."""
        self._leaving.shrink()
