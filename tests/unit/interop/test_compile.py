"""`torch.compile` of functionalized modules and of losses that call them: the bits of the module of torch.

A module runs between two graphs; what the loss computes with its outputs is compiled.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import fsharding as fs
from fsharding.base.errors import TransformError
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests.helpers import refusal, slow, token_batch
from tests.modules import UNITS, VOCAB, Net, net_parts

BATCH = token_batch(0, vocab=VOCAB)
KEY = fs.random.key(1)


@pytest.fixture(params=["eager", "aot_eager"])
def graphs(request):
    torch.compiler.reset()
    return CompileCounterWithBackend(request.param)


def made(p=0.0):
    torch.manual_seed(0)
    return Net(p=p)


def loss_of(net, key=None):
    def loss(params, batch):
        logits = net(params, batch["tokens"], random_key=key)["logits"]
        targets = batch["targets"].flatten()
        return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), targets.numel()

    return loss


def start(net, level=3, precision=fs.FP32):
    layout = fs.plan_layout(net, fs.make_mesh(device="cpu"), strategy=fs.zero(level), precision=precision)
    return fs.init_state(net, fs.sgd(0.1), KEY, layout)


def reference(module, steps):
    """Mean losses before each step of plain SGD, and the parameters after the last one."""
    module, found = copy.deepcopy(module), []
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        loss = F.cross_entropy(module(BATCH["tokens"])["logits"].flatten(0, 1), BATCH["targets"].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        found.append(loss.item())
    return found, module.state_dict()


@slow
@pytest.mark.parametrize("units", [UNITS, ()], ids=str)
@pytest.mark.parametrize("what", ["loss", "module", "both"])
def test_a_compiled_call_trains_as_the_module(graphs, units, what):
    module = made()
    net = fs.functionalize(module, units)
    loss = loss_of(torch.compile(net, backend=graphs) if what != "loss" else net)
    loss = torch.compile(loss, backend=graphs) if what != "module" else loss
    state, step, losses = start(net), fs.make_train_step(loss, fs.sgd(0.1)), []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        losses.append(metrics.loss.item())
    want, expected = reference(module, 3)
    assert_trees_close(losses, want, rtol=1e-6)
    found = net.state_dict(fs.unshard(state.params))
    for name, value in expected.items():
        assert_trees_close(found[name], value, rtol=1e-5, atol=1e-6, what=name)
    # The loss is one graph after the module; the module by itself makes none.
    assert graphs.frame_count == (what != "module")


@slow
@pytest.mark.parametrize("key", [None, KEY], ids=["alone", "dropout"])
@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16], ids=["fp32", "bf16"])
def test_losses_and_gradients_have_the_bits_of_an_eager_call(graphs, key, precision):
    net = fs.functionalize(made(p=0.0 if key is None else 0.5), UNITS)
    params = start(net, precision=precision).params
    eager = fs.value_and_grad(loss_of(net, key), precision=precision)(params, BATCH)
    compiled = torch.compile(loss_of(net, key), backend=graphs)
    assert_bitwise_equal(fs.value_and_grad(compiled, precision=precision)(params, BATCH), eager)
    whole = fs.unshard(params)
    assert_bitwise_equal(
        torch.compile(net, backend=graphs)(whole, BATCH["tokens"], random_key=key)["logits"],
        net(whole, BATCH["tokens"], random_key=key)["logits"],
    )


def test_parts_of_a_model_run_between_graphs_as_well(graphs):
    module = made()
    del module.heat
    model = fs.model_from_module(module, UNITS, net_parts())
    params = start(model).params
    eager = fs.value_and_grad(fs.model_loss(model))(params, BATCH)
    by_block = model._replace(block=torch.compile(model.block, backend=graphs))
    for loss in (fs.model_loss(by_block), torch.compile(fs.model_loss(model), backend=graphs)):
        assert_bitwise_equal(fs.value_and_grad(loss)(params, BATCH), eager)


def test_a_loss_as_one_graph_is_refused(graphs):
    net = fs.functionalize(made(), UNITS)
    compiled = torch.compile(loss_of(net), backend=graphs, fullgraph=True)
    text = refusal(fs.value_and_grad(compiled), start(net).params, BATCH, kind=TransformError)
    assert "compiled as one graph" in text
