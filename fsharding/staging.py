"""Who has what in a pipeline: the layers of each stage, where embedding and head are, and leaves that stages share.

In: a schedule and a model, or a layout. Out: stages as `plan_layout` takes them, counts of layers, sums over owners.
Law: what a stage computes with is on its rank, and a leaf that two stages use has one gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsharding import tree
from fsharding.errors import LayoutError, message
from fsharding.layout import Layout
from fsharding.mesh import Group
from fsharding.ops import wire
from fsharding.precision import wide
from fsharding.schedule import Schedule, layers_of, stages_for
from fsharding.sharding import NamedSharding, like, local_of
from fsharding.stages import begins, normal, stage_of

__all__ = ["check_ends", "layers_by_stage", "over_owners", "owners", "stages_of"]


def stages_of(model: Any, schedule: Schedule, *, counts: Sequence[int] | None = None) -> dict[str, Any]:
    """Who owns what of a `Model` in a schedule, as `plan_layout` takes it: `plan_layout(..., stages=stages_of(...))`.

    Args:
        model: a `Model` with one stack of blocks.
        schedule: the schedule.
        counts: layers of each stage; by default as even as possible.

    Raises:
        ScheduleError: more stages than layers, or counts that do not fit.
    """
    shapes = model.init(torch.zeros(2, dtype=torch.int64))
    layers = tree.leaves(shapes["blocks"])[0].shape[0]
    first, last = schedule.owner[0], schedule.owner[-1]
    owners: dict[str, Any] = {"blocks": stages_for(schedule, layers, counts=counts), "embed": first, "head": last}
    return {**owners, **{path: sorted({first, last}) for _, path in model.tied}}


def layers_by_stage(schedule: Schedule, layout: Layout) -> tuple[int, ...]:
    """How many layers each stage has in a layout.

    Raises:
        LayoutError: the layers of the layout are not in the order of the schedule's stages.
    """
    owned = stage_of(layout.stages, "blocks")
    layers = next(leaf.shape[0] for leaf in layout.leaves if begins(leaf.path, "blocks"))
    if schedule.stages <= layers and normal({"blocks": stages_for(schedule, layers)})[0][1] == owned:
        return tuple(map(len, layers_of(schedule, layers)))
    rank_of = {i: rank for rank, mine in enumerate(owned or ()) for i in (mine if isinstance(mine, tuple) else ())}
    counts, stage = [0] * schedule.stages, 0
    for layer in range(layers):
        stage = next((s for s in range(stage, schedule.stages) if schedule.owner[s] == rank_of.get(layer)), -1)
        if stage < 0:
            break
        counts[stage] += 1
    if stage < 0 or normal({"blocks": stages_for(schedule, layers, counts=counts)})[0][1] != owned:
        rows = [f"blocks are on {owned or 'no stages'}, stages of the schedule on {schedule.owner}"]
        raise _other_stages(schedule, rows)
    return tuple(counts)


def _other_stages(schedule: Schedule, rows: Sequence[str]) -> LayoutError:
    mend = "Plan the layout with stages=fs.stages_of(model, schedule)."
    return LayoutError(message("train step", f"needs a layout with the stages of {schedule!r}.", rows, mend))


def check_ends(model: Any, schedule: Schedule, layout: Layout) -> None:
    """Refuses a layout whose first and last stages have not what they compute with."""
    tied = [path for _, path in model.tied]
    rows: list[str] = []
    for leaf in layout.leaves:
        wanted = {schedule.owner[0]} if begins(leaf.path, "embed") else set[int]()
        if begins(leaf.path, "head") or any(begins(leaf.path, path) for path in tied):
            wanted.add(schedule.owner[-1])
        if lacking := sorted(wanted - {*owners(leaf.main, schedule.ranks)}):
            rows.append(f"{leaf.path} is not on pp={', '.join(map(str, lacking))}")
    if rows:
        raise _other_stages(schedule, rows)


def owners(home: NamedSharding, size: int) -> list[int]:
    """The coordinates of `pp` that have a leaf, or a part of it."""
    for owned in home.assigned:
        if owned.axis == "pp":
            return [c for c, ranges in enumerate(owned.ranges) if ranges]
    return [*range(size)]


def over_owners(grad: DTensor, home: NamedSharding, group: Group, rank: int) -> DTensor:
    """Adds the gradients of the coordinates of `pp` that share a leaf, each of which has a term of its own."""
    shared = owners(home, group.size)
    cut = any(a.axis == "pp" and a.dim is not None for a in home.assigned) or "pp" in home.spec.all_axes
    if cut or len(shared) == 1 or rank not in shared:
        return grad
    mine = local_of(grad).contiguous()
    terms = mine.new_empty(len(shared), mine.numel())
    terms[shared.index(rank)].copy_(mine.view(-1))
    others = [(i, group.ranks[c]) for i, c in enumerate(shared) if c != rank]
    sends = [wire.Message(peer, 0, wire.as_bytes(mine)) for _, peer in others]
    receives = [wire.Message(peer, 0, wire.as_bytes(terms[i])) for i, peer in others]
    wire.exchange_messages(sends, receives, group).wait()
    return like(grad, wire.sum_rows(terms, range(len(shared)), wide(mine.dtype)).to(mine.dtype).view(mine.shape))
