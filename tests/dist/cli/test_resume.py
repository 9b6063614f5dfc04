"""What a run goes on from, what it passes over and says, and that two runs never share a directory."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import tyro

from fsharding import checkpoint
from fsharding.apps.cli.config import check
from fsharding.apps.cli.main import main
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.resume import choose
from fsharding.apps.cli.train import _train
from fsharding.base.errors import CheckpointError, FshardingError
from fsharding.checkpoint.directory import survey
from fsharding.testing import run_ranks
from tests.commands import losses
from tests.helpers import until

pytestmark = pytest.mark.timeout(240)

SMALL = ["--seq", "32", "--batch", "4", "--save-every", "2", "--no-plot"]


def run(out: Path, *args: str) -> int:
    """A run on this process alone; its exit status."""
    with pytest.raises(SystemExit) as end:
        main(["train", "--out", str(out), *SMALL, *args])
    return int(end.value.code or 0)


def on_ranks(args: list[str], others: list[str]) -> str | None:
    """A run on ranks; the error, if it has one."""
    try:
        config = tyro.cli(TrainConfig, args=args if dist.get_rank() == 0 else others)
        check(config, dist.get_world_size())
        _train(config)
    except FshardingError as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps that were saved after 2, 4 and 6."""
    out = tmp_path_factory.mktemp("six") / "run"
    assert run(out, "--steps", "6") == 0
    return out


@pytest.fixture
def out(six: Path, tmp_path: Path) -> Path:
    shutil.copytree(six, tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path) -> None:
    """Changes one bit of the data of a checkpoint, past the first record's header."""
    with (path / "__0_0.distcp").open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))


# ------------------------------------------------------------------------------------------------------------- what is chosen
def test_auto_starts_a_run_and_goes_on_with_it(six: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path / "run", "--steps", "4", "--resume", "auto") == 0
    assert capsys.readouterr().out.startswith("loading torch\nstarts a new run\n")
    assert run(tmp_path / "run", "--steps", "6", "--resume", "auto") == 0
    assert capsys.readouterr().out.startswith(f"loading torch\nresumes from {tmp_path}/run/ckpt/4, after 4 batches\n")
    assert losses(tmp_path / "run") == losses(six)


def test_options_that_are_others_than_before_are_said(out: Path, capsys: pytest.CaptureFixture[str]):
    assert run(out, "--steps", "7", "--resume", "auto", "--lr", "1e-3", "--dtype", "bfloat16") == 0
    said = capsys.readouterr().out.splitlines()[1:]  # after "loading torch"
    assert said[0].startswith("resumes from ")
    assert said[1:3] == [
        "  --lr: left out in the checkpoint, 0.001 now",
        "  --dtype: float32 in the checkpoint, bfloat16 now",
    ]
    assert run(out, "--steps", "7", "--resume", "auto", "--lr", "1e-3", "--dtype", "bfloat16") == 0
    assert not any(line.startswith("  --") for line in capsys.readouterr().out.splitlines())


def test_what_is_passed_over_is_said(out: Path, six: Path, capsys: pytest.CaptureFixture[str]):
    (out / "ckpt" / "99").mkdir()
    (out / "ckpt" / ".97.partial").mkdir()
    shutil.copytree(out / "ckpt" / "6", out / "ckpt" / "98")
    (out / "ckpt" / "98" / "manifest.json").write_text("{")
    (out / "ckpt" / "6" / "__0_0.distcp").unlink()
    assert run(out, "--steps", "6", "--resume", "auto") == 0
    said = capsys.readouterr().out.splitlines()[1:]  # after "loading torch"
    assert said[0] == f"resumes from {out}/ckpt/4, after 4 batches"
    assert said[1] == "  skipped 99: its save was never finished"
    assert said[2].startswith("  skipped 98: fsharding train ") and "manifest" in said[2]
    assert said[3] == "  skipped .97.partial: its save was never finished"
    assert said[4] == "  skipped 6: __0_0.distcp is missing"
    assert losses(out) == losses(six)
    assert sorted(os.listdir(out / "earlier-1")) == [".97.partial", "6", "98", "99"] or "6" in os.listdir(
        out / "earlier-1"
    )


@pytest.mark.parametrize("how", ["2", "path"])
def test_a_step_or_a_path(how: str, out: Path, six: Path):
    assert run(out, "--steps", "6", "--resume", how if how == "2" else str(out / "ckpt" / "2")) == 0
    assert losses(out) == losses(six)
    # What the run had saved later is kept, but is no longer its newest.
    assert {"4", "6"} <= {*os.listdir(out / "earlier-1")}


def test_a_checkpoint_of_another_directory(six: Path, tmp_path: Path):
    assert run(tmp_path / "run", "--steps", "6", "--resume", str(six / "ckpt" / "4")) == 0
    assert losses(tmp_path / "run") == losses(six)[4:]
    assert sorted(os.listdir(tmp_path / "run" / "ckpt")) == ["6"]


@pytest.mark.parametrize("how", ["newest", "7", "nowhere"])
def test_what_is_not_there_is_refused(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path / "run", "--steps", "2", "--resume", how) == 2
    assert "finds no" in capsys.readouterr().err
    assert not (tmp_path / "run").exists() or not os.listdir(tmp_path / "run")


def test_damaged_data_is_an_error_unless_older_ones_may_do(out: Path, six: Path, capsys: pytest.CaptureFixture[str]):
    flip(out / "ckpt" / "6")
    args = ("--steps", "8", "--resume", "auto")
    assert run(out, *args) == 2
    assert "sha256" in capsys.readouterr().err
    assert sorted(os.listdir(out / "ckpt")) == ["2", "4", "6"] and not (out / "earlier-1").exists()
    assert run(out, *args, "--resume-older") == 0
    said = capsys.readouterr().out
    assert f"resumes from {out}/ckpt/4, after 4 batches\n  skipped 6: its data is damaged\n" in said
    assert losses(out)[:6] == losses(six)


def test_nothing_whole_is_left(out: Path, capsys: pytest.CaptureFixture[str]):
    for step in ("2", "4", "6"):
        flip(out / "ckpt" / step)
    assert run(out, "--steps", "8", "--resume", "auto", "--resume-older") == 2
    said = capsys.readouterr().err
    assert f"finds no complete checkpoint in {out}/ckpt.\n  6: its data is damaged\n  4: its data" in said
    assert run(out, "--steps", "8", "--resume-older") == 2
    assert (
        "--resume-older without --resume auto or newest: write --resume auto --resume-older" in capsys.readouterr().err
    )


def test_metrics_that_are_gone_begin_again(out: Path, six: Path, capsys: pytest.CaptureFixture[str]):
    (out / "metrics.jsonl").unlink()
    assert run(out, "--steps", "6", "--resume", "4") == 0
    assert f"  {out}/metrics.jsonl is gone: starting a new one\n" in capsys.readouterr().out
    assert losses(out) == losses(six)[4:]


def test_the_newest_of_a_survey_is_the_latest(out: Path):
    assert survey(out / "ckpt")[0].path == checkpoint.latest(out / "ckpt") == choose("auto", out / "ckpt").path
    with pytest.raises(CheckpointError, match="finds no complete checkpoint"):
        choose("newest", out / "nowhere")


# -------------------------------------------------------------------------------------------------------- one run, one directory
@pytest.mark.parametrize("resume", [[], ["--resume", "auto"]])
def test_a_second_run_in_a_directory_is_refused(resume: list[str], out: Path, capsys: pytest.CaptureFixture[str]):
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"}
    with (out / ".lock").open("w") as file:
        file.write("process 7 on here, since long ago\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(out, "--steps", "8", *resume) == 2
    error = capsys.readouterr().err
    assert f"fsharding train cannot run in {out}: another run is there.\n  process 7 on here, since long ago\n" in error
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"} == before
    assert run(out, "--steps", "8", *resume) == 0  # the lock of a run that has ended is none


def test_ranks_that_do_not_share_a_directory(tmp_path: Path):
    args = ["--seq", "32", "--batch", "4", "--steps", "2", "--no-plot", "--out"]
    told = run_ranks(on_ranks, 2, [*args, str(tmp_path / "a")], [*args, str(tmp_path / "b")])
    assert told[0] == told[1]
    assert told[0].startswith(
        "CheckpointError: fsharding failed on 1 of 2 ranks.\n  rank 1: fsharding does not see the --out of rank 0"
    )
    assert sorted(os.listdir(tmp_path / "a")) == [".lock"] and not os.listdir(tmp_path / "b")


def test_ranks_that_see_other_checkpoints(six: Path, out: Path):
    shutil.rmtree(out / "ckpt" / "6")
    args = ["--seq", "32", "--batch", "4", "--steps", "8", "--no-plot", "--resume", "auto", "--out"]
    told = run_ranks(on_ranks, 2, [*args, str(six)], [*args, str(out)])
    for text in told:
        assert "ConfigError" in text and "checkpoint to go on from: rank 1 has 4, rank 0 has 6" in text, text


def test_machines_have_paths_and_times_of_their_own(tmp_path: Path):
    """Equal bytes under other names, and options that no number follows from: the run of equal options, bitwise."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    sides: list[list[str]] = []
    for out, data, log_every, timeout, grace, deadline, plot in (
        ("run", "a", "0", "20", "30", "1h", "--no-plot"),
        ("link", "b", "7.5", "30", "60", "70h", "--plot"),
    ):
        for name in (data, f"val-{data}"):
            (tmp_path / name).write_bytes(bytes(range(32, 127)) * 40)
        sides.append(
            [
                "--config", str(tmp_path / f"{data}.yaml"), "--out", str(tmp_path / out), "--data", str(tmp_path / data),
                "--val-data", str(tmp_path / f"val-{data}"), "--val-batches", "1", "--log-every", log_every,
                "--timeout", timeout, "--grace", grace, "--deadline", deadline, plot,
                "--seq", "32", "--batch", "4", "--steps", "2", "--ranks", "2", "--optimizer", "muon",
            ]
        )  # fmt: skip
    assert run_ranks(on_ranks, 2, *sides) == [None, None]
    same = [*sides[0], "--out", str(tmp_path / "same"), "--timeout", "40"]
    assert run_ranks(on_ranks, 2, same, same) == [None, None]
    assert losses(tmp_path / "run") == losses(tmp_path / "same") and len(losses(tmp_path / "run")) == 2


# ------------------------------------------------------------------------------------------------------------ under torchrun
def test_torchrun_restarts_a_run_whose_rank_was_killed(tmp_path: Path):
    """The line of the README: the ranks of the second start go on from the newest checkpoint, bitwise."""
    out, steps = tmp_path / "run", ["--steps", "30"]
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1", "-m", "fsharding"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "train",
        "--out",
        str(out),
        *SMALL,
        *steps,
        "--resume",
        "auto",
    ]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONWARNINGS")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**env, "OMP_NUM_THREADS": "1"}
    ) as started:
        try:
            assert until((out / "ckpt" / "6").exists, 150)
            victims = subprocess.run(["pgrep", "-P", str(started.pid)], capture_output=True, text=True).stdout.split()
            os.kill(int(victims[-1]), signal.SIGKILL)
            said, _ = started.communicate(timeout=150)
        finally:
            started.kill()
    assert started.returncode == 0, said[-3000:]
    assert "starts a new run" in said and "resumes from" in said
    assert len(losses(out)) == 30
    plain = ["--out", str(tmp_path / "plain"), *SMALL, *steps]
    assert run_ranks(on_ranks, 2, plain, plain) == [None, None]
    assert losses(out) == losses(tmp_path / "plain")
