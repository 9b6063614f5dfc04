"""Queues of a GPU: gathers and reductions beside the computation give the bits of a program that does all in order.

Without a GPU every test here is skipped; tests/unit/transforms/test_streams.py checks the order of the queues as a log.
"""

import pytest
import torch

import fsharding as fs
from fsharding.comm.streams import DeviceStreams, Streams, streams_for, use_streams
from fsharding.testing import assert_bitwise_equal
from tests.helpers import bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")

MODEL = fs.models.decoder(
    fs.models.DecoderConfig(vocab_size=64, dim=256, layers=6, heads=4, kv_heads=2, intermediate_size=512)
)


def batch(seed):
    tokens = torch.randint(64, (8, 65), generator=torch.Generator().manual_seed(seed)).to("cuda")
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def trained(strategy, precision, **how):
    """Losses and the state of some steps; the host waits for none of them."""
    layout = fs.plan_layout(MODEL, fs.make_mesh(dp=-1, device="cuda"), strategy=strategy, precision=precision)
    state = fs.init_state(MODEL, fs.adamw(1e-2), fs.random.key(0), layout)
    step, losses = fs.make_train_step(MODEL, fs.adamw(1e-2), **how), []
    for number in range(6):
        state, metrics = step(state, batch(number))
        losses.append(metrics.loss)
    return torch.stack(losses), bits(state)


@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("level", range(4))
def test_queues_beside_the_computation_change_no_bit(level, microbatches, precision):
    with use_streams(Streams()):
        want = trained(fs.zero(level), precision, microbatches=microbatches)
    for depth in (0, 1, 2):
        found = trained(fs.zero(level), precision, microbatches=microbatches, donate=True, prefetch_depth=depth)
        assert_bitwise_equal(found, want)


def test_a_gpu_has_three_queues_and_keeps_them():
    device = torch.device("cuda", torch.cuda.current_device())
    streams = streams_for(device)
    assert isinstance(streams, DeviceStreams) and streams is streams_for(device)
    compute = torch.cuda.current_stream()
    with streams.on("gather"):
        gather = torch.cuda.current_stream()
        with streams.on("reduce"):
            assert len({compute, gather, torch.cuda.current_stream()}) == 3
            streams.wait_all()
    assert torch.cuda.current_stream() == compute
