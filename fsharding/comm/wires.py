"""Wire formats of leaves. `Plain` casts to a dtype; `comm.codes` has the quantized ones.

Guarantee: a gathered leaf has the bits of casting or quantizing the full leaf, for every sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fsharding.comm.reduce import SumLayout, plain_terms
from fsharding.formats.quantized import Weight
from fsharding.mesh.device_mesh import Mesh
from fsharding.sharding.named_sharding import NamedSharding

__all__ = ["CutLeaves", "Draw", "LeafWire", "Parts", "Plain", "WholeLeaf", "Wire"]


# The full shape of each tensor, and the dim that is sharded over the ranks of a group.
CutLeaves: TypeAlias = tuple[tuple[tuple[int, ...], int], ...]

# A gathered leaf as a wire decodes it: a tensor, or a `Quantized`.
WholeLeaf: TypeAlias = Weight

# Returns the numbers in [0, 1) for stochastic rounding of one leaf.
Draw: TypeAlias = Callable[[], Tensor]


class Parts(NamedTuple):
    """The tensors that are sent for one leaf."""

    sent: CutLeaves  # for each tensor, its gathered shape and the dim along which it is gathered
    dtype: torch.dtype  # dtype of all of them
    bytes: int  # memory of the received tensors
    # Shape of the result if `decode` writes it into separate memory; None if the result views the received tensors.
    decoded: tuple[int, ...] | None = None
    plan: Any = None  # private to the wire


class Wire(Protocol):
    """The format in which a leaf is gathered, or in which the terms of a sum are sent. A hashable value."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a leaf or term before it is encoded and after it is decoded."""
        ...

    @property
    def native(self) -> bool:
        """Whether the backend adds terms, in their dtype and any order; otherwise members do, in a fixed tree."""
        ...

    def parts(self, shape: tuple[int, ...], source: NamedSharding, target: NamedSharding, dim: int) -> Parts:
        """Plan the tensors that are sent for a leaf, which is gathered along `dim`."""
        ...

    def agree(self, parts: Sequence[Parts], shards: Sequence[Tensor], mesh: Mesh) -> Sequence[Any]:
        """Compute what all ranks must share before leaves are encoded, such as scales. Collective over the mesh."""
        ...

    def encode(self, parts: Parts, shard: Tensor, agreed: Any, noise: Draw | None) -> list[Tensor]:
        """Return the tensors to send; the transport casts them to `parts.dtype`."""
        ...

    def decode(self, parts: Parts, received: Sequence[Tensor], agreed: Any, out: Tensor | None) -> WholeLeaf:
        """Return the leaf from received tensors, in `out` if `parts.decoded` is a shape."""
        ...

    def terms(self, leaves: CutLeaves, axis_sizes: tuple[int, ...], *, scatter: bool) -> SumLayout:
        """Lay out the terms of a sum over axes of these sizes; with `scatter`, members get the sums of their shards."""
        ...


@dataclass(frozen=True)
class LeafWire:
    """The wire of a leaf at rest."""

    wire: Wire
    # Indices of this rank's rows of a stack that aren't quantized; None, instead of empty, if no rank has any.
    kept: tuple[int, ...] | None = None
    # Returns the numbers in [0, 1) for stochastic rounding of the rows [start, stop) of the shard.
    noise: Callable[[int, int], Tensor] | None = None

    def of_rows(self, start: int, stop: int) -> LeafWire:
        """Restrict it to the rows [start, stop) of a stack."""
        noise = self.noise
        kept = None if self.kept is None else tuple(row - start for row in self.kept if start <= row < stop)
        return LeafWire(self.wire, kept, None if noise is None else lambda a, b: noise(start + a, start + b))


class Plain(NamedTuple):
    """The wire that sends a leaf or a term in a dtype."""

    dtype: torch.dtype
    native: bool = False  # see `Wire`

    def parts(self, shape: tuple[int, ...], source: NamedSharding, target: NamedSharding, dim: int) -> Parts:
        """See `Wire`."""
        full = target.local_shape(shape)
        return Parts(((full, dim),), self.dtype, math.prod(full) * self.dtype.itemsize)

    def agree(self, parts: Sequence[Parts], shards: Sequence[Tensor], mesh: Mesh) -> Sequence[None]:
        """See `Wire`."""
        return [None] * len(parts)

    def encode(self, parts: Parts, shard: Tensor, agreed: None, noise: Draw | None) -> list[Tensor]:
        """See `Wire`."""
        return [shard]

    def decode(self, parts: Parts, received: Sequence[Tensor], agreed: None, out: Tensor | None) -> Tensor:
        """See `Wire`."""
        return received[0]

    def terms(self, leaves: CutLeaves, axis_sizes: tuple[int, ...], *, scatter: bool) -> SumLayout:
        """See `Wire`."""
        return plain_terms(leaves, axis_sizes, self.dtype, scatter=scatter, native=self.native)
