"""The step written by hand with public functions is the step."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding.testing import assert_bitwise_equal, assert_trees_close, run_ranks
from tests.helpers import crossed, full, mesh_of, whole
from tests.toys import Toy, layer, layers_of, squares, toy_batches, toy_draws
from tests.training import ALONE, DP, MODEL, OUTER, ZEROS, batches, name_of, optimizer


def research_loss(params, batch):
    x = MODEL.embed(fs.gather_unit(params["embed"]), batch)
    x = fs.scan_units(MODEL.block, params["blocks"], x, policy=fs.policies.save_except_gathered)
    return MODEL.head(fs.gather_unit(params["head"]), x, batch)


def by_hand(strategy, axes, opt, frozen=()):
    """The step with nothing hidden, and `make_train_step` beside it: largest difference of losses and parameters."""
    mesh = mesh_of(axes)
    optim = optimizer(opt)
    layout = fs.plan_layout(MODEL, mesh, strategy=strategy, frozen=frozen)
    state = fs.init_state(MODEL, optim, fs.random.key(0), layout)
    step = fs.make_train_step(MODEL, optim)
    params, opt_state = state.params, state.opt_state
    losses = []
    goal = layout.main if frozen else None
    for batch in batches(4, mesh):
        (loss, weight), grads = fs.value_and_grad(research_loss, grads=goal)(params, batch)
        updates, opt_state = optim.update(grads, opt_state, params)
        params = fs.optim.apply_updates(params, updates)
        state, metrics = step(state, batch)
        losses.append((loss.item(), metrics.loss.item(), weight.item(), metrics.count.item()))
    assert fs.tree.map(lambda x: str(x.placements), params) == fs.tree.map(lambda x: str(x.placements), state.params)
    return losses, whole(params), whole(state.params), whole(opt_state.states[1].mu) if opt == "adamw" else None


@pytest.mark.parametrize("opt", ["adamw", pytest.param("sgd", marks=full), pytest.param("momentum", marks=full)])
@pytest.mark.parametrize("strategy", ZEROS, ids=name_of)
def test_the_step_by_hand_is_the_step(strategy, opt):
    for losses, params, reference, _ in run_ranks(by_hand, 2, strategy, DP, opt):
        for mine, theirs, weight, weights in losses:
            assert mine == pytest.approx(theirs, rel=1e-6) and weight == weights
        assert_trees_close(params, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "opt"),
    crossed([fs.zero(1), fs.zero(3)], ["adamw", "sgd", "momentum"], kept=["zero1-sgd", "zero3-momentum"]),
)
def test_the_step_by_hand_with_frozen_leaves_is_the_step(strategy, opt):
    for losses, params, reference, _ in run_ranks(by_hand, 2, strategy, DP, opt, ("embed", "blocks.wq")):
        assert all(mine == pytest.approx(theirs, rel=1e-6) for mine, theirs, *_ in losses)
        assert_trees_close(params, reference, rtol=1e-6, atol=1e-6)


def through_transformed_shards(params, batch):
    """What is gathered are not the state's own shards but functions of them, as in weight decay through the loss."""
    shards = fs.tree.map(torch.tanh, params)
    return squares(layer(fs.gather_unit(shards), batch["x"]), batch)


def through_its_own_gradient(params, batch):
    """A gradient penalty: the loss differentiates itself with respect to its input."""
    x = batch["x"].clone().requires_grad_()
    out = layer(fs.gather_unit(params["second"]), layer(fs.gather_unit(params["first"]), x))
    (slope,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
    total, weight = squares(out, batch)
    return total + slope.square().sum(), weight


BY_HAND = {
    "transformed": Toy({"w": (3, 5), "b": (3,)}, through_transformed_shards, 5, 3),
    "penalty": Toy({"first": layers_of(6, 5)[0], "second": layers_of(5, 3)[0]}, through_its_own_gradient, 6, 3),
}


def summed_gradients(name, strategies, axes, microbatches):
    toy, mesh = BY_HAND[name], mesh_of(axes)
    draws, results = toy_draws(toy), []
    for strategy in strategies:
        layout = fs.plan_layout(draws, mesh, strategy=strategy)
        state = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), layout)
        batch = next(toy_batches(toy, mesh, 1))
        held: Any = None
        for i in range(microbatches):
            goal = layout.main if i + 1 == microbatches else layout.grads
            piece = {key: x.chunk(microbatches)[i] for key, x in batch.items()}
            _, held = fs.value_and_grad(toy.loss, grads=goal, mean=False)(state.params, piece, accumulate=held)
        results.append(whole(held))
    return results


@pytest.mark.parametrize("name", BY_HAND)
def test_losses_that_do_unusual_things_with_their_parameters(name):
    params = fs.tree.map(lambda draw: draw.tensor().requires_grad_(), toy_draws(BY_HAND[name]))
    total, _ = BY_HAND[name].loss(params, next(toy_batches(BY_HAND[name], mesh_of(ALONE), 1)))
    paths, leaves = fs.tree.paths(params), fs.tree.leaves(params)
    reference = dict(zip(paths, torch.autograd.grad(total, leaves), strict=True))
    strategies = [*ZEROS, fs.hybrid(), fs.hybrid(opt_state=True), fs.hybrid(params=True)]
    for microbatches in (1, 3):
        results = run_ranks(summed_gradients, 4, name, strategies, OUTER, microbatches, timeout=30)
        for strategy, found in zip(strategies, results[0], strict=True):
            assert_trees_close(found, reference, rtol=1e-4, atol=1e-4, what=f"{strategy}, {microbatches} microbatches")


def test_loss_functions_may_return_a_mean_and_aux():
    mesh = mesh_of(ALONE)
    draws = {"w": fs.random.normal(fs.random.key(0), (3, 3))}
    state = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(draws, mesh))

    def loss_fn(params, x):
        out = x @ fs.gather_unit(params)["w"]
        return out.square().mean(), {"out": out.detach()}

    x = torch.eye(3)
    (loss, aux), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params, x)
    w = draws["w"].tensor().requires_grad_()
    reference = w.square().mean()
    assert_trees_close(loss, reference.detach(), rtol=1e-6)
    assert_trees_close(grads["w"].full_tensor(), torch.autograd.grad(reference, w)[0], rtol=1e-6)
    assert_bitwise_equal(aux["out"], w.detach())


def test_masked_targets_do_not_count():
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([1, -100, 2, -100])
    params = {"norm": torch.ones(32), "unembed": torch.randn(5, 32, generator=torch.Generator().manual_seed(1))}
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(2))
    total, count = MODEL.head(params, x, {"targets": targets[None]})
    logits = F.rms_norm(x, (32,), eps=1e-5) @ params["unembed"].T
    assert int(count) == 2
    assert_trees_close(total, -(logits.log_softmax(-1)[0, 0, 1] + logits.log_softmax(-1)[0, 2, 2]), rtol=1e-5)
