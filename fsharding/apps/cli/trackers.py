"""`--log`: the metrics of a run in TensorBoard, Weights & Biases and JSON, beside `metrics.jsonl`.

In: names of trackers; a row of numbers after each step, on rank 0 alone. Out: files in the directory of the run.
Guarantee: after a resume no step is in a tracker twice. A tracker changes no number of the run.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fsharding.apps.cli.metrics import metrics_rows
from fsharding.base.calls import named
from fsharding.base.errors import ConfigError, did_you_mean, message
from fsharding.checkpoint.directory import append, naming_path

__all__ = ["TRACKERS", "Tracker", "cut_rows", "open_trackers", "parse_trackers", "require_trackers", "tracker_files"]

_FUNCTION = "fsharding train --log"


class Tracker(Protocol):
    """The interface of a tracker."""

    def write(self, step: int, row: Mapping[str, float | None]) -> None:
        """Takes the numbers of a step; None for one that is not finite."""
        ...

    def close(self) -> None:
        """Writes whatever is left."""
        ...


@named("fsharding train")
def parse_trackers(given: Iterable[str]) -> tuple[str, ...]:
    """The names of trackers in an option, each once.

    Args:
        given: of each `--log` its text, with commas between names.

    Raises:
        ConfigError: an unknown name.
    """
    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            mend = f"Use one of {', '.join(TRACKERS)}.{did_you_mean(name, TRACKERS)}"
            raise ConfigError(message(f"knows no --log {name!r}.", mend=mend))
    return tuple(dict.fromkeys(names))


@named(_FUNCTION)
def require_trackers(given: Iterable[str]) -> None:
    """Refuses trackers whose package is missing.

    Args:
        given: of each `--log` its text.

    Raises:
        ConfigError: an unknown name, or a package that is not installed.
    """
    names = parse_trackers(given)
    if missing := [name for name in names if name in _PACKAGES and importlib.util.find_spec(_PACKAGES[name]) is None]:
        text = f"needs packages that are not installed: {', '.join(_PACKAGES[name] for name in missing)}."
        raise ConfigError(message(text, mend="Install them with: pip install 'fsharding[log]'"))


def tracker_files(out: Path) -> list[Path]:
    """The files and directories that trackers write below the directory of a run."""
    return [out / "tensorboard", out / "wandb", out / "log.jsonl"]


def open_trackers(given: Iterable[str], out: Path, first: int, options: Mapping[str, str]) -> list[Tracker]:
    """Opens trackers for the steps after `first`; what they had of later ones is dropped, or not written again.

    Args:
        given: of each `--log` its text.
        first: steps that the run has behind it.
        options: of the run, for trackers that show them.
    """
    return [TRACKERS[name](out, first, options) for name in parse_trackers(given)]


def cut_rows(path: Path, last: int) -> None:
    """Keeps the rows of a file of metrics up to a step; the file is replaced at once.

    Args:
        path: of JSON lines, as `metrics.jsonl`.
    """
    part = path.with_name(f".{path.name}.partial")
    with part.open("w") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in metrics_rows(path) if row["step"] <= last)
    part.replace(path)


_GROUPS = {
    "loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr", "tokens": "train/tokens",
    "val_loss": "val/loss", "tokens_per_s": "speed/tokens_per_s", "tokens_per_s_rank": "speed/tokens_per_s_rank",
    "step_s": "speed/step_s", "mfu": "speed/mfu", "state_bytes": "memory/state_bytes",
    "gathered_peak_bytes": "memory/gathered_peak_bytes", "peak_memory_bytes": "memory/peak_bytes",
}  # fmt: skip


def _grouped(row: Mapping[str, float | None]) -> dict[str, float]:
    """The numbers of a row under the names that dashboards sort into groups; those that are not finite as NaN."""
    return {_GROUPS[name]: math.nan if x is None else float(x) for name, x in row.items() if name in _GROUPS}


class _Json:
    """Rows of JSON in `log.jsonl`, with all numbers: also those that `metrics.jsonl` leaves to the progress bar."""

    def __init__(self, out: Path, first: int, options: Mapping[str, str]) -> None:
        path = out / "log.jsonl"
        cut_rows(path, first)
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, row: Mapping[str, float | None]) -> None:
        with naming_path(Path(self._file.name)):
            append(self._file.fileno(), f"{json.dumps({'step': step, **row})}\n".encode())

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    """Event files in `tensorboard/`. An earlier run's events of later steps are dropped by their reader."""

    def __init__(self, out: Path, first: int, options: Mapping[str, str]) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # lazy: an extra, and slow to import

        self._writer = SummaryWriter(str(out / "tensorboard"), purge_step=first + 1)

    def write(self, step: int, row: Mapping[str, float | None]) -> None:
        for name, value in _grouped(row).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """One run of Weights & Biases in `wandb/`, whatever the number of starts: `wandb sync` joins those of one id.

    A run there cannot be cut back. `fsharding.json` beside it has its id and the last step that it was given, and steps
    up to this one are not written again: they have the numbers that it has already.
    """

    def __init__(self, out: Path, first: int, options: Mapping[str, str]) -> None:
        import wandb  # lazy: an extra, and slow to import

        folder = out / "wandb"
        folder.mkdir(exist_ok=True)
        self._progress = folder / "fsharding.json"
        self._id, self._last = self._before()
        self._run = wandb.init(
            dir=str(out),
            project=os.environ.get("WANDB_PROJECT", "fsharding"),
            id=self._id,
            resume="allow" if self._mode() == "online" else None,
            mode=self._mode(),  # pyright: ignore[reportArgumentType]  # wandb refuses what it does not know
            config=dict(options),
            settings=wandb.Settings(console="off", silent=True),
        )

    @staticmethod
    def _mode() -> str:
        return os.environ.get("WANDB_MODE", "offline")

    def _before(self) -> tuple[str, int]:
        """The id of the run and its last step; a new one where there is none that can be read."""
        row = next(metrics_rows(self._progress), None)
        if row is None or type(row.get("id")) is not int:
            return f"{uuid.uuid4().int >> 67:016x}", 0
        return f"{row['id']:016x}", row["step"]

    def write(self, step: int, row: Mapping[str, float | None]) -> None:
        if step <= self._last:
            return
        self._run.log(_grouped(row), step=step)
        self._last = step
        part = self._progress.with_name(".fsharding.json.partial")
        part.write_text(json.dumps({"step": step, "id": int(self._id, 16)}) + "\n")
        part.replace(self._progress)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _WandB, "json": _Json}
"""Trackers by the name that `--log` takes."""

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
