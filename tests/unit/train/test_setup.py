"""`setup` makes what its parts make; `update` is the update of a step; batches of ranks."""

import numpy as np
import pytest
import torch
from torch import nn

import fsharding as fs
from fsharding.base.errors import ArgumentError, BatchError, RandomKeyError
from fsharding.testing import assert_bitwise_equal
from tests.helpers import refusal, token_batch

MODEL = fs.models.decoder(
    fs.models.DecoderConfig(vocab_size=50, dim=16, layers=2, heads=2, kv_heads=1, intermediate_size=24)
)
KEY = fs.random.key(3)


def init(key):
    return {"w": fs.random.normal(key, (4, 2)), "b": fs.random.zeros((2,))}


def loss_fn(params, batch):
    unit = fs.gather_unit(params)
    error = batch["x"].to(unit["w"].dtype) @ unit["w"] + unit["b"]
    return fs.Loss(error.square().sum(), error.numel())


BATCH = {"x": torch.arange(12.0).reshape(3, 4)}


@pytest.mark.parametrize("strategy", ["zero0", "zero1", fs.zero(3), fs.hybrid()])
def test_setup_is_its_parts(strategy):
    opt = fs.adamw(1e-2)
    state, step = fs.setup(init, loss_fn, opt, KEY, strategy, precision=fs.BF16, frozen="b", microbatches=3)
    layout = fs.plan_layout(init(KEY), fs.make_mesh(dp=-1), strategy=strategy, precision=fs.BF16, frozen="b")
    by_hand = fs.init_state(init, opt, KEY, layout)
    assert_bitwise_equal(state, by_hand)
    after, metrics = step(state, BATCH)
    expected, expected_metrics = fs.make_train_step(loss_fn, opt, microbatches=3)(by_hand, BATCH)
    assert_bitwise_equal(after, expected)
    assert torch.equal(metrics.loss, expected_metrics.loss)


def test_setup_of_a_model_a_module_and_tensors():
    state, step = fs.setup(MODEL, None, fs.sgd(0.1), KEY)
    assert step(state, token_batch(0, vocab=50, rows=4))[1].loss > 0
    net = fs.functionalize(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), ["0", "2"])
    state, step = fs.setup(net, lambda params, batch: net(params, batch["x"]).square().mean(), fs.sgd(0.1), KEY)
    assert step(state, BATCH)[1].loss > 0
    tensors = {"w": torch.ones(4, 2), "b": torch.zeros(2)}
    state, _ = fs.setup(tensors, loss_fn, fs.sgd(0.1), KEY)
    assert torch.equal(state.params["w"].full_tensor(), tensors["w"])
    (tensors["w"].zero_(), None)
    assert torch.equal(state.params["w"].full_tensor(), torch.ones(4, 2)), "the state has tensors of its own"


def test_setup_refuses_and_says_what_to_type():
    opt = fs.sgd(0.1)
    rows = [
        ((nn.Linear(4, 2), loss_fn, opt, KEY), "fs.functionalize"),
        ((init, opt, loss_fn, KEY), "fs.setup"),
        ((init, None, opt, KEY), "Give a function (params, batch) -> (sum, count)."),
        ((init, lambda params: 0, opt, KEY), "a loss function (params, batch)"),
        ((lambda: {}, loss_fn, opt, KEY), "a function of a key"),
        ((init, loss_fn, torch.optim.SGD([torch.zeros(1)], 0.1), KEY), "fs.setup"),
    ]
    for arguments, text in rows:
        assert text in refusal(fs.setup, *arguments, kind=ArgumentError)
    assert "random.key" in refusal(fs.setup, init, loss_fn, opt, 0, kind=RandomKeyError)


@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16], ids=str)
@pytest.mark.parametrize("level", range(4))
def test_update_is_that_of_a_step(level, precision):
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(1e-2, weight_decay=0.1))
    state, step = fs.setup(init, loss_fn, opt, KEY, fs.zero(level), precision=precision)
    by_hand = state
    grad_fn = fs.value_and_grad(loss_fn, grads=state.layout.main, precision=precision)
    for _ in range(3):
        (loss, _), grads = grad_fn(by_hand.params, BATCH)
        before = by_hand
        by_hand = fs.update(by_hand, grads, opt)
        state, metrics = step(state, BATCH)
        assert torch.equal(loss, metrics.loss)
        assert int(before.step) + 1 == int(by_hand.step)
    for x, y in zip(fs.tree.leaves(by_hand), fs.tree.leaves(state), strict=True):
        torch.testing.assert_close(
            x.to_local() if hasattr(x, "to_local") else x, y.to_local() if hasattr(y, "to_local") else y
        )


def test_update_takes_gradients_cut_as_the_parameters():
    opt = fs.sgd(0.1)
    state, _ = fs.setup(init, loss_fn, opt, KEY, "zero1")
    _, grads = fs.value_and_grad(loss_fn)(state.params, BATCH)
    _, placed = fs.value_and_grad(loss_fn, grads=state.layout.main)(state.params, BATCH)
    assert_bitwise_equal(fs.update(state, grads, opt), fs.update(state, placed, opt))


def test_update_refuses_and_says_what_to_type():
    opt = fs.sgd(0.1)
    state, _ = fs.setup(init, loss_fn, opt, KEY)
    _, grads = fs.value_and_grad(loss_fn)(state.params, BATCH)
    assert "Swap the two: fs.update(state, grads, opt)." in refusal(fs.update, grads, state, opt, kind=ArgumentError)
    assert "Swap the two: fs.update(state, grads, opt)." in refusal(fs.update, state, opt, grads, kind=ArgumentError)
    assert "fs.setup or fs.init_state" in refusal(fs.update, state.params, grads, opt, kind=ArgumentError)


def test_parts_of_data_ranks_are_the_global_batch():
    batch = {"x": torch.arange(24).reshape(8, 3), "y": torch.arange(8)}
    assert_bitwise_equal(fs.local_batch(batch, fs.make_mesh(device="cpu")), batch)
    text = refusal(fs.local_batch, {"x": np.zeros(3)}, fs.make_mesh(device="cpu"), kind=BatchError)
    assert "fs.local_batch takes a global batch as trees of tensors." in text


def test_dropout_keeps_the_mean_and_follows_from_its_key():
    x = torch.full((40, 50), 3.0)
    once = fs.random.dropout(x, 0.25, KEY)
    assert torch.equal(once, fs.random.dropout(x, 0.25, KEY))
    assert not torch.equal(once, fs.random.dropout(x, 0.25, fs.random.fold_in(KEY, 1)))
    assert set(once.unique().tolist()) == {0.0, 4.0} and abs(float(once.mean()) - 3) < 0.1
    assert fs.random.dropout(x, 0.25, None) is x and fs.random.dropout(x, 0.0, KEY) is x
    leaf = torch.ones(100, requires_grad=True)
    fs.random.dropout(leaf, 0.5, KEY).sum().backward()
    assert leaf.grad is not None and set(leaf.grad.tolist()) == {0.0, 2.0}
    for p in (1, -0.1, True, "x"):
        assert "Pass a probability from 0 below 1." in refusal(fs.random.dropout, x, p, KEY, kind=ArgumentError)
    assert "Swap the two: (key, shape, p)." in refusal(fs.random.bernoulli, KEY, 0.5, (3,), kind=ArgumentError)


def test_a_loss_keeps_its_parts_apart_from_aux():
    loss = fs.Loss(torch.tensor(6.0), 3)
    assert tuple(loss) == (loss.sum, 3) and float(loss.mean) == 2
    state, _ = fs.setup(init, loss_fn, fs.sgd(0.1), KEY)
    grad_fn = fs.value_and_grad(loss_fn, has_aux=True)
    assert "needs (loss, aux)" in refusal(grad_fn, state.params, BATCH)


def test_what_a_prompt_shows_is_short_and_has_no_numbers_of_leaves():
    state, step = fs.setup(MODEL, None, fs.adamw(1e-2), KEY, precision=fs.FP16, microbatches=2, donate=True)
    lines = repr(state).splitlines()
    assert lines[1:3] == ["  step 0, 5,520 parameters in 12 leaves", "  zero3 on mesh {dp: 1}"]
    assert (
        lines[3].startswith("  bytes of this rank: params 22,080, opt_state ") and lines[4] == "  loss scale 65,536.0"
    )
    assert repr(state.layout) == "Layout(12 leaves, zero3, mesh {dp: 1})"
    assert repr(step) == "TrainStep(Model, microbatches=2, donate=True)"
    assert "step NoneType, " in repr(state.replace(step=None)), "also of a state that no step takes"
    step(state, token_batch(0, vocab=50, rows=4))
    assert repr(state) == "TrainState(donated)"
