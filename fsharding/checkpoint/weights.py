"""Weights that another program wrote: a `torch.save` file, a DCP directory, safetensors; any slice of any tensor.

In: a path; what it is shows in the bytes, not in the name. Out: names, shapes and dtypes, and slices on demand.
Nothing is unpickled without a list of what may be; entries that are no tensors are left alone.
Law: `read` gives the bits of the file, and never holds more than a window of it.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsharding import _compat
from fsharding.boxes import Box
from fsharding.checkpoint.files import METADATA
from fsharding.checkpoint.manifest import is_plain_name
from fsharding.checkpoint.ranges import Range, contiguous, read_range
from fsharding.checkpoint.source import LeafInfo, open_source
from fsharding.checkpoint.store import StrPath
from fsharding.errors import CheckpointError, message

__all__ = ["SAFETENSORS", "Weights", "open_weights"]

_FUNCTION = "fs.checkpoint.open_weights"
_WRAPPERS = ("module.", "_orig_mod.")

SAFETENSORS: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
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


@dataclass(frozen=True)
class Weights:
    """Tensors by name in files of another program.

    Attributes:
        path: where they are.
        format: "torch", "dcp" or "safetensors".
        leaves: shape and dtype by name.
        others: names of entries of a `torch.save` file that are no tensors.
        reader: reads a slice; see `read`.
    """

    path: Path
    format: str
    leaves: Mapping[str, LeafInfo]
    others: tuple[str, ...]
    reader: Callable[[str, Box, Tensor], None]

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Reads a slice of a tensor.

        Args:
            name: which.
            box: which part of it.
            out: of the box's shape; the elements are cast to its dtype.

        Raises:
            CheckpointError: the file does not hold what its index says, or has become shorter.
        """
        try:
            self.reader(name, box, out)
        except EOFError as error:
            raise _refusal(self.path, f"{name}: {error}") from error


def open_weights(path: StrPath, prefix: str = "") -> Weights:
    """Finds out what is at a path and where its tensors are. Reads no tensor.

    A `torch.save` file holds a state dict, or dicts of them: `{"model": {"w": ...}}` has the name `model.w`. What DDP
    and torch.compile put before every name (`module.`, `_orig_mod.`) is left out. A directory holds what
    `torch.distributed.checkpoint.save` wrote, or one `.safetensors` file, or several files and their index.

    Args:
        path: a file or a directory.
        prefix: take the names that begin with it, without it, such as "model.".

    Raises:
        CheckpointError: nothing there that can be read, damaged or cut off, an index that leads out of its directory.
    """
    where = Path(os.path.realpath(path))
    if not where.exists():
        raise _refusal(where, "there is no such file or directory")
    try:
        found = _directory(where) if where.is_dir() else _file(where)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, pickle.UnpicklingError) as error:
        if isinstance(error, CheckpointError):
            raise
        text = str(error).strip().split("\n")[0]
        raise _refusal(where, f"{type(error).__name__}: {text}") from error
    leaves = {name.removeprefix(prefix): leaf for name, leaf in found.leaves.items() if name.startswith(prefix)}
    return replace(found, path=where, leaves=leaves, reader=lambda name, *part: found.reader(prefix + name, *part))


def _refusal(where: Path, *rows: str, mend: str = "") -> CheckpointError:
    mend = mend or "Give a torch.save file of a state dict, a directory of torch DCP, or safetensors."
    return CheckpointError(message(_FUNCTION, f"cannot read {where}.", rows, mend))


# ----------------------------------------------------------------------------------------------------------- by content


def _directory(folder: Path) -> Weights:
    if (folder / METADATA).exists():
        source = open_source(folder, None)
        return Weights(folder, "dcp", source.leaves, (), source.read)
    names = sorted(os.listdir(folder))
    indices = [name for name in names if name.endswith(".index.json")]
    files = [name for name in names if name.endswith(".safetensors")]
    if len(indices) == 1:
        return _indexed(folder / indices[0])
    if not indices and len(files) == 1:
        return _file(folder / files[0])
    what = f"the indices {', '.join(indices)}" if indices else f"{len(files)} .safetensors files and no index"
    raise _refusal(folder, f"it has no {METADATA}, and {what}")


def _file(file: Path) -> Weights:
    with file.open("rb") as stream:
        head = stream.read(9)
    if head.startswith(b"PK\x03\x04"):
        return _torch(file)
    if head.startswith(b"\x80\x02"):
        mend = "Load it with torch.load(weights_only=True) and torch.save it again."
        raise _refusal(file, "it is in torch's format of before 1.6, or a plain pickle", mend=mend)
    if head[8:] == b"{":
        return _safetensors(file)
    if head.startswith(b"{"):
        return _indexed(file)
    raise _refusal(file, "its first bytes are of no format that is known here")


def _indexed(index: Path) -> Weights:
    """Several files, and a JSON table that says which tensor is in which."""
    table: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    names = sorted({*table.values()}, key=str)
    if rows := [f"{name}: {why}" for name in names if (why := _leads_out(index.parent, name))]:
        raise _refusal(index, *rows, mend="Every file has to lie beside the index; copy links as files.")
    parts = {name: _file(index.parent / name) for name in names}
    if lost := [f"{leaf} is not in {name}" for leaf, name in table.items() if leaf not in parts[name].leaves]:
        raise _refusal(index, *lost, mend="Get the files again: they do not belong to this index.")
    leaves = {leaf: parts[name].leaves[leaf] for leaf, name in table.items()}
    kinds = "+".join(sorted({part.format for part in parts.values()}))
    return Weights(index.parent, kinds, leaves, (), lambda leaf, *part: parts[table[leaf]].reader(leaf, *part))


def _leads_out(folder: Path, name: object) -> str | None:
    """Why a name is not that of a plain file in a directory."""
    if not isinstance(name, str) or not is_plain_name(name):
        return "is no plain file name"
    if not os.path.lexists(folder / name):
        return "is missing"
    return None if stat.S_ISREG(os.lstat(folder / name).st_mode) else "is no plain file"


def _of_ranges(file: Path, kind: str, ranges: Mapping[str, Range], others: Sequence[str] = ()) -> Weights:
    """Tensors that each lie in one piece."""
    size = file.stat().st_size
    if rows := [f"{name} ends at byte {r.end:,} of {size:,}" for name, r in ranges.items() if r.end > size]:
        raise _refusal(file, *rows, mend="It is cut off: get it again.")
    leaves = {name: LeafInfo(where.shape, where.dtype) for name, where in ranges.items()}
    return Weights(file, kind, leaves, tuple(others), lambda name, *part: read_range(ranges[name], *part))


# ---------------------------------------------------------------------------------------------------------- the formats


def _safetensors(file: Path) -> Weights:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size - 8:
            raise ValueError(f"it is cut off: its header has {length:,} bytes, the file {size:,}")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    if unknown := sorted({entry["dtype"] for entry in header.values()} - {*SAFETENSORS}):
        raise ValueError(f"unknown dtypes: {', '.join(unknown)}")
    ranges: dict[str, Range] = {}
    for name, entry in header.items():
        dtype, shape = SAFETENSORS[entry["dtype"]], tuple(map(int, entry["shape"]))
        start, stop = entry["data_offsets"]
        if min(start, *shape, 0) < 0 or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {entry} contradicts itself")
        ranges[name] = Range(file, 8 + length + start, shape, contiguous(shape), dtype)
    return _of_ranges(file, "safetensors", ranges)


def _torch(file: Path) -> Weights:
    with file.open("rb") as stream, _compat.shapes_only():  # torch would judge a path by its ending
        loaded = torch.load(stream, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict):
        raise ValueError(f"it holds a {type(loaded).__name__}, not a state dict")
    ranges: dict[str, Range] = {}
    others: list[str] = []
    for name, value in _flat(loaded):
        if not isinstance(value, Tensor):
            others.append(name)
        elif name in ranges:
            raise ValueError(f"two tensors have the name {name}")
        elif value.layout != torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
            raise ValueError(f"{name}: only dense tensors can be read by slices")
        else:
            offset = _compat.file_offset(value) + int(value.storage_offset()) * value.itemsize
            ranges[name] = Range(file, offset, tuple(value.shape), tuple(value.stride()), value.dtype)
    return _of_ranges(file, "torch", ranges, others)


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of dicts and lists by dotted path, without the prefixes that wrappers put before every key."""
    if isinstance(node, dict):
        items = {str(key): value for key, value in node.items()}
        for wrapper in _WRAPPERS:
            if items and all(key.startswith(wrapper) for key in items):
                items = {key.removeprefix(wrapper): value for key, value in items.items()}
    elif isinstance(node, list | tuple):
        items = {str(i): value for i, value in enumerate(node)}
    else:
        yield path, node
        return
    for key, value in items.items():
        yield from _flat(value, f"{path}.{key}" if path else key)
