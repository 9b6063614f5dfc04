"""Compiled blocks and loss functions on two ranks: the losses of eager ones, on data axes and on `tp`."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import fsharding as fs
from fsharding.testing import run_ranks
from tests.helpers import full, token_batch
from tests.modules import UNITS, VOCAB, Net

MODEL = fs.models.decoder(
    fs.models.DecoderConfig(vocab_size=64, dim=16, layers=2, heads=4, kv_heads=2, intermediate_size=24)
)


def losses(layout, loss):
    opt = fs.adamw(1e-2)
    state, step, found = fs.init_state(MODEL, opt, fs.random.key(0), layout), fs.make_train_step(loss, opt), []
    for _ in range(2):
        state, metrics = step(state, token_batch(0, positions=16))
        found.append(float(metrics.loss))
    return found


def compared(axes, what, backend):
    """The losses of eager and of compiled steps, and how many graphs there were."""
    layout = fs.plan_layout(MODEL, fs.make_mesh(**axes, device="cpu"))
    torch.compiler.reset()
    graphs = CompileCounterWithBackend(backend)
    if what == "block":
        compiled = MODEL._replace(block=torch.compile(MODEL.block, backend=graphs))
    else:
        compiled = torch.compile(fs.model_loss(MODEL), backend=graphs)
    return losses(layout, MODEL), losses(layout, compiled), graphs.frame_count


@pytest.mark.parametrize(
    ("axes", "what", "backend"),
    [
        ({"tp": 2}, "block", "eager"),
        ({"dp": 2}, "loss", "aot_eager"),
        pytest.param({"tp": 2}, "block", "aot_eager", marks=full),
        pytest.param({"tp": 2}, "loss", "aot_eager", marks=full),
        pytest.param({"dp": 2}, "block", "aot_eager", marks=full),
    ],
    ids=str,
)
def test_compiled_steps_have_the_losses_of_eager_ones(axes, what, backend):
    ranks = run_ranks(compared, 2, axes, what, backend)
    assert ranks[0] == ranks[1]
    eager, found, count = ranks[0]
    assert eager[1] < eager[0]
    torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-5)
    assert count > 0


def module_losses(axes, backend):
    """The losses of a module by torch on one process, and of eager and compiled steps; how many graphs there were."""
    torch.manual_seed(0)
    module, opt, steps = Net(), fs.sgd(0.1), 3
    batch = token_batch(0, vocab=VOCAB)
    net = fs.functionalize(module, UNITS)
    mesh = fs.make_mesh(**axes, device="cpu")
    layout = fs.plan_layout(net, mesh)
    torch.compiler.reset()
    graphs = CompileCounterWithBackend(backend)

    def loss(params, batch):
        logits = net(params, batch["tokens"])["logits"].flatten(0, 1)
        return F.cross_entropy(logits, batch["targets"].flatten(), reduction="sum"), batch["targets"].numel()

    found = []
    for each in (loss, torch.compile(loss, backend=graphs)):
        state, step = fs.init_state(net, opt, fs.random.key(0), layout), fs.make_train_step(each, opt)
        for _ in range(steps):
            state, metrics = step(state, fs.local_batch(batch, mesh))
            found.append(metrics.loss.item())
    sgd, want = torch.optim.SGD(module.parameters(), lr=0.1), []
    for _ in range(steps):
        value = F.cross_entropy(module(batch["tokens"])["logits"].flatten(0, 1), batch["targets"].flatten())
        sgd.zero_grad()
        value.backward()
        sgd.step()
        want.append(value.item())
    return want, found[:steps], found[steps:], graphs.frame_count


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_losses_of_modules_are_right_on_two_ranks(backend):
    for want, eager, compiled, count in run_ranks(module_losses, 2, {"dp": 2}, backend):
        assert compiled == eager
        torch.testing.assert_close(compiled, want, rtol=1e-5, atol=1e-5)
        assert count == 1
