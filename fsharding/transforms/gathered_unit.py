"""One gather of one unit, from its shards to whole leaves and, for backward, from its shards again.

In: the plan of a unit, its shards, a pool of buffers. Out: whole leaves, as views of flat buffers.
Law: a buffer is released as soon as the last view of it is gone, and a collective is waited for before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from enum import Enum

import torch
from torch import Tensor

from fsharding import _compat
from fsharding.calls import named
from fsharding.comm import bucket, codes
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.codes import Coded, CodedBucket, Noise
from fsharding.comm.handles import Handle
from fsharding.comm.streams import streams_for
from fsharding.comm.transport import transport_for
from fsharding.errors import TransformError, message
from fsharding.formats.quantised import Quantised
from fsharding.mesh.device_mesh import axis_group
from fsharding.sharding.named_sharding import Local
from fsharding.transforms.unit_plan import GatherBucket, LeafIndex, UnitPlan

__all__ = ["GatheredUnit", "UnitState"]


class UnitState(Enum):
    """Where the whole leaves of a unit are. `start` goes on from PLANNED and from RELEASED."""

    PLANNED = "nothing has been sent"
    GATHERING = "all-gathers are under way"
    ALIVE = "whole leaves are in buffers"
    RELEASED = "the buffers have been let go"


class GatheredUnit:
    """One gather of one unit. `start`, `wait`, `release`; then `start` again, if backward needs it.

    Args:
        plan: of the unit.
        leaves: its shards.
        index: of its leaves in the parameter tree.
        pool: of buffers; bytes that the unit has in use are counted there as its own.
        noise: of a leaf, by its number in the plan, for formats whose rounding is keyed.
        name: says what the unit is called, for an error.
        on_gather: is called when an all-gather starts.
        on_start: is called with the unit each time before its all-gathers start.
        site: file and line of the user's call; None where no error needs them.
        columns: a gather of some of its leaves in blocks along their other dim, for backward; it ends with this one.

    Attributes:
        state: see `UnitState`. All-gathers are under way only while it is GATHERING, and `buffers` has elements only
            while it is ALIVE or when waiting for one of several has failed.
        buffers: the flat buffer of each bucket of the plan.
        order: position among the units of a forward pass; -1 until the loss function has used it.
        saved_views: how many tensors autograd has saved that view the buffers; of `columns`, how many products ask for
            it.
        columns: the same.
        codes: the whole leaves of a unit of codes alone while it is ALIVE, by their number in the plan.
        kept: the buffers are kept for backward.
        in_backward: backward has needed it.
        site: the same.
    """

    def __init__(
        self,
        plan: UnitPlan,
        leaves: Sequence[Local],
        index: tuple[LeafIndex, ...],
        pool: Pool,
        *,
        name: Callable[[], str],
        on_gather: Callable[[], None],
        on_start: Callable[[GatheredUnit], None],
        site: tuple[str, int] | None = None,
        noise: Noise | None = None,
        columns: GatheredUnit | None = None,
    ) -> None:
        self.plan, self.leaves, self.index = plan, leaves, index
        self._name, self._on_gather, self._noise = name, on_gather, noise
        self._on_start, self.site = on_start, site
        # An owner of its own: the unit would hold a memory that holds the unit, until the garbage collector runs.
        device = leaves[0].value.device
        self._memory, self._streams = pool.memory(device, owner=object()), streams_for(device)
        if self._streams.several:
            self._memory = self._memory.of_one_user()
        self.state = UnitState.PLANNED
        self.order, self.saved_views, self.kept, self.in_backward = -1, 0, False, False
        self.columns = columns
        self.codes: dict[int, Quantised] = {}
        self.buffers: list[Tensor] = []
        self._bucket_of: list[int] = []
        """By number of the buffer, that of the bucket that it came with the first time."""
        self._viewed: set[int] = set()
        """The buckets that autograd has saved views of."""
        self._passed_over: set[int] = set()
        """The buckets that are not gathered again, since nothing has views of them."""
        self._handles: list[Handle[Tensor] | None] = []
        self._coded: dict[int, list[Coded]] = {}
        """By number of the bucket, what this rank gives of leaves that travel as codes, until they are whole."""
        self._quantised: dict[int, Quantised] = {}
        self._guarded: list[tuple[Tensor, int]] = []
        """Tensors that the loss function sees, and their versions in autograd: they must not be written in place."""

    @torch.no_grad()
    def start(self) -> None:
        """Casts the shards and starts to gather them, if that has not been done."""
        if self.state in (UnitState.PLANNED, UnitState.RELEASED):
            self._on_start(self)
            if self.state is UnitState.RELEASED and self._bucket_of:
                columnwise = {number for number, b in enumerate(self.plan.gathers) if b.columnwise}
                self._passed_over = columnwise - self._viewed
            taken = {n: b for n, b in enumerate(self.plan.gathers) if n not in self._passed_over}
            with _compat.region("gather"), self._streams.on("gather"):
                for number, b in taken.items():
                    if b.coded is not None:
                        self._coded[number] = self._encoded(b, b.coded)
                started = {number: self._start(number, b) for number, b in taken.items() if b.axes}
                self._handles = [started.get(number) for number in range(len(self.plan.gathers))]
            self.state = UnitState.GATHERING

    @property
    def again(self) -> list[GatheredUnit]:
        """What backward needs of a unit, in the order in which it is started: itself, and its columns."""
        return [unit for unit in (self, self.columns) if unit is not None and unit.saved_views]

    def start_again(self) -> None:
        """Starts what backward needs of a unit."""
        for unit in self.again:
            unit.start()

    def note_view(self, buffer: int) -> None:
        """Notes that autograd has saved a view of a buffer, so that backward needs what is in it."""
        self.saved_views += 1
        self._viewed.add(self._bucket_of[buffer])

    def _encoded(self, b: GatherBucket, coded: CodedBucket) -> list[Coded]:
        noise = self._noise
        drawn = None if noise is None else lambda i: noise(b.leaves[i])
        return codes.encoded(coded.plans, [self.leaves[i].value for i in b.leaves], self.plan.mesh, drawn)

    def _start(self, number: int, b: GatherBucket) -> Handle[Tensor]:
        group, shards = axis_group(self.plan.mesh, b.axes), [self.leaves[i].value for i in b.leaves]
        self._on_gather()
        if b.coded is not None:
            return codes.gather_codes(b.coded, self._coded[number], group, self._memory)
        return transport_for(group, shards[0].device).all_gather(b.bucket, shards, b.dtype, self._memory)

    @torch.no_grad()
    def wait(self) -> list[Sequence[Tensor | Quantised]]:
        """Waits for the all-gathers, which it starts if need be.

        Returns:
            The whole leaves of each bucket of the plan.

        Raises:
            RuntimeError: another rank is gone, or the timeout of the group is over.
        """
        self.start()
        assert self.state is UnitState.GATHERING, self.state
        with _compat.region("gather"):
            wholes = [self._take(number, b) for number, b in enumerate(self.plan.gathers)]
        if self._streams.several and any(b.axes or b.coded is not None for b in self.plan.gathers):
            with self._streams.on("gather"):
                gathered = self._streams.record("gathered")
            self._streams.wait(gathered)
        self._handles = []
        shown = [*self.buffers, *(self.leaves[i].value for i, _ in self.plan.aliases)]
        self._guarded = [(x, _compat.version_of(x)) for x in shown]
        self.state = UnitState.ALIVE
        return wholes

    def wait_for_codes(self) -> None:
        """Waits for a unit of codes alone, if that has not been done: `codes` has them then."""
        if self.state is not UnitState.ALIVE:
            wholes = self.wait()
            for b, leaves in zip(self.plan.gathers, wholes, strict=True):
                pairs = zip(b.leaves, leaves, strict=True)
                self.codes |= {i: x for i, x in pairs if isinstance(x, Quantised)}

    def _take(self, number: int, b: GatherBucket) -> Sequence[Tensor | Quantised]:
        """The whole leaves of a bucket; none of one that is passed over, whose buffers keep their numbers."""
        if number in self._passed_over:
            self.buffers += [torch.empty(0, dtype=torch.uint8)] * self._bucket_of.count(number)
            return ()
        before = len(self.buffers)
        wholes = self._finish(number, b)
        if before == len(self._bucket_of):
            self._bucket_of += [number] * (len(self.buffers) - before)
        return wholes

    def _finish(self, number: int, b: GatherBucket) -> Sequence[Tensor | Quantised]:
        handle = self._handles[number]
        if b.coded is not None:
            with self._streams.on("gather"):
                wholes = self._finish_coded(number, b, b.coded, handle)
                del handle
                self._memory.retire()  # the codes that came, unless they are what is kept
            return wholes
        if handle is not None:
            with self._streams.on("gather"):
                buffer, self._handles[number] = handle.wait(), None
                del handle
                self._memory.retire()  # the rows that came
            wholes = bucket.whole_views(buffer, b.bucket)
        else:
            buffer = self._memory.empty(b.bucket.size, b.dtype)
            wholes = bucket.whole_views(buffer, b.bucket)
            _compat.foreach_copy_(wholes, [self.leaves[i].value for i in b.leaves])
        self.buffers.append(buffer)
        return wholes

    def _finish_coded(
        self, number: int, b: GatherBucket, coded: CodedBucket, handle: Handle[Tensor] | None
    ) -> Sequence[Tensor | Quantised]:
        """Whole leaves of a bucket that travels as codes: numbers, or the codes themselves."""
        if b.quantised:
            return self._finish_quantised(number, coded, b.dtype, handle)
        own = self._coded.pop(number)
        whole = own if handle is None else codes.from_bytes(coded, handle.wait(), own)
        self._handles[number] = None
        buffer = self._memory.empty(b.bucket.size, b.dtype)
        wholes = bucket.whole_views(buffer, b.bucket)
        codes.decoded(coded.plans, whole, wholes)
        self.buffers.append(buffer)
        return wholes

    def _finish_quantised(
        self, number: int, coded: CodedBucket, dtype: torch.dtype, handle: Handle[Tensor] | None
    ) -> list[Quantised]:
        """Codes and scales, of which every tensor is a view of some buffer, in the same order each time."""
        own = self._coded.pop(number)
        if handle is not None:
            flat = handle.wait()
            self._handles[number] = None
        else:
            flat = self._memory.empty(coded.bucket.size, torch.uint8)
            _compat.foreach_copy_(bucket.whole_views(flat, coded.bucket), codes.encoded_bytes(coded.plans, own))
        self.buffers.append(flat)
        result: list[Quantised] = []
        for plan, (values, scales) in zip(coded.plans, codes.packed_from_bytes(coded, flat, own), strict=True):
            parts = [self._buffered(x, flat) for x in (values, *scales) if x is not None]
            start = (plan.whole_start[0] % plan.block[0], plan.whole_start[1] % plan.block[1])
            outer = parts[2] if len(parts) > 2 else None
            columns, strict = plan.whole[-1], self.plan.strict
            leaf = Quantised(parts[0], parts[1], plan.format, dtype, plan.block, columns, outer, None, start, strict)
            result.append(leaf)
        return result

    def give_quantised(self, wholes: Sequence[Tensor | Quantised]) -> list[Tensor]:
        """Whole leaves as autograd takes them: in the place of codes, tensors without memory that have their gradients.

        Until `take_quantised` the unit keeps the codes themselves.
        """
        self._quantised = {i: x for i, x in enumerate(wholes) if isinstance(x, Quantised)}
        return [
            torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape) if isinstance(x, Quantised) else x
            for x in wholes
        ]

    def take_quantised(self) -> dict[int, Quantised]:
        """The codes that `give_quantised` was given, by number of the leaf."""
        taken, self._quantised = self._quantised, {}
        return taken

    def _buffered(self, part: Tensor, flat: Tensor) -> Tensor:
        """A part of what was gathered; or one that did not travel, as a buffer of its own."""
        if _compat.storage_id(part) == _compat.storage_id(flat):
            return part
        whole = part.contiguous() if part.storage_offset() == 0 else part.clone()
        self.buffers.append(whole.view(-1))
        return whole

    @named("fs.gather_unit")
    def release(self, *, failed: bool = False) -> None:
        """Lets the buffers go; a view that somebody still has keeps its own.

        Args:
            failed: the step has failed, so that nothing more is said about its weights.

        Raises:
            TransformError: the weights were written in place.
        """
        changed = not failed and any(_compat.version_of(x) != version for x, version in self._guarded)
        self._handles, self.buffers, self._guarded = [], [], []
        self._coded.clear()
        self.codes.clear()
        if self.columns is not None:
            self.columns.release(failed=failed)
        if self.state is not UnitState.PLANNED:
            self.state = UnitState.RELEASED
            self._memory.retire()
        if changed:
            rule = f"gave weights of {self._name()} that were then written in place."
            mend = "Make new tensors of them: other ranks read the same memory, and backward gathers the weights again."
            if self.plan.aliases:
                mend += " Leaves that nothing cuts are the state's own: it is changed, so load or make it again."
            raise TransformError(message("fs.gather_unit", rule, mend=mend))

    def abandon(self, *, failed: bool = False) -> None:
        """Releases a unit in any state: all-gathers that nobody needs are waited for; after a failure, not for long."""
        if self.columns is not None:
            self.columns.abandon(failed=failed)
        if self._handles:
            with self._streams.on("gather"):
                self._end_gathers(failed=failed)
                self._memory.retire()
        self.release(failed=failed)

    def _end_gathers(self, *, failed: bool) -> None:
        for handle in self._handles:
            if handle is not None:
                with suppress(RuntimeError) if failed else nullcontext():
                    handle.release(timedelta(seconds=1) if failed else None)
        self._handles = []
