"""One `torch.save` record of one tensor, looked at without torch: where its values are, and how they are strided.

In: a window on bytes. Out: a `Record`. The zip's directory is read by Python's zipfile, its pickle with stand-ins for
the three functions that a tensor needs, so that nothing which a file names is ever called.
Law: whatever is no plain tensor, or reaches outside of its record, is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Record", "Window", "parse_record"]

_PICKLE_LIMIT = 1 << 16
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class Record(NamedTuple):
    """A tensor in a file.

    Attributes:
        dtype: of its elements.
        shape: its sizes.
        stride: in elements.
        start: byte of the record at which its first element is.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int


class Window(io.RawIOBase):
    """Bytes that are fetched when they are asked for, as a file.

    Args:
        fetch: gives the bytes from a start to a stop.
        length: how many there are.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], length: int) -> None:
        self._fetch, self._length, self._at = fetch, length, 0

    def seekable(self) -> bool:
        """It is."""
        return True

    def readable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves to a place."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError(22, "seek to before the beginning")
        self._at = origin + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fills a buffer, or what of it there are bytes for."""
        target = memoryview(buffer).cast("B")
        stop = min(self._at + len(target), self._length)
        data = self._fetch(self._at, stop) if stop > self._at else b""
        target[: len(data)] = data
        self._at += len(data)
        return len(data)


def parse_record(window: Window, length: int) -> Record:
    """Looks at a record.

    Args:
        window: on the record.
        length: of the record in bytes.

    Raises:
        ValueError: it is something else, with the reason.
    """
    try:
        with zipfile.ZipFile(window) as archive:
            members = {name.partition("/")[2]: info for name, info in archive.NameToInfo.items()}
    except (zipfile.BadZipFile, struct.error, NotImplementedError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no torch.save record: {error}") from error
    if "byteorder" in members and _content(window, members, "byteorder", 16) != sys.byteorder.encode():
        raise ValueError("it was written on a machine of another byte order")
    found = _unpickled(_content(window, members, "data.pkl", _PICKLE_LIMIT))
    if found.offset < 0 or min((*found.size, *found.stride), default=0) < 0 or len(found.size) != len(found.stride):
        raise ValueError("its sizes and strides are none")
    first, room = _place(window, members, f"data/{found.storage.key}")
    if first + room > length:
        raise ValueError("its values reach outside of it")
    last = found.offset + sum((n - 1) * step for n, step in zip(found.size, found.stride, strict=True)) + 1
    if math.prod(found.size) and last * found.dtype.itemsize > room:
        raise ValueError(f"it has {room:,} bytes of values, fewer than its sizes and strides need")
    return Record(found.dtype, found.size, found.stride, first + found.offset * found.dtype.itemsize)


def _place(window: Window, members: dict[str, zipfile.ZipInfo], name: str) -> tuple[int, int]:
    """Where the content of a member begins, and its size."""
    if name not in members:
        raise ValueError(f"it has no {name}")
    info = members[name]
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
        raise ValueError(f"its {name} is compressed or encrypted")
    window.seek(info.header_offset)
    head = window.read(_LOCAL_HEADER.size)
    if head is None or len(head) != _LOCAL_HEADER.size:
        raise ValueError(f"its {name} is cut off")
    mark, of_name, of_extra = _LOCAL_HEADER.unpack(head)
    if mark != b"PK\3\4":
        raise ValueError(f"its {name} is not where its directory says")
    return info.header_offset + _LOCAL_HEADER.size + of_name + of_extra, info.file_size


def _content(window: Window, members: dict[str, zipfile.ZipInfo], name: str, limit: int) -> bytes:
    start, size = _place(window, members, name)
    if size > limit:
        raise ValueError(f"its {name} has {size:,} bytes, more than a tensor's")
    window.seek(start)
    data = window.read(size)
    if data is None or len(data) != size:
        raise ValueError(f"its {name} is cut off")
    return data


# -------------------------------------------------------------------------------------------------------------- pickle


class _Storage(NamedTuple):
    dtype: torch.dtype | None
    key: str


class _Rebuilt(NamedTuple):
    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _StandIn:
    """What a global of the pickle becomes: has no attributes that a pickle could set."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        raise ValueError("it holds more than a tensor")


class _Empty(_StandIn):
    """In place of `OrderedDict`: hooks, of which a saved tensor has none."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        return None if not args else super().__call__(*args)


class _Rebuild(_StandIn):
    """In place of `_rebuild_tensor_v2`, and of `_v3`, whose last argument is the dtype."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        storage, offset, size, stride, *rest = args
        dtype = storage.dtype or rest[-1]
        if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
            raise ValueError("it holds more than a tensor")
        return _Rebuilt(storage, int(offset), tuple(map(int, size)), tuple(map(int, stride)), dtype)


class _AnyStorage(_StandIn):
    """In place of `UntypedStorage`: the dtype comes later."""

    __slots__ = ()


_GLOBALS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _Rebuild(),
    ("torch._utils", "_rebuild_tensor_v3"): _Rebuild(),
    ("collections", "OrderedDict"): _Empty(),
    ("torch.storage", "UntypedStorage"): _AnyStorage(),
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{
        ("torch", f"{kind}Storage"): dtype
        for kind, dtype in {
            "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
            "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
            "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
        }.items()
    },
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise ValueError(f"it names {module}.{name}, which no tensor needs")
        return _GLOBALS[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(key, str):
            raise ValueError("it holds more than a tensor")
        return _Storage(dtype if isinstance(dtype, torch.dtype) else None, key)


def _unpickled(data: bytes) -> _Rebuilt:
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"its pickle is broken: {type(error).__name__}: {error}") from error
    if not isinstance(found, _Rebuilt):
        raise ValueError(f"it holds a {type(found).__name__}, no tensor")
    return found
