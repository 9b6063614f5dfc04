"""`--log`: metrics in TensorBoard and Weights & Biases; after a resume, no step is logged twice."""

import json
import math
import os
from contextlib import ExitStack
from pathlib import Path

from fsharding.apps.cli.metrics import metrics_rows

__all__ = ["Trackers"]

_GROUPS = {
    "loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr", "tokens": "train/tokens",
    "val_loss": "val/loss", "tokens_per_s": "speed/tokens_per_s", "tokens_per_s_rank": "speed/tokens_per_s_rank",
    "step_s": "speed/step_s", "mfu": "speed/mfu", "state_bytes": "memory/state_bytes",
    "gathered_peak_bytes": "memory/gathered_peak_bytes", "peak_memory_bytes": "memory/peak_bytes",
}  # fmt: skip


class Trackers:
    """The trackers with given names, for the steps after `first`; leaving `held` closes them."""

    def __init__(self, names: tuple[str, ...], out: Path, first: int, options: dict[str, str], held: ExitStack):
        self._board = self._wandb = None
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
                resume="allow" if mode == "online" else None, config=options,
                mode=mode,  # pyright: ignore[reportArgumentType]  # wandb refuses what it does not know
                settings=wandb.Settings(console="off", silent=True),
            )  # fmt: skip
            held.callback(self._wandb.finish)

    def write(self, step: int, row: dict[str, float | None]) -> None:
        """Add the numbers of a step; None for one that is not finite."""
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
