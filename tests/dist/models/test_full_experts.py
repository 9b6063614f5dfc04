"""Experts with a capacity: a full one is refused by its own text everywhere, or drops what is counted by hand."""

from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

import fsharding as fs
from fsharding import ops
from fsharding.base.errors import NonFiniteError
from fsharding.ops.moe import capacity_of
from fsharding.testing import run_ranks
from tests.helpers import refusal

EXPERTS = fs.models.Experts(count=4, active=1, intermediate_size=8, capacity=1.0)
CONFIG = fs.models.DecoderConfig(vocab_size=32, dim=8, layers=2, heads=2, kv_heads=1, experts=EXPERTS)
ROWS = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(0))


def started(axes, experts, **options) -> tuple[Any, Any, Any, Any]:
    model = fs.models.decoder(replace(CONFIG, experts=experts))
    mesh = fs.make_mesh(device="cpu", timeout=timedelta(seconds=20), **axes)
    state, step = fs.setup(model, None, fs.sgd(0.1), fs.random.key(0), "zero1", mesh=mesh, **options)
    return model, state, step, fs.local_batch({"tokens": ROWS[:, :-1], "targets": ROWS[:, 1:]}, mesh)


def refusals(axes, microbatches):
    """What a full expert gives: errors of step, asynchronous step, step in fp16, and evaluation; and what is kept."""
    texts = []
    for options in ({}, {"check": "async"}, {"precision": fs.FP16}):
        model, state, step, batch = started(axes, EXPERTS, microbatches=microbatches, **options)
        scale = None if state.loss_scale is None else float(state.loss_scale.scale)

        def steps(step=step, state=state, batch=batch):
            for _ in range(2):
                step(state, batch)

        texts.append(refusal(steps, kind=NonFiniteError))
        assert scale is None or float(state.loss_scale.scale) == scale
    texts.append(refusal(lambda: fs.evaluate(model, microbatches=microbatches)(state, batch), kind=NonFiniteError))
    if "pp" not in axes:
        loss = fs.value_and_grad(fs.model_loss(model))(state.params, batch)[0]
        texts.append(refusal(lambda: fs.Loss(*loss).mean, kind=NonFiniteError))
        assert fs.models.generate(model, state, [[1, 2, 3], [4, 5, 6]], 2).shape == (2, 2)
    return texts


@pytest.mark.parametrize(("axes", "microbatches"), [({}, 1), ({"dp": 2}, 2), ({"pp": 2}, 2), ({"ep": 2}, 1)], ids=str)
def test_a_full_expert_is_named_and_no_numerical_problem(axes, microbatches):
    all_texts = run_ranks(refusals, 2, axes, microbatches) if axes else [refusals({"dp": -1}, microbatches)]
    for texts in all_texts:
        assert all("an expert got more tokens of a rank than its capacity has room for" in text for text in texts)
        assert all("Experts(capacity=..., drop=True)" in text for text in texts[:4])


def test_parameters_that_are_not_finite_are_no_lack_of_room():
    _, state, step, batch = started({"dp": -1}, EXPERTS)
    bad = fs.tree.map(lambda x: x * torch.nan if x.is_floating_point() else x, state.params)
    assert "parameters are not finite" in refusal(lambda: step(state.replace(params=bad), batch), kind=NonFiniteError)


def drops(axes, microbatches):
    """(dropped in the metrics of a step, dropped by this rank by hand, whether the loss is an evaluation's)."""
    model, state, step, batch = started(axes, replace(EXPERTS, drop=True), microbatches=microbatches)
    with mock.patch.object(ops, "route", side_effect=ops.route) as seen:
        loss = fs.evaluate(model, microbatches=microbatches)(state, batch).mean
        routings = []
        route = seen.side_effect
        seen.side_effect = lambda *args, **kwargs: routings.append(route(*args, **kwargs)) or routings[-1]
        again = fs.evaluate(model, microbatches=microbatches)(state, batch).mean
    by_hand = 0
    for routing in routings:
        counts = torch.bincount(routing.experts.flatten(), minlength=4)
        by_hand += int((counts - capacity_of(1.0, len(routing.experts), 1, 4)).clamp(min=0).sum())
    metrics = step(state, batch)[1]
    assert torch.equal(loss, again)
    return float(metrics.dropped), by_hand, float(loss), float(metrics.loss)


@pytest.mark.parametrize(("axes", "microbatches"), [({}, 1), ({"dp": 2}, 2), ({"pp": 2}, 2), ({"tp": 2}, 1)], ids=str)
def test_metrics_count_the_drops_of_all_layers_microbatches_and_data_ranks(axes, microbatches):
    results = run_ranks(drops, 2, axes, microbatches) if axes else [drops({"dp": -1}, microbatches)]
    total = sum(by_hand for _, by_hand, *_ in results) // (2 if "tp" in axes else 1)
    assert total > 0
    for dropped, _, loss, of_step in results:
        assert dropped == total and loss == pytest.approx(of_step, rel=1e-6)


def test_other_models_count_no_drops():
    _, state, step, batch = started({"dp": -1}, replace(EXPERTS, capacity=4.0))
    assert step(state, batch)[1].dropped is None
