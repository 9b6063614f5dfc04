"""One gather of one unit: in flight, alive, released, and alive again in backward.

In: the plan of a unit, its local leaves, and a keeper that has the buffers. Out: whole leaves, as views of a buffer.
Law: a buffer is let go as soon as nobody holds a view of it, and what is in flight is waited for before that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from fsharding import _compat
from fsharding.comm import bucket as buckets
from fsharding.comm.all_gather import Coming, start_whole
from fsharding.comm.counters import Counts
from fsharding.errors import TransformError, message
from fsharding.mesh.device_mesh import axis_group
from fsharding.sharding.named_sharding import Local
from fsharding.transforms.policies import Policy
from fsharding.transforms.unit_plan import Early, Gathering, Place, UnitPlan

__all__ = ["Keeper", "Unit"]


class Keeper(Protocol):
    """What a unit needs of the ledger: buffers, and somebody who counts and watches."""

    counts: Counts

    def take(self, size: int, dtype: torch.dtype, owner: Unit | None = None) -> Tensor:
        """A flat buffer."""
        ...

    def lend(self, memory: object, nbytes: int, owner: Unit) -> None:
        """Counts a buffer that is not the keeper's own, as long as its memory lives."""
        ...

    def watch(self, flat: Tensor, unit: Unit, number: int, memory: object | None) -> None:
        """Notes that views of a buffer are weights of a unit."""
        ...

    def name_of(self, places: Sequence[Place]) -> str:
        """A readable name for a unit."""
        ...

    def enter(self, unit: Unit, policy: Policy) -> list[Tensor]:
        """Makes a unit the current one and returns its whole leaves."""
        ...

    def put(self, unit: Unit, early: Early, grad: Tensor) -> None:
        """Takes the gradient of one large leaf, before the unit is left."""
        ...

    def put_term(self, unit: Unit, early: Early, dtype: torch.dtype, write: Callable[[Tensor], object]) -> bool:
        """Has the gradient of one large leaf, or a term of it, written where it goes; or does not, and says so."""
        ...

    def leave(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        """Backward of a unit is over."""
        ...


class Unit:
    """One gather of one unit: in flight, alive, released, and alive again in backward."""

    def __init__(self, ledger: Keeper, plan: UnitPlan, leaves: Sequence[Local], places: tuple[Place, ...]) -> None:
        """Notes what the unit is; nothing is sent yet."""
        self.ledger, self.plan, self.leaves, self.places = ledger, plan, leaves, places
        self.order, self.saved, self.kept, self.returned = -1, 0, False, False
        self._coming: list[Coming | None] | None = None
        self.flats: list[Tensor] | None = None
        self._lent: list[Tensor] = []
        self._versions: list[int] = []

    @torch.no_grad()
    def start(self) -> None:
        """Casts the shards and starts to gather them."""
        if self._coming is None and self.flats is None:
            with _compat.region("gather"):
                self._coming = [self._started(g) if g.axes else None for g in self.plan.gathers]

    def _started(self, g: Gathering) -> Coming:
        group, shards = axis_group(self.plan.mesh, g.axes), [self.leaves[i].value for i in g.leaves]
        self.ledger.counts.gathers.append(self.ledger.name_of(self.places))
        coming = start_whole(g.bucket, g.dtype, group, shards, functools.partial(self.ledger.take, owner=self))
        if coming.memory is not None:
            self.ledger.lend(coming.memory, g.bucket.size * g.dtype.itemsize, self)
        return coming

    @torch.no_grad()
    def wait(self) -> list[list[Tensor]]:
        """Puts together what has come; the unit is alive from here. Returns the whole leaves of each gather."""
        self.start()
        with _compat.region("gather"):
            return self._joined()

    def _joined(self) -> list[list[Tensor]]:
        assert self._coming is not None
        wholes: list[list[Tensor]] = []
        self.flats = []
        for number, g in enumerate(self.plan.gathers):
            coming, memory = self._coming[number], None
            if coming is not None:
                flat, memory = coming.join()
            else:
                flat = self.ledger.take(g.bucket.size, g.dtype, self)
            wholes.append(buckets.whole_views(flat, g.bucket))
            if coming is None:
                _compat.foreach_copy_(wholes[-1], [self.leaves[i].value for i in g.leaves])
            self.flats.append(flat)
            self.ledger.watch(flat, self, number, memory)
            self._coming[number] = coming = memory = None
        self._coming = None
        self._lent = [*self.flats, *(self.leaves[i].value for i, _ in self.plan.aliases)]
        self._versions = [_compat.version_of(x) for x in self._lent]
        return wholes

    def release(self, *, failed: bool = False) -> None:
        """Lets the gathered buffers go; whoever still holds a view keeps it.

        Raises:
            TransformError: somebody has written into one, and nothing has failed before.
        """
        lent, versions, self._coming, self.flats, self._lent = self._lent, self._versions, None, None, []
        if not failed and any(_compat.version_of(x) != n for x, n in zip(lent, versions, strict=False)):
            name = self.ledger.name_of(self.places)
            rule = f"gave weights of {name} that were then written in place."
            mend = "Make new tensors of them: other ranks read the same memory, and backward gathers the weights again."
            if self.plan.aliases:
                mend += " Leaves that nothing cuts are the state's own: it is changed, so load or make it again."
            raise TransformError(message("fs.gather_unit", rule, mend=mend))

    def abandon(self, *, failed: bool = False) -> None:
        """Waits for what is in flight, which nobody will ask for, and lets it go; after a failure, not for long."""
        for coming in self._coming or ():
            if coming is not None:
                with suppress(RuntimeError) if failed else nullcontext():
                    coming.drop(timedelta(seconds=1) if failed else None)
        self.release(failed=failed)
