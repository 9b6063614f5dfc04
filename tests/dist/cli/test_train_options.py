"""Validation, trackers and traces on ranks: the same validation on every mesh, and not one bit of the run changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from fsharding.apps.cli.config import check
from fsharding.apps.cli.metrics import plot_loss
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.train import _train
from fsharding.testing import run_ranks
from tests.commands import clean_environment, read_metrics
from tests.helpers import full, small_disk

pytestmark = pytest.mark.timeout(120)

SMALL = ["--seq", "32", "--batch", "8", "--steps", "3", "--no-plot", "--microbatches", "2", "--timeout", "20"]
VALIDATION = ["--val-data", "default", "--val-every", "2", "--val-batches", "2"]


def run(args: list[str], ranks: int) -> None:
    config = tyro.cli(TrainConfig, args=args)
    check(config, ranks)
    _train(config)


def rows(out: Path, *args: str, ranks: int = 2) -> list[dict[str, float]]:
    run_ranks(run, ranks, ["--out", str(out), *SMALL, *args], ranks)
    return read_metrics(out / "metrics.jsonl")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return rows(tmp_path_factory.mktemp("alone") / "run", *VALIDATION, ranks=1)


def test_offload_changes_no_number(tmp_path: Path):
    plain = rows(tmp_path / "plain", "--dtype", "bfloat16")
    memory = "activations=host,params=disk,moments=disk,grads=host,moments.embed=device"
    away = rows(tmp_path / "away", "--dtype", "bfloat16", "--offload", memory, "--save-every", "2")
    assert [row["loss"] for row in away] == [row["loss"] for row in plain]
    assert sorted(os.listdir(tmp_path / "away")) == sorted([*os.listdir(tmp_path / "plain")]), "no file is left"


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (["--strategy", "zero3"], 2),
        (["--mesh", "pp=2"], 2),
        (["--mesh", "tp=2", "--sequence", "--swap-at", "1=zero1:pp=2,2=zero3:cp=2"], 2),
        pytest.param(["--mesh", "pp=2,dp=2", "--schedule", "zbv", "--strategy", "zero2"], 4, marks=full),
    ],
)
def test_every_mesh_has_the_same_validation_and_it_changes_no_bit(
    options: list[str], ranks: int, alone: list[dict[str, float]], tmp_path: Path
):
    plain = rows(tmp_path / "plain", *options, ranks=ranks)
    extras = [*VALIDATION, "--log", "tensorboard,json", "--trace", "2"]
    validated = rows(tmp_path / "validated", *options, *extras, ranks=ranks)
    for name in ("step", "loss", "grad_norm", "lr"):
        assert [row[name] for row in validated] == [row[name] for row in plain]
    assert ["val_loss" in row for row in validated] == [False, True, True]
    expected = [row["val_loss"] for row in alone[1:]]
    assert [row["val_loss"] for row in validated[1:]] == pytest.approx(expected, rel=1e-5)
    names = sorted(os.listdir(tmp_path / "validated" / "trace"))
    assert names == [f"step-2-rank-{rank}.json" for rank in range(ranks)]
    for name in names:
        assert json.loads((tmp_path / "validated" / "trace" / name).read_text())["traceEvents"]
    assert len((tmp_path / "validated" / "log.jsonl").read_text().splitlines()) == 3, "rank 0 alone writes"
    pictures = [tmp_path / f"{name}.png" for name in ("plain", "validated")]
    for picture in pictures:
        plot_loss(tmp_path / picture.stem / "metrics.jsonl", picture)
    assert pictures[0].read_bytes() != pictures[1].read_bytes(), "the curve of the validation"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_ends_a_run_with_the_path_and_whole_rows(tmp_path: Path, ranks: int):
    with small_disk(tmp_path, 16):
        command = [sys.executable, "-m", "fsharding", "train", "--out", str(tmp_path / "run"), "--ranks", str(ranks)]
        command += [*SMALL, "--steps", "100", "--log", "json"]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=100)
        path = tmp_path / "run" / "metrics.jsonl"
        written = path.read_text()
        read = read_metrics(path)
    assert done.returncode != 0
    assert re.search(rf"fsharding train cannot write {tmp_path}/run/(metrics|log).jsonl: No space left on", done.stderr)
    assert "continue from the newest checkpoint with --resume auto" in done.stderr and "Traceback" not in done.stderr
    assert written.endswith("}\n") and [row["step"] for row in read] == [*range(1, written.count("\n") + 1)]


def test_validation_moves_no_gradient(tmp_path: Path):
    """Of a step that validates, the collectives are those of one that does not: its counts are the step's alone."""
    options = ["--strategy", "zero1"]
    plain = rows(tmp_path / "plain", *options)
    validated = rows(tmp_path / "validated", *options, *VALIDATION)
    assert [row["gathered_peak_bytes"] for row in validated] == [row["gathered_peak_bytes"] for row in plain]
