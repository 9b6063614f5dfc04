"""The command line as a user runs it: real processes, real files, exit statuses and messages."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tyro

from bench.options import OverheadConfig
from bench.overhead import measure
from fsharding.apps.cli.config import check, schedule_of, stages
from fsharding.apps.cli.main import main
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.train import _train
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import make_mesh
from fsharding.pipeline.schedule import plan_schedule
from fsharding.testing import run_ranks
from tests.commands import clean_environment, losses
from tests.helpers import full, until

pytestmark = pytest.mark.timeout(420)

SMALL = ["--seq", "32", "--batch", "8", "--steps", "6"]


def fsharding(*args: str | Path, timeout: float = 200, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "fsharding", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=clean_environment(**env))


def train(out: Path, *args: str, ranks: int = 2) -> list[float]:
    """A run on ranks that wait already: starting processes is what takes long."""
    run_ranks(run, ranks, ["--out", str(out), *SMALL, *args], ranks)
    return losses(out)


def run(args: list[str], ranks: int) -> None:
    config = tyro.cli(TrainConfig, args=args)
    check(config, ranks)
    _train(config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on two local ranks that are started for them."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = fsharding("train", "--out", out, *SMALL, "--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped after three steps."""
    out = tmp_path_factory.mktemp("cut") / "run"
    train(out, "--steps", "3")
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one process, without a process group."""
    out = tmp_path_factory.mktemp("alone") / "run"
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--out", str(out), *SMALL])
    return out


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


@full
def test_swapping_strategies_in_mid_run_changes_no_loss(whole: Path, tmp_path: Path):
    swaps = "2=zero1,3=hfsdp:replica=2,dp=1,5=zero0"
    assert train(tmp_path / "run", "--swap-at", swaps) == losses(whole)
    sizes = [json.loads(line)["state_bytes"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sizes[0] == sizes[1] < sizes[2] and sizes[4] < sizes[5]


def test_local_ranks_leave_metrics_plot_and_checkpoint(whole: Path):
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    keys = {
        "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "state_bytes", "gathered_peak_bytes",
    }  # fmt: skip
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(set(row) == keys for row in rows)
    assert all(row["tokens"] == 8 * 32 for row in rows)
    assert all(row["gathered_peak_bytes"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (whole / "ckpt" / "6" / "manifest.json").exists()


@full
def test_the_run_of_the_readme_learns(tmp_path: Path):
    """What `make train` runs: Python's own sources, as bytes."""
    out = tmp_path / "run"
    what = ("--preset", "tiny", "--ranks", "2", "--strategy", "zero3", "--steps", "200")
    done = fsharding("train", *what, "--out", out, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(out)[-1] < 2.6
    assert (out / "loss.png").exists() and (out / "ckpt" / "200" / "manifest.json").exists()


def test_resume_is_bitwise_a_run_that_never_stopped(whole: Path, cut: Path, tmp_path: Path):
    out = copy(cut, tmp_path / "run")
    # Lines that a killed run wrote after its last checkpoint are cut off.
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 99.0}\n{"step": 5, "lo')
    assert train(out, "--resume", "newest") == losses(whole)


def test_resume_on_another_mesh_and_strategy(whole: Path, cut: Path, tmp_path: Path):
    resumed = train(copy(cut, tmp_path / "run"), "--resume", "newest", "--strategy", "zero1", ranks=1)
    assert resumed[:3] == losses(whole)[:3]
    assert resumed == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(4, ["--mesh", "pp=2,tp=2", "--schedule", "zbv", "--microbatches", "4", "--sequence"], marks=full),
        pytest.param(
            4,
            ["--mesh", "pp=2,cp=2", "--microbatches", "2", "--swap-at", "2=zero1:tp=4,4=zero3:pp=2,dp=2"],
            marks=full,
        ),
    ],
)
def test_model_axes_have_the_same_losses(alone: Path, tmp_path: Path, ranks: int, options: list[str]):
    assert train(tmp_path / "run", *options, ranks=ranks) == pytest.approx(losses(alone), rel=1e-5)


def test_stages_of_ones_own_and_a_swap_to_no_stages(alone: Path, tmp_path: Path):
    options = ["--mesh", "pp=2", "--schedule", "interleaved", "--stages-per-rank", "3", "--stage-layers", "1,0,1,0,1,1"]
    options += ["--gather", "microbatch", "--microbatches", "2", "--swap-at", "3=zero1:dp=2"]
    assert train(tmp_path / "run", *options) == pytest.approx(losses(alone), rel=1e-5)


def test_options_of_the_schedule_make_it(tmp_path: Path):
    config = TrainConfig(tmp_path, schedule="interleaved", microbatches=4, stages_per_rank=2, gather="microbatch")
    mesh = AbstractMesh(("pp", "dp"), (2, 2))
    assert schedule_of(config, mesh) == plan_schedule("interleaved", 2, 4, stages_per_rank=2, gather="microbatch")
    assert schedule_of(config, AbstractMesh(("dp",), (2,))) is None
    layers = stages(replace(config, stage_layers="0,2,1,1"), mesh)
    assert layers is not None and layers["blocks"] == [[2], [0, 1, 3]]


@full
def test_experts_move_from_their_axis_to_a_pipeline_in_mid_run(tmp_path: Path):
    alone = train(tmp_path / "alone", "--preset", "tiny-moe", ranks=1)
    moved = train(tmp_path / "run", "--preset", "tiny-moe", "--mesh", "ep=2", "--swap-at", "2=zero1,4=zero3:pp=2")
    assert moved == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=full)])
def test_every_launch_and_strategy_has_the_same_losses(alone: Path, whole: Path, tmp_path: Path, ranks: int):
    two = train(tmp_path / "two", "--strategy", "optim", "--microbatches", "2")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "fsharding",
        "train",
    ]
    command += ["--out", str(tmp_path / "launched"), *SMALL, "--mesh", "replica=2", "--strategy", "hfsdp"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=clean_environment(OMP_NUM_THREADS="1")
    )
    assert done.returncode == 0, done.stderr
    for found in (losses(whole), two, losses(tmp_path / "launched")):
        assert found == pytest.approx(losses(alone), rel=1e-5)


def test_a_new_run_sets_an_earlier_one_aside(alone: Path, tmp_path: Path):
    out = copy(alone, tmp_path / "run")
    assert train(out, "--seed", "1", ranks=1) != losses(alone)
    assert losses(out / "earlier-1") == losses(alone)
    assert (out / "earlier-1" / "ckpt" / "6" / "manifest.json").exists()


BAD = {
    "unknown preset": (["--preset", "tinny"], "knows no preset 'tinny'", "Did you mean 'tiny'?"),
    "unknown strategy": (["--strategy", "zero4"], "knows no strategy 'zero4'", "zero3"),
    "unknown dtype": (["--dtype", "int8"], "knows no --dtype 'int8'", "float32, bfloat16, float16"),
    "unknown axis": (["--mesh", "dpp=2"], "got an unknown axis 'dpp'", "Did you mean 'dp'?"),
    "mesh product": (["--ranks", "2", "--mesh", "dp=3"], "(size 3), but the world size is 2", "dp=-1"),
    "batch": (["--ranks", "2", "--batch", "7"], "cannot divide --batch 7 by 2 data ranks", "such as --batch 8"),
    "microbatches": (["--batch", "8", "--microbatches", "3"], "times 3 microbatches", "such as --batch 9"),
    "negative seed": (["--seed", "-1"], "--seed -1: 0 to 2**64 - 1", ""),
    "wide seed": (["--seed", str(2**64)], f"--seed {2**64}: 0 to 2**64 - 1", ""),
    "no steps": (["--steps", "0"], "--steps 0: at least 1", ""),
    "missing data": (["--data", "nowhere.txt"], "nowhere.txt", ""),
    "unwritable out": (["--out", "/proc/nothing"], "cannot write to --out /proc/nothing", "writable directory"),
    "nothing to resume": (["--resume", "newest"], "finds no complete checkpoint", "Leave --resume out"),
    "schedule": (["--schedule", "zvb"], "knows no --schedule 'zvb'", "Did you mean 'zbv'?"),
    "size of an axis": (["--mesh", "tp=0"], "got tp=0", "A size is at least 1"),
    "stages a rank": (["--stages-per-rank", "0"], "--stages-per-rank 0: at least 1", ""),
    "stages of a schedule": (
        ["--ranks", "2", "--mesh", "pp=2", "--schedule", "zbv", "--stages-per-rank", "3"],
        "stages_per_rank is 3, but zbv has 2",
        "",
    ),
    "layers of stages": (["--stage-layers", "3,x"], "cannot read --stage-layers '3,x'", "such as 3,5"),
    "too many layers": (
        ["--ranks", "2", "--mesh", "pp=2", "--stage-layers", "3,2"],
        "cannot put 4 layers on the 2 stages of 1f1b as [3, 2]",
        "Pass 2 counts that sum to 4",
    ),
    "microbatches of a schedule": (
        ["--ranks", "2", "--mesh", "pp=2", "--schedule", "dualpipev", "--microbatches", "2"],
        "microbatches is 2, but dualpipev on 2 ranks needs at least 4",
        "",
    ),
    "layers": (["--ranks", "8", "--mesh", "pp=8", "--microbatches", "8"], "cannot put 4 layers on the 8 stages", ""),
    "heads": (["--ranks", "8", "--mesh", "tp=8"], "4 heads: not a multiple of tp=8", "Use a different mesh"),
    "sequence": (
        ["--ranks", "2", "--mesh", "tp=2", "--sequence", "--seq", "33"],
        "shard --seq 33 over tp=2",
        "multiple of 2",
    ),
}


def refused(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """The message of a command that ends with status 2, run in this process."""
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message_and_status_2(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args, *texts = BAD[case]
    error = refused(capsys, "train", "--out", tmp_path / "out", *args)
    assert all(text in error for text in texts), error
    assert not any((tmp_path / "out").glob("*"))


def test_a_mistyped_option_is_refused_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    error = refused(capsys, "train", "--out", tmp_path / "out", "--stratgy", "zero3")
    assert "--strategy" in error and "Traceback" not in error


@full
def test_a_reader_that_has_enough_gets_no_traceback(whole: Path):
    command = f"{sys.executable} -m fsharding inspect {whole / 'ckpt' / '6'} | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, env=clean_environment())
    assert done.stdout.endswith(": whole\n") and done.stderr == ""


def test_empty_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty.txt").touch()
    assert "empty" in refused(capsys, "train", "--out", tmp_path / "out", "--data", tmp_path / "empty.txt")


def test_resume_of_another_run_is_refused_by_name(whole: Path, capsys: pytest.CaptureFixture[str]):
    before = (whole / "metrics.jsonl").read_bytes()
    error = refused(capsys, "train", "--out", whole, *SMALL, "--resume", "auto", "--seed", "7")
    assert (
        "it belongs to a different run" in error
        and "data: " in error
        and "  --seed: 0 in the checkpoint, 7 now\n" in error
    )
    assert "--seq" not in error and "--out" not in error.partition("different run")[2].partition("Pass")[0]
    assert (whole / "metrics.jsonl").read_bytes() == before


@contextmanager
def started(out: Path, *args: str) -> Generator[subprocess.Popen[str]]:
    """A run of two ranks that has saved twice; killed at the end, whatever happened to it."""
    command = [sys.executable, "-m", "fsharding", "train", "--out", str(out), "--ranks", "2", "--save-every", "2"]
    command += ["--seq", "32", "--steps", "100000", "--timeout", "20", *args]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
    ) as run:
        try:
            saved = (out / "ckpt" / "4").exists
            assert until(lambda: saved() or run.poll() is not None) and saved()
            yield run
        finally:
            for rank in ranks_of(run):
                os.kill(rank, signal.SIGKILL)
            run.kill()


def ranks_of(run: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(run.pid)], capture_output=True, text=True
    ).stdout
    return [int(line.split()[0]) for line in found.splitlines() if "spawn_main" in line]


def test_a_dead_rank_ends_the_run_with_its_error(tmp_path: Path):
    with started(tmp_path / "run") as run:
        os.kill(ranks_of(run)[-1], signal.SIGKILL)
        out, err = run.communicate(timeout=60)
    assert run.returncode == 1, out + err
    assert "lost rank" in err
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--out", str(tmp_path / "run"), "--seq", "32", "--steps", "1", "--resume", "newest"])


def test_an_interrupt_saves_and_ends_all_ranks(tmp_path: Path):
    with started(tmp_path / "run") as run:
        ranks = ranks_of(run)
        assert len(ranks) == 2
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert run.returncode == 0, out + err
    step = len(losses(tmp_path / "run"))
    assert f"stopped at step {step} of 100000: SIGINT; saved {tmp_path}/run/ckpt/{step};" in out
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def measured() -> list[dict[str, Any]]:
    return measure(OverheadConfig(units=8, rounds=3), make_mesh(dp=-1, device="cpu", timeout=timedelta(seconds=20)))


def test_host_overhead_beside_fsdp2_is_measured_and_shown(capsys: pytest.CaptureFixture[str]):
    compared(run_ranks(measured, 2)[0], capsys)


def compared(found: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["contender"]: row for row in found}
    assert set(rows) == {"fsharding-zero3", "fsdp2"}
    assert rows["fsharding-zero3"]["loss"] == pytest.approx(rows["fsdp2"]["loss"], rel=1e-4)
    with capsys.disabled():
        ours, theirs = (rows[name]["median_ms"] for name in ("fsharding-zero3", "fsdp2"))
        what = f"{found[0]['units']} units of {found[0]['leaves']} leaves, 2 ranks"
        print(f"\nhost overhead, {what}: {ours:.1f} ms a step, FSDP2 {theirs:.1f} ms")
