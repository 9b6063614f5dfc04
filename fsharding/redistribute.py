"""Moves the leaves of a tree between shardings that differ along data axes: slices and gathers, in buckets.

In: DTensors and a tree of `NamedSharding`s on the same mesh. Out: DTensors in those shardings, maybe in another dtype.
This is how gradients meet the optimizer's shard and how updated shards become parameters again.
Law: only bytes move; a value is never computed, but for the cast that was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding import tree
from fsharding.errors import LayoutError, message
from fsharding.mesh import is_member
from fsharding.ops import transition
from fsharding.ops.transition import Step
from fsharding.sharding import local_of, sharding_of
from fsharding.tree import Tree

__all__ = ["BUCKET_BYTES", "redistribute"]

BUCKET_BYTES = 32 << 20
"""Largest bucket of whole leaves that is gathered at once; a larger leaf travels alone."""


class _Move(NamedTuple):
    index: int
    local: Tensor
    steps: tuple[Step, ...]
    wholes: tuple[int, ...]
    bytes: int


def redistribute(values: Tree, shardings: Tree, *, dtypes: Tree = None) -> Tree:
    """The same values elsewhere.

    Args:
        values: tree of DTensors; plain tensors stay where they are. Nothing may be partial.
        shardings: tree of `NamedSharding`; None leaves a leaf as it is.
        dtypes: tree of dtypes of the result; None keeps a leaf's own.

    Returns:
        The tree in its new shardings; slices are views of the input, everything else is new.

    Raises:
        LayoutError: a leaf would have to move along an axis that is not a data axis, or between meshes.
        TreeError: the trees do not match.
    """
    leaves, spec = tree.flatten(values)
    targets = tree.flatten_up_to(spec, shardings, "fs.redistribute")
    kinds = tree.flatten_up_to(spec, dtypes, "fs.redistribute") if dtypes is not None else [None] * len(leaves)
    result: list[Any] = list(leaves)
    groups: dict[tuple[Any, Any, torch.dtype], list[_Move]] = {}
    wrong: list[str] = []
    for i, (path, leaf) in enumerate(zip(tree.paths(values), leaves, strict=True)):
        if not isinstance(leaf, DTensor) or targets[i] is None:
            result[i] = leaf if kinds[i] is None else leaf.to(kinds[i])
            continue
        source, target = sharding_of(leaf), targets[i].simplified()
        if not is_member(target.mesh):
            result[i] = target.at_rest(local_of(leaf).to(kinds[i] or leaf.dtype), tuple(leaf.shape))
            continue
        if target.assigned:
            # On the slices of the mesh that own the leaf, it is cut as any other.
            source, target = replace(source, mesh=target.mesh), target.slice_of_mesh()
        steps = transition.plan_steps(source, target)
        moves_more = any(axis not in source.data_axes for step in steps for axis in step.axes)
        if source.mesh != target.mesh or source.owned != target.owned or source.partial or moves_more:
            wrong.append(f"{path}: from {source} to {target}")
            continue
        local = local_of(leaf) if kinds[i] is None else local_of(leaf).to(kinds[i])
        shape = tuple(leaf.shape)
        size = math.prod(target.local_shape(shape)) * local.element_size()
        move = _Move(i, local, steps, transition.whole_sizes(source, steps, shape), size)
        groups.setdefault((source.mesh, transition.kinds(steps), local.dtype), []).append(move)
    if wrong:
        text = "moves reduced leaves along data axes of one mesh only."
        raise LayoutError(message("fs.redistribute", text, wrong))
    for (mesh, route, _), moves in groups.items():
        for batch in _batches(moves) if route else [moves]:
            moved = transition.move([m.local for m in batch], [m.steps for m in batch], mesh, [m.wholes for m in batch])
            for m, local in zip(batch, moved, strict=True):
                result[m.index] = targets[m.index].simplified().at_rest(local, tuple(leaves[m.index].shape))
    return tree.unflatten(spec, result)


def _batches(moves: Sequence[_Move]) -> Iterator[list[_Move]]:
    batch: list[_Move] = []
    for move in moves:
        if batch and sum(m.bytes for m in batch) + move.bytes > BUCKET_BYTES:
            yield batch
            batch = []
        batch.append(move)
    if batch:
        yield batch
