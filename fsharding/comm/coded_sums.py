"""Sum gradients that are sent as quantized values and scales; the receiver dequantizes and adds them.

Guarantee: a sum has the bits of `comm.reduce` over terms that are quantized and dequantized first, for any sharding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.base.dtypes import wide
from fsharding.comm import bucket as buckets
from fsharding.comm.bucket import Bucket, plan_bucket
from fsharding.comm.handles import Rows
from fsharding.comm.reduce import Fill, Noise, SumLayout, copy_terms, sum_rows, sums_at_once
from fsharding.formats import codec
from fsharding.formats.blocks import Blocks
from fsharding.formats.codec import Scales
from fsharding.mesh.device_mesh import Group, index_of
from fsharding.sharding import boxes

__all__ = ["is_packed", "quantized_terms"]

# Elements of the terms of one leaf that are dequantized at a time.
_BLOCK = 1 << 20


class TermPlan(NamedTuple):
    """How the term of one leaf is quantized and sharded."""

    shape: tuple[int, ...]  # shape of the term, at least two dims
    dim: int  # the dim that is sharded over the members
    block: tuple[int, int]  # rows and columns of the blocks it is quantized in
    sent: tuple[int, int]  # rows and columns of the blocks for which scales are sent, so that no shard splits one
    packed: bool  # two 4-bit values share a byte
    parts: range  # indices of its slots: values, scales of blocks and, in some formats, scales of matrices


@dataclass(frozen=True, kw_only=True)
class QuantizedTerms(SumLayout):
    """Terms that are sent as quantized values and scales; a non-finite element makes its block NaN."""

    format: Blocks
    terms: tuple[TermPlan, ...]  # one for each leaf
    sent: Bucket  # the slots of a row: bytes of quantized values and scales

    def filling(self, own: Tensor, noise: Noise | None) -> Fill:
        # A leaf is added once, with its complete term, and quantized at that moment: a second term would be lost.
        assert (noise is not None) or not self.format.stochastic, self.format
        views = buckets.piece_views(own, self.sent, 0) if self.at_once else []

        def fill(leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
            for i, x in zip(leaves, terms, strict=True):
                places = self.terms[i].parts
                parts = [None] * len(places) if x is None else self._encoded(i, x, noise)
                if self.at_once:
                    copy_terms([views[j] for j in places], parts)
                else:
                    buckets.copy_in(parts, own, [self.sent.slots[j] for j in places])

        return fill

    @torch.no_grad()
    def _encoded(self, i: int, x: Tensor, noise: Noise | None) -> list[Tensor]:
        """Return the quantized values and scales of a term as bytes."""
        term = self.terms[i]
        format = self.format
        drawn = noise(i) if format.stochastic and noise is not None else None
        values, scales = codec.coded(x, format, block=term.block, noise=drawn)
        blocks = scales.blocks
        for place, dim in ((0, -2), (1, -1)):
            if (sent := term.sent[place]) != term.block[place]:
                count = -(-term.shape[dim] // sent)
                inside = torch.arange(count, device=x.device) * sent // term.block[place]
                blocks = blocks.index_select(dim, inside)
        result = [codec.pack(values) if term.packed else values, codec.as_bytes(blocks)]
        if scales.outer is not None:
            outer = codec.as_bytes(scales.outer)
            splits_matrices = term.dim >= len(term.shape) - 2
            result.append(outer.expand(self.sent.members, *outer.shape) if splits_matrices else outer)
        return result

    def sum(self, rows: Rows, group: Group, dtype: torch.dtype, into: Sequence[Tensor] | None) -> list[Tensor]:
        member = self._member(group)
        shapes = [slot.piece_shape(member) for slot in self.bucket.slots]
        outs = [_compat.fresh(shape, dtype, rows[0].device) for shape in shapes] if into is None else [*into]
        for i, out in enumerate(outs):
            self._sum(i, rows, group, out)
        return outs

    def sum_part(self, rows: Rows, group: Group, own: Tensor) -> None:
        for i, piece in enumerate(buckets.piece_views(own, self.bucket, self._member(group))):
            self._sum(i, rows, group, piece)

    def join(self, rows: Rows, into: Sequence[Tensor] | None) -> list[Tensor]:
        if into is None:
            into = buckets.whole_views(_compat.fresh((self.bucket.size,), rows[0].dtype, rows[0].device), self.bucket)
        return buckets.fill(rows, list(into), self.bucket)

    def _member(self, group: Group) -> int:
        """Return the index of the shards that this member adds; with `at_once` there is one shard."""
        return 0 if self.at_once else group.index

    def _sum(self, i: int, rows: Rows, group: Group, out: Tensor) -> None:
        """Compute the sum of this member's shard of a leaf."""
        among = wide(out.dtype)
        if out.numel() and out.dtype == among:
            self._add_terms(i, rows, group.terms, self._member(group), among, out.view(-1))
        elif out.numel():
            sums = self._add_terms(i, rows, group.terms, self._member(group), among, None)
            out.copy_(sums.view(out.shape))

    def _add_terms(
        self, i: int, rows: Rows, members: Sequence[int], piece: int, dtype: torch.dtype, out: Tensor | None
    ) -> Tensor:
        """Add the terms of some members in the tree of `sum_rows`, dequantizing a few at a time."""
        size = math.prod(self.bucket.slots[i].piece_shape(piece))
        if len(members) == 1 or len(members) * size <= _BLOCK:
            terms = self._decoded(i, rows, members, piece, dtype)
            return sum_rows(terms, range(len(members)), dtype, out=out, donate=True)
        half = 1 << ((len(members) - 1).bit_length() - 1)
        left = self._add_terms(i, rows, members[:half], piece, dtype, out)
        return left.add_(self._add_terms(i, rows, members[half:], piece, dtype, None))

    def _decoded(self, i: int, rows: Rows, members: Sequence[int], piece: int, dtype: torch.dtype) -> Tensor:
        """Dequantize the terms that some members sent for a shard of a leaf: [members, elements]."""
        term = self.terms[i]
        format = self.format
        parts = [self._part(rows, members, piece, j) for j in term.parts]
        values = parts[0]
        blocks = parts[1].view(format.scale_dtype).squeeze(-1)
        if term.packed:
            values = codec.unpack(values, self.bucket.slots[i].piece_shape(piece)[-1])
        outer = None
        if format.has_outer:
            outer = parts[2].view(torch.float32).squeeze(-1)
            outer = outer.squeeze(1) if term.dim >= len(term.shape) - 2 else outer
        return codec.decode(values, Scales(blocks, outer), format, dtype, block=term.sent).reshape(len(members), -1)

    def _part(self, rows: Rows, members: Sequence[int], piece: int, j: int) -> Tensor:
        """Copy the bytes of a slot from the rows of some members: [members, ...]."""
        slot = self.sent.slots[j]
        shape = slot.piece_shape(piece)
        stop = slot.offset + math.prod(shape)
        if not isinstance(rows, Tensor):
            return torch.stack([rows[m][slot.offset : stop] for m in members]).view(len(members), *shape)
        part = rows[:, slot.offset : stop]
        if isinstance(members, range):
            # Copied even if it is contiguous: a view as a wider dtype must be aligned.
            return part[members.start : members.stop].clone(memory_format=torch.contiguous_format).view(-1, *shape)
        return part.index_select(0, index_of(members, part.device)).view(-1, *shape)


@functools.lru_cache(maxsize=1024)
def quantized_terms(
    leaves: tuple[tuple[tuple[int, ...], int], ...], axis_sizes: tuple[int, ...], format: Blocks, *, scatter: bool
) -> QuantizedTerms:
    """Lay out terms, each a (shape, sharded dim) of at least two dims; the dim is used by `scatter` only."""
    at_once = False
    if not scatter:
        # If terms are small, every member adds all of them; otherwise each adds its shards, and gathers the other sums.
        members = math.prod(axis_sizes)
        at_once = sums_at_once(sum(math.prod(shape) for shape, _ in leaves), members)
        leaves = tuple((shape, 0 if at_once else _dim_to_shard(shape, members, format)) for shape, _ in leaves)
        axis_sizes = () if at_once else (members,)
    parts: list[tuple[tuple[int, ...], int]] = []
    terms: list[TermPlan] = []
    for shape, dim in leaves:
        first = len(parts)
        sent = [*format.sizes(shape)]
        last = len(shape) - 2
        if dim >= last:
            sent[dim - last] = _unsplit(sent[dim - last], shape[dim], axis_sizes)
        packed = is_packed(format, shape, dim, axis_sizes)
        parts.append((format.code_shape(shape, packed=packed), dim))
        grid = (-(-shape[-2] // sent[0]), -(-shape[-1] // sent[1]))
        parts.append(((*shape[:-2], *grid, format.scale_dtype.itemsize), dim))
        if format.has_outer:
            # If matrices are sharded, every member needs the scale of each: it is sent once to every member.
            parts.append(((*shape[:-2], 4), dim) if dim < last else ((math.prod(axis_sizes), *shape[:-2], 4), 0))
        terms.append(TermPlan(shape, dim, format.sizes(shape), (sent[0], sent[1]), packed, range(first, len(parts))))
    slots = plan_bucket(tuple(parts), axis_sizes)
    bucket = plan_bucket(leaves, axis_sizes)
    return QuantizedTerms(
        bucket=bucket,
        dtype=torch.uint8,
        scatter=scatter,
        width=slots.width,
        part_width=None if scatter or at_once else bucket.width,
        format=format,
        terms=tuple(terms),
        sent=slots,
    )


def is_packed(format: Blocks, shape: tuple[int, ...], dim: int | None, pieces: tuple[int, ...]) -> bool:
    """Return whether two values share a byte: they have 4 bits, and no shard of `dim` begins within a pair."""
    is_last = dim == len(shape) - 1
    return format.element.bits == 4 and (not is_last or boxes.ends_on(shape[-1], pieces, 2))


def _unsplit(block: int, size: int, pieces: Sequence[int]) -> int:
    """Return the largest size of parts of a block, along a dim, such that each is within one shard."""
    step = boxes.common_step(size, pieces)
    if not step:
        return block
    return step if block >= size else math.gcd(block, step)


def _dim_to_shard(shape: tuple[int, ...], members: int, format: Blocks) -> int:
    """Return the first dim that can be sharded evenly without splitting blocks, or else the longest dim."""
    block = (*(1 for _ in shape[2:]), *format.sizes(shape))
    even = [dim for dim, size in enumerate(shape) if size % (members * block[dim]) == 0]
    return even[0] if even else max(range(len(shape)), key=shape.__getitem__)
