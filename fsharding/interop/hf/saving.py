"""`save`: weights in any layout as a directory that transformers loads; each rank writes its own boxes to their places.

Guarantee: loading what was saved gives the same bits; under the final name is everything or nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from fsharding.checkpoint.byte_ranges import pieces
from fsharding.checkpoint.collective_call import agreed, on_all, write_together
from fsharding.checkpoint.directory import StrPath, new_target, partial_of, partial_output, place, sync
from fsharding.checkpoint.state_leaves import StateLeaf, objections, own_boxes
from fsharding.comm.leaf_memory import in_memory
from fsharding.foreign.coded_weights import CONFIG_KEY, SCALES, config_of_blocks, why_not
from fsharding.foreign.name_map import written_constants
from fsharding.foreign.safetensors_files import INDEX, SAFETENSORS, TensorFile, index_text, tensor_files
from fsharding.formats import Blocks
from fsharding.interop.hf.coding import Coding, Rule
from fsharding.interop.hf.comparison import differences, generation_of
from fsharding.interop.hf.config_tables import GENERATION, config_json, config_of, decoder_config
from fsharding.interop.hf.naming import Names, Piece, in_tensors, names_of, pieces_by_leaf, pieces_of, untiled
from fsharding.mesh.device_mesh import own_rank, world_size
from fsharding.mesh.meeting import called_by_all
from fsharding.models.decoder import DecoderConfig, decoder
from fsharding.models.model import Model, unlike_shapes
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box
from fsharding.sharding.layout import Layout
from fsharding.sharding.leaf_names import RESERVED
from fsharding.sharding.leaf_plan import LeafLayout
from fsharding.sharding.named_sharding import LeafType, NamedSharding, hides_owners, local_of, sharding_of
from fsharding.train.buffers import Buffers
from fsharding.train.state import TrainState, main_of
from fsharding.train.state_check import check_state

__all__ = ["Saved", "save", "shards_at_home", "stored_params"]


@dataclass(frozen=True)
class Saved:
    """The files and tensors that a save has written.

    Attributes:
        path: the directory.
        tensors: how many tensors there are.
        files: bytes of each safetensors file by name.

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
    """Writes a directory for `AutoModelForCausalLM.from_pretrained`. Collective; all ranks see one file system.

    Args:
        path: the directory to be; nothing may be there yet.
        params: the tree of `models.decoder`, or of `names`; of a state, the main parameters.
        config: of the decoder, or a recipe that has one, or the entries of the `config.json` to be. It has to compute
            what the layout's model computes. Of `fs.hf.config_of(path)`, token ids, `max_position_embeddings` and
            `generation_config.json` are written again; those of a functionalized module come from its own. Only `dtype`
            and `quantization_config` always describe the files that are written.
        layout: of the parameters. It is needed where a leaf is assigned, by stages or parts, or `Joined`.
        names: where each leaf goes; by default `fs.hf.names_of` for the decoder of the config. Those of a
            functionalized module (`net.files`, `net.sources`) bring its persistent buffers along, with the values of
            the state where its forward writes them.
        dtype: of the floating point leaves there; by default their own. Buffers keep theirs.
        format: of the weights of blocks there, such as `fs.formats.E4M3_128x128`: codes of float8 in the place of
            `X.weight`, and `X.weight_scale_inv` with a float32 for each block, as DeepSeek-V3 is published; the
            `config.json` says so. Any rectangle of e4m3 with float32 scales can be. Embeddings, head, routers, norms
            and what the layout's `Precision.keep` names stay as `dtype` says. Codes are made of main parameters.
        max_file_bytes: files of more than one tensor are at most this large.
        timeout: how long ranks wait for one that writes to a slow file system, as in `fs.checkpoint.save`.

    Warns:
        UserWarning: on rank 0, of tensors that are written as codes and whose sizes are not multiples of their blocks:
            transformers dequantizes them wrongly.

    Raises:
        ArgumentError: a timeout that is no timedelta.
        CheckpointError: on every rank: something is at the path, a config that is not the layout's, leaves without a
            name, names that do not tile their tensors, a format that files cannot have, inf or NaN in what is to be
            codes, or that the disk refuses; nothing is left at the path then.

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

    def plan() -> tuple[_Job, str]:
        job = _plan(_source(path, params, config, layout, names), dtype, format, max_file_bytes)
        if own_rank() == 0 and job.coding is not None:
            job.coding.warn_of_edges()
        return job, job.digest()

    # Nothing is written before all ranks have the same job: then each knows the place of every box without a message.
    job = agreed(plan, group=group)
    if (coding := job.coding) is not None:
        on_all(lambda: coding.measure(job.own_boxes()), group)
        coding.exchange(next((leaf.local.device for leaf in job.leaves.values()), torch.device("cpu")))
        if rows := coding.not_finite():
            mend = "Save a state of before it happened, or without format=."
            raise CheckpointError(message(f"cannot write {job.target} in {format}.", rows, mend))
    write_together(job.target, job.begin, job.write, lambda _: job.commit(), group)
    return Saved(job.target, len(job.tensors), {file.name: file.size for file in job.files})


# ---------------------------------------------------------------------------------------------------------- the source
@dataclass(frozen=True)
class _Source:
    """What is saved, and what is known of it."""

    target: Path  # the directory to be
    there: list[str]  # a row if something is at its path
    params: Tree
    layout: Layout | None
    buffers: Buffers
    names: Names
    model: Model | None  # the decoder of the config, if it has the default names
    entries: Mapping[str, Any]  # of `config.json`
    generation: Mapping[str, Any] | None  # of `generation_config.json`, if there is one


def _source(
    path: StrPath,
    params: Tree | TrainState,
    config: DecoderConfig | Mapping[str, Any],
    layout: Layout | None,
    names: Names | None,
) -> _Source:
    """Take the parameters out of a state, and check that the config is the model's."""
    target, there = new_target(path)
    buffers: Buffers = {}
    if isinstance(params, TrainState):
        layout, params, buffers = params.layout, stored_params(params), params.buffers
    config = config if isinstance(config, Mapping) else decoder_config(config)
    entries = config_json(config) if isinstance(config, DecoderConfig) else config
    made_of = None if layout is None else layout.config
    if contrary := differences(entries, made_of):
        mend = "Pass the config that the layout's model was made of."
        rule = f"cannot write {target}: the config and the model of the layout compute different things."
        raise CheckpointError(message(rule, contrary, mend))
    model = None
    if names is None:
        meant = config if isinstance(config, DecoderConfig) else config_of(entries)
        names, model = names_of(meant), decoder(meant)
    generation = generation_of(config) or generation_of(made_of)
    return _Source(target, there, params, layout, buffers, names, model, entries, generation)


# ------------------------------------------------------------------------------------------------------------ the plan
@dataclass(frozen=True)
class _Job:
    """A save that all ranks have agreed on, and this rank's part of it."""

    target: Path  # the directory to be
    # of `config.json`, and of `generation_config.json` if there is one, by file name
    entries: dict[str, Mapping[str, Any]]
    tensors: dict[str, LeafType]  # shape and dtype by name
    files: list[TensorFile]  # that hold them
    leaves: dict[str, StateLeaf]  # what this rank holds, by path
    pieces: dict[str, list[Piece]]  # of each leaf
    coding: Coding | None  # of the tensors that are written as codes, or None

    def digest(self) -> str:
        """A hash of what has to be the same on all ranks."""
        facts = str(self.target), self.entries, self.tensors, [(file.name, file.offsets) for file in self.files]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    @contextlib.contextmanager
    def begin(self) -> Generator[None]:
        """Fill a directory with files of their full size, which have their headers. On one rank."""
        with partial_output(self.target) as partial:
            for file in self.files:
                with (partial / file.name).open("xb") as stream:
                    stream.write(file.header)
                    stream.truncate(file.size)
            if len(self.files) > 1:
                (partial / INDEX).write_bytes(index_text(self.files))
            for name, entries in self.entries.items():
                (partial / name).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
            yield

    def write(self) -> None:
        """Writes the boxes of this rank, each to its place."""
        place = {tensor: (file.name, offset) for file in self.files for tensor, offset in file.offsets.items()}
        opened: dict[str, int] = {}
        with contextlib.ExitStack() as stack:
            for tensor, box, x in chain(self.own_boxes(), self._own_scales()):
                name, offset = place[tensor]
                if name not in opened:
                    opened[name] = os.open(partial_of(self.target) / name, os.O_WRONLY | os.O_CLOEXEC)
                    stack.callback(os.close, opened[name])
                coding = self.coding if self.coding is not None and tensor in self.coding.tensors else None
                values = None if coding is None else functools.partial(coding.codes, tensor)
                _write_box(opened[name], offset, self.tensors[tensor], box, x, values)
            for handle in opened.values():
                os.fsync(handle)

    def own_boxes(self) -> Iterator[tuple[str, Box, Tensor]]:
        """This rank's writes: the name of a tensor, a box of it, and the values."""
        for path, own in own_boxes(self.leaves, range(world_size())).items():
            for box, x in own.items():
                yield from in_tensors(box, in_memory(x), self.pieces[path])

    def _own_scales(self) -> Iterator[tuple[str, Box, Tensor]]:
        """The scales that this rank writes: one tensor in every so many."""
        if self.coding is not None:
            for name in [*self.coding.tensors][own_rank() :: world_size()]:
                scales = self.coding.scales(name)
                yield name + SCALES, boxes.full(tuple(scales.shape)), scales

    def commit(self) -> None:
        """Puts the directory in its place. On one rank."""
        partial = partial_of(self.target)
        for name in os.listdir(partial):
            sync(partial / name)
        place(self.target)


class _Tensors:
    """The tensors of a directory, put together leaf by leaf; `rows` says what is wrong with them."""

    def __init__(self, dtype: torch.dtype | None, rule: Rule | None) -> None:
        self._dtype, self._rule = dtype, rule
        self.types: dict[str, LeafType] = {}
        self.pieces: dict[str, list[Piece]] = {}  # of each tensor that leaves are in
        self.coded: dict[str, tuple[int, ...]] = {}  # shapes of those that are written as codes
        self.rows: list[str] = []

    def add_leaf(self, path: str, leaf: StateLeaf, pieces: Sequence[Piece]) -> None:
        """Add the tensors that a leaf is in."""
        dtype = leaf.local.dtype
        dtype = self._dtype if self._dtype is not None and dtype.is_floating_point else dtype
        self._check(path, dtype)
        for piece in pieces:
            own = dtype
            if self._rule is not None and dtype.is_floating_point and self._rule.takes(path, leaf.shape, piece):
                own, self.coded[piece.name] = self._rule.format.dtype, piece.shape
            if piece.name == RESERVED:
                self.rows.append(f"{path}: {RESERVED} is reserved by the safetensors format")
            if (other := self.types.setdefault(piece.name, LeafType(piece.shape, own)).dtype) != own:
                self.rows.append(f"{path}: {piece.name} would be both {own} and {other}: give dtype=")
            self.pieces.setdefault(piece.name, []).append(piece)

    def add(self, name: str, info: LeafType, both: str) -> None:
        """Add a tensor that is no leaf; `both` says what the name would be if it is one, too."""
        self.rows += [f"{name}: {both}"] if name in self.types else []
        self._check(name, info.dtype)
        self.types[name] = info

    def _check(self, name: str, dtype: torch.dtype) -> None:
        self.rows += [] if dtype in SAFETENSORS.values() else [f"{name}: safetensors has no {dtype}"]

    def describe(self, entries: Mapping[str, Any], coding: Coding | None) -> dict[str, Any]:
        """The entries of a `config.json`, with those that say in which dtypes and formats the files are."""
        result = {key: value for key, value in entries.items() if key not in ("torch_dtype", CONFIG_KEY)}
        plain = [name for name in self.pieces if name not in self.coded]
        dtypes = {str(self.types[name].dtype).removeprefix("torch.") for name in plain}
        result |= {"dtype": dtypes.pop()} if len(dtypes) == 1 else {}
        if coding is not None:
            modules = [name.removesuffix(".weight") for name in plain if len(self.types[name].shape) > 1]
            result[CONFIG_KEY] = config_of_blocks(coding.format, sorted(modules, key=_natural))
        return result


def _plan(source: _Source, dtype: torch.dtype | None, format: Blocks | None, max_file_bytes: int) -> _Job:
    """Check everything, and find what this rank writes."""
    if format is not None and (why := why_not(format)):
        mend = "Give e4m3 in rectangles with float32 scales, such as format=fs.formats.E4M3_128x128"
        rule = f"got a format that {why}, which files do not have."
        raise CheckpointError(message(rule, mend=f"{mend}, or none and dtype=."))
    target, layout = source.target, source.layout
    rows = [*source.there]
    homes = {} if layout is None else {leaf.path: leaf for leaf in layout.leaves}
    named = tree.named_leaves(source.params)
    leaves = {path: shards_at_home(path, x, homes.get(path), rows) for path, x in named.items()}
    shapes = {path: x.shape for path, x in leaves.items()}
    rows += [] if source.model is None else unlike_shapes(source.model, shapes)
    pieces, misfits = pieces_by_leaf(source.names, shapes, layout)
    rule = None if format is None else Rule(format, layout)
    tensors = _Tensors(dtype, rule)
    for path, own in pieces.items():
        tensors.add_leaf(path, leaves[path], own)
    constants, missing = written_constants(source.names, source.buffers)
    for name, buffer in constants.items():
        tensors.add(name, LeafType(tuple(buffer.shape), buffer.dtype), "a leaf and a buffer of the module")
        leaves[name] = StateLeaf(tuple(buffer.shape), None, buffer)
        pieces[name] = list(pieces_of(name, buffer.shape))
    # After all leaves: a tensor of codes may have pieces in several of them, and has one tensor of scales.
    coding = None if rule is None else Coding(rule.format, tensors.coded)
    for name, info in ({} if coding is None else coding.infos()).items():
        tensors.add(name, info, "a leaf, and the scales of another")
    rows += [*misfits, *tensors.rows, *(f"{row}: give the whole state" for row in missing), *untiled(tensors.pieces)]
    if rows:
        mend = "Give the tree of models.decoder(config), or say where its leaves go: names={ours: theirs}."
        raise CheckpointError(message(f"cannot write {target}.", rows, mend))
    types = {name: tensors.types[name] for name in sorted(tensors.types, key=_natural)}
    written: dict[str, Mapping[str, Any]] = {"config.json": tensors.describe(source.entries, coding)}
    written |= {} if source.generation is None else {GENERATION: source.generation}
    return _Job(target, written, types, tensor_files(types, max_file_bytes), leaves, pieces, coding)


def stored_params(state: TrainState) -> Tree:
    """The main parameters of a state, and frozen ones."""
    check_state(state)
    flat = tree.flatten_up_to(state.layout.structure, main_of(state))
    params = tree.leaves(state.params)
    return tree.unflatten(state.layout.structure, [p if m is None else m for p, m in zip(params, flat, strict=True)])


def shards_at_home(path: str, x: Any, home: LeafLayout | None, rows: list[str]) -> StateLeaf:
    """This rank's part of a leaf; a leaf that cannot be saved is added to the rows."""
    if not isinstance(x, DTensor):
        return StateLeaf(tuple(x.shape), None, x.detach())
    leaf = StateLeaf(tuple(x.shape), sharding_of(x), local_of(x))
    if hides_owners(x):
        if home is None:
            rows.append(f"{path} is assigned, by stages or parts: give its layout")
            return leaf
        sharding = home.home if _is_in(x, home.home, home.shape) else home.params
        leaf = StateLeaf(home.shape, sharding, leaf.local)
    rows += objections({path: leaf})
    return leaf


def _is_in(x: DTensor, sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Whether an assigned DTensor is in a sharding: on the slice of the mesh that owns it, it is cut as any other."""
    result = sharding_of(x)
    alike = all(result.axes(dim) == sharding.axes(dim) for dim in range(x.ndim))
    return alike and sharding.shape_at_rest(shape) == tuple(x.shape)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Orders names as people do: layer 2 before layer 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


# ------------------------------------------------------------------------------------------------------------ the bytes
def _write_box(
    handle: int, start: int, tensor: LeafType, box: Box, x: Tensor, values: Callable[[Box, Tensor], Tensor] | None
) -> None:
    """Writes a box of a tensor to its places in a file, a window at a time."""
    size = tensor.dtype.itemsize
    strides = boxes.contiguous_strides(tensor.shape)
    for piece in pieces(box, size if values is None else torch.float32.itemsize):
        window = x[boxes.relative(piece, box)]
        window = window if values is None else values(piece, window)
        flat = window.to("cpu", tensor.dtype).contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data
        sizes = boxes.shape_of(piece)
        outer = _outer_dims(sizes, tensor.shape)
        length = math.prod(sizes[outer:]) * size
        for number, index in enumerate(product(*(range(*ends) for ends in piece[:outer]))):
            first = (*index, *(begin for begin, _ in piece[outer:]))
            at = start + sum(i * step for i, step in zip(first, strides, strict=True)) * size
            _put(handle, data[number * length : (number + 1) * length], at)


def _outer_dims(sizes: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """How many first dims have to be walked index by index until the rest is one stretch of the tensor."""
    inner = len(shape)
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    return max(inner - 1, 0)


def _put(handle: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(handle, data, at)
        data = data[done:]
        at = at + done
