"""Run a plan of routes: local copies, and one exchange of messages per round, while the next round is packed.

Guarantee: what is sent is what the plan says, byte for byte; every element of a target is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm.handles import done
from fsharding.comm.native import Message, as_bytes
from fsharding.comm.reshard_plan import Piece, Plan, grids
from fsharding.comm.transport import send_recv
from fsharding.mesh.device_mesh import Group
from fsharding.sharding import boxes

__all__ = ["exchange"]


@dataclass
class _Run:
    """One execution on one rank."""

    plan: Plan  # what to do
    rank: int  # this rank
    dtypes: Sequence[torch.dtype]  # of the targets, by leaf
    device: torch.device  # of all targets
    sources: list[Tensor | None]  # local tensors, None once they are let go
    donate: bool  # whether sources may be let go or handed on
    targets: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # what is there already of the result
    # of each, the pieces to send and those to receive, by rank and then as in the plan
    rounds: list[tuple[list[Piece], list[Piece]]] = field(default_factory=list[tuple[list[Piece], list[Piece]]])
    last: dict[int, int] = field(default_factory=dict[int, int])  # by leaf, the round in which its last piece leaves

    def __post_init__(self) -> None:
        for number, pieces in enumerate(self.plan.rounds):
            send = sorted((p for p in pieces if p.source == self.rank), key=lambda p: p.target)
            receive = sorted((p for p in pieces if p.target == self.rank), key=lambda p: p.source)
            self.rounds.append((send, receive))
            self.last.update({p.leaf: number for p in send})

    def place(self, leaf: int) -> Tensor:
        """The target of a leaf; the first call makes it and copies what this rank has already."""
        if leaf not in self.targets:
            self.targets[leaf] = self._make(leaf)
        return self.targets[leaf]

    def _make(self, leaf: int) -> Tensor:
        what = self.plan.leaves[leaf]
        source = self.sources[leaf]
        before = grids(what.source, what.shape).get(self.rank)
        after = grids(what.target, what.shape).get(self.rank)
        assert before is None or source is not None, "a source is let go after its target has been made"
        if source is not None and before == after and source.dtype == self.dtypes[leaf]:
            return source if self.donate else _compat.clone(source)
        size = (0,) if after is None else boxes.grid_shape(after)
        target = _compat.fresh(size, self.dtypes[leaf], self.device)
        shared = None if before is None or after is None else boxes.overlap(before, after)
        if source is not None and shared is not None:
            pairs = [(target[b], source[a]) for a, b, _ in boxes.overlap_slices(shared)]
            _compat.foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])
        return target

    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Two pairs of buffers to send and to receive, large enough for every round."""
        sizes = [max((sum(p.bytes for p in both[way]) for both in self.rounds), default=0) for way in (0, 1)]
        make = [
            _compat.fresh((size,), torch.uint8, self.device) for _ in range(min(2, len(self.rounds))) for size in sizes
        ]
        return list(zip(make[::2], make[1::2], strict=True))

    def pack(self, number: int, buffer: Tensor) -> list[Message]:
        """This rank's messages of a round: parts of its sources as they lie, or copies in the buffer."""
        messages: list[Message] = []
        copies: list[tuple[Tensor, Tensor]] = []
        start = 0
        for piece in self.rounds[number][0]:
            self.place(piece.leaf)
            source = self.sources[piece.leaf]
            assert source is not None
            places = boxes.overlap_slices(piece.overlap)
            view = source[places[0][0]]
            if len(places) > 1 or not view.is_contiguous() or view.dtype != self.dtypes[piece.leaf]:
                view = self._view(buffer, start, piece)
                copies += [(view[dense], source[a]) for a, _, dense in places]
                start += piece.bytes
            messages.append(Message(piece.target, piece.number, as_bytes(view)))
        _compat.foreach_copy_([to for to, _ in copies], [of for _, of in copies])
        self._let_go(number)
        return messages

    def unpack(self, number: int, buffer: Tensor) -> tuple[list[Message], list[tuple[Tensor, Tensor]]]:
        """Where the pieces of a round arrive, in their targets or in the buffer, and the copies to make afterwards."""
        messages: list[Message] = []
        copies: list[tuple[Tensor, Tensor]] = []
        start = 0
        for piece in self.rounds[number][1]:
            target = self.place(piece.leaf)
            places = boxes.overlap_slices(piece.overlap)
            view = target[places[0][1]]
            if len(places) > 1 or not view.is_contiguous():
                view = self._view(buffer, start, piece)
                copies += [(target[b], view[dense]) for _, b, dense in places]
                start += piece.bytes
            messages.append(Message(piece.source, piece.number, as_bytes(view)))
        return messages, copies

    def _view(self, buffer: Tensor, start: int, piece: Piece) -> Tensor:
        part = buffer[start : start + piece.bytes]
        return part.view(self.dtypes[piece.leaf]).view(boxes.overlap_shape(piece.overlap))

    def _let_go(self, number: int) -> None:
        if self.donate:
            for leaf, last in self.last.items():
                if last == number:
                    self.sources[leaf] = None

    def finish(self) -> list[Tensor]:
        """All targets, also those that nothing was sent for."""
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
    """Move all leaves of a plan to tensors in the target shardings. Collective over its ranks, in rank order."""
    # `sources`: local tensors, None where this rank holds nothing; emptied on the way if `donate`, when they may be
    # handed on. What is sent is cast to the target dtype while it is packed.
    run = _Run(plan, rank, dtypes, device, sources, donate)
    buffers = run.buffers()
    pending = done(lambda: None)
    copies: list[tuple[Tensor, Tensor]] = []
    for number in range(len(run.rounds)):
        packed, received = buffers[number % 2]
        sends = run.pack(number, packed)
        pending.wait()
        arrivals, later = run.unpack(number, received)
        pending = send_recv(sends, arrivals, group, device)
        _compat.foreach_copy_([to for to, _ in copies], [of for _, of in copies])
        copies = later
    pending.wait()
    _compat.foreach_copy_([to for to, _ in copies], [of for _, of in copies])
    return run.finish()
