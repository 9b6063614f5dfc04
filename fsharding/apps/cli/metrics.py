"""Metrics of a run: rows of `metrics.jsonl`, a plot of its losses, trackers of `--log`, and throughput."""

from __future__ import annotations

import io
import json
import math
import os
import resource
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.usage import parse_trackers
from fsharding.base import devices
from fsharding.base.errors import ConfigError, report
from fsharding.base.untrusted import open_plain, parse_json
from fsharding.checkpoint.directory import append, naming_path
from fsharding.models.decoder import DecoderConfig
from fsharding.pipeline.plots import save_figure

__all__ = [
    "PEAK_TFLOPS", "Meter", "Trackers", "cut_rows", "flops_per_token", "metrics_rows", "peak_flops", "peak_memory",
    "plot_loss",
]  # fmt: skip


def metrics_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file, with None for non-finite values; stop at a truncated or malformed line."""
    try:
        if not path.exists():
            return
        with io.BufferedReader(cast("io.RawIOBase", open_plain(os.path.realpath(path)))) as file:
            while (line := file.readline(_LONGEST_ROW)) and (row := _row(line)) is not None:
                yield row
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        text = report(f"fsharding train cannot read {path}.", [why], "Move it away, or give another --out.")
        raise ConfigError(text) from error


_LONGEST_ROW = 1 << 16
_MOST_ENTRIES = 1000


def _row(line: bytes) -> dict[str, Any] | None:
    """Parse a row of metrics: its step, an integer, and other numbers or None; None if the line is malformed."""
    try:
        row = parse_json(line, values=_MOST_ENTRIES)
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    plain = all(isinstance(x, float | None) or (isinstance(x, int) and abs(x) < 1 << 62) for x in row.values())
    return row if plain else None


def cut_rows(path: Path, last: int) -> None:
    """Truncate a file of metrics after a step, atomically."""
    part = path.with_name(f".{path.name}.partial")
    with part.open("w") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in metrics_rows(path) if row["step"] <= last)
    part.replace(path)


def plot_loss(metrics: Path, out: Path) -> None:
    """Draw the losses of training and validation, and the gradient norm, over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # lazy: an extra, and slow to import
    from matplotlib.figure import Figure  # lazy: as above

    training = {name: array("d") for name in ("step", "loss", "grad_norm")}
    validation = {name: array("d") for name in ("step", "val_loss")}
    for row in metrics_rows(metrics):
        for curve in (training, validation) if "val_loss" in row else (training,):
            for name, values in curve.items():
                values.append(math.nan if row.get(name) is None else row[name])
    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, norm = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = training["step"]
    loss.plot(steps, training["loss"], linewidth=1.2, label="training")
    if validation["step"]:
        loss.plot(validation["step"], validation["val_loss"], marker=".", linewidth=1.2, label="validation")
        loss.legend()
    loss.set_ylabel("loss (nats a token)")
    last = f"{training['loss'][-1]:.3f} after {len(steps)} steps" if steps else "no steps"
    loss.set_title(f"{metrics.parent.name}: {last}")
    norm.plot(steps, training["grad_norm"], linewidth=0.8, color="tab:gray")
    norm.set_ylabel("gradient norm")
    norm.set_xlabel("step")
    for axes in (loss, norm):
        axes.grid(alpha=0.3)
    save_figure(figure, out)


# ---------------------------------------------------------------------------------------------------------- trackers
_GROUPS = {
    "loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr", "tokens": "train/tokens",
    "val_loss": "val/loss", "tokens_per_s": "speed/tokens_per_s", "tokens_per_s_rank": "speed/tokens_per_s_rank",
    "step_s": "speed/step_s", "mfu": "speed/mfu", "state_bytes": "memory/state_bytes",
    "gathered_peak_bytes": "memory/gathered_peak_bytes", "peak_memory_bytes": "memory/peak_bytes",
}  # fmt: skip


class Trackers:
    """Trackers for the steps after `first`; none gets a step twice, and leaving `held` closes them."""

    def __init__(self, config: TrainConfig, first: int, held: ExitStack) -> None:
        self._json = self._board = self._wandb = None
        out = config.out
        names = parse_trackers(config.log)
        if "json" in names:
            cut_rows(out / "log.jsonl", first)
            self._json = held.enter_context((out / "log.jsonl").open("ab", buffering=0))
        if "tensorboard" in names:
            from torch.utils.tensorboard.writer import SummaryWriter  # lazy: an extra, and slow to import

            self._board = held.enter_context(SummaryWriter(str(out / "tensorboard"), purge_step=first + 1))
        if "wandb" in names:
            import wandb  # lazy: an extra, and slow to import

            # A W&B run can't be truncated: this file records its id and last step, so no step is logged again.
            self._progress = out / "wandb" / "fsharding.json"
            self._progress.parent.mkdir(exist_ok=True)
            self._row = next(metrics_rows(self._progress), {})
            if type(self._row.get("id")) is not int:
                self._row = {"step": 0, "id": int.from_bytes(os.urandom(7))}
            mode = os.environ.get("WANDB_MODE", "offline")
            self._wandb = wandb.init(
                dir=str(out), project=os.environ.get("WANDB_PROJECT", "fsharding"), id=f"{self._row['id']:016x}",
                resume="allow" if mode == "online" else None, config=config.texts,
                mode=mode,  # pyright: ignore[reportArgumentType]  # wandb refuses what it does not know
                settings=wandb.Settings(console="off", silent=True),
            )  # fmt: skip
            held.callback(self._wandb.finish)

    def write(self, step: int, row: dict[str, float | None]) -> None:
        """Add the numbers of a step; None for one that is not finite."""
        if self._json is not None:
            with naming_path(Path(self._json.name)):
                append(self._json.fileno(), f"{json.dumps(row)}\n".encode())
        scalars = {_GROUPS[name]: math.nan if x is None else float(x) for name, x in row.items() if name in _GROUPS}
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        if self._wandb is not None and step > self._row["step"]:
            self._wandb.log(scalars, step=step)
            self._row["step"] = step
            part = self._progress.with_name(".fsharding.json.partial")
            part.write_text(json.dumps(self._row) + "\n")
            part.replace(self._progress)


# --------------------------------------------------------------------------------------------------------- throughput
# TFLOP/s without sparsity from the makers' data sheets, of 16 bit products, and of float32 without TF32, by words of
# the device's name; the first that fits. V100 and T4 have theirs for float16 only.
PEAK_TFLOPS = {
    "V100": (125.0, 15.7), "T4": (65.0, 8.1), "A100": (312.0, 19.5), "A10": (125.0, 31.2), "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3), "H100 PCIe": (756.0, 51.0), "H100 NVL": (835.0, 60.0), "H100": (989.0, 67.0),
    "H200 NVL": (835.0, 60.0), "H200": (989.0, 67.0), "B200": (2250.0, 75.0), "MI300X": (1307.0, 163.4),
}  # fmt: skip
_BFLOAT16_LACKING = ("V100", "T4")


def flops_per_token(config: DecoderConfig, leaves: Iterable[Any], seq: int) -> float:
    """Return the model FLOPs of forward and backward of one token: `6 N + 12 L H Q T`."""
    # From PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). N counts the weights of products that a token
    # meets: only active experts, and the embedding table only if it is also the head. The second term is attention of
    # H heads of size Q in L layers over T tokens, without a discount for the causal mask; where queries and values
    # differ in size, 12 Q is 6 (Q_query + Q_value). Recomputation is not counted: this is model utilization.
    experts = {stack.name: stack.experts or config.experts for stack in config.stacks} or {"experts": config.experts}
    weights = 0.0
    for leaf in leaves:
        room, _, rest = leaf.path.partition(".")
        if room == "blocks":
            if len(leaf.shape) < 3:  # layers of vectors: norms and biases
                continue
            active = experts.get(rest.partition(".")[0]) if len(leaf.shape) == 4 else None
            share = active.active / active.count if active is not None else 1.0
            weights += share * math.prod(leaf.shape)
        elif len(leaf.shape) == 2 and (room == "head" or config.tied):
            weights += math.prod(leaf.shape)
    layers = [stack.layers for stack in config.stacks] or [config.layers]
    widths = 0
    for count, (attention, _) in zip(layers, config.kinds(), strict=True):
        widths += count * attention.heads * (attention.head_dim + attention.value_dim)
    return 6.0 * weights + 6.0 * widths * seq


def peak_flops(device: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device, given by its name, for products of a dtype; None if it is unknown."""
    words = {*device.replace("-", " ").split()}
    name = next((name for name in PEAK_TFLOPS if words.issuperset(name.split())), None)
    if name is None or (dtype == torch.bfloat16 and name in _BFLOAT16_LACKING):
        return None
    half, single = PEAK_TFLOPS[name]
    return 1e12 * (single if dtype == torch.float32 else half)


def peak_memory(device_type: str) -> int:
    """Return the most bytes that this process has used: allocated on an accelerator, resident on a CPU."""
    if devices.is_here(device_type):
        return torch.accelerator.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


@dataclass(frozen=True)
class Meter:
    """Throughput of a run's steps."""

    flops: float  # model FLOPs of a token
    ranks: int
    device_type: str
    peak: float | None  # FLOP/s of one rank's device

    def rates(self, tokens: int, seconds: float) -> dict[str, float]:
        """Return tokens a second of one rank, this rank's peak memory and, if the peak is known, the utilization."""
        rate = tokens / seconds
        result = {"tokens_per_s_rank": rate / self.ranks, "peak_memory_bytes": peak_memory(self.device_type)}
        return result if self.peak is None else {**result, "mfu": self.flops * rate / (self.ranks * self.peak)}
