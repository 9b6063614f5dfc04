"""Narrow compute and wire dtypes, and steps that fp16 skips."""

import pytest
import torch

import fsharding as fs
from fsharding.formats.precision import LossScale, Precision
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, assert_trees_close, run_ranks
from tests.helpers import full, mesh_of
from tests.training import DP, MODEL, ZEROS, alone, batches, on_ranks, optimizer


def test_bf16_compute_is_close_to_fp32():
    for opt in ("sgd", "adamw"):
        reference = alone(opt=opt, steps=4)
        for strategy in ZEROS:
            run = on_ranks(2, strategy, opt=opt, steps=4, precision=fs.BF16)
            assert_trees_close(run.losses, reference.losses, rtol=0, atol=3e-3)


def test_a_reduce_dtype_narrows_the_wire_only():
    precision = Precision(reduce=torch.bfloat16)
    runs = [on_ranks(2, strategy, precision=precision) for strategy in ZEROS]
    for run in runs:
        assert_bitwise_equal(run, runs[0])
    assert_trees_close(runs[0].losses, alone().losses, rtol=0, atol=3e-3)
    assert runs[0].losses != on_ranks(2, fs.zero(0)).losses


def scaled(strategy, axes, donate):
    """Every transition of a run with a loss scale that is too large at first, and what went wrong with it."""
    mesh = mesh_of(axes)
    precision = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale(2.0**22, interval=2))
    layout = fs.plan_layout(MODEL, mesh, strategy=strategy, precision=precision)
    opt = optimizer("adamw")
    state = fs.init_state(MODEL, opt, fs.random.key(0), layout)
    step = fs.make_train_step(MODEL, opt, donate=donate)
    seen = []
    for batch in batches(14, mesh):
        before = fs.tree.map(lambda x: local_of(x).clone(), state)
        old_step = int(state.step)
        if strategy.params:
            # Its parameters are the float32 main copies, so the same numbers come without scaling and rounding.
            (loss, _), grads = fs.value_and_grad(fs.model_loss(MODEL))(state.params, batch)
            unscaled = loss.item(), fs.global_norm(grads).item()
        state, metrics = step(state, batch)
        after = fs.tree.map(lambda x: local_of(x).clone(), state)
        if metrics.skipped:
            assert_bitwise_equal(after.replace(loss_scale=None), before.replace(loss_scale=None), "a skipped step")
            assert after.loss_scale.scale == before.loss_scale.scale / 2
            assert after.loss_scale.good_steps == 0
        else:
            grown = before.loss_scale.good_steps == 1
            assert after.loss_scale.scale == before.loss_scale.scale * (2 if grown else 1)
            assert after.loss_scale.good_steps == (0 if grown else 1)
            assert metrics.loss.isfinite() and metrics.grad_norm.isfinite()
            if strategy.params:
                assert (metrics.loss.item(), metrics.grad_norm.item()) == pytest.approx(unscaled, rel=2e-2)
        assert int(state.step) == old_step + (not metrics.skipped)
        seen.append((metrics.skipped, float(after.loss_scale.scale), metrics.loss.item()))
    return seen


@pytest.mark.parametrize("donate", [pytest.param(False, marks=full), True])
def test_fp16_skips_overflows_and_grows_again(donate):
    runs = [run_ranks(scaled, 2, strategy, DP, donate) for strategy in ZEROS]
    for run in runs:
        assert run[0] == run[1] == runs[0][0]
    skipped = [row[0] for row in runs[0][0]]
    assert skipped[0] and not all(skipped)
    assert any(skipped[skipped.index(False) :]), "after growth it overflows again"
    good = [loss for skip, _, loss in runs[0][0] if not skip]
    assert good[-1] < good[0]


def donate_after_skip(axes):
    mesh = mesh_of(axes)
    precision = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale(2.0**40))
    opt = optimizer("adamw")
    state = fs.init_state(MODEL, opt, fs.random.key(0), fs.plan_layout(MODEL, mesh, precision=precision))
    before = fs.tree.map(lambda x: local_of(x).clone(), state)
    batch = next(batches(1, mesh))
    skipped, metrics = fs.make_train_step(MODEL, opt)(state, batch)
    assert metrics.skipped
    small = skipped.replace(loss_scale=skipped.loss_scale._replace(scale=torch.tensor(8.0)))
    _, metrics = fs.make_train_step(MODEL, opt, donate=True)(small, batch)
    assert not metrics.skipped
    assert_bitwise_equal(fs.tree.map(local_of, state), before, "the state before the skipped step")


def test_donating_the_state_after_a_skipped_step_leaves_the_one_before_alone():
    run_ranks(donate_after_skip, 2, DP)
