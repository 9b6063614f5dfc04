"""What `fsharding train` is asked to do, and the checks that refuse it before anything has changed.

In: the options of the command line. Out: a `TrainConfig`, or one error that says what to change.
Guarantee: what passes `check` fails later only for reasons that could not be seen: a full disk, a lost rank, a loss of
NaN.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import fsharding as fs
from fsharding import checkpoint
from fsharding.apps.cli.documents import is_table, open_documents, open_encoder
from fsharding.apps.cli.metrics import metrics_rows
from fsharding.apps.cli.offload import offloaded, policy_of
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.resume import choose
from fsharding.apps.cli.trackers import require_trackers
from fsharding.apps.cli.usage import check_values
from fsharding.apps.data import Packed, Tokens, open_data, packed
from fsharding.base.calls import call_as, named
from fsharding.base.errors import BatchError, CheckpointError, ConfigError, message, report
from fsharding.formats.precision import FP8, FP8_BLOCK, MXFP8, NVFP4
from fsharding.mesh import preemption
from fsharding.mesh.abstract_mesh import AXES, AbstractMesh, make_shape, parse_axes
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.models.model import Model
from fsharding.models.presets import recipe
from fsharding.pipeline.schedule import Schedule, plan_schedule
from fsharding.pipeline.stages import stages_of
from fsharding.sharding.partition_spec import DEFAULT_RULES
from fsharding.sharding.strategy import STRATEGIES

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "Swap",
    "batches_seen",
    "check",
    "model_of",
    "open_tokens",
    "open_validation",
    "parse_swaps",
    "schedule_of",
    "stages",
]

PRECISIONS = {
    "float32": fs.FP32, "bfloat16": fs.BF16, "float16": fs.FP16, "fp8": FP8, "fp8-block": FP8_BLOCK, "mxfp8": MXFP8,
    "nvfp4": NVFP4,
}  # fmt: skip
"""Precisions by the dtype of compute, or by the format of weights in low precision."""

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Other names of precisions, which `--swap-at` takes."""

_LONGEST_S = 10_000_000
"""Of a timeout: some months."""

OPTIMIZERS = {"adamw": 1.0, "lion": 0.2, "muon": 1.0, "adafactor": 10.0}
"""What `--optimizer` takes, and its peak rate as a multiple of AdamW's."""


@named("fsharding train")
def check(config: TrainConfig, world: int) -> None:
    """Refuses whatever could go wrong later, before anything has changed.

    Args:
        world: number of ranks that will run.

    Raises:
        ConfigError: an unknown name, a number out of range, an `out` that cannot be written.
        MeshError: the mesh does not fit the number of ranks.
        BatchError: the batch does not divide.
        DataError: the data is missing, empty or too short.
        CheckpointError: `resume` without a checkpoint, or on other data.
    """
    check_values("fsharding train", config)
    warmup = recipe(config.preset).warmup
    least = {"steps": 1, "microbatches": 1, "batch": 1, "seq": 1, "save_every": 0, "decay_steps": 0}
    least |= {"stages_per_rank": 1, "keep": 1, "check_replicas_every": 0}
    least |= {"val_every": 0, "val_batches": 1, "trace": 1}
    wrong = [
        f"--{k.replace('_', '-')} {value}: at least {n}"
        for k, n in least.items()
        if (value := getattr(config, k)) is not None and value < n
    ]
    wrong += [
        f"--{k.replace('_', '-')} {v}: above 0"
        for k in ("lr", "clip", "timeout", "grace", "peak_tflops")
        if (v := getattr(config, k)) is not None and not v > 0
    ]
    wrong += [f"--log-every {config.log_every}: at least 0"] if not config.log_every >= 0 else []
    wrong += [f"--preempt-status {config.preempt_status}: 0 to 255"] if not 0 <= config.preempt_status <= 255 else []
    wrong += [f"--seed {config.seed}: 0 to 2**64 - 1"] if not 0 <= config.seed < 2**64 else []
    wrong += [f"--lr {config.lr}: finite"] if config.lr == math.inf else []
    wrong += [f"--peak-tflops {config.peak_tflops}: finite"] if config.peak_tflops == math.inf else []
    if config.trace is not None and config.trace > config.steps:
        wrong.append(f"--trace {config.trace}: at most the {config.steps} of --steps")
    wrong += [f"--timeout {config.timeout}: at most {_LONGEST_S:,}"] if config.timeout > _LONGEST_S else []
    if 0 < config.decay_steps < warmup:
        wrong.append(f"--decay-steps {config.decay_steps}: 0, or at least the {warmup} of the warm-up")
    if wrong:
        raise ConfigError(message("got numbers out of range.", wrong))
    if config.resume_older and config.resume not in ("auto", "newest"):
        mend = "Write --resume auto --resume-older."
        raise ConfigError(message("got --resume-older without --resume auto or newest.", mend=mend))
    if config.deadline:
        when = call_as("fsharding train --deadline", preemption.read_deadline, config.deadline)
        if when.timestamp() <= time.time():
            text = f"got a deadline that is over: {when:%Y-%m-%d %H:%M:%S}."
            raise ConfigError(report(f"fsharding train --deadline {text}", mend="Give a later one, or leave it out."))
    if config.val_every and not config.val_data:
        mend = "Give the data of the validation as well, or leave --val-every out."
        raise ConfigError(message("got --val-every without --val-data.", mend=mend))
    offloaded("fsharding train", config.strategy, config.offload)
    policy_of("fsharding train", config.offload, config.policy)
    require_trackers(config.log)
    _layers_of_stages(config)
    for text in (config.mesh, *(swap.mesh for swap in parse_swaps(config.swap_at) if swap.mesh)):
        _check_batch(config, _mesh_shape(config, text, world))
    data = open_tokens(config)
    _check_model(config, data, config.data)
    if (validation := open_validation(config)) is not None:
        _check_model(config, validation, config.val_data)
    for opened in (data, validation):
        if isinstance(opened, Packed):
            opened.batch(0)  # its documents are read as late as they are needed
    if config.resume:
        _check_resume(config, data)
        next(metrics_rows(config.metrics), None)  # what cannot be read is found before a rank starts
    _check_out(config)


@named("fsharding train --resume")
def batches_seen(newest: Path) -> int:
    """How many batches a run had seen when it saved a checkpoint."""
    result = checkpoint.metadata(newest)
    batches = _notes(result).get("batches", result.step)
    if type(batches) is not int or batches < 0:
        text = f"cannot go on from {newest}: it does not say how many batches its run had seen."
        mend = "fs.checkpoint.load reads it; --resume takes what fsharding train has saved."
        raise CheckpointError(message(text, [f"batches: {batches!r}"], mend))
    return batches


def _notes(manifest: checkpoint.Manifest) -> dict[str, Any]:
    """What `fsharding train` added to a checkpoint; nothing where something else saved it."""
    return manifest.extra if isinstance(manifest.extra, dict) else {}


def model_of(config: TrainConfig) -> Model:
    """The model of a run."""
    return recipe(config.preset).model(sequence=config.sequence, attention=config.attention)


def schedule_of(config: TrainConfig, mesh: Mesh) -> Schedule | None:
    """The schedule of a pipeline; None on a mesh without `pp`.

    Raises:
        ScheduleError: the schedule cannot have so many ranks, stages or microbatches.
    """
    ranks = abstract(mesh).axis_size("pp")
    if ranks == 1:
        return None
    return plan_schedule(
        config.schedule,
        ranks,
        config.microbatches,
        stages_per_rank=config.stages_per_rank,
        gather=config.gather,
    )


def stages(config: TrainConfig, mesh: Mesh) -> dict[str, Any] | None:
    """Who owns what along `pp`, as `plan_layout` takes it; None where there is none.

    Raises:
        ScheduleError: as `schedule_of`; or more stages than layers, or layers of stages that do not fit.
    """
    schedule = schedule_of(config, mesh)
    return None if schedule is None else stages_of(model_of(config), schedule, counts=_layers_of_stages(config))


def _layers_of_stages(config: TrainConfig) -> list[int] | None:
    counts = [part.strip() for part in config.stage_layers.split(",") if part]
    if not all(count.isdecimal() for count in counts):
        text = f"cannot read --stage-layers {config.stage_layers!r}."
        raise ConfigError(message(text, mend="Write the layers of each stage, such as 3,5."))
    return [int(count) for count in counts] or None


@named("fsharding train")
def _mesh_shape(config: TrainConfig, text: str, world: int) -> AbstractMesh:
    axes = {"dp": -1, **parse_axes(text)}
    shape = call_as(f"fsharding train --mesh {text or 'dp=-1'}", make_shape, axes, world=world)
    model = model_of(config)
    known = ("pp", "replica", "dp", "ep", *model.axes)
    if others := [axis for axis in AXES if axis not in known and shape.axis_size(axis) > 1]:
        text = f"cannot cut the decoder over {', '.join(others)} on mesh {shape}."
        raise ConfigError(message(text, mend=f"It runs on the axes {', '.join(known)}."))
    if model.check is not None:
        model.check(shape, DEFAULT_RULES)
    stages(config, shape)
    cp = shape.axis_size("cp")
    tp = shape.axis_size("tp") if config.sequence else 1
    parts = (2 * cp if cp > 1 else 1) * tp
    if config.seq % parts:
        what = " and ".join(f"{axis}={size}" for axis, size in (("cp", cp), ("tp", tp)) if size > 1)
        raise BatchError(message(f"cannot cut --seq {config.seq} over {what}.", mend=f"Use a multiple of {parts}."))
    return shape


def _check_batch(config: TrainConfig, shape: AbstractMesh) -> None:
    parts = math.prod(map(shape.axis_size, ("replica", "dp", "ep")))
    if config.batch % (parts * config.microbatches):
        text = f"cannot divide --batch {config.batch} by {parts} data ranks times {config.microbatches} microbatches."
        near = max(1, round(config.batch / (parts * config.microbatches))) * parts * config.microbatches
        raise BatchError(
            message(
                text,
                mend=f"Use a multiple of {parts * config.microbatches}, such as --batch {near}.",
            )
        )


def open_tokens(config: TrainConfig) -> Tokens | Packed:
    """The data of a run."""
    return _open(config, "--data", config.data)


def open_validation(config: TrainConfig) -> Tokens | Packed | None:
    """The data of the validation; None where there is none. The batches of a step are the same in every run."""
    return _open(config, "--val-data", config.val_data) if config.val_data else None


def _open(config: TrainConfig, option: str, source: str) -> Tokens | Packed:
    """Bytes, or tokens of a file, at random places; or, with a tokenizer, documents one after the other."""
    sizes: dict[str, Any] = {"batch_size": config.batch, "seq_len": config.seq, "seed": config.seed}
    if config.tokenizer is None:
        if source != "default" and is_table(Path(source)):
            text = f"cannot read the data set {option} {source} byte by byte."
            raise ConfigError(message(text, mend="Give its tokenizer: --tokenizer tokenizer.json."))
        return open_data(source, documents=config.documents, **sizes)
    if source.endswith(".bin"):
        text = f"got --tokenizer {config.tokenizer}, and {option} {source} has tokens already."
        raise ConfigError(message(text, mend="Leave --tokenizer out."))
    encoder = open_encoder(config.tokenizer, config.eos)
    documents = open_documents(source, config.text_column or "text")
    sizes |= {"eos": encoder.eos, "vocab_size": encoder.vocab_size}
    return packed(documents, tokenizer=encoder, boundaries=config.documents, **sizes)


def _check_model(config: TrainConfig, data: Tokens | Packed, source: str) -> None:
    vocab = recipe(config.preset).config.vocab_size
    if data.vocab_size is not None and data.vocab_size > vocab:
        text = f"cannot embed {data.vocab_size} tokens of {source} in the {vocab} of --preset {config.preset}."
        raise ConfigError(message(text, mend="Choose a preset with a larger vocabulary, or other data."))


def _check_out(config: TrainConfig) -> None:
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=config.out).close()  # it has no name, so nothing of it can stay
    except OSError as error:
        text = f"cannot write to --out {config.out}: {error.strerror}."
        raise ConfigError(message(text, mend="Choose a directory that can be written.")) from error


_OF_DATA = ("data", "tokenizer", "text_column", "eos", "documents", "batch", "seq", "seed")
"""Options that say which rows a step sees."""


@named("fsharding train --resume")
def _check_resume(config: TrainConfig, data: Tokens | Packed) -> None:
    newest = choose(config.resume, config.checkpoints).path
    if newest is None:
        return
    extra = _notes(checkpoint.metadata(newest))
    now = {"preset": config.preset, "data": data.fingerprint()}
    rows = [f"{k}: {extra.get(k)} in the checkpoint, {v} now" for k, v in now.items() if extra.get(k) != v]
    noted = extra.get("config")
    before: dict[str, Any] = {"optimizer": "adamw", **(noted if isinstance(noted, dict) else {})}
    for name in ("optimizer", *(_OF_DATA if extra.get("data") != now["data"] else ())):
        value = str(getattr(config, name))
        if before.get(name, value) != value:
            rows.append(f"--{name.replace('_', '-')}: {before[name]} in the checkpoint, {value} now")
    if rows:
        mend = "Give the options of the run; its data have to be as they were. Or start a new one in another --out."
        raise CheckpointError(message(f"cannot go on from {newest}: it is another run.", rows, mend))


# ------------------------------------------------------------------------------------------------------------- swaps
class Swap(NamedTuple):
    """A swap of strategy, precision or mesh in mid-run. What it leaves out stays as it was.

    The losses do not change, but for what another precision does to them.

    Attributes:
        step: number of updates before it.
        strategy: name of the new strategy; "" for the strategy as it is.
        mesh: axes of the new mesh, as `--mesh` has them; "" for the mesh as it is.
        dtype: name of the new precision; "" for the precision as it is.
    """

    step: int
    strategy: str
    mesh: str
    dtype: str = ""


@named("fsharding train")
def parse_swaps(text: str) -> tuple[Swap, ...]:
    """The swaps of an option, by step.

    Raises:
        ConfigError: text that cannot be read, an unknown strategy or precision, a step below 1 or one that stands
            twice.
    """
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
        raise ConfigError(message(f"got --swap-at {text}: step {twice[0]} stands twice."))
    return tuple(sorted(swaps))
