"""How a leaf is sent: a `Wire`, which is a value. `Plain` casts it to a dtype; for another one see `comm.codes`.

Guarantee: a gathered leaf has the bits of casting or encoding the full leaf, for every sharding.
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


CutLeaves: TypeAlias = tuple[tuple[tuple[int, ...], int], ...]
"""The full shape of each tensor, and the dim along which ranks have pieces of it."""

WholeLeaf: TypeAlias = Weight
"""A gathered leaf, as a wire decodes it."""

Draw: TypeAlias = Callable[[], Tensor]
"""Draws the numbers in [0, 1) by which one leaf is rounded."""


class Parts(NamedTuple):
    """The tensors that are sent for one leaf."""

    sent: CutLeaves  # of each tensor the shape once gathered, and the dim along which it is gathered
    dtype: torch.dtype  # of these tensors
    bytes: int  # memory of what is received
    # shape of the result if `decode` writes it to other memory; None if it views what was received
    decoded: tuple[int, ...] | None = None
    plan: Any = None  # of the wire


class Wire(Protocol):
    """How a leaf is gathered, or the terms of a sum are sent. Collective over the mesh where ranks have to agree."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a leaf or a term before it is encoded, and of one that was decoded."""
        ...

    @property
    def native(self) -> bool:
        """Whether a backend adds the terms of sums, in their dtype and its own order; else members do, in a tree."""
        ...

    def parts(self, shape: tuple[int, ...], source: NamedSharding, target: NamedSharding, dim: int) -> Parts:
        """Plan what is sent of a leaf of a global shape, which is gathered along `dim`."""
        ...

    def agree(self, parts: Sequence[Parts], shards: Sequence[Tensor], mesh: Mesh) -> Sequence[Any]:
        """Find what all ranks have to know before leaves with such a wire are encoded."""
        ...

    def encode(self, parts: Parts, shard: Tensor, agreed: Any, noise: Draw | None) -> list[Tensor]:
        """Make the tensors that are sent; the transport casts them to `parts.dtype`."""
        ...

    def decode(self, parts: Parts, received: Sequence[Tensor], agreed: Any, out: Tensor | None) -> WholeLeaf:
        """Make the leaf of what was received, in `out` if `parts.decoded` is a shape."""
        ...

    def terms(self, leaves: CutLeaves, axis_sizes: tuple[int, ...], *, scatter: bool) -> SumLayout:
        """Lay out the terms of a sum over axes of these sizes; with `scatter`, members get the sums of their pieces."""
        ...


@dataclass(frozen=True)
class LeafWire:
    """How a leaf at rest is sent."""

    wire: Wire
    # indices of this rank's rows of a stack that are sent in the dtype of the wire; None if no rank has any
    kept: tuple[int, ...] | None = None
    # returns the numbers in [0, 1) by which the rows of the shard from `start` to `stop` are rounded
    noise: Callable[[int, int], Tensor] | None = None

    def of_rows(self, start: int, stop: int) -> LeafWire:
        """Restrict it to some rows of a stack."""
        noise = self.noise
        kept = None if self.kept is None else tuple(row - start for row in self.kept if start <= row < stop)
        return LeafWire(self.wire, kept, None if noise is None else lambda a, b: noise(start + a, start + b))


class Plain(NamedTuple):
    """A leaf, or a term of a sum, is sent in a dtype."""

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
