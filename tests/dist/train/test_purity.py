"""A step changes nothing that went in; a donated state says so, and donation changes no bit."""

import pytest
import torch

import fsharding as fs
from fsharding.errors import DonatedError
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.helpers import bits, crossed, mesh_of
from tests.training import DP, MODEL, PLACES, PRECISIONS, ZEROS, batches, name_of, on_ranks, optimizer, placed


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
    crossed([*ZEROS, fs.HFSDP], PRECISIONS, kept=["zero0-bf16", "zero3-fp32", "hfsdp-bf16"], name=name_of),
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
    for use in (fs.tree.leaves, fs.state_bytes, lambda s: fs.make_train_step(MODEL, opt)(s, next(batches(1, mesh)))):
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
