"""What a module holds besides plain parameters: subclasses, shared memory, flags, and dataclasses among its inputs."""

import dataclasses
from collections import OrderedDict

import pytest
import torch
from torch import nn

import fsharding as fs
from fsharding.base.errors import ArgumentError, ConfigError
from fsharding.testing import assert_bitwise_equal
from tests.helpers import refusal


class Halves(torch.Tensor):
    """Whole numbers and a scale; operators see their product."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        return func(*(x.numbers * x.scale if isinstance(x, cls) else x for x in args), **(kwargs or {}))


class Named(nn.Parameter):
    """A parameter with another name, which computes as any."""


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))


def planned(module):
    return fs.plan_layout(fs.functionalize(module, ("0", "3")), fs.make_mesh(dp=-1, device="cpu"))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_that_is_a_tensor_subclass_is_refused(frozen):
    module = layers()
    halves = Halves(torch.ones(4, 4, dtype=torch.int8), torch.tensor(0.5))
    module[0].weight = nn.Parameter(halves, requires_grad=not frozen)
    said = refusal(planned, module, kind=ConfigError)
    assert f"  0.weight is Halves{', frozen' * frozen}\n" in said and "dequantize()" in said
    module[0].weight = Named(torch.ones(4, 4))
    planned(module)


def one_memory():
    module = layers()
    module[3].weight.data = module[0].weight.data
    return module


def one_row():
    module = layers()
    module[3].bias = nn.Parameter(module[0].weight.data[1])
    return module


def in_a_buffer():
    module = layers()
    module[3].register_buffer("before", module[0].weight.detach())
    return module


def pieces_of_one():
    module, flat = layers(), torch.ones(32)
    for part, layer in zip(flat.chunk(2), (module[0], module[3]), strict=True):
        layer.weight = nn.Parameter(part.view(4, 4))
    return module


def frozen_twins():
    module = one_memory()
    for layer in (module[0], module[3]):
        layer.weight.requires_grad_(False)
    return module


@pytest.mark.parametrize("make", [one_memory, one_row, in_a_buffer])
def test_weights_that_share_memory_are_refused(make):
    said = refusal(planned, make(), kind=ConfigError)
    assert "would train weights separately that share memory" in said and "0.weight" in said
    assert {"one_memory": "3.weight", "one_row": "3.bias", "in_a_buffer": "3.before"}[make.__name__] in said


@pytest.mark.parametrize("make", [pieces_of_one, frozen_twins, layers])
def test_weights_that_nothing_changes_together_are_taken(make):
    planned(make())


def moved_statistics(module):
    module(torch.randn(8, 4))


CHANGES = {
    "0.training: True before, False now": lambda m: m.eval(),
    "0.weight: 'float32[4, 4]' before, 'float32[4, 4], frozen' now": lambda m: m[0].weight.requires_grad_(False),
    "2.p: 0.5 before, 0.1 now": lambda m: setattr(m[2], "p", 0.1),
    "options['scale']: 1.0 before, 2.0 now": lambda m: m.options.update(scale=2.0),
    "config.layers[1]: 2 before, 3 now": lambda m: m.config.layers.__setitem__(1, 3),
    "3: Linear before, Identity now": lambda m: setattr(m, "3", nn.Identity()),
    "0.forward_hooks": lambda m: m[0].register_forward_hook(print),
    "1.running_mean: different values than before": moved_statistics,
    "0.weight: 'float32[4, 4]' before, 'float64[4, 4]' now": lambda m: m.double(),
}


@dataclasses.dataclass
class Config:
    layers: list


def with_options():
    module = layers()
    module.options, module.config = {"scale": 1.0}, Config([1, 2])
    return module


@pytest.mark.parametrize("row", CHANGES)
def test_a_change_after_functionalize_is_refused(row):
    module = with_options()
    net, mesh = fs.functionalize(module, ("0", "3")), fs.make_mesh(dp=-1, device="cpu")
    layout = fs.plan_layout(net, mesh)
    CHANGES[row](module)
    for call in (
        lambda: fs.plan_layout(net, mesh),
        lambda: fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout),
    ):
        assert f"\n  {row}" in refusal(call, kind=ConfigError)


def test_values_and_places_of_parameters_may_change_until_the_state_is_made():
    module = with_options()
    net = fs.functionalize(module, ("0", "3"))
    with torch.no_grad():
        module[0].weight.fill_(2.0)
    layout = fs.plan_layout(net, fs.make_mesh(dp=-1, device="cpu"))
    state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout)
    assert_bitwise_equal(fs.unshard(state.params)["0"]["weight"], torch.full((4, 4), 2.0))
    module.to("meta")
    fs.plan_layout(net, fs.make_mesh(dp=-1, device="cpu"))


@pytest.mark.parametrize("units", [{"0": 1}, {"0"}, 3, (x for x in ["0"])], ids=["dict", "set", "number", "generator"])
def test_units_are_paths_in_order(units):
    assert "takes units= as a path" in refusal(fs.functionalize, layers(), units, kind=ArgumentError)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    ids: torch.Tensor
    inner: object = None


class Kept(OrderedDict):
    """A mapping of its own."""


class Dtypes(nn.Module):
    """Says in which dtypes its inputs come."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, given):
        found.append([given.x.dtype, given.ids.dtype, given.inner["x"].dtype, {x.dtype for x in given.inner["set"]}])
        return self.linear(given.x).sum()


found = []


def test_floats_inside_dataclasses_are_cast():
    x, ids = torch.ones(3, 2), torch.arange(3)
    given = Frozen(x, ids, Kept(x=x, set={x}))
    net = fs.functionalize(Dtypes(), "linear")
    state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(net, fs.make_mesh(dp=-1, device="cpu")))
    for precision, dtype in ((fs.BF16, torch.bfloat16), (fs.FP32, torch.float32)):
        fs.value_and_grad(lambda params: net(params, given), precision=precision)(state.params)
        assert found.pop() == [dtype, torch.int64, dtype, {dtype}]
    assert given.x is x and given.inner["x"] is x, "the inputs are as they were"
