"""A captured step on a GPU: the bits of the step itself, for every strategy, donated or not, scaled or not.

Without a GPU every test here is skipped; tests/dist/train/test_capture.py has the same laws with a stand-in for the graph.
"""

import pytest
import torch

import fsharding as fs
from fsharding.formats.precision import LossScale, Precision
from fsharding.testing import assert_bitwise_equal
from tests.helpers import bits, refusal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")

MODEL = fs.models.decoder(
    fs.models.DecoderConfig(vocab_size=64, dim=64, layers=3, heads=4, kv_heads=2, intermediate_size=128)
)
FP16 = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale(2.0**17, interval=2))
OPT = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(fs.optim.schedules.linear(1e-2, 1e-3, 8)))


def batch(seed):
    tokens = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(seed)).to("cuda")
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def start(strategy, precision, **how):
    layout = fs.plan_layout(MODEL, fs.make_mesh(dp=1, device="cuda"), strategy=strategy, precision=precision)
    return fs.init_state(MODEL, OPT, fs.random.key(0), layout), fs.make_train_step(MODEL, OPT, **how)


def reports(step, state):
    seen = []
    for number in range(5):
        state, metrics = step(state, batch(number))
        seen.append((metrics.loss, metrics.grad_norm, metrics.count, bool(metrics.skipped), bits(state)))
    return seen


@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("level", range(4))
def test_a_captured_step_has_the_bits_of_the_step_itself(level, donate, precision):
    how = {"donate": donate, "microbatches": 1 + level % 2}
    state, step = start(fs.zero(level), precision, **how)
    want = reports(step, state)
    state, step = start(fs.zero(level), precision, **how)
    before = bits(state)
    graph = fs.capture(step, state, batch(9))
    assert_bitwise_equal(bits(state), before)
    assert_bitwise_equal(reports(graph, state), want)


def test_a_state_from_elsewhere_is_taken_in():
    state, step = start(fs.zero(3), fs.FP32)
    graph = fs.capture(step, state, batch(0))
    _, first = graph(state, batch(0))
    again, _ = start(fs.zero(3), fs.FP32)
    _, second = graph(again, batch(0))
    assert torch.equal(first.loss, second.loss)


def test_buffers_that_a_step_writes_are_captured():
    """The capture of a graph forbids to ask for the state of a generator, as the guard of a module does elsewhere."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.SyncBatchNorm(4))
    net = fs.functionalize(module, ("0",))

    def loss(params, batch, buffers):
        out, buffers = net(params, batch["x"], buffers=buffers)
        return (out - 1).square().mean(), buffers

    runs, rows = [], [{"x": torch.randn(8, 4, device="cuda")} for _ in range(3)]
    for captures in (False, True):
        state, step = fs.setup(net, loss, fs.sgd(0.1), fs.random.key(0), mesh=fs.make_mesh(dp=1, device="cuda"))
        step = fs.capture(step, state, rows[0]) if captures else step
        seen = []
        for batch in rows:
            state, _ = step(state, batch)
            seen.append(bits(state))
        runs.append(seen)
    assert_bitwise_equal(*runs)


def test_a_loss_function_that_reads_is_refused_with_its_line():
    def loss(params, batch):
        x = (batch["x"] @ fs.gather_unit(params)["w"]).square().sum()
        return x if x.item() > 1 else 2 * x

    mesh = fs.make_mesh(dp=1, device="cuda")
    state, step = fs.setup({"w": torch.ones(4, device="cuda")}, loss, fs.sgd(0.1), fs.random.key(0), mesh=mesh)
    text = refusal(fs.capture, step, state, {"x": torch.ones(3, 4, device="cuda")})
    assert "_local_scalar_dense at test_capture.py:" in text
