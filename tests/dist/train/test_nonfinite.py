"""NaN and infinity in a loss or a gradient, on one rank: all ranks refuse the step and keep the state."""

import pytest
import torch

import fsharding as fs
from fsharding.errors import NonFiniteError
from fsharding.mesh.device_mesh import data_position
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.helpers import bits, crossed, mesh_of
from tests.toys import layer
from tests.training import ALONE, ZEROS, placed


def refused(strategy, axes, where):
    """A step with one NaN or infinity, then a good one; returns the text of the refusal."""
    mesh = mesh_of(axes)
    opt = fs.sgd(0.1)
    index, count = data_position(mesh)
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
        if index == 0 and local.numel():
            local.view(-1)[0] = torch.nan
    before = bits(wrong)
    step = fs.make_train_step(loss_fn, opt, donate=True)
    with pytest.raises(NonFiniteError) as caught:
        step(wrong, bad)
    assert_bitwise_equal(bits(wrong), before, "the state before the refused step")
    after, metrics = step(state, good)
    assert metrics.loss.isfinite() and int(after.step) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "where"),
    crossed(
        [*ZEROS, fs.HFSDP], ["batch", "weights"],
        kept=["zero0-batch", "zero1-weights", "zero2-batch", "zero3-batch", "zero3-weights", "hfsdp-weights"],
    ),
)  # fmt: skip
def test_nan_on_one_rank_is_refused_on_all(strategy, where):
    texts = run_ranks(refused, 4, strategy, placed(strategy), where)
    assert set(texts) == {
        "train step refused: loss or gradients are not finite.\n"
        "  step 0: loss nan, gradient norm nan\n"
        "  params.b: its gradient is not finite\n"
        "  params.w: its gradient is not finite\n"
        "The state is as before. Lower the learning rate, clip gradients, or look at this batch."
    }


@pytest.mark.parametrize("strategy", crossed([*ZEROS, fs.HFSDP], kept=["zero3", "hfsdp"]))
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
