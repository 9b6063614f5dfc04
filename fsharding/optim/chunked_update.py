"""Update moments in low precision: decode a chunk at a time, update it in float32, and round it once, by key."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding.base import tree
from fsharding.base.dtypes import wide
from fsharding.base.public import refuse_state
from fsharding.base.tree import Tree
from fsharding.comm.codes import largest_over
from fsharding.comm.redistribute import in_buckets
from fsharding.formats import Blocks, codec
from fsharding.formats.codec import Scales
from fsharding.formats.philox import coarse_uniform_at, uniform_at
from fsharding.mesh.device_mesh import Mesh
from fsharding.optim.base import InitContext, UpdateContext, like_leaf, new_zeros
from fsharding.optim.coded_moment import CodedMoment, MomentType, carriers, is_coded, moment_leaves
from fsharding.optim.stacked import assigned_shardings, whole_shape
from fsharding.sharding import boxes, random
from fsharding.sharding.block_scales import has_codes, plan_scales
from fsharding.sharding.boxes import Box, Grid, Runs
from fsharding.sharding.named_sharding import NamedSharding, local_of

__all__ = [
    "ROLES", "Batch", "Chunk", "ChunkedLeaf", "Part", "change_chunks", "chunk_size", "init_moments",
    "leaf_of", "leaves_of", "local_leaf", "round_moment", "round_whole_moment", "rounds_by_key", "rounds_moments",
    "step_key", "write_param",
]  # fmt: skip

_CHUNK = 1 << 16
"""Elements that are widened at once: few enough for a core's cache."""

ROLES = ("mu", "nu", "xi", "pi")
"""What the rounding of the first, second, ... moment depends on besides key, step and place."""


def step_key(context: UpdateContext, count: Tensor) -> Tensor:
    """Return the key by which an update rounds, int64[2]: of the run and the step. The host reads no count."""
    key = torch.zeros(2, dtype=torch.int64) if context.key is None else context.key
    return random.fold_in_count(key, count if context.step is None else context.step)


# ----------------------------------------------------------------------------------------------------------- the leaves
def chunk_size(device: torch.device) -> int:
    """Elements that are widened at once on a device."""
    return _CHUNK if device.type == "cpu" else _CHUNK << 8


class Chunk(NamedTuple):
    """A part of a leaf that is decoded at once."""

    box: Box  # of the full leaf
    place: tuple[slice, ...]  # of this rank's tensor
    of_scales: tuple[slice, ...]  # of this rank's scales

    @property
    def start(self) -> tuple[int, int]:
        """Where it begins in the last two dims of the leaf."""
        return self.box[-2][0], self.box[-1][0]

    def of(self, x: Tensor) -> Tensor:
        """The part of this rank's tensor that it is: the tensor itself where it is all of it."""
        return x[self.place] if self.place else x


@dataclass(frozen=True)
class ChunkedLeaf:
    """Where this rank's shard of a leaf is."""

    path: str
    shape: tuple[int, ...]  # of the full leaf
    block: tuple[int, int] | None  # rows and columns; None without blocks
    grid: Grid | None  # index ranges of this rank; None if it holds nothing
    of_scales: Grid | None = None  # the same for its scales
    shared: tuple[str, ...] = ()  # axes over which ranks share a block
    mesh: Mesh | None = None

    def chunks(self, limit: int) -> Iterator[Chunk]:
        """The part in chunks of at most so many elements, or of one block."""
        if self.grid is None:
            return
        if self.block is None and all(len(runs) == 1 for runs in self.grid):
            box = tuple(runs[0] for runs in self.grid)
            if 0 < boxes.volume(box) <= limit:  # The usual small leaf, of which a model may have thousands.
                yield Chunk(box, (), ())
                return
        factors = (*(1,) * (len(self.shape) - 2), *(self.block or (1, 1)))[-len(self.shape) or None :]
        for box, place in boxes.grid_boxes(self.grid):
            for part in _split(box, factors, limit):
                here = tuple(
                    slice(p.start + a - start, p.start + b - start)
                    for (a, b), (start, _), p in zip(part, box, place, strict=True)
                )
                of_scales = () if self.of_scales is None else tuple(
                    _within(runs, a // f, -(-b // f))
                    for (a, b), f, runs in zip(part, factors, self.of_scales, strict=True)
                )  # fmt: skip
                yield Chunk(part, here, of_scales)

    def noise(self, key: Tensor, role: str, box: Box, device: torch.device, *, coarse: bool = False) -> Tensor:
        """The numbers in [0, 1) by which a part is rounded, for one of several uses; coarse ones are 2^-16 apart."""
        # Coarse numbers take a tenth of the time. The stream of a use follows from names, never from an order.
        stream = zlib.crc32(f"{role}.{self.path}".encode())
        shape = self.shape or (1,)
        if coarse:
            drawn = coarse_uniform_at(key, stream, shape, box or ((0, 1),), device)
        else:
            drawn = uniform_at(key, stream, shape, [(r,) for r in box] or [((0, 1),)], device)
        return drawn if box else drawn.view(())


def _split(box: Box, factors: Sequence[int], limit: int, dim: int = 0) -> Iterator[Box]:
    """A box in parts of at most so many elements or of one block, cut on multiples of the factors, first dims first."""
    size = boxes.volume(box)
    if size <= limit or dim == len(box):
        if size:
            yield box
        return
    (start, stop), factor = box[dim], factors[dim]
    step = max(limit // (size // (stop - start)) // factor, 1) * factor
    bounds = [start, *range(start // factor * factor + step, stop, step), stop]
    for part in itertools.pairwise(bounds):
        yield from _split((*box[:dim], part, *box[dim + 1 :]), factors, limit, dim + 1)


def _within(runs: Runs, start: int, stop: int) -> slice:
    """Where a range is in some runs that are laid end to end."""
    ((at, _, length),) = boxes.meet(runs, ((start, stop),))
    return slice(at, at + length)


def leaves_of(moments: Tree, shardings: Tree = None) -> list[ChunkedLeaf]:
    """Return where this rank's shards of the leaves of a tree are; assignments need `shardings`."""
    held = carriers(moments)
    known = assigned_shardings(held, shardings)
    rows = zip(tree.paths(held), tree.leaves(held), moment_leaves(moments), known, strict=True)
    return [
        leaf_of(path, whole_shape(x, sharding), sharding, m.format if is_coded(m) else None)
        for path, x, m, sharding in rows
    ]


@functools.lru_cache(maxsize=1024)
def local_leaf(shape: torch.Size) -> ChunkedLeaf:
    """A local tensor as a leaf of its own, for what is neither in blocks nor rounded by key."""
    return ChunkedLeaf("", tuple(shape), None, boxes.grid_of(shape))


def leaf_of(
    path: str, shape: tuple[int, ...], sharding: NamedSharding | None, format: Blocks | None = None
) -> ChunkedLeaf:
    """Where this rank's part of a leaf is; shape and sharding are of the whole leaf."""
    grid = boxes.grid_of(shape) if sharding is None else sharding.grid(shape)
    if format is None or sharding is None:
        block = None if format is None else format.sizes(shape)
        return ChunkedLeaf(path, shape, block, grid, None if format is None else boxes.grid_of(format.grid(shape)))
    scales = plan_scales(sharding, shape, format)
    of_scales = scales.sharding.grid(scales.shape)
    return ChunkedLeaf(path, shape, format.sizes(shape), grid, of_scales, scales.shared, sharding.mesh)


def init_moments(params: Tree, moments: MomentType, context: InitContext, *, root: bool = False) -> Tree:
    """Return zeros for every parameter in its sharding: tensors, or `CodedMoment`s of leaves that are not too small."""
    refuse_state(params)
    held = moments or context.moments
    if not isinstance(held, Blocks):
        return tree.map(lambda x: like_leaf(x, new_zeros(local_of(x), held or wide(x.dtype))), params)
    known = iter(assigned_shardings(params, context.shardings))
    whole = tree.prune(context.whole, params) if context.whole is not None else params

    def zeros(x: Tensor, of_whole: Tensor) -> Any:
        sharding = next(known)
        local = local_of(x)
        shape = whole_shape(x, sharding) if of_whole is x else tuple(of_whole.shape)
        if not has_codes(shape):
            return like_leaf(x, new_zeros(local, wide(x.dtype)))
        none = 0 if held.scale == "e8m0" else 1.0  # of a block of zeros
        plan = None if sharding is None else plan_scales(sharding, shape, held)
        of_rank = held.grid(shape) if plan is None else plan.sharding.local_shape(plan.shape)
        scales = torch.full(of_rank, none, dtype=held.scale_dtype, device=local.device)
        scales = scales if plan is None else plan.sharding.to_dtensor(scales, plan.shape)
        return CodedMoment(like_leaf(x, new_zeros(local, torch.uint8)), scales, held, root)

    return tree.map(zeros, params, whole)


# ------------------------------------------------------------------------------------------------------------ an update
Batch: TypeAlias = list[tuple[int, Chunk]]
"""Chunks that are computed together, each with the number of its leaf."""

_Change: TypeAlias = Callable[[Batch, list[list[Tensor]], bool], None]

Kind: TypeAlias = tuple[torch.dtype, torch.device]
"""In what a leaf is computed, and where."""


class Part(NamedTuple):
    """A leaf on this rank, for one update: where it lies, what is written, and what is read."""

    leaf: ChunkedLeaf
    result: Tensor
    grad: Tensor
    moments: list[Any]  # tensors, and moments in low precision; all are overwritten
    kind: Kind


_CodedMoments: TypeAlias = "dict[tuple[str, int], _Coded]"
"""By role and number of the leaf."""


class _Coded:
    """The local tensors of a moment in low precision, which are overwritten."""

    def __init__(self, moment: CodedMoment, *, stochastic: bool = True) -> None:
        self.root = moment.root  # of a second moment: a root needs half of its range
        self.codes = local_of(moment.values)
        self.scales = local_of(moment.scales)
        self.format = moment.format.with_rounding("stochastic") if stochastic or moment.root else moment.format

    def widened(self, leaf: ChunkedLeaf, chunk: Chunk) -> Tensor:
        """A chunk of it in float32, in new memory."""
        assert leaf.block is not None
        scales = Scales(self.scales[chunk.of_scales])
        x = codec.decode(chunk.of(self.codes), scales, self.format, block=leaf.block, start=chunk.start)
        return x.square_() if self.root else x

    def amax(self, leaf: ChunkedLeaf, chunk: Chunk, x: Tensor) -> Tensor:
        """The largest magnitudes of a new chunk in its blocks."""
        assert leaf.block is not None
        return codec.amaxes(x.sqrt() if self.root else x, leaf.block, chunk.start)

    def scales_of(self, amax: Tensor) -> Scales:
        """Return scales with which no value of a block exceeds the largest number of the format."""
        # The usual powers of two let up to 1/8 exceed it; the largest value of a block would then stop growing.
        element = self.format.element
        room = 2.0 ** (element.exponent + 1) / element.largest if self.format.scale == "e8m0" else 1.0
        return codec.scales_of(amax * room, self.format)

    def rounded(
        self,
        leaf: ChunkedLeaf,
        chunk: Chunk,
        x: Tensor,
        amax: Tensor | None,
        noise: Tensor | None,
        finite: Tensor | None,
    ) -> None:
        """Writes a new chunk, or what was there where `finite` is false; and its scales, where none were given."""
        assert leaf.block is not None
        if self.root:
            x = x.sqrt()
        scales = self.scales_of(codec.amaxes(x, leaf.block, chunk.start) if amax is None else amax)
        codes = codec.encode(x, scales, self.format, block=leaf.block, start=chunk.start, noise=noise)
        if self.root:
            # An update divides by a root, so one above zero must not become zero.
            codes = torch.where((codes == 0) & (x > 0), 1, codes)
        _write(chunk.of(self.codes), codes, finite)
        if amax is None:
            _write(self.scales[chunk.of_scales], scales.blocks, finite)


def _write(held: Tensor, new: Tensor, finite: Tensor | None) -> None:
    held.copy_(new if finite is None else torch.where(finite, new, held))


def change_chunks(
    parts: Sequence[Part],
    change: _Change,
    *,
    key: Callable[[], Tensor],
    stochastic: bool = True,
    finite: Tensor | None = None,
) -> None:
    """Change moments in place, some chunks at a time. Collective if a block is on several ranks."""
    # `change` gets chunks of one kind, the moments of each to overwrite, and whether this is a trial, in which it
    # overwrites nothing else. Roots, and formats that say so, are rounded by key whatever `stochastic` is.
    columns = zip(*(part.moments for part in parts), strict=True)
    coded = {
        (role, i): _Coded(m, stochastic=stochastic)
        for role, column in zip(ROLES, columns, strict=False)
        for i, m in enumerate(column)
        if is_coded(m)
    }
    known = _shared_amaxes(parts, coded, change)
    for batch in _batches(parts, range(len(parts))):
        wider = _widened(batch, parts, coded)
        change(batch, wider, False)
        for at, chunk, x in _of_coded(batch, wider, coded):
            leaf = parts[at[1]].leaf
            noise = leaf.noise(key(), at[0], chunk.box, x.device) if coded[at].format.stochastic else None
            amax = known[at][chunk.of_scales] if at in known else None
            coded[at].rounded(leaf, chunk, x, amax, noise, finite)
    # Not before: other chunks are still widened with the old ones. And a rank has the scales of all blocks, also of
    # those that only others have parts of.
    for at, amax in known.items():
        _write(coded[at].scales, coded[at].scales_of(amax).blocks, finite)


def _batches(parts: Sequence[Part], of: Iterable[int]) -> Iterator[Batch]:
    """The chunks of some leaves, of one kind in each batch and of about as many elements as fit into a cache."""
    members: dict[Kind, list[int]] = {}
    for i in of:
        members.setdefault(parts[i].kind, []).append(i)
    for (_, device), numbers in members.items():
        limit = chunk_size(device)
        chunks = ((i, chunk) for i in numbers for chunk in parts[i].leaf.chunks(limit))
        yield from in_buckets(chunks, lambda part: boxes.volume(part[1].box), limit)


def _widened(batch: Batch, parts: Sequence[Part], coded: _CodedMoments) -> list[list[Tensor]]:
    """The chunks of all moments: decoded, or views of what is stored."""

    def widened(role: str, k: int, i: int, chunk: Chunk) -> Tensor:
        leaf, moment = parts[i].leaf, parts[i].moments[k]
        return coded[role, i].widened(leaf, chunk) if (role, i) in coded else chunk.of(moment)

    roles = ROLES[: len(parts[0].moments)]
    return [[widened(role, k, i, chunk) for i, chunk in batch] for k, role in enumerate(roles)]


def _of_coded(
    batch: Batch, columns: list[list[Tensor]], coded: _CodedMoments
) -> Iterator[tuple[tuple[str, int], Chunk, Tensor]]:
    """Those chunks of a batch that were decoded."""
    for role, column in zip(ROLES, columns if coded else (), strict=False):
        for (i, chunk), x in zip(batch, column, strict=True):
            if (role, i) in coded:
                yield (role, i), chunk, x


def _shared_amaxes(parts: Sequence[Part], coded: _CodedMoments, change: _Change) -> dict[tuple[str, int], Tensor]:
    """The largest magnitudes of all blocks of leaves whose cuts go through blocks, after a trial of the update."""
    own = {
        at: torch.zeros(m.scales.shape, dtype=torch.float32, device=m.scales.device)
        for at, m in coded.items()
        if parts[at[1]].leaf.shared
    }
    for batch in _batches(parts, dict.fromkeys(i for _, i in own)):
        wider = [[x.clone() for x in column] for column in _widened(batch, parts, coded)]
        change(batch, wider, True)
        for at, chunk, x in _of_coded(batch, wider, coded):
            here = own[at][chunk.of_scales]
            here.copy_(torch.maximum(here, coded[at].amax(parts[at[1]].leaf, chunk, x)))
    # A rank takes part for every mesh on which leaves share blocks, in the order of the leaves, which all ranks have.
    for mesh in dict.fromkeys(part.leaf.mesh for part in parts if part.leaf.shared):
        assert mesh is not None
        of_mesh = [at for at in own if parts[at[1]].leaf.mesh == mesh]
        values = largest_over([own[at] for at in of_mesh], [parts[i].leaf.shared for _, i in of_mesh], mesh)
        own |= dict(zip(of_mesh, values, strict=True))
    return own


def rounds_by_key(params: Iterable[Tensor], context: UpdateContext) -> bool:
    """Whether an update rounds some of these parameters by key."""
    return context.rounding == "stochastic" and any(x.dtype == torch.bfloat16 for x in params)


def rounds_moments(moments: Iterable[Any], context: UpdateContext) -> bool:
    """Whether an update rounds some of these moments by key: all that are below float32, unless it is turned off."""
    return context.rounding != "nearest" and any(is_coded(x) or x.dtype in _NARROW for x in moments)


# An update changes a moment by less than half of a last bit, which rounding to nearest would lose at every step.
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
    """Round a chunk of a moment to the dtype in which it is kept, by key if that is below float32."""
    if dtype not in _NARROW or new.dtype == dtype or context.rounding == "nearest":
        return new.to(dtype)
    return codec.round_stochastic(new.float(), dtype, leaf.noise(key(), role, chunk.box, new.device, coarse=True))


def round_whole_moment(
    new: Tensor, dtype: torch.dtype, context: UpdateContext, leaf: ChunkedLeaf, role: str, key: Callable[[], Tensor]
) -> Tensor:
    """Round all of this rank's part of a moment, as `round_moment` rounds a chunk."""
    result = new.to(dtype)
    for chunk in leaf.chunks(chunk_size(new.device)) if rounds_moments([result], context) else ():
        chunk.of(result).copy_(round_moment(chunk.of(new), dtype, context, leaf, role, chunk, key))
    return result


def write_param(
    param: Tensor, new: Tensor, context: UpdateContext, leaf: ChunkedLeaf, chunk: Chunk, key: Callable[[], Tensor]
) -> None:
    """Write new values over a chunk of a parameter, rounded as the context says."""
    if context.rounding == "stochastic" and param.dtype == torch.bfloat16:
        new = codec.round_stochastic(new.float(), param.dtype, leaf.noise(key(), "main", chunk.box, new.device))
    _write(param, new.to(param.dtype), context.finite)  # a NaN that stays has the bits that it had
