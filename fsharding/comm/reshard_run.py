"""Run a plan of routes: local copies, and one exchange of messages per round, while the next round is packed.

Guarantee: exactly the bytes of the plan are sent, and every element of a target is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm.handles import done
from fsharding.comm.native import Message, as_bytes
from fsharding.comm.reshard_plan import Piece, Plan, check_routes, grids
from fsharding.comm.step_agreement import checks_plans
from fsharding.comm.transport import send_recv
from fsharding.mesh.device_mesh import Group
from fsharding.sharding import boxes

__all__ = ["exchange"]


@dataclass
class _Run:
    """One execution on one rank."""

    plan: Plan
    rank: int  # this rank
    dtypes: Sequence[torch.dtype]  # dtype of each target
    device: torch.device  # device of all targets
    sources: list[Tensor | None]  # local tensors; None once they are freed
    donate: bool  # whether sources may be freed, or returned as targets
    targets: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # the targets allocated so far, by leaf
    # For each round, the pieces to send and to receive, sorted by peer: both sides list them in the order of the plan.
    rounds: list[tuple[list[Piece], list[Piece]]] = field(default_factory=list[tuple[list[Piece], list[Piece]]])
    last: dict[int, int] = field(default_factory=dict[int, int])  # by leaf, the round that sends its last piece

    def __post_init__(self) -> None:
        for number, pieces in enumerate(self.plan.rounds):
            send = sorted((p for p in pieces if p.source == self.rank), key=lambda p: p.target)
            receive = sorted((p for p in pieces if p.target == self.rank), key=lambda p: p.source)
            self.rounds.append((send, receive))
            self.last.update({p.leaf: number for p in send})

    def place(self, leaf: int) -> Tensor:
        """Return the target of a leaf; the first call allocates it and copies the part that this rank holds already."""
        if leaf in self.targets:
            return self.targets[leaf]
        what = self.plan.leaves[leaf]
        source = self.sources[leaf]
        before = grids(what.source, what.shape).get(self.rank)
        after = grids(what.target, what.shape).get(self.rank)
        assert before is None or source is not None, "a source is freed only after its target has been allocated"
        if source is not None and before == after and source.dtype == self.dtypes[leaf]:
            self.targets[leaf] = source if self.donate else _compat.clone(source)
            return self.targets[leaf]
        size = (0,) if after is None else boxes.grid_shape(after)
        target = self.targets[leaf] = _compat.fresh(size, self.dtypes[leaf], self.device)
        shared = None if before is None or after is None else boxes.overlap(before, after)
        if source is not None and shared is not None:
            _copy([(target[b], source[a]) for a, b, _ in boxes.overlap_slices(shared)])
        return target

    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Allocate two pairs of buffers, to send and to receive, large enough for every round."""
        sizes = [max((sum(p.bytes for p in both[way]) for both in self.rounds), default=0) for way in (0, 1)]
        make = [
            _compat.fresh((size,), torch.uint8, self.device) for _ in range(min(2, len(self.rounds))) for size in sizes
        ]
        return list(zip(make[::2], make[1::2], strict=True))

    def messages(
        self, number: int, buffer: Tensor, *, sends: bool
    ) -> tuple[list[Message], list[tuple[Tensor, Tensor]]]:
        """Return the messages of a round, and the (target, source) copies to make before sends or after receives."""
        # A part that is contiguous, and of the target dtype, is sent or received in place; others go through `buffer`.
        messages: list[Message] = []
        copies: list[tuple[Tensor, Tensor]] = []
        start = 0
        for piece in self.rounds[number][0 if sends else 1]:
            target = self.place(piece.leaf)
            x = self.sources[piece.leaf] if sends else target
            assert x is not None
            places = [(a if sends else b, dense) for a, b, dense in boxes.overlap_slices(piece.overlap)]
            view = x[places[0][0]]
            if len(places) > 1 or not view.is_contiguous() or view.dtype != self.dtypes[piece.leaf]:
                part = buffer[start : start + piece.bytes].view(self.dtypes[piece.leaf])
                view = part.view(boxes.overlap_shape(piece.overlap))
                pairs = [(view[dense], x[place]) for place, dense in places]
                copies += pairs if sends else [(to, of) for of, to in pairs]
                start += piece.bytes
            messages.append(Message(piece.target if sends else piece.source, piece.number, as_bytes(view)))
        return messages, copies

    def free(self, number: int) -> None:
        """Free donated sources whose last piece is in a round that has been packed; messages keep theirs alive."""
        if self.donate:
            for leaf, last in self.last.items():
                if last == number:
                    self.sources[leaf] = None

    def finish(self) -> list[Tensor]:
        """Return all targets; allocates those that received nothing."""
        result: list[Tensor] = []
        for leaf in range(len(self.plan.leaves)):
            result.append(self.place(leaf))
            if self.donate:
                self.sources[leaf] = None
        return result


def exchange(
    plan: Plan,
    sources: list[Tensor | None],
    dtypes: Sequence[torch.dtype],
    *,
    rank: int,
    group: Group,
    device: torch.device,
    donate: bool = False,
) -> list[Tensor]:
    """Move all leaves of a plan to their target shardings. Collective over its ranks."""
    # `sources` has local tensors, or None for leaves without a shard here; with `donate`, entries are set to None as
    # leaves are sent, and a tensor may be returned as its own target. Data is cast to the target dtype as it is packed.
    if checks_plans():
        check_routes(plan)
    run = _Run(plan, rank, dtypes, device, sources, donate)
    buffers = run.buffers()
    pending = done(lambda: None)
    copies: list[tuple[Tensor, Tensor]] = []
    for number in range(len(run.rounds)):
        packed, received = buffers[number % 2]
        sends, first = run.messages(number, packed, sends=True)
        _copy(first)
        run.free(number)
        # The previous round must be over before this one starts: its receive buffer is unpacked below, and the round
        # after this one packs into its send buffer.
        pending.wait()
        arrivals, later = run.messages(number, received, sends=False)
        pending = send_recv(sends, arrivals, group, device)
        _copy(copies)
        copies = later
    pending.wait()
    _copy(copies)
    return run.finish()


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    _compat.foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])
