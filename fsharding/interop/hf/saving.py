"""`save`: write weights in any layout as a directory for transformers; each rank writes its own boxes.

Guarantee: loading a save returns identical values; the directory gets its name only once it is complete.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.errors import CheckpointError, message
from fsharding.base.public import check_path, public
from fsharding.base.tree import Tree
from fsharding.checkpoint.background import SAVE_TIMEOUT, own_group
from fsharding.checkpoint.byte_ranges import memory, pieces
from fsharding.checkpoint.collective_call import agreed, on_all, write_together
from fsharding.checkpoint.directory import StrPath, new_file, new_target, partial_of, partial_output, place
from fsharding.checkpoint.state_leaves import StateLeaf, objections, own_boxes, stored_params
from fsharding.comm.leaf_memory import in_memory
from fsharding.foreign.coded_weights import CONFIG_KEY, SCALES, config_of_blocks, why_not
from fsharding.foreign.name_map import Piece, in_tensors, written_constants
from fsharding.foreign.safetensors_files import INDEX, SAFETENSORS, TensorFile, index_text, tensor_files
from fsharding.formats import Blocks
from fsharding.formats.precision import KEEP
from fsharding.interop.hf.coding import Coding
from fsharding.interop.hf.comparison import differences, generation_of
from fsharding.interop.hf.config_tables import GENERATION, config_json, config_of, decoder_config
from fsharding.interop.hf.naming import Names, names_of, pieces_by_leaf, pieces_of, untiled
from fsharding.mesh.device_mesh import abstract, own_rank, world_size
from fsharding.mesh.meeting import called_by_all
from fsharding.models.decoder import DecoderConfig, decoder
from fsharding.models.model import unlike_shapes
from fsharding.sharding import boxes, random
from fsharding.sharding.boxes import Box
from fsharding.sharding.layout import Layout
from fsharding.sharding.leaf_names import RESERVED
from fsharding.sharding.leaf_plan import LeafLayout
from fsharding.sharding.named_sharding import LeafType, hides_owners, home_of, local_of
from fsharding.train.buffers import Buffers
from fsharding.train.state import TrainState
from fsharding.train.state_check import check_state

__all__ = ["Saved", "save", "shards_at_home"]


@dataclass(frozen=True)
class Saved:
    """Result of a save.

    Attributes:
        path: Directory.
        tensors: Number of tensors.
        files: Size in bytes of each safetensors file, by name.

    Example:
        >>> recipe = fs.models.presets.recipe("tiny-llama3")
        >>> layout = fs.plan_layout(recipe.model(), fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(recipe.model(), fs.sgd(0.1), fs.random.key(0), layout)
        >>> saved = fs.hf.save("llama", state, recipe)
        >>> saved.tensors, list(saved.files)
        (39, ['model.safetensors'])
    """

    path: Path
    tensors: int
    files: dict[str, int]

    def __str__(self) -> str:
        return f"{self.path}: {self.tensors} tensors, {len(self.files)} files, {sum(self.files.values()):,} bytes"


@public
@called_by_all
def save(
    path: StrPath,
    params: Tree | TrainState,
    config: DecoderConfig | Mapping[str, Any],
    layout: Layout | None = None,
    *,
    names: Names | None = None,
    dtype: torch.dtype | None = None,
    format: Blocks | None = None,
    max_file_bytes: int = 5 << 30,
    timeout: timedelta = SAVE_TIMEOUT,
) -> Saved:
    """Save a directory for `AutoModelForCausalLM.from_pretrained`. Collective; all ranks must share the file system.

    Args:
        path: New directory.
        params: State, whose main parameters are saved; or parameters of `models.decoder`, or a tree with `names`.
        config: `DecoderConfig`, a recipe, or the entries of `config.json`; must compute the same as the layout's model.
            Token ids, `max_position_embeddings` and `generation_config.json` are copied from the directory of
            `fs.hf.config_of`, or from the functionalized module. `dtype` and `quantization_config` describe the save.
        layout: Layout of the parameters. A state has it; otherwise needed for leaves that are `Joined` or belong to
            pipeline stages.
        names: Tensors of each leaf. Default: `fs.hf.names_of` for the config. `net.files` and `net.sources` of a
            functionalized module add its persistent buffers, with the values of the state if the forward writes them.
        dtype: Dtype of floating point leaves in the files; by default unchanged. Buffers keep theirs.
        format: Block format of weights, such as `fs.formats.E4M3_128x128`: float8 values in `X.weight` and one float32
            scale per block in `X.weight_scale_inv`, as in DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437). Any
            rectangular blocks of e4m3 with float32 scales are supported. Embeddings, head, routers, norms and leaves
            in the layout's `Precision.keep` are not quantized.
        max_file_bytes: Maximum size of a file that has more than one tensor, in bytes.
        timeout: Time limit for the slowest rank's write, as in `fs.checkpoint.save`.

    Returns:
        Path, number of tensors, and file sizes.

    Warns:
        UserWarning: on rank 0, quantized tensors with sizes that aren't multiples of their blocks, which transformers
            dequantizes wrongly.

    Raises:
        ArgumentError: a timeout that isn't a timedelta.
        CheckpointError: on every rank, an existing path, a config that differs from the layout's model, leaves without
            names, names that don't tile their tensors, an unsupported format, inf or NaN in quantized weights, or a
            disk error. The path doesn't exist afterward.

    Example:
        >>> recipe = fs.models.presets.recipe("tiny-llama3")
        >>> layout = fs.plan_layout(recipe.model(), fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(recipe.model(), fs.sgd(0.1), fs.random.key(0), layout)
        >>> saved = fs.hf.save("llama", state, recipe, dtype=torch.bfloat16)
        >>> fs.hf.config_of(saved.path) == recipe.config
        True
    """
    check_path("a path, then a TrainState", path, "fs.hf.save(path, state, config)")
    group = own_group(timeout, "export")

    def plan() -> _Job:
        job = _plan(path, params, config, layout, names, dtype, format, max_file_bytes)
        if own_rank() == 0:
            job.coding.warn_of_edges()
        return job

    # Nothing is written until all ranks have the same job: each then computes the offset of every box by itself.
    job = agreed(plan, _Job.facts, group=group)
    if format is not None:
        on_all(lambda: job.coding.measure(job.own_boxes()), group)
        job.coding.exchange(next((leaf.local.device for leaf in job.leaves.values()), torch.device("cpu")))
        if rows := job.coding.not_finite():
            mend = "Save an earlier state, or omit format=."
            raise CheckpointError(message(f"cannot write {job.target} in {format}.", rows, mend))
    write_together(job.target, job.begin, job.write, lambda _: place(job.target), group)
    return Saved(job.target, len(job.tensors), {file.name: file.size for file in job.files})


# ------------------------------------------------------------------------------------------------------------ the plan
@dataclass(frozen=True)
class _Job:
    """A save that all ranks have agreed on, and this rank's part of it."""

    target: Path  # the new directory
    texts: dict[str, bytes]  # contents of the JSON files, by name
    tensors: dict[str, LeafType]  # shape and dtype by name
    files: list[TensorFile]
    leaves: dict[str, StateLeaf]  # this rank's shards, by path
    writers: list[int]  # the ranks that have current values of plain leaves
    pieces: dict[str, list[Piece]]  # of each leaf
    coding: Coding  # of the quantized tensors

    def facts(self) -> object:
        """Return everything that must be equal on all ranks."""
        return str(self.target), self.texts, self.tensors, [(file.name, file.offsets) for file in self.files]

    @contextlib.contextmanager
    def begin(self) -> Generator[None]:
        """Create the files in their full size, with headers. Runs on one rank."""
        with partial_output(self.target) as partial:
            for file in self.files:
                with new_file(partial / file.name) as stream:
                    stream.write(file.header)
                    stream.truncate(file.size)
            for name, text in self.texts.items():  # synced, as the tensors are: `place` syncs only the directory
                with new_file(partial / name) as stream:
                    stream.write(text)
            yield

    def write(self) -> None:
        """Write the boxes of this rank at their offsets."""
        place = {tensor: (file.name, offset) for file in self.files for tensor, offset in file.offsets.items()}
        opened: dict[str, int] = {}
        with contextlib.ExitStack() as stack:
            for tensor, box, x in chain(self.own_boxes(), self._own_scales()):
                name, offset = place[tensor]
                if name not in opened:
                    opened[name] = os.open(partial_of(self.target) / name, os.O_WRONLY | os.O_CLOEXEC)
                    stack.callback(os.close, opened[name])
                values = functools.partial(self.coding.codes, tensor) if tensor in self.coding.shapes else None
                _write_box(opened[name], offset, self.tensors[tensor], box, x, values)
            for handle in opened.values():
                os.fsync(handle)

    def own_boxes(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Yield this rank's writes: a tensor's name, a box of it, and the values."""
        for path, own in own_boxes(self.leaves, self.writers).items():
            for box, x in own.items():
                yield from in_tensors(box, in_memory(x), self.pieces[path])

    def _own_scales(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Yield the scales that this rank writes; tensors are dealt to ranks in turn."""
        for name in [*self.coding.shapes][own_rank() :: world_size()]:
            scales = self.coding.scales(name)
            yield name + SCALES, boxes.full(tuple(scales.shape)), scales


class _Tensors:
    """Collects the tensors of a directory leaf by leaf, and in `rows` the problems."""

    def __init__(self, dtype: torch.dtype | None, coding: Coding) -> None:
        self._dtype, self._coding = dtype, coding
        self.types: dict[str, LeafType] = {}
        self.pieces: dict[str, list[Piece]] = {}  # of each tensor that leaves are in
        self.rows: list[str] = []

    def add_leaf(self, path: str, leaf: StateLeaf, pieces: Sequence[Piece]) -> None:
        """Add the tensors that a leaf is in."""
        dtype = leaf.local.dtype
        dtype = self._dtype if self._dtype is not None and dtype.is_floating_point else dtype
        self._check(path, dtype)
        for piece in pieces:
            own = dtype
            if dtype.is_floating_point and self._coding.takes(path, leaf.shape, piece):
                own = self._coding.format.dtype
                self._coding.add(piece.name, piece.shape)
            if piece.name == RESERVED:
                self.rows.append(f"{path}: {RESERVED} is reserved by the safetensors format")
            if (other := self.types.setdefault(piece.name, LeafType(piece.shape, own)).dtype) != own:
                self.rows.append(f"{path}: {piece.name} would be both {own} and {other}: pass dtype=")
            self.pieces.setdefault(piece.name, []).append(piece)

    def add(self, name: str, info: LeafType, both: str) -> None:
        """Add a tensor that isn't a leaf's; `both` describes the conflict if a leaf has the name too."""
        self.rows += [f"{name}: {both}"] if name in self.types else []
        self._check(name, info.dtype)
        self.types[name] = info

    def _check(self, name: str, dtype: torch.dtype) -> None:
        self.rows += [] if dtype in SAFETENSORS.values() else [f"{name}: safetensors has no {dtype}"]

    def describe(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Add the entries for the dtype and the quantization of the files to those of `config.json`."""
        result = {key: value for key, value in entries.items() if key not in ("torch_dtype", CONFIG_KEY)}
        plain = [name for name in self.pieces if name not in self._coding.shapes]
        dtypes = {str(self.types[name].dtype).removeprefix("torch.") for name in plain}
        result |= {"dtype": dtypes.pop()} if len(dtypes) == 1 else {}
        if self._coding.format is not None:
            modules = [name.removesuffix(".weight") for name in plain if len(self.types[name].shape) > 1]
            result[CONFIG_KEY] = config_of_blocks(self._coding.format, sorted(modules, key=_natural))
        return result


def _plan(
    path: StrPath,
    params: Tree | TrainState,
    config: DecoderConfig | Mapping[str, Any],
    layout: Layout | None,
    names: Names | None,
    dtype: torch.dtype | None,
    format: Blocks | None,
    max_file_bytes: int,
) -> _Job:
    """Check everything, and plan this rank's writes."""
    # Collect rows from all checks, so that one error lists every problem; nothing has been written yet.
    target, rows = new_target(path)
    buffers: Buffers = {}
    if isinstance(params, TrainState):
        check_state(params)
        layout, params, buffers = params.layout, stored_params(params), params.buffers
    entries, generation = _described(target, config, layout)
    wanted = None
    if names is None:
        meant = config_of(entries) if isinstance(config, Mapping) else decoder_config(config)
        names, wanted = names_of(meant), decoder(meant).init(random.key(0))
    coding = _coding(format, layout)
    homes = {} if layout is None else {leaf.path: leaf for leaf in layout.leaves}
    leaves = {path: shards_at_home(path, x, homes.get(path), rows) for path, x in tree.named_leaves(params).items()}
    shapes = {path: x.shape for path, x in leaves.items()}
    rows += unlike_shapes(wanted, shapes)
    pieces, misfits = pieces_by_leaf(names, shapes, layout)
    tensors = _Tensors(dtype, coding)
    for path, own in pieces.items():
        tensors.add_leaf(path, leaves[path], own)
    constants, missing = written_constants(names, buffers)
    for name, buffer in constants.items():
        tensors.add(name, LeafType(tuple(buffer.shape), buffer.dtype), "both a leaf and a buffer of the module")
        leaves[name] = StateLeaf(tuple(buffer.shape), None, buffer)
        pieces[name] = list(pieces_of(name, buffer.shape))
    # After all leaves: a quantized tensor may have pieces in several leaves, and has one tensor of scales.
    for name, shape in coding.shapes.items():
        scales = LeafType(coding.format.grid(shape), torch.float32)
        tensors.add(name + SCALES, scales, "both a leaf and the scales of a different one")
    rows += [*misfits, *tensors.rows, *(f"{row}: pass the full state" for row in missing), *untiled(tensors.pieces)]
    if rows:
        mend = "Pass the tree of models.decoder(config), or the tensors of each leaf: names={ours: theirs}."
        raise CheckpointError(message(f"cannot write {target}.", rows, mend))
    types = {name: tensors.types[name] for name in sorted(tensors.types, key=_natural)}
    files = tensor_files(types, max_file_bytes)
    described = {"config.json": tensors.describe(entries)} | ({} if generation is None else {GENERATION: generation})
    texts = {name: (json.dumps(values, indent=2) + "\n").encode() for name, values in described.items()}
    texts |= {INDEX: index_text(files)} if len(files) > 1 else {}
    # A rank outside the mesh has outdated plain leaves, from before the mesh changed.
    meshes = [x.sharding.mesh for x in leaves.values() if x.sharding is not None] if layout is None else [layout.mesh]
    writers = [rank for rank in range(world_size()) if not meshes or rank in abstract(meshes[0]).members]
    return _Job(target, texts, types, files, leaves, writers, pieces, coding)


def _described(
    target: Path, config: DecoderConfig | Mapping[str, Any], layout: Layout | None
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the entries of `config.json` and `generation_config.json`; refuse a config that isn't the layout's."""
    config = config if isinstance(config, Mapping) else decoder_config(config)
    entries = config_json(config) if isinstance(config, DecoderConfig) else config
    made_of = None if layout is None else layout.config
    if contrary := differences(entries, made_of):
        mend = "Pass the config that the layout's model was made of."
        rule = f"cannot write {target}: the config and the model of the layout compute different things."
        raise CheckpointError(message(rule, contrary, mend))
    return entries, generation_of(config) or generation_of(made_of)


def _coding(format: Blocks | None, layout: Layout | None) -> Coding:
    """Start the quantization of a save, or refuse a format that these files don't support."""
    if format is not None and (why := why_not(format)):
        mend = "Pass rectangular blocks of e4m3 with float32 scales, such as format=fs.formats.E4M3_128x128"
        rule = f"got a format that {why}, which these files do not support."
        raise CheckpointError(message(rule, mend=f"{mend}, or only dtype=."))
    return Coding(format, KEEP if layout is None else layout.precision.keep)


def shards_at_home(path: str, x: Any, home: LeafLayout | None, rows: list[str]) -> StateLeaf:
    """Take this rank's part of a leaf; add a row if it can't be saved."""
    if not isinstance(x, DTensor):
        return StateLeaf(tuple(x.shape), None, x.detach())
    leaf = StateLeaf(tuple(x.shape), home_of(x), local_of(x))
    if hides_owners(x):
        if home is None:
            rows.append(f"{path} is assigned to stages or parts: pass layout=")
            return leaf
        leaf = replace(leaf, shape=home.shape)  # the DTensor has the shape of this slice of the mesh
    rows += objections({path: leaf})
    return leaf


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key with numbers by value: layer 2 comes before layer 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


# ------------------------------------------------------------------------------------------------------------ the bytes
def _write_box(
    handle: int, start: int, tensor: LeafType, box: Box, x: Tensor, values: Callable[[Box, Tensor], Tensor] | None
) -> None:
    """Write a box of a tensor to its ranges of a file, a window at a time."""
    size = tensor.dtype.itemsize
    strides = boxes.contiguous_strides(tensor.shape)
    for piece in pieces(box, size if values is None else torch.float32.itemsize):
        window = x[boxes.relative(piece, box)]
        window = window if values is None else values(piece, window)
        data = memory(window.to("cpu", tensor.dtype).contiguous())
        # The box is a set of stretches of the tensor, each of which begins at the last dim that the box has in part.
        sizes = boxes.shape_of(piece)
        outer = max((dim for dim, n in enumerate(sizes) if n < tensor.shape[dim]), default=0)
        length = math.prod(sizes[outer:]) * size
        for number, index in enumerate(product(*(range(*ends) for ends in piece[:outer]))):
            first = (*index, *(begin for begin, _ in piece[outer:]))
            at = start + sum(i * step for i, step in zip(first, strides, strict=True)) * size
            _put(handle, data[number * length : (number + 1) * length], at)


def _put(handle: int, data: memoryview, at: int) -> None:
    while data:  # the kernel may write less than asked
        done = os.pwrite(handle, data, at)
        data = data[done:]
        at = at + done
