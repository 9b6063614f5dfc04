"""Signals and deadlines of one process: what `watch` takes, hands back and refuses."""

import functools
import os
import signal
import threading
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import ArgumentError, ConfigError
from fsharding.mesh import preemption
from fsharding.optim.clip import carrier_sum
from fsharding.testing import assert_bitwise_equal
from tests.helpers import slow

MODEL = fs.models.decoder(
    fs.models.DecoderConfig(vocab_size=32, dim=16, layers=2, heads=2, kv_heads=1, intermediate_size=24)
)
TOKENS = torch.arange(4 * 9).view(4, 9) % 32
BATCH = {"tokens": TOKENS[:, :-1].contiguous(), "targets": TOKENS[:, 1:].contiguous()}


def tell(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", preemption.SIGNALS, ids=str)
def test_a_signal_is_a_wish_inside_and_what_it_was_outside(number):
    heard: list[int] = []
    before = signal.signal(number, lambda got, _: heard.append(got))
    try:
        with preemption.watch() as watch:
            assert not preemption.requested() and watch.received is None
            tell(number)
            tell(number)
            assert preemption.requested() and watch.reason() == number.name and heard == []
        tell(number)
        assert heard == [number]
    finally:
        signal.signal(number, before)
    with preemption.watch():
        assert not preemption.requested(), "a new watch knows nothing of an earlier one"
    assert not preemption.requested()


def test_handlers_are_back_after_an_error():
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    with pytest.raises(RuntimeError, match="of the run"), preemption.watch():
        raise RuntimeError("of the run")
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == before


def test_interrupts_stay_interrupts():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its jobs without it
    try:
        with pytest.raises(KeyboardInterrupt), preemption.watch():
            tell(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_listed_interrupt_is_a_wish_and_the_second_one_an_interrupt(monkeypatch, capfd):
    numbers = (*preemption.SIGNALS, signal.SIGINT)
    with preemption.watch(numbers) as watch:
        tell(signal.SIGINT)
        assert preemption.requested() and watch.reason() == "SIGINT"
        assert "a second SIGINT exits immediately" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            tell(signal.SIGINT)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with preemption.watch(numbers):
        tell(signal.SIGINT)
        tell(signal.SIGINT)  # the launcher may have sent on what the terminal has sent already
        assert preemption.pending() and capfd.readouterr().err == ""


def test_blocked_signals_are_let_through_inside_and_blocked_again_after_it():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # other threads have not blocked it
        with preemption.watch() as watch:
            assert watch.received == signal.SIGTERM
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_deadline_comes_before_its_time_by_the_margin():
    with preemption.watch((), deadline=timedelta(hours=1)) as watch:
        assert not preemption.requested()
        watch.margin = timedelta(minutes=61)
        assert preemption.requested() and "the deadline at" in watch.reason()
        watch.margin = timedelta(0)
        assert preemption.requested(), "a wish is never taken back"
    now = datetime.now()  # no assert: a deadline that is over
    with preemption.watch(deadline=now - timedelta(seconds=1)):
        assert preemption.requested(fs.make_mesh(device="cpu"))


def test_a_watch_is_refused_where_it_could_not_hold():
    found: list[BaseException] = []

    def elsewhere(*signals: signal.Signals) -> None:
        try:
            with preemption.watch(signals):
                pass
        except ArgumentError as error:
            found.append(error)

    for signals in (preemption.SIGNALS, ()):
        thread = threading.Thread(target=elsewhere, args=signals)
        thread.start()
        thread.join()
    assert len(found) == 1 and "Open it in the main thread" in str(found[0])
    with preemption.watch(), pytest.raises(ArgumentError, match="is open already"), preemption.watch():
        pass
    for wrong in (signal.SIGKILL, 15):
        with pytest.raises(ArgumentError, match="takes signals that can be handled"), preemption.watch([wrong]):
            pass
    with pytest.raises(ArgumentError, match=r"datetime\.timedelta\(hours=4\)"), preemption.watch(deadline=3600):
        pass
    with preemption.watch():
        assert not preemption.requested()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h50m", 13800), ("2d", 172800), ("1d2h3m4s", 93784), ("90", 90), ("90s", 90), ("1.5s", 1.5)],
)
def test_durations_are_counted_from_now(text, seconds, monkeypatch):
    now = datetime(2030, 1, 31, 18)
    monkeypatch.setattr(preemption, "datetime", SimpleNamespace(now=lambda: now))
    assert preemption.parse_deadline(text) == now + timedelta(seconds=seconds)


def test_times_and_the_end_that_slurm_tells(monkeypatch):
    assert preemption.parse_deadline("2030-01-31T18:00") == datetime(2030, 1, 31, 18)
    assert preemption.parse_deadline("2030-01-31T18:00+00:00").timestamp() == 1896112800
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1896112800")
    assert preemption.parse_deadline("slurm").timestamp() == 1896112800
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    with pytest.raises(ConfigError, match="SLURM_JOB_END_TIME is ''"):
        preemption.parse_deadline("slurm")


@pytest.mark.parametrize("text", ["", "soon", "3x", "50m3h", "2030-13-01", "-5", "9" * 30, "h"])
def test_other_deadlines_are_refused(text):
    with pytest.raises(ConfigError, match="cannot read the deadline"):
        preemption.parse_deadline(text)


def losses(when: str = "") -> tuple[list[torch.Tensor], list[bool]]:
    """Losses and norms of four steps, and after each whether to stop; SIGTERM comes at one moment of the third."""
    count, adamw = 0, fs.adamw(1e-2)

    def at(moment: str) -> None:
        if moment == when and count == 2:
            tell(signal.SIGTERM)

    def block(params, stream):
        stream.x.register_hook(lambda _: at("in backward"))
        return MODEL.block(params, stream)

    def backend(graph, _):
        at("in a compilation")
        return graph.forward

    @functools.wraps(adamw.update)
    def update(*args, **kwargs):
        at("in the optimizer")
        return adamw.update(*args, **kwargs)

    opt = fs.optim.GradientTransformation(adamw.init, update)
    state = fs.init_state(MODEL, adamw, fs.random.key(0), fs.plan_layout(MODEL, fs.make_mesh(device="cpu")))
    step = fs.make_train_step(MODEL._replace(block=block), opt, microbatches=2)
    found, told = [], []
    with preemption.watch():
        for count in range(4):
            at("between steps")
            if when == "in a compilation" and count == 2:
                torch.compiler.reset()
                step = fs.make_train_step(MODEL._replace(block=torch.compile(MODEL.block, backend=backend)), opt)
            state, metrics = step(state, BATCH)
            found += [metrics.loss, metrics.grad_norm]
            told.append(preemption.requested())
    return found, told


@pytest.fixture(scope="module")
def calm() -> list[torch.Tensor]:
    found, told = losses()
    assert told == [False] * 4
    return found


@slow
@pytest.mark.parametrize("when", ["between steps", "in backward", "in the optimizer", "in a compilation"])
def test_a_signal_in_a_step_shows_after_it_and_changes_no_number(when, calm):
    found, told = losses(when)
    assert told == [False, False, True, True]
    if when != "in a compilation":  # which computes in another order
        assert_bitwise_equal(found, calm)


def test_the_bit_goes_along_with_the_smallest_sum_that_has_its_axes():
    sums = [(), ("dp",), ("dp", "tp"), ("tp",), ("pp", "tp")]
    assert carrier_sum(sums, ("tp",)) == ("tp",)
    assert carrier_sum(sums, ("pp", "tp")) == ("pp", "tp")
    assert carrier_sum(sums, ("cp",)) is None and carrier_sum(sums, ()) is None
