"""Captured steps: the bits of the steps themselves, what cannot be captured, and whose memory is whose."""

import inspect
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding.base import _compat
from fsharding.base.errors import BatchError, ConfigError, DonatedError, LayoutError, NonFiniteError, TransformError
from fsharding.formats.precision import LossScale, Precision
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, run_ranks
from fsharding.train.capture import captured
from tests import sim_device
from tests.helpers import bits, full, mesh_of, refusal
from tests.tape import Tape
from tests.training import ALONE, DP, MODEL, OUTER, ZEROS, batches, optimizer

FP16 = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale(2.0**17, interval=2))
CASES = [(zero, (fs.FP32, FP16)[i % 2], bool(i & 2), 1 + i % 2) for i, zero in enumerate(ZEROS)]
CASES += [(ZEROS[1], fs.MXFP8, True, 1)]
EVERY = [(z, p, d, m) for z in ZEROS for p in (fs.FP32, fs.BF16, FP16) for d in (False, True) for m in (1, 2)]


def started(axes, strategy, precision=fs.FP32, model=MODEL, opt=None, **how):
    mesh, opt = mesh_of(axes, transport="native"), opt or optimizer("adamw")
    state = fs.init_state(
        MODEL, opt, fs.random.key(0), fs.plan_layout(MODEL, mesh, strategy=strategy, precision=precision)
    )
    return state, fs.make_train_step(model, opt, **{"check": "async", **how}), [*batches(5, mesh)]


def reports(step, state, rows):
    """Metrics and state of some steps, as they are right after each."""
    seen = []
    for batch in rows:
        state, metrics = step(state, batch)
        seen.append((metrics.loss, metrics.grad_norm, metrics.count, bool(metrics.skipped), bits(state)))
    return seen


def both(axes, cases):
    """Compares captured steps with the steps themselves, here; whether each kind of step was seen."""
    skipped = set()
    for strategy, precision, donate, microbatches in cases:
        how = {"donate": donate, "microbatches": microbatches}
        state, step, rows = started(axes, strategy, precision, **how)
        want = reports(step, state, rows)
        state, step, rows = started(axes, strategy, precision, **how)
        before, tape = bits(state), Tape()
        graph = captured(step, state, rows[-1], tape)
        assert_bitwise_equal(bits(state), before, "capturing changes no state")
        assert_bitwise_equal(reports(graph, state, rows), want, f"{strategy}, {how}")
        assert tape.replays == len(rows)
        skipped |= {report[3] for report in want}
    return skipped


@pytest.mark.parametrize(
    "cases", [CASES, pytest.param(EVERY, marks=[full, pytest.mark.timeout(600)])], ids=["some", "every"]
)
def test_captured_steps_have_the_bits_of_the_steps_themselves(cases):
    for ranks, axes in ((1, ALONE), (2, DP)):
        seen = [run_ranks(both, ranks, axes, cases[i : i + 6])[0] for i in range(0, len(cases), 6)]
        assert set().union(*seen) == {True, False}, "some steps were skipped, and some were not"


@full
def test_hybrids_are_captured_too():
    run_ranks(
        both, 4, OUTER, [(s, p, True, 1) for s in (fs.hybrid(), fs.hybrid(opt_state=True)) for p in (fs.FP32, FP16)]
    )


# ------------------------------------------------------------------------------------------------ what is refused
WEIGHTS = {"w": torch.ones(4, 4)}
BATCH = {"x": torch.arange(8.0).view(2, 4)}


def alone(loss, **how):
    """A state and a step of a small loss function on one process."""
    return fs.setup(WEIGHTS, loss, fs.adamw(1e-2), fs.random.key(0), **{"check": "async", **how})


def squares(params, batch):
    return (batch["x"] @ fs.gather_unit(params)["w"]).square().sum()


def branches(params, batch):
    loss = squares(params, batch)
    return loss if loss.item() < 1 else loss * 2


def selects(params, batch):
    y = batch["x"] @ fs.gather_unit(params)["w"]
    return y[y > 0].sum()


def draws(params, batch, key):
    return squares(params, {"x": fs.random.dropout(batch["x"], 0.5, key)})


def normals(params, batch, key):
    noise = fs.random.normal(key, batch["x"].shape).tensor(device=batch["x"].device)
    return squares(params, {"x": batch["x"] + noise})


CALLS = [0]


def counts(params, batch):
    CALLS[0] += 1
    return squares(params, batch) * CALLS[0]


def takes(params, batch):
    return squares(params, batch) * torch.tensor(2.0)


READS = "fs.testing.assert_capturable cannot capture a step in which the host reads the device."
MEND = (
    "Compute with tensors of the device: torch.where instead of an if, torch.full for a number, and a number that"
    " changes as a tensor of the batch. Drop with fs.random.dropout: a module with random_key= is seeded by the host."
)


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_buffers_that_the_first_call_allocates_are_no_difference():
    """A gradient of such a size that no data axis cuts lives in a buffer that later steps use again."""
    params = {"w": torch.ones(1 << 11, 1 << 11)}
    state, step = fs.setup(params, squares, fs.adamw(1e-2), fs.random.key(0), check="async")
    fs.testing.assert_capturable(step, state, {"x": torch.ones(2, 1 << 11)})


@pytest.mark.parametrize(
    ("loss", "name", "text"), [(branches, "_local_scalar_dense", ".item()"), (selects, "index", "y[y > 0]")]
)
def test_a_step_whose_host_reads_is_refused_with_the_line(loss, name, text):
    state, step = alone(loss)
    before, error = bits(state), refusal(fs.testing.assert_capturable, step, state, BATCH, kind=TransformError)
    lines = error.splitlines()
    assert lines[:2] == [READS, f"  {name} at test_capture.py:{line_of(loss, text)}"] and lines[-1] == MEND
    assert_bitwise_equal(bits(state), before)
    assert step(state, BATCH)[1].loss > 0


def test_random_keys_of_the_cpu_are_the_hosts():
    error = refusal(fs.testing.assert_capturable, *reversed(alone(draws)), BATCH, kind=TransformError)
    assert error.startswith(f"{READS}\n  _local_scalar_dense at random.py:")


def test_numbers_of_the_host_are_refused():
    error = refusal(fs.testing.assert_capturable, *reversed(alone(takes)), BATCH, kind=TransformError)
    assert (
        error.splitlines()[1]
        == f"  aten.lift_fresh.default(float32[] on cpu) at test_capture.py:{line_of(takes, 'tensor(2')}"
    )
    error = refusal(fs.testing.assert_capturable, *reversed(alone(counts)), BATCH, kind=TransformError).splitlines()
    assert error[0] == "fs.testing.assert_capturable cannot capture a step whose operations differ from call to call."
    where = f"at test_capture.py:{line_of(counts, '* CALLS')}"
    for row, call, number in ((error[1], "a call", 3), (error[2], "the next", 4)):
        assert f"of {call}: aten.mul.Tensor(float32[] on cpu, {number}) {where}" in row


def test_steps_that_raise_at_once_and_what_is_no_step_are_refused():
    state, step = alone(squares)
    assert refusal(fs.capture, step, state, BATCH, kind=ConfigError) == (
        "fs.capture needs a device that records graphs, such as CUDA; this state is on cpu.\nCall the step"
        " itself here. fs.testing.assert_capturable(step, state, batch) checks on any device whether it could be captured."
    )
    assert refusal(fs.testing.assert_capturable, alone(squares, check="sync")[1], state, BATCH, kind=ConfigError) == (
        'fs.testing.assert_capturable cannot capture a step with check="sync".\n'
        'Make it with fs.make_train_step(..., check="async"), which reads nothing.'
    )
    assert refusal(fs.capture, squares, state, BATCH).startswith("fs.capture takes a step of fs.make_train_step, got ")
    assert refusal(fs.capture, step, state.params, BATCH) == (
        "fs.capture takes a TrainState, got a dict.\nPass a state and a batch: fs.capture(step, state, batch)."
    )


def of_a_pipeline(name):
    schedule = fs.pipeline.plan_schedule(name, 2, 2)
    layout = fs.plan_layout(MODEL, mesh_of({"pp": 2}), stages=fs.pipeline.stages_of(MODEL, schedule))
    state = fs.init_state(MODEL, fs.sgd(0.1), fs.random.key(0), layout)
    step = fs.make_train_step(MODEL, fs.sgd(0.1), microbatches=2, schedule=schedule, check="async")
    fs.testing.assert_capturable(step, state, next(batches(1, layout.mesh)))


def test_pipelines_can_be_captured():
    """tests/dist/device/test_graphs.py replays them."""
    run_ranks(of_a_pipeline, 2, "1f1b")


# ------------------------------------------------------------------------------------------------ whose memory is whose
def test_states_are_donated_and_metrics_are_not():
    state, step = alone(squares)
    graph = captured(step, state, BATCH, Tape())
    first, metrics = graph(state, BATCH)
    loss = metrics.loss.clone()
    assert refusal(lambda: state.params, kind=DonatedError).startswith("TrainState got a state that was donated")
    second, after = graph(first, BATCH)
    assert fs.tree.leaves(second.params)[0] is not None and float(after.loss) < float(loss)
    assert torch.equal(metrics.loss, loss), "metrics have memory of their own"
    with pytest.raises(DonatedError):
        graph(first, BATCH)
    # A state from elsewhere takes the place of the one that was returned, which is gone then, too.
    again, _ = alone(squares)
    third, restarted = graph(again, BATCH)
    assert torch.equal(restarted.loss, loss) and int(third.step) == 1
    with pytest.raises(DonatedError):
        _ = second.params


def test_other_batches_and_layouts_are_refused():
    state, step = alone(squares)
    graph = captured(step, state, BATCH, Tape())
    assert refusal(graph, state, {"x": torch.ones(3, 4)}, kind=BatchError) == (
        "captured step got a batch that differs from the captured one.\n"
        "  x is float32[3, 4]; float32[2, 4] was captured\n"
        "Pass batches of the same shapes and dtypes, padded if they are shorter, or capture the step again."
    )
    other, _ = alone(squares, strategy="zero0")
    assert refusal(graph, other, BATCH, kind=LayoutError).startswith("captured step got a state in a different layout.")
    assert refusal(graph, state.params, BATCH) == (
        "captured step takes a TrainState, got a dict.\nCall it as the step itself: state, metrics = step(state, batch)."
    )
    state, _ = graph(state, BATCH)
    with torch.no_grad():
        local_of(state.params["w"]).add_(1)
    assert "changed in place" in refusal(graph, state, BATCH)


def test_a_refused_step_leaves_the_state_and_raises_in_the_next_call():
    state, step = alone(squares)
    graph = captured(step, state, BATCH, Tape())
    state, _ = graph(state, BATCH)
    before = bits(state)
    state, metrics = graph(state, {"x": torch.full((2, 4), torch.inf)})
    assert_bitwise_equal(bits(state), before)
    with pytest.raises(NonFiniteError, match="step 1: loss"):
        _ = metrics.loss
    state, metrics = graph(state, BATCH)
    assert int(state.step) == 2 and torch.isfinite(metrics.loss)
    state, _ = graph(state, {"x": torch.full((2, 4), torch.nan)})
    with pytest.raises(NonFiniteError, match=r"params.w: its gradient is not finite"):
        graph(state, BATCH)


def preempted():
    """Whether all ranks are told after the step in which one of them got a signal, and not before."""
    state, step, rows = started(DP, fs.zero(3))
    graph, told = captured(step, state, rows[0], Tape()), []
    with fs.preemption.watch():
        for number, batch in enumerate(rows):
            if number == 2 and dist.get_rank() == 1:
                signal.raise_signal(signal.SIGTERM)
            state, _ = graph(state, batch)
            told.append(fs.preemption.requested())
    return told


def test_the_bit_of_a_preemption_is_that_of_each_call():
    assert run_ranks(preempted, 2) == [[False, False, True, True, True]] * 2


# ------------------------------------------------------------------------------------------- as on a device, without one
def on_fake_device():
    """Ask of steps of one of four ranks of a device, whose tensors have no values, whether they can be captured."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    sim_device.start()
    _compat.start_fake_group(1, 4)
    with FakeTensorMode():
        mesh = fs.make_mesh(device=sim_device.NAME, dp=4)
        tokens = torch.zeros(4, 8, dtype=torch.int64, device=sim_device.NAME)
        for strategy, precision in (
            (fs.zero(0), FP16),
            (fs.zero(1), fs.FP32),
            (fs.zero(1), fs.MXFP8),
            (fs.zero(3), FP16),
        ):
            layout = fs.plan_layout(MODEL, mesh, strategy=strategy, precision=precision)
            state = fs.init_state(MODEL, optimizer("adamw"), fs.random.key(0), layout)
            step = fs.make_train_step(MODEL, optimizer("adamw"), microbatches=2, donate=precision == FP16)
            fs.testing.assert_capturable(step, state, {"tokens": tokens, "targets": tokens})
            print("yes")
        of_host = torch.full((), 2.0)
        batch = {"x": torch.ones(2, 4, device=sim_device.NAME)}
        stochastic = fs.Precision(params=torch.bfloat16, compute=torch.float32, rounding="stochastic")
        for loss, precision in ((draws, fs.FP32), (squares, stochastic), (normals, fs.FP32)):
            layout = fs.plan_layout(WEIGHTS, mesh, strategy=fs.zero(0), precision=precision)
            state = fs.init_state(lambda key: WEIGHTS, fs.adamw(1e-2), fs.random.key(0), layout)
            step = fs.make_train_step(loss, fs.adamw(1e-2))
            try:
                fs.testing.assert_capturable(step, state, batch)
                print("yes")
            except TransformError as error:
                print(str(error).splitlines()[0])
        layout = fs.plan_layout(WEIGHTS, mesh, strategy=fs.zero(0))
        state = fs.init_state(lambda key: WEIGHTS, fs.adamw(1e-2), fs.random.key(0), layout)
        step = fs.make_train_step(lambda params, batch: squares(params, batch) * of_host, fs.adamw(1e-2))
        print(refusal(fs.testing.assert_capturable, step, state, {"x": torch.ones(2, 4, device=sim_device.NAME)}))


@pytest.mark.timeout(1300)
def test_no_step_takes_tensors_of_the_host_to_the_device():
    sim_device.build()
    command = [sys.executable, "-W", "ignore", "-c", f"from {__name__} import on_fake_device; on_fake_device()"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[:6] == ["yes"] * 6
    assert lines[6] == READS, "normal values are drawn on the host"
    assert (
        lines[7]
        == "fs.testing.assert_capturable cannot capture a step that copies host tensors: a graph would keep their present values."
    )
    assert lines[8].startswith("  aten.mul.Tensor(float32[] on sim, float32[] on cpu) at test_capture.py:")
