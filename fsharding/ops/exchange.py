"""Runs a plan of routes: local copies, and one all-to-all of bytes a round, with the next round packed meanwhile.

In: the plan, this rank's local tensor of every leaf. Out: its local tensors in the target shardings, in new memory.
A target is allocated when its first piece is due, and a donated source is let go when its last piece has left.
Law: what is sent is what the plan says, byte for byte; every element of a target is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsharding import _compat, boxes
from fsharding.mesh import Group
from fsharding.ops import wire
from fsharding.routes import Piece, Plan, grids

__all__ = ["exchange"]


@dataclass
class _Run:
    """One execution on one rank.

    Attributes:
        plan: what to do.
        rank: this rank.
        dtypes: of the targets, by leaf.
        device: of all targets.
        sources: local tensors, None once they are let go.
        donate: whether sources may be let go or handed on.
        targets: what is there already of the result.
        mine: by round, the pieces to send and those to receive, by rank and then as in the plan.
        last: by leaf, the round in which its last piece leaves.
    """

    plan: Plan
    rank: int
    dtypes: Sequence[torch.dtype]
    device: torch.device
    sources: list[Tensor | None]
    donate: bool
    targets: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    mine: list[tuple[list[Piece], list[Piece]]] = field(default_factory=list[tuple[list[Piece], list[Piece]]])
    last: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        for number, pieces in enumerate(self.plan.rounds):
            send = sorted((p for p in pieces if p.source == self.rank), key=lambda p: p.target)
            receive = sorted((p for p in pieces if p.target == self.rank), key=lambda p: p.source)
            self.mine.append((send, receive))
            self.last.update({p.leaf: number for p in send})

    def place(self, leaf: int) -> Tensor:
        """The target of a leaf; the first call makes it and copies what this rank has already."""
        if leaf not in self.targets:
            self.targets[leaf] = self._make(leaf)
        return self.targets[leaf]

    def _make(self, leaf: int) -> Tensor:
        what, source = self.plan.leaves[leaf], self.sources[leaf]
        before = grids(what.source, what.shape).get(self.rank)
        after = grids(what.target, what.shape).get(self.rank)
        assert before is None or source is not None, "a source is let go after its target has been made"
        if source is not None and before == after and source.dtype == self.dtypes[leaf]:
            return source if self.donate else source.clone()
        size = (0,) if after is None else boxes.grid_shape(after)
        target = _compat.fresh(size, self.dtypes[leaf], self.device)
        shared = None if before is None or after is None else boxes.overlap(before, after)
        if source is not None and shared is not None:
            pairs = [(target[b], source[a]) for a, b, _ in boxes.overlap_slices(shared)]
            _compat.foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])
        return target

    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Two pairs of buffers to send and to receive, large enough for every round."""
        sizes = [max((sum(p.bytes for p in both[way]) for both in self.mine), default=0) for way in (0, 1)]
        count = min(2, len(self.mine))
        return [tuple(_compat.fresh((n,), torch.uint8, self.device) for n in sizes) for _ in range(count)]  # pyright: ignore[reportReturnType]

    def pack(self, number: int, buffer: Tensor) -> None:
        """Fills a buffer with what this rank sends in a round."""
        send, _ = self.mine[number]
        into: list[Tensor] = []
        out_of: list[Tensor] = []
        start = 0
        for piece in send:
            self.place(piece.leaf)
            source = self.sources[piece.leaf]
            assert source is not None
            view = self._view(buffer, start, piece)
            for a, _, dense in boxes.overlap_slices(piece.overlap):
                into.append(view[dense])
                out_of.append(source[a])
            start += piece.bytes
        _compat.foreach_copy_(into, out_of)
        self._let_go(number)

    def unpack(self, number: int, buffer: Tensor) -> None:
        """Puts what came in a round into its targets."""
        into: list[Tensor] = []
        out_of: list[Tensor] = []
        start = 0
        for piece in self.mine[number][1]:
            target, view = self.place(piece.leaf), self._view(buffer, start, piece)
            for _, b, dense in boxes.overlap_slices(piece.overlap):
                into.append(target[b])
                out_of.append(view[dense])
            start += piece.bytes
        _compat.foreach_copy_(into, out_of)

    def _view(self, buffer: Tensor, start: int, piece: Piece) -> Tensor:
        shape = boxes.overlap_shape(piece.overlap)
        assert shape is not None
        return buffer[start : start + piece.bytes].view(self.dtypes[piece.leaf]).view(shape)

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
    """Moves all leaves of a plan. Collective over its ranks.

    Args:
        plan: from `plan_routes`, the same on every rank.
        sources: this rank's local tensors; None where it holds nothing. Emptied as it goes when donated.
        dtypes: of the targets; what is sent has been cast already.
        rank: this process's global rank.
        group: with all ranks of the plan, in rank order.
        device: where targets and buffers live.
        donate: sources may be handed on or let go.

    Returns:
        Local tensors in the target shardings; of shape (0,) where this rank holds nothing.
    """
    run = _Run(plan, rank, dtypes, device, sources, donate)
    buffers = run.buffers()
    pending: tuple[int, Tensor, wire.Pending] | None = None
    for number, (send, receive) in enumerate(run.mine):
        assert group.process_group is not None, "one rank has nobody to send to"
        out = [sum(p.bytes for p in send if p.target == member) for member in group.ranks]
        come = [sum(p.bytes for p in receive if p.source == member) for member in group.ranks]
        packed, received = buffers[number % 2]
        run.pack(number, packed)
        if pending is not None:
            pending[2].wait()
        now = wire.exchange_bytes(packed[: sum(out)], received[: sum(come)], out, come, group.process_group)
        if pending is not None:
            run.unpack(*pending[:2])
        pending = number, received, now
    if pending is not None:
        pending[2].wait()
        run.unpack(*pending[:2])
    return run.finish()
