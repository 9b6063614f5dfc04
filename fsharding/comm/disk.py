"""Tensors whose elements are in a file: written once, checked when they are read, and gone with their last reference.

In: tensors. Out: `OnDisk`, a read-only tensor; an operation on one reads it first. Reads and writes run in threads.
A process has one file, without a name, so that nothing is left of it even after kill -9. It is a row of extents; those
of tensors that are gone are used again. Slices along dim 0 are parts of the same extents.
Guarantee: a tensor has the bits that were written, or an error names the file and the place.
"""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from fsharding.base import _compat
from fsharding.base.errors import DiskError, message
from fsharding.base.local_paths import check_local

__all__ = ["OnDisk", "disk_folder", "extent_sizes", "in_memory", "joined", "reserve", "rows_together", "store"]

_PIECE = 8 << 20
"""Most bytes of an extent; it is read and checked as a whole."""

_ROW = 64 << 10
"""Bytes of a row of dim 0 from which on an extent has no part of another row, since rows are read by themselves."""

_TOGETHER = 2 << 20
"""Elements of smaller rows that share extents; a range of so many rows begins and ends with an extent."""

_ALIGN = 4096

_IN_FLIGHT = 64 << 20
"""Bytes that may wait to be written; a tensor that would be more waits for the oldest."""

_MEND = "Give a directory with more room: FSHARDING_DISK=/path/of/a/fast/disk. The state is as it was before."


def disk_folder() -> Path:
    """Return the directory of the file: `FSHARDING_DISK`, or that of temporary files."""
    folder = os.environ.get("FSHARDING_DISK") or tempfile.gettempdir()
    check_local(folder)
    return Path(folder)


class _Extent(NamedTuple):
    """Bytes of the file.

    Attributes:
        offset: where they begin.
        size: how many there are.
        checksum: crc32 of them, when they have been written.
    """

    offset: int
    size: int
    checksum: Future[int]


class _Space:
    """Where extents of a file begin: at a freed one of the same size, else in any free range, else at the end.

    Attributes:
        end: of the last extent in use.
    """

    def __init__(self) -> None:
        self.end = 0
        self._by_size: dict[int, list[int]] = {}
        self._ranges: list[tuple[int, int]] = []

    def take(self, size: int, limit: int) -> int:
        """Return where an extent begins; freed ones of other sizes are joined rather than to go past a limit."""
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
        """Note that an extent may be used again."""
        self._by_size.setdefault(size, []).append(offset)

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

    def __init__(self) -> None:
        # Leaves are on disk because memory is short, so freed memory must not be kept for later allocations.
        _compat.map_large_allocations()
        self.folder = disk_folder()
        self._fd = _unnamed(self.folder)
        self._size = 0
        self._planned = False
        self._space = _Space()
        self._freed: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="fsharding-disk")
        self._written: deque[tuple[int, Future[int]]] = deque()
        weakref.finalize(self, os.close, self._fd)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def reserve(self, sizes: Sequence[int]) -> None:
        """Take room for extents that will be written, beside those that are, and give back what is not needed.

        Raises:
            DiskError: there is not so much room.
        """
        with self._lock:
            self._take_back()
            self._space.join()
            end = self._space.end + max(0, sum(sizes) - self._space.room(max(sizes, default=_ALIGN)))
            self._take(max(0, end - self._size))
            self._shorten(end)
            self._planned = bool(sizes)

    def _shorten(self, size: int) -> None:
        if size < self._size:
            os.ftruncate(self._fd, size)
            self._size = size

    def _take(self, size: int) -> None:
        """Make the file longer."""
        if not size:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, self._size, size)
        except OSError as error:
            rule = f"cannot take {size:,} bytes more in {self.folder}, beside {self._size:,}: {error.strerror}."
            raise DiskError(message(rule, mend=_MEND)) from error
        self._size += size

    def _extent(self, size: int) -> int:
        """Where an extent of a size begins: a free one, or one after all others."""
        offset = self._space.take(size, self._size)
        try:
            self._take(max(0, self._space.end - self._size))
        except DiskError:
            self._space.free(offset, size)
            raise
        return offset

    def write(self, x: Tensor, ready: Callable[[], object]) -> list[_Extent]:
        """Start to write a contiguous tensor of the CPU, which must not change any more.

        Args:
            ready: waits until its elements are there.
        """
        flat = x.detach().reshape(-1).view(torch.uint8)
        sizes = _sizes(x)
        with self._lock:
            self._take_back()
            offsets = [self._extent(_aligned(n)) for n in sizes]
        result: list[_Extent] = []
        for part, at, size in zip(flat.split([*sizes]), offsets, sizes, strict=True):
            self._make_room(size)
            future = self._threads.submit(self._write, part, at, ready)
            self._written.append((size, future))
            result.append(_Extent(at, size, future))
        return result

    def _make_room(self, size: int) -> None:
        """Wait for the oldest writes while too much is in flight."""
        while self._written and (self._written[0][1].done() or sum(n for n, _ in self._written) + size > _IN_FLIGHT):
            self._written.popleft()[1].exception()

    def _write(self, part: Tensor, offset: int, ready: Callable[[], object]) -> int:
        ready()
        view = _bytes_of(part)
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self._fd, view[done:], offset + done)
            except OSError as error:
                rule = f"cannot write to the file of {self.folder} at {offset + done:,}: {error.strerror}."
                raise DiskError(message(rule, mend=_MEND)) from error
        return zlib.crc32(view)

    def start_read(self, extents: Sequence[_Extent], into: Tensor) -> list[Future[None]]:
        """Start to read extents one after the other into bytes."""
        parts = into.split([extent.size for extent in extents])
        return [self._threads.submit(self._read, x, part) for x, part in zip(extents, parts, strict=True)]

    def _read(self, extent: _Extent, into: Tensor) -> None:
        checksum = extent.checksum.result()
        view = _bytes_of(into)
        done = 0
        while done < len(view):
            place = f"the file of {self.folder} at {extent.offset + done:,}"
            try:
                count = os.preadv(self._fd, [view[done:]], extent.offset + done)
            except OSError as error:
                raise DiskError(message(f"cannot read {place}: {error.strerror}.", mend=_LOAD)) from error
            if not count:
                raise DiskError(message(f"found the end of {place}.", mend=_LOAD))
            done += count
        if zlib.crc32(view) != checksum:
            rule = f"found other bytes than it wrote in the file of {self.folder}, from {extent.offset:,} to"
            raise DiskError(message(f"{rule} {extent.offset + extent.size:,}.", mend=_LOAD))

    def free(self, extents: Sequence[_Extent]) -> None:
        """Note that nothing refers to extents any more."""
        # A write that is under way still uses its extent.
        for extent in extents:
            extent.checksum.add_done_callback(functools.partial(self._let_go, extent.offset, _aligned(extent.size)))

    def _let_go(self, offset: int, size: int, _: object) -> None:
        # Never waits for the lock: a collection of garbage may run while it is held. Appending is atomic.
        self._freed.append((offset, size))
        if not self._planned and self._lock.acquire(blocking=False):
            try:
                self._take_back()
                self._space.join()
                self._shorten(self._space.end)
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._freed:
            self._space.free(*self._freed.popleft())


_LOAD = "Load the last checkpoint, and look at this disk."


def _bytes_of(x: Tensor) -> memoryview:
    array: Any = x.numpy()
    return memoryview(array)


def _buffer(size: int, pinned: bool) -> Tensor:
    """Bytes to read into."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return _compat.fresh((size,), torch.uint8, torch.device("cpu"))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _unnamed(folder: Path) -> int:
    """Open a file without a name, which goes when its process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(folder, getattr(os, "O_TMPFILE", 0) | os.O_RDWR, 0o600)
        except OSError:  # a system without such files
            fd, name = tempfile.mkstemp(dir=folder)
            os.unlink(name)
            return fd
    except OSError as error:
        raise DiskError(message(f"cannot make a file in {folder}: {error.strerror}.", mend=_MEND)) from error


@functools.cache
def _file() -> _File:
    return _File()


def rows_together(shape: Sequence[int]) -> int:
    """Return how many rows of dim 0 to read and write together."""
    return max(1, _TOGETHER // max(1, math.prod(shape[1:])))


def _sizes(x: Tensor) -> list[int]:
    """How a tensor is split into extents."""
    row = x.nbytes // x.shape[0] if x.ndim and x.shape[0] else 0
    together = row * (1 if row >= _ROW else rows_together(x.shape)) if row else x.nbytes
    lengths = [min(together, x.nbytes - first) for first in range(0, x.nbytes, together)] if x.nbytes else []
    return [min(_PIECE, n - first) for n in lengths for first in range(0, n, _PIECE)]


class _Stored:
    """Extents of a file that are free again when the last tensor on them is gone."""

    def __init__(self, file: _File, extents: Sequence[_Extent]) -> None:
        self.file = file
        self.extents = extents
        weakref.finalize(self, file.free, extents)


class _Part(NamedTuple):
    """Bytes of some extents: from `start` to `stop`, counted over all of them."""

    stored: _Stored
    start: int
    stop: int

    def cut(self) -> tuple[list[_Extent], int]:
        """Return the extents that have any of the bytes, and where the first of them begins."""
        ends = itertools.accumulate(extent.size for extent in self.stored.extents)
        pairs = [*zip(self.stored.extents, ends, strict=True)]
        inside = [(x, end) for x, end in pairs if end > self.start and end - x.size < self.stop]
        return [x for x, _ in inside], inside[0][1] - inside[0][0].size if inside else self.start


class OnDisk(Tensor):
    """A contiguous tensor whose elements are in a file. It can't be written; other operations read it first."""

    parts: tuple[_Part, ...]
    _coming: Callable[[], Tensor] | None

    __torch_function__ = _compat.no_torch_function

    @staticmethod
    def of(parts: Sequence[_Part], shape: Sequence[int], dtype: torch.dtype) -> OnDisk:
        """Make one of parts that follow each other."""
        x: Any = _compat.wrapper_tensor(OnDisk, shape, dtype)
        x.parts, x._coming = tuple(parts), None
        return x

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = _VIEWS.get(func)
        found = NotImplemented if view is None else view(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        if any(isinstance(x, OnDisk) for x in torch_pytree.tree_leaves(_written(func, args, kwargs or {}))):
            raise DiskError(message("cannot write a tensor on disk in place.", mend="Compute a new one: 2 * x."))
        args, kwargs = torch_pytree.tree_map_only(OnDisk, in_memory, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled with its elements; another process has it in its own file."""
        return store, (self.read(),)

    def __deepcopy__(self, memo: Any) -> OnDisk:
        return OnDisk.of(self.parts, self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"OnDisk({str(self.dtype).removeprefix('torch.')}{list(self.shape)})"

    def start_reading(self, *, pinned: bool = False) -> None:
        """Start to read it, for the next `read`."""
        if self._coming is None:
            self._coming = self._start(pinned)

    def read(self, *, pinned: bool = False) -> Tensor:
        """Return its elements, in new memory.

        Args:
            pinned: in pinned memory, from which a device copies without the host.

        Raises:
            DiskError: the file cannot be read, or has other bytes than were written.
        """
        coming, self._coming = self._coming or self._start(pinned), None
        return coming()

    def _start(self, pinned: bool) -> Callable[[], Tensor]:
        cuts = [part.cut() for part in self.parts]
        sizes = [sum(x.size for x in extents) for extents, _ in cuts]
        buffers = [_buffer(size, pinned) for size in sizes]
        reads = [
            part.stored.file.start_read(extents, into)
            for part, (extents, _), into in zip(self.parts, cuts, buffers, strict=True)
        ]

        def result() -> Tensor:
            for future in (future for several in reads for future in several):
                future.result()
            parts = [
                buffer[part.start - first : part.stop - first]
                for part, (_, first), buffer in zip(self.parts, cuts, buffers, strict=True)
            ]
            flat = parts[0] if len(parts) == 1 else torch.cat(parts)
            # Bytes that begin elsewhere than their dtype may: a view of them would be refused.
            flat = flat if flat.storage_offset() % 16 == 0 else flat.clone()
            return flat.view(self.dtype).view(self.shape)

        return result

    def settle(self) -> None:
        """Wait until it has been written.

        Raises:
            DiskError: it could not be.
        """
        for part in self.parts:
            for extent in part.stored.extents:
                extent.checksum.result()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    names = [x.name for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    given = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return [given[name] for name in names if name in given]


def store(x: Tensor, ready: Callable[[], object] = lambda: None) -> OnDisk:
    """Start to write a tensor of the CPU, which must not change any more.

    Args:
        ready: waits until its elements are there; a thread calls it.

    Raises:
        DiskError: there is no room. An error of the write comes with `settle` or `read`.
    """
    x = x.contiguous()
    file = _file()
    extents = file.write(x, ready) if x.nbytes else []
    return OnDisk.of([_Part(_Stored(file, extents), 0, x.nbytes)], x.shape, x.dtype)


def joined(rows: Sequence[OnDisk], shape: Sequence[int]) -> OnDisk:
    """Concatenate tensors to one of the given shape, without reading them."""
    return OnDisk.of([part for x in rows for part in x.parts], shape, rows[0].dtype)


def in_memory(x: Tensor) -> Tensor:
    """Return a tensor whose elements are in memory: one on disk is read, another is itself."""
    return x.read() if isinstance(x, OnDisk) else x


def extent_sizes(leaves: Iterable[tuple[Sequence[int], torch.dtype]]) -> list[int]:
    """Return the bytes of each extent of the file that tensors of these shapes and dtypes take."""
    stand_ins = (torch.empty(tuple(shape), dtype=dtype, device="meta") for shape, dtype in leaves)
    return [_aligned(size) for x in stand_ins for size in _sizes(x)]


def reserve(sizes: Sequence[int]) -> None:
    """Take room for extents of the file that will be written; without any, give back what is free.

    Raises:
        DiskError: there is not so much room.
    """
    if sizes or _file.cache_info().currsize:
        _file().reserve(sizes)


# ---------------------------------------------------------------------------------------------------- views of the file
def _rows(x: OnDisk, start: int, stop: int) -> OnDisk:
    """Rows of dim 0."""
    width = x.nbytes // x.shape[0] if x.shape[0] else 0
    first, last = start * width, max(start, stop) * width
    parts: list[_Part] = []
    for part, end in zip(x.parts, itertools.accumulate(p.stop - p.start for p in x.parts), strict=True):
        before = end - (part.stop - part.start)
        low, high = max(first - before, 0), min(last, end) - before
        if low < high:
            parts.append(part._replace(start=part.start + low, stop=part.start + high))
    parts = parts or [x.parts[0]._replace(stop=x.parts[0].start)]
    return OnDisk.of(parts, (max(start, stop) - start, *x.shape[1:]), x.dtype)


def _itself(x: OnDisk, *_: Any, **options: Any) -> Any:
    return NotImplemented if any(x is not None for x in options.values()) else OnDisk.of(x.parts, x.shape, x.dtype)


def _viewed(x: OnDisk, size: Sequence[int]) -> Any:
    known = math.prod(n for n in size if n != -1)
    shape = [x.numel() // known if n == -1 and known else n for n in size]
    return OnDisk.of(x.parts, shape, x.dtype) if math.prod(shape) == x.numel() else NotImplemented


def _selected(x: OnDisk, dim: int, index: int) -> Any:
    if dim % x.ndim:
        return NotImplemented
    index += x.shape[0] if index < 0 else 0
    row = _rows(x, index, index + 1)
    return OnDisk.of(row.parts, x.shape[1:], x.dtype)


def _sliced(x: OnDisk, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    first, last, step = slice(start, end, step).indices(x.shape[dim])
    if step != 1:
        return NotImplemented
    if (first, last) == (0, x.shape[dim]):
        return _itself(x)
    return NotImplemented if dim % x.ndim else _rows(x, first, last)


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
}
"""Operations whose result is the same file, or a part of it."""
