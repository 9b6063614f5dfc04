"""`fsharding train`: train a decoder in one process, on local ranks, or under torchrun."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.profiler import profile, supported_activities

import fsharding as fs
from fsharding.apps.cli import config as job
from fsharding.apps.cli.metrics import Meter, Trackers, cut_rows, flops_per_token, metrics_rows, peak_flops, plot_loss
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.resume import Choice, batches_seen, changes, choose, is_damaged, lock_run, notes
from fsharding.apps.cli.starting import tell
from fsharding.apps.cli.usage import OPTIMIZERS, option
from fsharding.base import devices
from fsharding.base.errors import CheckpointError, RankError, printable, report
from fsharding.checkpoint.collective_call import on_all
from fsharding.checkpoint.directory import append, naming_path, survey, writing
from fsharding.comm.counters import Counts
from fsharding.mesh.abstract_mesh import parse_axes
from fsharding.mesh.consistency import compare, refuse_differences
from fsharding.mesh.device_mesh import everyone, own_rank
from fsharding.mesh.failures import naming_lost, world_size, write_stacks
from fsharding.pipeline.plots import has_matplotlib
from fsharding.train.evaluate import Evaluate
from fsharding.train.step import TrainStep

__all__ = ["train"]


def train(config: TrainConfig) -> int:
    """Train in this process or on the launched ranks; return the exit status."""
    deadline = fs.preemption.parse_deadline(config.deadline) if config.deadline else None
    with fs.preemption.watch((*fs.preemption.SIGNALS, signal.SIGINT), deadline=deadline) as watch:
        try:
            stopped = _train(config, watch)
        except RankError as error:
            write_stacks(error, config.out)
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return config.preempt_status if stopped else 0


def _train(config: TrainConfig, watch: fs.preemption.Watch | None = None) -> bool:
    """Train; return whether the run stopped before its last step."""
    watch = watch or fs.preemption.Watch(None, timedelta(0))
    os.environ.setdefault("FSHARDING_DISK", str(config.out))
    chosen = fs.models.presets.recipe(config.preset)
    model = job.model_of(config)
    schedule = _schedule(config, chosen)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(config.clip), _optimizer(config, chosen.weight_decay, schedule))
    swaps = {swap.step: swap for swap in job.parse_swaps(config.swap_at)}
    with ExitStack() as held:
        state, data, validation, first, saved = _begin(config, model, opt, held)
        if first < config.steps:
            # Read before any file changes: bad data must leave an earlier run intact.
            _batch(data, first, state)
            if validation is not None:
                _batch(validation, 0, state)
        step, validate = _functions(config, model, opt, state)
        longest_step = 0.0
        longest_save = fs.debug.state_bytes(state) / 1e8  # 100 MB/s until the first save
        watch.margin = _margin(longest_step, longest_save)
        done = first
        stopped = fs.preemption.requested(state.layout.mesh)
        # No rank saves before the files of an earlier run are gone.
        on_all(lambda: _set_aside(config, saved) if own_rank() == 0 else None)
        log = _Log(config, first, _meter(config, state), held) if own_rank() == 0 else None
        while done < config.steps and not stopped:
            began = time.perf_counter()
            if done > first and done in swaps:
                # A mesh that stays is the same object: a new one would have groups of its own.
                mesh = None if swaps[done].mesh else state.layout.mesh
                state = fs.reshard(state, _layout(config, model, done, mesh), donate=True)
                step, validate = _functions(config, model, opt, state)
            rate = schedule(int(state.step))
            tracing = traced(config.out, done + 1, own_rank()) if done + 1 == config.trace else nullcontext()
            stepping = time.perf_counter()
            with tracing, fs.debug.record_collectives() as counts:
                state, metrics = step(state, _batch(data, done, state))
                seconds = time.perf_counter() - stepping
            done += 1
            stopped = fs.preemption.requested()
            loss = None
            due = done == config.steps or (config.val_every > 0 and done % config.val_every == 0)
            if validation is not None and due and not stopped:
                loss = _validation_loss(config, validate, state, validation)
            if log is not None:
                log.write(done, metrics, counts, rate, fs.debug.state_bytes(state), seconds, loss)
            if config.check_replicas_every and done % config.check_replicas_every == 0:
                fs.debug.check_replicas(state)
            longest_step = max(longest_step, time.perf_counter() - began)
            if config.save_every and done % config.save_every == 0:
                began = time.perf_counter()
                _save(config, state, data, done)
                took = time.perf_counter() - began
                longest_save = max(longest_save, took) if saved > first else took
                saved = done
                # Collective: a signal that arrived during the save needs no further step.
                stopped = stopped or fs.preemption.requested(state.layout.mesh)
            watch.margin = _margin(longest_step, longest_save)
        if saved != done:
            _save(config, state, data, done)
        stopped = stopped and done < config.steps
        if log is not None:
            log.finish(f"{done} of {config.steps}: {watch.reason()}" if stopped else "")
    return stopped


def _margin(step: float, save: float) -> timedelta:
    """Return how long before a deadline to stop, given the longest step and save so far."""
    # Two steps: the request arrives during one and is sent with the next. Five seconds: processes exit.
    return timedelta(seconds=5 + 2 * step + 2 * save)


# ------------------------------------------------------------------------------------------------- start and resume
def _begin(
    config: TrainConfig, model: fs.models.Model, opt: fs.optim.GradientTransformation, held: ExitStack
) -> tuple[fs.TrainState, fs.data.Data, fs.data.Data | None, int, int]:
    """Return the first state, the data and validation data, and the batches seen and saved: -1 if none in `out`."""
    # The directory stays locked until `held` ends.
    skip: set[Path] = set()
    locked = False
    while True:
        choice = choose(config.resume, config.checkpoints, skip)
        first = batches_seen(choice.path) if choice.path is not None else 0
        layout = _layout(config, model, first)
        data, validation = job.open_data_of(config)
        _agree(config, data, validation, layout.mesh, choice)
        if not locked:
            lock_run(config.out, held)
            locked = True
            if choose(config.resume, config.checkpoints, skip) != choice:
                continue  # a run that was ending saved meanwhile
        own = choice.path is not None and os.path.realpath(choice.path.parent) == os.path.realpath(config.checkpoints)
        _tell(config, choice, first, own)
        if choice.path is None:
            state = fs.init_state(model, opt, fs.random.key(config.seed), layout)
            return state, data, validation, 0, -1
        try:
            state = fs.checkpoint.load(choice.path, layout, opt=opt, data=_position(data))
            return state, data, validation, first, first if own else -1
        except CheckpointError:
            if not config.resume_older or not is_damaged(choice.path):
                raise
            skip.add(choice.path)


def _position(data: fs.data.Data) -> fs.data.Packed | None:
    """Return data whose position must be saved; it doesn't follow from the step."""
    return data if isinstance(data, fs.data.Packed) else None


# Options that may change on a resume and affect numbers, memory or speed.
_TOLD_CHANGES = (
    "lr", "decay_steps", "clip", "dtype", "batch", "seq", "seed", "microbatches", "strategy", "offload", "mesh",
    "schedule", "attention", "policy", "swap_at",
)  # fmt: skip


def _tell(config: TrainConfig, choice: Choice, first: int, own: bool) -> None:
    """Print the checkpoint of a resume, those skipped, and changed options."""
    if own_rank() != 0 or not config.resume:
        return
    path = choice.path
    lines = ["starts a new run" if path is None else f"resumes from {path}, after {first} batches"]
    lines += [printable(f"  skipped {row}") for row in choice.passed]
    before = notes(fs.checkpoint.metadata(path))["config"] if path is not None else {}
    lines += [printable(f"  {row}") for row in changes(config, before, _TOLD_CHANGES)]
    if own and first and not config.metrics.exists():
        lines.append(printable(f"  {config.metrics} is gone: starting a new one"))
    tell(config, "\n".join(lines))


# Options that ranks on several machines may have each of their own.
_OWN = {
    "config", "data", "deadline", "grace", "json", "log", "log_every", "out", "peak_tflops", "plot", "preempt_status",
    "ranks", "timeout", "tokenizer", "trace", "val_data",
}  # fmt: skip


def _agree(config: TrainConfig, data: fs.data.Data, validation: fs.data.Data | None, mesh: Any, choice: Choice) -> None:
    """Refuse ranks that were started with different options, or that see different data or checkpoints."""
    facts = {option(name): text for name, text in config.texts.items() if name not in _OWN}
    facts["fingerprint of --data"] = data.fingerprint()
    facts["fingerprint of --val-data"] = "none" if validation is None else validation.fingerprint()
    facts["checkpoint to go on from"] = "none" if choice.path is None else choice.path.name
    with naming_lost("fsharding train", mesh):
        refuse_differences(compare(facts, everyone(mesh), mesh.device_type))


def _layout(config: TrainConfig, model: fs.models.Model, done: int, mesh: Any = None) -> fs.Layout:
    """Plan the layout after some steps, which the swaps until then have changed."""
    strategy = config.strategy
    dtype = config.dtype
    axes = config.mesh
    for swap in job.parse_swaps(config.swap_at):
        if swap.step <= done:
            strategy = swap.strategy or strategy
            dtype = swap.dtype or dtype
            axes = swap.mesh or axes
    if mesh is None:
        sizes: dict[str, Any] = {"dp": -1, **parse_axes(axes)}
        mesh = fs.make_mesh(timeout=timedelta(seconds=config.timeout), **sizes)
    where, _ = job.offloaded("fsharding train", strategy, config.offload)
    return fs.plan_layout(model, mesh, strategy=where, precision=job.PRECISIONS[dtype], stages=job.stages(config, mesh))


# ---------------------------------------------------------------------------------------------------------- the steps
def _functions(
    config: TrainConfig, model: fs.models.Model, opt: fs.optim.GradientTransformation, state: fs.TrainState
) -> tuple[TrainStep, Evaluate]:
    """Create the step and the validation on the mesh of the state."""
    schedule = job.schedule_of(config, state.layout.mesh) or config.schedule
    _, name = job.offloaded("fsharding train", config.strategy, config.offload, config.policy)
    policy = fs.policies.POLICIES[name]
    many = config.microbatches
    step = fs.make_train_step(model, opt, microbatches=many, schedule=schedule, donate=True, policy=policy)
    return step, fs.evaluate(model, microbatches=many, schedule=schedule)


def _validation_loss(config: TrainConfig, validate: Evaluate, state: fs.TrainState, data: fs.data.Data) -> float:
    """Return the mean loss of the first `val_batches` batches. Collective; forward only."""
    total = 0.0
    count = 0.0
    for number in range(config.val_batches):
        loss = validate(state, _batch(data, number, state))
        total += float(loss.sum)
        count += float(loss.count)
    return total / count if count else math.nan


def _batch(data: fs.data.Data, number: int, state: fs.TrainState) -> dict[str, torch.Tensor]:
    """Return this rank's rows of a global batch, on its device."""
    mesh: Any = state.layout.mesh
    batch = fs.ops.cut_sequence(data.batch(number, fs.data.Shard(*fs.data_rank_and_size(mesh))), mesh=mesh)
    return {name: values.to(mesh.device_type) for name, values in batch.items()}


def _save(config: TrainConfig, state: fs.TrainState, data: fs.data.Data, batches: int) -> None:
    """Save under the number of batches seen; steps that a loss scale skipped count."""
    extra = {"preset": config.preset, "data": data.fingerprint(), "batches": batches, "config": config.texts}
    keeper = fs.checkpoint.Checkpointer(config.checkpoints, keep=config.keep, background=False, data=_position(data))
    keeper.save(state, extra, number=batches)


def _schedule(config: TrainConfig, chosen: fs.models.presets.Recipe) -> fs.optim.Schedule:
    """Warm up, then stay constant, so a longer run begins like a shorter one."""
    peak = config.lr or chosen.learning_rate * OPTIMIZERS[config.optimizer]
    if config.decay_steps:
        return fs.optim.schedules.warmup_cosine(peak, chosen.warmup, config.decay_steps, end=peak / 10)
    return lambda count: peak * min(1.0, (count + 1) / chosen.warmup)


def _optimizer(config: TrainConfig, decay: float, schedule: fs.optim.Schedule) -> fs.optim.GradientTransformation:
    """Create the optimizer: norms and biases don't decay; Muon updates matrices of blocks, AdamW the rest."""
    make = {"lion": fs.optim.lion, "adafactor": fs.optim.adafactor}.get(config.optimizer, fs.optim.adamw)
    # An update multiplies the decay by the rate, which is a multiple of AdamW's.
    decay = decay / OPTIMIZERS[config.optimizer]
    groups = {"matrix": make(schedule, weight_decay=decay), "vector": make(schedule, weight_decay=0.0)}
    if config.optimizer == "muon":
        # With updates of about AdamW's size, Muon takes AdamW's rates.
        groups["stacked"] = fs.optim.muon(schedule, weight_decay=decay, adjust="match_rms_adamw")
    labels = fs.optim.label_matrices()

    def group(path: str, leaf: Any) -> str:
        last = path.rpartition(".")[2]
        if "norm" in last or "bias" in last:
            return "vector"
        return "stacked" if "stacked" in groups and labels(path, leaf) == "matrix" else "matrix"

    return fs.optim.multi_transform(groups, group)


@contextmanager
def traced(out: Path, step: int, rank: int) -> Generator[None]:
    """Record a step, counted from 1, and write its chrome trace if it succeeds."""
    with profile(activities=[*supported_activities()], record_shapes=True, acc_events=True) as recorded:
        yield
        devices.synchronize()
    with writing(out / "trace" / f"step-{step}-rank-{rank}.json", file=True) as part:
        recorded.export_chrome_trace(str(part))


# ------------------------------------------------------------------------------------------------- metrics and progress
_WIDTH = 80  # columns of a terminal
_BAR = 10  # columns of the progress bar
_FILES = ("metrics.jsonl", "ckpt", "loss.png", "trace", "tensorboard", "wandb", "log.jsonl")


def _joined(parts: Sequence[str], width: int) -> str:
    """Join the first parts that fit into a line, without empty ones."""
    result = ""
    for part in filter(None, parts):
        if result and len(result) + 2 + len(part) > width:
            break
        result = f"{result}  {part}" if result else part
    return result


def _short(rate: float) -> str:
    """Return a rate in at most five characters."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= 10 * limit:
            return f"{rate / limit:,.0f}{unit}"
    return f"{rate:.0f}"


class _Log:
    """Metrics and progress on rank 0; `held` closes the files."""

    def __init__(self, config: TrainConfig, first: int, meter: Meter, held: ExitStack) -> None:
        self.config = config
        self.meter = meter
        self.file = held.enter_context(config.metrics.open("ab", buffering=0))
        self.console = Console(stderr=config.json)
        self.told = -math.inf
        self.val = ""
        self.progress = Progress(
            BarColumn(_BAR), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn(),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        self.task = self.progress.add_task("train", total=config.steps, completed=first, text="")
        self.progress.start()
        held.callback(self.progress.stop)
        with _writing(config.out):
            self.trackers = Trackers(config, first, held)

    def write(
        self, step: int, m: fs.Metrics, counts: list[Counts], lr: float, size: int, seconds: float, val: float | None
    ) -> None:
        """Write the metrics of a step to all files, and its progress line."""
        tokens = int(m.count)
        row = {
            "step": step, "loss": float(m.loss), "grad_norm": float(m.grad_norm), "lr": lr, "tokens": tokens,
            "tokens_per_s": tokens / seconds, "step_s": seconds, "state_bytes": size,
            "gathered_peak_bytes": max((c.peak_bytes for c in counts), default=0),
        }  # fmt: skip
        rates = self.meter.rates(tokens, seconds)
        row |= {"val_loss": val} if val is not None else {}
        row |= {"mfu": rates["mfu"]} if "mfu" in rates else {}
        row = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
        self._check_there()
        with _writing(self.config.metrics):
            append(self.file.fileno(), f"{json.dumps(row)}\n".encode())
        with _writing(self.config.out):
            self.trackers.write(step, {**row, **rates})
        if val is not None:
            self.val = f"val {val:.4f}"
        said = [f"loss {float(m.loss):.4f}", self.val, f"{_short(tokens / seconds)} tokens/s"]
        said += [f"MFU {rates['mfu']:.1%}"] if "mfu" in rates else []
        said += [f"lr {lr:.2e}", f"peak {rates['peak_memory_bytes'] / 1e6:,.0f} MB"]
        count = f"{step}/{self.config.steps}"
        if self.console.is_terminal:
            # Leaves space for bar, count and remaining time.
            self.progress.update(self.task, completed=step, text=_joined(said, _WIDTH - _BAR - len(count) - 11))
        elif step == self.config.steps or time.monotonic() >= self.told + self.config.log_every:
            self.told = time.monotonic()
            print(_joined([f"step {count}", *said], _WIDTH), file=self.console.file, flush=True)

    def _check_there(self) -> None:
        """Refuse to continue if the metrics file was removed or replaced."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.config.metrics), os.fstat(self.file.fileno())):
                return
        mend = "Start again in a directory that nothing else cleans; its checkpoints are gone as well."
        if self.config.checkpoints.exists():
            mend = "Continue from the newest checkpoint with --resume auto."
        rule = f"has lost {self.config.metrics}: it was removed or replaced during the run."
        raise CheckpointError(report(f"fsharding train {rule}", mend=mend))

    def _draw(self) -> str:
        """Draw the plot; return why it could not be drawn, or ""."""
        if not has_matplotlib():
            return "matplotlib is not installed (pip install 'fsharding[plot]')"
        plot = self.config.out / "loss.png"
        try:
            with naming_path(plot):
                plot_loss(self.config.metrics, plot)
        except OSError as error:
            return str(error)
        return ""

    def finish(self, stopped: str = "") -> None:
        """Draw the plot, and print the last line of the run."""
        drawing = self.config.plot and not stopped  # a stopped run may not have the time
        undrawn = self._draw() if drawing else ""
        losses = [row.get("loss") for row in metrics_rows(self.config.metrics)]
        steps = len(losses)
        loss = losses[-1] if losses else None
        self.progress.stop()
        if self.config.json:
            row = {"steps": steps, "loss": loss, "out": str(self.config.out)}
            print(json.dumps({**row, "stopped": stopped} if stopped else row), flush=True)
            return
        if stopped:
            where = fs.checkpoint.latest(self.config.checkpoints)
            print(f"stopped at step {stopped}; saved {where}; --resume auto continues the run", flush=True)
            return
        text = f"loss {loss:.4f}" if loss is not None else "loss not finite"
        last = f"{text} after {steps} steps" if steps else "no steps"
        files = "metrics, plot and checkpoints" if drawing and not undrawn else "metrics and checkpoints"
        print(f"{last}; {files} in {self.config.out}", flush=True)
        if undrawn:
            print(f"no plot was drawn: {undrawn}", flush=True)


def _meter(config: TrainConfig, state: fs.TrainState) -> Meter:
    mesh: Any = state.layout.mesh
    kind = mesh.device_type
    peak = 1e12 * config.peak_tflops if config.peak_tflops is not None else None
    if peak is None and kind != "cpu":
        peak = peak_flops(devices.name_of(kind), job.PRECISIONS[config.dtype].activation_dtype or torch.float32)
    flops = flops_per_token(fs.models.presets.recipe(config.preset).config, state.layout.leaves, config.seq)
    return Meter(flops, world_size(), kind, peak)


@contextmanager
def _writing(path: Path) -> Generator[None]:
    """Name the path in an error of the file system, such as a full disk."""
    try:
        with naming_path(path):
            yield
    except OSError as error:
        rule = f"cannot write {error.filename}: {error.strerror or error}."
        mend = "Free space there, then continue from the newest checkpoint with --resume auto."
        raise CheckpointError(report(f"fsharding train {rule}", mend=mend)) from error


def _set_aside(config: TrainConfig, saved: int) -> None:
    """Move files of an earlier run, or of steps after those that this run has saved, to `out/earlier-N`."""
    with _writing(config.out):
        if saved >= 0:
            # The newest checkpoint must belong to this run. The number of a complete one lacks skipped steps.
            left = [
                one.path
                for one in survey(config.checkpoints)
                if (one.number if one.problem else batches_seen(one.path)) > saved
            ]
            cut_rows(config.metrics, saved)
        else:
            left = [config.out / name for name in _FILES if (config.out / name).exists()]
        if left:
            number = next(n for n in range(1, 10**6) if not (config.out / f"earlier-{n}").exists())
            aside = config.out / f"earlier-{number}"
            aside.mkdir()
            for path in left:
                path.rename(aside / path.name)
