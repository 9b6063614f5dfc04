"""Headers of safetensors files, refused wherever the safetensors library refuses them."""

from __future__ import annotations

import math
import os
from typing import Any, BinaryIO, NamedTuple

import torch

from fsharding.base.untrusted import parse_json
from fsharding.checkpoint.manifest import is_shape

__all__ = ["LARGEST", "SAFETENSORS", "SHARDING", "Header", "Tensor", "header_of"]

LARGEST = 100_000_000
"""Bytes of a header, by the format."""

_VALUES = 20_000_000
"""More than a header of that size can have, if it says shapes, dtypes and places of tensors and nothing else."""

SAFETENSORS: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The dtypes of safetensors that torch has, by their names there."""

_PACKED = "F4"
"""Numbers of 4 bits, which torch has two to an element: the last dim of the tensor is half as long there."""

SHARDING = "DCP_SHARDING_INFO"
"""The note in which torch's writers of shards say where the parts in a file begin."""


class Tensor(NamedTuple):
    """A tensor of a file."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype | str  # of its elements; the name that safetensors has for it where torch has none


class Header(NamedTuple):
    """The tensors of a file by name, and its notes."""

    tensors: dict[str, Tensor]
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
        raise ValueError(f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"its header is a {type(header).__name__}, not an object")
    notes = header.pop("__metadata__", None)
    if notes is not None and not (isinstance(notes, dict) and all(isinstance(note, str) for note in notes.values())):
        raise ValueError("its __metadata__ is no table of texts")
    return Header(_placed(header, 8 + length, size), notes or {})


def _placed(header: dict[str, Any], first: int, size: int) -> dict[str, Tensor]:
    """The tensors of a header, which have to tile what is behind it."""
    result: dict[str, Tensor] = {}
    ends: dict[str, int] = {}
    for name, entry in header.items():
        result[name], ends[name] = _tensor(name, entry, first)
    at = first
    for name in sorted(result, key=lambda name: (result[name].start, ends[name])):
        if result[name].start != at:
            what = "overlaps the one before it" if result[name].start < at else "leaves a gap before it"
            raise ValueError(f"{name}: begins at byte {result[name].start - first:,} of the tensors, and {what}")
        at = ends[name]
    if at > size:
        last = next(name for name in result if ends[name] > size)
        raise EOFError(f"{last} ends at byte {ends[last]:,} of {size:,}")
    if at < size:
        raise ValueError(f"it has {size - at:,} bytes that belong to no tensor at its end")
    return result


def _tensor(name: str, entry: Any, first: int) -> tuple[Tensor, int]:
    """A tensor, and the byte after its last one."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= {*entry}:
        raise ValueError(f"{name}: is no object with dtype, shape and data_offsets")
    dtype = entry["dtype"]
    shape = entry["shape"]
    ends = entry["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"{name}: its dtype is none")
    if not isinstance(shape, list) or not is_shape(shape):
        raise ValueError(f"{name}: its shape is none")
    if not isinstance(ends, list) or len(ends) != 2 or not all(type(n) is int and 0 <= n < 1 << 62 for n in ends):
        raise ValueError(f"{name}: its data_offsets are none")
    start, stop = ends
    if dtype == _PACKED and shape and shape[-1] % 2 == 0:
        shape = [*shape[:-1], shape[-1] // 2]
        dtype = torch.float4_e2m1fn_x2
    dtype = SAFETENSORS.get(dtype, dtype) if isinstance(dtype, str) else dtype
    # A dtype that torch lacks has a size that is not known here.
    size = stop - start if isinstance(dtype, str) else math.prod(shape) * dtype.itemsize
    if stop - start != size or size < 0:
        raise ValueError(f"{name}: {entry} contradicts itself")
    return Tensor(first + start, tuple(shape), dtype), first + stop
