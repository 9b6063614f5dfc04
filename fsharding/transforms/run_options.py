"""Options of a forward and its backward, and where gradients go: one value, passed from the step to each gather.

Guarantee: options are equal on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fsharding.base.tree import Tree
from fsharding.comm.buffer_pool import Pool
from fsharding.formats.precision import FP32, Precision

__all__ = ["GradsTo", "RunOptions"]


@dataclass(frozen=True)
class RunOptions:
    """How a forward and its backward run."""

    precision: Precision = FP32  # dtypes of compute, wire and gradients, and formats of weights
    key: Tensor | None = None  # int64[2], for formats whose rounding is stochastic
    microbatch: int = 0  # index of this call among those with the same key
    prefetch_depth: int = 1  # how many units are gathered ahead of the one that computes, in forward and in backward
    caller: str = "fs.value_and_grad"  # the public function that an error names if another rank is lost
    defers: bool = False  # whether a backward may leave products that give gradients of weights alone for later


class GradsTo(NamedTuple):
    """Where gradients go."""

    # tree of `NamedSharding`; None at a leaf freezes it, None in all is the sharding of the parameters
    shardings: Tree = None
    accumulate: Tree = None  # gradients of earlier calls, which are added to in place; None where there are none
    # of memory for large gradients that are whole on every data rank, used again from call to call when the gradient
    # that was in it has been released. By default they are in fresh memory
    pool: Pool | None = None
