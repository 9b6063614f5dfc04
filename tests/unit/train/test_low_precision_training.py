"""Training with moments of 8 bits and bfloat16 main parameters: losses beside those of moments in float32."""

import pytest
import torch

import fsharding as fs
from fsharding import formats
from fsharding.formats.precision import Precision
from tests.helpers import full, slow

CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=64, layers=2, heads=2, kv_heads=1, intermediate_size=96)
MODEL = fs.models.decoder(CONFIG)
BF16 = torch.bfloat16
WIDE = Precision(compute=BF16)
MOMENTS = Precision(compute=BF16, moments=formats.MXFP8)
BOTH = Precision(params=BF16, grads=torch.float32, moments=formats.MXFP8, rounding="stochastic")


def batches(steps):
    """A token follows from the one before in seven cases of ten, so that there is a loss that nothing gets below."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(0, CONFIG.vocab_size, (8, 1), generator=generator)
        for _ in range(16):
            chance = torch.randint(0, CONFIG.vocab_size, (8, 1), generator=generator)
            follows = torch.rand((8, 1), generator=generator) < 0.7
            tokens = torch.cat((tokens, torch.where(follows, (5 * tokens[:, -1:] + 3) % CONFIG.vocab_size, chance)), 1)
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def losses(precision, steps):
    opt = fs.adamw(fs.optim.schedules.warmup_cosine(3e-3, 10, 200), weight_decay=0.1)
    layout = fs.plan_layout(MODEL, fs.make_mesh(device="cpu"), precision=precision)
    state, result = fs.init_state(MODEL, opt, fs.random.key(0), layout), []
    step = fs.make_train_step(MODEL, opt, donate=True)
    for batch in batches(steps):
        state, metrics = step(state, batch)
        result.append(float(metrics.loss))
    return torch.tensor(result)


@slow
@pytest.mark.parametrize("steps", [40, pytest.param(200, marks=full)])
def test_losses_are_within_one_percent(steps):
    wide, *narrow = (losses(precision, steps) for precision in (WIDE, MOMENTS, BOTH))
    assert wide[-1] < 0.8 * wide[0], "it learns"
    for run in narrow:
        assert float((run / wide - 1).abs().max()) < 0.01, "at every step"
