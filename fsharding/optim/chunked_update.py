"""Update narrow moments: decode a chunk at a time, update it in float32, and round it once, stochastically."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding.base import _compat, tree
from fsharding.base.dtypes import wide
from fsharding.base.errors import LayoutError
from fsharding.base.public import refuse_state
from fsharding.base.tree import Tree
from fsharding.comm.codes import largest_over
from fsharding.comm.redistribute import in_buckets
from fsharding.formats import codec
from fsharding.optim.base import WIDE, InitContext, UpdateContext, clone, refuse_other_shards
from fsharding.optim.chunks import Chunk, ChunkedLeaf, chunk_size, like_leaf, local_leaf, new_zeros, overwrite
from fsharding.optim.coded_moment import CodedChunks, MomentType, carrier_of, carriers, coded_zeros, leaves_of
from fsharding.optim.stacked import assigned_shardings, whole_shape
from fsharding.sharding import boxes, random
from fsharding.sharding.named_sharding import local_of

__all__ = [
    "ROLES", "Kernel", "Step", "init_moments", "round_whole_moment", "rounds_by_key", "rounds_moments", "run_rule",
    "step_key", "write_param", "zeros_of",
]  # fmt: skip

ROLES = ("mu", "nu", "xi", "pi")
"""Names of the first, second, ... moment: their stochastic rounding depends on these, key, step and index."""

Kernel: TypeAlias = Callable[..., list[Tensor]]
"""`kernel(values, grads, *moments, step) -> values`, on lists of tensors of one dtype for each leaf, float32 at least.

Moments and values are overwritten; values are parameters, or zeros for an update alone. A kernel without values returns
updates. Gradients may be overwritten only if `step.scale` isn't 1.
"""


class Step(NamedTuple):
    """The scalars of one update."""

    count: Tensor  # earlier updates: int64, 0-d
    number: Tensor  # count + 1: float32, 0-d, on the device of the leaves
    rate: float | Tensor
    decay: float = 0.0  # weight decay of the values
    scale: float | Tensor = 1.0  # factor of the gradients
    finite: Tensor | None = None  # bool, 0-d: nothing is updated if it is false


def step_key(context: UpdateContext, count: Tensor) -> Tensor:
    """Return the key of an update's stochastic rounding, int64[2], from run and step. The host reads no count."""
    key = torch.zeros(2, dtype=torch.int64) if context.key is None else context.key
    return random.fold_in_count(key, count if context.step is None else context.step)


def init_moments(params: Tree, moments: MomentType, context: InitContext, *, root: bool = False) -> Tree:
    """Return zeros for every parameter in its sharding: tensors, or moments in low precision of larger leaves."""
    refuse_state(params)
    held = moments or context.moments
    if held is None or isinstance(held, torch.dtype):
        return tree.map(lambda x: like_leaf(x, new_zeros(local_of(x), held or wide(x.dtype))), params)
    known = iter(assigned_shardings(params, context.shardings))
    whole = tree.prune(context.whole, params) if context.whole is not None else params

    def zeros(x: Tensor, of_whole: Tensor) -> Any:
        sharding = next(known)
        shape = whole_shape(x, sharding) if of_whole is x else tuple(of_whole.shape)
        return coded_zeros(x, shape, sharding, held, root=root)

    return tree.map(zeros, params, whole)


# ------------------------------------------------------------------------------------------------------------ an update
Kind: TypeAlias = tuple[torch.dtype, torch.device]
"""The dtype and device in which a leaf is computed."""


class Part(NamedTuple):
    """A leaf on this rank, for one update: its place, the output, and the inputs."""

    leaf: ChunkedLeaf
    result: Tensor
    grad: Tensor
    moments: list[Tensor | CodedChunks]  # all are overwritten
    kind: Kind


Batch: TypeAlias = list[tuple[Part, Chunk]]
"""Chunks of one kind that are computed together."""


def _batches(parts: Sequence[Part]) -> Iterator[Batch]:
    """Group chunks of leaves by kind, in batches of about as many elements as fit into a cache."""
    for kind in dict.fromkeys(part.kind for part in parts):
        limit = chunk_size(kind[1])
        chunks = ((part, chunk) for part in parts if part.kind == kind for chunk in part.leaf.chunks(limit))
        yield from in_buckets(chunks, lambda member: boxes.volume(member[1].box), limit)


def _widened(moment: Tensor | CodedChunks, chunk: Chunk) -> Tensor:
    return moment.widened(chunk) if isinstance(moment, CodedChunks) else chunk.of(moment)


def _share_maxima(parts: Sequence[Part]) -> None:
    """All-reduce (max) the magnitudes of blocks that ranks share."""
    # One exchange per mesh, in the order of the leaves, which is the same on all ranks.
    for mesh in dict.fromkeys(part.leaf.mesh for part in parts):
        assert mesh is not None
        coded = [m for part in parts if part.leaf.mesh == mesh for m in part.moments if isinstance(m, CodedChunks)]
        maxima = largest_over([m.largest for m in coded], [m.leaf.shared for m in coded], mesh)
        for m, largest in zip(coded, maxima, strict=True):
            m.largest = largest


def rounds_by_key(params: Iterable[Tensor], context: UpdateContext) -> bool:
    """Return whether an update rounds some of these parameters stochastically."""
    return context.rounding == "stochastic" and any(x.dtype == torch.bfloat16 for x in params)


def rounds_moments(moments: Iterable[Any], context: UpdateContext) -> bool:
    """Return whether an update rounds some of these moments stochastically: those narrower than float32, by default."""
    return context.rounding != "nearest" and any(not isinstance(x, Tensor) or x.dtype in _NARROW for x in moments)


# An update may change a moment by less than half its last bit, which rounding to nearest would lose at every step.
_NARROW = (torch.bfloat16, torch.float16)


def round_moment(
    new: Tensor,
    dtype: torch.dtype,
    context: UpdateContext,
    leaf: ChunkedLeaf,
    role: str,
    chunk: Chunk,
    key: Callable[[], Tensor],
) -> Tensor:
    """Round a chunk of a moment to its storage dtype, stochastically if that is narrower than float32."""
    if dtype not in _NARROW or new.dtype == dtype or context.rounding == "nearest":
        return new.to(dtype)
    return codec.round_stochastic(new.float(), dtype, leaf.noise(key(), role, chunk.box, new.device, coarse=True))


def round_whole_moment(
    new: Tensor, dtype: torch.dtype, context: UpdateContext, leaf: ChunkedLeaf, role: str, key: Callable[[], Tensor]
) -> Tensor:
    """Round all of this rank's shard of a moment, as `round_moment` rounds a chunk."""
    result = new.to(dtype)
    for chunk in leaf.chunks(chunk_size(new.device)) if rounds_moments([result], context) else ():
        chunk.of(result).copy_(round_moment(chunk.of(new), dtype, context, leaf, role, chunk, key))
    return result


def write_param(
    param: Tensor, new: Tensor, context: UpdateContext, leaf: ChunkedLeaf, chunk: Chunk, key: Callable[[], Tensor]
) -> None:
    """Write new values over a chunk of a parameter, rounded as the context requires."""
    if context.rounding == "stochastic" and param.dtype == torch.bfloat16:
        new = codec.round_stochastic(new.float(), param.dtype, leaf.noise(key(), "main", chunk.box, new.device))
    overwrite(param, new.to(param.dtype), context.finite)  # a kept NaN keeps its bits


def _run_on_chunks(
    kernel: Kernel, step: Step, parts: Sequence[Part], context: UpdateContext, *, in_place: bool, copied: bool
) -> None:
    """Run a kernel on copies of chunks, and round its results: values in place, or updates into zeros."""
    # Collective if a block is on several ranks, which need one scale: a trial finds its largest magnitude first. It
    # overwrites nothing. A rank then writes the scales of all blocks, including blocks that only other ranks have
    # parts of, and not before all chunks are updated: others are decoded with the old scales.
    key = functools.cache(lambda: step_key(context, step.count))

    def run(batch: Batch, *, trial: bool) -> None:
        dtype = batch[0][0].kind[0]
        old = [chunk.of(part.result) for part, chunk in batch]
        values = [x.to(dtype, copy=trial).contiguous() for x in old] if in_place else None
        grads = [chunk.of(part.grad).to(dtype, copy=trial or copied).contiguous() for part, chunk in batch]
        # By moment: its chunks, decoded or views of stored tensors.
        stored = [*zip(*([_widened(m, chunk) for m in part.moments] for part, chunk in batch), strict=True)]
        wider = [[x.to(dtype, copy=trial).contiguous() for x in column] for column in stored]
        new = kernel(values, grads, *wider, step)
        for k, (role, before, after) in enumerate(zip(ROLES, stored, wider, strict=False)):
            changed: list[tuple[Tensor, Tensor]] = []
            for (part, chunk), x, y in zip(batch, before, after, strict=True):
                m = part.moments[k]
                if isinstance(m, CodedChunks):
                    m.note(chunk, y.float()) if trial else m.write(chunk, y.float(), role, key, step.finite)
                elif x is not y and not trial:
                    changed.append((x, round_moment(y, x.dtype, context, part.leaf, role, chunk, key)))
            _compat.foreach_copy_([x for x, _ in changed], [y for _, y in changed])
        for (part, chunk), x, y in zip(batch, old, new, strict=True) if not trial else ():
            if not in_place:
                x.copy_(y)
            elif x is not y:
                write_param(x, y, context, part.leaf, chunk, key)

    shared = [part for part in parts if part.leaf.shared]
    for batch in _batches(shared):
        run(batch, trial=True)
    _share_maxima(shared)
    for batch in _batches(parts):
        run(batch, trial=False)
    for part in shared:
        for m in part.moments:
            if isinstance(m, CodedChunks):
                m.write_scales(step.finite)


# ----------------------------------------------------------------------------------------------------- a rule on leaves
def run_rule(
    kernel: Kernel,
    step: Step,
    values: list[Tensor] | None,
    grads: list[Tensor],
    moments: Sequence[list[Any]],
    home: Tree,
    context: UpdateContext,
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Run a kernel on this rank's shards of all leaves, in place. Collective if ranks share a block of a moment."""
    # The kernel takes dense float32 and float64 leaves as they are, all at once. Strided or narrower leaves are copied
    # and rounded chunk by chunk, so wide moments of all leaves never exist at once.
    kept = moments if values is None else [values, *moments]
    copied = not context.donate and (isinstance(step.scale, Tensor) or step.scale != 1.0)  # a kernel scales in place
    try:
        if _alike([grads, *kept]):
            return kernel(values, [*map(clone, grads)] if copied else grads, *moments, step)
    except LayoutError:
        # Nothing has changed yet. This check names the leaves.
        _refuse_other_shards(values, grads, moments, home)
        raise
    _refuse_other_shards(values, grads, moments, home)
    kinds: list[Kind] = []
    for g, *leaf in zip(grads, *kept, strict=True):
        stored = tuple(x.dtype if isinstance(x, Tensor) else torch.float32 for x in leaf)
        kinds.append((_computed_in(stored) or g.dtype, g.device))
    ready = [
        all(isinstance(x, Tensor) and x.dtype == kind[0] and x.is_contiguous() for x in leaf)
        for kind, leaf in zip(kinds, zip(grads, *kept, strict=True), strict=True)
    ]
    result = dict(enumerate(values or ()))
    for kind in dict.fromkeys(kinds):
        direct = [i for i, other in enumerate(kinds) if ready[i] and other == kind]
        if direct:
            given = [clone(grads[i]) if copied else grads[i] for i in direct]
            parts = [[column[i] for i in direct] for column in moments]
            new = kernel(values and [values[i] for i in direct], given, *parts, step)
            result |= dict(zip(direct, new, strict=True))
    rest = [i for i, is_ready in enumerate(ready) if not is_ready]
    if rest:
        kept_moments = [column[i] for i in rest for column in moments]
        placed = not _all_tensors(kept_moments) or rounds_moments(kept_moments, context)
        placed = placed or (values is not None and rounds_by_key(values, context))
        leaves = leaves_of(home, context.shardings) if placed else [local_leaf(g.shape) for g in grads]
        if values is None:
            # 8-bit moments are computed in float32 even if the gradient is wider; the update has the gradient's width.
            wider = [kinds[i][0] if _all_tensors(m[i] for m in moments) else wide(g.dtype) for i, g in enumerate(grads)]
            result |= {i: new_zeros(grads[i], dtype or wider[i]) for i in rest}

        def chunked(moment: Any, leaf: ChunkedLeaf) -> Tensor | CodedChunks:
            stochastic = context.rounding != "nearest"
            return moment if isinstance(moment, Tensor) else CodedChunks(moment, leaf, stochastic=stochastic)

        parts = [
            Part(leaves[i], result[i], grads[i], [chunked(m[i], leaves[i]) for m in moments], kinds[i]) for i in rest
        ]
        _run_on_chunks(kernel, step, parts, context, in_place=values is not None, copied=copied)
    return [result[i] for i in range(len(grads))]


def _alike(columns: Sequence[Sequence[Any]]) -> bool:
    """Return whether a kernel takes all tensors as they are, in one call."""
    dtypes = {getattr(x, "dtype", None) for column in columns for x in column}
    if len(dtypes) != 1 or not dtypes <= WIDE or len({x.device for x in columns[0]}) != 1:
        return False
    return all(all(map(Tensor.is_contiguous, column)) for column in columns)


def _all_tensors(moments: Iterable[Any]) -> bool:
    """Return whether no moment has to be decoded, which is done in chunks and to float32."""
    return all(isinstance(x, Tensor) for x in moments)


@functools.lru_cache(maxsize=256)
def _computed_in(dtypes: tuple[torch.dtype, ...]) -> torch.dtype | None:
    """Return the dtype in which parameters and moments are updated; a gradient makes it no wider."""
    return functools.reduce(torch.promote_types, map(wide, dtypes)) if dtypes else None


def _refuse_other_shards(
    values: list[Tensor] | None, grads: list[Tensor], moments: Sequence[list[Any]], home: Tree
) -> None:
    named: dict[str, Sequence[Tensor]] = {} if values is None else {"parameters": values}
    named["gradients"] = grads
    for role, column in zip(ROLES, moments, strict=False):
        named[role] = [*map(carrier_of, column)]
    refuse_other_shards(carriers(home), named)


def zeros_of(moments: list[Any]) -> list[Tensor]:
    """Return zeros in the shapes of moments, in the dtype of the update: float32 if any has 8 bits."""
    plain = _all_tensors(moments)
    return [new_zeros(carrier_of(x), wide(x.dtype) if plain else torch.float32) for x in moments]
