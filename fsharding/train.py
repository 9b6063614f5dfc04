"""The main job: trains a decoder on bytes or tokens, on one process, on local ranks, or under torchrun.

In: a `TrainConfig`. Out: `metrics.jsonl`, `loss.png` and checkpoints in a directory, a progress line on rank 0.
Everything that can be wrong with a configuration is found before a rank starts or a file changes.
Law: a run that is stopped and resumed has bitwise the losses of one that never stopped.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fsharding import checkpoint, optim, policies, random
from fsharding.counts import Counts, recording
from fsharding.data import Shard, Tokens, open_data
from fsharding.errors import BatchError, CheckpointError, ConfigError, message
from fsharding.layout import Layout, plan_layout
from fsharding.mesh import AXES, AbstractMesh, data_position, make_mesh, make_shape
from fsharding.models.decoder import decoder
from fsharding.precision import BF16, FP16, FP32
from fsharding.recipes import Recipe, recipe
from fsharding.show import plot_loss, read_metrics, require_matplotlib
from fsharding.state import TrainState, init_state, state_bytes
from fsharding.step import Metrics, make_train_step
from fsharding.strategy import parse_strategy

__all__ = ["PRECISIONS", "TrainConfig", "check", "train"]

PRECISIONS = {"float32": FP32, "bfloat16": BF16, "float16": FP16}
"""Precisions by the dtype of compute."""


@dataclass(frozen=True)
class TrainConfig:
    """What to train, where, and for how long.

    Attributes:
        out: directory of metrics, plot and checkpoints.
        preset: model and settings: tiny, bench-34m.
        ranks: local ranks to start; left out, this process alone, or the ranks that torchrun started.
        mesh: sizes of axes, such as `replica=2,dp=2`; dp takes what is left.
        strategy: zero0 to zero3, no_shard, optim, optim_grads, optim_grads_params, hsdp, hfsdp.
        dtype: of compute: float32, bfloat16 or float16.
        steps: total number of steps, also with `resume`.
        microbatches: pieces of a rank's batch whose gradients are accumulated.
        batch: sequences of the global batch.
        seq: tokens of a sequence.
        seed: of parameters and data.
        data: `default` (the Python standard library's own source), a file, a directory, or a `.bin` of tokens.
        save_every: steps between checkpoints; 0 for one at the end only.
        resume: go on from the newest complete checkpoint in `out`.
        policy: what blocks keep for backward: save_except_gathered, nothing_saveable, dots_saveable,
            everything_saveable.
        lr: peak learning rate; left out, the preset's.
        decay_steps: step at which a cosine decay to a tenth ends; 0 for a constant rate after the warm-up.
        clip: largest global gradient norm.
        timeout: seconds that a collective waits for its peers.
        plot: draw `loss.png`.
    """

    out: Path
    preset: str = "tiny"
    ranks: int | None = None
    mesh: str = ""
    strategy: str = "zero3"
    dtype: str = "float32"
    steps: int = 60
    microbatches: int = 1
    batch: int = 8
    seq: int = 128
    seed: int = 0
    data: str = "default"
    save_every: int = 0
    resume: bool = False
    policy: str = "save_except_gathered"
    lr: float | None = None
    decay_steps: int = 0
    clip: float = 1.0
    timeout: float = 120.0
    plot: bool = True

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints."""
        return self.out / "ckpt"

    @property
    def metrics(self) -> Path:
        """The metrics file."""
        return self.out / "metrics.jsonl"


def check(config: TrainConfig, world: int) -> None:
    """Refuses whatever could go wrong later, before anything has changed.

    Args:
        config: the configuration.
        world: number of ranks that will run.

    Raises:
        ConfigError: an unknown name, a number out of range, an `out` that cannot be written.
        MeshError: the mesh does not fit the number of ranks.
        BatchError: the batch does not divide.
        DataError: the data is missing, empty or too short.
        CheckpointError: `resume` without a checkpoint, or on other data.
    """
    recipe(config.preset)
    parse_strategy(config.strategy)
    for option, value, known in (("dtype", config.dtype, PRECISIONS), ("policy", config.policy, policies.POLICIES)):
        if value not in known:
            mend = f"Use one of {', '.join(known)}."
            raise ConfigError(message("fsharding train", f"knows no --{option} {value!r}.", mend=mend))
    least = {"steps": 1, "microbatches": 1, "batch": 1, "seq": 1, "save_every": 0, "decay_steps": 0}
    wrong = [
        f"--{k.replace('_', '-')} {getattr(config, k)}: at least {n}"
        for k, n in least.items()
        if getattr(config, k) < n
    ]
    wrong += [
        f"--{k} {v}: above 0" for k in ("lr", "clip", "timeout") if (v := getattr(config, k)) is not None and not v > 0
    ]
    if wrong:
        raise ConfigError(message("fsharding train", "got numbers out of range.", wrong))
    if config.plot:
        require_matplotlib("fsharding train")
    _check_batch(config, _mesh_shape(config, world))
    data = _open_data(config)
    _check_model(config, data)
    if config.resume:
        _check_resume(config, data)
    _check_out(config)


def _axes(config: TrainConfig) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in filter(None, config.mesh.split(",")):
        name, equals, size = part.partition("=")
        if not equals or not size.lstrip("-").isdigit() or name.strip() in axes:
            mend = "Write axes as --mesh replica=2,dp=2, each once."
            raise ConfigError(message("fsharding train", f"cannot read {part!r} in --mesh {config.mesh}.", mend=mend))
        axes[name.strip()] = int(size)
    return {"dp": -1, **axes}


def _mesh_shape(config: TrainConfig, world: int) -> AbstractMesh:
    shape = make_shape(_axes(config), world=world, function=f"fsharding train --mesh {config.mesh or 'dp=-1'}")
    model_axes = [axis for axis in AXES if axis not in ("replica", "dp") and shape.axis_size(axis) > 1]
    if model_axes:
        text = f"cannot cut the decoder over {', '.join(model_axes)} on mesh {shape}."
        raise ConfigError(message("fsharding train", text, mend="It runs on the axes replica and dp."))
    return shape


def _check_batch(config: TrainConfig, shape: AbstractMesh) -> None:
    parts = shape.axis_size("replica") * shape.axis_size("dp")
    if config.batch % (parts * config.microbatches):
        text = f"cannot divide --batch {config.batch} by {parts} data ranks times {config.microbatches} microbatches."
        near = max(1, round(config.batch / (parts * config.microbatches))) * parts * config.microbatches
        raise BatchError(
            message(
                "fsharding train",
                text,
                mend=f"Use a multiple of {parts * config.microbatches}, such as --batch {near}.",
            )
        )


def _open_data(config: TrainConfig) -> Tokens:
    return open_data(config.data, batch_size=config.batch, seq_len=config.seq, seed=config.seed)


def _check_model(config: TrainConfig, data: Tokens) -> None:
    vocab = recipe(config.preset).config.vocab
    if data.vocab_size > vocab:
        text = f"cannot embed {data.vocab_size} tokens of {config.data} in the {vocab} of --preset {config.preset}."
        raise ConfigError(
            message("fsharding train", text, mend="Choose a preset with a larger vocabulary, or other data.")
        )


def _check_out(config: TrainConfig) -> None:
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        probe = config.out / f".write-probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        text = f"cannot write to --out {config.out}: {error.strerror}."
        raise ConfigError(message("fsharding train", text, mend="Choose a directory that can be written.")) from error


def _check_resume(config: TrainConfig, data: Tokens) -> None:
    newest = checkpoint.latest(config.checkpoints)
    if newest is None:
        text = f"finds no complete checkpoint in {config.checkpoints}."
        raise CheckpointError(message("fsharding train --resume", text, mend="Leave --resume out to start a new run."))
    extra = checkpoint.metadata(newest).extra
    now = {"preset": config.preset, "data": data.fingerprint()}
    rows = [f"{k}: {extra.get(k)} in the checkpoint, {v} now" for k, v in now.items() if extra.get(k) != v]
    if rows:
        mend = "Give the --preset, --data, --batch, --seq and --seed of the run, or start a new one in another --out."
        raise CheckpointError(
            message("fsharding train --resume", f"cannot go on from {newest}: it is another run.", rows, mend)
        )


def train(config: TrainConfig) -> None:
    """Trains on the ranks that are there: this process alone, or those that a launcher started.

    Args:
        config: already checked.

    Raises:
        NonFiniteError: loss or gradients are not finite; the last checkpoint is intact.
        CheckpointError: saving or loading failed.
    """
    mesh = make_mesh(timeout=timedelta(seconds=config.timeout), **cast(Any, _axes(config)))
    try:
        _train_on(config, mesh)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _train_on(config: TrainConfig, mesh: Any) -> None:
    chosen = recipe(config.preset)
    model = decoder(chosen.config)
    layout = plan_layout(model, mesh, strategy=parse_strategy(config.strategy), precision=PRECISIONS[config.dtype])
    schedule = _schedule(config, chosen)
    opt = optim.chain(optim.clip_by_global_norm(config.clip), _adamw(chosen, schedule))
    data, shard = _open_data(config), Shard(*data_position(mesh))
    state = _first_state(config, model, opt, layout)
    step = make_train_step(
        model, opt, microbatches=config.microbatches, donate=True, policy=policies.POLICIES[config.policy]
    )
    leader = not dist.is_initialized() or dist.get_rank() == 0
    extra = {
        "preset": config.preset,
        "data": data.fingerprint(),
        "config": {k: str(v) for k, v in asdict(config).items()},
    }
    first, size = int(state.step), state_bytes(state)
    saved = first if config.resume else -1
    with _log(config, first, active=leader) as log:
        for number in range(first, config.steps):
            began = time.perf_counter()
            with recording() as counts:
                batch = {k: v.to(mesh.device_type) for k, v in data.batch(number, shard).items()}
                state, metrics = step(state, batch)
            log.write(number + 1, metrics, counts, schedule(number), size, time.perf_counter() - began)
            if config.save_every and (number + 1) % config.save_every == 0:
                checkpoint.save(config.checkpoints / str(number + 1), state, extra=extra)
                saved = number + 1
        if saved != int(state.step):
            checkpoint.save(config.checkpoints / str(int(state.step)), state, extra=extra)
        log.finish()


def _schedule(config: TrainConfig, chosen: Recipe) -> optim.Schedule:
    """Warm-up, then constant: independent of the number of steps, so that a longer run begins as a shorter one."""
    peak = config.lr or chosen.learning_rate
    if config.decay_steps:
        return optim.warmup_cosine(peak, chosen.warmup, config.decay_steps, end=peak / 10)
    return lambda count: peak * min(1.0, (count + 1) / chosen.warmup)


def _adamw(chosen: Recipe, schedule: optim.Schedule) -> optim.GradientTransformation:
    groups = {
        "matrix": optim.adamw(schedule, weight_decay=chosen.weight_decay),
        "vector": optim.adamw(schedule),
    }
    return optim.masked(groups, lambda path, leaf: "vector" if "norm" in path.rpartition(".")[2] else "matrix")


def _first_state(config: TrainConfig, model: Any, opt: optim.GradientTransformation, layout: Layout) -> TrainState:
    if not config.resume:
        return init_state(model, opt, random.key(config.seed), layout)
    newest = checkpoint.latest(config.checkpoints)
    assert newest is not None, "checked before"
    return checkpoint.load(newest, layout, opt=opt)


class _Log:
    """Metrics and progress of rank 0; the other ranks have one that does nothing."""

    def __init__(self, config: TrainConfig, first: int) -> None:
        self.config, self.first = config, first
        self.file = config.metrics.open("a")
        console = Console()
        self.every = 0 if console.is_terminal else max(1, config.steps // 10)
        columns = (
            "loss {task.fields[loss]}",
            "{task.fields[rate]} tokens/s",
            "{task.fields[state]} MB of state a rank",
        )
        self.progress = Progress(
            BarColumn(), MofNCompleteColumn(), *map(TextColumn, columns), TimeRemainingColumn(),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.progress.add_task("train", total=config.steps, completed=first, loss="-", rate="-", state="-")
        self.progress.start()

    def write(self, step: int, m: Metrics, counts: list[Counts], lr: float, size: int, seconds: float) -> None:
        tokens = int(m.weight)
        row = {
            "step": step, "loss": float(m.loss), "grad_norm": float(m.grad_norm), "lr": lr, "tokens": tokens,
            "tokens_per_s": tokens / seconds, "step_s": seconds, "state_bytes": size,
            "gathered_peak_bytes": max((c.peak_bytes for c in counts), default=0),
        }  # fmt: skip
        row = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        fields: dict[str, Any] = {
            "loss": f"{float(m.loss):.4f}",
            "rate": f"{tokens / seconds:,.0f}",
            "state": f"{size / 1e6:.1f}",
        }
        self.progress.update(self.task, completed=step, **fields)
        if self.every and (step % self.every == 0 or step == self.config.steps):
            text = f"step {step}/{self.config.steps}  loss {fields['loss']}  {fields['rate']} tokens/s"
            print(f"{text}  {fields['state']} MB of state a rank", flush=True)

    def finish(self) -> None:
        if self.config.plot:
            plot_loss(self.config.metrics, self.config.out / "loss.png")
        rows = read_metrics(self.config.metrics)
        self.progress.stop()
        last = f"loss {rows[-1]['loss']:.4f} after {len(rows)} steps" if rows else "no steps"
        print(f"{last}; metrics, plot and checkpoints in {self.config.out}", flush=True)

    def close(self) -> None:
        self.progress.stop()
        self.file.close()


class _Silent(_Log):
    def __init__(self) -> None:
        """Opens nothing."""

    def write(self, step: int, m: Metrics, counts: list[Counts], lr: float, size: int, seconds: float) -> None:
        """Says nothing."""

    def finish(self) -> None:
        """Draws nothing."""

    def close(self) -> None:
        """Has nothing to close."""


@contextmanager
def _log(config: TrainConfig, first: int, *, active: bool) -> Generator[_Log]:
    """Opens the log of a run: cut back to the step that it resumes from, or new beside what an earlier run left."""
    if active and config.resume:
        kept = [json.dumps(row) for row in read_metrics(config.metrics) if row["step"] <= first]
        part = config.metrics.with_name(".metrics.jsonl.partial")
        part.write_text("".join(line + "\n" for line in kept))
        part.replace(config.metrics)
    elif active:
        _set_aside(config)
    if dist.is_initialized():
        dist.barrier()
    log = _Log(config, first) if active else _Silent()
    try:
        yield log
    finally:
        log.close()


def _set_aside(config: TrainConfig) -> None:
    """Moves what an earlier run left in `out` to `out/earlier-N`: a new run neither mixes with it nor loses it."""
    left = [p for p in (config.metrics, config.checkpoints, config.out / "loss.png") if p.exists()]
    if left:
        number = next(n for n in range(1, 10**6) if not (config.out / f"earlier-{n}").exists())
        aside = config.out / f"earlier-{number}"
        aside.mkdir()
        for path in left:
            path.rename(aside / path.name)
