"""Law: a run that saves, stops and loads has the losses of one that does not stop, bit for bit, also in another layout."""

import pytest
import torch

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.testing import run_ranks
from tests.helpers import full, token_batch

FP16 = fs.Precision(
    params=torch.float32, compute=torch.float16, loss_scale=fs.formats.LossScale(initial=64.0, interval=3)
)
CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=16, layers=2, heads=2, kv_heads=1, intermediate_size=20)


def train_on(state, step, mesh, steps):
    losses = []
    for _ in range(steps):
        state, metrics = step(state, token_batch(int(state.step), mesh=mesh))
        losses.append((metrics.loss.item(), metrics.grad_norm.item()))
    return state, losses


def train_with_a_break(path, axes, pairs):
    """For each pair of layouts: losses without a break, and with a save in one layout and a load into the other."""
    result = []
    mesh, model = fs.make_mesh(**axes, device="cpu"), fs.models.decoder(CONFIG)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.adamw(1e-2, weight_decay=0.1))
    for before, after, precision in pairs:
        step = fs.make_train_step(model, opt, donate=True)
        layout = fs.plan_layout(model, mesh, strategy=before, precision=precision)
        state, _ = train_on(fs.init_state(model, opt, fs.random.key(1), layout), step, mesh, 2)
        ck.save(path, state)
        _, without = train_on(state, step, mesh, 3)
        _, with_break = train_on(ck.load(path, layout.with_strategy(after)), step, mesh, 3)
        result.append((without, with_break))
    return result


@pytest.mark.parametrize(
    ("ranks", "axes", "pairs"),
    [
        pytest.param(
            2, {"dp": 2}, [(fs.zero(i), fs.zero(i), p) for i in range(4) for p in (fs.FP32, fs.BF16)], marks=full
        ),
        (2, {"dp": 2}, [(fs.zero(3), fs.zero(0), fs.FP32), (fs.zero(1), fs.zero(3), fs.BF16)]),
        pytest.param(
            4,
            {"replica": 2, "dp": 2},
            [(fs.hybrid(), fs.hybrid(), fs.FP32), (fs.hybrid(opt_state=True), fs.hybrid(opt_state=True), fs.BF16)],
            marks=full,
        ),
        (2, {"dp": 2}, [(fs.zero(1), fs.zero(1), FP16)]),
    ],
    ids=["same", "other", "replica", "fp16"],
)
def test_training_goes_on_bitwise(tmp_path, ranks, axes, pairs):
    for result in run_ranks(train_with_a_break, ranks, tmp_path / "a", axes, pairs):
        for without, with_break in result:
            assert without == with_break
            assert len({loss for loss, _ in without}) == 3
