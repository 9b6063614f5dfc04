"""`evaluate` against `module.eval()` of plain torch: no layer of a functionalized module is in train mode."""

import copy
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsharding as fs
from fsharding.testing import assert_trees_close, run_ranks
from tests.helpers import token_batch


class Block(nn.Module):
    """A layer that asks for its mode, and draws in train mode only."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        y = self.drop(torch.tanh(self.linear(x)))
        return x + (y + 100 if self.training else y)


class Net(nn.Module):
    """An embedding, two blocks and a head; without buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sum_of(logits, batch):
    return F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten(), reduction="sum")


PARTS = fs.hf.families.Parts(
    embed=lambda net, batch: net.embed(batch["tokens"]),
    block=lambda net, layer, x: layer(x),
    head=lambda net, x, batch: (sum_of(net.head(x), batch), batch["targets"].numel()),
)
UNITS = ("embed", "layers.*", "head")


def of_module(module):
    """A loss function that gives the module a key where it gets one, and one without a key."""
    net = fs.functionalize(module, UNITS, policy=fs.policies.nothing_saveable)

    def keyed(params, batch, key):
        return sum_of(net(params, batch["tokens"], random_key=key), batch), batch["targets"].numel()

    def keyless(params, batch):
        return sum_of(net(params, batch["tokens"]), batch), batch["targets"].numel()

    def by_rows(params, batch):
        logits = torch.vmap(lambda row: net(params, row))(batch["tokens"])
        return sum_of(logits, batch), batch["targets"].numel()

    return net, {"keyed": keyed, "keyless": keyless, "vmap": by_rows}


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
@pytest.mark.parametrize("inference", [False, True])
def test_an_evaluation_is_in_eval_mode_and_needs_no_key(strategy, inference):
    torch.manual_seed(0)
    module = Net()
    mesh = fs.make_mesh(dp=-1, device="cpu", timeout=timedelta(seconds=20))
    net, losses = of_module(module)
    batch = token_batch(0, vocab=16, rows=4)
    want = sum_of(copy.deepcopy(module).eval()(batch["tokens"]), batch).detach() / batch["targets"].numel()
    state, step = fs.setup(net, losses["keyed"], fs.sgd(0.1), fs.random.key(0), strategy, mesh=mesh)
    for loss in losses.values():
        with torch.inference_mode(inference):
            found = fs.evaluate(loss)(state, batch).mean
            assert_trees_close(found, want, rtol=1e-6)
    # What the evaluation has left behind does not change a step, which is in train mode again.
    _, metrics = step(state, batch)
    assert metrics.loss > 10 * want
    logits = fs.models.generate(lambda params, tokens: net(params, tokens), state, batch["tokens"][:1, :3], 1)
    assert logits.tolist() == [[int(copy.deepcopy(module).eval()(batch["tokens"][:1, :3])[0, -1].argmax())]]


def of_parts(axes):
    """The loss of a `Model` of the module, and of the module itself in eval mode."""
    torch.manual_seed(0)
    module = Net()
    model = fs.model_from_module(module, UNITS, PARTS)
    batch = token_batch(0, vocab=16, rows=4)
    want = sum_of(copy.deepcopy(module).eval()(batch["tokens"]), batch).detach() / batch["targets"].numel()
    mesh = fs.make_mesh(device="cpu", timeout=timedelta(seconds=20), **axes)
    options = {"microbatches": 2} if "pp" in axes else {}
    state, _ = fs.setup(model, None, fs.sgd(0.1), fs.random.key(0), mesh=mesh, **options)
    return fs.evaluate(model, **options)(state, batch).mean, want


@pytest.mark.parametrize("axes", [{"dp": 1}, {"pp": 2}], ids=str)
def test_parts_of_a_model_are_in_eval_mode(axes):
    size = 2 if "pp" in axes else 1
    for found, want in run_ranks(of_parts, size, axes) if size > 1 else [of_parts(axes)]:
        assert_trees_close(found, want, rtol=1e-6)
