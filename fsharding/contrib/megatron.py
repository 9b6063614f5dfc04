"""Load and save checkpoints of Megatron: `torch_dist` of Megatron Core, and `fsdp_dtensor` of Megatron FSDP.

Guarantee: a rank reads only its boxes; a round trip is bitwise equal; a save is complete or leaves nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fsharding.base import tree
from fsharding.base.calls import public_name
from fsharding.base.dtypes import FLOATS
from fsharding.base.errors import CheckpointError, ConfigError, message
from fsharding.base.public import check_path, public, refuse
from fsharding.base.tree import Tree
from fsharding.checkpoint.background import SAVE_TIMEOUT, own_group
from fsharding.checkpoint.collective_call import agreed, on_all, step_of, write_together
from fsharding.checkpoint.directory import StrPath, new_file, new_target, partial_of, partial_output, place
from fsharding.checkpoint.state_leaves import StateLeaf, main_wants, own_boxes, stored_params
from fsharding.checkpoint.writer import Writer, Written, write_metadata
from fsharding.comm.leaf_memory import in_memory
from fsharding.contrib.megatron_args import arguments_of, contradictions, unsayable
from fsharding.contrib.megatron_directory import COMMON, MAIN, Opened, iteration_of, open_directory
from fsharding.contrib.megatron_names import (
    EMBEDDING,
    Dialect,
    dialect_of,
    extra_states,
    megatron_pieces,
    refuse_others,
    written_norms,
)
from fsharding.foreign.name_map import Piece, in_tensors
from fsharding.interop.hf.comparison import unlike_decoders
from fsharding.interop.hf.config_tables import decoder_config
from fsharding.interop.hf.saving import shards_at_home
from fsharding.mesh.device_mesh import own_rank, world_size
from fsharding.mesh.meeting import called_by_all
from fsharding.models.decoder import DecoderConfig, decoder
from fsharding.models.model import unlike_shapes
from fsharding.optim.adam import AdamState
from fsharding.optim.base import GradientTransformation
from fsharding.optim.coded_moment import is_coded, moment_leaves
from fsharding.sharding.layout import Layout
from fsharding.sharding.named_sharding import local_of
from fsharding.train.state import TrainState, state_from_params
from fsharding.train.state_check import check_state

__all__ = ["Saved", "load", "load_state", "save"]

_CONFIG = "metadata.json"
_FORMATS = ("torch_dist", "fsdp_dtensor")
_IMPLS = ("transformer_engine", "local")
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}


@public
@called_by_all
def load(path: StrPath, layout: Layout, config: Any, *, extra: Literal["refuse", "ignore"] = "refuse") -> Tree:
    """Read the parameters of a Megatron checkpoint. Collective over all ranks, which must see one file system.

    Reads main parameters from the optimizer's state (`optimizer.state.param.*` or `.fp32_param.*`), otherwise the
    model's weights. Arguments of the run that change the model's output are compared with the config: positions, norms,
    activation, windows, biases, tying, experts. Without arguments, which only Megatron's training script writes, tensor
    names and shapes are compared.

    Args:
        path: Directory in the format torch_dist or fsdp_dtensor, or a run's directory with its latest iteration.
        layout: Layout of `models.decoder(config)`, with any strategy on any mesh.
        config: `DecoderConfig`, or a recipe with one.
        extra: "ignore" skips tensors without a leaf, and reads the model's weights, in their dtype, if main parameters
            are missing or flat.

    Returns:
        A tree of parameters for `fs.state_from_params`.

    Raises:
        CheckpointError: On every rank, before any tensor is read: an unreadable directory, tensors that are missing,
            extra or of a different shape, arguments that differ from the config, trained bfloat16 parameters without
            main parameters, or an optimizer state of flat tensors (dp_reshardable).
        ConfigError: A decoder that Megatron has no names for.
        LayoutError: A layout on an abstract mesh.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, intermediate_size=48)
        >>> model = fs.models.decoder(config)
        >>> state, _ = fs.setup(model, None, fs.adamw(1e-3), fs.random.key(0), mesh=fs.make_mesh(dp=-1, device="cpu"))
        >>> saved = fs.megatron.save("iter_0000000", state, config)
        >>> params = fs.megatron.load(saved.path, state.layout, config)
        >>> torch.equal(fs.unshard(params["embed"]["table"]), fs.unshard(state.params["embed"]["table"]))
        True
    """
    return _load(path, layout, config, strict=extra == "refuse", moments=False)[0]


@public
@called_by_all
def load_state(
    path: StrPath, opt: GradientTransformation, key: Tensor, layout: Layout, config: Any, *, step: int | None = None
) -> TrainState:
    """Read parameters and AdamW's moments of a Megatron checkpoint, to continue the run. Collective.

    Args:
        path: Directory, as in `load`.
        opt: `adamw`, or a wrapper of it.
        key: Random key of the run.
        layout: Layout of `models.decoder(config)`.
        config: `DecoderConfig`, or a recipe with one.
        step: Number of updates so far. Default: the iteration in the directory, or in its name (`iter_0000100`).

    Returns:
        A `TrainState` after that many updates.

    Raises:
        CheckpointError: As in `load`; also missing or misshapen moments, dropout in the arguments, an optimizer without
            Adam's moments, or no iteration.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, intermediate_size=48)
        >>> model, opt = fs.models.decoder(config), fs.adamw(1e-3)
        >>> state, _ = fs.setup(model, None, opt, fs.random.key(0), mesh=fs.make_mesh(dp=-1, device="cpu"))
        >>> saved = fs.megatron.save("iter_0000000", state, config, "fsdp_dtensor")
        >>> again = fs.megatron.load_state(saved.path, opt, fs.random.key(0), state.layout, config)
        >>> int(again.step)
        0
    """
    params, opened, pieces = _load(path, layout, config, strict=True, moments=True)
    if (updates := iteration_of(opened) if step is None else step) is None:
        mend = "Give it: step=100."
        raise CheckpointError(message(f"finds no iteration in {opened.weights.path}.", mend=mend))
    state = state_from_params(params, opt, key, layout)
    adam = _adam_of(state.opt_state)

    def fill() -> None:
        for tree_name, kind in _MOMENTS.items():
            trained = tree.flatten_up_to(layout.structure, getattr(adam, tree_name))
            for leaf, x in zip(layout.leaves, trained, strict=True):
                if x is not None:
                    _fill(opened, kind, pieces[leaf.path], StateLeaf(leaf.shape, leaf.home, local_of(x)))

    on_all(fill)
    state.step.fill_(updates)
    adam.count.fill_(updates)
    return state


# -------------------------------------------------------------------------------------------------------------- reading
def _load(
    path: StrPath, layout: Layout, config: Any, *, strict: bool, moments: bool
) -> tuple[Tree, Opened, dict[str, list[Piece]]]:
    call = f"{public_name()}(path, {'opt, key, ' if moments else ''}layout, config)"
    check_path("a path, then a Layout", path, call)
    config = decoder_config(config)
    refuse_others(config)
    wants = main_wants(layout)

    def look() -> tuple[Opened, dict[str, list[Piece]]]:
        opened = open_directory(path)
        if opened.flat and not strict:
            opened.tensors.pop(MAIN, None)
        kinds = ("exp_avg", "exp_avg_sq") if moments else ()
        return opened, _compare(opened, config, layout, strict=strict, moments=kinds)

    rule = f"finds {path} different on different ranks."
    opened, pieces = agreed(look, lambda found: found[0].seen(), rule, "sees other tensors")
    leaves = {name: want.empty() for name, want in wants.items()}

    def fill() -> None:
        for name, leaf in leaves.items():
            _fill(opened, _main_kind(opened, pieces[name]), pieces[name], leaf)

    on_all(fill)
    return tree.unflatten(layout.structure, [leaf.at_rest() for leaf in leaves.values()]), opened, pieces


def _main_kind(opened: Opened, pieces: list[Piece]) -> str:
    """Which tensors hold the main parameter of a leaf: the optimizer's if there are any."""
    return MAIN if any(opened.info(MAIN, piece.name) for piece in pieces) else "model"


def _fill(opened: Opened, kind: str, pieces: list[Piece], leaf: StateLeaf) -> None:
    """Reads what this rank holds of a leaf."""
    for box, x in leaf.kept().items():
        for name, there, out in in_tensors(box, in_memory(x), pieces):
            opened.weights.read(opened.tensors[kind][name], there, out)


def _compare(
    opened: Opened, config: DecoderConfig, layout: Layout, *, strict: bool, moments: tuple[str, ...]
) -> dict[str, list[Piece]]:
    """The pieces of every leaf; refuses a directory that differs, with every argument and tensor that does."""
    if opened.flat and (strict or moments):
        raise CheckpointError(_flat_state(opened))
    model = opened.tensors["model"]
    embedding = opened.weights.leaves[model[EMBEDDING]]
    args = opened.facts.get("args")
    rows = contradictions(args, config, training=bool(moments)) if isinstance(args, dict) else []
    if len(embedding.shape) != 2 or embedding.shape[0] < config.vocab_size:
        rows.append(f"{EMBEDDING} is {embedding}; the config says at least {config.vocab_size} rows")
    dialect = dialect_of(model, opened.format, max(embedding.shape[:1], default=0))
    pieces = megatron_pieces(config, {leaf.path: leaf.shape for leaf in layout.leaves}, dialect)
    for leaf in layout.leaves:
        names = [*dict.fromkeys(piece.name for piece in pieces[leaf.path])]
        shapes = {piece.name: piece.shape for piece in pieces[leaf.path]}
        rows += _without_main(opened, leaf.path, names) if strict else []
        for kind in (_main_kind(opened, pieces[leaf.path]), *(moments if leaf.trainable else ())):
            for name in names:
                stored = opened.info(kind, name)
                which = "" if kind == "model" else f"{kind} of "
                if stored is None:
                    rows.append(f"{leaf.path}: {which}{name} is missing; wanted is {[*shapes[name]]}")
                elif stored.shape != shapes[name] or stored.dtype not in FLOATS:
                    rows.append(f"{leaf.path}: {which}{name} is {stored}, wanted is {[*shapes[name]]}")
    if strict:
        used = {piece.name for own in pieces.values() for piece in own}
        rows += [f"{name} is extra: {opened.info('model', name)}" for name in sorted(model.keys() - used)]
    if rows:
        mend = "Plan the layout with models.decoder(config), where config has the arguments and sizes of the run."
        rule = f"cannot use {opened.weights.path}: {len(rows)} things are not as they should be."
        raise CheckpointError(message(rule, rows, mend))
    return pieces


def _without_main(opened: Opened, leaf: str, names: list[str]) -> list[str]:
    """Trained parameters whose weights are rounded and whose main parameter is missing, one row each."""
    rows: list[str] = []
    for name in names if opened.format == "torch_dist" else ():
        weights = opened.info("model", name)
        rounded = weights is not None and weights.dtype != torch.float32
        if rounded and opened.is_trained(name) and opened.info(MAIN, name) is None:
            rows.append(f"{leaf}: the main parameter of {name} is missing; its weights are {weights}")
    return rows


def _flat_state(opened: Opened) -> str:
    """The message for a directory whose optimizer state is not stored by parameter."""
    content = opened.facts.get("content_metadata")
    kind = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    rule = f"cannot read the optimizer state of {opened.weights.path}: its tensors are flat, not one per parameter."
    rows = [f"the format of the distributed optimizer is {kind}"] if kind else []
    rows.append(f"such a tensor is {opened.flat}")
    mend = (
        "Load it in Megatron with the parallel sizes of its run and save it with --dist-ckpt-optim-fully-reshardable. "
        'fs.megatron.load(..., extra="ignore") reads the weights of the model alone, in their own precision.'
    )
    return message(rule, rows, mend)


def _adams_in(opt_state: Any) -> list[AdamState]:
    """Every state of Adam in an optimizer's state."""
    nodes = tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, AdamState))
    return [node for node in nodes if isinstance(node, AdamState)]


def _adam_of(opt_state: Any) -> AdamState:
    """The only state of Adam in an optimizer's state."""
    found = _adams_in(opt_state)
    if len(found) != 1:
        rule = f"needs the moments of one AdamW; the optimizer has {len(found)}."
        raise CheckpointError(message(rule, mend="Give fs.adamw(...), also under fs.optim.chain."))
    if any(map(is_coded, moment_leaves(found[0].mu))):
        mend = "Train with moments=torch.float32."
        raise CheckpointError(message("knows no moments in low precision.", mend=mend))
    return found[0]


# -------------------------------------------------------------------------------------------------------------- writing
class Saved(NamedTuple):
    """Result of `save`.

    Attributes:
        path: Directory.
        format: "torch_dist" or "fsdp_dtensor".
        tensors: Number of tensors.

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
    leaves: dict[str, StateLeaf]
    dtype: torch.dtype | None


@public
@called_by_all
def save(
    path: StrPath,
    state: TrainState,
    config: Any,
    format: Literal["torch_dist", "fsdp_dtensor"] = "torch_dist",
    *,
    dtype: torch.dtype | None = None,
    vocab_multiple: int = 128,
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine",
    settings: Mapping[str, Any] | None = None,
    samples: int | None = None,
    timeout: timedelta = SAVE_TIMEOUT,
) -> Saved:
    """Write parameters, AdamW's moments and arguments for Megatron. Collective; all ranks must see one file system.

    `megatron.core.dist_checkpointing.load` reads torch_dist into `sharded_state_dict`s of any parallel sizes.

    Args:
        path: Directory to create, such as `iter_0000100`.
        state: State of `models.decoder(config)`. Moments are written if the optimizer is AdamW.
        config: `DecoderConfig`, or a recipe with one.
        format: "torch_dist" stacks layers, "fsdp_dtensor" numbers them.
        dtype: Dtype of the model's tensors; default: the main parameters', which, like moments, are not cast.
        vocab_multiple: Multiple to which the embedding is padded with zero rows; Megatron needs 128 times tp.
        transformer_impl: Megatron's argument of that name in the loading run; it determines the names of norms.
        settings: AdamW's `lr`, `betas`, `eps` and `weight_decay` for Megatron's optimizer (`fully_reshardable`); since
            Megatron Core 0.17 also `max_lr` and `min_lr`. Without them load only the model (`--no-load-optim`).
        samples: Rows read so far, at which Megatron's data loader and learning rate schedule continue (with
            `--override-opt-param-scheduler`). Without it, load with `--finetune` or `--no-load-optim`.
        timeout: Time to wait for ranks on a slow file system, as in `fs.checkpoint.save`.

    Returns:
        The `Saved` directory and its tensors.

    Raises:
        ArgumentError: A timeout that isn't a timedelta.
        CheckpointError: The path exists, the state doesn't fit the config, settings are incomplete, or writing fails.
        ConfigError: A decoder that Megatron has no names or arguments for.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, intermediate_size=48)
        >>> model = fs.models.decoder(config)
        >>> state, _ = fs.setup(model, None, fs.sgd(0.1), fs.random.key(0), mesh=fs.make_mesh(dp=-1, device="cpu"))
        >>> saved = fs.megatron.save("iter_0000000", state, config)
        >>> "decoder.layers.self_attention.linear_qkv.weight" in fs.foreign.open_weights(saved.path).leaves
        True
    """
    check_path("a path, then a TrainState", path, "fs.megatron.save(path, state, config)")
    if not isinstance(state, TrainState):
        mend = "Pass the full state: fs.megatron.save(path, state, config)."
        raise refuse("a path, then a TrainState", state, mend)
    config = decoder_config(config)
    refuse_others(config)
    if rows := unsayable(config):
        mend = "Megatron would compute something else. Write the weights for another program: fs.hf.save."
        raise ConfigError(message("cannot describe this decoder by arguments of Megatron.", rows, mend))
    choice = _Choice(format, dtype, vocab_multiple, transformer_impl, settings, samples)

    def facts(plan: tuple[Path, list[_Kind], dict[str, list[Piece]]]) -> object:
        target, kinds, pieces = plan
        return str(target), choice, len(kinds), config, [*pieces.items()]

    group = own_group(timeout, "export")
    target, kinds, pieces = agreed(lambda: _plan(path, state, config, choice), facts, group=group)
    step = step_of(state, group)
    partial = partial_of(target)
    common = _common_state(config, step, choice, has_moments=len(kinds) > 1)

    def write() -> Written:
        return _write(partial, kinds, pieces, config, common, format)

    def commit(written: list[Written]) -> None:
        write_metadata(partial, written)
        if format == "torch_dist":
            _write_common(partial, common)
        place(target)

    written = write_together(target, lambda: partial_output(target), write, commit, group)
    return Saved(target, format, len({chunk.path for part in written for chunk in part.chunks}))


class _Choice(NamedTuple):
    """The options of a save."""

    format: str
    dtype: torch.dtype | None
    vocab_multiple: int
    transformer_impl: str
    settings: Mapping[str, Any] | None
    samples: int | None

    def wrong(self, state: TrainState) -> list[str]:
        """Options that cannot be used, one row each."""
        rows = [] if self.format in _FORMATS else [f"format is {self.format!r}: formats are {', '.join(_FORMATS)}"]
        rows += [f"vocab_multiple is {self.vocab_multiple}: at least 1"] if self.vocab_multiple < 1 else []
        if self.transformer_impl not in _IMPLS:
            rows.append(f"transformer_impl is {self.transformer_impl!r}: choices are {', '.join(_IMPLS)}")
        if self.samples is not None and self.samples < 0:
            rows.append(f"samples is {self.samples}: at least 0")
        if self.settings is not None:
            missing = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in self.settings]
            rows += [f"settings have no {name}" for name in missing]
            if not _adams_in(state.opt_state):
                rows.append("settings are of AdamW, and the optimizer of the state is a different one")
        return rows

    def padded(self, vocab: int) -> int:
        """Rows of the embedding."""
        return -(-vocab // self.vocab_multiple) * self.vocab_multiple


def _plan(
    path: StrPath, state: TrainState, config: DecoderConfig, choice: _Choice
) -> tuple[Path, list[_Kind], dict[str, list[Piece]]]:
    """Check everything; return the kinds of tensors, and the pieces of every leaf."""
    target, rows = new_target(path)
    rows += choice.wrong(state)
    if rows:
        raise CheckpointError(message("cannot write.", rows))
    homes = {leaf.path: leaf for leaf in state.layout.leaves}

    def held(values: Tree) -> dict[str, StateLeaf]:
        flat = tree.flatten_up_to(state.layout.structure, values)
        named = zip(homes, flat, strict=True)
        return {path: shards_at_home(path, x, homes[path], rows) for path, x in named if x is not None}

    core = choice.format == "torch_dist"
    check_state(state)
    params = held(stored_params(state))
    kinds = [_Kind(str if core else "model.module.{}".format, params, choice.dtype)]
    if _adams_in(state.opt_state):
        adam = _adam_of(state.opt_state)
        if core:
            kinds.append(_Kind("optimizer.state.param.{}".format, params, None))
        for tree_name, kind in _MOMENTS.items():
            pattern = f"optimizer.state.{kind}.{{}}" if core else f"optimizer.state.module.module.module.{{}}.{kind}"
            kinds.append(_Kind(pattern.format, held(getattr(adam, tree_name)), None))
    padded = choice.padded(config.vocab_size)
    dialect = Dialect(choice.format, core, written_norms(config, choice.format, choice.transformer_impl), padded)
    shapes = {path: leaf.shape for path, leaf in homes.items()}
    wanted = decoder(config).init(state.key)
    leaves = {*tree.paths(wanted)}
    rows += [f"{x}: only in the {'model' if x in leaves else 'state'}" for x in sorted(leaves ^ shapes.keys())]
    rows += unlike_shapes(wanted, shapes) or unlike_decoders(config, state.layout.config, "the config")
    if rows:
        mend = "Pass the config that the state's model was made of."
        raise CheckpointError(message(f"cannot write {target}.", rows, mend))
    # The pieces of a decoder's leaves tile every tensor, except the padding of the vocabulary, which `_pad` writes.
    return target, kinds, megatron_pieces(config, shapes, dialect)


def _write(
    folder: Path,
    kinds: list[_Kind],
    pieces: Mapping[str, list[Piece]],
    config: DecoderConfig,
    common: Mapping[str, Any],
    format: str,
) -> Written:
    """Writes the boxes of this rank, and on rank 0 what no rank holds."""
    shapes = {piece.name: piece.shape for own in pieces.values() for piece in own}
    with Writer(folder, own_rank()) as writer:
        for stored, leaves, dtype in kinds:
            for path, own in own_boxes(leaves, range(world_size())).items():
                for box, x in own.items():
                    for name, there, part in in_tensors(box, in_memory(x), pieces[path]):
                        writer.add(stored(name), shapes[name], there, part.to(dtype or part.dtype))
                        writer.settle()
                if own_rank() == 0 and path in ("embed.table", "head.unembed"):
                    _pad(writer, stored, pieces[path][0], config.vocab_size, dtype or leaves[path].local.dtype)
        if own_rank() == 0 and format == "fsdp_dtensor":
            for stored in sorted({kinds[1].stored(name) for name in shapes}) if len(kinds) > 1 else ():
                count = torch.tensor(float(common["iteration"]))
                writer.add(f"{stored.rpartition('.')[0]}.step", (), (), count)
            for name in ("iteration", "checkpoint_version", "args"):
                writer.add_value(name, common[name])
        elif own_rank() == 0:
            for name in extra_states(config):
                writer.add_value(name, [None])
        return writer.close()


def _pad(writer: Writer, stored: Callable[[str], str], piece: Piece, vocab: int, dtype: torch.dtype) -> None:
    """The rows of zeros behind a vocabulary."""
    rows, width = piece.shape
    if rows > vocab:
        box = ((vocab, rows), (0, width))
        writer.add(stored(piece.name), piece.shape, box, torch.zeros(rows - vocab, width, dtype=dtype))
        writer.settle()


def _common_state(config: DecoderConfig, step: int, choice: _Choice, *, has_moments: bool) -> dict[str, Any]:
    """Return what Megatron stores besides the tensors."""
    run = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "transformer_impl": choice.transformer_impl,
        "padded_vocab_size": choice.padded(config.vocab_size),
        "consumed_train_samples": choice.samples or 0,
        "no_save_rng": True,
        "no_save_optim": not has_moments or choice.settings is None,
    }
    result: dict[str, Any] = {"iteration": step, "checkpoint_version": 3.0}
    result["args"] = argparse.Namespace(**arguments_of(config), **run)
    sharding = "fully_reshardable"
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    result["content_metadata"] = {"distrib_optim_sharding_type": sharding, **content}
    if choice.settings is None:
        return result
    group = {**choice.settings, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    group |= {"default_config": True, "step": step}
    groups = [{**group, "wd_mult": decay} for decay in (1.0, 0.0)]  # matrices, then norms and biases
    result["optimizer"] = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": sharding}
    if choice.samples is not None:
        rate = choice.settings["lr"]
        decay = choice.settings["weight_decay"]
        schedule = {"max_lr": rate, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 1}
        schedule |= {"lr_decay_style": "constant", "start_wd": decay, "end_wd": decay}
        schedule |= {"wd_incr_style": "constant", "wd_incr_steps": 1, "num_steps": choice.samples}
        result["opt_param_scheduler"] = schedule
    return result


def _write_common(folder: Path, common: Mapping[str, Any]) -> None:
    """Write the files that Megatron Core reads besides the tensors."""
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    said |= {"common_backend": "torch", "common_backend_version": 1}
    with new_file(folder / _CONFIG) as stream:
        stream.write(json.dumps(said).encode())
    with new_file(folder / COMMON) as stream:
        torch.save(dict(common), stream)
