"""Files that `torch.save` wrote, looked at without torch: where the values of each tensor are, and their strides.

In: a window on bytes. Out: a `Record`, or a tree of them. The zip's directory is read by Python's zipfile, its pickle
as inert data, so that nothing which a file names is ever called.
Guarantee: whatever is no plain tensor, or reaches outside of its file, is refused.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from fsharding.base.errors import listed
from fsharding.checkpoint.inert_pickle import Global, Made, Pairs, unpickled

__all__ = ["WHOLE", "OddTensorError", "Record", "Unread", "Window", "parse_file", "parse_plain", "parse_record"]

_PICKLE_LIMIT = 1 << 16
_DIRECTORY_LIMIT = 1 << 17
"""Bytes of the pickle and of the zip's directory of one tensor."""

WHOLE = 128 << 20
"""Bytes of each, of a file of many tensors."""

_DEPTH = 100
_FREE_VALUES = 10_000
"""How deep what a file holds may be, and how many values it may have beyond one for each byte."""
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


class Unread(NamedTuple):
    """A tensor in a file that is not read.

    Attributes:
        why: what it is, and what to save instead.
    """

    why: str


class OddTensorError(ValueError):
    """A tensor of a kind that is not read: sparse, quantized, without values, of a subclass."""


class Window(io.RawIOBase):
    """Bytes that are fetched when they are asked for, as a file.

    Args:
        fetch: gives the bytes from a start to a stop.
        most: how many are given at once.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], length: int, most: int = _DIRECTORY_LIMIT) -> None:
        self._fetch = fetch
        self._length = length
        self._most = most
        self._at = 0

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

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes; a size that is too large is refused before there is memory for it."""
        stop = self._length if size < 0 else min(self._at + size, self._length)
        if stop - self._at > self._most:
            raise ValueError(f"its directory has {stop - self._at:,} bytes; at most {self._most:,} are read")
        data = self._fetch(self._at, stop) if stop > self._at else b""
        self._at += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        """Fills a buffer, or what of it there are bytes for."""
        target = memoryview(buffer).cast("B")
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)


def parse_record(window: Window, length: int) -> Record:
    """Looks at a record.

    Args:
        length: of the record in bytes.

    Raises:
        OddTensorError: it is a tensor of a kind that is not read.
        ValueError: it is something else, with the reason.
    """
    members = _members(window)
    pickled = _content(window, members, "data.pkl", _PICKLE_LIMIT)
    try:
        held = unpickled(pickled, _find_tensor, _storage)
    except ValueError:
        if why := _odd_in(pickled):
            raise OddTensorError(why) from None
        raise
    result = _rebuilt(held)
    if result is None:
        kinds = {Pairs: "dict", list: "list", tuple: "tuple", torch.dtype: "dtype"}
        raise ValueError(f"it holds a {kinds.get(type(held), 'value')}, no tensor")
    return _located(window, members, result, length)


def parse_file(window: Window, length: int) -> Any:
    """Looks at a file of dicts and lists of tensors.

    Args:
        length: of the file in bytes.

    Returns:
        Dicts by strings, lists, a `Record` or `Unread` for each tensor, and None for whatever is nothing of these.

    Raises:
        ValueError: it is something else, with the reason.
    """
    members = _members(window)
    pickled = _content(window, members, "data.pkl", WHOLE)
    # A dict may be in two dicts, which are in two dicts, and so on: all together is to be about as much as is written.
    left = _FREE_VALUES + len(pickled)

    def grow(node: Any, path: tuple[str, ...]) -> Any:
        nonlocal left
        left -= 1
        if len(path) > _DEPTH or left < 0:
            raise ValueError("what it holds is too deep, or too much for its size")
        if isinstance(node, Made):
            try:
                if why := _why_odd(node):
                    return Unread(why)
                if (result := _rebuilt(node)) is not None:
                    return _located(window, members, result, length)
            except OddTensorError as odd:
                return Unread(str(odd))
            except ValueError as error:
                raise ValueError(f"{'.'.join(path)}: {error}" if path else str(error)) from error
            node = _pairs(node) if node.kind == _ORDERED else None
        if isinstance(node, Pairs):
            grown: dict[str, Any] = {}
            for key, value in node:
                name = _name(key)
                if name in grown:
                    raise ValueError(f"two entries have the name {'.'.join((*path, name))}")
                grown[name] = grow(value, (*path, name))
            return grown
        if isinstance(node, list | tuple):
            return [grow(value, (*path, str(i))) for i, value in enumerate(node)]
        return None

    return grow(unpickled(pickled, _find_any, _storage), ())


def parse_plain(window: Window, entries: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Read plain values of a file with a dict, or a list of one, or an `argparse.Namespace`; nothing in it is run.

    Args:
        entries: names to return; by default all.

    Returns:
        None, numbers, strings, and lists, tuples and dicts of them to a depth of three. Anything else is a name: of a
        function, as in "torch.nn.functional.silu", or of a class.

    Raises:
        ValueError: the file holds something else.
    """
    # Any global may be named, because each stays a name: arguments of a run hold enums and functions.
    pickled = _content(window, _members(window), "data.pkl", WHOLE)
    held = unpickled(pickled, Global, _storage)
    held = held[0] if isinstance(held, list) and len(held) == 1 and not isinstance(held, Pairs) else held
    pairs = held.state if isinstance(held, Made) else held
    pairs = Pairs() if pairs is None else pairs  # None itself, or a namespace without attributes
    if not isinstance(pairs, Pairs):
        raise ValueError("it holds no dict")
    left = 10_000 + len(pickled)  # lists may share elements: all together are to be about as many as are written

    def grow(value: Any, levels: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("what it holds is too much for its size")
        if type(value) in _VALUES:
            return value
        kind = value.kind if isinstance(value, Made) else value
        if levels and isinstance(value, Made) and isinstance(value.state, Pairs):
            return grow(value.state, levels)
        if levels and isinstance(value, Pairs):
            return {key: grow(each, levels - 1) for key, each in value if isinstance(key, str)}
        if levels and isinstance(value, list | tuple) and not isinstance(value, Global):
            grown = [grow(each, levels - 1) for each in cast("list[Any]", value)]
            return tuple(grown) if isinstance(value, tuple) else grown
        return str(kind) if isinstance(kind, Global) else type(kind).__name__

    return {key: grow(value, 3) for key, value in pairs if isinstance(key, str) and key in (entries or (key,))}


_VALUES = (bool, int, float, str, type(None))


def _name(key: Any) -> str:
    """The text of a key: of a number, or of several in a tuple, too."""
    if isinstance(key, str | int | float | bool | None):
        return str(key)
    if isinstance(key, tuple) and all(isinstance(part, str | int | float | bool | None) for part in key):
        return str(key)
    raise ValueError("a key is neither a text nor a number")


def _pairs(made: Made) -> Pairs:
    """The pairs of an `OrderedDict`: those that were put into it, or that it was called with."""
    if isinstance(made.state, Pairs):
        return made.state
    items = made.args[0] if made.args else []
    if not isinstance(items, list) or not all(isinstance(item, list | tuple) and len(item) == 2 for item in items):
        raise ValueError("it has no pairs where some belong")
    return Pairs((key, value) for key, value in items)


# ----------------------------------------------------------------------------------------------------------------- zip


def _members(window: Window) -> dict[str, zipfile.ZipInfo]:
    """The members of a zip by their names below its only directory; a byte order that is not ours is refused."""
    try:
        with zipfile.ZipFile(window) as archive:
            members = {name.partition("/")[2]: info for name, info in archive.NameToInfo.items()}
            count = len(archive.filelist)
    except (zipfile.BadZipFile, struct.error, NotImplementedError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"it is no torch.save record: {error}") from error
    if count != len(members):
        raise ValueError("two of its members have one name")
    if "byteorder" in members and _content(window, members, "byteorder", 16) != sys.byteorder.encode():
        raise ValueError("it was written on a machine of another byte order")
    return members


def _located(window: Window, members: dict[str, zipfile.ZipInfo], result: _Rebuilt, length: int) -> Record:
    """Where a tensor is, all of it inside its member."""
    first, room = _place(window, members, f"data/{result.storage.key}")
    if first + room > length:
        raise ValueError("its values reach outside of it")
    last = result.offset + sum((n - 1) * step for n, step in zip(result.size, result.stride, strict=True)) + 1
    if math.prod(result.size) and last * result.dtype.itemsize > room:
        raise ValueError(f"it has {room:,} bytes of values, fewer than its sizes and strides need")
    return Record(result.dtype, result.size, result.stride, first + result.offset * result.dtype.itemsize)


def _place(window: Window, members: dict[str, zipfile.ZipInfo], name: str) -> tuple[int, int]:
    """Where the content of a member begins, and its size."""
    if name not in members:
        raise ValueError(f"it has no {name}")
    info = members[name]
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
        raise ValueError(f"its {name} is compressed or encrypted")
    if info.header_offset < 0:  # zipfile moves all of them by what seems to stand before the zip
        raise ValueError(f"its {name} is not where its directory says")
    window.seek(info.header_offset)
    head = window.read(_LOCAL_HEADER.size)
    if len(head) != _LOCAL_HEADER.size:
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
    if len(data) != size:
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


def _is_tensor_call(kind: Any) -> bool:
    return kind in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3"))


_ORDERED = Global("collections", "OrderedDict")
_UNTYPED = Global("torch.storage", "UntypedStorage")
_PARAMETERS = (("torch._utils", "_rebuild_parameter"), ("torch._utils", "_rebuild_parameter_with_state"))
_WITH_ATTRIBUTES = ("torch._tensor", "_rebuild_from_type_v2")

_GLOBALS: dict[tuple[str, str], Any] = {
    **{(module, name): Global(module, name) for module, name in (
        ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3"), _ORDERED, _UNTYPED,
    )},
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
"""Globals that one tensor needs."""

_MORE = {
    *_PARAMETERS, _WITH_ATTRIBUTES, ("torch", "Tensor"), ("torch.nn.parameter", "Parameter"),
    ("torch.nn.parameter", "Buffer"), ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"),
    ("torch.torch_version", "TorchVersion"), ("collections", "Counter"), ("collections", "defaultdict"),
    ("_codecs", "encode"),
    *(("builtins", name) for name in ("set", "complex", "bytearray", "dict")),
    *(("torch", f"{kind}Storage") for kind in ("QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4")),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.qscheme)),
}  # fmt: skip
"""Other globals that a state dict may have; none of them is ever called, and none makes a tensor."""


def _find_tensor(module: str, name: str) -> Any:
    if (module, name) not in _GLOBALS:
        raise ValueError(f"it names {module}.{name}, which no tensor needs")
    return _GLOBALS[module, name]


def _find_any(module: str, name: str) -> Any:
    if (result := _GLOBALS.get((module, name))) is not None:
        return result
    # Functions of torch that make tensors of other kinds, which the leaf is then refused for by its name.
    rebuilds = module in ("torch._utils", "torch._tensor") and name.startswith("_rebuild")
    # Classes of tensors, with what they are made of; each makes one leaf that is not read.
    of_tensors = module.partition(".")[0] == "torchao" or module.startswith("torch.distributed.")
    if (module, name) in _MORE or rebuilds or of_tensors or (module, name) in _registered():
        return Global(module, name)
    raise ValueError(f"it names {module}.{name}, which no state dict needs; nothing of it was run")


def _registered() -> set[tuple[str, str]]:
    """Globals that the user has told torch to allow in files."""
    known = (each[0] if isinstance(each, tuple) else each for each in torch.serialization.get_safe_globals())
    return {(kind.__module__, kind.__qualname__) for kind in known}


def _storage(pid: Any) -> _Storage:
    """A persistent id: `("storage", type, key, device, size)`."""
    if not isinstance(pid, tuple) or len(pid) < 3 or pid[0] != "storage" or not isinstance(pid[2], str):
        raise ValueError("it holds more than a tensor")
    return _Storage(pid[1] if isinstance(pid[1], torch.dtype) else None, pid[2])


_ODD = {
    "_rebuild_sparse_tensor": "is sparse: save x.to_dense()",
    "_rebuild_meta_tensor_no_storage": "is on the meta device, without values: save it with values",
    "_rebuild_qtensor": "is quantized: save x.dequantize()",
    "_rebuild_nested_tensor": "is a nested tensor: save its parts, x.unbind()",
}
"""What tensors are that are not read, by the function of torch that makes them."""

_CLASSES = {"DTensor": "x.full_tensor()", "NestedTensor": "its parts, x.unbind()"}


def _why_odd(made: Made) -> str:
    """What a tensor is that is not read, and what to save instead; empty for any other value."""
    while made.kind in _PARAMETERS and made.args and isinstance(made.args[0], Made):
        made = made.args[0]
    if not isinstance(made.kind, Global) or not made.kind.name.startswith("_rebuild") or _is_tensor_call(made.kind):
        return ""
    place = {"_rebuild_wrapper_subclass": 0, "_rebuild_from_type_v2": 1}.get(made.kind.name)
    if place is None or len(made.args) <= place:
        return f"it {_ODD.get(made.kind.name, 'is a tensor of a kind that is not read: save a plain one')}"
    if made.kind == _WITH_ATTRIBUTES and made.args[place] in _PLAIN:
        func, _, args = (*made.args, ())[:3]
        return _why_odd(Made(func, args if isinstance(args, tuple) else ()))
    kind = made.args[place]
    mend = _CLASSES.get(kind.name if isinstance(kind, Global) else "", "x.dequantize(), or another plain tensor")
    return f"it is a {kind}: save {mend}"


def _odd_in(pickled: bytes) -> str:
    """What the tensor of a pickle is if it is of a kind that is not read; empty for anything else."""
    try:
        held = unpickled(pickled, _find_any, _storage)
        if not isinstance(held, Made):
            return ""
        if not (why := _why_odd(held)):
            _rebuilt(held)  # raises for flags
        return why
    except OddTensorError as odd:
        return str(odd)
    except ValueError:
        return ""


def _rebuilt(made: Any) -> _Rebuilt | None:
    """A dense tensor, taken out of the parameter or the tensor with attributes that it is; None for anything else."""
    for _ in range(3):
        if not isinstance(made, Made) or not isinstance(made.kind, Global):
            return None
        if made.kind in _PARAMETERS and made.args:
            made = made.args[0]
        elif made.kind == _WITH_ATTRIBUTES and len(made.args) > 2 and made.args[1] in (*_PLAIN,):
            func, _, args = made.args[:3]
            made = Made(func, args if isinstance(args, tuple) else ())
    return _dense(made) if isinstance(made, Made) and _is_tensor_call(made.kind) else None


_PLAIN = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer"))


def _dense(made: Made) -> _Rebuilt:
    """The arguments of `_rebuild_tensor_v2`, and of `_v3`, which has the dtype besides."""
    typed = made.kind.name == "_rebuild_tensor_v3"
    storage, offset, size, stride, _, _, *rest = (*made.args, *(None,) * (6 - len(made.args)))
    dtype, more = (rest[0] if rest else None, rest[1:]) if typed else (getattr(storage, "dtype", None), rest)
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError("it holds more than a tensor")
    # Bits that say how values are to be read, such as that of a complex conjugate.
    if any(table for table in more):
        flags = listed(str(key) for table in more if isinstance(table, Pairs) for key, _ in table)
        raise OddTensorError(f"its values are stored with the flag {flags}: save x.resolve_conj().resolve_neg()")
    size, stride = (_whole(sizes) for sizes in (size, stride))
    if type(offset) is not int or not 0 <= offset < 1 << 60 or len(size) != len(stride):
        raise ValueError("its sizes and strides are none")
    return _Rebuilt(storage, offset, size, stride, dtype)


def _whole(sizes: Any) -> tuple[int, ...]:
    """Sizes or strides."""
    if isinstance(sizes, Made) and sizes.kind == ("torch", "Size") and len(sizes.args) == 1:
        sizes = sizes.args[0]
    result = tuple(sizes) if isinstance(sizes, tuple | list) else (-1,)
    if not all(type(n) is int and 0 <= n < 1 << 60 for n in result):
        raise ValueError("its sizes and strides are none")
    return result
