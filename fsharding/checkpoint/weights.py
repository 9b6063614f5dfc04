"""Weights that another program wrote: a `torch.save` file, a DCP directory, safetensors; any slice of any tensor.

In: a path; what it is shows in the bytes, not in the name. Out: names, shapes and dtypes, and slices on demand.
Nothing but tensors is loaded, and nothing is unpickled without a list of what may be; other entries are only listed.
Law: `read` gives the bits of the file, and never holds more than a window of it.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsharding import _compat, boxes
from fsharding.boxes import Box
from fsharding.checkpoint import foreign
from fsharding.checkpoint.manifest import dtype_name, is_plain_name
from fsharding.checkpoint.ranges import Range, contiguous, read_range
from fsharding.checkpoint.store import StrPath
from fsharding.errors import CheckpointError, message

__all__ = ["SAFETENSORS", "Weights", "WeightLeaf", "open_weights"]

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


class WeightLeaf(NamedTuple):
    """A tensor of some weights: its global shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)}"


class _Chunk(NamedTuple):
    """A box of a tensor, and where it lies; found out when it is read."""

    box: Box
    where: Callable[[], Range]


_Found = dict[str, tuple[WeightLeaf, tuple[_Chunk, ...]]]


@dataclass(frozen=True)
class Weights:
    """Tensors by name in files of another program.

    Attributes:
        path: where they are.
        format: "torch", "dcp" or "safetensors".
        leaves: shape and dtype by name.
        others: names of entries that are no tensors, which are never loaded.
        chunks: where each tensor lies.
    """

    path: Path
    format: str
    leaves: Mapping[str, WeightLeaf]
    others: tuple[str, ...]
    chunks: Mapping[str, tuple[_Chunk, ...]]

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Reads a slice of a tensor.

        Args:
            name: which.
            box: which part of it.
            out: of the box's shape; the elements are cast to its dtype.

        Raises:
            CheckpointError: the file says something else than its index.
        """
        for chunk in self.chunks[name]:
            both = boxes.intersect(chunk.box, box)
            if both is not None and boxes.volume(both):
                inside = tuple((a - o, b - o) for (a, b), (o, _) in zip(both, chunk.box, strict=True))
                read_range(chunk.where(), inside, out[boxes.relative(both, box)])


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
        kind, found, others = _directory(where) if where.is_dir() else _file(where)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, pickle.UnpicklingError) as error:
        if isinstance(error, CheckpointError):
            raise
        text = str(error).strip().split("\n")[0]
        raise _refusal(where, f"{type(error).__name__}: {text}") from error
    kept = {name.removeprefix(prefix): entry for name, entry in found.items() if name.startswith(prefix)}
    leaves = {name: leaf for name, (leaf, _) in kept.items()}
    return Weights(where, kind, leaves, others, {name: chunks for name, (_, chunks) in kept.items()})


def _refusal(where: Path, *rows: str, mend: str = "") -> CheckpointError:
    mend = mend or "Give a torch.save file of a state dict, a directory of torch DCP, or safetensors."
    return CheckpointError(message(_FUNCTION, f"cannot read {where}.", rows, mend))


# ------------------------------------------------------------------------------------------------------------ by content


def _directory(folder: Path) -> tuple[str, _Found, tuple[str, ...]]:
    if (folder / foreign.METADATA).exists():
        return "dcp", *_dcp(folder)
    names = sorted(os.listdir(folder))
    indices = [name for name in names if name.endswith(".index.json")]
    files = [name for name in names if name.endswith(".safetensors")]
    if len(indices) == 1:
        return _indexed(folder / indices[0])
    if not indices and len(files) == 1:
        return _file(folder / files[0])
    what = f"the indices {', '.join(indices)}" if indices else f"{len(files)} .safetensors files and no index"
    raise _refusal(folder, f"it has no {foreign.METADATA}, and {what}")


def _file(file: Path) -> tuple[str, _Found, tuple[str, ...]]:
    with file.open("rb") as stream:
        head = stream.read(9)
    if head.startswith(b"PK\x03\x04"):
        return "torch", *_torch(file)
    if head.startswith(b"\x80\x02"):
        mend = "Load it with torch.load(weights_only=True) and torch.save it again."
        raise _refusal(file, "it is in torch's format of before 1.6, or a plain pickle", mend=mend)
    if head[8:] == b"{":
        return "safetensors", _safetensors(file), ()
    if head.startswith(b"{"):
        return _indexed(file)
    raise _refusal(file, "its first bytes are of no format that is known here")


def _indexed(index: Path) -> tuple[str, _Found, tuple[str, ...]]:
    """Several files, and a JSON table that says which tensor is in which."""
    table: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    rows = [f"{name}: {why}" for name in sorted({*table.values()}, key=str) if (why := _leads_out(index.parent, name))]
    if rows:
        raise _refusal(index, *rows, mend="Every file has to lie beside the index; copy links as files.")
    kinds: set[str] = set()
    every: _Found = {}
    for name in sorted({*table.values()}):
        kind, found, _ = _file(index.parent / name)
        kinds.add(kind)
        every |= {leaf: entry for leaf, entry in found.items() if table.get(leaf) == name}
    if lost := [f"{leaf} is not in {name}" for leaf, name in table.items() if leaf not in every]:
        raise _refusal(index, *lost, mend="Get the files again: they do not belong to this index.")
    return "+".join(sorted(kinds)), {leaf: every[leaf] for leaf in table}, ()


def _leads_out(folder: Path, name: object) -> str | None:
    """Why a name is not that of a plain file in a directory."""
    if not isinstance(name, str) or not is_plain_name(name):
        return "is no plain file name"
    if not os.path.lexists(folder / name):
        return "is missing"
    return None if stat.S_ISREG(os.lstat(folder / name).st_mode) else "is no plain file"


def _chunk(where: Range, size: int) -> tuple[WeightLeaf, tuple[_Chunk, ...]]:
    """A tensor that lies in one piece."""
    if where.end > size:
        raise ValueError(f"it is cut off: {where.end:,} bytes are needed, {size:,} are there")
    return WeightLeaf(where.shape, where.dtype), (_Chunk(boxes.full(where.shape), lambda: where),)


# ----------------------------------------------------------------------------------------------------------- the formats


def _safetensors(file: Path) -> _Found:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size - 8:
            raise ValueError(f"it is cut off: its header has {length:,} bytes, the file {size:,}")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    if unknown := sorted({entry["dtype"] for entry in header.values()} - {*SAFETENSORS}):
        raise ValueError(f"unknown dtypes: {', '.join(unknown)}")
    found: _Found = {}
    for name, entry in header.items():
        dtype, shape = SAFETENSORS[entry["dtype"]], tuple(map(int, entry["shape"]))
        start, stop = entry["data_offsets"]
        if min(0, start, *shape) < 0 or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {entry} contradicts itself")
        found[name] = _chunk(Range(file, 8 + length + start, shape, contiguous(shape), dtype), size)
    return found


def _torch(file: Path) -> tuple[_Found, tuple[str, ...]]:
    with _compat.shapes_only():
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict):
        raise ValueError(f"it holds a {type(loaded).__name__}, not a state dict")
    size = file.stat().st_size
    found: _Found = {}
    others: list[str] = []
    for name, value in _flat(loaded):
        if not isinstance(value, Tensor):
            others.append(name)
        elif name in found:
            raise ValueError(f"two tensors have the name {name}")
        else:
            found[name] = _chunk(foreign.range_of(file, value), size)
    return found, tuple(others)


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


def _dcp(folder: Path) -> tuple[_Found, tuple[str, ...]]:
    tensors, others = foreign.read_metadata(folder / foreign.METADATA)
    files = {entry.file for _, _, entries in tensors.values() for entry in entries}
    sizes = {name: (folder / name).stat().st_size for name in files if not _leads_out(folder, name)}
    rows = [f"{name!r}: {_leads_out(folder, name)}" for name in sorted(files - {*sizes}, key=str)]
    found: _Found = {}
    for name, (shape, dtype, entries) in tensors.items():
        rows += [f"{name}: {why}" for why in foreign.contradictions(shape, entries, sizes)]
        chunks = tuple(_Chunk(entry.box, _Packed(folder / entry.file, entry, dtype)) for entry in entries)
        found[name] = WeightLeaf(shape, dtype), chunks
    if rows:
        raise _refusal(folder, *rows, mend="Use another checkpoint, or a copy of this one.")
    return found, others


class _Packed:
    """Where a chunk of DCP lies: inside an archive of its own, which is opened when it is read."""

    def __init__(self, file: Path, entry: foreign.Entry, dtype: torch.dtype) -> None:
        self._file, self._entry, self._dtype = file, entry, dtype

    def __call__(self) -> Range:
        found = foreign.unpacked(self._file, self._entry)
        want = boxes.shape_of(self._entry.box), self._dtype
        if (found.shape, found.dtype) != want:
            text = f"{self._file.name} has {found.dtype}{list(found.shape)} where {want[1]}{list(want[0])} should be"
            raise _refusal(self._file.parent, text, mend="Use another checkpoint, or a copy of this one.")
        return found
