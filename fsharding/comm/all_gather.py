"""The whole leaves of a bucket on their way, from pieces that the members of a group have.

In: this rank's pieces. Out: one flat buffer with every leaf whole. Where the members share memory, each writes its
pieces where they end, and nothing is copied after that; else rows travel, and are put together.
Law: the leaves are the same either way; what a buffer in shared memory has is read by all, and must not be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from fsharding import _compat
from fsharding.comm import bucket as buckets
from fsharding.comm.bucket import Bucket
from fsharding.comm.counters import record_sent
from fsharding.comm.shared_memory.transport import Joint
from fsharding.comm.transport import Empty, is_read_in_place, open_gather
from fsharding.mesh.device_mesh import Group

__all__ = ["Coming", "start_whole"]


class Coming(Protocol):
    """Whole leaves on their way. Either `join` or `drop` ends it.

    Attributes:
        buffer: where they will be, if it is not `empty` that makes it.
    """

    buffer: Tensor | None

    def join(self) -> Tensor:
        """Waits for all pieces: the flat buffer, as the bucket lays it out.

        Raises:
            RuntimeError: a member is gone, or the timeout of the group is over.
        """
        ...

    def drop(self, timeout: timedelta | None = None) -> None:
        """Waits for all pieces, which nobody wants. Raises as `join` does."""
        ...


def start_whole(bucket: Bucket, dtype: torch.dtype, group: Group, pieces: Sequence[Tensor], empty: Empty) -> Coming:
    """Starts to put together the whole leaves of a bucket, and casts this rank's pieces on the way.

    Args:
        bucket: the plan, the same on every member.
        dtype: of whole leaves.
        group: the members of the bucket; collective over it.
        pieces: this rank's, one for each leaf.
        empty: makes a flat buffer, for what does not lie in memory that the members share.
    """
    device = pieces[0].device
    if is_read_in_place(bucket.width * dtype.itemsize, group, device):
        return _Written(bucket, dtype, group, pieces)
    return _Joined(bucket, dtype, group, pieces, empty)


class _Written:
    """Each member writes its pieces where they end."""

    def __init__(self, bucket: Bucket, dtype: torch.dtype, group: Group, pieces: Sequence[Tensor]) -> None:
        self._joint = Joint(bucket.size * dtype.itemsize, group)
        self.buffer: Tensor | None = self._joint.buffer.view(dtype)
        wholes = buckets.whole_views(self.buffer, bucket)
        _compat.foreach_copy_(buckets.pieces_of(wholes, bucket, group.index), list(pieces))
        record_sent((group.size - 1) * bucket.width * dtype.itemsize, group.axes)
        self._joint.start()

    def join(self) -> Tensor:
        assert self.buffer is not None
        self._joint.wait()
        return self.buffer

    def drop(self, timeout: timedelta | None = None) -> None:
        self._joint.wait(timeout)


class _Joined:
    """Rows are put together when all have come."""

    def __init__(
        self, bucket: Bucket, dtype: torch.dtype, group: Group, pieces: Sequence[Tensor], empty: Empty
    ) -> None:
        self._bucket, self._dtype, self._empty = bucket, dtype, empty
        self.buffer: Tensor | None = None
        self._rows = open_gather(bucket.width, dtype, group, pieces[0].device, empty)
        _compat.foreach_copy_(buckets.piece_views(self._rows.mine, bucket, group.index), list(pieces))
        self._rows.start()

    def join(self) -> Tensor:
        rows = self._rows.wait()
        flat = self._empty(self._bucket.size, self._dtype)
        buckets.copy_out(rows, flat, self._bucket)
        self._rows.done()
        return flat

    def drop(self, timeout: timedelta | None = None) -> None:
        try:
            self._rows.wait(timeout)
        finally:
            self._rows.done()
