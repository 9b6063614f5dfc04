"""`export`: write a checkpoint as a `torch.save` state dict, safetensors, or a DCP directory, in one process.

Guarantee: exported tensors load bitwise equal; the target is complete or doesn't exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.base.errors import CheckpointError, message
from fsharding.base.public import public
from fsharding.checkpoint import directory
from fsharding.checkpoint.byte_ranges import memory, pieces
from fsharding.checkpoint.directory import StrPath
from fsharding.checkpoint.reader import Source, open_source
from fsharding.checkpoint.state_leaves import BUFFERS
from fsharding.checkpoint.writer import Writer, write_metadata
from fsharding.comm.redistribute import in_buckets
from fsharding.foreign.fsdp2 import Item, Settings, params_in, plan_fsdp2
from fsharding.foreign.name_map import Names, Piece, parts_by_leaf, written_constants
from fsharding.foreign.safetensors_files import INDEX, SAFETENSORS, index_text, tensor_files
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box
from fsharding.sharding.leaf_names import RESERVED
from fsharding.sharding.named_sharding import LeafType

__all__ = ["FORMATS", "Exported", "export"]


_WHAT = ("params", "all", "fsdp2")
FORMATS = ("torch", "safetensors", "dcp")


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        path: Path of the file or directory.
        format: "torch", "safetensors" or "dcp".
        tensors: Number of tensors.
        files: Bytes of each file by name.

    Example:
        >>> print(fs.foreign.Exported("run/weights", "safetensors", 1, {"model.safetensors": 1234}))
        run/weights: 1 tensors, 1 files, 1,234 bytes, safetensors
    """

    path: Path
    format: str
    tensors: int
    files: dict[str, int]

    def __str__(self) -> str:
        size = sum(self.files.values())
        return f"{self.path}: {self.tensors} tensors, {len(self.files)} files, {size:,} bytes, {self.format}"


@public
def export(
    source: StrPath,
    target: StrPath,
    format: Literal["torch", "safetensors", "dcp"],
    names: Names = None,
    *,
    what: Literal["params", "all", "fsdp2"] = "params",
    settings: Settings | None = None,
    max_file_bytes: int = 5 << 30,
) -> Exported:
    """Export the leaves of a checkpoint for other programs, in one process. Checksums are verified.

    Args:
        source: Path of a checkpoint written by `fs.checkpoint.save`.
        target: Path to create; it must not exist.
        format: "torch", a file with a flat state dict for `torch.load(weights_only=True)`; "safetensors", a directory
            with `model.safetensors`, or with several files and their index; or "dcp", a directory for
            `torch.distributed.checkpoint.load`.
        names: Names of our leaves in the output, as in `load_weights`. Those of a functionalized module (`net.sources`)
            include its persistent buffers.
        what: "params" exports main parameters, under the paths of the layout. "all" exports every leaf, under paths
            such as `params.blocks.wq`, `opt_state.mu.blocks.wq` and `step`. "fsdp2" (with "dcp") exports what
            `dcp.load` needs to fill `{"model": m, "optim": o}`, with m and o from torch's
            `get_state_dict(model, optimizer)`; the optimizer must be `adamw` or `from_torch`, also under `chain` and
            `multi_transform`.
        settings: Settings of the optimizer for "fsdp2": `optimizer.defaults`, or a dict for each parameter group, as
            in `get_state_dict`, with the names of its parameters under `params`.
        max_file_bytes: Size limit of files with more than one tensor; "torch" always writes one file.

    Returns:
        An `Exported`: path, format, number of tensors, and file sizes.

    Raises:
        CheckpointError: No checkpoint, or a damaged one; names that don't fit; a target that exists or cannot be
            written; an optimizer or settings that "fsdp2" cannot express. Nothing is left at the target.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: {"w": torch.ones(4)}, fs.sgd(0.1), fs.random.key(0), layout)
        >>> fs.checkpoint.save("run/5", state)
        >>> exported = fs.foreign.export("run/5", "run/model.pt", "torch", {"w": "linear.weight"})
        >>> torch.load(exported.path, weights_only=True)
        {'linear.weight': tensor([1., 1., 1., 1.])}
    """
    where, there = directory.new_target(target)
    rows = [f"format is {format!r}: formats are {', '.join(FORMATS)}"] if format not in FORMATS else []
    rows += there
    if format == "torch" and where.name.endswith(".safetensors"):
        rows.append(f"{where}: torch.load reads a file that ends in .safetensors as that format")
    if what not in _WHAT:
        rows.append(f"what is {what!r}: choices are {', '.join(map(repr, _WHAT))}")
    elif what == "fsdp2" and format != "dcp":
        rows.append(f"what='fsdp2' is for format 'dcp', not {format!r}")
    rows += ["settings= is for what='fsdp2' only"] if settings is not None and what != "fsdp2" else []
    if rows:
        raise CheckpointError(message(f"cannot write {where}.", rows, "Change these arguments."))
    with directory.wording_failures():
        leaves = open_source(*directory.found(source))
    items, values = _plan(leaves, names, what, format, settings)
    with directory.writing(where, file=format == "torch") as partial:
        if format == "torch":
            _write_torch(leaves, items, partial)
        elif format == "safetensors":
            _write_safetensors(leaves, items, max_file_bytes, partial)
        else:
            _write_dcp(leaves, items, values, max_file_bytes, partial)
    files = sorted(where.iterdir()) if where.is_dir() else [where]
    return Exported(where, format, len(items), {file.name: file.stat().st_size for file in files})


def _plan(
    leaves: Source, names: Names, what: str, format: str, settings: Settings | None
) -> tuple[list[Item], dict[str, Any]]:
    """Return the tensors to write, in the order of the leaves, and values that aren't tensors."""
    if what == "fsdp2":
        result, values, rows = plan_fsdp2(leaves.leaves, names, settings)
    else:
        result, values, rows = _taken(leaves, names, what, format)
    prefix = "model." if what == "fsdp2" else ""
    items: dict[str, Item] = {}
    for item in result:
        path, name = item.path, item.part.name
        if name in items:
            ours = path if what == "all" else path.removeprefix("params.")
            rows.append(f"{ours}: {name} is also the name of {items[name].path}")
        if format == "safetensors" and name == RESERVED:
            rows.append(f"{path}: {RESERVED} is reserved by the safetensors format")
        items[name] = item
    saved = {path.removeprefix(BUFFERS): path for path in leaves.leaves if path.startswith(BUFFERS)}
    constants, missing = written_constants(names, saved)
    rows += [f"{row} in the checkpoint" for row in missing]
    for name, value in constants.items():
        leaf = leaves.leaves[value] if isinstance(value, str) else LeafType(tuple(value.shape), value.dtype)
        part = Piece(f"{prefix}{name}", leaf.shape, boxes.full(leaf.shape))
        item = Item(name, part, leaf.dtype, value.cpu()) if isinstance(value, Tensor) else Item(value, part, leaf.dtype)
        rows += [f"{name}: a leaf and a buffer have this name"] if item.part.name in items else []
        if format == "safetensors" and item.dtype not in SAFETENSORS.values():
            rows.append(f"{name}: safetensors has no {item.dtype}")
        items[item.part.name] = item
    if rows:
        mend = "Pass names={ours: theirs}, a unique name for each leaf, with {i} for the blocks of a stack."
        if what == "fsdp2":
            mend += " Pass settings=optimizer.defaults of the optimizer that loads them."
        raise CheckpointError(message("cannot name some tensors.", rows, mend))
    return list(items.values()), values


def _taken(leaves: Source, names: Names, what: str, format: str) -> tuple[list[Item], dict[str, Any], list[str]]:
    """Return the tensors of the selected leaves, no other values, and a row for each leaf that cannot be named."""
    wanted = {path: path for path in leaves.leaves} if what == "all" else params_in(leaves.leaves)
    rows: list[str] = []
    result: list[Item] = []
    for path, own in parts_by_leaf(names, {path: leaves.leaves[x].shape for path, x in wanted.items()}, rows).items():
        leaf = leaves.leaves[wanted[path]]
        if format == "safetensors" and leaf.dtype not in SAFETENSORS.values():
            rows.append(f"{path}: safetensors has no {leaf.dtype}")
        result += [Item(wanted[path], part, leaf.dtype) for part in own]
    return result, {}, rows


def _windows(leaves: Source, item: Item) -> Iterator[tuple[Box, Tensor]]:
    """Yield a tensor in contiguous pieces, in the order of its memory."""
    full = boxes.full(item.part.shape)
    # A tensor without elements is one empty piece: it has no bytes, but DCP records it.
    for box in pieces(full, item.dtype.itemsize) if item.bytes else [full]:
        x = torch.empty(boxes.shape_of(box), dtype=item.dtype)
        ours = x.mT if item.part.transposed else x  # read into a transposed view: no second copy
        if item.value is not None:
            ours.copy_(item.value[boxes.relative(box, full)])
        else:
            leaves.read(item.path, item.part.ours(box), ours[(None,) * item.part.lead])
        yield box, x
        del x, ours  # free it before the next one is allocated


# -------------------------------------------------------------------------------------------------------------- formats
def _write_torch(leaves: Source, items: Sequence[Item], file: Path) -> None:
    """Let torch write a file with room for each tensor, then fill it piece by piece."""
    with _compat.shapes_only():
        state = {item.part.name: torch.empty(item.part.shape, dtype=item.dtype) for item in items}
    try:
        _compat.save_without_data(state, file)
    except RuntimeError as error:  # a short write, such as on a full disk, fails a check of torch's zip writer
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(message(f"cannot write {file}.", [reason])) from error
    with file.open("r+b") as stream:
        with _compat.shapes_only():
            room = torch.load(stream, map_location="cpu", weights_only=True)
        for item in items:
            if item.bytes:
                stream.seek(_compat.file_offset(room[item.part.name]))
                _copy(leaves, item, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _write_safetensors(leaves: Source, items: Sequence[Item], limit: int, folder: Path) -> None:
    named = {item.part.name: item for item in items}
    files = tensor_files({name: LeafType(item.part.shape, item.dtype) for name, item in named.items()}, limit)
    for file in files:
        with directory.new_file(folder / file.name) as stream:
            stream.write(file.header)
            for name in file.offsets:
                _copy(leaves, named[name], stream)
    if len(files) > 1:
        with directory.new_file(folder / INDEX) as stream:
            stream.write(index_text(files))


def _write_dcp(leaves: Source, items: Sequence[Item], values: Mapping[str, Any], limit: int, folder: Path) -> None:
    written = []
    files = list(in_buckets(items, lambda item: item.bytes, limit)) or [[]]
    for number, group in enumerate(files):
        with Writer(folder, number) as writer:
            for item in group:
                for box, x in _windows(leaves, item):
                    writer.add(item.part.name, item.part.shape, box, x)
                    writer.settle()
                    del x
            for name, value in values.items() if number == 0 else ():
                writer.add_value(name, value)
            written.append(writer.close())
    write_metadata(folder, written)


def _copy(leaves: Source, item: Item, stream: BinaryIO) -> None:
    for _, x in _windows(leaves, item):
        stream.write(memory(x))
        del x
