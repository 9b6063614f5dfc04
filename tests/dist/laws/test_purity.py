"""Law: a step changes no input unless it may donate it, and refuses numbers that are not finite, on all ranks."""

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import DonatedError, NonFiniteError
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.sharding.named_sharding import local_of, sharding_of
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.helpers import bits, crossed, mesh_of
from tests.toys import layer
from tests.training import (
    ALONE,
    DP,
    MODEL,
    PLACES,
    PRECISIONS,
    ZEROS,
    batches,
    name_of,
    on_ranks,
    optimizer,
    placed,
    refusal_of_step,
)


def pure(strategy, axes, precision, opt, microbatches):
    mesh = mesh_of(axes)
    optim = optimizer(opt)
    state = fs.init_state(
        MODEL, optim, fs.random.key(0), fs.plan_layout(MODEL, mesh, strategy=strategy, precision=precision)
    )
    step = fs.make_train_step(MODEL, optim, microbatches=microbatches)
    for batch in batches(2, mesh):
        before, given = bits(state), bits(batch)
        after, _ = step(state, batch)
        assert_bitwise_equal(bits(state), before, "the state that went in")
        assert_bitwise_equal(batch, given, "the batch")
        again, _ = step(state, batch)
        assert_bitwise_equal(bits(after), bits(again), "two steps from one state")
        assert int(after.step) == int(state.step) + 1
        old, new = (fs.tree.leaves(bits(s.params if s.main is None else s.main)) for s in (state, after))
        assert not any(torch.equal(a, b) for a, b in zip(old, new, strict=True))
        state = after


@pytest.mark.parametrize(
    ("strategy", "precision"),
    crossed(
        [*ZEROS, fs.hybrid(opt_state=True)], PRECISIONS, kept=["zero0-bf16", "zero3-fp32", "hfsdp-bf16"], name=name_of
    ),
)
def test_a_step_changes_nothing_that_went_in(strategy, precision):
    opt, microbatches = ("adamw", 1) if precision == fs.FP32 else ("momentum", 3)
    run_ranks(pure, 4, strategy, placed(strategy), precision, opt, microbatches)


def donated(axes):
    mesh = mesh_of(axes)
    opt = optimizer("adamw")
    state = fs.init_state(MODEL, opt, fs.random.key(0), fs.plan_layout(MODEL, mesh))
    after, _ = fs.make_train_step(MODEL, opt, donate=True)(state, next(batches(1, mesh)))
    texts = {}
    for field in ("step", "params", "main", "opt_state", "loss_scale", "key", "layout"):
        with pytest.raises(DonatedError) as caught:
            getattr(state, field)
        texts[field] = str(caught.value)
    for use in (
        fs.tree.leaves,
        fs.debug.state_bytes,
        lambda s: fs.make_train_step(MODEL, opt)(s, next(batches(1, mesh))),
    ):
        with pytest.raises(DonatedError):
            use(state)
    assert int(after.step) == 1
    return texts


def test_a_donated_state_says_so():
    for texts in run_ranks(donated, 2, DP):
        for field, text in texts.items():
            assert text == (
                f"TrainState got a state that was donated: its {field} is gone.\n"
                "Use the state that the step returned, or make the step with donate=False."
            )


@pytest.mark.parametrize(
    ("strategy", "axes", "how"),
    crossed(
        PLACES,
        {
            "optxmicrobatches": ({"opt": "adamw", "microbatches": 3},),
            "optxprecision": ({"opt": "momentum", "precision": fs.BF16},),
        },
        kept=["zero0-optxprecision", "hfsdp-optxprecision"],
    ),
)
def test_donation_changes_no_bit(strategy, axes, how):
    assert_bitwise_equal(on_ranks(4, strategy, axes, **how), on_ranks(4, strategy, axes, donate=True, **how))


def refused(strategy, axes, where):
    """A step with one NaN or infinity, then a good one; returns the text of the refusal."""
    mesh = mesh_of(axes)
    opt = fs.sgd(0.1)
    index, count = data_rank_and_size(mesh)
    draws = {"w": fs.random.full((4, 4), 0.5), "b": fs.random.zeros((4,))}

    def loss_fn(params, batch):
        return layer(fs.gather_unit(params), batch).square().sum() + batch.sum(), 4.0

    state = fs.init_state(lambda key: draws, opt, fs.random.key(0), fs.plan_layout(draws, mesh, strategy=strategy))
    good, bad = torch.ones(4, 4), torch.ones(4, 4)
    wrong = state
    if where == "batch" and index == count - 1:
        bad[1, 2] = torch.nan
    if where == "infinite loss" and index == 0:
        bad[0, 0] = torch.inf
    if where == "weights":
        wrong = state.replace(params=fs.tree.map(lambda x: x.clone(), state.params))
        local = local_of(wrong.params["w"])
        first = local.numel() and all(start == 0 for (start, _), *_ in sharding_of(wrong.params["w"]).grid((4, 4)))
        if first:  # on all ranks that hold the element: copies that differ are refused before the step
            local.view(-1)[0] = torch.nan
    return refusal_of_step(fs.make_train_step(loss_fn, opt, donate=True), (wrong, bad), (state, good))


@pytest.mark.parametrize(
    ("strategy", "where"),
    crossed(
        [*ZEROS, fs.hybrid(opt_state=True)], ["batch", "weights"],
        kept=["zero0-batch", "zero1-weights", "zero2-batch", "zero3-batch", "zero3-weights", "hfsdp-weights"],
    ),
)  # fmt: skip
def test_nan_on_one_rank_is_refused_on_all(strategy, where):
    texts = run_ranks(refused, 4, strategy, placed(strategy), where)
    of_weights = (
        "train step refused: parameters are not finite.\n"
        "  step 0: loss nan, gradient norm nan\n"
        "  params.w: it is not finite itself\n"
        "They were so before this step, and no step fixes them: load an earlier checkpoint."
    )
    assert set(texts) == {
        of_weights
        if where == "weights"
        else "train step refused: loss or gradients are not finite.\n"
        "  step 0: loss nan, gradient norm nan\n"
        "  params.b: its gradient is not finite\n"
        "  params.w: its gradient is not finite\n"
        "The state is as before. Lower the learning rate, clip gradients, or look at this batch."
    }


@pytest.mark.parametrize("strategy", crossed([*ZEROS, fs.hybrid(opt_state=True)], kept=["zero3", "hfsdp"]))
def test_an_infinite_loss_of_one_rank_is_refused_on_all(strategy):
    texts = run_ranks(refused, 4, strategy, placed(strategy), "infinite loss")
    assert set(texts) == {
        "train step refused: loss or gradients are not finite.\n"
        "  step 0: loss inf, gradient norm nan\n"
        "  params.w: its gradient is not finite\n"
        "The state is as before. Lower the learning rate, clip gradients, or look at this batch."
    }


def test_infinite_gradients_of_a_finite_loss_are_refused():
    def loss_fn(params, batch):
        return fs.gather_unit(params)["w"].sqrt().sum(), 1.0

    draws = {"w": fs.random.zeros((4,))}
    layout = fs.plan_layout(draws, mesh_of(ALONE))
    state = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), layout)
    with pytest.raises(NonFiniteError, match=r"loss 0\.0, gradient norm inf"):
        fs.make_train_step(loss_fn, fs.sgd(0.1))(state, torch.zeros(1))
