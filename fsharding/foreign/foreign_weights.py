"""Open weights that another program wrote, as a `torch.save` file, a DCP directory or safetensors, to read any slice.

Guarantee: `read` returns the bits of the file, and never holds more than a window of it.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fsharding.base.calls import call_as, public_name
from fsharding.base.errors import CheckpointError, listed, message
from fsharding.base.local_paths import check_local
from fsharding.base.public import public
from fsharding.base.untrusted import beside, open_plain, own_tree, parse_json, read_json
from fsharding.checkpoint.byte_ranges import Range, copy_range, pread, shared
from fsharding.checkpoint.chunks import Place
from fsharding.checkpoint.directory import StrPath
from fsharding.checkpoint.manifest import METADATA, is_plain_name, is_shape
from fsharding.checkpoint.reader import open_source
from fsharding.checkpoint.torch_pickles import Made, OddTensorError, Pairs, TorchFile, torch_file
from fsharding.foreign import coded_weights
from fsharding.foreign.safetensors_files import LARGEST, SHARDING, Header, header_of
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box
from fsharding.sharding.named_sharding import LeafType

__all__ = [
    "Refusal", "Weights", "as_numbers", "not_cast", "open_index", "open_part", "open_weights", "table_of", "weights_at",
]  # fmt: skip

_FUNCTION = "fs.foreign.open_weights"
_WRAPPERS = re.compile(r"^(module\.(_orig_mod\.)?|_orig_mod\.(module\.)?)")  # a second module. is the model's own
_ORDERED = "collections.OrderedDict"
# Limits of the values in a file: their nesting, and their number beyond one per byte of the pickle.
_DEPTH, _FREE_VALUES = 100, 10_000

_INDEX_LIMIT = 64 << 20  # the largest index, in bytes


@dataclass(frozen=True)
class Weights:
    """Tensors in files of another program; returned by `open_weights`.

    Attributes:
        path: Path of the file or directory.
        format: "torch", "dcp" or "safetensors".
        leaves: Shape and dtype of each tensor by name.
        others: Names of entries without tensors, and of objects that are not read.
        reader: Function that reads a slice; call `read` instead.
        unread: Tensors that cannot be read, by name, with the reason and what to save instead.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"w": torch.arange(6.0).view(3, 2)}, f"{folder}/model.pt")
        ...     weights = fs.foreign.open_weights(f"{folder}/model.pt")
        ...     weights.read("w", ((1, 3), (0, 1)), column := torch.empty(2, 1))
        >>> column.flatten()
        tensor([2., 4.])
    """

    path: Path
    format: str
    leaves: Mapping[str, LeafType]
    others: tuple[str, ...]
    reader: Callable[[str, Box, Tensor], None]
    unread: Mapping[str, str] = field(default_factory=dict[str, str])

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Read a slice of a tensor.

        Args:
            name: Name of the tensor, a key of `leaves`.
            box: Half-open index range per dim.
            out: Tensor in the shape of the box, which is overwritten; elements are cast to its dtype.

        Raises:
            CheckpointError: A file that has changed or contradicts its index; a tensor in `unread`; a dtype that torch
                doesn't cast.
        """
        try:
            if why := self.unread.get(name, "") or not_cast(self.leaves[name], out.dtype):
                raise ValueError(why)
            self.reader(name, box, out)
        except (EOFError, NotImplementedError, OSError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            # Users may call this method too, outside of any public function.
            caller = public_name()
            caller = _FUNCTION if caller == "fsharding" else caller
            raise call_as(caller, Refusal(f"{name}: {error}").worded, self.path) from error


def not_cast(stored: LeafType, dtype: torch.dtype) -> str:
    """Return why a tensor cannot be read in a dtype; "" if it can."""
    if stored.dtype != torch.float4_e2m1fn_x2 or dtype == stored.dtype:
        return ""
    what = f"it is {stored}: 4-bit values, two per element, which torch cannot cast"
    return f"{what}; read it as {stored.dtype}, or save dequantized values"


@public
def open_weights(path: StrPath, prefix: str = "") -> Weights:
    """Open the weights at a path and list their tensors, without reading them.

    Names of a nested state dict are joined by dots: `{"model": {"w": ...}}` has `model.w`. The prefixes of DDP and
    torch.compile (`module.`, `_orig_mod.`) are removed, in any order. If `config.json` in the directory has a
    `quantization_config` of block-wise fp8, values and scales appear as one float32 tensor; other quantizations raise.

    Args:
        path: Path of a `torch.save` file, a `.safetensors` file or an index of some; or a directory written by
            `torch.distributed.checkpoint.save` or torch's `HuggingFaceStorageWriter`, or of safetensors. The path of an
            fp8 file or index, instead of its directory, gives values and scales as stored.
        prefix: Prefix of the names to return, which is removed, such as "model.".

    Returns:
        A `Weights`. Tensors that cannot be read, such as nested ones, are in its `unread`.

    Raises:
        CheckpointError: No readable file, a damaged or truncated one, or an index that points outside of its directory.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"model": {"w": torch.zeros(3, 2)}, "epoch": 7}, f"{folder}/model.pt")
        ...     weights = fs.foreign.open_weights(f"{folder}/model.pt", "model.")
        >>> weights.format, weights.leaves["w"].shape
        ('torch', (3, 2))
    """
    return weights_at(path, prefix)


def weights_at(path: StrPath, prefix: str = "", *, mend: str = "", records: dict[str, Place] | None = None) -> Weights:
    """Open weights like `open_weights`, for another public function; `records` gets the records of a DCP directory."""
    check_local(path)
    where = Path(path)
    try:
        where = _where(path)
        if not where.exists():
            raise Refusal("there is no such file or directory")
        result = _directory(where, records) if where.is_dir() else open_file(where)
    except CheckpointError:
        raise
    except Refusal as refused:
        raise refused.worded(where, mend) from refused
    except (OSError, ValueError) as error:
        raise Refusal(getattr(error, "strerror", None) or str(error)).worded(where) from error
    leaves = {name.removeprefix(prefix): leaf for name, leaf in result.leaves.items() if name.startswith(prefix)}
    unread = {name.removeprefix(prefix): why for name, why in result.unread.items() if name.startswith(prefix)}
    return Weights(
        where, result.format, leaves, result.others, lambda name, *x: result.reader(prefix + name, *x), unread
    )


def _where(path: StrPath) -> Path:
    """Return the real path of what a user named, or the link itself if it points to a nameless blob of a Hub cache."""
    given = Path(os.path.realpath(os.path.dirname(os.path.abspath(path)))) / os.path.basename(os.path.abspath(path))
    tree = own_tree(given.parent)
    real = Path(os.path.realpath(given))
    return given if given.is_symlink() and tree != given.parent and real.is_relative_to(tree) else real


class Refusal(ValueError):
    """A reason not to read a file, with a fix and a path if the default ones don't fit."""

    def __init__(self, *rows: str, mend: str = "", where: Path | None = None) -> None:
        super().__init__(", ".join(rows[:1]))
        self.rows = rows
        self.mend = mend
        self.where = where

    def worded(self, where: Path, mend: str = "") -> CheckpointError:
        """Word the error for the caller of a public function."""
        mend = self.mend or mend or "Pass a torch.save file of a state dict, a directory of torch DCP, or safetensors."
        return CheckpointError(message(f"cannot read {self.where or where}.", self.rows, mend))


# ----------------------------------------------------------------------------------------------------------- by content
def _directory(folder: Path, records: dict[str, Place] | None) -> Weights:
    names = sorted(os.listdir(folder))
    if os.path.lexists(folder / METADATA):
        parts = [name for name in names if name.endswith(".distcp")]
        return _sharded(folder, parts, "dcp") or _dcp(folder, {} if records is None else records)
    indices = [name for name in names if name.endswith(".index.json")]
    files = [name for name in names if name.endswith(".safetensors")]
    if len(indices) == 1:
        return as_numbers(open_index(folder / indices[0], table_of(folder / indices[0])), folder)
    if not indices and (shards := _sharded(folder, files, "safetensors")) is not None:
        return as_numbers(shards, folder)
    if not indices and len(files) == 1:
        return as_numbers(open_file(beside(folder, files[0])), folder)
    what = f"the indices {listed(indices)}" if indices else f"{len(files)} .safetensors files and no index"
    raise Refusal(f"it has no {METADATA}, and {what}")


def as_numbers(weights: Weights, folder: Path) -> Weights:
    """Dequantize the weights of a directory, if its `config.json` names a format."""
    try:
        blocks = coded_weights.blocks_in(folder)
        if blocks is None:
            return weights
        leaves, reader = coded_weights.decoded(weights.leaves, weights.reader, blocks)
    except ValueError as error:
        raise Refusal(*str(error).splitlines(), mend=coded_weights.MEND, where=folder) from error
    return replace(weights, leaves=leaves, reader=reader)


def open_file(file: Path) -> Weights:
    """Open a file by the format of its first bytes."""
    # A link is followed only within one model of a Hub cache: weights come from strangers.
    real = beside(file.parent, file.name) if file.is_symlink() else file
    match _kind_of(real):
        case "zip":
            return _torch(real)
        case "safetensors":
            header = _header(real)
            return _of_parts(real, "safetensors", _whole(real, header.tensors), header.unread)
        case "index":
            return open_index(file, table_of(file))
        case "pickle":
            mend = "Load it with torch.load(weights_only=True) and torch.save it again."
            raise Refusal("it is in torch's format before 1.6, or a plain pickle", mend=mend)
        case _:
            raise Refusal("its first bytes match no supported format")


def _kind_of(file: Path) -> str:
    """Return the format of a file by its first bytes; "" if it is unknown."""
    with open_plain(file) as stream:
        head = stream.read(9)
    # Safetensors first: a header length of 640 has the first byte of a pickle, one of 123 that of a JSON object. The
    # bytes of a JSON text, read as a length, exceed `LARGEST`.
    if head[8:] == b"{" and (head[:1] != b"{" or int.from_bytes(head[:8], "little") <= LARGEST):
        return "safetensors"
    firsts = {b"PK\x03\x04": "zip", b"\x80\x02": "pickle", b"{": "index"}
    return next((kind for first, kind in firsts.items() if head.startswith(first)), "")


def table_of(index: Path) -> dict[str, str]:
    """Return the file of each tensor, from an index."""
    entries = read_json(beside(index.parent, index.name), most=_INDEX_LIMIT, finite=False)
    table = entries.get("weight_map") if isinstance(entries, dict) else None
    if not isinstance(table, dict):
        raise ValueError("it has no table weight_map")
    return table


def open_index(index: Path, table: Mapping[str, str]) -> Weights:
    """Open several files by the table of their index; one error lists every file that can't be read."""
    # Open every file before the first read, so that a missing or damaged one raises here.
    parts: dict[str, Weights] = {}
    refusals: list[Refusal] = []
    for text, name in sorted({str(name): name for name in table.values()}.items()):
        try:
            parts[text] = open_part(index.parent, name, index)
        except Refusal as refused:
            refusals.append(refused)
    opened = {leaf: parts[str(name)] for leaf, name in table.items() if str(name) in parts}
    unread = {leaf: part.unread[leaf] for leaf, part in opened.items() if leaf in part.unread}
    leaves = {leaf: part.leaves[leaf] for leaf, part in opened.items() if leaf in part.leaves}
    known = leaves.keys() | unread.keys()
    if lost := [f"{leaf} is not in {table[leaf]}, unlike the index" for leaf in opened if leaf not in known]:
        mend = "Download the files again: they do not belong to this index."
        refusals.append(Refusal(*lost, mend=mend, where=index))
    if refusals:
        rows = [row for refused in refusals for row in refused.rows]
        raise Refusal(*rows, mend=refusals[0].mend, where=refusals[0].where)
    kinds = "+".join(sorted({part.format for part in parts.values()}))
    return Weights(index.parent, kinds, leaves, (), lambda leaf, *part: opened[leaf].reader(leaf, *part), unread)


def open_part(folder: Path, name: Any, index: Path | None = None) -> Weights:
    """Open a file of a directory, with its name in errors."""
    if why := _leads_out(folder, name):
        mend = "Put every file next to the index; links may only point inside the same model of a Hub cache."
        raise Refusal(f"{name}: {why}", mend=mend, where=index)
    try:
        return open_file(beside(folder, name))
    except (OSError, ValueError) as error:  # a `Refusal` of one file has one row
        text = getattr(error, "strerror", None) or error
        raise Refusal(f"{name}: {text}", mend=getattr(error, "mend", "")) from error


def _leads_out(folder: Path, name: object) -> str | None:
    """Return why a name is no plain file of a directory, or None."""
    if not is_plain_name(name):
        return "isn't a plain file name"
    try:
        return "is an index itself" if _kind_of(beside(folder, str(name))) == "index" else None
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:
        return str(error).removeprefix("it ")


# ---------------------------------------------------------------------------------------------------------- the formats
_Parts: TypeAlias = Mapping[Box, tuple[Path, Range]]
"""The parts of a tensor in files, by the box of each."""


def _of_parts(
    path: Path, kind: str, parts: Mapping[str, _Parts], unread: Mapping[str, str], others: Sequence[str] = ()
) -> Weights:
    """Return weights of which each tensor is tiled by ranges of files."""

    # The parts tile their tensor, so that every element of the box is in one.
    def read(name: str, box: Box, out: Tensor) -> None:
        for (file, where), there, here in shared(box, parts[name].items()):
            with open_plain(file) as stream:
                copy_range(where.part(there), out[here], functools.partial(pread, stream.fileno()))

    leaves: dict[str, LeafType] = {}
    for name, own in parts.items():
        shape = tuple(max(stop for _, stop in dim) for dim in zip(*own, strict=True))
        leaves[name] = LeafType(shape, next(iter(own.values()))[1].dtype)
    return Weights(path, kind, leaves, tuple(others), read, unread)


def _whole(file: Path, ranges: Mapping[str, Range]) -> dict[str, _Parts]:
    """Return tensors of which each is one range of a file."""
    return {name: {boxes.full(where.shape): (file, where)} for name, where in ranges.items()}


def _header(file: Path) -> Header:
    try:
        with open_plain(file) as stream:
            return header_of(stream)
    except EOFError as error:
        raise Refusal(str(error), mend="It is truncated: download it again.") from error


def _sharded(folder: Path, names: Sequence[str], kind: str) -> Weights | None:
    """Open files with shards of tensors, as torch's `HuggingFaceStorageWriter` writes them; None for other files."""
    found: dict[str, dict[Box, tuple[Path, Range]]] = {}
    unread: dict[str, str] = {}
    for name in names:
        file = beside(folder, name)
        if _kind_of(file) != "safetensors":
            return None
        ranges, odd, notes = _header(file)
        if SHARDING not in notes:
            return None
        unread |= odd
        table = parse_json(notes[SHARDING].encode())
        for leaf, where in ranges.items():
            starts = table[leaf].get("saved_offsets") if isinstance(table, dict) and leaf in table else None
            if not isinstance(starts, list) or len(starts) != len(where.shape) or not is_shape(starts):
                raise ValueError(f"{name}: {leaf} has no valid saved_offsets")
            box = tuple((a, a + n) for a, n in zip(starts, where.shape, strict=True))
            found.setdefault(leaf, {}).setdefault(box, (file, where))
    result = _of_parts(folder, kind, found, unread)
    rows = [row for leaf, parts in found.items() if (row := _not_whole(leaf, result.leaves[leaf].shape, parts))]
    if rows:
        raise Refusal(*rows, mend="Get all shards of one save, from every rank.", where=folder)
    return result if names else None


def _not_whole(leaf: str, shape: tuple[int, ...], parts: _Parts) -> str:
    """Return why parts don't make one tensor; "" if they do."""
    volume = sum(map(boxes.volume, parts))
    if len({where.dtype for _, where in parts.values()}) > 1:
        return f"{leaf}: its parts have several dtypes"
    if volume != math.prod(shape):
        return f"{leaf}: its parts have {volume:,} of {math.prod(shape):,} elements"
    return "" if boxes.is_tiling(parts, shape) else f"{leaf}: its parts overlap"


def _dcp(folder: Path, records: dict[str, Place]) -> Weights:
    """Open a DCP directory: leaves in chunks, and tensors inside of other values, such as tuples, which are pickled."""
    source = open_source(folder, None)
    records |= source.records
    ranges: dict[str, _Parts] = {}
    unread = dict(source.unread)
    others: list[str] = []
    for path, (name, start, length) in source.records.items():
        found = _in_record(folder / name, start, length, path)
        # `.metadata` describes a tensor subclass as a plain tensor; only its record has the class.
        unread |= {inner: str(x) for inner, x in found.items() if isinstance(x, OddTensorError)}
        if path in source.leaves:
            continue
        others += [] if any(found.values()) else [path]
        for inner, x in found.items():
            if isinstance(x, Range) and inner not in source.leaves:
                ranges |= _whole(folder / name, {inner: x.moved(start)})
    inside = _of_parts(folder, "dcp", ranges, unread, others)

    def read(leaf: str, box: Box, out: Tensor) -> None:
        (inside.reader if leaf in ranges else source.read)(leaf, box, out)

    leaves = {path: leaf for path, leaf in source.leaves.items() if path not in unread}
    return replace(inside, leaves={**leaves, **inside.leaves}, reader=read)


def _in_record(file: Path, start: int, length: int, path: str) -> dict[str, Range | OddTensorError | None]:
    """Return the contents of a record by path; None at the record's path if it cannot be parsed."""
    with open_plain(file) as stream:
        try:
            record = torch_file(stream, start, length)
        except ValueError:
            return {path: None}
        try:
            return dict(_entries(record, path))
        except ValueError as error:
            why = f"it has tensors in an object of a class ({error}): save a dict, such as x._asdict() of a NamedTuple"
            return {path: OddTensorError(why) if record.has_tensors else None}


def _torch(file: Path) -> Weights:
    with open_plain(file) as stream:
        loaded = torch_file(stream)
        entries = [*_entries(loaded)]
    if not isinstance(loaded.held, Pairs) and getattr(loaded.held, "kind", "") != _ORDERED:
        what = "a tensor" if entries and isinstance(entries[0][1], Range) and not entries[0][0] else "something else"
        raise ValueError(f"it holds {what}, not a state dict")
    found = [(name, x) for name, x in entries if isinstance(x, Range)]
    ranges = dict(found)
    if twice := [name for name, x in found if ranges[name] is not x]:
        raise ValueError(f"two tensors have the name {twice[0]}")
    unread = {name: str(x) for name, x in entries if isinstance(x, OddTensorError)}
    return _of_parts(file, "torch", _whole(file, ranges), unread, [name for name, x in entries if x is None])


def _entries(file: TorchFile, path: str = "") -> Iterator[tuple[str, Range | OddTensorError | None]]:
    """Yield the contents of a file by dotted path: tensors, why others are not read, and None for other values."""
    # Pickles share objects: nested dicts that each contain one dict twice have exponentially many paths. The number of
    # values is limited by the size of the file.
    left = _FREE_VALUES + file.size

    def walk(node: Any, path: str, depth: int) -> Iterator[tuple[str, Range | OddTensorError | None]]:
        nonlocal left
        left -= 1
        if depth > _DEPTH or left < 0:
            raise ValueError("its values are nested too deeply, or too many for its size")
        if isinstance(node, Made):
            try:
                found = file.tensor(node)
            except OddTensorError as odd:
                found = odd
            except ValueError as error:
                raise ValueError(f"{path}: {error}" if path else str(error)) from error
            if found is not None or node.kind != _ORDERED:
                yield path, found
                return
            node = _ordered(node)
        if isinstance(node, Pairs):
            items = _named(node, path)
        elif isinstance(node, list | tuple):
            items = {str(i): value for i, value in enumerate(node)}
        else:
            yield path, None
            return
        for key, value in items.items():
            yield from walk(value, f"{path}.{key}" if path else key, depth + 1)

    yield from walk(file.held, path, 0)
    file.check_names()


def _named(pairs: Pairs, path: str) -> dict[str, Any]:
    """Return the items of a dict by their keys as strings, without the prefixes of wrappers that all keys have."""
    items: dict[str, Any] = {}
    for key, value in pairs:
        parts = key if type(key) is tuple else (key,)
        if not all(type(part) in (str, int, float, bool, type(None)) for part in parts):
            raise ValueError("a key is neither a string nor a number")
        if str(key) in items:
            raise ValueError(f"two entries have the name {path}.{key}" if path else f"two entries have the name {key}")
        items[str(key)] = value
    common = os.path.commonprefix([*items])  # noqa: RUF071  # by characters
    wrapped = len(common) - len(_WRAPPERS.sub("", common))
    return {key[wrapped:]: value for key, value in items.items()}


def _ordered(made: Made) -> Pairs:
    """Return the items of a pickled `OrderedDict`: from its state, or from its arguments."""
    if isinstance(made.state, Pairs):
        return made.state
    items = made.args[0] if made.args else []
    if not isinstance(items, list) or not all(isinstance(item, list | tuple) and len(item) == 2 for item in items):
        raise ValueError("an OrderedDict in it has no pairs")
    return Pairs((key, value) for key, value in items)
