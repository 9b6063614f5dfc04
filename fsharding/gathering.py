"""One gather of one unit: in flight, alive, released, and alive again in backward.

In: the plan of a unit, its local leaves, and a keeper that has the buffers. Out: whole leaves, as views of a buffer.
Law: a buffer is let go as soon as nobody holds a view of it, and what is in flight is waited for before that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from fsharding import _compat
from fsharding.counts import Counts
from fsharding.mesh import axis_group
from fsharding.ops import bucket as buckets
from fsharding.ops.rows import Delivery, open_gather
from fsharding.ops.unit import Place, UnitPlan
from fsharding.policies import Policy
from fsharding.sharding import Local

__all__ = ["Keeper", "Unit"]


class Keeper(Protocol):
    """What a unit needs of the ledger: buffers, and somebody who counts and watches."""

    counts: Counts

    def take(self, size: int, dtype: torch.dtype, owner: Unit | None = None) -> Tensor:
        """A flat buffer."""
        ...

    def watch(self, flat: Tensor, unit: Unit, number: int) -> None:
        """Notes that views of a buffer are weights of a unit."""
        ...

    def name_of(self, places: Sequence[Place]) -> str:
        """A readable name for a unit."""
        ...

    def enter(self, unit: Unit, policy: Policy) -> list[Tensor]:
        """Makes a unit the current one and returns its whole leaves."""
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
        self._coming: list[Delivery | None] | None = None
        self.flats: list[Tensor] | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Casts the shards into rows and starts to gather them."""
        if self._coming is not None or self.flats is not None:
            return
        self._coming = []
        for g in self.plan.gathers:
            if not g.axes:
                self._coming.append(None)
                continue
            group, shards = axis_group(self.plan.mesh, g.axes), [self.leaves[i].value for i in g.leaves]
            empty = functools.partial(self.ledger.take, owner=self)
            delivery = open_gather(g.bucket.width, g.dtype, group, shards[0].device, empty)
            _compat.foreach_copy_(buckets.piece_views(delivery.mine, g.bucket, group.index), shards)
            self.ledger.counts.gathers.append(self.ledger.name_of(self.places))
            delivery.start()
            self._coming.append(delivery)

    @torch.no_grad()
    def wait(self) -> list[list[Tensor]]:
        """Puts together what has come; the unit is alive from here. Returns the whole leaves of each gather."""
        self.start()
        assert self._coming is not None
        wholes: list[list[Tensor]] = []
        self.flats = []
        for number, g in enumerate(self.plan.gathers):
            delivery = self._coming[number]
            rows = delivery.wait() if delivery is not None else ()
            flat = self.ledger.take(g.bucket.size, g.dtype, self)
            if delivery is not None:
                wholes.append(buckets.copy_out(rows, flat, g.bucket))
                delivery.done()
            else:
                wholes.append(buckets.whole_views(flat, g.bucket))
                _compat.foreach_copy_(wholes[-1], [self.leaves[i].value for i in g.leaves])
            self.flats.append(flat)
            self.ledger.watch(flat, self, number)
            del rows, delivery
            self._coming[number] = None
        self._coming = None
        return wholes

    def release(self) -> None:
        """Lets the gathered buffers go; whoever still holds a view keeps it."""
        self._coming, self.flats = None, None

    def abandon(self, *, failed: bool = False) -> None:
        """Waits for what is in flight, which nobody will ask for, and lets it go; after a failure, not for long."""
        for delivery in self._coming or ():
            if delivery is None:
                continue
            with suppress(RuntimeError) if failed else nullcontext():
                delivery.wait(timedelta(seconds=1) if failed else None)
            delivery.done()
        self.release()
