"""Send leaves as quantized values and block scales; `Quantizing` is the wire.

Guarantee: quantizing shards and gathering them gives the bytes of quantizing the gathered leaf, for every sharding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsharding.base import _compat
from fsharding.base._compat import cache_on_mesh
from fsharding.comm.coded_sums import is_packed, quantized_terms
from fsharding.comm.counters import record_sent
from fsharding.comm.handles import Works
from fsharding.comm.reduce import SumLayout
from fsharding.comm.wires import CutLeaves, Draw, Parts, WholeLeaf
from fsharding.formats import codec
from fsharding.formats.blocks import Blocks
from fsharding.formats.codec import Scales
from fsharding.formats.quantized import Quantized
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import Mesh, abstract, axis_group
from fsharding.mesh.failures import among
from fsharding.sharding import boxes
from fsharding.sharding.named_sharding import NamedSharding

__all__ = ["Quantizing", "largest_of_ranks", "largest_over"]

# Elements of a stack that are dequantized at a time, so that intermediate float32 values stay in caches.
_DECODED = 1 << 20


class CodePlan(NamedTuple):
    """How one leaf is quantized and sent. Rows and columns refer to its last two dims."""

    format: Blocks
    block: tuple[int, int]  # rows and columns of a block
    grid: tuple[int, int]  # rows and columns of blocks of the full leaf
    start: tuple[int, int]  # offset of this rank's shard
    held: tuple[int, ...]  # shape of this rank's shard
    whole_start: tuple[int, int]  # offset of the gathered leaf
    whole: tuple[int, ...]  # shape of the gathered leaf
    shared: tuple[str, ...]  # axes along which ranks hold parts of one block
    outer: tuple[str, ...]  # axes along which ranks hold parts of one matrix, if the format has a scale per matrix
    sends_scales: bool  # scales of blocks are gathered; otherwise every rank has computed all of them
    sends_outer: bool  # scales of matrices are gathered
    packed: bool  # two 4-bit values share a byte


@cache_on_mesh(1024)
def plan_codes(
    mesh: Mesh,
    sharding: NamedSharding,
    whole: NamedSharding,
    shape: tuple[int, ...],
    format: Blocks,
) -> CodePlan:
    """Plan how a leaf of at least two dims is quantized; `whole` is its gathered sharding, or the same one."""
    # A block whose elements are on several ranks needs one scale. These ranks are along the axes in `shared`: they
    # all-reduce its amax, after which each has the scales of all blocks, and none is sent. Otherwise scales are
    # gathered like values, as long as shards of scales have the borders of shards of values.
    assert len(shape) > 1 and not sharding.assigned, "a leaf is quantized on the slice of the mesh that holds it"
    sizes = abstract(mesh)
    last = len(shape) - 2
    block = format.sizes(shape)
    rows = format.grid(shape)
    held = sharding.local_shape(shape)
    kept = whole.local_shape(shape)
    shared: list[str] = []
    for dim in (0, 1):
        axes = sharding.axes(last + dim)
        if not boxes.ends_on(shape[last + dim], tuple(map(sizes.axis_size, axes)), block[dim]):
            shared += axes
    gathered, over_axes = _gathered_dim(sharding, whole, len(shape))
    over = tuple(map(sizes.axis_size, over_axes))
    whole_start = _start(whole, shape)
    if gathered is not None and gathered >= last and not boxes.ends_on(kept[gathered], over, block[gathered - last]):
        shared += sharding.axes(gathered)
    outer = [*sharding.axes(last), *sharding.axes(last + 1)] if format.has_outer else []
    packed = is_packed(format, kept, gathered, over)
    return CodePlan(
        format, block, (rows[-2], rows[-1]), _start(sharding, shape), held, whole_start, kept, _in_order(shared),
        _in_order(outer), not {*over_axes} & {*shared}, gathered is not None and gathered < last, packed,
    )  # fmt: skip


def _in_order(axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if axis in axes)


def _start(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the offset of this rank's shard in the last two dims."""
    grid = sharding.grid(shape)
    return (0, 0) if grid is None else (grid[-2][0][0], grid[-1][0][0])


def _gathered_dim(sharding: NamedSharding, whole: NamedSharding, ndim: int) -> tuple[int | None, tuple[str, ...]]:
    """Return the dim along which a leaf is gathered, at most one, and the axes of the gather."""
    for dim in range(ndim):
        if gone := tuple(axis for axis in sharding.axes(dim) if axis not in whole.axes(dim)):
            return dim, gone
    return None, ()


def _places(plan: CodePlan, shape: Sequence[int], start: tuple[int, int]) -> tuple[slice, slice]:
    """Return the indices of the blocks of the full leaf that a part of it touches."""
    ends = zip(start, shape[-2:], plan.block, strict=True)
    rows, columns = (slice(*codec.touched(s, n, b)) for s, n, b in ends)
    return rows, columns


# ------------------------------------------------------------------------------------------------------------- rounding
def _amaxes(plan: CodePlan, shard: Tensor) -> Tensor:
    """Return the amax of each block that a shard touches; if ranks share blocks, of all blocks, 0 elsewhere."""
    own = codec.amaxes(shard, plan.block, plan.start)
    if not plan.shared:
        return own
    every = own.new_zeros(*plan.held[:-2], *plan.grid)
    every[(..., *_places(plan, plan.held, plan.start))] = own
    return every


def _here(plan: CodePlan, scales: Scales, shape: Sequence[int], start: tuple[int, int]) -> Scales:
    """Select the scales of the blocks that a part touches, if `scales` has those of all blocks."""
    if not plan.shared:
        return scales
    return Scales(scales.blocks[(..., *_places(plan, shape, start))], scales.outer)


def largest_over(values: Sequence[Tensor], axes: Sequence[tuple[str, ...]], mesh: Mesh) -> list[Tensor]:
    """All-reduce (max) tensors of non-negative numbers, with one collective for all tensors with the same axes."""
    # All ranks must pass the same `axes` in the same order. Max is exact in any order, so scales that each rank derives
    # from the result are equal, and no scale has to be sent. Host tensors are copied to the device first.
    result = list(values)
    for over in dict.fromkeys(a for a in axes if a):
        taken = [i for i, a in enumerate(axes) if a == over]
        flat = torch.cat([result[i].reshape(-1) for i in taken])
        device = flat.device
        for group in (axis_group(mesh, (axis,)) for axis in over):
            if group.process_group is not None and flat.numel():
                assert isinstance(mesh, DeviceMesh)
                record_sent(2 * (group.size - 1) * -(-flat.numel() // group.size) * 4, group.axes)
                flat = largest_of_ranks(flat.to(mesh.device_type), group.ranks, group.process_group)
        flat = flat.to(device)
        sizes = [result[i].numel() for i in taken]
        for i, part in zip(taken, flat.split(sizes), strict=True):
            result[i] = part.view(result[i].shape)
    return result


def largest_of_ranks(x: Tensor, ranks: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce (max) float32 numbers that are not negative over the ranks of a group; None is the group of all."""
    # Compared as integers, since that keeps the order of non-negative floats and makes NaN the largest: gloo's max of
    # floats would drop NaN.
    bits = x.contiguous().view(torch.int32)
    with among(ranks):
        work = dist.all_reduce(bits, dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None
    Works((work,), (bits,), (tuple(ranks),)).wait()
    return bits.view(torch.float32)


def _received(plan: CodePlan, parts: Sequence[Tensor], given: Scales) -> tuple[Tensor, Scales]:
    """Return the values, packed if they have 4 bits, and scales of a gathered leaf; scales not sent are `given`."""
    rest = iter(parts)
    values = next(rest)
    if plan.format.element.bits == 4 and not plan.packed:
        values = codec.pack(values)
    if plan.sends_scales:
        blocks = next(rest).contiguous().view(plan.format.scale_dtype).squeeze(-1)
    else:
        blocks = _here(plan, given, plan.whole, plan.whole_start).blocks
    outer = given.outer
    if plan.sends_outer and outer is not None:
        outer = next(rest).contiguous().view(torch.float32).squeeze(-1)
    return values, Scales(blocks, outer)


def _decode(plan: CodePlan, values: Tensor, scales: Scales, into: Tensor) -> Tensor:
    """Dequantize the result of `_received` into a tensor of any dtype, some matrices of a stack at a time."""
    if plan.format.element.bits == 4:
        values = codec.unpack(values, plan.whole[-1])
    count, step = plan.whole[0], max(1, _DECODED // max(1, math.prod(plan.whole[1:])))
    at_once = len(plan.whole) <= 2 or step >= count
    for some in [...] if at_once else [slice(first, first + step) for first in range(0, count, step)]:
        outer = None if scales.outer is None else scales.outer[some]
        part = Scales(scales.blocks[some], outer)
        into[some].copy_(
            codec.decode(values[some], part, plan.format, into.dtype, block=plan.block, start=plan.whole_start)
        )
    return into


# ------------------------------------------------------------------------------------------------------------- the wire
@dataclass(frozen=True)
class Quantizing:
    """The wire that sends a leaf or a term as quantized values and block scales."""

    dtype: torch.dtype  # dtype of dequantized leaves, and of terms before they are quantized
    format: Blocks
    stays: bool = False  # whether a gathered leaf stays quantized
    strict: bool = False  # see `Quantized`

    @property
    def native(self) -> bool:
        """See `Wire`: no backend adds quantized values."""
        return False

    def parts(self, shape: tuple[int, ...], source: NamedSharding, target: NamedSharding, dim: int) -> Parts:
        """See `Wire`: the values, and those scales of blocks and matrices that not all ranks have computed."""
        plan = plan_codes(source.mesh, source, target, shape, self.format)
        shapes = [plan.format.code_shape(plan.whole, packed=plan.packed)]
        if plan.sends_scales:
            blocks = (place.stop - place.start for place in _places(plan, plan.whole, plan.whole_start))
            shapes.append((*plan.whole[:-2], *blocks, plan.format.scale_dtype.itemsize))
        if plan.sends_outer and plan.format.has_outer:
            shapes.append((*plan.whole[:-2], 4))
        size = sum(map(math.prod, shapes)) + (math.prod(plan.whole) if plan.packed else 0)  # values are unpacked
        sent = tuple((part, dim) for part in shapes)
        return Parts(sent, torch.uint8, size, None if self.stays else plan.whole, plan)

    @torch.no_grad()
    def agree(self, parts: Sequence[Parts], shards: Sequence[Tensor], mesh: Mesh) -> Sequence[Scales]:
        """See `Wire`: the scales of the blocks that each shard touches; of all blocks if ranks share one."""
        plans: list[CodePlan] = [p.plan for p in parts]
        amaxes = [_amaxes(plan, shard) for plan, shard in zip(plans, shards, strict=True)]
        amaxes = largest_over(amaxes, [plan.shared for plan in plans], mesh)
        with_outer = [i for i, plan in enumerate(plans) if plan.format.has_outer]
        of_matrix = [codec.of_matrices(amaxes[i]) for i in with_outer]
        outer = dict(zip(with_outer, largest_over(of_matrix, [plans[i].outer for i in with_outer], mesh), strict=True))
        pairs = enumerate(zip(plans, amaxes, strict=True))
        return [codec.scales_of(amax, plan.format, outer.get(i)) for i, (plan, amax) in pairs]

    @torch.no_grad()
    def encode(self, parts: Parts, shard: Tensor, agreed: Scales, noise: Draw | None) -> list[Tensor]:
        """See `Wire`: the bytes of values, and of the scales that are sent."""
        plan: CodePlan = parts.plan
        here = _here(plan, agreed, plan.held, plan.start)
        drawn = noise() if plan.format.stochastic and noise is not None else None
        values = codec.encode(shard, here, plan.format, block=plan.block, start=plan.start, noise=drawn)
        sent = [codec.pack(values) if plan.packed else values]
        if plan.sends_scales:
            sent.append(codec.as_bytes(here.blocks))
        if plan.sends_outer and here.outer is not None:
            sent.append(codec.as_bytes(here.outer))
        return sent

    def decode(self, parts: Parts, received: Sequence[Tensor], agreed: Scales, out: Tensor | None) -> WholeLeaf:
        """See `Wire`."""
        plan: CodePlan = parts.plan
        values, (scales, outer) = _received(plan, received, agreed)
        if out is not None:
            return _decode(plan, values, Scales(scales, outer), out)
        own = [None if x is None else _own(x, received) for x in (values, scales, outer)]
        start = (plan.whole_start[0] % plan.block[0], plan.whole_start[1] % plan.block[1])
        return Quantized(
            own[0], own[1], plan.format, self.dtype, plan.block, plan.whole[-1], own[2], start=start,
            strict=self.strict,
        )  # fmt: skip

    def terms(self, leaves: CutLeaves, axis_sizes: tuple[int, ...], *, scatter: bool) -> SumLayout:
        """See `Wire`."""
        return quantized_terms(leaves, axis_sizes, self.format, scatter=scatter)


def _own(x: Tensor, received: Sequence[Tensor]) -> Tensor:
    """Return a tensor that fills its storage, unless it views the received tensors."""
    # `Move` keeps the storage as one more flat buffer of the unit, so the tensor must be contiguous and begin at 0.
    if _compat.storage_id(x) == _compat.storage_id(received[0]):
        return x
    return x.contiguous() if x.storage_offset() == 0 else x.clone()
