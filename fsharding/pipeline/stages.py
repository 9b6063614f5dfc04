"""Placement in a pipeline: the layers of each stage, the embedding and head, and leaves that stages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base.dtypes import wide
from fsharding.base.errors import LayoutError, report
from fsharding.comm.native import Message, as_bytes
from fsharding.comm.reduce import sum_rows
from fsharding.comm.transport import send_recv
from fsharding.mesh.device_mesh import Group
from fsharding.models.stacks import stacks_of
from fsharding.pipeline.schedule import Schedule, layers_of
from fsharding.sharding.assigned import Owners, normal, stage_of
from fsharding.sharding.layout import Layout
from fsharding.sharding.leaf_names import begins
from fsharding.sharding.named_sharding import NamedSharding, like, local_of

__all__ = ["check_ends", "layers_by_coordinate", "layers_by_stage", "over_owners", "owners", "stages_of"]


def stages_of(model: Any, schedule: Schedule, *, counts: Sequence[int] | None = None) -> dict[str, Any]:
    """Assign the parts of a `Model` to pipeline coordinates, for `plan_layout(..., stages=stages_of(...))`.

    Several stacks are split as one: a stage may have the last blocks of one and the first of the next.

    Args:
        model: `Model` with stacks of equal blocks.
        schedule: Schedule, whose stages get the layers.
        counts: Number of layers of each stage, of all stacks together. Default: as even as possible.

    Returns:
        The `pp` coordinates of each part: a list of layers per coordinate for a stack, else a coordinate or several.

    Raises:
        ScheduleError: There are more stages than layers, or `counts` doesn't match.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)
        >>> model = fs.models.decoder(config)
        >>> fs.pipeline.stages_of(model, fs.pipeline.plan_schedule("1f1b", ranks=2, microbatches=2))
        {'blocks': [[0], [1]], 'embed': 0, 'head': 1}
    """
    with _compat.with_values():
        shapes = model.init(torch.zeros(2, dtype=torch.int64))
    sizes = {path: tree.leaves(tree.at(shapes, path))[0].shape[0] for path, _ in stacks_of(model)}
    first = schedule.owner[0]
    last = schedule.owner[-1]
    owners = _owned(schedule, sizes, layers_of(schedule, sum(sizes.values()), counts=counts))
    return {**owners, "embed": first, "head": last, **{path: sorted({first, last}) for _, path in model.tied}}


def _by_stack(sizes: Mapping[str, int], by_stage: Sequence[Sequence[int]]) -> dict[str, list[list[int]]]:
    """Return the layers of each stage by stack, numbered within the stack."""
    result: dict[str, list[list[int]]] = {}
    start = 0
    for path, size in sizes.items():
        result[path] = [[i - start for i in layers if start <= i < start + size] for layers in by_stage]
        start += size
    return result


def _owned(schedule: Schedule, sizes: Mapping[str, int], by_stage: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the layers of each stack on each coordinate of `pp`, in order of its stages."""
    return {
        path: [[i for stage in schedule.stages_on(rank) for i in layers[stage]] for rank in range(schedule.ranks)]
        for path, layers in _by_stack(sizes, by_stage).items()
    }


def layers_by_stage(model: Any, schedule: Schedule, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the number of layers that each stage has in a layout: by stage, then by stack."""
    paths = [path for path, _ in stacks_of(model)]
    sizes = {path: next(leaf.shape[0] for leaf in layout.leaves if begins(leaf.path, path)) for path in paths}
    held = {path: stage_of(layout.stages, path) for path in paths}
    layers = sum(sizes.values())
    even = layers_of(schedule, layers) if schedule.stages <= layers else ()
    # The layout has the layers of each coordinate. If a coordinate has several stages, several splits into stages give
    # the same layout, and the even one is preferred.
    for by_stage in (even, _in_order(schedule, sizes, held)):
        if by_stage and dict(normal(_owned(schedule, sizes, by_stage))) == held:
            stacks = _by_stack(sizes, by_stage).values()
            return tuple(tuple(len(layers[stage]) for layers in stacks) for stage in range(schedule.stages))
    there = f"stages of the schedule are on {schedule.owner}"
    rows = [f"{path} are on {owned or 'no stages'}; {there}" for path, owned in held.items()]
    raise _other_stages(schedule, rows)


def layers_by_coordinate(model: Any, layout: Layout, size: int) -> list[list[int]]:
    """Return the number of layers that each coordinate of `pp` has: by coordinate, then by stack."""
    counts: list[list[int]] = [[] for _ in range(size)]
    for path, _ in stacks_of(model):
        leaf = next(leaf for leaf in layout.leaves if begins(leaf.path, path))
        for pp, result in enumerate(counts):
            result.append(leaf.main.local_shape(leaf.shape, {"pp": pp})[0])
    return counts


def _in_order(
    schedule: Schedule, sizes: Mapping[str, int], held: Mapping[str, Owners | None]
) -> Sequence[Sequence[int]]:
    """Assign each layer to its owner's first stage from the previous layer's on; () if it has none."""
    by_stage: list[list[int]] = [[] for _ in range(schedule.stages)]
    stage = 0
    start = 0
    for path, size in sizes.items():
        owners = enumerate(held[path] or ())
        rank_of = {i: rank for rank, local in owners for i in (local if isinstance(local, tuple) else ())}
        for layer in range(size):
            stage = next((s for s in range(stage, schedule.stages) if schedule.owner[s] == rank_of.get(layer)), -1)
            if stage < 0:
                return ()
            by_stage[stage].append(start + layer)
        start += size
    return by_stage


def _other_stages(schedule: Schedule, rows: Sequence[str]) -> LayoutError:
    mend = "Plan the layout with stages=fs.pipeline.stages_of(model, schedule)."
    return LayoutError(report(f"train step needs a layout with the stages of {schedule!r}.", rows, mend))


def check_ends(model: Any, schedule: Schedule, layout: Layout) -> None:
    """Raise if the first stage lacks the embedding, or the last one the head or a tied leaf."""
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
    """Return the coordinates of `pp` that have a leaf or a part of it."""
    for owned in home.assigned:
        if owned.axis == "pp":
            return [c for c, ranges in enumerate(owned.ranges) if ranges]
    return [*range(size)]


def over_owners(grad: DTensor, home: NamedSharding, group: Group, rank: int) -> DTensor:
    """Sum the partial gradients of the coordinates of `pp` that share a leaf, in order of coordinates."""
    shared = owners(home, group.size)
    split = any(a.axis == "pp" and a.dim is not None for a in home.assigned) or "pp" in home.spec.all_axes
    if split or len(shared) == 1 or rank not in shared:
        return grad
    # Each owner receives the others' rows and adds all in one order, so that every copy gets the same bits.
    local = local_of(grad).contiguous()
    terms = local.new_empty(len(shared), local.numel())
    terms[shared.index(rank)].copy_(local.view(-1))
    others = [(i, group.ranks[c]) for i, c in enumerate(shared) if c != rank]
    sends = [Message(peer, 0, as_bytes(local)) for _, peer in others]
    receives = [Message(peer, 0, as_bytes(terms[i])) for i, peer in others]
    send_recv(sends, receives, group, local.device).wait()
    return like(grad, sum_rows(terms, range(len(shared)), wide(local.dtype)).to(local.dtype).view(local.shape))
