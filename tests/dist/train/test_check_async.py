"""Steps at whose verdict the host looks later: the numbers are the same, a refused step leaves the state, and it raises."""

import subprocess
import sys
import textwrap

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import NonFiniteError
from fsharding.formats.precision import LossScale, Precision
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.helpers import bits, crossed, full, mesh_of
from tests.training import ALONE, DP, MODEL, OUTER, ZEROS, batches, optimizer

FP16 = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale(2.0**17, interval=2))
NARROW = Precision(params=torch.bfloat16, moments=torch.bfloat16, grads=torch.bfloat16)
RATES = fs.optim.schedules.linear(1e-2, 1e-3, 5)
OPTIMIZERS = {
    "adamw": lambda: optimizer("adamw"),
    "momentum": lambda: fs.sgd(RATES, momentum=0.9, dampening=0.1),
    "groups": lambda: fs.optim.multi_transform(
        {"matrix": fs.optim.muon(RATES), "other": fs.optim.lion(RATES)}, fs.optim.label_matrices()
    ),
    "noise": lambda: fs.optim.chain(
        fs.optim.add_noise(0.1, fs.random.key(3)), fs.adamw(lambda count: 0.1 / (1 + count))
    ),
    "average": lambda: fs.optim.chain(fs.optim.lookahead(fs.adamw(RATES), every=2), fs.optim.ema(0.9)),
    "torch": lambda: fs.optim.from_torch(torch.optim.NAdam, lr=1e-3, moments=torch.float32),
}


def started(axes, strategy, precision, opt, **how):
    mesh, stages = mesh_of(axes), None
    if "pp" in axes:
        stages = fs.pipeline.stages_of(MODEL, fs.pipeline.plan_schedule("1f1b", axes["pp"], 2))
        how["microbatches"] = 2
    layout = fs.plan_layout(MODEL, mesh, strategy=strategy, precision=precision, stages=stages)
    state = fs.init_state(MODEL, opt, fs.random.key(0), layout)
    return state, fs.make_train_step(MODEL, opt, **how), [*batches(6, mesh)]


def run(axes, strategy, precision, name, donate, check):
    """Reports and state of six steps, of which fp16 skips some."""
    state, step, rows = started(axes, strategy, precision, OPTIMIZERS[name](), donate=donate, check=check)
    reports = []
    for batch in rows:
        state, metrics = step(state, batch)
        reports.append((metrics.loss.clone(), metrics.grad_norm, metrics.count, bool(metrics.skipped)))
    return reports, bits(state)


def both(axes, cases):
    """Compares the two ways, here; whether each kind of step was seen."""
    seen = set()
    for case in cases:
        now, later = (run(axes, *case, check) for check in ("sync", "async"))
        assert_bitwise_equal(later, now, str(case))
        seen |= {report[-1] for report in now[0]}
    return seen


CASES = [(ZEROS[i % 4], (FP16, NARROW)[i % 2], name, bool(i % 2)) for i, name in enumerate(OPTIMIZERS)]
EVERY = [(zero, FP16, name, donate) for zero in ZEROS for name in OPTIMIZERS for donate in (False, True)]


@pytest.mark.parametrize("on_one_axis", [CASES, pytest.param(EVERY, marks=full)], ids=["some", "every"])
def test_losses_norms_and_states_are_the_same_in_every_bit(on_one_axis):
    for ranks, axes, cases in (
        (2, DP, on_one_axis),
        (2, {"pp": 2}, [(fs.zero(3), FP16, "adamw", True)]),
        (4, OUTER, [(fs.hybrid(), FP16, "adamw", True), (fs.hybrid(opt_state=True), FP16, "momentum", False)]),
    ):
        for seen in run_ranks(both, ranks, axes, cases):
            assert seen == {True, False}, "some steps were skipped, and some were not"


def refused(strategy, name, donate, axes=DP):
    """A step with a NaN in the weights of one rank; what the next call says, and what `check="sync"` says."""
    opt = OPTIMIZERS[name]()
    state, step, rows = started(axes, strategy, fs.FP32, opt, donate=donate, check="async")
    state, _ = step(state, rows[0])
    wrong = state.replace(main=state.main, params=fs.tree.map(torch.clone, state.params))
    if torch.distributed.get_rank() == 1 or not strategy.params:  # copies of a leaf are equal
        local_of(wrong.params["head"]["norm"]).view(-1)[:1] = torch.nan
    before, number = bits(wrong), int(wrong.step)
    texts = []
    with pytest.raises(NonFiniteError) as now:
        fs.make_train_step(MODEL, opt, check="sync")(wrong, rows[1])
    texts.append(str(now.value))
    same, metrics = step(wrong, rows[1])
    assert bool(metrics.skipped) and int(same.step) == number
    assert_bitwise_equal(bits(same), before, "after a refused step")
    with pytest.raises(NonFiniteError) as caught:
        step(same, rows[2])
    texts.append(str(caught.value))
    assert_bitwise_equal(bits(same), before, "the call that raises has not taken the state")
    return texts


@pytest.mark.parametrize(
    ("strategy", "name", "donate"),
    crossed(
        ZEROS, ["adamw", "momentum"], {"donated": (True,), "kept": (False,)},
        kept=["zero3-adamw-donated", "zero1-adamw-kept", "zero2-momentum-donated"],
    ),
)  # fmt: skip
def test_a_refused_step_leaves_the_state_and_raises_at_the_next_call(strategy, name, donate):
    """In the step itself ranks can ask each other for the parameters that came in so; afterwards they know gradients."""
    for now, later in run_ranks(refused, 2, strategy, name, donate):
        first, step, *rows, _ = now.splitlines()
        assert first == "train step refused: parameters are not finite." and step.startswith("  step 1: loss nan")
        assert rows == ["  params.head.norm: it is not finite itself"]
        assert later.startswith(f"train step refused: loss or gradients are not finite.\n{step}\n  params.")


def toy(check="async", **how):
    """A step whose gradient is infinite where the batch says so."""
    draws = {"w": fs.random.ones((4,))}
    layout = fs.plan_layout(draws, mesh_of(ALONE))
    opt = fs.adamw(0.1)
    state = fs.init_state(lambda key: draws, opt, fs.random.key(0), layout)
    loss = lambda params, x: (fs.gather_unit(params)["w"] * x).sum()  # noqa: E731
    return state, fs.make_train_step(loss, opt, check=check, **how)


GOOD, BAD = torch.ones(1), torch.full((1,), torch.inf)


def test_the_loss_of_a_refused_step_raises_once():
    state, step = toy()
    state, metrics = step(state, BAD)
    with pytest.raises(NonFiniteError, match=r"step 0: loss inf"):
        print(metrics.loss)
    assert metrics.loss.isinf(), "who has heard of it may look"
    state, metrics = step(state, GOOD)
    assert int(state.step) == 1 and float(metrics.loss) == 4.0 and f"{metrics.loss:.1f}" == "4.0"


def test_the_next_call_raises_and_the_one_after_it_goes_on():
    state, step = toy()
    state, _ = step(state, BAD)
    with pytest.raises(NonFiniteError, match=r"params\.w: its gradient is not finite"):
        step(state, GOOD)
    state, metrics = step(state, GOOD)
    assert int(state.step) == 1 and not metrics.skipped


def test_the_default_on_the_cpu_is_to_raise_in_the_step():
    state, step = toy(check=None)
    with pytest.raises(NonFiniteError):
        step(state, BAD)


def test_another_check_is_refused():
    with pytest.raises(fs.errors.ConfigError, match=r'got check=.later.\.\nGive "sync" to raise in the step'):
        toy(check="later")


@pytest.mark.parametrize(("last", "status"), [("BAD", 1), pytest.param("GOOD", 0, marks=full)])
def test_a_program_that_ends_after_a_refused_step_ends_with_an_error(last, status):
    program = f"""
        import atexit
        atexit.register(print, "registered before")
        from tests.dist.train.test_check_async import BAD, GOOD, toy
        state, step = toy()
        for batch in (GOOD, {last}):
            state, _ = step(state, batch)
        atexit.register(print, "registered after")
        print("the last line")
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout.splitlines() == ["the last line", "registered after", "registered before"]
    assert ("NonFiniteError: train step refused" in ended.stderr) == bool(status)


@full
def test_a_program_that_fails_after_a_refused_step_says_both():
    program = (
        "from tests.dist.train.test_check_async import BAD, toy\n"
        "state, step = toy()\nstep(state, BAD)\nraise KeyError('its own')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "its own" in ended.stderr and "train step refused" in ended.stderr
