"""What tests of the command line share: the environment that a command is started in, and the losses that a run wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fsharding.apps.cli.metrics import metrics_rows


def clean_environment(**env: str) -> dict[str, str]:
    """This process's environment without a launcher's variables, so that a command starts ranks of its own."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONWARNINGS")
    return {**{name: value for name, value in os.environ.items() if name not in dropped}, **env}


def losses(out: Path) -> list[float]:
    """The loss of each step that a run in this directory has logged."""
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file that are well-formed."""
    return [*metrics_rows(path)]
