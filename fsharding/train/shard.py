"""The interface of data for a training loop: batches as a pure function of step and shard."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from fsharding.base.errors import DataError, message
from fsharding.base.public import public

__all__ = ["WHOLE", "Data", "Shard"]


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of every global batch that one data rank reads: rows [index * B / count, (index + 1) * B / count).

    Attributes:
        index: Number of the part, in [0, count). Default: 0.
        count: Number of parts. Default: 1, the full batch.

    Raises:
        DataError: `index` is outside [0, count).

    Example:
        >>> [fs.data.Shard(index, count=2).rows(8) for index in range(2)]
        [range(0, 4), range(4, 8)]
    """

    index: int = 0
    count: int = 1

    @public
    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            rule = f"got index {self.index} for count {self.count}."
            raise DataError(message(rule, mend="Pass 0 <= index < count."))

    @public
    def rows(self, batch_size: int) -> range:
        """Return the row numbers of this shard in a global batch.

        Args:
            batch_size: Number of rows of the global batch.

        Returns:
            A range of `batch_size / count` rows.

        Raises:
            DataError: `batch_size` isn't a multiple of `count`.
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
"""The full global batch."""


class Data(Protocol):
    """The interface of a data set for a training loop: any object with these three, such as `Tokens` and `Packed`.

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
        """Number of rows of one step over all data ranks."""
        ...

    def batch(self, step: int, shard: Shard = ...) -> dict[str, torch.Tensor]:
        """Return the rows of `shard` at `step`, as a pure function."""
        ...

    def fingerprint(self) -> str:
        """Return a short text that differs if the batches differ."""
        ...
