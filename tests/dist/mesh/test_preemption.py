"""Preemption of many ranks: one of them is told, and all stop after the same step, having saved it."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import tyro

import fsharding as fs
from fsharding import checkpoint
from fsharding.apps.cli import train as main_job
from fsharding.apps.cli.config import check
from fsharding.apps.cli.main import main
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.train import _train
from fsharding.base.errors import RankError
from fsharding.checkpoint.writer import Writer
from fsharding.comm.step_agreement import StepAgreement
from fsharding.mesh import preemption
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.mesh.launch import launch_ranks
from fsharding.testing import assert_bitwise_equal, run_ranks
from fsharding.train import step as step_module
from tests.commands import clean_environment
from tests.helpers import full, until

pytestmark = pytest.mark.timeout(420)

CONFIG = fs.models.DecoderConfig(vocab_size=32, dim=16, layers=2, heads=2, kv_heads=2, intermediate_size=32)
ROWS, POSITIONS = 8, 8


def tell(rank: int, number: signal.Signals = signal.SIGTERM) -> None:
    if torch.distributed.get_rank() == rank:
        os.kill(os.getpid(), number)


def batch_of(number: int, mesh: Any) -> dict[str, torch.Tensor]:
    tokens = torch.randint(32, (ROWS, POSITIONS + 1), generator=torch.Generator().manual_seed(number))
    index, count = data_rank_and_size(mesh)
    mine = tokens.chunk(count)[index]
    batch = {"tokens": mine[:, :-1].contiguous(), "targets": mine[:, 1:].contiguous()}
    return fs.ops.cut_sequence(batch, mesh=mesh)


def made(axes: dict[str, int], strategy: fs.Strategy, **how: Any) -> tuple[Any, fs.TrainState, Any]:
    """Mesh, state and step."""
    mesh = fs.make_mesh(**axes, device="cpu", timeout=timedelta(seconds=20))
    model = fs.models.decoder(CONFIG)
    stages = None
    if "pp" in axes:
        how["schedule"] = fs.pipeline.plan_schedule("1f1b", axes["pp"], how.get("microbatches", 1))
        stages = fs.pipeline.stages_of(model, how["schedule"])
    layout = fs.plan_layout(model, mesh, strategy=strategy, stages=stages, precision=how.pop("layout", fs.FP32))
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(1e-2))
    return mesh, fs.init_state(model, opt, fs.random.key(0), layout), fs.make_train_step(model, opt, **how)


Told = list[tuple[list[torch.Tensor], list[bool], int]]


def steps(axes: dict[str, int], strategy: fs.Strategy, moments: list[tuple[int, int]], how: dict[str, Any]) -> Told:
    """For each (rank, step) with a signal: losses and norms, whether to stop after each step, and steps skipped."""
    mesh, first, step = made(axes, strategy, **how)
    results: Told = []
    for who, when in moments:
        state, found, told, skipped = fs.tree.map(torch.clone, first), list[torch.Tensor](), list[bool](), 0
        with preemption.watch([signal.SIGTERM]):
            for number in range(4):
                if number == when:
                    tell(who)
                state, metrics = step(state, batch_of(number, mesh))
                found += [metrics.loss, metrics.grad_norm]
                told.append(preemption.requested())
                skipped += metrics.skipped
        results.append((found, told, skipped))
    return results


OVERFLOWS = fs.Precision(compute=torch.float16, loss_scale=fs.formats.LossScale(2.0**40))
MESHES = [
    pytest.param(2, {"dp": 2}, fs.zero(0), {"microbatches": 2}, id="zero0"),
    pytest.param(2, {"dp": 2}, fs.zero(1), {"microbatches": 2}, id="zero1", marks=full),
    pytest.param(2, {"dp": 2}, fs.zero(2), {"microbatches": 2}, id="zero2", marks=full),
    pytest.param(2, {"dp": 2}, fs.zero(3), {"microbatches": 2}, id="zero3"),
    pytest.param(2, {"tp": 2}, fs.zero(0), {}, id="tp"),
    pytest.param(2, {"pp": 2}, fs.zero(0), {"microbatches": 2}, id="pp"),
    pytest.param(2, {"dp": 2}, fs.zero(3), {"layout": OVERFLOWS, "donate": True}, id="overflows"),
    pytest.param(4, {"replica": 2, "dp": 2}, fs.hybrid(), {"donate": True}, id="hsdp", marks=full),
    pytest.param(4, {"pp": 2, "tp": 2}, fs.zero(3), {"microbatches": 2}, id="ppxtp"),
    pytest.param(4, {"dp": 2, "tp": 2}, fs.zero(0), {}, id="dpxtp", marks=full),
    pytest.param(4, {"cp": 2, "tp": 2}, fs.zero(3), {}, id="cpxtp", marks=full),
]


@pytest.mark.parametrize(("size", "axes", "strategy", "how"), MESHES)
def test_one_rank_is_told_and_all_stop_after_the_same_step(
    size: int, axes: dict[str, int], strategy: fs.Strategy, how: dict[str, Any]
):
    moments = [(0, -1), (size - 1, 2), (size // 2, 0)]
    calm, *others = zip(*run_ranks(steps, size, axes, strategy, moments, how), strict=True)
    assert all(told == [False] * 4 for _, told, _ in calm)
    for (_, when), found in zip(moments[1:], others, strict=True):
        assert [told for _, told, _ in found] == [[number >= when for number in range(4)]] * size
        assert_bitwise_equal([losses for losses, _, _ in found], [losses for losses, _, _ in calm])
        assert all(skipped == (4 if how.get("layout") is OVERFLOWS else 0) for _, _, skipped in found)


def by_hand(axes: dict[str, int], strategy: fs.Strategy) -> tuple[Any, ...]:
    """Loss and norm of a step, and of its pieces without the bit."""
    mesh, state, step = made(axes, strategy)
    batch, layout = batch_of(0, mesh), state.layout
    run = fs.value_and_grad(fs.model_loss(fs.models.decoder(CONFIG)), grads=layout.main, mean=False)
    (total, weight), grads = run(state.params, batch)
    norm = (fs.global_norm(grads, shardings=layout.main).double() * float(1.0 / weight.double())).float()
    _, metrics = step(state, batch)
    return (metrics.loss, metrics.grad_norm), ((total.double() / weight.double()).float(), norm)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=full)])
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_the_bit_changes_no_other_number_of_its_sums(size: int, axis: str):
    for level in range(4) if axis == "dp" else (0,):
        for found, want in run_ranks(
            by_hand, size, {axis: size} if size == 2 else {axis: 2, "replica": 2}, fs.zero(level)
        ):
            assert_bitwise_equal(found, want)


def alike(params: Any, batch: Any) -> Any:
    """A loss function in which ranks along tp do the same: no leaf is cut over it, so no norm is summed there."""
    out = fs.gather_unit(params)["w"] * batch["tokens"].float().sum()
    return out.square().sum(), 1.0


def own_loss(who: int) -> list[bool]:
    mesh = fs.make_mesh(tp=2, device="cpu", timeout=timedelta(seconds=20))
    layout = fs.plan_layout({"w": fs.random.normal(fs.random.key(0), (4,))}, mesh, tp="replicate")
    opt = fs.sgd(1e-3)
    state = fs.state_from_params(fs.shard({"w": torch.ones(4)}, layout), opt, fs.random.key(0), layout)
    step, told = fs.make_train_step(alike, opt), []
    with preemption.watch([signal.SIGTERM]):
        for number in range(2):
            if number == 1:
                tell(who)
            state, _ = step(state, batch_of(number, mesh))
            told.append(preemption.requested())
    return told


def test_axes_that_no_sum_of_the_step_has_get_one():
    for who in range(2):
        assert run_ranks(own_loss, 2, who) == [[False, True]] * 2


def evaluation(who: int) -> tuple[int, bool, bool]:
    """A loop without steps asks; before it does, no rank knows of the other's signal."""
    mesh, state, step = made({"dp": 2}, fs.zero(3))
    with preemption.watch([signal.SIGTERM]) as watch:
        done = 0
        for number in range(6):
            if number == 3:
                tell(who)
            assert not preemption.requested(), "only what is collective changes it"
            done += 1
            if preemption.requested(mesh):
                break
        told = watch.received is not None
    _, _ = step(state, batch_of(0, mesh))
    return done, told, preemption.requested()


def test_an_evaluation_asks_all_ranks():
    assert run_ranks(evaluation, 2, 1) == [(4, False, False), (4, True, False)]


# ------------------------------------------------------------------------------------------------------ the command line
SMALL = ["--seq", "16", "--batch", "4", "--data", "text", "--no-plot"]
STEPS = 12


def arguments(out: Path, *more: str) -> list[str]:
    text = out.parent / "text"
    text.write_text("to be or not to be, that is the question; " * 60)
    return ["--out", str(out), *[str(text) if x == "text" else x for x in SMALL], "--steps", str(STEPS), *more]


def rows(out: Path) -> list[dict[str, Any]]:
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in rows(out)]


class Moment(NamedTuple):
    """When a rank gets SIGTERM: at a call of a function, or so many seconds after the run began."""

    rank: int
    place: str = ""
    call: int = 0
    seconds: float = 0.0


PLACES: dict[str, tuple[Any, str]] = {
    "start": (main_job.fs, "init_state"),
    "read": (main_job.fs.ops, "cut_sequence"),
    "sum": (StepAgreement, "as_term"),
    "update": (step_module.TrainStep, "update"),
    "log": (main_job.fs.debug, "state_bytes"),
    "save": (main_job, "_save"),
    "write": (Writer, "add"),
    "swap": (main_job.fs, "reshard"),
}


def run(args: list[str], ranks: int, moment: Moment | None = None) -> tuple[bool, bool]:
    """`fsharding train` on ranks that wait already: whether it stopped early, and whether this rank was told to."""
    config = tyro.cli(TrainConfig, args=args)
    check(config, ranks)
    with preemption.watch([signal.SIGTERM]) as watch:
        with nullcontext() if moment is None else telling(moment):
            stopped = _train(config, watch)
        return stopped, watch.received is not None


@contextmanager
def telling(moment: Moment) -> Generator[None]:
    if not moment.place:
        timer = threading.Timer(moment.seconds, tell, [moment.rank])
        timer.start()
        yield
        timer.cancel()
        timer.join()
        return
    owner, name = PLACES[moment.place]
    real, calls = getattr(owner, name), itertools.count()

    @functools.wraps(real)
    def told(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == moment.call:
            tell(moment.rank)
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, told):
        yield


def committed(out: Path) -> int:
    """The step of the newest checkpoint, which is the last one in the metrics: no step is lost."""
    newest = checkpoint.latest(out / "ckpt")
    assert newest is not None
    assert len(rows(out)) == int(newest.name) and (not rows(out) or rows(out)[-1]["step"] == int(newest.name))
    return int(newest.name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing stops."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert run_ranks(run, 2, arguments(out), 2) == [(False, False)] * 2
    return losses(out)


def hit(out: Path, moment: Moment, *more: str) -> tuple[bool, int]:
    """Runs, or goes on, until a signal of that moment: whether it stopped early, and the step that it has saved."""
    again = ["--resume", "auto"] if out.exists() else []
    found = run_ranks(run, 2, arguments(out, "--save-every", "4", *again, *more), 2, moment)
    assert len({stopped for stopped, _ in found}) == 1
    return found[0][0], committed(out)


AT = [
    # Before the first step: none is taken. In the sum: this step is the last, else the next. In a save: no step more.
    (Moment(1, "start"), 0),
    (Moment(0, "sum", 4), 3),
    (Moment(1, "update", 2), 4),
    (Moment(0, "save"), 4),
]
MORE = [
    (Moment(0, "read", 5), 6),
    (Moment(0, "log", 5), 6),
    (Moment(1, "write", 1), 4),
    (Moment(0, "swap"), 3),
    (Moment(1, "sum", 2 * STEPS - 2), STEPS),
]


@pytest.mark.parametrize(("moment", "last"), [*AT, *(pytest.param(*case, marks=full) for case in MORE)], ids=str)
def test_no_step_is_lost_whenever_the_signal_comes(moment: Moment, last: int, whole: list[float], tmp_path: Path):
    out = tmp_path / "run"
    more = ("--swap-at", "2=zero1") if moment.place == "swap" else ()
    assert hit(out, moment, *more) == (last < STEPS, last)
    assert losses(out) == whole[:last]
    run_ranks(run, 2, arguments(out, "--resume", "auto", *more), 2)
    assert losses(out) == whole


@full
@pytest.mark.timeout(800)
def test_no_step_is_lost_at_a_hundred_random_moments(whole: list[float], tmp_path: Path):
    draw, moments, runs = random.Random(0), 0, 0
    while moments < 100:
        out, last = tmp_path / f"run{runs}", 0
        while last < STEPS:
            stopped, now = hit(out, Moment(draw.randrange(2), seconds=draw.uniform(0.0, 0.6)))
            assert now >= last and stopped == (now < STEPS)
            assert losses(out) == whole[:now]
            moments, last = moments + stopped, now
        runs += 1


def test_a_deadline_stops_a_run_before_it(tmp_path: Path, whole: list[float]):
    out = tmp_path / "run"
    with pytest.raises(SystemExit, match="75"):
        main(["train", *arguments(out), "--deadline", "5.5s", "--preempt-status", "75", "--steps", "100000"])
    assert (out / "ckpt" / str(committed(out))).is_dir() and committed(out) < 100000


# ------------------------------------------------------------------------------------------------------------ launchers
def launched(*command: str) -> subprocess.Popen[str]:
    parts = [sys.executable, *command]
    return subprocess.Popen(
        parts, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment(OMP_NUM_THREADS="1")
    )


def wait_for(process: subprocess.Popen[str], what: Callable[[], Any]) -> None:
    assert until(lambda: what() or process.poll() is not None) and process.poll() is None


def children(process: subprocess.Popen[str]) -> list[int]:
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in found if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=full)], ids=str)
def test_the_launcher_sends_signals_on_and_ends_with_the_status_that_was_asked_for(
    number: signal.Signals, whole: list[float], tmp_path: Path
):
    out = tmp_path / "run"
    more = ["--ranks", "2", "--steps", "100000", "--preempt-status", "75"]
    process = launched("-m", "fsharding", "train", *arguments(out), *more)
    wait_for(process, lambda: len(rows(out)) >= 2)
    process.send_signal(number)
    process.send_signal(number)
    status, text, error = ended(process)
    last = committed(out)
    assert status == 75, text + error
    assert text.endswith(f"stopped at step {last} of 100000: {number.name}; saved {out}/ckpt/{last}; {GOES_ON}\n")
    assert losses(out)[: len(whole)] == whole[:last]


GOES_ON = "--resume auto continues the run"


@full
def test_ranks_that_have_not_begun_get_the_signal_when_they_do(tmp_path: Path):
    out = tmp_path / "run"
    process = launched("-m", "fsharding", "train", *arguments(out), "--ranks", "2")
    wait_for(process, lambda: children(process))
    process.send_signal(signal.SIGTERM)
    status, text, error = ended(process)
    assert (status, committed(out)) == (0, 0), text + error


def deaf(seconds: float) -> None:
    with preemption.watch():
        time.sleep(seconds)


def launch_deaf_ranks() -> None:
    threading.Timer(4.0, os.kill, [os.getpid(), signal.SIGTERM]).start()
    with pytest.raises(RankError, match=r"has killed its ranks, which had not saved 0\.5 s after SIGTERM"):
        launch_ranks(deaf, 2, 100.0, grace=0.5)


@full
def test_ranks_that_do_not_save_in_time_are_killed():
    program = "from tests.dist.mesh.test_preemption import launch_deaf_ranks as f\nif __name__ == '__main__': f()"
    status, text, error = ended(launched("-c", program))
    assert status == 0, text + error


@full
@pytest.mark.parametrize("to", ["torchrun", "a rank"])
def test_what_torchrun_does(to: str, whole: list[float], tmp_path: Path):
    """SIGTERM to torchrun reaches the ranks, which save; torchrun itself fails. Of a rank, all end, and torchrun with 0."""
    out = tmp_path / "run"
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "fsharding", "train"]
    process = launched(*run, *arguments(out), "--steps", "100000")
    wait_for(process, lambda: len(rows(out)) >= 2)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid if to == "torchrun" else int(ranks[-1]), signal.SIGTERM)
    status, text, error = ended(process)
    last = committed(out)
    assert f"stopped at step {last} of 100000" in text
    assert (status == 0) == (to == "a rank"), text + error
    assert losses(out)[: len(whole)] == whole[:last]
