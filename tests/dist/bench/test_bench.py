"""Benchmarks measure what they say, on sizes that take no time: who takes part, equal losses, bytes that follow."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from bench import memory, overhead, pipeline
from bench.optimizer import bench_optimizer
from bench.options import OptimizerConfig, OverheadConfig, PipelineConfig, StepConfig
from bench.rounds import agree
from bench.step import OURS, PEERS, check, measure
from fsharding.base.errors import ConfigError
from fsharding.mesh.device_mesh import make_mesh
from fsharding.testing import run_ranks
from tests.commands import clean_environment
from tests.helpers import full, slow

ALL = ("compute-only", "ddp", "fsdp2", "fsharding-zero0", "fsharding-zero1", "fsharding-zero2", "fsharding-zero3")
SMALL = {"preset": "tiny", "batch": 1, "seq_len": 16, "rounds": 2}


def measured(config):
    return measure(config, make_mesh(dp=-1, device="cpu", timeout=timedelta(seconds=20)))


def test_everyone_trains_the_same_and_is_measured():
    rows = {row["contender"]: row for row in run_ranks(measured, 2, StepConfig(**SMALL))[0]}
    assert tuple(rows) == ALL
    losses = [row["loss"] for name, row in rows.items() if name != "compute-only"]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
    for name, row in rows.items():
        assert row["median_ms"] > 0 and row["ranks"] == 2
        assert (row["floor_ms"] is not None) == (row["sent_ms"] is not None) == name.startswith("fsharding")
        assert row["floor_ms"] is None or row["floor_ms"] > row["wire_ms"] > 0
    peak = {name: row["peak_bytes"] for name, row in rows.items()}
    assert peak["fsharding-zero3"] < peak["fsharding-zero0"] < 1.5 * peak["ddp"]


def test_a_contender_set_up_in_another_way_trains_the_same():
    names = ("fsdp2", "fsdp2-default", "fsharding-zero3", "fsharding-zero3-first-dims")
    losses = [row["loss"] for row in run_ranks(measured, 2, StepConfig(**SMALL, contenders=names))[0]]
    assert losses[0] == losses[1] and losses[2] == losses[3]


def counted(config):
    mesh = make_mesh(dp=-1, device="cpu", timeout=timedelta(seconds=20))
    return (memory if isinstance(config, StepConfig) else overhead).measure(config, mesh)


def test_ours_are_also_measured_with_every_byte_sent():
    times = {row["contender"]: row for row in run_ranks(counted, 2, OverheadConfig(units=2, leaves=2, rounds=1))[0]}
    assert [*times] == ["fsharding-zero3", "fsdp2"]
    assert times["fsharding-zero3"]["sent_ms"] > 0 and times["fsdp2"]["sent_ms"] is None
    config = StepConfig(**SMALL, contenders=("fsdp2", "fsharding-zero3"))
    bytes_ = {row["contender"]: row["sent_peak_bytes"] for row in run_ranks(counted, 2, config)[0]}
    assert bytes_["fsdp2"] is None and bytes_["fsharding-zero3"] > 0


def schedules(config):
    return pipeline.measure(config, make_mesh(pp=2, device="cpu", timeout=timedelta(seconds=20)))


def test_schedules_train_the_same_and_are_compared_with_the_first():
    config = PipelineConfig(preset="tiny", batch=1, seq_len=16, microbatches=4, rounds=1)
    rows = run_ranks(schedules, 2, config)[0]
    assert tuple(row["schedule"] for row in rows) == config.schedules
    assert len({row["loss"] for row in rows}) == 1, "the same in every bit, whatever the schedule"
    assert rows[0]["ratio"] == 1.0 and rows[0]["idle"] > rows[-1]["idle"] > 0
    resting = run_ranks(schedules, 2, replace(config, rest=1.0, seq_len=2, schedules=("1f1b", "zbv", "dualpipev")))[0]
    assert len({row["loss"] for row in resting}) == 1, "halves of a backward that rest give the same gradients"
    # 3 (m + p - 1) blocks of time, and 3 v m + p - 1 halves of such ones.
    assert [row["simulated_ratio"] for row in resting] == [1.0, 25 / 30, 25 / 30]
    # Each of 2 blocks a rank rests three times for each of 4 microbatches, if nothing else took any time.
    assert all(row["median_ms"] >= 24 for row in resting)
    with pytest.raises(ConfigError, match=r"zbw: not known\. Did you mean 'zbv'"):
        pipeline.check(PipelineConfig(schedules=("zbw",)))


def test_a_time_counts_only_where_losses_agree():
    agree({"fsharding": [4.0, 1e-6], "ddp": [4.00001, 1e-6], "compute-only": [4.0]}, 1e-5)
    with pytest.raises(AssertionError, match=r"step 1: ddp has a loss of 3\.1, fsharding of 3\.0"):
        agree({"fsharding": [4.0, 3.0], "ddp": [4.0, 3.1]}, 1e-5)


def test_an_update_is_that_of_torch_and_is_measured(capsys):
    bench_optimizer(OptimizerConfig(preset="tiny", leaves=20, size=70, rounds=2, json=True))
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["contender"], row["leaves"]) for row in rows] == [
        (name, leaves) for leaves in (12, 20) for name in ("fsharding", "torch-fused")
    ]
    assert [row["elements"] for row in rows[2:]] == [1400, 1400] and all(row["median_ms"] > 0 for row in rows)


@full
@pytest.mark.timeout(660)  # torch compiles the blocks of four contenders on both ranks
@pytest.mark.parametrize("how", [{"dtype": "bfloat16"}, {"compiled": True}], ids=str)
def test_other_dtypes_and_compiled_blocks(how):
    contenders = ("ddp", "fsdp2", "fsharding-zero3", "fsharding-hybrid")
    config = StepConfig(**SMALL, **how, contenders=contenders)
    rows = run_ranks(measured, 2, config, timeout=600)[0]
    assert [row["contender"] for row in rows] == [*contenders]
    assert all((row["dtype"], row["compiled"]) == (config.dtype, config.compiled) for row in rows)


def test_what_cannot_be_measured_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else name)
    with pytest.raises(ConfigError) as caught:
        check(StepConfig(contenders=("ddp", "deepspeed-zero3", "ours")))
    assert str(caught.value) == (
        "cannot measure this.\n"
        "  deepspeed-zero3: its package is not installed\n"
        "  ours: not known\n"
        f"Contenders are {', '.join([*PEERS, *OURS])}."
    )


ROOT = Path(__file__).resolve().parents[3]


def bench(*args):
    command = [sys.executable, "-W", "error", "-m", "bench", *args]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, env=clean_environment(), cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)["rows"]


@slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("overhead --units 2 --leaves 2 --rounds 1", ["fsharding-zero3", "fsdp2"]),
        ("memory --preset tiny --seq-len 16 --contenders ddp fsharding-zero3", ["ddp", "fsharding-zero3"]),
        (
            "scaling --ranks 1 2 --units 1 2 --dims 64 --rounds 1",
            ["fsharding-zero3"] * 2 + ["fsdp2", "fsharding-zero3"] * 2,
        ),
        ("checkpoint --mb 1 --rounds 1", ["fs.checkpoint.save", "dcp.save", "fs.checkpoint.load", "dcp.load"]),
        ("reshard --mb 1 --rounds 1", ["dp4 -> tp4", "dp2·tp2 -> pp2·dp2"]),
        ("pipeline --preset tiny --microbatches 2 --seq-len 16 --rounds 1 --schedules 1f1b zbv", ["1f1b", "zbv"]),
    ],
)
def test_the_command_starts_ranks_and_prints_what_it_measured(line, names):
    rows = bench(*line.split(), "--json")
    first = {"checkpoint": "call", "reshard": "case", "pipeline": "schedule"}.get(line.split()[0], "contender")
    assert [row[first] for row in rows] == names


@slow
@pytest.mark.timeout(300)
def test_a_step_is_drawn(tmp_path):
    path = tmp_path / "bars.png"
    bench(
        *[
            "step",
            "--preset",
            "tiny",
            "--seq-len",
            "16",
            "--rounds",
            "1",
            "--json",
            "--contenders",
            "compute-only",
            "fsharding-zero3",
            "--plot",
        ],
        str(path),
    )
    assert path.read_bytes().startswith(b"\x89PNG")
