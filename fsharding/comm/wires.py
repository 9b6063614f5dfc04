"""How leaves are sent: as they are, cast to a dtype, or as quantized values and scales. A `Wire` is a value.

In: a wire for each leaf of a bucket, the shardings of the leaves, this rank's shards. Out: the `Payload` of the bucket,
which defines what is sent, and the gathered leaves.
Guarantee: a gathered leaf has the bits of casting or quantizing the full leaf, for every sharding.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.comm import bucket as buckets
from fsharding.comm import codes
from fsharding.comm.bucket import Bucket, plan_bucket
from fsharding.comm.coded_sums import plan_cut_sums, plan_whole_sums
from fsharding.comm.codes import Coded, CodedBucket, CodePlan
from fsharding.comm.handles import FreshMemory, Handle, Memory, done
from fsharding.comm.reduce import Noise, SumLayout, plain_terms
from fsharding.comm.transport import Transport, transport_for
from fsharding.formats.blocks import Blocks
from fsharding.formats.codec import Scales
from fsharding.formats.quantized import Quantized
from fsharding.mesh.device_mesh import Mesh, axis_group
from fsharding.sharding.named_sharding import NamedSharding

__all__ = [
    "Gathered", "Payload", "Plain", "Quantizing", "Rounded", "SentLeaf", "WholeLeaf", "Wire", "agree", "plain_payload",
    "start_gather",
]  # fmt: skip


CutLeaves: TypeAlias = tuple[tuple[tuple[int, ...], int], ...]
"""The shape of each leaf, and the dim along which ranks have pieces of it."""


Into: TypeAlias = Sequence[Tensor] | None
"""Contiguous tensors that become the full leaves, if there are any."""


WholeLeaf: TypeAlias = Tensor | Quantized
"""A leaf that was gathered, as the loss function gets it."""


class Gathered(NamedTuple):
    """Leaves that have been gathered.

    Attributes:
        leaves: full, as their wires make them.
        buffers: flat tensors; each tensor of a leaf views one of them, the same one each time.
    """

    leaves: Sequence[Tensor | Quantized]
    buffers: list[Tensor]


class SentLeaf(NamedTuple):
    """A leaf of a bucket.

    Attributes:
        wire: how it is sent.
        sharding: before the gather.
        full: its sharding after it.
        shape: global.
        dim: along which it is gathered.
    """

    wire: Wire
    sharding: NamedSharding
    full: NamedSharding
    shape: tuple[int, ...]
    dim: int


class Wire(Protocol):
    """How a leaf is sent, and in which form a loss function sees it."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gathered leaf, or that in which it is dequantized."""
        ...

    @property
    def bucket_key(self) -> Hashable:
        """Leaves with different keys are never sent together."""
        ...

    @property
    def if_viewed(self) -> bool:
        """Whether backward gathers the leaf again only where autograd has saved a view of it."""
        ...

    def is_identity(self, dtype: torch.dtype) -> bool:
        """Whether a leaf of a dtype that is full already needs neither a cast nor any other step."""
        ...

    def across(self, shape: tuple[int, ...]) -> Wire | None:
        """The wire by which backward may gather the leaf in blocks along its other dim; None if it may not."""
        ...

    def payload(self, leaves: Sequence[SentLeaf], axis_sizes: tuple[int, ...]) -> Payload:
        """Lay out leaves with the `bucket_key` of this wire.

        Args:
            axis_sizes: of the axes over which they are gathered; none where they are full already.
        """
        ...

    def gathered_bytes(self, leaf: SentLeaf) -> int:
        """The bytes that a leaf with this wire needs where it is gathered, before it is dequantized."""
        ...

    def code_plan(self, leaf: SentLeaf) -> CodePlan | None:
        """How a leaf with this wire is quantized; None if it is not."""
        ...

    @property
    def has_slots(self) -> bool:
        """Whether a kernel can write a term to where it is sent from."""
        ...

    def terms(self, leaves: CutLeaves, axis_sizes: tuple[int, ...], *, scatter: bool) -> SumLayout:
        """Lay out the terms of a sum.

        Args:
            leaves: (shape of a term, dim along which members have pieces) of each leaf.
            axis_sizes: sizes of the axes of the sum, major first.
            scatter: each member gets the sums of its pieces.
        """
        ...

    def as_seen(self, leaf: Tensor | Quantized, node: Tensor, columnwise: Any) -> Tensor | Quantized:
        """Return what the loss function gets.

        Args:
            node: the tensor that stands for it in autograd's graph.
            columnwise: finds a quantized leaf in blocks along its other dim, in backward; see `Quantized`.
        """
        ...


class Payload(Protocol):
    """What is sent of the leaves of a bucket, and how it is read."""

    @property
    def bucket(self) -> Bucket:
        """Lays out the parts that are sent."""
        ...

    def encode(self, shards: Sequence[Tensor], mesh: Mesh, noise: Noise | None, agreed: Sequence[Any] | None) -> Any:
        """Encode shards. Collective over the mesh where ranks have parts of one block, unless they have agreed."""
        ...

    def send(self, own: Any, transport: Transport, memory: Memory | None, into: Into) -> Handle[Gathered]:
        """Start to gather what `encode` returned."""
        ...

    def keep(self, own: Any, memory: Memory, into: Into) -> Gathered:
        """Make the full leaves of what `encode` returned, where nothing has to be gathered."""
        ...


def start_gather(
    payload: Payload,
    shards: Sequence[Tensor],
    mesh: Mesh,
    axes: tuple[str, ...],
    memory: Memory | None = None,
    noise: Noise | None = None,
    *,
    agreed: Sequence[Any] | None = None,
    into: Into = None,
) -> Handle[Gathered]:
    """Start to gather the leaves of a bucket.

    Args:
        axes: over which they are gathered; none where they are full already, and only cast or quantized.
        noise: the numbers in [0, 1) for a leaf, by its place in the bucket, if its rounding is keyed.
        agreed: what `agree` returned for these leaves; by default they agree now.
        into: contiguous tensors that become the full leaves; not for leaves that stay quantized.
    """
    own = payload.encode(shards, mesh, noise, agreed)
    device = shards[0].device
    if not axes:
        return done(lambda: payload.keep(own, memory or FreshMemory(device), into))
    return payload.send(own, transport_for(axis_group(mesh, axes), device), memory, into)


def agree(leaves: Sequence[SentLeaf], shards: Sequence[Tensor], mesh: Mesh) -> list[Scales | None]:
    """Find the scales of all quantized leaves at once, before any of them is sent. Collective where blocks are shared.

    Args:
        leaves: of any number of buckets.
    """
    plans = [(i, plan) for i, leaf in enumerate(leaves) if (plan := leaf.wire.code_plan(leaf)) is not None]
    scales = codes.shared_scales([plan for _, plan in plans], [shards[i] for i, _ in plans], mesh)
    agreed: list[Scales | None] = [None] * len(leaves)
    for (i, _), given in zip(plans, scales, strict=True):
        agreed[i] = given
    return agreed


# ---------------------------------------------------------------------------------------------------------------- plain
class Plain(NamedTuple):
    """A leaf is sent in a dtype."""

    dtype: torch.dtype

    @property
    def bucket_key(self) -> Hashable:
        """See `Wire`."""
        return self.dtype

    @property
    def if_viewed(self) -> bool:
        """See `Wire`."""
        return False

    def is_identity(self, dtype: torch.dtype) -> bool:
        """See `Wire`."""
        return dtype == self.dtype

    def across(self, shape: tuple[int, ...]) -> Wire | None:
        """See `Wire`."""
        return None

    def payload(self, leaves: Sequence[SentLeaf], axis_sizes: tuple[int, ...]) -> Payload:
        """See `Wire`."""
        return plain_payload(self.dtype, _full_cuts(leaves), axis_sizes)

    def gathered_bytes(self, leaf: SentLeaf) -> int:
        """See `Wire`."""
        return math.prod(leaf.full.local_shape(leaf.shape)) * self.dtype.itemsize

    def code_plan(self, leaf: SentLeaf) -> CodePlan | None:
        """See `Wire`."""
        return None

    @property
    def has_slots(self) -> bool:
        """See `Wire`."""
        return True

    def terms(self, leaves: CutLeaves, axis_sizes: tuple[int, ...], *, scatter: bool) -> SumLayout:
        """See `Wire`."""
        return plain_terms(leaves, axis_sizes, self.dtype, scatter=scatter)

    def as_seen(self, leaf: Tensor | Quantized, node: Tensor, columnwise: Any) -> Tensor | Quantized:
        """See `Wire`."""
        return node


class Rounded(NamedTuple):
    """A leaf whose values have been rounded to a format before: it is sent in a dtype, and products quantize it."""

    dtype: torch.dtype
    format: Blocks
    strict: bool

    bucket_key = Plain.bucket_key
    if_viewed = Plain.if_viewed
    is_identity = Plain.is_identity
    across = Plain.across
    payload = Plain.payload
    gathered_bytes = Plain.gathered_bytes
    code_plan = Plain.code_plan
    has_slots = Plain.has_slots
    terms = Plain.terms

    def as_seen(self, leaf: Tensor | Quantized, node: Tensor, columnwise: Any) -> Tensor | Quantized:
        """See `Wire`."""
        return Quantized.of_numbers(node, self.format, strict=self.strict)


def plain_payload(dtype: torch.dtype, leaves: CutLeaves, axis_sizes: tuple[int, ...]) -> Payload:
    """Lay out leaves that are sent in a dtype.

    Args:
        leaves: (shape once gathered, dim along which it is gathered) of each leaf.
        axis_sizes: of the axes over which they are gathered; none where they are full already.
    """
    return _PlainPayload(dtype, plan_bucket(leaves, axis_sizes))


def _full_cuts(leaves: Sequence[SentLeaf]) -> CutLeaves:
    return tuple((leaf.full.local_shape(leaf.shape), leaf.dim) for leaf in leaves)


@dataclass(frozen=True)
class _PlainPayload:
    dtype: torch.dtype
    bucket: Bucket

    def encode(
        self, shards: Sequence[Tensor], mesh: Mesh, noise: Noise | None, agreed: Sequence[Any] | None
    ) -> Sequence[Tensor]:
        return shards

    def send(self, own: Sequence[Tensor], transport: Transport, memory: Memory | None, into: Into) -> Handle[Gathered]:
        if into is not None:
            cast = [x.to(self.dtype) for x in own]
            return transport.all_gather_into(self.bucket, cast, into).then(lambda leaves: Gathered(leaves, []))
        return transport.all_gather(self.bucket, own, self.dtype, memory).then(self._views)

    def keep(self, own: Sequence[Tensor], memory: Memory, into: Into) -> Gathered:
        if into is None:
            return self._views(_copied(own, self.bucket, self.dtype, memory))
        _compat.foreach_copy_([*into], [*own])
        return Gathered(into, [])

    def _views(self, flat: Tensor) -> Gathered:
        return Gathered(buckets.whole_views(flat, self.bucket), [flat])


def _copied(parts: Sequence[Tensor], bucket: Bucket, dtype: torch.dtype, memory: Memory) -> Tensor:
    flat = memory.empty(bucket.size, dtype)
    _compat.foreach_copy_(buckets.whole_views(flat, bucket), [*parts])
    return flat


# ------------------------------------------------------------------------------------------------------------ quantized
@dataclass(frozen=True)
class Quantizing:
    """A leaf is sent as quantized values and the scales of their blocks.

    Attributes:
        dtype: in which it is dequantized; of terms of a sum, in which they were computed.
        format: to which it is quantized.
        stays: the loss function gets it quantized; else it is dequantized as soon as it is gathered.
        strict: see `Quantized`.
        columnwise: backward may gather it in blocks along its other dim, so it is sent apart from other leaves.
    """

    dtype: torch.dtype
    format: Blocks
    stays: bool = False
    strict: bool = False
    columnwise: bool = False

    @property
    def bucket_key(self) -> Hashable:
        """See `Wire`; formats may differ in the shapes of their blocks."""
        return (self.dtype, self.stays, self.columnwise)

    @property
    def if_viewed(self) -> bool:
        """See `Wire`: products in backward use the leaf in blocks along its other dim."""
        return self.columnwise

    def is_identity(self, dtype: torch.dtype) -> bool:
        """See `Wire`."""
        return False

    def across(self, shape: tuple[int, ...]) -> Wire | None:
        """See `Wire`."""
        return replace(self, format=self.format.across(shape), columnwise=False) if self.columnwise else None

    def payload(self, leaves: Sequence[SentLeaf], axis_sizes: tuple[int, ...]) -> Payload:
        """See `Wire`."""
        plans = [plan for leaf in leaves if (plan := leaf.wire.code_plan(leaf)) is not None]
        coded = codes.code_bucket(plans, [leaf.dim for leaf in leaves], axis_sizes)
        if self.stays:
            return _QuantizedPayload(coded, self.dtype, self.strict)
        return _DequantizedPayload(coded, self.dtype, plan_bucket(_full_cuts(leaves), ()))

    def gathered_bytes(self, leaf: SentLeaf) -> int:
        """See `Wire`."""
        return codes.gathered_bytes(self.code_plan(leaf))

    def code_plan(self, leaf: SentLeaf) -> CodePlan:
        """See `Wire`."""
        return codes.plan_codes(leaf.sharding.mesh, leaf.sharding, leaf.full, leaf.shape, self.format)

    @property
    def has_slots(self) -> bool:
        """See `Wire`: a term is quantized when all of it is there."""
        return False

    def terms(self, leaves: CutLeaves, axis_sizes: tuple[int, ...], *, scatter: bool) -> SumLayout:
        """See `Wire`."""
        if scatter:
            return plan_cut_sums(leaves, axis_sizes, self.format)
        return plan_whole_sums(tuple(shape for shape, _ in leaves), math.prod(axis_sizes), self.format)

    def as_seen(self, leaf: Tensor | Quantized, node: Tensor, columnwise: Any) -> Tensor | Quantized:
        """See `Wire`."""
        if isinstance(leaf, Tensor):
            return node
        return replace(leaf, carrier=node if node.requires_grad else None, columnwise=columnwise)


@dataclass(frozen=True)
class _CodedPayload:
    coded: CodedBucket
    dtype: torch.dtype

    @property
    def bucket(self) -> Bucket:
        return self.coded.bucket

    def encode(
        self, shards: Sequence[Tensor], mesh: Mesh, noise: Noise | None, agreed: Sequence[Any] | None
    ) -> list[Coded]:
        plans = self.coded.plans
        return codes.encode_shards(plans, shards, agreed or codes.shared_scales(plans, shards, mesh), noise)

    def _sent(self, own: list[Coded], transport: Transport, memory: Memory | None) -> Handle[Tensor]:
        return transport.all_gather(self.bucket, codes.encoded_bytes(self.coded.plans, own), torch.uint8, memory)


@dataclass(frozen=True)
class _DequantizedPayload(_CodedPayload):
    values: Bucket
    """The dequantized leaves."""

    def send(self, own: list[Coded], transport: Transport, memory: Memory | None, into: Into) -> Handle[Gathered]:
        def dequantized(flat: Tensor) -> Gathered:
            return self.keep(codes.from_bytes(self.coded, flat, own), memory or FreshMemory(flat.device), into)

        return self._sent(own, transport, memory).then(dequantized)

    def keep(self, own: list[Coded], memory: Memory, into: Into) -> Gathered:
        buffers = list[Tensor]()
        if into is None:
            buffers = [memory.empty(self.values.size, self.dtype)]
            into = buckets.whole_views(buffers[0], self.values)
        codes.decoded(self.coded.plans, own, into)
        return Gathered(into, buffers)


@dataclass(frozen=True)
class _QuantizedPayload(_CodedPayload):
    strict: bool

    def send(self, own: list[Coded], transport: Transport, memory: Memory | None, into: Into) -> Handle[Gathered]:
        return self._sent(own, transport, memory).then(lambda flat: self._views(flat, own))

    def keep(self, own: list[Coded], memory: Memory, into: Into) -> Gathered:
        parts = codes.encoded_bytes(self.coded.plans, own)
        return self._views(_copied(parts, self.bucket, torch.uint8, memory), own)

    def _views(self, flat: Tensor, own: list[Coded]) -> Gathered:
        buffers = [flat]
        leaves = list[Tensor | Quantized]()
        for plan, (values, scales) in zip(
            self.coded.plans, codes.packed_from_bytes(self.coded, flat, own), strict=True
        ):
            parts = [_in_buffer(x, flat, buffers) for x in (values, *scales) if x is not None]
            start = (plan.whole_start[0] % plan.block[0], plan.whole_start[1] % plan.block[1])
            outer = parts[2] if len(parts) > 2 else None
            leaf = Quantized(
                parts[0], parts[1], plan.format, self.dtype, plan.block, plan.whole[-1], outer, start=start,
                strict=self.strict,
            )  # fmt: skip
            leaves.append(leaf)
        return Gathered(leaves, buffers)


def _in_buffer(part: Tensor, flat: Tensor, buffers: list[Tensor]) -> Tensor:
    """A part of what was gathered; one that was not sent becomes a buffer of its own."""
    if _compat.storage_id(part) == _compat.storage_id(flat):
        return part
    full = part.contiguous() if part.storage_offset() == 0 else part.clone()
    buffers.append(full.view(-1))
    return full
