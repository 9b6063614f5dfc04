"""The tier "disk": tensors whose elements are in a file, written once, checked when read, gone with the last view."""

from __future__ import annotations

import functools
import itertools
import math
import os
import tempfile
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from fsharding.base import _compat
from fsharding.base.errors import DiskError, message
from fsharding.base.local_paths import check_local
from fsharding.checkpoint.byte_ranges import pread
from fsharding.comm.streams import streams_for
from fsharding.comm.tier import HOST, pinned, rows_together
from fsharding.sharding.memory_kinds import Lacking, LocalLeaf, Tier

__all__ = ["DISK", "OnDisk", "disk_folder", "planned_extents", "store"]

_PIECE = 8 << 20
"""Maximum bytes of an extent, which is read and checked at once."""

_ROW = 64 << 10
"""Rows of dim 0 of at least so many bytes share no extent: each is read alone."""

_ALIGN = 4096

_IN_FLIGHT = 64 << 20
"""Bytes that may wait to be written; a tensor that would be more waits for the oldest."""

_MEND = "Give a directory with more room: FSHARDING_DISK=/path/of/a/fast/disk. The state is as it was before."
_CPU = torch.device("cpu")
_LOAD = "Load the last checkpoint, and look at this disk."


def disk_folder() -> Path:
    """Return the directory of the file: `FSHARDING_DISK`, or the one for temporary files."""
    folder = os.environ.get("FSHARDING_DISK") or tempfile.gettempdir()
    check_local(folder)
    return Path(folder)


class _Extent:
    """Bytes of the file, which are free again when the last tensor on them is gone."""

    def __init__(self, file: _File, offset: int, size: int, checksum: Future[int]) -> None:
        self.file, self.offset, self.size = file, offset, size
        self.checksum = checksum
        """Of its bytes, when they have been written."""
        # A write that is under way still uses its bytes.
        weakref.finalize(self, checksum.add_done_callback, functools.partial(file.let_go, offset, _aligned(size)))


class _Span(NamedTuple):
    """Bytes of an extent."""

    extent: _Extent
    start: int
    stop: int


class _Space:
    """Where extents of a file begin: at a freed one of the same size, else in any free range, else at the end."""

    # Extents in use never overlap and end at or before `end`; `used` is the sum of their sizes. What is free below
    # `end` is in `_by_size`, extents as they were freed, or in `_ranges`, those that `join` has put together.

    def __init__(self) -> None:
        self.end = self.used = 0
        self._by_size: dict[int, list[int]] = {}
        self._ranges: list[tuple[int, int]] = []

    def take(self, size: int, limit: int) -> int:
        """Return where an extent begins; freed ones of other sizes are joined rather than to go past a limit."""
        self.used += size
        if self._by_size.get(size):
            return self._by_size[size].pop()
        offset = self._cut(size)
        if offset is None and self.end + size > limit:
            self.join()
            offset = self._cut(size)
        if offset is None:
            offset, self.end = self.end, self.end + size
        return offset

    def _cut(self, size: int) -> int | None:
        for i, (start, stop) in enumerate(self._ranges):
            if stop - start >= size:
                self._ranges[i] = (start + size, stop)
                return start
        return None

    def free(self, offset: int, size: int) -> None:
        """Note that an extent may be used again; after the last one the file is as at the beginning."""
        self._by_size.setdefault(size, []).append(offset)
        self.used -= size
        if not self.used:
            self.join()

    def join(self) -> None:
        """Join neighboring free extents to ranges; one that reaches the end moves the end."""
        known = [(offset, offset + size) for size, offsets in self._by_size.items() for offset in offsets]
        self._by_size, ranges = {}, list[tuple[int, int]]()
        for start, stop in sorted([*known, *self._ranges]):
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            elif start < stop:
                ranges.append((start, stop))
        if ranges and ranges[-1][1] == self.end:
            self.end = ranges.pop()[0]
        self._ranges = ranges

    def room(self, largest: int) -> int:
        """Return how many bytes the ranges hold for certain, in extents of at most a size."""
        return sum(max(0, stop - start - largest + _ALIGN) for start, stop in self._ranges)


class _File:
    """The file of this process, and what of it is free."""

    # `_planned` bytes stay taken, so that a full disk stops no step. They go with the last extent of a state, if
    # anything was written since they were planned (`_begun`): a state that is donated to another layout is freed before
    # the new one is written. Gradients alone (`_each_step`) are freed at the end of every step, and their room stays.

    def __init__(self) -> None:
        # Leaves are on disk because memory is short, so freed memory must not be kept for later allocations.
        _compat.map_large_allocations()
        self.folder = disk_folder()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            without_name = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise DiskError(message(f"cannot make a file in {self.folder}: {error.strerror}.", mend=_MEND)) from error
        self._fd = without_name.fileno()
        weakref.finalize(self, without_name.close)
        self.size = self._planned = 0
        self._begun = self._each_step = False
        self._space = _Space()
        self._freed: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="fsharding-disk")
        self._writes: deque[tuple[int, Future[int]]] = deque()

    # ------------------------------------------------------------------------------------------------------------- room
    def reserve(self, sizes: Sequence[int], donated: int, *, each_step: bool) -> None:
        """Reserve space for extents to write, besides those in use that aren't donated."""
        with self._lock:
            self._take_back()
            self._space.join()
            need = sum(sizes)
            if donated < self._space.used:  # else all is freed before anything is written
                need = self._space.end + max(0, need - self._space.room(max(sizes, default=_ALIGN)))
            self._grow(max(need, self._space.end))
            self._planned, self._begun, self._each_step = need, False, each_step
            self._shrink()

    def _grow(self, size: int) -> None:
        more = size - self.size
        try:
            if more > 0 and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, self.size, more)
        except OSError as error:
            rule = f"cannot take {more:,} bytes more in {self.folder}, beside {self.size:,}: {error.strerror}."
            raise DiskError(message(rule, mend=_MEND)) from error
        self.size = max(size, self.size)

    def _shrink(self) -> None:
        """Release space that is neither in use nor planned."""
        size = max(self._space.end, self._planned)
        if size < self.size:
            os.ftruncate(self._fd, size)
            self.size = size

    def let_go(self, offset: int, size: int, _: object) -> None:
        """Note that nothing refers to bytes any more."""
        # Never waits for the lock: a collection of garbage may run while it is held. Appending is atomic.
        self._freed.append((offset, size))
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._freed:
            self._space.free(*self._freed.popleft())
        if not self._space.used and self._begun and not self._each_step:
            self._planned = 0
        if not self._planned:
            self._space.join()
            self._shrink()

    # ------------------------------------------------------------------------------------------------- writes and reads
    def write(self, x: Tensor, ready: Callable[[], object]) -> list[_Extent]:
        """Start to write a contiguous tensor of the CPU, which must not change any more; see `store`."""
        flat = x.detach().reshape(-1).view(torch.uint8)
        sizes = _sizes(x)
        with self._lock:
            self._take_back()
            self._begun = True
            offsets = [self._space.take(_aligned(n), self.size) for n in sizes]
            try:
                self._grow(self._space.end)
            except DiskError:
                for offset, n in zip(offsets, sizes, strict=True):
                    self._space.free(offset, _aligned(n))
                raise
        result: list[_Extent] = []
        for part, at, size in zip(flat.split([*sizes]), offsets, sizes, strict=True):
            # Waits for the oldest; an error of it is raised where its tensor is read or settled.
            while self._writes and (self._writes[0][1].done() or sum(n for n, _ in self._writes) + size > _IN_FLIGHT):
                self._writes.popleft()[1].exception()
            future = self._threads.submit(self._write, part, at, ready)
            self._writes.append((size, future))
            result.append(_Extent(self, at, size, future))
        return result

    def _write(self, part: Tensor, offset: int, ready: Callable[[], object]) -> int:
        ready()
        view = memoryview(cast(Any, part.numpy()))
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self._fd, view[done:], offset + done)
            except OSError as error:
                rule = f"cannot write to the file of {self.folder} at {offset + done:,}: {error.strerror}."
                raise DiskError(message(rule, mend=_MEND)) from error
        return zlib.crc32(view)

    def start_read(self, extent: _Extent, into: Tensor) -> Future[None]:
        """Start to read an extent into bytes."""
        return self._threads.submit(self._read, extent, into)

    def _read(self, extent: _Extent, into: Tensor) -> None:
        checksum = extent.checksum.result()
        view = memoryview(cast(Any, into.numpy()))
        place = f"the file of {self.folder} at {extent.offset:,}"
        try:
            pread(self._fd, extent.offset, view)
        except OSError as error:
            raise DiskError(message(f"cannot read {place}: {error.strerror}.", mend=_LOAD)) from error
        except EOFError as error:
            raise DiskError(message(f"found the end of {place}.", mend=_LOAD)) from error
        if zlib.crc32(view) != checksum:
            rule = f"found other bytes than it wrote in the file of {self.folder}, from {extent.offset:,} to"
            raise DiskError(message(f"{rule} {extent.offset + extent.size:,}.", mend=_LOAD))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@functools.cache
def _file() -> _File:
    return _File()


def _sizes(x: Tensor) -> list[int]:
    """Return how a tensor is split into extents, in bytes."""
    row = x.nbytes // x.shape[0] if x.ndim and x.shape[0] else 0
    together = row * (1 if row >= _ROW else rows_together(x.shape)) if row else x.nbytes
    lengths = [min(together, x.nbytes - first) for first in range(0, x.nbytes, together)] if x.nbytes else []
    return [min(_PIECE, n - first) for n in lengths for first in range(0, n, _PIECE)]


def planned_extents(state: Sequence[LocalLeaf], grads: Sequence[LocalLeaf]) -> list[int]:
    """Return the bytes of each extent for a state and its gradients, twice: a step writes new ones first."""

    def taken(shape: tuple[int, ...], dtype: torch.dtype) -> list[int]:
        return [_aligned(size) for size in _sizes(torch.empty(shape, dtype=dtype, device="meta"))]

    sizes = [size for leaf in state for size in taken(*leaf)]
    for shape, dtype in grads:
        # Units are reduced one by one, so each row of a stack may have separate extents.
        rows = taken(shape[1:], dtype) * shape[0] if shape else []
        sizes += max(taken(shape, dtype), rows, key=sum)
    return 2 * sizes


# -------------------------------------------------------------------------------------------------------------- tensors
class _Disk(Tier):
    """The tier. A device copies through pinned memory; threads read and write the file."""

    name: ClassVar[str] = "disk"
    text: ClassVar[str] = "disk"
    can_fail: ClassVar[bool] = True

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Tier`."""
        return _compat.fresh(shape, dtype, device) if device.type == "cpu" else pinned(shape, dtype)

    def put(self, x: Tensor, into: Tensor | None = None) -> OnDisk:
        """See `Tier`; `into` is never written."""
        if x.is_cpu:
            return store(x)
        there, streams = HOST.put(x), streams_for(x.device)
        copied = streams.record("out")
        return store(there, lambda: streams.settle(copied))

    def get(self, x: Tensor, device: torch.device) -> Tensor:
        """See `Tier`."""
        return HOST.get(cast(OnDisk, x).read(device), device)

    def prefetch(self, x: Tensor, device: torch.device) -> None:
        """See `Tier`: start to read the file."""
        x = cast(OnDisk, x)
        x.coming = x.coming or x.start(device)

    def settle(self, x: Tensor, device: torch.device) -> None:
        """See `Tier`. Raises `DiskError` if it could not be written."""
        for span in cast(OnDisk, x).spans:
            span.extent.checksum.result()

    def reserve(
        self, state: Sequence[LocalLeaf], grads: Sequence[LocalLeaf], donated: Sequence[Tensor], lacking: Lacking
    ) -> None:
        """See `Tier`. Raises `DiskError`."""
        freed = {span.extent: _aligned(span.extent.size) for x in donated if isinstance(x, OnDisk) for span in x.spans}
        try:
            _file().reserve(planned_extents(state, grads), sum(freed.values()), each_step=not state)
        except DiskError:
            lacking(True)
            raise
        if ranks := lacking(False):
            rule = f"has too little room on the disk of rank {', '.join(map(str, ranks))}."
            raise DiskError(message(rule, mend="Look at what that rank says."))


DISK: Tier = _Disk()


class OnDisk(Tensor):
    """A contiguous tensor whose elements are in a file. It can't be written; other operations read it first."""

    tier: ClassVar[Tier] = DISK
    spans: tuple[_Span, ...]
    coming: Callable[[], Tensor] | None

    __torch_function__ = _compat.no_torch_function

    @staticmethod
    def of(spans: Sequence[_Span], shape: Sequence[int], dtype: torch.dtype) -> OnDisk:
        """Make one of bytes that follow each other."""
        x: Any = _compat.wrapper_tensor(OnDisk, shape, dtype)
        x.spans, x.coming = tuple(spans), None
        return x

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = _VIEWS.get(func)
        found = NotImplemented if view is None else view(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        if any(isinstance(x, OnDisk) for x in torch_pytree.tree_leaves(_written(func, args, kwargs or {}))):
            raise DiskError(message("cannot write a tensor on disk in place.", mend="Compute a new one: 2 * x."))
        args, kwargs = torch_pytree.tree_map_only(OnDisk, OnDisk.read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the elements; the receiving process stores them in its file."""
        return store, (self.read(),)

    def __deepcopy__(self, memo: Any) -> OnDisk:
        return OnDisk.of(self.spans, self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"OnDisk({str(self.dtype).removeprefix('torch.')}{list(self.shape)})"

    def read(self, device: torch.device = _CPU) -> Tensor:
        """Return its elements in new memory of the CPU, pinned if a device copies them. Raises `DiskError`."""
        coming, self.coming = self.coming or self.start(device), None
        return coming()

    def start(self, device: torch.device) -> Callable[[], Tensor]:
        """Start to read it; return what waits for its elements."""
        buffer = DISK.empty((sum(span.extent.size for span in self.spans),), torch.uint8, device)
        pieces = buffer.split([span.extent.size for span in self.spans])
        reads = [span.extent.file.start_read(span.extent, x) for span, x in zip(self.spans, pieces, strict=True)]

        def result() -> Tensor:
            for read in reads:
                read.result()
            ends = all(span.stop == span.extent.size for span in self.spans[:-1])
            if ends and not any(span.start for span in self.spans[1:]):  # its bytes follow each other
                first = self.spans[0].start if self.spans else 0
                flat = buffer[first : first + self.nbytes]
            else:
                flat = torch.cat([x[span.start : span.stop] for span, x in zip(self.spans, pieces, strict=True)])
            # Bytes that begin elsewhere than their dtype may: a view of them would be refused.
            flat = flat if flat.storage_offset() % 16 == 0 else flat.clone()
            return flat.view(self.dtype).view(self.shape)

        return result


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    names = [x.name for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    given = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return [given[name] for name in names if name in given]


def store(x: Tensor, ready: Callable[[], object] = lambda: None) -> OnDisk:
    """Start to write a tensor of the CPU, which must not change any more, after `ready` has returned in a thread."""
    x = x.contiguous()
    file = _file()
    extents = file.write(x, ready) if x.nbytes else []
    return OnDisk.of([_Span(extent, 0, extent.size) for extent in extents], x.shape, x.dtype)


# ---------------------------------------------------------------------------------------------------- views of the file
def _rows(x: OnDisk, start: int, stop: int) -> OnDisk:
    """Rows of dim 0."""
    width = x.nbytes // x.shape[0] if x.shape[0] else 0
    first, last = start * width, max(start, stop) * width
    spans: list[_Span] = []
    for span, end in zip(x.spans, itertools.accumulate(s.stop - s.start for s in x.spans), strict=True):
        before = end - (span.stop - span.start)
        low, high = max(first - before, 0), min(last, end) - before
        if low < high:
            spans.append(span._replace(start=span.start + low, stop=span.start + high))
    return OnDisk.of(spans, (max(start, stop) - start, *x.shape[1:]), x.dtype)


def _itself(x: OnDisk, *_: Any, **options: Any) -> Any:
    return NotImplemented if any(x is not None for x in options.values()) else OnDisk.of(x.spans, x.shape, x.dtype)


def _viewed(x: OnDisk, size: Sequence[int]) -> Any:
    known = math.prod(n for n in size if n != -1)
    shape = [x.numel() // known if n == -1 and known else n for n in size]
    return OnDisk.of(x.spans, shape, x.dtype) if math.prod(shape) == x.numel() else NotImplemented


def _selected(x: OnDisk, dim: int, index: int) -> Any:
    if dim % x.ndim:
        return NotImplemented
    index += x.shape[0] if index < 0 else 0
    row = _rows(x, index, index + 1)
    return OnDisk.of(row.spans, x.shape[1:], x.dtype)


def _sliced(x: OnDisk, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    first, last, step = slice(start, end, step).indices(x.shape[dim])
    if step != 1:
        return NotImplemented
    if (first, last) == (0, x.shape[dim]):
        return _itself(x)
    return NotImplemented if dim % x.ndim else _rows(x, first, last)


def _stacked(xs: Sequence[OnDisk], dim: int = 0) -> Any:
    if dim or not all(isinstance(x, OnDisk) and (x.shape, x.dtype) == (xs[0].shape, xs[0].dtype) for x in xs):
        return NotImplemented
    return OnDisk.of([span for x in xs for span in x.spans], (len(xs), *xs[0].shape), xs[0].dtype)


def _concatenated(xs: Sequence[OnDisk], dim: int = 0) -> Any:
    if dim or not all(isinstance(x, OnDisk) and (x.shape[1:], x.dtype) == (xs[0].shape[1:], xs[0].dtype) for x in xs):
        return NotImplemented
    return OnDisk.of([span for x in xs for span in x.spans], (sum(map(len, xs)), *xs[0].shape[1:]), xs[0].dtype)


def _unbound(x: OnDisk, dim: int = 0) -> Any:
    return NotImplemented if dim % x.ndim else [_selected(x, 0, i) for i in range(x.shape[0])]


_aten = torch.ops.aten
_VIEWS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _itself,
    _aten.alias.default: _itself,
    _aten.clone.default: _itself,
    _aten.view.default: _viewed,
    _aten._unsafe_view.default: _viewed,
    _aten.select.int: _selected,
    _aten.slice.Tensor: _sliced,
    _aten.unbind.int: _unbound,
    _aten.cat.default: _concatenated,
    _aten.stack.default: _stacked,
}
"""Operations whose result is the same file, or a part of it."""
