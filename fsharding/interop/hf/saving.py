"""`save`: weights in any layout as a directory that transformers loads; each rank writes its own boxes to their places.

Guarantee: loading what was saved gives the same bits; under the final name is everything or nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping
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
from fsharding.checkpoint.collective_call import UNLIKE, UNLIKE_ROW, agreed, on_all, write_together
from fsharding.checkpoint.directory import PartialOutput, StrPath, partial_of, real_path
from fsharding.checkpoint.save_plan import shares
from fsharding.checkpoint.state_leaves import StateLeaf
from fsharding.comm.leaf_memory import in_memory
from fsharding.foreign.coded_weights import CONFIG_KEY, SCALES, config_of_blocks, why_not
from fsharding.foreign.foreign_weights import SAFETENSORS
from fsharding.foreign.name_map import written_constants
from fsharding.foreign.safetensors_layout import INDEX, TensorFile, index_text, tensor_files
from fsharding.formats import Blocks
from fsharding.interop.hf.coding import Coding, rule_of
from fsharding.interop.hf.comparison import differences, generation_of
from fsharding.interop.hf.config_tables import GENERATION, config_json, config_of, decoder_config
from fsharding.interop.hf.naming import Names, Piece, declared, in_tensors, names_of, pieces_of, untiled
from fsharding.mesh.device_mesh import own_rank, world_size
from fsharding.mesh.meeting import called_by_all
from fsharding.models.decoder import DecoderConfig, decoder
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
        job = _plan(path, params, config, layout, names, dtype, format, max_file_bytes)
        if own_rank() == 0 and job.coding is not None:
            job.coding.warn_of_edges()
        return job, job.digest()

    job = agreed(plan, UNLIKE, UNLIKE_ROW, group)
    if job.coding is not None:
        on_all(job.measure, group)
        job.coding.exchange(job.device)
        if rows := job.coding.not_finite():
            mend = "Save a state of before it happened, or without format=."
            raise CheckpointError(message(f"cannot write {job.target} in {format}.", rows, mend))
    write_together(job.target, job.begin, job.write, lambda output, _: job.commit(output), group)
    return Saved(job.target, len(job.tensors), {file.name: file.size for file in job.files})


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

    @property
    def device(self) -> torch.device:
        """Where this rank's leaves are."""
        return next((leaf.local.device for leaf in self.leaves.values()), torch.device("cpu"))

    @property
    def partial(self) -> Path:
        """The directory that is written to, beside the target."""
        return partial_of(self.target)

    def digest(self) -> str:
        """A hash of what has to be the same on all ranks."""
        facts = str(self.target), self.entries, self.tensors, [(file.name, file.offsets) for file in self.files]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    @contextlib.contextmanager
    def begin(self) -> Generator[PartialOutput]:
        """Fill a directory with files of their full size, which have their headers. On one rank."""
        with PartialOutput(self.target) as output:
            for file in self.files:
                with (self.partial / file.name).open("xb") as stream:
                    stream.write(file.header)
                    stream.truncate(file.size)
            if len(self.files) > 1:
                (self.partial / INDEX).write_bytes(index_text(self.files))
            for name, entries in self.entries.items():
                (self.partial / name).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
            yield output

    def measure(self) -> None:
        """Finds the largest magnitudes of the blocks of this rank's boxes."""
        if self.coding is not None:
            self.coding.measure(self._own_boxes())

    def write(self) -> None:
        """Writes the boxes of this rank, each to its place."""
        place = {tensor: (file.name, offset) for file in self.files for tensor, offset in file.offsets.items()}
        opened: dict[str, int] = {}
        with contextlib.ExitStack() as stack:
            for tensor, box, x in chain(self._own_boxes(), self._own_scales()):
                name, offset = place[tensor]
                if name not in opened:
                    opened[name] = os.open(self.partial / name, os.O_WRONLY | os.O_CLOEXEC)
                    stack.callback(os.close, opened[name])
                coding = self.coding if self.coding is not None and tensor in self.coding.tensors else None
                values = None if coding is None else functools.partial(coding.codes, tensor)
                _write_box(opened[name], offset, self.tensors[tensor], box, x, values)
            for handle in opened.values():
                os.fsync(handle)

    def _own_boxes(self) -> Iterator[tuple[str, Box, Tensor]]:
        """This rank's writes: the name of a tensor, a box of it, and the values."""
        writers = shares(self.leaves, range(world_size()))
        for path, leaf in self.leaves.items():
            for corner, (box, x) in leaf.kept().items():
                if writers[path][corner] == own_rank():
                    yield from in_tensors(box, in_memory(x), self.pieces[path])

    def _own_scales(self) -> Iterator[tuple[str, Box, Tensor]]:
        """The scales that this rank writes: one tensor in every so many."""
        if self.coding is not None:
            for name in [*self.coding.tensors][own_rank() :: world_size()]:
                scales = self.coding.scales(name)
                yield name + SCALES, boxes.full(tuple(scales.shape)), scales

    def commit(self, output: PartialOutput) -> None:
        """Puts the directory in its place. On one rank."""
        for name in os.listdir(self.partial):
            handle = os.open(self.partial / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        output.place()


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
    """Checks everything, and says what this rank writes."""
    real_path(path)
    if format is not None and (why := why_not(format)):
        mend = (
            "Give e4m3 in rectangles with float32 scales, such as format=fs.formats.E4M3_128x128, or none and dtype=."
        )
        raise CheckpointError(message(f"got a format that {why}, which files do not have.", mend=mend))
    target = Path(os.path.abspath(path))
    rows = [f"{target}: something is there, and nothing is ever overwritten"] if os.path.lexists(target) else []
    buffers: Buffers = {}
    if isinstance(params, TrainState):
        layout, params, buffers = params.layout, stored_params(params), params.buffers
    config = config if isinstance(config, Mapping) else decoder_config(config)
    entries = dict(config_json(config) if isinstance(config, DecoderConfig) else config)
    made_of = None if layout is None else layout.config
    if contrary := differences(entries, made_of):
        mend = "Pass the config that the layout's model was made of."
        rule = f"cannot write {target}: the config and the model of the layout compute different things."
        raise CheckpointError(message(rule, contrary, mend))
    generation = generation_of(config) or generation_of(made_of)
    sizes: dict[str, tuple[int, ...]] = {}
    if names is None:
        meant = config if isinstance(config, DecoderConfig) else config_of(entries)
        names = names_of(meant)
        sizes = _sizes(meant)
    homes = {} if layout is None else {leaf.path: leaf for leaf in layout.leaves}
    leaves = {leaf: shards_at_home(leaf, x, homes.get(leaf), rows) for leaf, x in tree.named_leaves(params).items()}
    other = [(leaf, sizes[leaf]) for leaf, x in leaves.items() if sizes.get(leaf, x.shape) != x.shape]
    rows += [f"{leaf} is {list(leaves[leaf].shape)}; the config says {list(shape)}" for leaf, shape in other]
    rows += [f"{leaf} is no leaf of ours; its name is {name!r}" for leaf, name in names.items() if leaf not in leaves]
    result = dict[str, list[Piece]]()
    by_name = dict[str, list[Piece]]()
    tensors: dict[str, LeafType] = {}
    coded: dict[str, tuple[int, ...]] = {}
    rule = None if format is None else rule_of(format, layout)
    for leaf, held in leaves.items():
        kind = dtype if dtype is not None and held.local.dtype.is_floating_point else held.local.dtype
        if kind not in SAFETENSORS.values():
            rows.append(f"{leaf}: safetensors has no {kind}")
        try:
            if leaf not in names:
                raise ValueError("has no name there")
            fused = declared(homes[leaf]) if leaf in homes else None
            result[leaf] = list(pieces_of(names[leaf], held.shape, fused))
        except ValueError as error:
            rows.append(f"{leaf}: {error}")
            continue
        for piece in result[leaf]:
            own = kind
            if rule is not None and kind.is_floating_point and rule.takes(leaf, held.shape, piece):
                own, coded[piece.name] = rule.format.dtype, piece.shape
            by_name.setdefault(piece.name, []).append(piece)
            if piece.name == RESERVED:
                rows.append(f"{leaf}: {RESERVED} is reserved by the safetensors format")
            if (other := tensors.setdefault(piece.name, LeafType(piece.shape, own)).dtype) != own:
                rows.append(f"{leaf}: {piece.name} would be both {own} and {other}: give dtype=")
    kinds = {str(info.dtype).removeprefix("torch.") for name, info in tensors.items() if name not in coded}
    constants, missing = written_constants(names, buffers)
    rows += [f"{row}: give the whole state" for row in missing]
    for name, buffer in constants.items():
        rows += [f"{name}: a leaf and a buffer of the module"] if name in tensors else []
        rows += [f"{name}: safetensors has no {buffer.dtype}"] if buffer.dtype not in SAFETENSORS.values() else []
        leaves[name] = StateLeaf(tuple(buffer.shape), None, buffer)
        result[name] = list(pieces_of(name, buffer.shape))
        tensors[name] = LeafType(tuple(buffer.shape), buffer.dtype)
    coding = None if rule is None else Coding(rule.format, coded)
    for name, info in ({} if coding is None else coding.infos()).items():
        rows += [f"{name}: a leaf, and the scales of another"] if name in tensors else []
        tensors[name] = info
    rows += untiled(by_name)
    if rows:
        mend = "Give the tree of models.decoder(config), or say where its leaves go: names={ours: theirs}."
        raise CheckpointError(message(f"cannot write {target}.", rows, mend))
    tensors = {name: tensors[name] for name in sorted(tensors, key=_natural)}
    entries.pop("torch_dtype", None)
    entries |= {"dtype": kinds.pop()} if len(kinds) == 1 else {}
    entries.pop(CONFIG_KEY, None)
    if coding is not None:
        plain = [name for name, every in by_name.items() if name not in coded and len(every[0].shape) > 1]
        modules = sorted((name.removesuffix(".weight") for name in plain), key=_natural)
        entries[CONFIG_KEY] = config_of_blocks(coding.format, modules)
    files = tensor_files(tensors, max_file_bytes)
    written = {"config.json": entries, **({GENERATION: generation} if generation is not None else {})}
    return _Job(target, written, tensors, files, leaves, result, coding)


def _sizes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the leaves of a decoder."""
    draws = decoder(config).init(torch.zeros(2, dtype=torch.int64))
    return {path: tuple(draw.shape) for path, draw in tree.named_leaves(draws).items()}


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
    sharding: NamedSharding = sharding_of(x)
    shape = tuple(x.shape)
    local = local_of(x)
    if hides_owners(x):
        if home is None:
            rows.append(f"{path} is assigned, by stages or parts: give its layout")
            return StateLeaf(shape, None, local)
        sharding = home.home if _is_in(x, home.home, home.shape) else home.params
        shape = home.shape
    if sharding.partial:
        rows.append(f"{path} is {sharding}: reduce it")
    elif sharding.local_shape(shape) != tuple(local.shape):
        held = list(local.shape)
        want = list(sharding.local_shape(shape))
        rows.append(f"{path} of {list(shape)} is {sharding}, that is {want} here, but holds {held}")
    return StateLeaf(shape, sharding, local)


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
        outer = _outer_dims(boxes.shape_of(piece), tensor.shape)
        first = start + sum(a * step for (a, _), step in zip(piece, strides, strict=True)) * size
        rows = product(*(range(stop - begin) for begin, stop in piece[:outer]))
        steps = [step * size for step in strides[:outer]]
        length = len(data) // max(1, _volume(boxes.shape_of(piece)[:outer]))
        for number, index in enumerate(rows):
            at = first + sum(i * step for i, step in zip(index, steps, strict=True))
            _put(handle, data[number * length : (number + 1) * length], at)


def _outer_dims(sizes: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """How many first dims have to be walked index by index until the rest is one stretch of the tensor."""
    inner = len(shape)
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    return max(inner - 1, 0)


def _volume(sizes: tuple[int, ...]) -> int:
    return boxes.volume(boxes.full(sizes))


def _put(handle: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(handle, data, at)
        data = data[done:]
        at = at + done
