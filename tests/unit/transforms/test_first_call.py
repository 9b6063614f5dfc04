"""The first call of a loss function: losses that train nothing are refused, habits that make runs differ are warned of."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fsharding as fs
from fsharding.base.errors import ConfigError, NonFiniteError, TransformError

MODULE = nn.Linear(4, 2)
LAYOUT = fs.plan_layout({"w": torch.zeros(4, 2)}, fs.make_mesh(device="cpu"))
OTHER = fs.shard({"w": torch.ones(4, 2)}, LAYOUT)
X = torch.arange(12.0).view(3, 4)


def weights(params):
    return fs.gather_unit(params)["w"]


def detached(params, x):
    return (x @ weights(params).detach()).sum()


def without_grad(params, x):
    with torch.no_grad():
        return (x @ weights(params)).sum()


def of_another_state(params, x):
    return (x @ weights(OTHER)).sum()


def of_a_module(params, x):
    return MODULE(x).sum()


def run_step(loss, layout=LAYOUT, **options):
    state = fs.state_from_params(fs.shard({"w": torch.ones(4, 2)}, layout), fs.sgd(0.1), fs.random.key(0), layout)
    return fs.make_train_step(loss, fs.sgd(0.1), **options)(state, X)


def run_by_hand(loss):
    return fs.value_and_grad(loss)(fs.shard({"w": torch.ones(4, 2)}, LAYOUT), X)


CONSTANTS = [
    (detached, "it does not require grad"),
    (without_grad, "it does not require grad"),
    (of_another_state, "it does not require grad"),
    (of_a_module, "it was computed from other tensors that require grad"),
]


@pytest.mark.parametrize(("loss", "row"), CONSTANTS)
def test_a_loss_of_no_parameter_is_refused_by_each_first_step(loss, row):
    for _ in range(2):
        with pytest.raises(TransformError, match="does not depend on its parameters") as caught:
            run_step(loss)
        assert row in str(caught.value) and 'fs.gather_unit(params["head"])' in str(caught.value)


@pytest.mark.parametrize(("loss", "row"), CONSTANTS)
def test_by_hand_it_has_gradients_of_zero_and_is_warned_of(loss, row):
    with pytest.warns(UserWarning, match="does not depend on its parameters: all gradients are 0") as seen:
        _, grads = run_by_hand(loss)
    assert len(seen) == 1 and row in str(seen[0].message)
    assert not grads["w"].to_local().any()


def test_every_leaf_frozen_is_refused():
    frozen = fs.plan_layout({"w": torch.zeros(4, 2)}, fs.make_mesh(device="cpu"), frozen="w")
    with pytest.raises(TransformError, match="every leaf is frozen"):
        run_step(lambda params, x: (x @ weights(params)).sum(), frozen)


def quotient(params, x):
    return (x @ weights(params)).sum() / 6, 6


def quotient_of_tensors(params, x):
    count = torch.tensor(6)
    return (x @ weights(params)).sum() / count, count


def scaled(params, x):
    return (x @ weights(params)).sum() * (1 / 6), 6


def mean(params, x):
    return (x @ weights(params)).mean(), 6


def mean_of_torch(params, x):
    return functional.mse_loss(x @ weights(params), torch.zeros(3, 2)), torch.tensor(6)


@pytest.mark.parametrize("run", [run_step, run_by_hand])
@pytest.mark.parametrize("loss", [quotient, quotient_of_tensors, scaled, mean, mean_of_torch])
def test_a_mean_with_its_weight_is_warned_of_once(run, loss):
    with pytest.warns(UserWarning, match=r"got \(mean, 6\), but takes \(sum, count\)") as seen:
        run(loss)
    assert len(seen) == 1


def test_sums_and_other_factors_are_not_warned_of():
    def half(params, x):
        return (x @ weights(params)).sum() / 2, 6

    def plain(params, x):
        return (x @ weights(params)).sum(), 6

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for loss in (half, plain):
            run_by_hand(loss)
            run_step(loss)
    assert seen == []


def drops(params, x):
    return functional.dropout(x @ weights(params), 0.5).sum()


def draws(params, x):
    return (torch.rand(3, 4) * x @ weights(params)).sum()


def draws_in_python(params, x):
    return (random.random() * x @ weights(params)).sum()


def draws_in_numpy(params, x):
    return (np.random.rand() * x @ weights(params)).sum()


@pytest.mark.parametrize("run", [run_step, run_by_hand])
@pytest.mark.parametrize(
    ("loss", "owner"), [(drops, "torch"), (draws, "torch"), (draws_in_python, "random"), (draws_in_numpy, "numpy")]
)
def test_numbers_of_a_global_generator_are_warned_of_once(run, loss, owner):
    with pytest.warns(UserWarning, match=f"draws from the global generator of {owner}, so") as seen:
        run(loss)
    assert len(seen) == 1


def test_later_calls_are_not_looked_at():
    calls = 0

    def loss(params, x):
        nonlocal calls
        calls += 1
        if calls > 1:
            torch.rand(2)
        return (x @ weights(params)).sum()

    grad = fs.value_and_grad(loss)
    params = fs.shard({"w": torch.ones(4, 2)}, LAYOUT)
    for _ in range(3):
        grad(params, X)
    assert calls == 3


def test_one_key_for_two_draws_is_warned_of_with_both_lines():
    def loss(params, batch, key):
        x = fs.random.dropout(batch, 0.5, key)
        y = x @ weights(params)
        return fs.random.dropout(y, 0.5, key).sum()

    with pytest.warns(UserWarning, match="draws twice with one key") as seen:
        run_step(loss)
    text = str(seen[0].message)
    assert len(seen) == 1 and "dropout(batch, 0.5, key)" in text and "dropout(y, 0.5, key)" in text


def test_keys_that_differ_and_layers_that_are_computed_again_are_not_warned_of():
    def block(unit, x, key):
        return fs.random.dropout(x @ unit["w"] @ unit["w"].T, 0.5, key)

    def loss(params, batch, key):
        first, second = fs.random.split(key)
        run = fs.remat(block)
        unit = fs.gather_unit(params)
        return run(unit, run(unit, batch, first), second).sum()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run_step(loss, microbatches=3)
    assert seen == []


def test_one_draw_at_two_leaves_is_refused():
    def init(key):
        w = fs.random.normal(key, (4, 2))
        return {"online": w, "target": w, "scale": fs.random.ones((2,)), "shift": fs.random.ones((2,))}

    layout = fs.plan_layout(init(fs.random.key(0)), fs.make_mesh(device="cpu"))
    with pytest.raises(ConfigError) as caught:
        fs.init_state(init, fs.sgd(0.1), fs.random.key(0), layout)
    assert "params.online, params.target are one LazyTensor" in str(caught.value)


def test_one_tensor_of_constants_and_two_draws_with_one_key_are_taken():
    def init(key):
        ones = fs.random.ones((2,))
        return {name: fs.random.normal(key, (4, 2)) for name in ("online", "target")} | {"scale": ones, "shift": ones}

    layout = fs.plan_layout(init(fs.random.key(0)), fs.make_mesh(device="cpu"))
    params = fs.init_state(init, fs.sgd(0.1), fs.random.key(0), layout).params
    assert torch.equal(params["online"].to_local(), params["target"].to_local())


# ------------------------------------------------------------------------------------------------------------- weights
def weighing(weight):
    def loss(params, x):
        w = weights(params)
        return (x.to(w.dtype) @ w).float().sum(), weight

    return loss


@pytest.mark.parametrize("precision", [fs.FP32, fs.FP16])
@pytest.mark.parametrize("check", ["sync", "async"])
@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (0, "no token of this batch counts"),
        (torch.tensor(0), "no token of this batch counts"),
        (float("inf"), "the count of this batch is inf"),
        (float("nan"), "the count of this batch is nan"),
        (-3, "the count of this batch is -3"),
    ],
)
def test_a_weight_that_divides_nothing_refuses_the_step(weight, text, check, precision):
    layout = fs.plan_layout({"w": torch.zeros(4, 2)}, fs.make_mesh(device="cpu"), precision=precision)
    state = fs.state_from_params(fs.shard({"w": torch.ones(4, 2)}, layout), fs.sgd(0.1), fs.random.key(0), layout)
    step = fs.make_train_step(weighing(weight), fs.sgd(0.1), check=check)
    if check == "async":
        after, _ = step(state, X)
    with pytest.raises(NonFiniteError, match=text) as caught:
        step(state, X)
    assert "learning rate" not in str(caught.value) and "step 0" in str(caught.value)
    if check == "async":
        assert torch.equal(after.params["w"].to_local(), state.params["w"].to_local())
        assert int(after.step) == 0


@pytest.mark.parametrize("weight", [0, float("inf"), -1.0])
def test_a_mean_of_nothing_is_nan_by_hand_and_refused_by_loss(weight):
    (loss, _), grads = run_by_hand(weighing(weight))
    assert loss.isnan() and grads["w"].to_local().isnan().all()
    total = fs.evaluate(weighing(weight))(OTHER, X)
    assert float(total.sum) == float((X @ torch.ones(4, 2)).sum())
    with pytest.raises(NonFiniteError, match=r"fs\.Loss has no mean"):
        _ = total.mean
