"""What data is to a training loop: a pure function of step and shard."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from fsharding.base.errors import DataError, message
from fsharding.base.public import public

__all__ = ["WHOLE", "Data", "Shard"]


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of every global batch that one data-parallel rank reads: part `index` of `count`.

    Of a global batch of B rows these are the contiguous rows [index * B / count, (index + 1) * B / count).

    Raises:
        DataError: not 0 <= index < count.

    Example:
        >>> [fs.data.Shard(index, count=2).rows(8) for index in range(2)]
        [range(0, 4), range(4, 8)]
    """

    index: int = 0
    count: int = 1

    @public
    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            rule = f"cannot be index {self.index} of count {self.count}."
            raise DataError(message(rule, mend="Give 0 <= index < count."))

    @public
    def rows(self, batch_size: int) -> range:
        """The rows of a global batch that belong to this shard.

        Raises:
            DataError: `batch_size` is no multiple of `count`.
        """
        if batch_size % self.count:
            below = batch_size - batch_size % self.count
            sizes = " or ".join(str(size) for size in (below, below + self.count) if size)
            rule = f"cannot divide batch_size {batch_size} among shard.count {self.count} data ranks."
            mend = f"Make the global batch a multiple of {self.count}: batch_size {sizes}."
            raise DataError(message(rule, mend=mend))
        rows = batch_size // self.count
        return range(self.index * rows, (self.index + 1) * rows)


WHOLE = Shard()
"""The whole global batch."""


class Data(Protocol):
    """The interface of a data set for a training loop. `Tokens` and `Packed` are; so is anything with these three.

    Example:
        >>> class Zeros:
        ...     global_batch_size = 4
        ...     def batch(self, step, shard=fs.data.Shard()):
        ...         return {name: torch.zeros(len(shard.rows(4)), 8).long() for name in ("tokens", "targets")}
        ...     def fingerprint(self):
        ...         return "zeros"
        >>> Zeros().batch(0, fs.data.Shard(1, 2))["tokens"].shape
        torch.Size([2, 8])
    """

    @property
    def global_batch_size(self) -> int:
        """Rows of one step over all data-parallel ranks."""
        ...

    def batch(self, step: int, shard: Shard = ...) -> dict[str, torch.Tensor]:
        """The rows of `shard` at `step`: a pure function."""
        ...

    def fingerprint(self) -> str:
        """A short text that differs when the batches differ."""
        ...
