"""Runs of one process: what they go on with, what they leave behind, and what they say."""

import importlib.util
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from fsharding import checkpoint
from fsharding.apps.cli import train as runs
from fsharding.apps.cli.config import check
from fsharding.apps.cli.main import main
from fsharding.apps.cli.metrics import plot_loss
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.train import train
from fsharding.base.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from tests.commands import read_metrics
from tests.helpers import slow


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text").write_text("to be or not to be, that is the question; " * 40)
    data = str(tmp_path / "text")
    return TrainConfig(tmp_path / "out", data=data, steps=8, batch=2, seq=32, plot=False)


def losses(config):
    return [row["loss"] for row in read_metrics(config.metrics)]


def ran(config):
    check(config, 1)
    train(config)
    return losses(config)


@slow
def test_batches_that_a_loss_scale_skips_are_not_seen_again(config, tmp_path):
    whole = replace(config, dtype="float16", lr=1e-2)
    found = ran(whole)
    rows = read_metrics(whole.metrics)
    updates = checkpoint.metadata(whole.checkpoints / "8").step
    assert 0 < updates < 8, "some of the first steps overflow"
    assert rows[0]["lr"] == rows[1]["lr"] < rows[-1]["lr"], "the rate is the optimizer's, which a skipped step leaves"
    parts = replace(whole, out=tmp_path / "parts")
    ran(replace(parts, steps=2))
    assert checkpoint.metadata(parts.checkpoints / "2").step < 2
    assert ran(replace(parts, resume="newest")) == found


def test_later_checkpoints_are_set_aside_though_they_have_no_more_updates(config):
    whole = replace(config, dtype="float16", lr=1e-2, save_every=2)
    ran(whole)
    assert checkpoint.metadata(whole.checkpoints / "6").step < 4, "the first steps overflow"
    ran(replace(whole, resume="4", steps=5))
    assert sorted(path.name for path in whole.checkpoints.iterdir()) == ["2", "4", "5"]
    assert sorted(path.name for path in (whole.out / "earlier-1").iterdir()) == ["6", "8"]
    assert checkpoint.latest(whole.checkpoints).name == "5"


@slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_loss_that_is_not_finite_ends_the_run(config, dtype):
    with pytest.raises(NonFiniteError, match=r"params\.blocks\.down: its gradient is not finite"):
        ran(replace(config, dtype=dtype, lr=1e38, clip=1e38, steps=60))
    rows = read_metrics(config.metrics)
    assert len(rows) < 60 and not config.checkpoints.exists()
    (config.out / "metrics.jsonl").write_text('{"step": 1, "loss": null, "grad_norm": null}\n')
    plot_loss(config.metrics, config.out / "loss.png")
    assert (config.out / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize(("keep", "left"), [(None, ["2", "4", "6", "8"]), (1, ["8"]), (3, ["4", "6", "8"])])
def test_so_many_checkpoints_stay(config, keep, left):
    ran(replace(config, save_every=2, keep=keep))
    assert sorted(p.name for p in config.checkpoints.iterdir()) == left
    with pytest.raises(ConfigError, match="--keep 0: at least 1"):
        check(replace(config, keep=0), 1)


@pytest.mark.parametrize("gone", ["out", "metrics.jsonl"])
def test_a_directory_that_is_removed_ends_the_run(config, gone, monkeypatch):
    def save_and_remove(config, state, data, batches):
        saved(config, state, data, batches)
        if batches == 4:
            shutil.rmtree(config.out) if gone == "out" else config.metrics.unlink()

    saved = runs._save
    monkeypatch.setattr(runs, "_save", save_and_remove)
    mend = "Start again in" if gone == "out" else "Continue from the newest checkpoint with --resume auto."
    with pytest.raises(CheckpointError, match=rf"has lost {config.metrics}: it was removed[\s\S]*{mend}"):
        ran(replace(config, save_every=2))
    assert not config.out.exists() if gone == "out" else checkpoint.latest(config.checkpoints).name == "4"


def test_what_cannot_be_read_leaves_an_earlier_run_alone(config, tmp_path):
    before = ran(replace(config, steps=1))
    np.full(4096, 60_000, dtype=np.uint16).tofile(tmp_path / "wrong.bin")
    with pytest.raises((DataError, ConfigError)):
        ran(replace(config, data=str(tmp_path / "wrong.bin")))
    assert losses(config) == before
    assert sorted(p.name for p in config.out.iterdir()) == [".lock", "ckpt", "metrics.jsonl"]


def test_rows_end_where_something_else_begins(config):
    config.out.mkdir()
    config.metrics.write_text('{"step": 1, "loss": 2.0}\n[1]\n{"step": 2, "loss": 1.0}\n')
    assert [row["step"] for row in read_metrics(config.metrics)] == [1]


def test_the_run_as_one_json_object(config, capsys):
    options = ["--data", config.data, "--steps", "1", "--batch", "2", "--seq", "32", "--no-plot", "--json"]
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--out", str(config.out), *options])
    out, err = capsys.readouterr()
    assert json.loads(out) == {"steps": 1, "loss": losses(config)[0], "out": str(config.out)}
    assert err.startswith("loading torch\n") and "step 1/1" in err


def test_lines_of_progress_come_by_time_and_fit_80_columns(config, capsys, monkeypatch):
    now = iter(range(0, 1000, 4))  # seconds: a step takes 4
    monkeypatch.setattr(runs.time, "monotonic", lambda: next(now))
    options = ["--data", config.data, "--steps", "8", "--batch", "2", "--seq", "32", "--no-plot", "--peak-tflops", "1"]
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--out", str(config.out), *options, "--val-data", config.data, "--val-every", "1"])
    begins, *lines = capsys.readouterr().out.splitlines()
    assert begins == "loading torch"
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/8", "4/8", "7/8", "8/8"]
    assert all(len(line) <= 80 and "loss" in line and "val" in line and "MFU" in line for line in lines[:-1])


@pytest.mark.parametrize("width", [24, 80])
def test_what_does_not_fit_a_line_is_left_out_from_its_end(width):
    parts = ["step 1000000/1000000", "", "loss 2.0000", "val 2.0000", "123k tokens/s", "MFU 40.0%", "lr 1.00e-03"]
    line = runs._joined(parts, width)
    assert len(line) <= width and line.startswith("step 1000000/1000000")
    assert ("loss" in line, "lr" in line) == (width == 80, False)


def test_a_run_without_matplotlib_trains_and_says_that_no_plot_was_drawn(config, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "matplotlib" else find(name, *_))
    options = ["--data", config.data, "--steps", "1", "--batch", "2", "--seq", "32"]
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--out", str(config.out), *options])
    said = capsys.readouterr().out
    assert said.endswith(
        f"metrics and checkpoints in {config.out}\n"
        "no plot was drawn: matplotlib is not installed (pip install 'fsharding[plot]')\n"
    )
    assert not (config.out / "loss.png").exists() and len(losses(config)) == 1


@pytest.mark.parametrize("size", ["x", ""])
def test_a_world_size_that_is_no_number(size, monkeypatch, config, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--out", str(config.out)])
    assert f"got WORLD_SIZE={size!r} from a launcher." in capsys.readouterr().err


def test_a_timeout_that_no_clock_has(config):
    with pytest.raises(ConfigError, match=r"--timeout inf: at most 10,000,000"):
        check(replace(config, timeout=float("inf")), 1)


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"lr": float("inf")}, "--lr inf: finite"),
        ({"decay_steps": 3}, "--decay-steps 3: 0, or at least the 20 of the warm-up"),
    ],
)
def test_rates_that_no_run_can_have(config, change, row):
    with pytest.raises(ConfigError, match=row):
        check(replace(config, **change), 1)
    check(replace(config, decay_steps=20), 1)
