"""Runs with validation, trackers and traces: they change no bit of the run, and have each step once."""

import importlib.util
import json
import math
import os
import re
from dataclasses import replace

import pytest

from fsharding.apps.cli.config import check
from fsharding.apps.cli.main import main
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.train import traced, train
from fsharding.apps.cli.usage import parse_trackers
from fsharding.base.errors import ConfigError
from tests.commands import read_metrics
from tests.helpers import slow

ALL = ("tensorboard,wandb", "json")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").write_text("to be or not to be, that is the question; " * 40)
    data = str(folder / "text")
    return TrainConfig(folder / "plain", data=data, steps=6, batch=2, seq=32, plot=False)


@pytest.fixture(scope="module")
def plain(config):
    return ran(config)


@pytest.fixture(scope="module")
def tracked(config):
    """The same run with everything, stopped after four steps and started again from the third."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_MODE", raising=False)
        everything = replace(
            config, out=config.out.with_name("tracked"), log=ALL, val_data=config.data, val_every=2, val_batches=2
        )
        everything = replace(everything, trace=2, peak_tflops=0.5)
        ran(replace(everything, steps=4, save_every=3))
        ran(replace(everything, resume="3"))
    return everything


def ran(config):
    check(config, 1)
    train(config)
    return read_metrics(config.metrics)


def events(out):
    """Scalars by name, as TensorBoard shows them: {step: value}, and how often each step stands there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # lazy: slow to import

    reader = EventAccumulator(str(out / "tensorboard"))
    reader.Reload()
    return {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def wandb_history(path, name):
    """(step, value) of the rows in an offline file: records in frames of checksum, length and kind, 7 bytes each."""
    from wandb.proto import wandb_internal_pb2  # lazy: slow to import

    data, at, rows, parts = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:  # no frame begins at the very end of a block
            at += (1 << 15) - at % (1 << 15)
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, parts = wandb_internal_pb2.Record.FromString(parts), b""
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            rows += [(int(items["_step"]), float(items[name]))] if name in items else []
    return rows


@slow
def test_validation_trackers_and_traces_change_no_bit(plain, tracked):
    rows = read_metrics(tracked.metrics)
    same = ("step", "loss", "grad_norm", "lr", "tokens")
    assert [[row[k] for k in same] for row in rows] == [[row[k] for k in same] for row in plain]
    assert {*plain[0]}.isdisjoint({"val_loss", "mfu", "peak_memory_bytes"})


def test_rows_have_the_validation_where_there_was_one(tracked):
    rows = read_metrics(tracked.metrics)
    validated = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    assert [*validated] == [2, 4, 6]
    assert validated[6] < validated[2] < math.log(256) * 1.1
    assert all(row["mfu"] > 0 for row in rows)


def test_the_validation_is_the_loss_of_those_batches(config, tmp_path):
    """At a rate of zero the parameters stay, and one batch of validation is the batch of the first step."""
    still = replace(config, out=tmp_path, steps=1, lr=1e-30, val_data=config.data, val_batches=1)
    (row,) = ran(still)
    assert row["val_loss"] == pytest.approx(row["loss"], rel=1e-6)


def test_the_last_line_names_what_was_written(config, tmp_path, capsys):
    for plot, files in ((False, "metrics and checkpoints"), (True, "metrics, plot and checkpoints")):
        out = tmp_path / str(plot)
        ran(replace(config, out=out, steps=1, plot=plot))
        assert capsys.readouterr().out.rstrip().endswith(f" after 1 steps; {files} in {out}")
        assert (out / "loss.png").exists() == plot and (out / "ckpt" / "1").exists()


def test_tensorboard_has_each_step_once(tracked):
    scalars, rows = events(tracked.out), read_metrics(tracked.metrics)
    assert scalars["train/loss"] == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in rows]
    assert [step for step, _ in scalars["val/loss"]] == [2, 4, 6]
    assert {"speed/mfu", "speed/tokens_per_s", "memory/peak_bytes", "train/lr"} <= {*scalars}


def test_json_has_each_step_once_and_all_numbers(tracked):
    rows = [json.loads(line) for line in (tracked.out / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows] == [row["loss"] for row in read_metrics(tracked.metrics)]
    assert all(row["peak_memory_bytes"] > 0 and row["tokens_per_s_rank"] > 0 for row in rows)


def test_wandb_is_offline_one_run_with_each_step_once(tracked):
    parts = sorted((tracked.out / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert len({part.name.rpartition("-")[2] for part in parts}) == 1, "both starts are one run"
    losses = [x for part in parts for x in wandb_history(next(part.glob("*.wandb")), "train/loss")]
    assert losses == [(row["step"], row["loss"]) for row in read_metrics(tracked.metrics)]
    assert json.loads((tracked.out / "wandb" / "fsharding.json").read_text())["step"] == 6


def test_a_trace_is_whole_and_says_its_rank(tracked):
    assert os.listdir(tracked.out / "trace") == ["step-2-rank-0.json"]
    whole = json.loads((tracked.out / "trace" / "step-2-rank-0.json").read_text())
    assert any("mm" in event.get("name", "") for event in whole["traceEvents"])


def test_a_step_that_fails_leaves_no_trace(tmp_path):
    with pytest.raises(ValueError, match="of the step"), traced(tmp_path, 3, 0):
        raise ValueError("of the step")
    assert not os.listdir(tmp_path)


def test_a_new_run_sets_the_files_of_trackers_aside(tracked, config, tmp_path):
    out = tmp_path / "run"
    once = replace(config, out=out, steps=1, log=("json",), trace=1)
    ran(once)
    ran(once)
    assert {"log.jsonl", "trace", "metrics.jsonl", "ckpt"} <= {*os.listdir(out / "earlier-1")}
    assert len((out / "log.jsonl").read_text().splitlines()) == 1


def test_progress_has_no_utilization_of_an_unknown_device(config, tmp_path, capsys):
    options = ["--data", config.data, "--steps", "1", "--batch", "2", "--seq", "32", "--no-plot"]
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--out", str(tmp_path / "a"), *options])
    said = capsys.readouterr().out
    assert "MFU" not in said and "lr 2" in said and re.search(r"peak [\d,]+ MB\n", said)
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--out", str(tmp_path / "b"), *options, "--peak-tflops", "1", "--val-data", config.data])
    said = capsys.readouterr().out
    assert "MFU" in said and "  val " in said


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_error_before_a_rank_starts(name, config, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else find(module))
    with pytest.raises(
        ConfigError, match=rf"not installed: {name}\.\nInstall them with: pip install 'fsharding\[log\]'"
    ):
        check(replace(config, out=tmp_path / "out", log=(name,)), 1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"log": ("tensorbord",)}, r"knows no --log 'tensorbord'\.[\s\S]*Did you mean 'tensorboard'\?"),
        ({"val_every": 2}, "--val-every without --val-data: pass both"),
        ({"val_batches": 0}, "--val-batches 0: at least 1"),
        ({"trace": 7}, "--trace 7: at most the 6 of --steps"),
        ({"peak_tflops": 0.0}, "--peak-tflops 0.0: above 0"),
    ],
)
def test_options_that_no_run_can_have(change, text, config, tmp_path):
    with pytest.raises(ConfigError, match=text):
        check(replace(config, out=tmp_path / "out", **change), 1)
    assert not (tmp_path / "out").exists()


def test_names_with_commas_and_several_options():
    assert parse_trackers(["json, wandb", "json", ""]) == ("json", "wandb")
