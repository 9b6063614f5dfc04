"""`evaluate`: the loss of a train step in every bit, forward only: nothing reduced, nothing alive after it."""

from datetime import timedelta

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import ArgumentError, BatchError, ConfigError, ScheduleError
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.helpers import refusal, token_batch

MODEL = fs.models.decoder(
    fs.models.DecoderConfig(vocab_size=50, dim=32, layers=4, heads=4, kv_heads=2, intermediate_size=36)
)
ROWS = 8


def started(axes, strategy="zero3", precision=fs.FP32, **options):
    mesh = fs.make_mesh(device="cpu", timeout=timedelta(seconds=20), **axes)
    opt = fs.adamw(1e-3)
    state, step = fs.setup(MODEL, None, opt, fs.random.key(0), strategy, mesh=mesh, precision=precision, **options)
    return state, step, fs.local_batch(token_batch(0, vocab=50, rows=ROWS), mesh)


def evaluated_beside_a_step(axes, strategy, precision, microbatches, schedule):
    """(loss of an evaluation, loss of the step on the same state, counts of the evaluation, whether nothing changed)."""
    options = {"microbatches": microbatches, "schedule": schedule}
    state, step, batch = started(axes, strategy, precision, **options)
    before = fs.tree.map(torch.clone, state)
    with fs.debug.record_collectives() as counts:
        loss = fs.evaluate(MODEL, **options)(state, batch)
    again = fs.evaluate(MODEL, **options)(state, batch)
    assert_bitwise_equal(before, state)
    assert not loss.sum.requires_grad and torch.equal(loss.mean, again.mean)
    reductions = sum(len(c.reductions) for c in counts)
    peak = max((c.peak_units for c in counts), default=0)
    _, metrics = step(state, batch)
    return loss.mean, loss.count, metrics.loss, metrics.count, reductions, peak


CASES = {
    **{f"zero{level}": ({"dp": 2}, f"zero{level}", fs.FP32, 1, "1f1b") for level in range(4)},
    "bf16": ({"dp": 2}, "zero3", fs.BF16, 2, "1f1b"),
    "tp": ({"tp": 2}, "zero3", fs.FP32, 1, "1f1b"),
    "cp": ({"cp": 2}, "zero3", fs.FP32, 1, "1f1b"),
    "pp": ({"pp": 2}, "zero1", fs.FP32, 4, "1f1b"),
    "zbv": ({"pp": 2}, "zero3", fs.FP32, 4, "zbv"),
    "interleaved": ({"pp": 2}, "zero2", fs.BF16, 4, "interleaved"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_loss_is_that_of_a_step(case):
    for mean, count, loss, weight, reductions, peak in run_ranks(evaluated_beside_a_step, 2, *case):
        assert torch.equal(mean, loss) and torch.equal(count, weight)
        assert reductions == 0 and peak <= 2


def test_the_loss_is_that_of_a_step_on_four_ranks_of_a_pipeline():
    for mean, _, loss, *_ in run_ranks(evaluated_beside_a_step, 4, {"pp": 2, "dp": 2}, "zero3", fs.FP32, 2, "1f1b"):
        assert torch.equal(mean, loss)


def of_parameters_alone():
    """A loss function with dropout and aux, on parameters without a state."""

    def loss_fn(params, batch, key=None):
        x = fs.random.dropout(batch["x"], 0.5, key)
        error = x @ fs.gather_unit(params)["w"] - batch["y"]
        return fs.Loss(error.square().sum(), error.numel()), {"rows": len(error), "error": error}

    mesh = fs.make_mesh(dp=-1, device="cpu", timeout=timedelta(seconds=20))
    state, _ = fs.setup({"w": torch.ones(4)}, loss_fn, fs.sgd(0.1), fs.random.key(0), mesh=mesh, has_aux=True)
    batch = fs.local_batch({"x": torch.ones(8, 4), "y": torch.zeros(8)}, mesh)
    loss, auxes = fs.evaluate(loss_fn, has_aux=True, microbatches=2)(state.params, batch)
    return loss, [aux["rows"] for aux in auxes], any(aux["error"].requires_grad for aux in auxes)


def test_parameters_alone_and_aux_of_each_microbatch():
    for loss, rows, tracked in run_ranks(of_parameters_alone, 2):
        assert (float(loss.sum), float(loss.count), float(loss.mean)) == (128.0, 8.0, 16.0)
        assert rows == [2, 2] and not tracked


def refusals_on_a_pipeline():
    state, _, batch = started({"pp": 2}, microbatches=2)

    def loss_fn(params, batch):
        return params["embed"]["table"].value.sum()

    return [
        refusal(fs.evaluate(MODEL, microbatches=2), state.params, batch, kind=ArgumentError),
        refusal(fs.evaluate(loss_fn), state, batch, kind=ScheduleError),
    ]


def test_refusals():
    alone, cut = run_ranks(refusals_on_a_pipeline, 2)[0]
    assert "fs.evaluate(model)(state, batch)" in alone and "Pass the Model itself" in cut
    assert "microbatches=0" in refusal(fs.evaluate, MODEL, microbatches=0, kind=ConfigError)
    assert "fs.model_loss(model)" in refusal(fs.evaluate, MODEL, has_aux=True, kind=ConfigError)
    state, _, batch = started({})
    odd = {name: x[:3] for name, x in batch.items()}
    assert "fs.evaluate cannot split" in refusal(fs.evaluate(MODEL, microbatches=2), state, odd, kind=BatchError)
