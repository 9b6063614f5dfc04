"""Safetensors files before they are filled: which tensor is in which file, each header, and where each tensor begins.

Guarantee: headers and tensors tile a file, and every tensor begins at a multiple of its element's size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fsharding.comm.redistribute import in_buckets
from fsharding.foreign.foreign_weights import SAFETENSORS
from fsharding.sharding.named_sharding import LeafType

__all__ = ["INDEX", "SINGLE", "TensorFile", "index_text", "tensor_files"]

INDEX = "model.safetensors.index.json"
"""The file that says which tensor is in which file, where there are several."""
SINGLE = "model.safetensors"
"""The file of all tensors, where there is one."""


class TensorFile(NamedTuple):
    """A safetensors file to write."""

    name: str
    header: bytes
    offsets: dict[str, int]  # the byte at which each tensor begins, by name and in their order
    size: int  # bytes of the whole file


def tensor_files(tensors: Mapping[str, LeafType], max_file_bytes: int) -> list[TensorFile]:
    """Return the files of a directory; files of several tensors are at most so large, but for their header."""
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
    # Wide elements first, so that all are aligned.
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
    """What `INDEX` holds."""
    total = sum(file.size - len(file.header) for file in files)
    table = {tensor: file.name for file in files for tensor in file.offsets}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": table}, indent=2).encode() + b"\n"
