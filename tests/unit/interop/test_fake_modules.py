"""Functionalized modules under FakeTensorMode: the shapes and dtypes of a real run, without values."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fsharding as fs
from fsharding.base.errors import TransformError
from fsharding.testing import assert_bitwise_equal
from tests.helpers import refusal

KEY = fs.random.key(0)


class Constants(nn.Module):
    """A buffer and an attribute that the forward reads, around a stack of blocks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Table()) for _ in range(2))
        self.shift = torch.ones(4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + self.shift
        return x


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.full((4,), 2.0))

    def forward(self, x):
        return x * self.table


MODULES = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), ("0",)),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.SyncBatchNorm(4)), ("0", "1")),
    "norm, eval": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), ("0",)),
    "spectral": (lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))), ()),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), ("0", "2")),
    "constants": (Constants, "layers.*"),
}


def run(net, params):
    """The output, buffers, loss and gradients of a call."""
    buffers, x = net.init_buffers(), torch.ones(3, 4)

    def loss(params, x):
        out, new = net(params, x, buffers=buffers, random_key=KEY)
        return out.square().sum(), (out, new)

    out, _ = net(params, x, buffers=buffers, random_key=KEY)
    return out, fs.value_and_grad(loss, has_aux=True)(params, x)


def kinds(values):
    return fs.tree.map(lambda x: (tuple(x.shape), x.dtype, x.device), values)


@pytest.mark.parametrize("inside", [False, True], ids=["module with values", "module without"])
@pytest.mark.parametrize("case", MODULES)
def test_a_run_without_values_has_the_shapes_and_dtypes_of_a_real_one(case, inside):
    make, units = MODULES[case]
    module = make()
    net = fs.functionalize(module, units)
    values = fs.tree.map(lambda x: x[tuple(slice(0, size) for size in x.shape)], net.init(KEY))
    want = run(fs.functionalize(module, units), values)
    for _ in range(2):  # before a real call of the same function, and after one
        with FakeTensorMode():
            faked = fs.functionalize(make(), units) if inside else net
            found = run(faked, fs.tree.map(lambda x: torch.empty(x.shape, dtype=x.dtype), values))
        assert all(isinstance(x, FakeTensor) for x in fs.tree.leaves(found))
        assert kinds(found) == kinds(want)
        assert {*map(type, net.constants().values())} <= {torch.Tensor}
        assert_bitwise_equal(run(net, values), want, "the tensors of the module have their values again")


def test_a_forward_that_draws_still_needs_a_key():
    net = fs.functionalize(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), ())
    with FakeTensorMode():
        params = fs.tree.map(lambda x: torch.empty(x.shape, dtype=x.dtype), net.init(KEY))
        assert "needs a random_key" in refusal(net, params, torch.ones(3, 4), kind=TransformError)
