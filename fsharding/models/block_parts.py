"""Shared by attention and feed-forward parts: settings, the residual stream, initial values, linears over `tp`."""

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

__all__ = ["BlockSettings", "MeshRules", "Init", "Stream", "columns", "norm", "positions_of", "rows", "scale_of"]


class Stream(NamedTuple):
    """Activations and loss terms that each block receives and returns.

    Attributes:
        x: Activations [B, T, D]; under sequence parallelism, this rank's part of T.
        positions: Token positions, int64[B, T]. None means 0 to T - 1.
        documents: Document of each token in packed rows, int[B, T]. None means one document per row.
        extra: Sum of the auxiliary router losses so far (0-d), or None.
        cache: Key and value cache of the next block during generation, or None.

    Example:
        >>> stream = fs.models.Stream(torch.zeros(1, 4, 8), documents=torch.tensor([[0, 0, 1, 1]]))
        >>> stream.x.shape, stream.extra
        (torch.Size([1, 4, 8]), None)
    """

    x: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    extra: Tensor | None = None
    cache: Tree = None


class BlockSettings(NamedTuple):
    """Static choices of a model."""

    eps: float  # RMSNorm epsilon
    sequence: int | None  # dim of activations that `tp` shards between tensor-parallel regions
    kind: Kind  # context-parallel algorithm of `ops.attention`


@dataclass(frozen=True)
class MeshRules:
    """The mesh and sharding rules that a part checks before anything is planned."""

    mesh: AbstractMesh
    rules: AxisRules  # axes by dim name
    kind: Kind

    @property
    def tp(self) -> int:
        """Size of the `tp` axis."""
        return self.mesh.axis_size("tp")

    def shards(self, name: str) -> bool:
        """Return whether `tp` shards dims with this name."""
        return self.tp > 1 and "tp" in self.rules.get(name, ())

    def misfit_heads(self, heads: int) -> list[str]:
        """Explain why `tp` or Ulysses attention over `cp` can't divide the heads."""
        cp = self.mesh.axis_size("cp")
        each = heads // self.tp if self.shards("heads") else heads
        wrong: list[str] = []
        if self.kind == "ulysses" and each % cp:
            wrong.append(f"{each} heads per rank: not a multiple of cp={cp}, as attention='ulysses' needs")
        if self.shards("heads") and heads % self.tp:
            wrong.append(f"{heads} heads: not a multiple of tp={self.tp}")
        return wrong


@dataclass(frozen=True)
class Init:
    """Lazy initial values of the leaves of a unit."""

    # Each random leaf folds its number into the unit's key, so leaves are created in the same order on every rank.
    key: Tensor
    rows: tuple[int, ...] = ()  # `(layers,)` in a stack
    narrow: float = 0.02  # std of weights that write to the residual stream
    count: itertools.count[int] = field(default_factory=itertools.count)

    def normal(self, *shape: int, std: float = 0.02) -> LazyTensor:
        """Create normal values."""
        return random.normal(random.fold_in(self.key, next(self.count)), (*self.rows, *shape), std=std)

    def into_stream(self, *shape: int) -> LazyTensor:
        """Create normal values of a weight that writes to the residual stream."""
        return self.normal(*shape, std=self.narrow)

    def ones(self, *shape: int) -> LazyTensor:
        """Create ones."""
        return random.ones((*self.rows, *shape))

    def zeros(self, *shape: int) -> LazyTensor:
        """Create zeros."""
        return random.zeros((*self.rows, *shape))


def columns(x_BTD: Tensor, weights: Sequence[Tensor], *, full: bool, settings: BlockSettings) -> Sequence[Tensor]:
    """Multiply by weights [F, D] whose F `tp` shards; `full` weights are replicated."""
    if full:
        return [ops.scaled_matmul(x_BTD, w, 1) for w in weights]
    return ops.column_linear(x_BTD, *weights, sequence_dim=settings.sequence)


def rows(x_BTF: Tensor, weight_FD: Tensor, *, full: bool, settings: BlockSettings) -> Tensor:
    """Multiply by a weight [F, D] whose F `tp` shards, and sum over `tp`; a `full` weight is replicated."""
    if full:
        return ops.scaled_matmul(x_BTF, weight_FD, 0)
    return ops.row_linear(x_BTF, weight_FD, sequence_dim=settings.sequence)


def norm(scale_D: Tensor, x_BTD: Tensor, settings: BlockSettings) -> Tensor:
    """Apply RMSNorm to activations, which `tp` may shard along the sequence."""
    # Under sequence parallelism the ranks of `tp` have different tokens, so the scale's gradient is summed over them.
    return ops.rms_norm(x_BTD, scale_D, eps=settings.eps, over="tp" if settings.sequence is not None else ())


def positions_of(stream: Stream, length: int) -> Tensor:
    """Return the positions of this rank's tokens: int64[T] or [B, T]."""
    if stream.positions is not None:
        return stream.positions
    return ops.positions(length * axis_size("cp"), device=stream.x.device)


def scale_of(head_dim: int, scaling: Scaling | None) -> float:
    """Return the factor of attention scores, with the correction of a longer context."""
    return (1.0 if scaling is None else scaling.score_factor) / head_dim**0.5
