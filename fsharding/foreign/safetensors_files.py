"""Safetensors files: read headers, as strictly as the safetensors library; plan files to write.

Guarantee: header and tensors tile a file; in files that we write, tensors are aligned to their element size.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import torch

from fsharding.base.untrusted import parse_json
from fsharding.checkpoint.byte_ranges import Range
from fsharding.checkpoint.manifest import is_shape
from fsharding.comm.redistribute import in_buckets
from fsharding.sharding import boxes
from fsharding.sharding.named_sharding import LeafType

__all__ = [
    "INDEX", "LARGEST", "SAFETENSORS", "SHARDING", "SINGLE", "Header", "TensorFile", "header_of", "index_text",
    "tensor_files",
]  # fmt: skip

LARGEST = 100_000_000  # the format's limit of a header, in bytes

_VALUES = 20_000_000  # JSON values: more than shapes, dtypes and offsets need in a header of that size

# The safetensors dtypes that torch has, by name.
SAFETENSORS: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip

_PACKED = "F4"  # 4-bit values; a torch element has two of them, so the last dim is half as long in torch

SHARDING = "DCP_SHARDING_INFO"  # the note in which torch's `HuggingFaceStorageWriter` stores the offsets of shards

INDEX = "model.safetensors.index.json"  # the file of each tensor, if there are several files
SINGLE = "model.safetensors"  # the file of all tensors, if there is one


# -------------------------------------------------------------------------------------------------------------- reading
class Header(NamedTuple):
    """The header of a file."""

    tensors: dict[str, Range]
    unread: dict[str, str]  # why other tensors are not read
    notes: dict[str, str]


def header_of(file: BinaryIO) -> Header:
    """Return the header of a file; raise an `EOFError` if the file ends before its tensors do."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > LARGEST:
        raise ValueError(f"its header has {length:,} bytes; the format allows {LARGEST:,}")
    if length > size - 8:
        raise EOFError(f"it is cut off: its header has {length:,} bytes, the file {size:,}")
    text = b""
    while len(text) < length and (part := file.read(length - len(text))):
        text += part
    try:
        header = parse_json(text, values=_VALUES, negative=False)
    except ValueError as error:
        raise ValueError(f"its header isn't JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"its header is a {type(header).__name__}, not an object")
    notes = header.pop("__metadata__", None)
    if notes is not None and not (isinstance(notes, dict) and all(isinstance(note, str) for note in notes.values())):
        raise ValueError("its __metadata__ isn't an object of strings")
    return Header(*_placed(header, 8 + length, size), notes or {})


def _placed(header: dict[str, Any], first: int, size: int) -> tuple[dict[str, Range], dict[str, str]]:
    """Return the tensors of a header, which must tile the rest of the file, and why others are not read."""
    places: dict[str, tuple[int, int]] = {}
    ranges: dict[str, Range] = {}
    unread: dict[str, str] = {}
    for name, entry in header.items():
        start, stop, shape, dtype = _tensor(name, entry)
        places[name] = first + start, first + stop
        if isinstance(dtype, str):
            unread[name] = f"it is {dtype}{list(shape)}, a dtype that torch lacks: save it in one that torch has"
        else:
            ranges[name] = Range(first + start, shape, boxes.contiguous_strides(shape), dtype)
    at = first
    for name, (start, stop) in sorted(places.items(), key=lambda place: place[1]):
        if start != at:
            what = "overlaps the one before it" if start < at else "leaves a gap before it"
            raise ValueError(f"{name}: begins at byte {start - first:,} of the tensors, and {what}")
        at = stop
    if at > size:
        last = next(name for name, (_, stop) in places.items() if stop > size)
        raise EOFError(f"{last} ends at byte {places[last][1]:,} of {size:,}")
    if at < size:
        raise ValueError(f"it has {size - at:,} bytes after the last tensor")
    return ranges, unread


def _tensor(name: str, entry: Any) -> tuple[int, int, tuple[int, ...], torch.dtype | str]:
    """Return start, end, shape and dtype of a tensor; for a dtype that torch lacks, its name."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= {*entry}:
        raise ValueError(f"{name}: isn't an object with dtype, shape and data_offsets")
    dtype = entry["dtype"]
    shape = entry["shape"]
    ends = entry["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"{name}: its dtype isn't a string")
    if not isinstance(shape, list) or not is_shape(shape):
        raise ValueError(f"{name}: its shape isn't valid")
    if not isinstance(ends, list) or len(ends) != 2 or not all(type(n) is int and 0 <= n < 1 << 62 for n in ends):
        raise ValueError(f"{name}: its data_offsets aren't valid")
    start, stop = ends
    if dtype == _PACKED and shape and shape[-1] % 2 == 0:
        shape = [*shape[:-1], shape[-1] // 2]
        dtype = torch.float4_e2m1fn_x2
    dtype = SAFETENSORS.get(dtype, dtype) if isinstance(dtype, str) else dtype
    # The element size of a dtype that torch lacks is unknown, so its length isn't checked.
    size = stop - start if isinstance(dtype, str) else math.prod(shape) * dtype.itemsize
    if stop - start != size or size < 0:
        raise ValueError(f"{name}: {entry} contradicts itself")
    return start, stop, tuple(shape), dtype


# -------------------------------------------------------------------------------------------------------------- writing
class TensorFile(NamedTuple):
    """A safetensors file to write."""

    name: str
    header: bytes
    offsets: dict[str, int]  # the first byte of each tensor, in their order
    size: int  # bytes of the file


def tensor_files(tensors: Mapping[str, LeafType], max_file_bytes: int) -> list[TensorFile]:
    """Return the files to write; those with several tensors have at most `max_file_bytes` after the header."""
    groups = list(in_buckets(tensors, lambda name: _bytes(tensors[name]), max_file_bytes)) or [[]]
    count = len(groups)
    files: list[TensorFile] = []
    for number, names in enumerate(groups, start=1):
        name = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        files.append(_file(name, {tensor: tensors[tensor] for tensor in names}))
    return files


def _bytes(info: LeafType) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def _file(name: str, tensors: Mapping[str, LeafType]) -> TensorFile:
    codes = {dtype: code for code, dtype in SAFETENSORS.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts = dict[str, int]()
    at = 0
    # Widest elements first: every tensor is then aligned without padding.
    for tensor in sorted(tensors, key=lambda tensor: -tensors[tensor].dtype.itemsize):
        info = tensors[tensor]
        ends = [at, at + _bytes(info)]
        header[tensor] = {"dtype": codes[info.dtype], "shape": info.shape, "data_offsets": ends}
        starts[tensor], at = ends
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = len(text) + 8
    offsets = {tensor: first + start for tensor, start in starts.items()}
    return TensorFile(name, len(text).to_bytes(8, "little") + text, offsets, first + at)


def index_text(files: Sequence[TensorFile]) -> bytes:
    """Return the contents of `INDEX`."""
    total = sum(file.size - len(file.header) for file in files)
    table = {tensor: file.name for file in files for tensor in file.offsets}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": table}, indent=2).encode() + b"\n"
