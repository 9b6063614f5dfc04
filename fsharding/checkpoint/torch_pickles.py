"""Read pickles of torch, and files of `torch.save`, as data: names in them are never looked up or called.

Guarantee: time and memory are in proportion to the bytes, and nothing is changed, whatever the bytes are.
"""

from __future__ import annotations

import functools
import io
import math
import os
import pickle
import struct
import sys
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import torch

from fsharding.base.errors import listed
from fsharding.checkpoint.byte_ranges import Range, Window
from fsharding.checkpoint.manifest import is_shape

_WHOLE, _RECORD = 128 << 20, 1 << 16  # bytes of the pickle of a file of many tensors, and of one tensor
_FREE, _BYTES_EACH = 10_000, 5  # limit for objects of a pickle, and bytes for each more; torch has one per 6 to 11

__all__ = [
    "Global", "Made", "OddTensorError", "Pairs", "TorchFile", "find_in", "named", "parse_record", "sizes_of",
    "torch_file", "unpickled",
]  # fmt: skip

_Run: TypeAlias = Callable[[Any], None]
Find: TypeAlias = Callable[[str, str], Any]  # the value of a global by module and name; raises a ValueError to refuse


# -------------------------------------------------------------------------------------------------------------- pickles
class Global(str):
    """A name in a pickle, which is never looked up."""

    def __new__(cls, module: str, name: str) -> Global:
        """Join the two parts of a name."""
        return super().__new__(cls, f"{module}.{name}")

    def __call__(self, *args: Any) -> Made:
        """Record a call."""
        return Made(self, args)

    def __setstate__(self, state: Any) -> None:
        raise ValueError(f"its pickle sets attributes of {self}")


class Pairs(list[tuple[Any, Any]]):
    """The items of a dict. Keys aren't hashed: the hash of nested tuples that share parts may take forever."""

    __slots__ = ()
    append = extend = None  # pyright: ignore[reportAssignmentType]  # a pickle may not fill it as a list

    def __setitem__(self, key: Any, value: Any) -> None:
        super().append((key, value))


class Made:
    """A call in a pickle, which is never made: callee, arguments, and the state or items that are set on the result."""

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: Any, args: tuple[Any, ...]) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None

    def __call__(self, *args: Any) -> Made:
        """Record a call."""
        return Made(self, args)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(self.state, Pairs):
            self.state = Pairs()
        self.state[key] = value

    def __setstate__(self, state: Any) -> None:
        if self.state is None:  # the items of an OrderedDict come first; its attributes are ignored
            self.state = state


def named(pairs: object) -> dict[str, Any]:
    """Convert pairs to a dict; refuse keys that aren't strings or are repeated."""
    if not isinstance(pairs, Pairs) or not all(isinstance(key, str) for key, _ in pairs):
        raise ValueError("it has no table of names where one belongs")
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("it has one name twice")
    return result


# The unpickler in C hashes keys, and allocates a memo of any requested size. This one only calls results of `find`.
class _Inert(pickle._Unpickler):  # pyright: ignore
    """Build numbers, strings, lists, tuples, `Pairs` and `Made`; sets become lists, frozen ones tuples."""

    def __init__(self, data: io.BytesIO, size: int, find: Find, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(data)
        self.find = find
        self.persistent_load: Any = persistent
        self.left = _FREE + size // _BYTES_EACH

    def find_class(self, module: str, name: str, /) -> Any:
        if self.proto < 3:  # pyright: ignore  # names of Python 2
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return self.find(module, name)


def _opcodes() -> dict[int, _Run]:
    """Map each opcode that a state dict needs to its implementation; see Python's pickletools."""
    plain: dict[int, _Run] = pickle._Unpickler.dispatch  # pyright: ignore

    def counted(run: _Run) -> _Run:
        def spend(m: Any) -> None:  # an object takes fifty times the memory of its opcode
            m.left -= 1
            if m.left < 0:
                raise ValueError("its pickle has more lists, tuples and objects than state dicts of its size")
            run(m)

        return spend

    def text(size: int) -> _Run:  # Python's implementation accepts half of a surrogate pair
        return lambda m: m.append(m.read(int.from_bytes(m.read(size), "little")).decode())

    def refused(code: int, _: Any) -> None:
        raise ValueError(f"its pickle has the opcode {code:#04x}, which no state dict needs")

    return {
        **{code: functools.partial(refused, code) for code in range(256)},
        **{code: plain[code] for code in b"\x80N\x88\x89)KMJG\x8aCB\x8eaesubc\x93Q\x94qrhj."},
        **{code: counted(plain[code]) for code in b"(]t\x85\x86\x87R"},
        ord("}"): counted(lambda m: m.append(Pairs())),
        **{ord("X"): text(4), 0x8C: text(1), 0x8D: text(8)},
        **{0x8F: counted(plain[ord("]")]), 0x90: plain[ord("e")], 0x91: counted(plain[ord("t")])},  # of sets
        0x81: counted(plain[ord("R")]),
        0x95: lambda m: m.read(8),  # a frame; its length isn't needed
    }


_Inert.dispatch = _opcodes()


def unpickled(data: bytes | bytearray, find: Find, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Read a pickle of protocol 2 to 5; raise a `ValueError` for opcodes that no state dict needs."""
    stream = io.BytesIO(data)
    broken = (AttributeError, EOFError, IndexError, KeyError, OverflowError, TypeError, struct.error)
    try:
        return _Inert(stream, len(data), find, persistent).load()
    except (*broken, pickle.UnpicklingError) as error:
        raise ValueError(f"its pickle is broken at byte {stream.tell():,}") from error


# ------------------------------------------------------------------------------------------------- files of torch.save
_DENSE = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_FROM_TYPE, _WRAPPER = "torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_wrapper_subclass"
_PLAIN = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_STORAGES = {f"{name}Storage": dtype for name, dtype in {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}.items()}  # fmt: skip
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES = {  # that a state dict may have; none is ever called
    *_PARAMETERS, *_PLAIN,
    *(f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.qscheme)),
    *(f"torch.{name}Storage" for name in ("QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4")),
    *(f"builtins.{name}" for name in ("set", "complex", "bytearray", "dict")), "_codecs.encode", "torch.Size",
    *(f"collections.{name}" for name in ("OrderedDict", "Counter", "defaultdict")), "torch.device",
    "torch.storage.UntypedStorage", "torch.serialization._get_layout", "torch.torch_version.TorchVersion",
}  # fmt: skip

_ODD = {
    "_rebuild_sparse_tensor": "is sparse: save x.to_dense()",
    "_rebuild_meta_tensor_no_storage": "is on the meta device, without values: save it with values",
    "_rebuild_qtensor": "is quantized: save x.dequantize()",
    "_rebuild_nested_tensor": "is a nested tensor: save its parts, x.unbind()",
}
_CLASSES = {"DTensor": "x.full_tensor()", "NestedTensor": "its parts, x.unbind()"}


class OddTensorError(ValueError):
    """A tensor that isn't read: sparse, quantized, without values, or of a subclass. The text suggests what to save."""


class _Storage(NamedTuple):
    dtype: torch.dtype | None
    key: str


class TorchFile:
    """A file of `torch.save`: `held` is its value with inert objects, and `size` the length of its pickle."""

    def __init__(self, window: Window, most: int = _WHOLE) -> None:
        self._unknown = set[str]()
        try:
            self._zip = zipfile.ZipFile(window)
        except (zipfile.BadZipFile, struct.error, NotImplementedError, UnicodeDecodeError, OSError) as error:
            raise ValueError(f"it isn't a torch.save record: {error}") from error
        self._window = window
        self._members = {info.filename.partition("/")[2]: info for info in self._zip.filelist}
        if len(self._zip.filelist) != len(self._members):
            raise ValueError("two of its members have one name")
        if "byteorder" in self._members and self._content("byteorder", 16) != sys.byteorder.encode():
            raise ValueError("it was written on a machine with a different byte order")
        pickled = self._content("data.pkl", most)
        self.size = len(pickled)
        self.has_tensors = "data/0" in self._members
        self.held = unpickled(pickled, self._find, _storage)

    def _place(self, name: str) -> tuple[int, int]:
        """Return the offset and the size of the content of a member."""
        if name not in self._members:
            raise ValueError(f"it has no {name}")
        info = self._members[name]
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise ValueError(f"its {name} is compressed or encrypted")
        # zipfile shifts all offsets by the bytes that seem to precede the zip, so one may be negative.
        self._window.seek(max(info.header_offset, 0))
        head = self._window.read(30)
        if info.header_offset < 0 or len(head) < 30 or not head.startswith(b"PK\3\4"):
            raise ValueError(f"its {name} is not where its directory says")
        return info.header_offset + 30 + sum(struct.unpack("<HH", head[26:])), info.file_size

    def _content(self, name: str, most: int) -> bytes:
        start, size = self._place(name)
        if size > most:
            raise ValueError(f"its {name} has {size:,} bytes, more than a tensor's")
        self._window.seek(start)
        if len(data := self._window.read(size)) != size:
            raise ValueError(f"its {name} is truncated")
        return data

    def _find(self, module: str, name: str) -> Any:
        if module == "torch" and (dtype := _STORAGES.get(name)) is not None:
            return dtype
        result, known = find_in(_NAMES, module, name)
        rebuilds = module in ("torch._utils", "torch._tensor") and name.startswith("_rebuild")
        of_tensors = module.partition(".")[0] == "torchao" or module.startswith("torch.distributed.")
        if not (known or rebuilds or of_tensors or result in _registered()):
            self._unknown.add(result)
        return result

    def check_names(self) -> None:
        """Refuse a file with names that no state dict needs, except tensor classes that `tensor` has seen."""
        if self._unknown:
            raise ValueError(f"it names {min(self._unknown)}, which no state dict needs; nothing of it was run")

    def tensor(self, made: Made) -> Range | None:
        """Return the dense tensor of a call, None for other calls; raise an `OddTensorError` for other tensors."""
        kind: Any = made.kind
        args: tuple[Any, ...] = made.args
        while True:
            if kind in _PARAMETERS and args and isinstance(args[0], Made):
                kind, args = args[0].kind, args[0].args
            elif kind == _FROM_TYPE and len(args) > 2 and args[1] in _PLAIN and isinstance(args[2], tuple):
                kind, args = args[0], args[2]
            else:
                break
        if kind in _DENSE:
            return self._dense(args, typed=kind == _DENSE[1])
        name = kind.rpartition(".")[2] if isinstance(kind, Global) else ""
        if not name.startswith("_rebuild"):
            return None
        odd = OddTensorError(f"it {_ODD.get(name, 'is a tensor of a kind that is not read: save a plain one')}")
        place = {_WRAPPER: 0, _FROM_TYPE: 1}.get(kind, len(args))
        if isinstance(cls := next(iter(args[place:]), None), Global):
            is_dense = next(iter(args)) in _DENSE
            other = "x.as_subclass(torch.Tensor)" if is_dense else "x.dequantize(), or another plain tensor"
            odd = OddTensorError(f"it is a {cls}: save {_CLASSES.get(cls.rpartition('.')[2], other)}")
            self._unknown.discard(cls)
        raise odd

    def _dense(self, args: tuple[Any, ...], *, typed: bool) -> Range:
        """Return the tensor of a call of `_rebuild_tensor_v2`, or of `_v3`, which also has the dtype."""
        storage, offset, size, stride, _, _, *rest = (*args, *(None,) * (6 - len(args)))
        dtype = rest.pop(0) if typed and rest else getattr(storage, "dtype", None)
        if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
            raise ValueError("it holds more than a tensor")
        if any(rest):  # such as the flag of a conjugate
            flags = listed(str(key) for table in rest if isinstance(table, Pairs) for key, _ in table)
            raise OddTensorError(f"its values are stored with the flag {flags}: save x.resolve_conj().resolve_neg()")
        size, stride = sizes_of(size), sizes_of(stride)
        if type(offset) is not int or not 0 <= offset < 1 << 60 or len(size) != len(stride) or not is_shape(size):
            raise ValueError("its sizes or strides are invalid")
        first, room = self._place(f"data/{storage.key}")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
        if first + room > self._window.length:
            raise ValueError("its values reach outside of it")
        if math.prod(size) and last * dtype.itemsize > room:
            raise ValueError(f"it has {room:,} bytes of values, fewer than its sizes and strides need")
        return Range(first + offset * dtype.itemsize, size, stride, dtype)


def torch_file(stream: BinaryIO, first: int = 0, length: int | None = None) -> TorchFile:
    """Return the value of an open file, or of a record inside of it."""
    handle = stream.fileno()
    size = os.fstat(handle).st_size if length is None else length
    return TorchFile(Window(lambda start, stop: os.pread(handle, stop - start, first + start), size, _WHOLE))


def parse_record(window: Window) -> Range:
    """Return where the values of a record of one plain tensor are."""
    file = TorchFile(window, _RECORD)
    held = file.held
    try:
        result = file.tensor(held) if isinstance(held, Made) else None
    finally:
        file.check_names()
    if result is None or held.kind not in _DENSE:
        kinds: dict[Any, str] = {Pairs: "dict", list: "list", tuple: "tuple", torch.dtype: "dtype"}
        raise ValueError(f"it holds a {kinds.get(type(held), getattr(held, 'kind', 'value'))}, no tensor")
    return result


def find_in(names: set[str], module: str, name: str) -> tuple[Any, bool]:
    """Return a dtype, or else the name itself, and whether it is one of some names."""
    if module == "torch" and name in _DTYPES:
        return _DTYPES[name], True
    result = Global(module, name)
    return result, result in names


def _registered() -> set[str]:
    """Return the names that the user has told torch to allow in files."""
    known = (each[0] if isinstance(each, tuple) else each for each in torch.serialization.get_safe_globals())
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in known}


def _storage(pid: Any) -> _Storage:
    """Return a storage by its persistent id, `("storage", type, key, device, size)`."""
    if not isinstance(pid, tuple) or len(pid) < 3 or pid[0] != "storage" or not isinstance(pid[2], str):
        raise ValueError("it holds more than a tensor")
    return _Storage(pid[1] if isinstance(pid[1], torch.dtype) else None, pid[2])


def sizes_of(value: Any) -> tuple[int, ...]:
    """Return sizes or strides."""
    if isinstance(value, Made) and value.kind == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    result = tuple(value) if isinstance(value, tuple | list) else (-1,)
    if len(result) > 64 or not all(type(n) is int and 0 <= n < 1 << 60 for n in result):
        raise ValueError("its sizes or strides are invalid")
    return result
