"""Shared by the parts of a block: settings, the residual stream, initial values, and linear maps over `tp`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from fsharding import ops
from fsharding.base.tree import Tree
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import axis_size
from fsharding.ops.attention import Kind
from fsharding.ops.rotary import Scaling
from fsharding.sharding import random
from fsharding.sharding.partition_spec import AxisRules
from fsharding.sharding.random import LazyTensor

__all__ = ["BlockSettings", "Cuts", "Draws", "Stream", "columns", "norm", "positions_of", "rows", "scale_of"]


class Stream(NamedTuple):
    """The activations and loss terms that pass from block to block.

    Attributes:
        x: activations (`[B, T, D]`); with `sequence`, this rank's part of T.
        positions: positions of the tokens (int64[B, T]), if not 0 to T - 1 of one sequence.
        documents: of the tokens (int[B, T]) where several are packed.
        extra: what routers have added to the loss of these tokens (0-d), if any do.
        cache: of the block that comes next, where tokens are generated; see `models.cache`.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)
        >>> model = fs.models.decoder(config)
        >>> batch = {"tokens": torch.tensor([[3, 1, 4, 1]]), "documents": torch.tensor([[0, 0, 1, 1]])}
        >>> stream = model.embed({"table": torch.ones(16, 8)}, batch)
        >>> stream.x.shape, stream.positions
        (torch.Size([1, 4, 8]), tensor([[0, 1, 0, 1]]))
    """

    x: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    extra: Tensor | None = None
    cache: Tree = None


class BlockSettings(NamedTuple):
    """Static choices of a model."""

    eps: float  # of RMSNorm
    sequence: int | None  # the dim of activations that `tp` shards outside of regions
    kind: Kind  # how queries meet keys of other ranks of `cp`


@dataclass(frozen=True)
class Cuts:
    """A mesh as a part sees it, before anything is planned."""

    mesh: AbstractMesh
    rules: AxisRules  # axes by dim name
    kind: Kind

    @property
    def tp(self) -> int:
        """The size of `tp`."""
        return self.mesh.axis_size("tp")

    @property
    def cp(self) -> int:
        """The size of `cp`."""
        return self.mesh.axis_size("cp")

    def has(self, name: str) -> bool:
        """Whether `tp` cuts the dims of a name."""
        return self.tp > 1 and "tp" in self.rules.get(name, ())


@dataclass(frozen=True)
class Draws:
    """Lazy first values of the leaves of a unit, each with its own key."""

    key: Tensor  # of the unit
    rows: tuple[int, ...] = ()  # `(layers,)` of a stack, or nothing
    narrow: float = 0.02  # std of weights that write to the residual stream
    count: itertools.count[int] = field(default_factory=itertools.count)  # numbers the keys

    def normal(self, *shape: int, std: float = 0.02) -> LazyTensor:
        """Normal values."""
        return random.normal(random.fold_in(self.key, next(self.count)), (*self.rows, *shape), std=std)

    def into_stream(self, *shape: int) -> LazyTensor:
        """Normal values of a weight that writes to the residual stream."""
        return self.normal(*shape, std=self.narrow)

    def ones(self, *shape: int) -> LazyTensor:
        """Ones."""
        return random.ones((*self.rows, *shape))

    def zeros(self, *shape: int) -> LazyTensor:
        """Zeros."""
        return random.zeros((*self.rows, *shape))


def columns(x_BTD: Tensor, weights: Sequence[Tensor], *, whole: bool, settings: BlockSettings) -> Sequence[Tensor]:
    """Multiply with weights whose rows `tp` shards, each [F of this rank, D]; `whole` weights are on all ranks."""
    if whole:
        return [ops.scaled_matmul(x_BTD, w, 1) for w in weights]
    return ops.column_linear(x_BTD, *weights, sequence_dim=settings.sequence)


def rows(x_BTF: Tensor, weight_FD: Tensor, *, whole: bool, settings: BlockSettings) -> Tensor:
    """Multiply with a weight whose rows `tp` shards and sum over `tp`; with a `whole` one all ranks do the same."""
    if whole:
        return ops.scaled_matmul(x_BTF, weight_FD, 0)
    return ops.row_linear(x_BTF, weight_FD, sequence_dim=settings.sequence)


def norm(scale_D: Tensor, x_BTD: Tensor, settings: BlockSettings) -> Tensor:
    """RMSNorm of activations that may be cut along the sequence."""
    return ops.rms_norm(x_BTD, scale_D, eps=settings.eps, over="tp" if settings.sequence is not None else ())


def positions_of(stream: Stream, length: int) -> Tensor:
    """The positions of this rank's tokens: int64[T] or [B, T]."""
    if stream.positions is not None:
        return stream.positions
    return ops.positions(length * axis_size("cp"), device=stream.x.device)


def scale_of(head_dim: int, scaling: Scaling | None) -> float:
    """The factor of attention scores."""
    return (1.0 if scaling is None else scaling.score_factor) / head_dim**0.5
