"""First steps on several ranks: a loss that is a constant on one of them, and weights that no mean can be divided by."""

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import NonFiniteError, TransformError
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.testing import run_ranks

LEVELS = [0, 1, 3]


def constant_on(ranks, level, microbatches):
    """A first step whose loss is a constant on some ranks; the loss, or the text of the error."""
    mesh = fs.make_mesh(device="cpu", dp=-1)
    layout = fs.plan_layout({"w": torch.zeros(4, 2)}, mesh, strategy=fs.zero(level))
    state = fs.init_state(lambda _: {"w": fs.random.ones((4, 2))}, fs.sgd(0.0), fs.random.key(0), layout)
    rank = data_rank_and_size(mesh)[0]

    def loss(params, x):
        w = fs.gather_unit(params)["w"]
        return (torch.zeros(()), 0) if rank in ranks else ((x @ w).sum(), x.shape[0])

    step = fs.make_train_step(loss, fs.sgd(0.0), microbatches=microbatches)
    try:
        return float(step(state, torch.full((3, 4), 1.0 + rank))[1].loss)
    except TransformError as error:
        return str(error)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_a_constant_on_any_rank_is_refused_on_all(level, microbatches):
    # Rows of ones and of twos: (4 + 4) and (8 + 8) for each token.
    assert run_ranks(constant_on, 2, (), level, microbatches) == [12.0, 12.0]
    here, there = run_ranks(constant_on, 2, (1,), level, microbatches)
    assert "it does on this rank, but not on rank 1" in here and "(losses * mask).sum()" in here
    assert "it does not require grad" in there
    for text in run_ranks(constant_on, 2, (0, 1), level, microbatches):
        assert "has a loss that does not depend on its parameters" in text and "it does not require grad" in text


def weighs_nothing(weights):
    mesh = fs.make_mesh(device="cpu", dp=-1)
    layout = fs.plan_layout({"w": torch.zeros(4, 2)}, mesh)
    state = fs.init_state(lambda _: {"w": fs.random.ones((4, 2))}, fs.sgd(0.1), fs.random.key(0), layout)
    weight = weights[data_rank_and_size(mesh)[0]]
    step = fs.make_train_step(lambda params, x: ((x @ fs.gather_unit(params)["w"]).sum(), weight), fs.sgd(0.1))
    try:
        return float(step(state, torch.ones(3, 4))[1].count)
    except NonFiniteError as error:
        return str(error)


def test_weights_are_judged_by_their_sum():
    assert run_ranks(weighs_nothing, 2, (0, 3)) == [3.0, 3.0]
    for weights, text in (
        ((0, 0), "no token of this batch counts"),
        ((3, float("inf")), "the count of this batch is inf"),
    ):
        assert all(text in said for said in run_ranks(weighs_nothing, 2, weights))
