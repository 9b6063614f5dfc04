"""The manifest of a checkpoint as JSON: leaves, layout, sizes and checksums of all files, and its own checksum.

Guarantee: `parse(text_of(m)) == m`; a text that is incomplete, or of an unknown format or version, is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from fsharding.base.errors import CheckpointError, listed, message, report
from fsharding.base.untrusted import parse_json, values_of

__all__ = [
    "BLOCK", "FORMAT", "MANIFEST", "METADATA", "OTHER", "VERSION", "Manifest", "SavedFile", "SavedLeaf",
    "check_readable", "dtype_name", "is_plain_name", "is_shape", "limits", "parse", "text_of",
]  # fmt: skip

FORMAT = "fsharding.checkpoint"
VERSION = 1
BLOCK = 4 << 20
MANIFEST = "manifest.json"
METADATA = ".metadata"
OTHER = "Use a different checkpoint, or a copy of this one."

_MOST_BYTES = 1 << 29
_MOST_VALUES = 10_000_000
_ENTRIES = ("version", "step", "torch", "fsharding", "layout", "tree", "structure", "files", "extra")
# A manifest may lack these. Older readers ignore them and lose nothing, so the version stays the same.
_OPTIONAL = ("data", "chunks")
_LARGEST_BLOCK = 64 << 20
_MOST_DIMS = 64


class SavedLeaf(NamedTuple):
    """One leaf of a checkpoint.

    Attributes:
        shape: Full shape.
        dtype: Name of the dtype, such as "float32".
        spec: Partition spec when it was saved, such as "P('dp')"; None for a plain tensor.

    Example:
        >>> str(fs.checkpoint.SavedLeaf((4, 2), "float32", "P('dp')"))
        'float32[4, 2]'
    """

    shape: tuple[int, ...]
    dtype: str
    spec: str | None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class SavedFile(NamedTuple):
    """One file of a checkpoint.

    Attributes:
        bytes: Size.
        sha256: SHA-256 of each block in hexadecimal, so that any part can be checked alone.
        block: Size of a block in bytes; the last one may be shorter.

    Example:
        >>> file = fs.checkpoint.SavedFile(bytes=9 << 20, sha256=("1f9c", "20b3", "e7d0"), block=4 << 20)
        >>> len(file.sha256) == -(-file.bytes // file.block)
        True
    """

    bytes: int
    sha256: tuple[str, ...]
    block: int = BLOCK


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint, as `metadata` reads them.

    Attributes:
        step: Number of updates before the save.
        layout: Layout as JSON values; `layout_of` rebuilds it.
        tree: Leaves by path.
        structure: Structure of the optimizer state as JSON values.
        files: Every other file of the directory, by name.
        extra: JSON value that was passed to `save`.
        torch: Version of torch that wrote it.
        fsharding: Version of fsharding that wrote it.
        version: Version of the format.
        data: Positions of data, for `load(data=...)`; None if none were saved.
        chunks: Places of the boxes of each leaf, `FILE BYTE START:STOP ...` each; None in older checkpoints, whose
            `.metadata` has them.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: {"w": torch.ones(4)}, fs.sgd(0.1), fs.random.key(0), layout)
        >>> fs.checkpoint.save("run/5", state)
        >>> manifest = fs.checkpoint.metadata("run/5")
        >>> manifest.step, sorted(manifest.tree)
        (0, ['key', 'opt_state.count', 'params.w', 'step'])
    """

    step: int
    layout: dict[str, Any]
    tree: dict[str, SavedLeaf]
    structure: Any
    files: dict[str, SavedFile]
    extra: Any
    torch: str
    fsharding: str
    version: int = VERSION
    data: dict[str, Any] | None = None
    chunks: dict[str, str] | None = None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def limits(others: int) -> tuple[int, int]:
    """Compute the maximum bytes and values of a manifest from the total bytes of the other files."""
    # Parsing a million values takes seconds. There is one checksum, of 68 bytes, for every 4 MiB.
    return min((64 << 20) + others // 16384, _MOST_BYTES), min(1_000_000 + others // (2 << 20), _MOST_VALUES)


def check_readable(text: str, others: int) -> None:
    """Refuse a manifest that `load` would refuse as too large."""
    data = text.encode()
    sizes = (("bytes", len(data)), ("values", values_of(data) if len(data) <= _MOST_BYTES else 0))
    if over := [
        f"it has {size:,} {what}; at most {most:,} are read for {others:,} bytes of tensors"
        for (what, size), most in zip(sizes, limits(others), strict=True)
        if size > most
    ]:
        rule = f"cannot write a {MANIFEST} that no load would read."
        mend = "Write large values of `extra`, or of the position of `data`, to a separate file."
        raise CheckpointError(report(f"fs.checkpoint.save {rule}", over, f"{mend} Many small leaves can be stacked."))


def text_of(manifest: Manifest) -> str:
    """Write the text of `manifest.json`."""
    data: dict[str, Any] = {"format": FORMAT} | {name: getattr(manifest, name) for name in _ENTRIES}
    data["tree"] = {path: leaf._asdict() for path, leaf in manifest.tree.items()}
    data["files"] = {name: file._asdict() for name, file in manifest.files.items()}
    data |= {name: value for name in _OPTIONAL if (value := getattr(manifest, name)) is not None}
    try:
        # Seal the values that `parse` will read: JSON changes tuples and keys.
        data = parse_json(json.dumps(data, allow_nan=False).encode(), values=_MOST_VALUES)
    except (TypeError, ValueError, RecursionError) as error:
        mend = "Pass only dicts, lists, strings, finite numbers, booleans and None."
        text = report("fs.checkpoint.save cannot write `extra` as JSON.", [str(error)], mend)
        raise CheckpointError(text) from error
    rows = [f" {json.dumps(key)}: {_value(value)}" for key, value in {**data, "sha256": _seal(data)}.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _value(value: Any) -> str:
    """Format JSON with one entry per line, so that it is readable."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(inner)}" for key, inner in value.items()) + "\n }"


def _seal(data: dict[str, Any]) -> str:
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def parse(text: bytes, where: str, *, newer: bool = False, values: int = _MOST_VALUES) -> Manifest:
    """Read a manifest; `newer` accepts a version that is too new to load, if it has the known entries."""
    try:
        data = parse_json(text, values=values)
    except ValueError as error:
        raise _damaged(where, f"it is not JSON: {error}") from error
    result = data.get("format") if isinstance(data, dict) else None
    if result != FORMAT:
        rule = f"cannot read {where}: its {MANIFEST} has the format {result!r}, not {FORMAT!r}."
        raise CheckpointError(message(rule, mend="Pass the directory that fs.checkpoint.save has written."))
    version = data.get("version")
    if type(version) is not int or version < 1:
        raise _damaged(where, f"its version is {version!r}")
    if version > VERSION and not newer:
        reads = f"and this fsharding reads up to {VERSION}."
        rule = f"cannot read {where}: its manifest.json has format version {version}, {reads}"
        mend = f"Install the fsharding that wrote it, {data.get('fsharding')}, or a later one."
        raise CheckpointError(message(rule, mend=mend))
    seal = data.pop("sha256", None)
    if seal != _seal(data):
        raise _damaged(where, "its checksum does not match its content")
    try:
        return _from_data(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(where, f"{type(error).__name__}: {error}") from error


def _damaged(where: str, how: str) -> CheckpointError:
    rule = f"cannot read {where}: its {MANIFEST} is damaged."
    return CheckpointError(message(rule, [how], OTHER))


def _from_data(data: dict[str, Any]) -> Manifest:
    tree = {path: SavedLeaf(tuple(leaf["shape"]), leaf["dtype"], leaf["spec"]) for path, leaf in data["tree"].items()}
    files = {
        name: SavedFile(file["bytes"], tuple(file["sha256"]), file["block"]) for name, file in data["files"].items()
    }
    bad = [repr(name) for name in files if not is_plain_name(name)]
    found = {path: getattr(torch, str(leaf.dtype), None) for path, leaf in tree.items()}
    bad += [repr(f"{path}: {tree[path].dtype}") for path, dtype in found.items() if not isinstance(dtype, torch.dtype)]
    if bad:
        raise ValueError(f"not a file name or dtype: {listed(bad)}")
    bad = [path for path, leaf in tree.items() if not is_shape(leaf.shape) or not isinstance(leaf.spec, str | None)]
    if bad:
        raise ValueError(f"not a shape or spec: {listed(bad)}")
    for name, file in files.items():
        sizes = (file.bytes, file.block)
        digests = len(file.sha256)
        if not all(type(n) is int for n in sizes) or not all(isinstance(digest, str) for digest in file.sha256):
            raise ValueError(f"{name}: its size or checksums have wrong types")
        if file.bytes < 0 or not 0 < file.block <= _LARGEST_BLOCK or digests != -(-file.bytes // file.block):
            raise ValueError(f"{name}: {digests} checksums of {file.block} bytes for {file.bytes} bytes")
    # Check only the parts of a layout that are read without planning it; `layout_of` checks the rest.
    layout = data["layout"]
    chunks = {} if data.get("chunks") is None else data["chunks"]
    fits = {
        "the mesh of its layout is invalid": all(type(n) is int and n > 0 for n in layout.get("mesh", {}).values()),
        "the frozen leaves of its layout are invalid": isinstance(layout.get("frozen", []), list),
        "its positions of data are invalid": isinstance(data.get("data"), dict | None),
        "its chunks are invalid": all(isinstance(text, str) for text in chunks.values()),
        f"its step is a {type(data['step']).__name__}, not an int": type(data["step"]) is int,
    }
    if wrong := [row for row, is_right in fits.items() if not is_right]:
        raise ValueError(listed(wrong))
    entries: dict[str, Any] = {name: data[name] for name in _ENTRIES} | {name: data.get(name) for name in _OPTIONAL}
    entries |= {"tree": tree, "files": files, "torch": str(data["torch"]), "fsharding": str(data["fsharding"])}
    return Manifest(**entries)


def is_shape(sizes: Sequence[object]) -> bool:
    """Whether sizes are a valid shape: integers from 0, and not too many elements."""
    if len(sizes) > _MOST_DIMS or not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        return False
    return math.prod(cast(Sequence[int], sizes)) < 1 << 60


def is_plain_name(name: object) -> bool:
    """Whether a name is an entry of the directory itself, and not a path that leads out of it."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")
