"""The main job: trains a decoder on bytes or tokens, on one process, on local ranks, or under torchrun.

In: a `TrainConfig`. Out: `metrics.jsonl`, `loss.png` and checkpoints in a directory, a progress line on rank 0.
Everything that can be wrong with a configuration is found before a rank starts or a file changes.
Guarantee: a run that is stopped and resumed has bitwise the losses of one that never stopped. A signal loses no step.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import fsharding as fs
from fsharding import checkpoint, ops
from fsharding.apps.cli.config import (
    OPTIMIZERS,
    PRECISIONS,
    Swap,
    TrainConfig,
    batches_seen,
    model_of,
    open_tokens,
    open_validation,
    parse_swaps,
    schedule_of,
    stages,
)
from fsharding.apps.cli.metrics import metrics_rows, plot_loss
from fsharding.apps.cli.offload import offloaded, policy_of
from fsharding.apps.cli.resume import Choice, alone_in, choose, is_damaged
from fsharding.apps.cli.throughput import Meter, flops_per_token, peak_flops
from fsharding.apps.cli.trace import traced, traces
from fsharding.apps.cli.trackers import Tracker, cut_rows, open_trackers, tracker_files
from fsharding.apps.data import Packed, Shard, Tokens
from fsharding.base import devices
from fsharding.base.calls import named
from fsharding.base.errors import CheckpointError, RankError, printable, report
from fsharding.checkpoint.directory import append, naming_path, survey
from fsharding.checkpoint.replicas import check_replicas
from fsharding.comm.counters import Counts, record_collectives
from fsharding.mesh import preemption
from fsharding.mesh.abstract_mesh import parse_axes
from fsharding.mesh.consistency import agree
from fsharding.mesh.device_mesh import data_rank_and_size, everyone, make_mesh, own_rank
from fsharding.mesh.failures import among, naming_lost, world_size, write_stacks
from fsharding.models.model import Model
from fsharding.models.presets import Recipe, recipe
from fsharding.pipeline.plots import has_matplotlib
from fsharding.sharding.layout import Layout, plan_layout
from fsharding.sharding.strategy import Strategy
from fsharding.train.evaluate import Evaluate, evaluate
from fsharding.train.reshard import reshard
from fsharding.train.state import TrainState, init_state, state_bytes
from fsharding.train.step import Metrics, make_train_step

__all__ = ["train"]

Step: TypeAlias = Callable[[TrainState, fs.tree.Tree], tuple[TrainState, Metrics]]


@named("fsharding train")
def train(config: TrainConfig) -> int:
    """Trains on the ranks that are there: this process alone, or those that a launcher started.

    Returns:
        The exit status: 0, or `preempt_status` where a signal or the deadline has stopped the run before its end.

    Raises:
        NonFiniteError: loss or gradients are not finite; the last checkpoint is intact.
        CheckpointError: saving or loading failed.
        ConfigError: the ranks were started with different options, or see different data; the text says who has what.
        RankError: a rank is lost; where the others stand is in the file of `out` that the text names.
    """
    deadline = preemption.parse_deadline(config.deadline) if config.deadline else None
    with preemption.watch((*preemption.SIGNALS, signal.SIGINT), deadline=deadline) as watch:
        try:
            stopped = _train(config, watch)
        except RankError as error:
            write_stacks(error, config.out)
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return config.preempt_status if stopped else 0


def _train(config: TrainConfig, watch: preemption.Watch | None = None) -> bool:
    """Trains; whether it was told to stop before the last step."""
    os.environ.setdefault("FSHARDING_DISK", str(config.out))
    chosen = recipe(config.preset)
    model = model_of(config)
    schedule = _schedule(config, chosen)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(config.clip), _optimizer(config, chosen, schedule))
    swaps = {swap.step: swap for swap in parse_swaps(config.swap_at)}
    with ExitStack() as held:
        begun = _begin(config, model, opt, [*swaps.values()], held)
        return _run(config, watch, _Plan(model, opt, schedule, swaps), begun)


class _Plan(NamedTuple):
    """A model, and how a run trains it."""

    model: Model
    opt: fs.optim.GradientTransformation
    schedule: fs.optim.Schedule
    swaps: dict[int, Swap]


class _Begun(NamedTuple):
    """A run before its first step: what it goes on from, and how many batches that had seen."""

    state: TrainState
    data: Tokens | Packed
    checkpoint: Path | None
    first: int


def _run(config: TrainConfig, watch: preemption.Watch | None, plan: _Plan, begun: _Begun) -> bool:
    """All steps that are left; whether it was stopped."""
    model, opt, schedule, swaps = plan
    state, data, checkpoint, first = begun
    step = _step(config, model, opt, state)
    mesh = state.layout.mesh
    validation = open_validation(config)
    validate = _evaluate(config, model, state)
    leader = own_rank() == 0
    saved = first if checkpoint is not None and _is_own(config, checkpoint) else -1
    if first < config.steps:
        data.batch(first, Shard(*data_rank_and_size(mesh)))  # what cannot be read is found before a file changes
        if validation is not None:
            validation.batch(0, Shard(*data_rank_and_size(mesh)))
    pace = _Pace(state_bytes(state))
    if watch is not None:
        watch.margin = pace.margin()
    done = first
    stopped = preemption.requested(mesh)
    with _log(config, checkpoint, first, _meter(config, state) if leader else None) as log:
        for number in range(first, config.steps):
            if stopped:
                break
            pace.begin()
            if number in swaps and number > first:
                state = _swap(config, state, swaps[number])
                step = _step(config, model, opt, state)
                validate = _evaluate(config, model, state)
            began = time.perf_counter()
            mesh = state.layout.mesh
            rate = schedule(int(state.step))
            tracing = traced(config.out, number + 1, own_rank()) if number + 1 == config.trace else nullcontext()
            with tracing, record_collectives() as counts:
                state, metrics = step(state, _batch(data, number, mesh))
                seconds = time.perf_counter() - began
            done = number + 1
            stopped = preemption.requested()
            loss = None
            if validation is not None and not stopped and _is_due(config, done):
                loss = _validation_loss(config, validate, state, validation)
            log.write(done, metrics, counts, rate, state_bytes(state), seconds, loss)
            if config.check_replicas_every and done % config.check_replicas_every == 0:
                check_replicas(state)
            if config.save_every and done % config.save_every == 0:
                with pace.saving():
                    _save(config, state, data, done)
                saved = done
                # Asked of all ranks: what came while it was saved needs no further step.
                stopped = stopped or preemption.requested(state.layout.mesh)
            if watch is not None:
                watch.margin = pace.margin()
        if saved != done:
            _save(config, state, data, done)
        stopped = stopped and done < config.steps
        log.finish(f"{done} of {config.steps}: {watch.reason() if watch else ''}" if stopped else "")
    return stopped


def _begin(
    config: TrainConfig, model: Model, opt: fs.optim.GradientTransformation, swaps: list[Swap], held: ExitStack
) -> _Begun:
    """Make or load the first state of a run.

    Args:
        held: keeps the directory of the run locked.

    Raises:
        CheckpointError: another run is there; or a checkpoint is damaged, and there is no older one to go back to.
    """
    skip: set[Path] = set()
    alone = False
    while True:
        choice = choose(config.resume, config.checkpoints, skip)
        first = batches_seen(choice.path) if choice.path is not None else 0
        layout = _first_layout(config, model, [swap for swap in swaps if swap.step <= first])
        data = open_tokens(config)
        _agree(config, data, layout.mesh, choice)
        if not alone:
            held.enter_context(alone_in(config.out))
            alone = True
            if choose(config.resume, config.checkpoints, skip) != choice:
                continue  # a run that was ending has saved meanwhile
        _tell(config, choice, first)
        if choice.path is None:
            return _Begun(init_state(model, opt, fs.random.key(config.seed), layout), data, None, 0)
        try:
            position = _position(data) if checkpoint.metadata(choice.path).data is not None else None
            state = checkpoint.load(choice.path, layout, opt=opt, data=position)
            return _Begun(state, data, choice.path, first)
        except CheckpointError:
            if not config.resume_older or not is_damaged(choice.path):
                raise
            skip.add(choice.path)


def _position(data: Tokens | Packed) -> Packed | None:
    """The data, where the number of a step does not say where its rows are without the documents before them."""
    return data if isinstance(data, Packed) else None


def _tell(config: TrainConfig, choice: Choice, first: int) -> None:
    """Says what a run goes on from, and what it passes over."""
    if own_rank() != 0 or not config.resume:
        return
    where = f"goes on from {choice.path}, after {first} batches" if choice.path is not None else "starts a new run"
    rows = [f"  passed over {row}" for row in choice.passed]
    rows += _changes(config, choice.path) if choice.path is not None else []
    if choice.path is not None and _is_own(config, choice.path) and first and not config.metrics.exists():
        rows.append(f"  {config.metrics} is gone: a new one begins here")
    print("\n".join([where, *map(printable, rows)]), file=sys.stderr if config.json else sys.stdout, flush=True)


_TOLD_CHANGES = (
    "lr", "decay_steps", "clip", "dtype", "batch", "seq", "seed", "microbatches", "strategy", "offload", "mesh",
    "schedule", "attention", "policy", "swap_at",
)  # fmt: skip
"""Options that may change when a run is resumed, and that affect its numbers, memory or speed."""


def _changes(config: TrainConfig, path: Path) -> list[str]:
    """One row for each option that is another one than when a checkpoint was saved."""
    extra = checkpoint.metadata(path).extra
    before: Any = extra.get("config") if isinstance(extra, dict) else None
    rows: list[str] = []
    for name in _TOLD_CHANGES if isinstance(before, dict) else ():
        then = str(before.get(name))
        now = str(getattr(config, name))
        if name in before and then != now:
            words = [text if text not in ("", "None") else "left out" for text in (then, now)]
            rows.append(f"  --{name.replace('_', '-')}: {words[0]} in the checkpoint, {words[1]} now")
    return rows


def _is_own(config: TrainConfig, checkpoint: Path) -> bool:
    """Whether a checkpoint is one of the run's own directory."""
    return os.path.realpath(checkpoint.parent) == os.path.realpath(config.checkpoints)


class _Pace:
    """How long steps and saves take, from which follows how long before a deadline a run has to stop.

    Args:
        size: bytes of a rank's state.
    """

    def __init__(self, size: int) -> None:
        self._step = 0.0
        self._save = size / _UNMEASURED
        self._measured = False
        self._began: float | None = None

    def begin(self) -> None:
        """Begin a step; the time since the last one, without saves, is its duration."""
        now = time.perf_counter()
        if self._began is not None:
            self._step = max(self._step, now - self._began)
        self._began = now

    @contextmanager
    def saving(self) -> Generator[None]:
        """The time inside counts as a save."""
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        self._save = max(self._save, took) if self._measured else took
        self._measured = True
        if self._began is not None:
            self._began += took

    def margin(self) -> timedelta:
        """The bit is set in the middle of a step, and goes along with the next one at the latest."""
        return timedelta(seconds=_EXIT_S + 2 * self._step + 2 * self._save)


_UNMEASURED = 1e8
"""Bytes a second at which a save is reckoned until there was one."""

_EXIT_S = 5.0
"""For the end of all processes."""


def _step(config: TrainConfig, model: Model, opt: fs.optim.GradientTransformation, state: TrainState) -> Step:
    """The step of a run on the mesh where its state is."""
    return make_train_step(
        model,
        opt,
        microbatches=config.microbatches,
        schedule=schedule_of(config, state.layout.mesh) or config.schedule,
        donate=True,
        policy=fs.policies.POLICIES[policy_of("fsharding train", config.offload, config.policy)],
    )


def _evaluate(config: TrainConfig, model: Model, state: TrainState) -> Evaluate:
    """The validation of a run on the mesh where its state is."""
    schedule = schedule_of(config, state.layout.mesh) or config.schedule
    return evaluate(model, microbatches=config.microbatches, schedule=schedule)


def _is_due(config: TrainConfig, done: int) -> bool:
    """Whether a validation follows a step."""
    return done == config.steps or (config.val_every > 0 and done % config.val_every == 0)


def _validation_loss(config: TrainConfig, validate: Evaluate, state: TrainState, data: Tokens | Packed) -> float:
    """The mean loss of the first `val_batches` batches. Collective; forward only."""
    total = 0.0
    count = 0.0
    for number in range(config.val_batches):
        loss = validate(state, _batch(data, number, state.layout.mesh))
        total = total + float(loss.sum)
        count = count + float(loss.count)
    return total / count if count else math.nan


def _batch(data: Tokens | Packed, number: int, mesh: Any) -> dict[str, torch.Tensor]:
    """This rank's part of a global batch, on its device."""
    batch = ops.cut_sequence(data.batch(number, Shard(*data_rank_and_size(mesh))), mesh=mesh)
    return {k: v.to(_device(mesh)) for k, v in batch.items()}


_OWN = {
    "config", "data", "deadline", "grace", "json", "log", "log_every", "out", "peak_tflops", "plot", "preempt_status",
    "ranks", "timeout", "tokenizer", "trace", "val_data",
}  # fmt: skip
"""Options that ranks on several machines may have each of their own."""


@named("fsharding train")
def _agree(config: TrainConfig, data: Tokens | Packed, mesh: Any, choice: Choice) -> None:
    """Refuses ranks that were started with different options, or that see different data or other checkpoints."""
    facts = {f"--{k.replace('_', '-')}": str(v) for k, v in asdict(config).items() if k not in _OWN}
    facts["fingerprint of --data"], ranks = data.fingerprint(), everyone(mesh)
    validation = open_validation(config)
    facts["fingerprint of --val-data"] = "none" if validation is None else validation.fingerprint()
    facts["checkpoint to go on from"] = "none" if choice.path is None else choice.path.name
    with naming_lost("fsharding train", mesh):
        agree(facts, ranks=ranks.ranks, group=ranks.process_group, device=_device(mesh))


def _device(mesh: Any) -> str:
    return mesh.device_type


def _mesh(config: TrainConfig, text: str) -> Any:
    axes: dict[str, Any] = {"dp": -1, **parse_axes(text)}
    return make_mesh(timeout=timedelta(seconds=config.timeout), **axes)


def _first_layout(config: TrainConfig, model: Any, swaps: list[Swap]) -> Layout:
    """The layout that a run begins or goes on with: the option's, or after the swaps that it has seen."""
    strategy = next((swap.strategy for swap in reversed(swaps) if swap.strategy), config.strategy)
    dtype = next((swap.dtype for swap in reversed(swaps) if swap.dtype), config.dtype)
    text = next((swap.mesh for swap in reversed(swaps) if swap.mesh), config.mesh)
    mesh = _mesh(config, text)
    return plan_layout(
        model,
        mesh,
        strategy=_strategy(config, strategy),
        precision=PRECISIONS[dtype],
        stages=stages(config, mesh),
    )


def _strategy(config: TrainConfig, name: str) -> Strategy:
    return offloaded("fsharding train", name, config.offload)


def _swap(config: TrainConfig, state: TrainState, swap: Swap) -> TrainState:
    """Moves the state, which is let go as it leaves, to another strategy, precision or mesh."""
    layout = state.layout
    if swap.mesh:
        mesh = _mesh(config, swap.mesh)
        layout = layout.with_mesh(mesh, stages(config, mesh) or {})
    if swap.dtype:
        layout = layout.with_precision(PRECISIONS[swap.dtype])
    if swap.strategy:
        layout = layout.with_strategy(_strategy(config, swap.strategy))
    return reshard(state, layout, donate=True)


def _save(config: TrainConfig, state: TrainState, data: Tokens | Packed, batches: int) -> None:
    """Save under the number of batches seen: the number of updates, and of steps that a loss scale skipped."""
    options = {k: str(v) for k, v in asdict(config).items()}
    extra = {"preset": config.preset, "data": data.fingerprint(), "batches": batches, "config": options}
    keeper = checkpoint.Checkpointer(config.checkpoints, keep=config.keep, background=False, data=_position(data))
    keeper.save(state, extra, number=batches)


def _meter(config: TrainConfig, state: TrainState) -> Meter:
    """Measures the steps of a run; its utilization has no peak on a CPU unless the user gives one."""
    kind = _device(state.layout.mesh)
    peak = 1e12 * config.peak_tflops if config.peak_tflops is not None else None
    if peak is None and kind != "cpu":
        peak = peak_flops(devices.name_of(kind), PRECISIONS[config.dtype].activation_dtype or torch.float32)
    flops = flops_per_token(recipe(config.preset).config, state.layout.leaves, config.seq)
    return Meter(flops, dist.get_world_size() if dist.is_initialized() else 1, kind, peak)


def _schedule(config: TrainConfig, chosen: Recipe) -> fs.optim.Schedule:
    """Warm-up, then constant: independent of the number of steps, so that a longer run begins as a shorter one."""
    peak = config.lr or chosen.learning_rate * OPTIMIZERS[config.optimizer]
    if config.decay_steps:
        return fs.optim.schedules.warmup_cosine(peak, chosen.warmup, config.decay_steps, end=peak / 10)
    return lambda count: peak * min(1.0, (count + 1) / chosen.warmup)


def _optimizer(config: TrainConfig, chosen: Recipe, schedule: fs.optim.Schedule) -> fs.optim.GradientTransformation:
    """Weights that are no norms and no biases decay; Muon has the matrices of blocks, and AdamW what is left."""

    def make(decay: float) -> fs.optim.GradientTransformation:
        if config.optimizer == "lion":
            return fs.optim.lion(schedule, weight_decay=decay / OPTIMIZERS["lion"])
        if config.optimizer == "adafactor":
            return fs.optim.adafactor(schedule, weight_decay=decay / OPTIMIZERS["adafactor"])
        return fs.optim.adamw(schedule, weight_decay=decay)

    def group(path: str, leaf: Any) -> str:
        last = path.rpartition(".")[2]
        if "norm" in last or "bias" in last:
            return "vector"
        return "stacked" if config.optimizer == "muon" and labels(path, leaf) == "matrix" else "matrix"

    # Muon takes the rates of AdamW when its updates have about the same size.
    muon = fs.optim.muon(schedule, weight_decay=chosen.weight_decay, adjust="match_rms_adamw")
    labels = fs.optim.label_matrices()
    groups = {"matrix": make(chosen.weight_decay), "vector": make(0.0)}
    return fs.optim.multi_transform({**groups, "stacked": muon} if config.optimizer == "muon" else groups, group)


_WIDTH = 80
_BAR = 10
"""Columns of a terminal, and of the bar in it."""


def _joined(parts: Sequence[str], width: int) -> str:
    """The first parts that fit into a line, the most important one first; parts that are empty are left out."""
    result = ""
    for part in filter(None, parts):
        if result and len(result) + 2 + len(part) > width:
            break
        result = f"{result}  {part}" if result else part
    return result


def _short(rate: float) -> str:
    """A rate in at most five characters."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= 10 * limit:
            return f"{rate / limit:,.0f}{unit}"
    return f"{rate:.0f}"


class _Log:
    """Metrics and progress of rank 0; the other ranks have one that does nothing."""

    def __init__(self, config: TrainConfig, first: int, meter: Meter) -> None:
        self.config = config
        self.first = first
        self.meter = meter
        self.file = config.metrics.open("ab", buffering=0)
        self.opened = os.fstat(self.file.fileno())
        self.trackers: list[Tracker] = []
        self.val = ""
        console = Console(stderr=config.json)
        self.out = console.file
        self.every = math.inf if console.is_terminal else config.log_every
        self.told = -math.inf
        self.progress = Progress(
            BarColumn(_BAR), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn(),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.progress.add_task("train", total=config.steps, completed=first, text="")
        self.progress.start()

    def write(
        self, step: int, m: Metrics, counts: list[Counts], lr: float, size: int, seconds: float, val: float | None
    ) -> None:
        tokens = int(m.weight)
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
            for tracker in self.trackers:
                tracker.write(step, {k: v for k, v in {**row, **rates}.items() if k != "step"})
        if val is not None:
            self.val = f"val {val:.4f}"
        said = [f"loss {float(m.loss):.4f}", self.val, f"{_short(tokens / seconds)} tokens/s"]
        said += [f"MFU {rates['mfu']:.1%}"] if "mfu" in rates else []
        said += [f"lr {lr:.2e}", f"peak {rates['peak_memory_bytes'] / 1e6:,.0f} MB"]
        count = f"{step}/{self.config.steps}"
        if math.isinf(self.every):
            # Bar, count and remaining time stand beside it.
            self.progress.update(self.task, completed=step, text=_joined(said, _WIDTH - _BAR - len(count) - 11))
        elif step == self.config.steps or time.monotonic() >= self.told + self.every:
            self.told = time.monotonic()
            print(_joined([f"step {count}", *said], _WIDTH), file=self.out, flush=True)

    def _check_there(self) -> None:
        """Refuses to go on when the file that it writes is no longer the one under its name."""
        try:
            there = os.path.samestat(os.stat(self.config.metrics), self.opened)
        except FileNotFoundError:
            there = False
        if not there:
            rule = f"has lost {self.config.metrics}: it was removed or replaced while the run went on."
            mend = "Start again in a directory that nothing else clears up; what was saved there is gone as well."
            mend = (
                mend if not self.config.checkpoints.exists() else "Go on from the newest checkpoint with --resume auto."
            )
            raise CheckpointError(report(f"fsharding train {rule}", mend=mend))

    def finish(self, stopped: str = "") -> None:
        # Drawing takes longer than what a run that is stopped may have left.
        undrawn = "" if stopped or not self.config.plot else self._draw()
        drawn = self.config.plot and not (stopped or undrawn)
        steps = 0
        loss = None
        for row in metrics_rows(self.config.metrics):
            steps = steps + 1
            loss = row["loss"]
        self.progress.stop()
        if self.config.json:
            row = {"steps": steps, "loss": loss, "out": str(self.config.out)}
            print(json.dumps({**row, "stopped": stopped} if stopped else row), flush=True)
            return
        if stopped:
            where = checkpoint.latest(self.config.checkpoints)
            print(f"stopped at step {stopped}; saved {where}; the same command with --resume auto goes on", flush=True)
            return
        text = f"loss {loss:.4f}" if loss is not None else "loss not finite"
        last = f"{text} after {steps} steps" if steps else "no steps"
        files = "metrics, plot and checkpoints" if drawn else "metrics and checkpoints"
        print(f"{last}; {files} in {self.config.out}", flush=True)
        if undrawn:
            print(f"no plot was drawn: {undrawn}", flush=True)

    def _draw(self) -> str:
        """Draw the plot; return why it could not be drawn, or ""."""
        if not has_matplotlib():
            return "matplotlib is not installed (pip install 'fsharding[plot]')"
        path = self.config.out / "loss.png"
        try:
            with naming_path(path):
                plot_loss(self.config.metrics, path)
        except OSError as error:
            return str(error)
        return ""

    def close(self) -> None:
        self.progress.stop()
        self.file.close()
        with ExitStack() as stack:  # each is closed, whatever becomes of the others
            for tracker in self.trackers:
                stack.callback(tracker.close)


class _Silent(_Log):
    def __init__(self) -> None:
        """Opens nothing."""

    def write(
        self, step: int, m: Metrics, counts: list[Counts], lr: float, size: int, seconds: float, val: float | None
    ) -> None:
        """Says nothing."""

    def finish(self, stopped: str = "") -> None:
        """Draws nothing."""

    def close(self) -> None:
        """Has nothing to close."""


@contextmanager
def _log(config: TrainConfig, checkpoint: Path | None, first: int, meter: Meter | None) -> Generator[_Log]:
    """Opens the log of a run: cut back to the step that it resumes from, or new beside what an earlier run left.

    Args:
        checkpoint: that it resumes from, if any.
        first: steps that it has behind it.
        meter: of rank 0; None on the others, whose log writes nothing.
    """
    with _writing(config.out):
        if meter is not None and checkpoint is not None and _is_own(config, checkpoint):
            _set_aside(config, [one.path for one in survey(config.checkpoints) if one.number > first])
            cut_rows(config.metrics, first)
        elif meter is not None:
            plot = config.out / "loss.png"
            files = (config.metrics, config.checkpoints, plot, traces(config.out), *tracker_files(config.out))
            _set_aside(config, [p for p in files if p.exists()])
    if dist.is_initialized():
        with among(range(world_size())):
            dist.barrier()
    log = _Log(config, first, meter) if meter is not None else _Silent()
    try:
        if meter is not None:
            options = {k: str(v) for k, v in asdict(config).items()}
            with _writing(config.out):
                log.trackers = open_trackers(config.log, config.out, first, options)
        yield log
    finally:
        log.close()


@contextmanager
def _writing(path: Path) -> Generator[None]:
    """Word an error of the file system, such as a full disk, with the path.

    Raises:
        CheckpointError: in place of an OSError.
    """
    try:
        with naming_path(path):
            yield
    except OSError as error:
        rule = f"cannot write {error.filename}: {error.strerror or error}."
        mend = "Make room there, then continue from the newest checkpoint with --resume auto."
        raise CheckpointError(report(f"fsharding train {rule}", mend=mend)) from error


def _set_aside(config: TrainConfig, left: Sequence[Path]) -> None:
    """Moves what an earlier run left in `out` to `out/earlier-N`: a new run neither mixes with it nor loses it.

    So do newer checkpoints than the one that a run goes on from: of a later start, the newest has to be its own.
    """
    if left:
        number = next(n for n in range(1, 10**6) if not (config.out / f"earlier-{n}").exists())
        aside = config.out / f"earlier-{number}"
        aside.mkdir()
        for path in left:
            path.rename(aside / path.name)
