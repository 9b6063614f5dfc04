"""Check the options of `fsharding train` before anything changes, and turn them into objects."""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import fsharding as fs
from fsharding.apps.cli.documents import is_table, open_documents, open_encoder, require
from fsharding.apps.cli.metrics import metrics_rows
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.resume import changes, choose, notes
from fsharding.apps.cli.usage import check_values, parse_trackers
from fsharding.base.calls import call_as
from fsharding.base.errors import BatchError, CheckpointError, ConfigError, message, report
from fsharding.mesh.abstract_mesh import AXES, make_shape, parse_axes
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.mesh.preemption import read_deadline
from fsharding.sharding.memory_kinds import parse_memory
from fsharding.sharding.strategy import STRATEGIES

__all__ = [
    "PRECISIONS", "Swap", "check", "model_of", "offloaded", "open_data_of", "parse_swaps", "schedule_of", "stages",
]  # fmt: skip

PRECISIONS = {
    "float32": fs.FP32, "bfloat16": fs.BF16, "float16": fs.FP16, "fp8": fs.FP8, "fp8-block": fs.FP8_BLOCK,
    "mxfp8": fs.MXFP8, "nvfp4": fs.NVFP4,
}  # fmt: skip
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # `--swap-at` takes these as well


def check(config: TrainConfig, world: int) -> None:
    """Refuse options that would fail later on `world` ranks; only a full disk, a lost rank or a NaN may."""
    check_values("fsharding train", config)
    _check_together(config)
    offloaded("fsharding train", config.strategy, config.offload, config.policy)
    for text in (config.mesh, *(swap.mesh for swap in parse_swaps(config.swap_at) if swap.mesh)):
        _check_mesh(config, text, world)
    data, validation = open_data_of(config)
    for opened in (data, validation):
        if isinstance(opened, fs.data.Packed):
            opened.batch(0)  # documents are read on demand: find errors now
    if config.resume:
        _check_resume(config, data)
        next(metrics_rows(config.metrics), None)  # an unreadable file is found before a rank starts
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=config.out).close()  # a nameless file: nothing can remain
    except OSError as error:
        text = f"cannot write to --out {config.out}: {error.strerror}."
        raise ConfigError(message(text, mend="Choose a writable directory.")) from error


def _check_together(config: TrainConfig) -> None:
    """Refuse combinations of options, and packages that are missing for `--log`."""
    wrong: list[str] = []
    if config.trace is not None and config.trace > config.steps:
        wrong.append(f"--trace {config.trace}: at most the {config.steps} of --steps")
    if 0 < config.decay_steps < (warmup := fs.models.presets.recipe(config.preset).warmup):
        wrong.append(f"--decay-steps {config.decay_steps}: 0, or at least the {warmup} of the warm-up")
    if config.resume_older and config.resume not in ("auto", "newest"):
        wrong.append("--resume-older without --resume auto or newest: write --resume auto --resume-older")
    if config.val_every and not config.val_data:
        wrong.append("--val-every without --val-data: pass both, or omit --val-every")
    if config.deadline:
        when = call_as("fsharding train --deadline", read_deadline, config.deadline)
        if when.timestamp() <= time.time():
            wrong.append(f"--deadline {when:%Y-%m-%d %H:%M:%S}: in the past; pass a later one, or omit it")
    if wrong:
        raise ConfigError(message("got options that no run can have.", wrong))
    packages = [name for name in parse_trackers(config.log) if name != "json"]
    call_as("fsharding train --log", require, packages, "log")


def model_of(config: TrainConfig) -> fs.models.Model:
    """Return the model of a run."""
    return fs.models.presets.recipe(config.preset).model(sequence=config.sequence, attention=config.attention)


def schedule_of(config: TrainConfig, mesh: Mesh) -> fs.pipeline.Schedule | None:
    """Plan the schedule of a pipeline; None on a mesh without `pp`."""
    ranks = abstract(mesh).axis_size("pp")
    if ranks == 1:
        return None
    options: dict[str, Any] = {"stages_per_rank": config.stages_per_rank, "gather": config.gather}
    return fs.pipeline.plan_schedule(config.schedule, ranks, config.microbatches, **options)


def stages(config: TrainConfig, mesh: Mesh) -> dict[str, Any] | None:
    """Return the pipeline stages, as `plan_layout` takes them; None on a mesh without `pp`."""
    schedule = schedule_of(config, mesh)
    if schedule is None:
        return None
    counts = [int(layers) for layers in config.stage_layers.split(",") if layers] or None
    return fs.pipeline.stages_of(model_of(config), schedule, counts=counts)


def _check_mesh(config: TrainConfig, text: str, world: int) -> None:
    """Refuse a mesh that does not fit the ranks, or over which model, sequence or batch cannot be sharded."""
    axes = {"dp": -1, **parse_axes(text)}
    shape = call_as(f"fsharding train --mesh {text or 'dp=-1'}", make_shape, axes, world=world)
    model = model_of(config)
    if model.check is not None:
        model.check(shape, fs.DEFAULT_RULES)
    stages(config, shape)
    cp = shape.axis_size("cp")
    tp = shape.axis_size("tp") if config.sequence else 1
    parts = (2 * cp if cp > 1 else 1) * tp
    if config.seq % parts:
        what = " and ".join(f"{axis}={size}" for axis, size in (("cp", cp), ("tp", tp)) if size > 1)
        raise BatchError(message(f"cannot shard --seq {config.seq} over {what}.", mend=f"Use a multiple of {parts}."))
    ranks = math.prod(map(shape.axis_size, ("replica", "dp", "ep")))
    step = ranks * config.microbatches
    if config.batch % step:
        text = f"cannot divide --batch {config.batch} by {ranks} data ranks times {config.microbatches} microbatches."
        near = max(1, round(config.batch / step)) * step
        raise BatchError(message(text, mend=f"Use a multiple of {step}, such as --batch {near}."))


def open_data_of(config: TrainConfig) -> tuple[fs.data.Data, fs.data.Data | None]:
    """Open the data of a run, and its validation data if any."""
    data = _open(config, "--data", config.data)
    return data, _open(config, "--val-data", config.val_data) if config.val_data else None


def _open(config: TrainConfig, option: str, source: str) -> fs.data.Data:
    """Open rows at random places of bytes or tokens; with a tokenizer, packed documents."""
    sizes: dict[str, Any] = {"batch_size": config.batch, "seq_len": config.seq, "seed": config.seed}
    if config.tokenizer is None:
        if source != "default" and is_table(Path(source)):
            text = f"cannot read the data set {option} {source} byte by byte."
            raise ConfigError(message(text, mend="Pass its tokenizer: --tokenizer tokenizer.json."))
        data = fs.data.open_data(source, documents=config.documents, **sizes)
    elif source.endswith(".bin"):
        text = f"got --tokenizer {config.tokenizer}, but {option} {source} already has tokens."
        raise ConfigError(message(text, mend="Omit --tokenizer."))
    else:
        encoder = open_encoder(config.tokenizer, config.eos)
        documents = open_documents(source, config.text_column or "text")
        sizes |= {"eos": encoder.eos, "vocab_size": encoder.vocab_size}
        data = fs.data.packed(documents, tokenizer=encoder, boundaries=config.documents, **sizes)
    vocab = fs.models.presets.recipe(config.preset).config.vocab_size
    if data.vocab_size is not None and data.vocab_size > vocab:
        text = f"cannot embed {data.vocab_size} tokens of {source} in the {vocab} of --preset {config.preset}."
        raise ConfigError(message(text, mend="Choose a preset with a larger vocabulary, or different data."))
    return data


# Options that determine the rows of a step.
_OF_DATA = ("data", "tokenizer", "text_column", "eos", "documents", "batch", "seq", "seed")


def _check_resume(config: TrainConfig, data: fs.data.Data) -> None:
    newest = choose(config.resume, config.checkpoints).path
    if newest is None:
        return
    extra = notes(fs.checkpoint.metadata(newest))
    now = {"preset": config.preset, "data": data.fingerprint()}
    rows = [f"{k}: {extra.get(k)} in the checkpoint, {v} now" for k, v in now.items() if extra.get(k) != v]
    others = _OF_DATA if extra.get("data") != now["data"] else ()
    rows += changes(config, {"optimizer": "adamw", **extra["config"]}, ("optimizer", *others))
    if rows:
        mend = "Pass the options and data of that run; or start a new run in a different --out."
        rule = f"fsharding train --resume cannot continue from {newest}: it belongs to a different run."
        raise CheckpointError(report(rule, rows, mend))


# ------------------------------------------------------------------------------------------------- swaps, --offload
class Swap(NamedTuple):
    """A swap of strategy, precision or mesh after `step` updates; "" keeps the present one."""

    step: int
    strategy: str
    mesh: str  # axes, as `--mesh` has them
    dtype: str = ""  # name of a precision


def parse_swaps(text: str) -> tuple[Swap, ...]:
    """Read the swaps of `--swap-at`, in the order of their steps."""
    swaps: list[Swap] = []
    for part in filter(None, text.split(",")):
        if swaps and swaps[-1].mesh and part.partition("=")[0].strip() in AXES:
            swaps[-1] = swaps[-1]._replace(mesh=f"{swaps[-1].mesh},{part}")
            continue
        step, equals, rest = part.partition("=")
        name, _, mesh = rest.partition(":")
        dtype = _SHORT.get(name, name)
        known = name in STRATEGIES or dtype in PRECISIONS
        if not equals or not step.strip().isdigit() or int(step) < 1 or not known:
            mend = f"Write STEP=STRATEGY or STEP=STRATEGY:dp=4, with one of {', '.join(STRATEGIES)}; or STEP=PRECISION,"
            mend += f" with one of {', '.join((*_SHORT, *PRECISIONS))}."
            raise ConfigError(message(f"cannot read {part!r} in --swap-at {text}.", mend=mend))
        swaps.append(Swap(int(step), name, mesh) if name in STRATEGIES else Swap(int(step), "", mesh, dtype))
    steps = [swap.step for swap in swaps]
    if twice := sorted({step for step in steps if steps.count(step) > 1}):
        raise ConfigError(message(f"got --swap-at {text}: step {twice[0]} occurs twice."))
    return tuple(sorted(swaps))


_DEFAULT_POLICY = "save_except_gathered"


def offloaded(command: str, strategy: str, text: str, policy: str = _DEFAULT_POLICY) -> tuple[fs.Strategy, str]:
    """Return a strategy with the memory kinds of `--offload`, and the remat policy with its kind of activations."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    own = [part for part in parts if part.partition("=")[0].strip() == "activations"]
    kinds = [part.partition("=")[2].strip() for part in own]
    if odd := [kind for kind in kinds if kind not in ("device", "host")]:
        mend = "Keep them on the host, activations=host; or recompute them, --policy nothing_saveable."
        raise ConfigError(report(f"{command} --offload got activations={odd[0]}: device or host.", mend=mend))
    if "host" in kinds and policy not in (_DEFAULT_POLICY, "offload", "offload_inputs"):
        mend = "Omit one of the two, or write --policy offload_inputs, which keeps inputs of blocks on the host."
        raise ConfigError(report(f"{command} --offload got activations=host and --policy {policy}.", mend=mend))
    if "host" in kinds and policy == _DEFAULT_POLICY:
        policy = "offload"
    rest = ",".join(part for part in parts if part not in own)
    memory = call_as(f"{command} --offload", parse_memory, rest)
    return fs.Strategy.parse(strategy).with_memory(**memory), policy
