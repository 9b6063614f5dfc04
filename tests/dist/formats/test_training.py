"""Training in low precision beside bfloat16: the loss of a tiny decoder on text after 200 steps."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fsharding as fs
from fsharding import formats
from fsharding.formats.precision import FP8, FP8_BLOCK, KEEP, MXFP8, Precision
from fsharding.testing import run_ranks
from tests.helpers import full

MODEL = fs.models.decoder(
    fs.models.DecoderConfig(vocab_size=256, dim=64, layers=4, heads=4, kv_heads=2, intermediate_size=160)
)
# A text that no change of the library changes: losses are compared to within 1 %.
TEXT = torch.frombuffer(bytearray((Path(__file__).parents[3] / "LICENSE").read_bytes()), dtype=torch.uint8).long()
NVFP4 = Precision(
    params=torch.float32,
    compute=torch.bfloat16,
    gather=formats.NVFP4.with_rounding("stochastic"),
    keep=(*KEEP, "blocks[-2:]"),
)


def final_loss(precision, steps):
    """The loss after so many steps, on text that is fixed."""
    mesh = fs.make_mesh(device="cpu", dp=-1)
    layout = fs.plan_layout(MODEL, mesh, strategy=fs.zero(3), precision=precision)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(fs.optim.schedules.warmup_cosine(1e-3, 10, steps)))
    state = fs.init_state(MODEL, opt, fs.random.key(0), layout)
    step, generator = fs.make_train_step(MODEL, opt, donate=True), torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(TEXT) - 65, (8,), generator=generator)
        state, _ = step(state, batch_at(starts, mesh))
    return float(fs.evaluate(MODEL)(state, batch_at(torch.arange(0, len(TEXT) - 65, 64)[:128], mesh)).mean)


def batch_at(starts, mesh):
    rows = torch.stack([TEXT[i : i + 65] for i in starts.tolist()])
    return fs.local_batch({"tokens": rows[:, :-1], "targets": rows[:, 1:]}, mesh)


def final_losses(steps):
    return {name: final_loss(precision, steps) for name, (precision, _) in PRECISIONS.items()}


PRECISIONS = {"bf16": (fs.BF16, 0.0), "fp8": (FP8, 0.01), "fp8 blocks": (FP8_BLOCK, 0.01), "mxfp8": (MXFP8, 0.01)}
PRECISIONS["nvfp4"] = (NVFP4, 0.02)
PRECISIONS["8-bit moments"] = (replace(fs.BF16, moments=formats.MXFP8), 0.01)
PRECISIONS["8-bit moments, bf16 main"] = (
    Precision(params=torch.bfloat16, grads=torch.float32, moments=formats.MXFP8, rounding="stochastic"), 0.01,
)  # fmt: skip
PRECISIONS["mxfp8 both ways"] = (
    Precision(
        params=torch.float32, compute=formats.MXFP8, reduce=formats.MXFP8, columnwise=("wq", "wk", "wv", "gate", "up")
    ),
    0.01,
)


@pytest.mark.timeout(1800)
@full
@pytest.mark.parametrize("steps", [10, 200])
def test_losses_stay_near_those_of_bfloat16(steps):
    losses = run_ranks(final_losses, 2, steps, timeout=1700)[0]
    for name, (_, most) in PRECISIONS.items():
        assert losses[name] == pytest.approx(losses["bf16"], rel=most), name
    assert steps < 200 or losses["bf16"] < 2.7
