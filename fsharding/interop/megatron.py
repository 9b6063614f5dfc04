"""Megatron in and out: `torch_dist` directories of Megatron Core, and `fsdp_dtensor` ones of Megatron FSDP.

In: a directory, a layout of `models.decoder`, its config. Out: parameters, or a state with AdamW's moments; and back.
Both formats are torch DCP. The facts are those of NVIDIA/Megatron-LM: `megatron/core/dist_checkpointing/core.py` has
`metadata.json`, `strategies/common.py` `common.pt`, `strategies/torch.py` the tensors; `optimizer/optimizer.py` the
prefixes of optimizer states; `transformer/fsdp_dtensor_checkpoint.py` the other format; `megatron_names` the rest.
Law: a rank reads its own boxes; writing and reading gives the same bits; under the final name is everything or nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from fsharding import _compat, tree
from fsharding.checkpoint.collective_call import together
from fsharding.checkpoint.directory import PartialOutput, StrPath, partial_of, real_path
from fsharding.checkpoint.foreign_weights import Weights, weights_at
from fsharding.checkpoint.reader import LeafInfo
from fsharding.checkpoint.save_plan import shares
from fsharding.checkpoint.state_leaves import Shards, main_wants, staged
from fsharding.checkpoint.torch_record import WHOLE, Window, parse_plain
from fsharding.checkpoint.writer import METADATA, Writer, Written, write_metadata
from fsharding.errors import CheckpointError, message
from fsharding.interop.hf.config_tables import decoder_config
from fsharding.interop.hf.naming import Piece, in_tensors
from fsharding.interop.hf.saving import shards_at_home, stored_params
from fsharding.interop.megatron_names import EMBEDDING, HEAD, Dialect, dialect_of, megatron_pieces, refuse_others
from fsharding.mesh.device_mesh import own_rank, world_size
from fsharding.mesh.failures import called_by_all
from fsharding.models.decoder import DecoderConfig
from fsharding.optim.adam import AdamState
from fsharding.optim.base import GradientTransformation
from fsharding.optim.coded_moment import is_coded, moment_leaves
from fsharding.precision import DTYPES
from fsharding.public import check_path, refuse
from fsharding.sharding.layout import Layout
from fsharding.sharding.named_sharding import local_of
from fsharding.train.state import TrainState, state_from
from fsharding.tree import Tree
from fsharding.untrusted import open_plain, read_plain

__all__ = ["Saved", "load", "load_state", "save"]

_LOAD, _LOAD_STATE, _SAVE = "fs.megatron.load", "fs.megatron.load_state", "fs.megatron.save"
_CALLS = {
    _LOAD: "fs.megatron.load(path, layout, config)",
    _LOAD_STATE: "fs.megatron.load_state(path, opt, key, layout, config)",
}
_LATEST, _COMMON, _CONFIG = "latest_checkpointed_iteration.txt", "common.pt", "metadata.json"
_FORMATS = ("torch_dist", "fsdp_dtensor")
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_CORE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg_sq|exp_avg|fp32_param)\.(.+)")
_FSDP = re.compile(r"optimizer\.state\.(?:module\.)*(.+)\.(exp_avg_sq|exp_avg|step)")
_MODEL = re.compile(r"model\.(?:module\.)*(.+)")


@dataclass
class _Opened:
    """A directory: its tensors by kind, and by the name that the parameter has without prefixes.

    `tensors` has the kinds "model", "fp32_param", "exp_avg", "exp_avg_sq" and "step".
    """

    weights: Weights
    format: str
    tensors: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def info(self, kind: str, name: str) -> LeafInfo | None:
        """Shape and dtype of a tensor."""
        stored = self.tensors.get(kind, {}).get(name)
        return None if stored is None else self.weights.leaves[stored]

    def digest(self) -> str:
        """A hash of what has to be the same on all ranks."""
        return hashlib.sha256(repr((sorted(self.weights.leaves.items()), self.facts)).encode()).hexdigest()


@called_by_all(_LOAD)
def load(path: StrPath, layout: Layout, config: Any, *, extra: Literal["refuse", "ignore"] = "refuse") -> Tree:
    """Reads the parameters of a Megatron checkpoint. Collective over all ranks, which have to see one file system.

    Args:
        path: a directory in the format torch_dist or fsdp_dtensor, or one that has such directories and says which is
            the latest. A main copy in float32 is taken where the directory has one.
        layout: of `models.decoder(config)`, with any strategy on any mesh.
        config: of the decoder, or a recipe that has one.
        extra: "ignore" lets parameters be that no leaf asks for.

    Returns:
        A tree as `fs.state_from` takes it.

    Raises:
        CheckpointError: on every rank, and before anything is read: a directory that cannot be read, tensors that are
            missing, extra or of another shape, or arguments of Megatron that the config contradicts.
        ConfigError: a decoder that has no names there.
        LayoutError: the layout is on an abstract mesh.

    Example:
        >>> import tempfile
        >>> recipe = fs.models.presets.recipe("tiny-llama3")
        >>> layout = fs.plan_layout(recipe.model(), fs.make_mesh(device="cpu"))
        >>> state = fs.init_state(recipe.model(), fs.adamw(1e-3), fs.random.key(0), layout)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = fs.megatron.save(f"{folder}/iter_0000000", state, recipe)
        ...     params = fs.megatron.load(saved.path, layout, recipe)
        >>> torch.equal(fs.unshard(params["embed"]["table"]), fs.unshard(state.params["embed"]["table"]))
        True
    """
    return _load(_LOAD, path, layout, config, strict=extra == "refuse", moments=False)[0]


@called_by_all(_LOAD_STATE)
def load_state(
    path: StrPath, opt: GradientTransformation, key: Tensor, layout: Layout, config: Any, *, step: int | None = None
) -> TrainState:
    """Reads parameters and AdamW's moments of a Megatron checkpoint, to go on with the run. Collective.

    Args:
        path: as in `load`.
        opt: `adamw`, or one around it.
        key: random key of the run.
        layout: of `models.decoder(config)`.
        config: of the decoder, or a recipe that has one.
        step: number of updates so far; by default what the directory or its name (`iter_0000100`) says.

    Raises:
        CheckpointError: as `load`; moments that are missing or of another shape, an optimizer without Adam's moments,
            or a directory that does not say its iteration.

    Example:
        >>> import tempfile
        >>> recipe, opt = fs.models.presets.recipe("tiny-llama3"), fs.adamw(1e-3)
        >>> layout = fs.plan_layout(recipe.model(), fs.make_mesh(device="cpu"))
        >>> state = fs.init_state(recipe.model(), opt, fs.random.key(0), layout)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = fs.megatron.save(f"{folder}/iter_0000000", state, recipe, "fsdp_dtensor")
        ...     again = fs.megatron.load_state(saved.path, opt, fs.random.key(0), layout, recipe)
        >>> int(again.step)
        0
    """
    params, opened, pieces = _load(_LOAD_STATE, path, layout, config, strict=True, moments=True)
    if (updates := _iteration(opened) if step is None else step) is None:
        mend = "Give it: step=100."
        raise CheckpointError(message(_LOAD_STATE, f"finds no iteration in {opened.weights.path}.", mend=mend))
    state = state_from(params, opt, key, layout)
    adam = _adam_of(_LOAD_STATE, state.opt_state)

    def fill() -> None:
        for tree_name, kind in _MOMENTS.items():
            trained = tree.flatten_up_to(layout.structure, getattr(adam, tree_name), _LOAD_STATE)
            for leaf, x in zip(layout.leaves, trained, strict=True):
                if x is not None:
                    _fill(opened, kind, pieces[leaf.path], staged(leaf.shape, leaf.home, local_of(x)))

    together(_LOAD_STATE, fill)
    state.step.fill_(updates)
    adam.count.fill_(updates)
    return state


# -------------------------------------------------------------------------------------------------------------- reading
def _load(
    function: str, path: StrPath, layout: Layout, config: Any, *, strict: bool, moments: bool
) -> tuple[Tree, _Opened, dict[str, list[Piece]]]:
    check_path(function, "a path, then a Layout", path, _CALLS[function])
    config = decoder_config(config, function)
    refuse_others(config, function)
    wants = main_wants(layout, function)
    looked: list[tuple[_Opened, dict[str, list[Piece]]]] = []

    def look() -> str:
        opened = _open(function, path)
        kinds = ("exp_avg", "exp_avg_sq") if moments else ()
        looked.append((opened, _compare(function, opened, config, layout, strict=strict, moments=kinds)))
        return opened.digest()

    seen = together(function, look)
    rows = [f"rank {r} sees other tensors than rank 0" for r, theirs in enumerate(seen) if theirs != seen[0]]
    if rows:
        raise CheckpointError(message(function, f"finds {path} different on different ranks.", rows))
    ((opened, pieces),) = looked
    shards: dict[str, Shards] = {}
    for leaf, want in wants.items():
        size = want.shape if want.sharding is None else want.sharding.local_shape(want.shape)
        shards[leaf] = staged(want.shape, want.sharding, _compat.fresh(size, want.dtype, want.device))

    def fill() -> None:
        for leaf, shard in shards.items():
            _fill(opened, _main_kind(opened, pieces[leaf]), pieces[leaf], shard)

    together(function, fill)
    read = [x.local if x.sharding is None else x.sharding.to_dtensor(x.local, x.shape) for x in shards.values()]
    return tree.unflatten(layout.structure, read), opened, pieces


def _main_kind(opened: _Opened, pieces: list[Piece]) -> str:
    """Where the main copy of a leaf is: apart from the model, if all of it is."""
    return "fp32_param" if all(opened.info("fp32_param", piece.name) for piece in pieces) else "model"


def _fill(opened: _Opened, kind: str, pieces: list[Piece], shard: Shards) -> None:
    """Reads what this rank holds of a leaf."""
    for box, x in shard.kept().values():
        for name, there, out in in_tensors(box, x, pieces):
            opened.weights.read(opened.tensors[kind][name], there, out)


def _open(function: str, path: StrPath) -> _Opened:
    """Finds out which of the two formats is at a path, and which tensors."""
    folder = _latest(function, Path(path))
    mend = "Give a directory of torch_dist or fsdp_dtensor, such as iter_0000100."
    weights = weights_at(function, folder, mend=mend)
    if weights.format != "dcp":
        raise CheckpointError(message(function, f"finds no Megatron checkpoint at {folder}.", mend=mend))
    fsdp = any(_MODEL.fullmatch(name) for name in weights.leaves)
    result = _Opened(weights, "fsdp_dtensor" if fsdp else "torch_dist")
    rows: list[str] = []
    for stored in weights.leaves:
        kind, name = _kind(stored, fsdp=fsdp)
        there = result.tensors.setdefault(kind, {})
        if name in there and kind:
            rows.append(f"{stored} and {there[name]} are both the {kind} of {name}")
        there[name] = stored
    if EMBEDDING not in result.tensors.get("model", {}):
        rows.append(f"it has no {EMBEDDING}")
    if rows:
        mend = "Give the checkpoint of one GPT model."
        raise CheckpointError(message(function, f"cannot use {folder} as Megatron's {result.format}.", rows, mend))
    if os.path.lexists(folder / _COMMON):
        result.facts = _facts(function, folder / _COMMON)
    return result


def _latest(function: str, path: Path) -> Path:
    """The directory of an iteration, of one that keeps several."""
    tracker = path / _LATEST
    if os.path.lexists(path / METADATA) or not os.path.lexists(tracker):
        return path
    try:
        said = bytes(read_plain(tracker, 64)).decode().strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(message(function, f"cannot read {tracker}: {error}.")) from error
    if not (said.isascii() and said.isdigit()):
        raise CheckpointError(message(function, f"finds no number of an iteration in {tracker}.", [repr(said)]))
    return path / f"iter_{int(said):07d}"


def _kind(stored: str, *, fsdp: bool) -> tuple[str, str]:
    """What a tensor is, and of which parameter; "" for one that is nobody's."""
    if fsdp:
        if found := _FSDP.fullmatch(stored):
            return found[2], found[1]
        found = _MODEL.fullmatch(stored)
        return ("model", found[1]) if found else ("", stored)
    if found := _CORE.fullmatch(stored):
        return found[1], found[2]
    beside = re.match(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine", stored)
    return ("", stored) if beside else ("model", stored)


def _facts(function: str, file: Path) -> dict[str, Any]:
    """The iteration and the arguments in `common.pt`, of which nothing is run."""
    try:
        with open_plain(file) as stream:
            handle, size = stream.fileno(), os.fstat(stream.fileno()).st_size
            window = Window(lambda start, stop: os.pread(handle, stop - start, start), size, WHOLE)
            return parse_plain(window, ("iteration", "args"))
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(message(function, f"cannot read {file}: {error}.")) from error


def _iteration(opened: _Opened) -> int | None:
    """The number of updates: as the directory says, else as its name does."""
    if type(said := opened.facts.get("iteration")) is int:
        return said
    for stored in opened.tensors.get("step", {}).values():
        if opened.weights.leaves[stored].shape == ():
            opened.weights.read(stored, (), step := torch.zeros((), dtype=torch.float64))
            return int(step)
    found = re.fullmatch(r"iter_(\d+)", opened.weights.path.name)
    return int(found[1]) if found else None


def _compare(
    function: str, opened: _Opened, config: DecoderConfig, layout: Layout, *, strict: bool, moments: tuple[str, ...]
) -> dict[str, list[Piece]]:
    """The pieces of every leaf; refuses a directory that has others, with every tensor that differs."""
    model = opened.tensors["model"]
    embedding = opened.weights.leaves[model[EMBEDDING]]
    rows = _other_arguments(opened.facts.get("args"), config)
    if len(embedding.shape) != 2 or embedding.shape[0] < config.vocab:
        rows.append(f"{EMBEDDING} is {embedding}; the config says at least {config.vocab} rows")
    dialect = dialect_of(model, opened.format, max(embedding.shape[:1], default=0))
    pieces = megatron_pieces(config, {leaf.path: leaf.shape for leaf in layout.leaves}, dialect)
    for leaf in layout.leaves:
        kinds = (_main_kind(opened, pieces[leaf.path]), *(moments if leaf.trainable else ()))
        seen: set[tuple[str, str]] = set()
        for kind in kinds:
            for piece in pieces[leaf.path]:
                if (kind, piece.name) in seen:
                    continue
                seen.add((kind, piece.name))
                stored, which = opened.info(kind, piece.name), "" if kind == "model" else f"{kind} of "
                if stored is None:
                    rows.append(f"{leaf.path}: {which}{piece.name} is missing; wanted is {[*piece.shape]}")
                elif stored.shape != piece.shape or stored.dtype not in DTYPES:
                    rows.append(f"{leaf.path}: {which}{piece.name} is {stored}, wanted is {[*piece.shape]}")
    if strict:
        used = {piece.name for own in pieces.values() for piece in own}
        rows += [f"{name} is extra: {opened.info('model', name)}" for name in sorted(model.keys() - used)]
    if rows:
        mend = "Plan the layout with models.decoder(config) of the sizes that the run there had."
        rule = f"cannot use {opened.weights.path}: {len(rows)} things are not as they should be."
        raise CheckpointError(message(function, rule, rows, mend))
    return pieces


def _other_arguments(args: Any, config: DecoderConfig) -> list[str]:
    """Arguments of Megatron that contradict a config; heads of another size may have tensors of the same shape."""
    if not isinstance(args, dict):
        return []
    said = cast("dict[str, Any]", args)
    groups = said.get("num_query_groups") if said.get("group_query_attention") else None
    given = {
        "num_layers": (said.get("num_layers"), config.layers),
        "hidden_size": (said.get("hidden_size"), config.dim),
        "num_attention_heads": (said.get("num_attention_heads"), config.heads),
        "num_query_groups": (groups, config.kv_heads),
        "kv_channels": (said.get("kv_channels"), config.head_dim),
        "num_experts": (said.get("num_experts"), config.experts.count if config.experts else None),
    }
    return [
        f"{name} is {there} there, {ours} in the config"
        for name, (there, ours) in given.items()
        if there not in (None, ours)
    ]


def _adams_in(node: Any) -> list[AdamState]:
    """Every state of Adam in that of an optimizer."""
    if isinstance(node, AdamState):
        return [node]
    inner: list[Any] = []
    if isinstance(node, dict):
        inner = list(cast("dict[str, Any]", node).values())
    elif isinstance(node, tuple | list):
        inner = list(cast("tuple[Any, ...]", node))
    return [adam for part in inner for adam in _adams_in(part)]


def _adam_of(function: str, opt_state: Any) -> AdamState:
    """The only state of Adam in that of an optimizer."""
    found = _adams_in(opt_state)
    if len(found) != 1:
        rule = f"needs the moments of one AdamW; the optimizer has {len(found)}."
        raise CheckpointError(message(function, rule, mend="Give fs.adamw(...), also under fs.optim.chain."))
    if any(map(is_coded, moment_leaves(found[0].mu))):
        mend = "Train with moments=torch.float32."
        raise CheckpointError(message(function, "knows no moments in low precision.", mend=mend))
    return found[0]


# -------------------------------------------------------------------------------------------------------------- writing
class Saved(NamedTuple):
    """The files and tensors that a save has written.

    Attributes:
        path: the directory.
        format: "torch_dist" or "fsdp_dtensor".
        tensors: how many tensors there are.

    Example:
        >>> fs.megatron.Saved("run/iter_0000100", "torch_dist", 12).format
        'torch_dist'
    """

    path: Path
    format: str
    tensors: int


class _Kind(NamedTuple):
    """Tensors of one kind: how they are named, and what this rank holds of them."""

    stored: Callable[[str], str]
    leaves: dict[str, Shards]
    dtype: torch.dtype | None


@called_by_all(_SAVE)
def save(
    path: StrPath,
    state: TrainState,
    config: Any,
    format: Literal["torch_dist", "fsdp_dtensor"] = "torch_dist",
    *,
    dtype: torch.dtype | None = None,
    vocab_multiple: int = 128,
    fused_norms: bool = True,
) -> Saved:
    """Writes parameters and AdamW's moments for Megatron. Collective; all ranks see one file system.

    Args:
        path: the directory to be, such as `iter_0000100`; nothing may be there yet.
        state: of `models.decoder(config)`. Moments are written where its optimizer is AdamW.
        config: of the decoder, or a recipe that has one.
        format: "torch_dist" stacks the layers, "fsdp_dtensor" numbers them.
        dtype: of the model's tensors; by default that of the main parameters. Main copy and moments keep theirs.
        vocab_multiple: rows of the embedding are padded to a multiple of it, with zeros: 128 times the tensor parallel
            size there.
        fused_norms: norms have the names that they have with Transformer Engine.

    Raises:
        CheckpointError: on every rank: something is at the path, or the state is not of this config, or the disk
            refuses; nothing is left at the path then.
        ConfigError: a decoder that has no names there.

    Example:
        >>> import tempfile
        >>> recipe = fs.models.presets.recipe("tiny-llama3")
        >>> layout = fs.plan_layout(recipe.model(), fs.make_mesh(device="cpu"))
        >>> state = fs.init_state(recipe.model(), fs.sgd(0.1), fs.random.key(0), layout)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = fs.megatron.save(f"{folder}/iter_0000000", state, recipe)
        ...     names = list(fs.checkpoint.open_weights(saved.path).leaves)
        >>> "decoder.layers.self_attention.linear_qkv.weight" in names
        True
    """
    check_path(_SAVE, "a path, then a TrainState", path, "fs.megatron.save(path, state, config)")
    if not isinstance(state, TrainState):
        mend = "Give the whole state: fs.megatron.save(path, state, config)."
        raise refuse(_SAVE, "a path, then a TrainState", state, mend)
    config = decoder_config(config, _SAVE)
    refuse_others(config, _SAVE)
    planned: list[tuple[Path, list[_Kind], dict[str, list[Piece]]]] = []

    def plan() -> str:
        planned.append(_plan(path, state, config, format, dtype, vocab_multiple, fused_norms=fused_norms))
        target, kinds, pieces = planned[0]
        facts = str(target), format, len(kinds), dtype, [(leaf, own) for leaf, own in pieces.items()]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    seen = together(_SAVE, plan)
    rows = [f"rank {r} has another path, config, or leaves than rank 0" for r, it in enumerate(seen) if it != seen[0]]
    if rows:
        raise CheckpointError(message(_SAVE, "got different things on different ranks.", rows))
    ((target, kinds, pieces),) = planned
    step, partial = int(state.step), partial_of(target)
    outputs: list[PartialOutput] = []  # one on rank 0, none on the others

    def begin() -> None:
        if own_rank() == 0:
            outputs.append(PartialOutput(target, _SAVE))

    def commit() -> None:
        for output in outputs:
            write_metadata(partial, written)
            if format == "torch_dist":
                _write_common(partial, step)
            output.place()

    try:
        together(_SAVE, begin)
        written = together(_SAVE, lambda: _write(partial, kinds, pieces, config.vocab, format, step))
        together(_SAVE, commit)
    except BaseException:  # also Ctrl-C
        for output in outputs:
            output.discard()
        raise
    finally:
        for output in outputs:
            output.close()
    return Saved(target, format, len({entry.path for part in written for entry in part.entries}))


def _plan(
    path: StrPath,
    state: TrainState,
    config: DecoderConfig,
    format: str,
    dtype: torch.dtype | None,
    vocab_multiple: int,
    *,
    fused_norms: bool,
) -> tuple[Path, list[_Kind], dict[str, list[Piece]]]:
    """Checks everything; the kinds of tensors, and the pieces of every leaf."""
    real_path(path, _SAVE)
    target = Path(os.path.abspath(path))
    rows = [f"format is {format!r}: formats are {', '.join(_FORMATS)}"] if format not in _FORMATS else []
    rows += [f"vocab_multiple is {vocab_multiple}: at least 1"] if vocab_multiple < 1 else []
    rows += [f"{target}: something is there, and nothing is ever overwritten"] if os.path.lexists(target) else []
    if rows:
        raise CheckpointError(message(_SAVE, "cannot write.", rows))
    homes = {leaf.path: leaf for leaf in state.layout.leaves}

    def held(values: Tree) -> dict[str, Shards]:
        flat = tree.flatten_up_to(state.layout.structure, values, _SAVE)
        named = zip(homes, flat, strict=True)
        return {path: shards_at_home(path, x, homes[path], rows) for path, x in named if x is not None}

    core = format == "torch_dist"
    params = held(stored_params(state))
    kinds = [_Kind(str if core else "model.module.{}".format, params, dtype)]
    if _has_adam(state.opt_state):
        adam = _adam_of(_SAVE, state.opt_state)
        if core:
            kinds.append(_Kind("optimizer.state.fp32_param.{}".format, params, None))
        for tree_name, kind in _MOMENTS.items():
            pattern = f"optimizer.state.{kind}.{{}}" if core else f"optimizer.state.module.module.module.{{}}.{kind}"
            kinds.append(_Kind(pattern.format, held(getattr(adam, tree_name)), None))
    padded = -(-config.vocab // vocab_multiple) * vocab_multiple
    dialect = Dialect(format, core, fused_norms, padded)
    pieces = megatron_pieces(config, {path: leaf.shape for path, leaf in homes.items()}, dialect)
    rows += _untiled(pieces, padded - config.vocab)
    if rows:
        mend = "Give the state of models.decoder(config)."
        raise CheckpointError(message(_SAVE, f"cannot write {target}.", rows, mend))
    return target, kinds, pieces


def _has_adam(opt_state: Any) -> bool:
    """Whether an optimizer has Adam's moments anywhere."""
    return bool(_adams_in(opt_state))


def _untiled(pieces: Mapping[str, list[Piece]], pad: int) -> list[str]:
    """Tensors that their pieces do not fill, one row each."""
    filled: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for own in pieces.values():
        for piece in own:
            count = 1
            for start, stop in piece.there(piece.box):
                count *= stop - start
            filled[piece.name] = filled.get(piece.name, 0) + count
            shapes[piece.name] = piece.shape
    rows: list[str] = []
    for name, shape in shapes.items():
        wanted = torch.Size(shape).numel() - (pad * shape[-1] if name in (EMBEDDING, HEAD) else 0)
        if filled[name] != wanted:
            rows.append(f"{name} has {wanted} elements, and gets {filled[name]}")
    return rows


def _write(
    folder: Path, kinds: list[_Kind], pieces: Mapping[str, list[Piece]], vocab: int, format: str, step: int
) -> Written:
    """Writes the boxes of this rank, and on rank 0 what no rank holds."""
    shapes = {piece.name: piece.shape for own in pieces.values() for piece in own}
    with Writer(folder, own_rank()) as writer:
        for stored, leaves, dtype in kinds:
            writers = shares(leaves, range(world_size()))
            for path, leaf in leaves.items():
                for corner, (box, x) in leaf.kept().items():
                    if writers[path][corner] == own_rank():
                        for name, there, part in in_tensors(box, x, pieces[path]):
                            writer.add(stored(name), shapes[name], there, part.to(dtype or part.dtype))
                            writer.settle()
                if own_rank() == 0 and path in ("embed.table", "head.unembed"):
                    _pad(writer, stored, pieces[path][0], vocab, dtype or leaf.local.dtype)
        if own_rank() == 0 and format == "fsdp_dtensor":
            for stored in sorted({kinds[1].stored(name) for name in shapes}) if len(kinds) > 1 else ():
                count = torch.tensor(float(step))
                writer.add(f"{stored.rpartition('.')[0]}.step", (), (), count)
            writer.add_value("iteration", step)
            writer.add_value("checkpoint_version", 3.0)
        return writer.close()


def _pad(writer: Writer, stored: Callable[[str], str], piece: Piece, vocab: int, dtype: torch.dtype) -> None:
    """The rows of zeros behind a vocabulary."""
    rows, width = piece.shape
    if rows > vocab:
        box = ((vocab, rows), (0, width))
        writer.add(stored(piece.name), piece.shape, box, torch.zeros(rows - vocab, width, dtype=dtype))
        writer.settle()


def _write_common(folder: Path, step: int) -> None:
    """The files that Megatron Core asks for beside the tensors."""
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    said |= {"common_backend": "torch", "common_backend_version": 1}
    with (folder / _CONFIG).open("x", encoding="utf-8") as stream:
        json.dump(said, stream)
        stream.flush()
        os.fsync(stream.fileno())
    with (folder / _COMMON).open("xb") as stream:
        torch.save({"iteration": step, "checkpoint_version": 3.0}, stream)
        stream.flush()
        os.fsync(stream.fileno())
