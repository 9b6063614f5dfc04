"""Options of a forward and its backward, equal on all ranks, and the destination of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fsharding.base.tree import Tree
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.transfers import NOTHING, Between
from fsharding.formats.precision import FP32, Precision

__all__ = ["GradsTo", "RunOptions"]


@dataclass(frozen=True)
class RunOptions:
    """Options of a forward and its backward."""

    precision: Precision = FP32  # dtypes of compute, wire and gradients, and formats of weights
    key: Tensor | None = None  # int64[2], for stochastic rounding
    scale: float | Tensor | None = None  # factor of the loss, without which fp16 gradients underflow; None is 1
    microbatch: int = 0  # index of this call among those with the same key
    prefetch_depth: int = 1  # number of units to gather ahead of the one that computes, in forward and backward
    caller: str = "fs.value_and_grad"  # the public function named in the error if a rank is lost
    defers: bool = False  # a backward may defer products that give weight gradients only
    between: Between = NOTHING


class GradsTo(NamedTuple):
    """Destination of gradients."""

    # Tree of `NamedSharding`. None at a leaf freezes it; None instead of the tree stands for the parameters' shardings.
    shardings: Tree = None
    accumulate: Tree = None  # gradients of earlier calls, added to in place; None for leaves without one
    # Memory for large gradients that data axes don't shard, reused from call to call once the gradient in it is freed.
    # None allocates fresh memory.
    pool: Pool | None = None
