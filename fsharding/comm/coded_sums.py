"""Sum gradients that are sent as quantized values and scales: the receiver dequantizes and adds them in one tree.

Guarantee: a sum has the bits of `comm.reduce` over terms that were rounded first, for every assignment of shards.
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

_BLOCK = 1 << 20
"""Elements of the terms of one leaf that are widened at a time."""


class TermPlan(NamedTuple):
    """How a term of one leaf is rounded, and cut."""

    shape: tuple[int, ...]  # of the term, of at least two dims
    dim: int  # that members cut
    block: tuple[int, int]  # rows and columns of the blocks that it is rounded in
    sent: tuple[int, int]  # rows and columns of the blocks for which scales are sent
    packed: bool  # two codes of 4 bits travel in a byte
    # where its codes, its scales and, for some formats, those of its matrices are among the slots of bytes
    parts: range


@dataclass(frozen=True, kw_only=True)
class QuantizedTerms(SumLayout):
    """Terms that are sent as quantized values and scales. A term that is not finite makes all of its block NaN."""

    format: Blocks  # of the terms
    terms: tuple[TermPlan, ...]  # one for each leaf
    codes: Bucket  # what is sent: bytes of quantized values and scales

    def filling(self, own: Tensor, noise: Noise | None) -> Fill:
        # Each leaf is added once, with its complete term: it is quantized when it is added.
        assert (noise is not None) or not self.format.stochastic, self.format
        views = buckets.piece_views(own, self.codes, 0) if self.at_once else []

        def fill(leaves: Sequence[int], terms: Sequence[Tensor | None]) -> None:
            for i, x in zip(leaves, terms, strict=True):
                places = self.terms[i].parts
                parts = [None] * len(places) if x is None else self._encoded(i, x, noise)
                if self.at_once:
                    copy_terms([views[j] for j in places], parts)
                else:
                    buckets.copy_in(parts, own, [self.codes.slots[j] for j in places])

        return fill

    @torch.no_grad()
    def _encoded(self, i: int, x: Tensor, noise: Noise | None) -> list[Tensor]:
        """Quantized values and scales of a term, as bytes."""
        term = self.terms[i]
        format = self.format
        drawn = noise(i) if format.stochastic and noise is not None else None
        codes, scales = codec.coded(x, format, block=term.block, noise=drawn)
        blocks = scales.blocks
        for place, dim in ((0, -2), (1, -1)):
            if (sent := term.sent[place]) != term.block[place]:
                count = -(-term.shape[dim] // sent)
                inside = torch.arange(count, device=x.device) * sent // term.block[place]
                blocks = blocks.index_select(dim, inside)
        result = [codec.pack(codes) if term.packed else codes, codec.as_bytes(blocks)]
        if scales.outer is not None:
            outer = codec.as_bytes(scales.outer)
            cut = term.dim >= len(term.shape) - 2
            result.append(outer.expand(self.codes.members, *outer.shape) if cut else outer)
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
        """The member whose pieces this one adds."""
        return 0 if self.at_once else group.index

    def _sum(self, i: int, rows: Rows, group: Group, out: Tensor) -> None:
        """The sum of this member's piece of a leaf."""
        among = wide(out.dtype)
        if out.numel() and out.dtype == among:
            self._add_terms(i, rows, group.terms, self._member(group), among, out.view(-1))
        elif out.numel():
            sums = self._add_terms(i, rows, group.terms, self._member(group), among, None)
            out.copy_(sums.view(out.shape))

    def _add_terms(
        self, i: int, rows: Rows, members: Sequence[int], piece: int, dtype: torch.dtype, out: Tensor | None
    ) -> Tensor:
        """The tree of `sum_rows` over some members, of which only a few terms are wide at a time."""
        size = math.prod(self.bucket.slots[i].piece_shape(piece))
        if len(members) == 1 or len(members) * size <= _BLOCK:
            terms = self._decoded(i, rows, members, piece, dtype)
            return sum_rows(terms, range(len(members)), dtype, out=out, donate=True)
        half = 1 << ((len(members) - 1).bit_length() - 1)
        left = self._add_terms(i, rows, members[:half], piece, dtype, out)
        return left.add_(self._add_terms(i, rows, members[half:], piece, dtype, None))

    def _decoded(self, i: int, rows: Rows, members: Sequence[int], piece: int, dtype: torch.dtype) -> Tensor:
        """Terms of a piece of a leaf, one for each of some members: [members, elements]."""
        term = self.terms[i]
        format = self.format
        parts = [self._part(rows, members, piece, j) for j in term.parts]
        codes = parts[0]
        blocks = parts[1].view(format.scale_dtype).squeeze(-1)
        if term.packed:
            codes = codec.unpack(codes, self.bucket.slots[i].piece_shape(piece)[-1])
        outer = None
        if format.has_outer:
            outer = parts[2].view(torch.float32).squeeze(-1)
            outer = outer.squeeze(1) if term.dim >= len(term.shape) - 2 else outer
        numbers = codec.decode(codes, Scales(blocks, outer), format, dtype, block=term.sent)
        return numbers.reshape(len(members), -1)

    def _part(self, rows: Rows, members: Sequence[int], piece: int, j: int) -> Tensor:
        """The bytes of a slot from some members, in memory of their own: [members, ...]."""
        slot = self.codes.slots[j]
        shape = slot.piece_shape(piece)
        stop = slot.offset + math.prod(shape)
        if not isinstance(rows, Tensor):
            return torch.stack([rows[m][slot.offset : stop] for m in members]).view(len(members), *shape)
        part = rows[:, slot.offset : stop]
        if isinstance(members, range):
            # A copy also where it is contiguous: wider types cannot begin at every byte.
            return part[members.start : members.stop].clone(memory_format=torch.contiguous_format).view(-1, *shape)
        return part.index_select(0, index_of(members, part.device)).view(-1, *shape)


@functools.lru_cache(maxsize=1024)
def quantized_terms(
    leaves: tuple[tuple[tuple[int, ...], int], ...], axis_sizes: tuple[int, ...], format: Blocks, *, scatter: bool
) -> QuantizedTerms:
    """Lay out terms of some (shape, sharded dim), of at least two dims; the dim counts with `scatter` only."""
    at_once = False
    if not scatter:
        # If they are small, every member adds all terms; otherwise each adds its pieces, and gathers the others.
        members = math.prod(axis_sizes)
        at_once = sums_at_once(sum(math.prod(shape) for shape, _ in leaves), members)
        leaves = tuple((shape, 0 if at_once else _dim_to_cut(shape, members, format)) for shape, _ in leaves)
        axis_sizes = () if at_once else (members,)
    parts: list[tuple[tuple[int, ...], int]] = []
    terms: list[TermPlan] = []
    for shape, dim in leaves:
        first = len(parts)
        sent = [*format.sizes(shape)]
        last = len(shape) - 2
        if dim >= last:
            sent[dim - last] = _uncut(sent[dim - last], shape[dim], axis_sizes)
        packed = is_packed(format, shape, dim, axis_sizes)
        parts.append((format.code_shape(shape, packed=packed), dim))
        grid = (-(-shape[-2] // sent[0]), -(-shape[-1] // sent[1]))
        parts.append(((*shape[:-2], *grid, format.scale_dtype.itemsize), dim))
        if format.has_outer:
            # Of a matrix that is cut, every member gets the scale.
            parts.append(
                ((*shape[:-2], 4), dim) if dim < last else ((math.prod(axis_sizes), *shape[:-2], 4), 0),
            )
        terms.append(TermPlan(shape, dim, format.sizes(shape), (sent[0], sent[1]), packed, range(first, len(parts))))
    codes = plan_bucket(tuple(parts), axis_sizes)
    bucket = plan_bucket(leaves, axis_sizes)
    return QuantizedTerms(
        bucket=bucket,
        dtype=torch.uint8,
        scatter=scatter,
        width=codes.width,
        part_width=None if scatter or at_once else bucket.width,
        format=format,
        terms=tuple(terms),
        codes=codes,
    )


def is_packed(format: Blocks, shape: tuple[int, ...], dim: int | None, pieces: tuple[int, ...]) -> bool:
    """Whether two codes share a byte: they have 4 bits, and no border between shards of a dim separates such two."""
    is_last = dim == len(shape) - 1
    return format.element.bits == 4 and (not is_last or boxes.same_cuts(shape[-1], -(-shape[-1] // 2), pieces, 2))


def _uncut(block: int, size: int, pieces: Sequence[int]) -> int:
    """Return the largest size of parts of a block, along a dim, that no border between shards crosses."""
    cuts = boxes.common_step(size, pieces)
    if not cuts:
        return block
    return cuts if block >= size else math.gcd(block, cuts)


def _dim_to_cut(shape: tuple[int, ...], members: int, format: Blocks) -> int:
    """The first dim that members can cut into equal pieces of whole blocks, else the longest one."""
    block = (*(1 for _ in shape[2:]), *format.sizes(shape))
    even = [dim for dim, size in enumerate(shape) if size % (members * block[dim]) == 0]
    return even[0] if even else max(range(len(shape)), key=shape.__getitem__)
