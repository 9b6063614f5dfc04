"""Law: zero(0) to zero(3) on one mesh, and all policies and transports, agree in every bit."""

import pytest

import fsharding as fs
from fsharding.testing import assert_bitwise_equal, assert_trees_close, run_ranks
from tests.helpers import TRANSPORTS, crossed, full, mesh_of, whole
from tests.training import (
    CONFIG,
    DP,
    HYBRIDS,
    MODEL,
    OUTER,
    PRECISIONS,
    ZEROS,
    alone,
    batches,
    name_of,
    on_ranks,
    placed,
    train,
)


@pytest.mark.parametrize(("ranks", "precision"), crossed((2, 4), PRECISIONS, kept=["4-fp32"], name=name_of))
def test_strategies_agree_bitwise(ranks, precision):
    steps = (20 if ranks == 4 else 10) if precision == fs.FP32 else 8
    runs = [on_ranks(ranks, strategy, steps=steps, precision=precision, axes=DP) for strategy in ZEROS]
    assert max(runs[0].norms) > 0.5, "the clip must clip"
    for strategy, run in zip(ZEROS, runs, strict=True):
        assert_bitwise_equal(run, runs[3], f"{strategy} and zero3")


def test_strategies_agree_bitwise_where_rows_are_long():
    """Then gradients are summed where they end, or copied there in the second microbatch."""
    how = {"config": fs.models.DecoderConfig(**{**vars(CONFIG), "dim": 128, "intermediate_size": 192}), "steps": 3}
    for microbatches in (1, 2):
        runs = [on_ranks(2, strategy, DP, microbatches=microbatches, **how) for strategy in ZEROS]
        for run in runs:
            assert_trees_close(run.losses, alone(microbatches=microbatches, **how).losses, rtol=1e-5)
        for run in runs[1:] if microbatches == 1 else ():
            assert_bitwise_equal(run, runs[0])


@pytest.mark.parametrize(
    "strategy",
    [s if s == fs.hybrid(opt_state=True) else pytest.param(s, marks=full) for s in HYBRIDS],
    ids=name_of,
)
def test_hybrids_agree_bitwise_with_zero3(strategy):
    run = on_ranks(4, strategy, steps=20, axes=OUTER)
    assert_bitwise_equal(run, on_ranks(4, fs.zero(3), steps=20, axes=DP), f"{strategy} and zero3")


@pytest.mark.parametrize(
    "strategy",
    crossed(
        [fs.hybrid(fs.zero(i), opt_state=o) for i in range(3) for o in (0, 1)],
        kept=["hybrid(zero0, opt_state=True)", "zero1"],
    ),
)
def test_hybrids_of_other_levels_agree_bitwise_with_zero3(strategy):
    run = on_ranks(4, strategy, steps=5, axes=OUTER)
    assert_bitwise_equal(run, on_ranks(4, fs.zero(3), steps=5, axes=DP), f"{strategy} and zero3")


@pytest.mark.parametrize(
    "config",
    [CONFIG, pytest.param(fs.models.DecoderConfig(**{**vars(CONFIG), "tied": True}), marks=full)],
    ids=["untied", "tied"],
)
def test_policies_agree_bitwise(config):
    runs = {
        policy.name: on_ranks(2, fs.zero(3), policy=policy, config=config, microbatches=2, axes=DP)
        for policy in fs.policies.POLICIES.values()
    }
    for name, run in runs.items():
        assert_bitwise_equal(run, runs["everything_saveable"], f"{name} and everything_saveable")


def grads_under(policy, axes, strategy):
    mesh = mesh_of(axes)
    state = fs.init_state(MODEL, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(MODEL, mesh, strategy=strategy))
    run = fs.value_and_grad(fs.model_loss(MODEL, policy=policy))
    (loss, weight), grads = run(state.params, next(batches(1, mesh)))
    return loss, weight, whole(grads)


@pytest.mark.parametrize("strategy", [fs.zero(0), fs.zero(3)], ids=name_of)
def test_gradients_do_not_depend_on_the_policy(strategy):
    for ranks in (1, 2):
        found = {p.name: run_ranks(grads_under, ranks, p, DP, strategy)[0] for p in fs.policies.POLICIES.values()}
        for name, result in found.items():
            assert_bitwise_equal(result, found["everything_saveable"], f"{name} and everything_saveable")


@pytest.mark.parametrize("strategy", crossed([fs.zero(1), fs.zero(3), fs.hybrid(opt_state=True)], kept=["hfsdp"]))
def test_all_transports_agree_bitwise(strategy):
    native, *others = (on_ranks(4, strategy, transport=transport, axes=OUTER) for transport in TRANSPORTS)
    for other in others:
        assert_bitwise_equal(native, other)


@pytest.mark.parametrize("strategy", crossed([fs.zero(0), fs.zero(3), fs.hybrid(opt_state=True)], kept=["zero3"]))
def test_two_runs_of_one_program_agree_bitwise(strategy):
    again = run_ranks(train, 4, strategy, placed(strategy), opt="adamw", microbatches=3)[0]
    assert_bitwise_equal(again, on_ranks(4, strategy, opt="adamw", microbatches=3))
