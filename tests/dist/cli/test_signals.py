"""A signal at any moment of `fsharding train`: the run ends as it was told to, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from fsharding import checkpoint
from tests.commands import clean_environment, losses
from tests.helpers import full, until

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc"),
]

STATUS = 75
START_S = 300  # of ranks: a busy machine takes its time, and a run that has ended is not waited for
END_S = 90


class Case(NamedTuple):
    """What is sent, how many ranks run, and when.

    Attributes:
        kind: a signal to the launcher; "Ctrl-C", to it and its ranks, as a terminal sends it; "a rank" is killed.
        ranks: how many.
        place: "start" counts from the first moment in which the command can be told anything, "steps" from the second step.
        share: of the time that a start takes, or of a second.
    """

    kind: str
    ranks: int
    place: str
    share: float

    def __str__(self) -> str:
        return f"{self.kind}-{self.ranks}-{self.place}-{self.share:.2f}".replace(" ", "-")


KINDS = ("SIGTERM", "SIGUSR1", "SIGINT", "Ctrl-C", "a rank")


def drawn(count: int) -> list[Case]:
    """Cases at random moments; of a single rank, there is none to lose."""
    draw, result = random.Random(0), list[Case]()
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        ranks = 2 if kind == "a rank" else draw.choice((1, 2, 2))
        result.append(Case(kind, ranks, draw.choice(("start", "start", "steps")), draw.random()))
    return result


FEW = [Case("SIGTERM", 2, "start", 0.5), Case("Ctrl-C", 2, "steps", 0.3), Case("a rank", 2, "start", 0.3)]
MANY = [pytest.param(case, marks=full, id=f"{number}-{case}") for number, case in enumerate(drawn(100))]


def state_of(pid: int) -> dict[str, str]:
    try:
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (row.partition(":") for row in rows)}


def can_be_told(pid: int) -> bool:
    """Whether SIGTERM is blocked or handled: from here on it does not simply end Python."""
    masks = [int(state_of(pid).get(name, "0"), 16) for name in ("SigBlk", "SigCgt")]
    return any(mask >> (signal.SIGTERM - 1) & 1 for mask in masks)


def ranks_of(pid: int) -> list[int]:
    """The ranks that a launcher has started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(x) for x in children if "spawn_main" in Path(f"/proc/{x}/cmdline").read_text()]
    except OSError:
        return []


def marked(mark: str) -> list[int]:
    """Processes with a word in their environment that have not ended."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark in (folder / "environ").read_bytes().decode(errors="replace"):
                    found.append(int(folder.name))
            except OSError:  # it has ended, or is another user's
                continue
    return [pid for pid in found if state_of(pid).get("State", "Z")[0] not in "ZX"]


@contextmanager
def running(out: Path, ranks: int) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A run that has no end, in a process group of its own, and a word in the environment of all its processes."""
    temporary = out.parent / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "fsharding", "train", "--out", str(out), "--ranks", str(ranks), "--no-plot"]
    command += ["--seq", "16", "--batch", "4", "--steps", "1000000", "--preempt-status", str(STATUS), "--timeout", "60"]
    env = clean_environment(OMP_NUM_THREADS="1", TMPDIR=str(temporary))
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    try:
        yield run, str(temporary)
    finally:
        for pid in marked(str(temporary)):
            os.kill(pid, signal.SIGKILL)
        run.communicate()


def steps_of(out: Path) -> int:
    return len(losses(out)) if (out / "metrics.jsonl").exists() else 0


@pytest.fixture(scope="module")
def start_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """How long a run takes until its first step, on this machine now."""
    out = tmp_path_factory.mktemp("start") / "run"
    with running(out, 2) as (run, _):
        assert until(lambda: can_be_told(run.pid), START_S)
        begin = time.monotonic()  # no assert: how long cases wait before their signal
        assert until(lambda: steps_of(out) > 0 or run.poll() is not None, START_S) and steps_of(out), "no step was made"
        return time.monotonic() - begin  # no assert: the same


def wait_for(case: Case, run: subprocess.Popen[str], out: Path, start_s: float) -> None:
    assert until(lambda: can_be_told(run.pid) or run.poll() is not None, START_S)
    if case.place == "start":
        time.sleep(case.share * start_s)
    else:
        assert until(lambda: steps_of(out) >= 2 or run.poll() is not None, START_S) and steps_of(out) >= 2
        time.sleep(case.share)


@pytest.mark.parametrize("case", [*(pytest.param(case, id=str(case)) for case in FEW), *MANY])
def test_a_signal_ends_a_run_with_its_status_and_leaves_nothing_behind(case: Case, tmp_path: Path, start_s: float):
    out = tmp_path / "run"
    with running(out, case.ranks) as (run, mark):
        wait_for(case, run, out, start_s)
        if case.kind == "a rank":
            assert until(lambda: bool(ranks_of(run.pid)) or run.poll() is not None, START_S) and ranks_of(run.pid)
            os.kill(random.choice(ranks_of(run.pid)), signal.SIGKILL)
        elif case.kind == "Ctrl-C":
            os.killpg(run.pid, signal.SIGINT)
        else:
            run.send_signal(signal.Signals[case.kind])
        said, error = run.communicate(timeout=END_S)
        text = said + error
        assert until(lambda: not marked(mark)), f"left: {[state_of(pid) for pid in marked(mark)]}\n{text}"
    assert not [path.name for path in Path(mark).iterdir() if path.name.startswith("fsharding-")], text
    assert not list(out.glob("ckpt/.*.partial")) if out.exists() else True, text
    assert "Traceback" not in text and "frame #" not in text, text
    newest = checkpoint.latest(out / "ckpt")
    if case.kind == "a rank":
        assert run.returncode == 1 and re.search(r"lost rank \d \(killed by SIGKILL\)\.", error), text
        assert newest is None and f"There is no complete checkpoint in {out}/ckpt." in error, text
    elif "before it began; nothing was written" in error:
        assert run.returncode == (130 if case.kind in ("SIGINT", "Ctrl-C") else STATUS), text
        assert newest is None and steps_of(out) == 0
    else:
        assert run.returncode == STATUS, f"{run.returncode}: {text}"
        assert newest is not None and int(newest.name) == steps_of(out), text
        assert f"stopped at step {newest.name} of 1000000: " in said and f"saved {newest}" in said, text


def test_a_second_interrupt_ends_a_run_at_once_and_says_what_there_is(tmp_path: Path):
    out = tmp_path / "run"
    with running(out, 2) as (run, mark):
        assert until(lambda: steps_of(out) >= 2 or run.poll() is not None, START_S) and steps_of(out) >= 2
        for rank in ranks_of(run.pid):  # so that nothing is saved between the two
            os.kill(rank, signal.SIGSTOP)
        run.send_signal(signal.SIGINT)
        assert run.stderr is not None
        assert any("a second SIGINT exits immediately" in line for line in iter(run.stderr.readline, ""))
        run.send_signal(signal.SIGINT)
        error = run.communicate(timeout=END_S)[1]
        assert until(lambda: not marked(mark))
    assert run.returncode == 130, error
    assert f"Interrupted. There is no complete checkpoint in {out}/ckpt." in error
