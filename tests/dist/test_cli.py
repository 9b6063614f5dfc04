"""The command line as a user runs it: real processes, real files, exit statuses and messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(240)

SMALL = ["--seq", "32", "--batch", "8", "--steps", "6"]


def fsharding(*args: str | Path, timeout: float = 100, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "fsharding", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=clean(**env))


def clean(**env: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONWARNINGS")}
    return {**kept, **env}


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def train(out: Path, *args: str, **env: str) -> list[float]:
    done = fsharding("train", "--out", out, *SMALL, *args, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(out)


def test_local_ranks_leave_metrics_plot_and_checkpoint(tmp_path: Path):
    train(tmp_path / "run", "--ranks", "2")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    keys = {
        "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "state_bytes", "gathered_peak_bytes",
    }  # fmt: skip
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(set(row) == keys for row in rows)
    assert all(row["tokens"] == 8 * 32 for row in rows)
    assert all(row["gathered_peak_bytes"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "run" / "ckpt" / "6" / "manifest.json").exists()


def test_resume_is_bitwise_a_run_that_never_stopped(tmp_path: Path):
    whole = train(tmp_path / "whole", "--ranks", "2")
    done = fsharding("train", "--out", tmp_path / "cut", *SMALL[:-1], "3", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    # Lines that a killed run wrote after its last checkpoint are cut off.
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 99.0}\n{"step": 5, "lo')
    assert train(tmp_path / "cut", "--ranks", "2", "--resume") == whole


def test_every_launch_and_strategy_has_the_same_losses(tmp_path: Path):
    alone = train(tmp_path / "alone")
    two = train(tmp_path / "two", "--ranks", "2", "--strategy", "optim", "--microbatches", "2")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "-m", "fsharding", "train"]
    command += ["--out", str(tmp_path / "four"), *SMALL, "--mesh", "replica=2", "--strategy", "hfsdp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=clean(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    assert two == pytest.approx(alone, rel=1e-5)
    assert losses(tmp_path / "four") == pytest.approx(alone, rel=1e-5)


def test_resume_on_another_mesh_and_strategy(tmp_path: Path):
    whole = train(tmp_path / "whole", "--ranks", "2")
    out = tmp_path / "cut"
    assert fsharding("train", "--out", out, *SMALL[:-1], "3", "--ranks", "2").returncode == 0
    resumed = train(out, "--resume", "--strategy", "zero1")
    assert resumed[:3] == whole[:3]
    assert resumed == pytest.approx(whole, rel=1e-5)


def test_a_new_run_sets_an_earlier_one_aside(tmp_path: Path):
    first = train(tmp_path / "run")
    again = train(tmp_path / "run", "--seed", "1")
    assert again != first
    assert losses(tmp_path / "run" / "earlier-1") == first
    assert (tmp_path / "run" / "earlier-1" / "ckpt" / "6" / "manifest.json").exists()


BAD = {
    "unknown preset": (["--preset", "tinny"], "knows no preset 'tinny'", "Did you mean 'tiny'?"),
    "unknown strategy": (["--strategy", "zero4"], "knows no strategy 'zero4'", "zero3"),
    "unknown dtype": (["--dtype", "int8"], "knows no --dtype 'int8'", "float32, bfloat16, float16"),
    "unknown axis": (["--mesh", "dpp=2"], "knows no axis 'dpp'", "Did you mean 'dp'?"),
    "mesh product": (["--ranks", "2", "--mesh", "dp=3"], "3 ranks, but there are 2", "dp=-1"),
    "batch": (["--ranks", "2", "--batch", "7"], "cannot divide --batch 7 by 2 data ranks", "such as --batch 8"),
    "microbatches": (["--batch", "8", "--microbatches", "3"], "times 3 microbatches", "such as --batch 9"),
    "no steps": (["--steps", "0"], "--steps 0: at least 1", ""),
    "missing data": (["--data", "nowhere.txt"], "nowhere.txt", ""),
    "unwritable out": (["--out", "/proc/nothing"], "cannot write to --out /proc/nothing", "can be written"),
    "nothing to resume": (["--resume"], "finds no complete checkpoint", "Leave --resume out"),
    "model axis": (["--ranks", "2", "--mesh", "tp=2"], "cannot cut the decoder over tp", "replica and dp"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message_and_status_2(case: str, tmp_path: Path):
    args, *texts = BAD[case]
    out = tmp_path / "out"
    done = fsharding("train", "--out", out, *args)
    assert done.returncode == 2
    assert all(text in done.stderr for text in texts), done.stderr
    assert "Traceback" not in done.stderr
    assert not any(out.glob("*"))


def test_empty_data_is_refused(tmp_path: Path):
    (tmp_path / "empty.txt").touch()
    done = fsharding("train", "--out", tmp_path / "out", "--data", tmp_path / "empty.txt")
    assert done.returncode == 2
    assert "empty" in done.stderr


def test_resume_of_another_run_is_refused_by_name(tmp_path: Path):
    train(tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    done = fsharding("train", "--out", tmp_path / "run", *SMALL, "--resume", "--seed", "7")
    assert done.returncode == 2
    assert "it is another run" in done.stderr and "data: " in done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def start(out: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fsharding", "train", "--out", str(out), "--ranks", "2", "--save-every", "2"]
    command += ["--seq", "32", "--steps", "100000", "--timeout", "20", *args]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean())
    limit = time.monotonic() + 60
    while not (out / "ckpt" / "4").exists():
        assert run.poll() is None and time.monotonic() < limit, run.communicate()
        time.sleep(0.1)
    return run


def ranks_of(run: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(run.pid)], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if "spawn_main" in line]


def test_a_dead_rank_ends_the_run_with_its_error(tmp_path: Path):
    run = start(tmp_path / "run")
    victim = ranks_of(run)[-1]
    os.kill(victim, signal.SIGKILL)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 1, out + err
    assert "lost rank" in err
    assert fsharding("train", "--out", tmp_path / "run", "--seq", "32", "--steps", "1", "--resume").returncode == 0


def test_interrupt_ends_all_ranks(tmp_path: Path):
    run = start(tmp_path / "run")
    ranks = ranks_of(run)
    assert len(ranks) == 2
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "complete checkpoints are intact" in err
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_host_overhead_beside_fsdp2_is_measured_and_shown(capsys: pytest.CaptureFixture[str]):
    done = fsharding("bench", "overhead", "--units", "20", "--rounds", "5", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["contender"]: row for row in json.loads(done.stdout)["rows"]}
    assert set(rows) == {"fsharding-zero3", "fsdp2"}
    assert rows["fsharding-zero3"]["loss"] == pytest.approx(rows["fsdp2"]["loss"], rel=1e-4)
    with capsys.disabled():
        ours, theirs = (rows[name]["median_ms"] for name in ("fsharding-zero3", "fsdp2"))
        print(f"\nhost overhead, 20 units of 12 leaves, 2 ranks: {ours:.1f} ms a step, FSDP2 {theirs:.1f} ms")
