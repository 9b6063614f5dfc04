"""Moments in low precision: codes and scales between updates, widened a chunk at a time, rounded once after the update.

In: moments as a state has them, and a function that changes a chunk of them in float32. Out: the same, changed.
A leaf is taken in chunks that end on borders of blocks. Where a cut of the leaf goes through a block, the ranks that
have parts of it tell each other its largest magnitude before any of them rounds: these chunks are computed twice.
The second moment of Adam is kept as its root, which needs half of its range, and is rounded by key: by a decay of 5 %
a step its root loses less than half a step of e4m3, so that rounding to the nearest would hold it for ever. A root
above zero never becomes zero, since an update divides by it.
Law: codes and scales of an element follow from the whole leaf, the key and the step, never from who holds it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsharding import random, tree
from fsharding.calls import call_as
from fsharding.comm.codes import largest_over
from fsharding.formats import Blocks, codec
from fsharding.formats.codec import Scales
from fsharding.formats.philox import uniform_at
from fsharding.mesh.device_mesh import Mesh
from fsharding.optim.base import InitContext, UpdateContext, clone, like_leaf, new_zeros
from fsharding.optim.coded_moment import CodedMoment, carriers, is_coded, moment_leaves
from fsharding.optim.stacked import assigned_shardings, whole_shape
from fsharding.precision import wide
from fsharding.public import refuse_state
from fsharding.sharding import boxes
from fsharding.sharding.block_scales import has_codes, plan_scales
from fsharding.sharding.boxes import Box, Grid, Runs
from fsharding.sharding.named_sharding import NamedSharding, local_of
from fsharding.tree import Tree

__all__ = [
    "Chunk", "Leaf", "change_leaves", "change_moment", "chunk_size", "decoded", "init_moments", "leaves_of", "rebuilt",
    "rounds_by_key", "step_key", "write_param",
]  # fmt: skip

_CHUNK = 1 << 16
"""Elements that are widened at once: few enough for a core's cache."""


def step_key(context: UpdateContext, count: Tensor) -> Tensor:
    """The key by which an update rounds, int64[2]: that of the run, if the context has it, and the number of the step.

    Args:
        context: of the update.
        count: of updates so far, where the context has no step; the host does not read it.
    """
    key = torch.zeros(2, dtype=torch.int64) if context.key is None else context.key
    return random.fold_in_count(key, count if context.step is None else context.step)


# ----------------------------------------------------------------------------------------------------------- the leaves
def chunk_size(device: torch.device) -> int:
    """Elements that are widened at once on a device."""
    return _CHUNK if device.type == "cpu" else _CHUNK << 8


class Chunk(NamedTuple):
    """A part of a leaf that is widened at once.

    Attributes:
        box: of the whole leaf.
        place: of this rank's tensor.
        of_scales: the scales of its blocks, of this rank's.
    """

    box: Box
    place: tuple[slice, ...]
    of_scales: tuple[slice, ...]

    @property
    def start(self) -> tuple[int, int]:
        """Where it begins in the last two dims of the leaf."""
        return self.box[-2][0], self.box[-1][0]


@dataclass(frozen=True)
class Leaf:
    """Where this rank's part of a leaf is.

    Attributes:
        path: of the parameter.
        shape: of the whole leaf.
        block: rows and columns of a block; None for one without.
        grid: the index ranges of this rank; None if it holds nothing.
        of_scales: those of its scales.
        shared: axes over which ranks have parts of one block.
        mesh: of these.
    """

    path: str
    shape: tuple[int, ...]
    block: tuple[int, int] | None
    grid: Grid | None
    of_scales: Grid | None
    shared: tuple[str, ...]
    mesh: Mesh | None

    def chunks(self, limit: int) -> Iterator[Chunk]:
        """The part in chunks of at most so many elements, or of one block."""
        if self.grid is None:
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

    def noise(self, key: Tensor, role: str, box: Box, device: torch.device) -> Tensor:
        """The numbers in [0, 1) by which a part of it is rounded, for one of several uses."""
        stream = zlib.crc32(f"{role}.{self.path}".encode())
        drawn = uniform_at(key, stream, self.shape or (1,), [(r,) for r in box] or [((0, 1),)], device)
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


def leaves_of(moments: Tree, shardings: Tree = None) -> list[Leaf]:
    """Where this rank's parts of the leaves of a tree are.

    Args:
        moments: tree of tensors and of moments in low precision.
        shardings: of the parameters, such as `layout.main`; needed for leaves with explicit assignments.

    Raises:
        LayoutError: leaves with assignments that nobody tells; all of them are listed.
    """
    flat = moment_leaves(moments)
    held = carriers(moments)
    tensors = tree.leaves(held)
    paths = tree.paths(held)
    known = assigned_shardings(held, shardings)
    return [
        _leaf(path, whole_shape(x, sharding), sharding, m.format if is_coded(m) else None)
        for path, x, m, sharding in zip(paths, tensors, flat, known, strict=True)
    ]


def _leaf(path: str, shape: tuple[int, ...], sharding: NamedSharding | None, format: Blocks | None) -> Leaf:
    grid = boxes.grid_of(shape) if sharding is None else sharding.grid(shape)
    if format is None:
        return Leaf(path, shape, None, grid, None, (), None)
    if sharding is None:
        return Leaf(path, shape, format.sizes(shape), grid, boxes.grid_of(format.grid(shape)), (), None)
    scales = plan_scales(sharding, shape, format)
    of_scales = scales.sharding.grid(scales.shape)
    return Leaf(path, shape, format.sizes(shape), grid, of_scales, scales.shared, sharding.mesh)


def init_moments(
    params: Tree, moments: torch.dtype | Blocks | None, context: InitContext, *, root: bool = False
) -> Tree:
    """Zeros for every parameter, cut as it is.

    Args:
        params: tree of parameters.
        moments: the dtype or the format of the optimizer; None takes that of the context, or else float32 at least.
        context: of the init.
        root: with a format, the root of the moment is kept.

    Returns:
        Tensors; for leaves that are not too small, with a format, `CodedMoment`s.

    Raises:
        ArgumentError: a whole state is given in the place of parameters.
        LayoutError: with a format, leaves with assignments that nobody tells; all of them are listed.
    """
    call_as("opt.init", refuse_state, params)
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
        if sharding is None:
            scales = torch.full(held.grid(shape), none, dtype=held.scale_dtype, device=local.device)
        else:
            plan = plan_scales(sharding, shape, held)
            of_rank = plan.sharding.local_shape(plan.shape)
            scales = torch.full(of_rank, none, dtype=held.scale_dtype, device=local.device)
            scales = plan.sharding.to_dtensor(scales, plan.shape)
        return CodedMoment(like_leaf(x, new_zeros(local, torch.uint8)), scales, held, root)

    return tree.map(zeros, params, whole)


# ------------------------------------------------------------------------------------------------------------ an update
_Change = Callable[[int, Chunk, list[Tensor], bool], None]


def decoded(moment: Any, leaf: Leaf) -> Tensor:
    """This rank's part of a moment in float32 at least, whole; for tests and for looking at it.

    Args:
        moment: as the state has it.
        leaf: of `leaves_of`.
    """
    if not is_coded(moment):
        return local_of(moment).to(wide(moment.dtype))
    local = _Held(moment, donate=True)
    out = torch.empty(local.codes.shape, dtype=torch.float32, device=local.codes.device)
    for chunk in leaf.chunks(_CHUNK):
        out[chunk.place] = local.widened(leaf, chunk)
    return out


class _Held:
    """The local tensors of one moment while it is changed."""

    def __init__(self, moment: Any, *, donate: bool) -> None:
        self.moment, self.coded = moment, is_coded(moment)
        parts = (moment.codes, moment.scales) if self.coded else (moment,)
        self.codes, *rest = (local_of(x) if donate else clone(local_of(x)) for x in parts)
        self.scales = rest[0] if rest else self.codes

    def widened(self, leaf: Leaf, chunk: Chunk) -> Tensor:
        """A chunk of it in float32 at least, in new memory."""
        part = self.codes[chunk.place]
        if not self.coded:
            return part.to(wide(part.dtype), copy=True).contiguous()
        assert leaf.block is not None
        scales = Scales(self.scales[chunk.of_scales])
        x = codec.decode(part, scales, self.moment.format, block=leaf.block, start=chunk.start)
        return x.square_() if self.moment.root else x

    def amax(self, leaf: Leaf, chunk: Chunk, x: Tensor) -> Tensor:
        """The largest magnitudes of a new chunk in its blocks."""
        assert leaf.block is not None
        return codec.amaxes(x.sqrt() if self.moment.root else x, leaf.block, chunk.start)

    def rounded(
        self, leaf: Leaf, chunk: Chunk, x: Tensor, amax: Tensor | None, noise: Tensor | None, finite: Tensor | None
    ) -> None:
        """Writes a new chunk, or what was there where `finite` is false; and its scales, where none were given."""
        if not self.coded:
            self.codes[chunk.place].copy_(x)  # the kernel has left it as it was where it should be
            return
        assert leaf.block is not None
        format: Blocks = self.moment.format
        if self.moment.root:
            x = x.sqrt()
            format = format.with_rounding("keyed")
        scales = codec.scales_of(codec.amaxes(x, leaf.block, chunk.start) if amax is None else amax, format)
        codes = codec.encode(x, scales, format, block=leaf.block, start=chunk.start, noise=noise)
        if self.moment.root:
            codes = torch.where((codes == 0) & (x > 0), 1, codes)
        _write(self.codes[chunk.place], codes, finite)
        if amax is None:
            _write(self.scales[chunk.of_scales], scales.blocks, finite)

    def keyed(self) -> bool:
        """Whether it is rounded by key."""
        return self.coded and (self.moment.root or self.moment.format.keyed)

    def result(self) -> Any:
        """The moment as the state has it."""
        if not self.coded:
            return like_leaf(self.moment, self.codes)
        codes = like_leaf(self.moment.codes, self.codes)
        scales = like_leaf(self.moment.scales, self.scales)
        return replace(self.moment, codes=codes, scales=scales)


def _write(held: Tensor, new: Tensor, finite: Tensor | None) -> None:
    held.copy_(new if finite is None else torch.where(finite, new, held))


def change_leaves(
    leaves: Sequence[Leaf],
    columns: Sequence[Sequence[Any]],
    change: _Change,
    *,
    roles: Sequence[str],
    key: Callable[[], Tensor],
    donate: bool = False,
    finite: Tensor | None = None,
) -> list[list[Any]]:
    """Changes moments a chunk at a time. Collective where a block is on several ranks.

    Args:
        leaves: where they are.
        columns: for each kind of moment those of the leaves: tensors or `CodedMoment`s.
        change: gets the number of a leaf, a chunk, and the chunk of each of its moments in float32 at least, which it
            overwrites; and whether it is only a trial, in which it may overwrite nothing else.
        roles: names of the kinds, which their rounding depends on.
        key: gives the key of the step, for what is rounded by it.
        donate: the moments may be overwritten.
        finite: bool, 0-d: codes and scales stay as they are where it is false.

    Returns:
        The new columns.
    """
    held = [[_Held(m, donate=donate) for m in column] for column in columns]
    known = _shared_amaxes(leaves, held, change)
    drawn: list[Tensor] = []
    for i, leaf in enumerate(leaves):
        of_leaf = [column[i] for column in held]
        for chunk in leaf.chunks(chunk_size(of_leaf[0].codes.device)):
            parts = [m.widened(leaf, chunk) for m in of_leaf]
            change(i, chunk, parts, False)
            for k, (m, x) in enumerate(zip(of_leaf, parts, strict=True)):
                noise = None
                if m.keyed():
                    drawn = drawn or [key()]
                    noise = leaf.noise(drawn[0], roles[k], chunk.box, x.device)
                amax = known[i, k][chunk.of_scales] if (i, k) in known else None
                m.rounded(leaf, chunk, x, amax, noise, finite)
        # Not before: other chunks are still widened with the old ones. And a rank has the scales of all blocks, also
        # of those that only others have parts of.
        for k, m in enumerate(of_leaf):
            if (i, k) in known:
                _write(m.scales, codec.scales_of(known[i, k], m.moment.format).blocks, finite)
    return [[m.result() for m in column] for column in held]


def _shared_amaxes(
    leaves: Sequence[Leaf], held: Sequence[Sequence[_Held]], change: _Change
) -> dict[tuple[int, int], Tensor]:
    """The largest magnitudes of all blocks of leaves whose cuts go through blocks, after a trial of the update."""
    own: dict[tuple[int, int], Tensor] = {}
    for i, leaf in enumerate(leaves):
        of_leaf = [column[i] for column in held]
        if not leaf.shared or not any(m.coded for m in of_leaf):
            continue
        for k, m in enumerate(of_leaf):
            if m.coded:
                own[i, k] = torch.zeros(m.scales.shape, dtype=torch.float32, device=m.scales.device)
        for chunk in leaf.chunks(chunk_size(of_leaf[0].codes.device)):
            parts = [m.widened(leaf, chunk) for m in of_leaf]
            change(i, chunk, parts, True)
            for k, (m, x) in enumerate(zip(of_leaf, parts, strict=True)):
                if m.coded:
                    here = own[i, k][chunk.of_scales]
                    here.copy_(torch.maximum(here, m.amax(leaf, chunk, x)))
    for mesh in dict.fromkeys(leaf.mesh for leaf in leaves if leaf.shared):
        assert mesh is not None
        of_mesh = [at for at in own if leaves[at[0]].mesh == mesh]
        values = largest_over([own[at] for at in of_mesh], [leaves[i].shared for i, _ in of_mesh], mesh)
        own |= dict(zip(of_mesh, values, strict=True))
    return own


def change_moment(
    moments: Tree,
    context: UpdateContext,
    count: Tensor,
    change: Callable[[int, Chunk, Tensor], None],
) -> Tree:
    """Changes the only moments that an optimizer has, as `change_leaves`.

    Args:
        moments: tree of tensors and of moments in low precision.
        context: of the update.
        count: of updates so far.
        change: gets the number of a leaf, a chunk, and the chunk of its moment in float32 at least, which it
            overwrites; it may be called twice for a chunk.
    """
    (new,) = change_leaves(
        leaves_of(moments, context.shardings),
        [moment_leaves(moments)],
        lambda i, chunk, parts, _: change(i, chunk, parts[0]),
        roles=("mu",),
        key=lambda: step_key(context, count),
        donate=context.donate,
    )
    return rebuilt(moments, new)


def rounds_by_key(params: Tree, context: UpdateContext) -> bool:
    """Whether an update rounds some of these parameters by key."""
    return context.rounding == "keyed" and any(x.dtype == torch.bfloat16 for x in tree.leaves(params))


def write_param(
    param: Tensor, new: Tensor, context: UpdateContext, leaf: Leaf, chunk: Chunk, key: Callable[[], Tensor]
) -> None:
    """Writes new values over a chunk of a parameter, rounded as the context says.

    Args:
        param: what is overwritten.
        new: its values in float32 at least.
        context: of the update.
        leaf: of the chunk.
        chunk: which it is.
        key: gives the key of the step.
    """
    if context.rounding == "keyed" and param.dtype == torch.bfloat16:
        new = codec.to_bfloat16(new.to(torch.float32), leaf.noise(key(), "main", chunk.box, new.device))
    _write(param, new.to(param.dtype), context.finite)  # a NaN that stays has the bits that it had


def rebuilt(moments: Tree, new: Sequence[Any]) -> Tree:
    """A tree of other moments in the place of those of a tree, in order."""
    return tree.unflatten(tree.flatten(moments, is_leaf=is_coded)[1], list(new))
