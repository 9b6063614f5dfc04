"""Overflows in fp16 and NaNs on every axis: all ranks skip or refuse a step alike, and nothing has moved."""

from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding.formats.precision import LossScale, Precision
from fsharding.models import Experts
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.helpers import bits, full, mesh_of
from tests.models import batches
from tests.training import refusal_of_step

DENSE = fs.models.DecoderConfig(vocab_size=50, dim=16, layers=4, heads=4, kv_heads=2, intermediate_size=20)
ROUTED = replace(DENSE, layers=2, experts=Experts(4, 2, 12, score="sigmoid", z=1e-2, bias_rate=1e-2))
FP16 = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale(2.0**22, interval=2))
STEPS = 14

CASES = [
    ({"pp": 2}, DENSE, {"microbatches": 2, "schedule": "zbv"}),
    ({"tp": 2}, DENSE, {"sequence": True}),
    ({"cp": 2}, DENSE, {}),
    ({"ep": 2}, ROUTED, {}),
    ({"pp": 2, "ep": 2}, ROUTED, {"microbatches": 2}),
]
AXIS = pytest.mark.parametrize(
    ("axes", "config", "how"), [pytest.param(*c, marks=[full] if i else []) for i, c in enumerate(CASES)]
)


def started(axes, config, precision, microbatches=1, schedule="1f1b", **options):
    """A state, its step, and one batch for all steps."""
    mesh, model = mesh_of(axes), fs.models.decoder(config, **options)
    ranks = axes.get("pp", 1)
    stages = (
        fs.pipeline.stages_of(model, fs.pipeline.plan_schedule(schedule, ranks, microbatches)) if ranks > 1 else None
    )
    layout = fs.plan_layout(model, mesh, precision=precision, stages=stages)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.adamw(1e-2, weight_decay=0.1))
    state = fs.init_state(model, opt, fs.random.key(0), layout)
    step = fs.make_train_step(model, opt, microbatches=microbatches, schedule=schedule)
    return state, step, next(batches(mesh, config.vocab_size))


def scaled(axes, config, how, precision):
    """For each step whether it was skipped, the scale after it, loss and norm: float32[STEPS, 4]."""
    state, step, batch = started(axes, config, precision, **how)
    seen = []
    for _ in range(STEPS):
        before, number = bits(state), int(state.step)
        state, metrics = step(state, batch)
        assert int(state.step) == number + (not metrics.skipped)
        if metrics.skipped:
            assert_bitwise_equal(
                bits(state).replace(loss_scale=None), before.replace(loss_scale=None), "after a skipped step"
            )
            assert float(state.loss_scale.scale) == float(before.loss_scale.scale) / 2
        scale = 1.0 if state.loss_scale is None else float(state.loss_scale.scale)
        seen.append((metrics.skipped, scale, metrics.loss, metrics.grad_norm))
    return torch.tensor(seen)


@AXIS
def test_fp16_skips_overflows_on_all_ranks_and_trains(axes, config, how):
    runs = run_ranks(scaled, torch.tensor([*axes.values()]).prod().item(), axes, config, how, FP16)
    for run in runs[1:]:
        assert_bitwise_equal(run, runs[0], "the ranks' results")
    skipped = runs[0][:, 0].bool()
    first = skipped.tolist().index(False)
    assert first > 0 and skipped[first:].any(), "it overflows, and again after it has grown"
    good = runs[0][~skipped, 2:]
    wanted = scaled({"dp": 1}, config, {}, fs.FP32)[: len(good), 2:]
    torch.testing.assert_close(good, wanted, rtol=2e-2, atol=0)
    assert good[-1, 0] < good[0, 0]


def refused(axes, config, how, rank):
    """A step with a NaN in the weights of one rank, then one without; the text of the refusal."""
    state, step, batch = started(axes, config, fs.FP32, **how)
    wrong = state.replace(params=fs.tree.map(lambda x: x.clone(), state.params))
    if torch.distributed.get_rank() == rank:
        local_of(wrong.params["blocks"]["wo"]).view(-1)[0] = torch.nan
    return refusal_of_step(step, (wrong, batch), (state, batch))


@AXIS
def test_a_nan_on_one_rank_is_refused_on_all(axes, config, how):
    ranks = torch.tensor([*axes.values()]).prod().item()
    for rank in (0, ranks - 1):
        (text,) = {*run_ranks(refused, ranks, axes, config, how, rank)}
        first, *rows, last = text.splitlines()
        assert first == "train step refused: parameters are not finite."
        assert rows == ["  step 0: loss nan, gradient norm nan", "  params.blocks.wo: it is not finite itself"]
        assert last.startswith("They were so before this step")
