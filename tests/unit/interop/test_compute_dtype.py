"""Modules under a precision: floating inputs and the dtypes of weights that a forward sees, against modules of torch."""

import copy

import pytest
import torch
from torch import nn

import fsharding as fs
from fsharding.interop.module.hf_tables import Parts
from fsharding.testing import assert_bitwise_equal
from tests.helpers import refusal

INPUTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
UNITS = ("layers.*", "head")


class Layer(nn.Module):
    """A unit with a floating input by keyword, which the root makes in float32."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, *, pair):
        return x + torch.tanh(self.fc(pair[0])) * pair[1]


class Plain(nn.Module):
    """Casts nothing itself."""

    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(4, 4), nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor([0.3, 0.7, 1.1, 1.9]))

    def forward(self, x, rows):
        x = self.first(x)[rows]
        for layer in self.layers:
            x = layer(x, pair=(x, self.scale.to(x.dtype)))
        return self.head(x)


class Casting(Plain):
    """Casts to what its weights have, wherever they are."""

    def forward(self, x, rows):
        x = x.to(self.head.weight.dtype).type_as(self.layers[1].fc.weight).to(self.layers[0].fc.weight)
        x = x + self.head.weight.new_ones(4) * self.layers[0].fc.bias.new_tensor(0.5)
        return super().forward(x, rows)


class Showing(nn.Module):
    """Returns the dtype of every input and weight that its forward sees."""

    def __init__(self):
        super().__init__()
        self.layers, self.seen = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), []

    def forward(self, x, **inputs):
        dtypes = {name: x.dtype for name, x in inputs.items()}
        return self.layers[1](self.layers[0](x)).sum(), dtypes | {"weight": self.layers[1].weight.dtype, "x": x.dtype}


def reference(module, dtype, inputs):
    """Sum of squares and gradients of a copy of the module in a dtype, with inputs in it."""
    module = copy.deepcopy(module).to(dtype)
    loss = module(inputs.to(dtype), ROWS).square().sum()
    loss.backward()
    return loss.detach().float(), {name: p.grad.float() for name, p in module.named_parameters()}


ROWS = torch.tensor([2, 0])


def ours(net, strategy, precision, inputs, policy=None):
    layout = fs.plan_layout(net, fs.make_mesh(device="cpu"), strategy=strategy, precision=precision)
    state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout)

    def loss_fn(params):
        return net(params, inputs, ROWS).square().sum(), 1

    (loss, _), grads = fs.value_and_grad(loss_fn, precision=layout.in_flight(precision))(state.params)
    return loss, net.state_dict(fs.unshard(grads))


@pytest.mark.parametrize("kind", [Plain, Casting])
@pytest.mark.parametrize("units", [UNITS, (), "layers.1"], ids=str)
@pytest.mark.parametrize("strategy", [fs.zero(0), fs.zero(1), fs.zero(3)], ids=str)
def test_a_precision_computes_as_the_module_in_its_dtype(kind, units, strategy):
    torch.manual_seed(0)
    module = kind()
    net = fs.functionalize(module, units)
    for precision, dtype in ((fs.BF16, torch.bfloat16), (fs.FP32, torch.float32), (fs.BF16, torch.bfloat16)):
        loss, grads = ours(net, strategy, precision, INPUTS)
        want, expected = reference(module, dtype, INPUTS)
        assert_bitwise_equal(loss, want, "loss")
        for name, grad in expected.items():
            assert_bitwise_equal(grads[name], grad, name)


def test_main_parameters_in_bfloat16_and_recomputed_blocks_cast_as_well():
    torch.manual_seed(0)
    module = Plain()
    want, expected = reference(module, torch.bfloat16, INPUTS)
    for policy in (fs.policies.save_except_gathered, fs.policies.nothing_saveable):
        net = fs.functionalize(module, UNITS, policy=policy)
        loss, grads = ours(net, fs.zero(3), fs.Precision(params=torch.bfloat16), INPUTS)
        assert_bitwise_equal(loss, want, "loss")
        assert_bitwise_equal(grads["first.weight"], expected["first.weight"], "first.weight")


def test_steps_evaluation_and_plain_calls_cast_inputs():
    torch.manual_seed(0)
    module = Plain()
    net, opt = fs.functionalize(module, UNITS), fs.sgd(0.0)
    want = reference(module, torch.bfloat16, INPUTS)[0].item()

    def loss(params, batch):
        return net(params, batch["x"], ROWS).square().sum().float(), torch.tensor(1.0)

    for strategy in (fs.zero(0), fs.zero(3)):
        layout = fs.plan_layout(net, fs.make_mesh(device="cpu"), strategy=strategy, precision=fs.BF16)
        state = fs.init_state(net, opt, fs.random.key(0), layout)
        assert fs.make_train_step(loss, opt)(state, {"x": INPUTS})[1].loss.item() == want
        assert fs.evaluate(loss)(state, {"x": INPUTS}).mean.item() == want
    # Outside of a loss function no precision runs: parameters compute as they are stored, inputs follow them.
    layout = fs.plan_layout(net, fs.make_mesh(device="cpu"), strategy=fs.zero(0), precision=fs.BF16)
    copies = fs.init_state(net, opt, fs.random.key(0), layout).params
    for params in (copies, fs.unshard(copies)):
        assert net(params, INPUTS, ROWS).square().sum().item() == want


def test_only_floating_inputs_are_cast_and_only_under_a_precision():
    net = fs.functionalize(Showing(), "layers.*")
    mask, numbers = torch.ones(3, dtype=torch.bool), torch.arange(3)
    for precision, dtype in ((fs.BF16, torch.bfloat16), (fs.FP16, torch.float16), (fs.FP32, torch.float32)):
        layout = fs.plan_layout(net, fs.make_mesh(device="cpu"), precision=precision)
        state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout)
        seen = {}

        def loss(params, seen=seen):
            total, dtypes = net(params, INPUTS, mask=mask, numbers=numbers, other=INPUTS.double())
            seen.update(dtypes)
            return total

        fs.value_and_grad(loss, precision=layout.in_flight(precision))(state.params)
        other = torch.float64 if precision is fs.FP32 else dtype
        assert seen == {"mask": torch.bool, "numbers": torch.int64, "other": other, "weight": dtype, "x": dtype}


def test_inputs_without_anything_to_cast_are_the_very_same():
    class Appending(nn.Linear):
        def forward(self, x, rows):
            rows.append(x.dtype)
            return super().forward(x)

    net, rows = fs.functionalize(Appending(4, 4), ()), []
    layout = fs.plan_layout(net, fs.make_mesh(device="cpu"), precision=fs.BF16)
    state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout)
    fs.value_and_grad(lambda p: net(p, INPUTS.bfloat16(), rows).sum(), precision=fs.BF16)(state.params)
    assert rows == [torch.bfloat16]


def test_inputs_stay_as_they_are_with_cast_inputs_false():
    class Times(nn.Linear):
        def forward(self, t):
            return super().forward(torch.sin(t).to(self.weight.dtype))

    torch.manual_seed(0)
    module, times = Times(4, 4), 1000 * INPUTS
    net = fs.functionalize(module, (), cast_inputs=False)
    layout = fs.plan_layout(net, fs.make_mesh(device="cpu"), precision=fs.BF16)
    state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout)
    total, _ = fs.value_and_grad(lambda p: net(p, times).float().sum(), precision=fs.BF16)(state.params)
    assert_bitwise_equal(total, module.bfloat16()(times).float().sum().detach(), "loss")


def test_a_module_that_is_stored_in_bfloat16_takes_float32_inputs():
    torch.manual_seed(0)
    module = Plain().bfloat16()
    want, expected = reference(module, torch.bfloat16, INPUTS)
    for strategy in (fs.zero(0), fs.zero(3)):
        loss, grads = ours(fs.functionalize(module, UNITS), strategy, fs.BF16, INPUTS)
        assert_bitwise_equal(loss, want, "loss")
        assert_bitwise_equal(grads["head.weight"], expected["head.weight"], "head.weight")


def test_parts_of_a_model_see_weights_in_the_compute_dtype():
    class Parted(Plain):
        def forward(self, x):
            raise AssertionError("the parts are called")

    torch.manual_seed(0)
    module = Parted()
    parts = Parts(
        embed=lambda net, batch: net.first(batch["x"].to(net.first.weight.dtype)),
        block=lambda net, layer, x: layer(x, pair=(x, net.scale.to(x.dtype))),
        head=lambda net, x, batch: (net.head(x).square().sum().float(), 1),
    )
    model = fs.model_from_module(module, ("first", "layers.*", "head"), parts)
    opt = fs.sgd(0.0)
    state = fs.init_state(
        model, opt, fs.random.key(0), fs.plan_layout(model, fs.make_mesh(device="cpu"), precision=fs.BF16)
    )
    _, metrics = fs.make_train_step(model, opt)(state, {"x": INPUTS})
    plain = Plain().bfloat16()
    plain.load_state_dict(module.state_dict())
    assert metrics.loss.item() == plain(INPUTS.bfloat16(), torch.arange(3)).square().sum().item()


def test_values_of_weights_outside_of_their_unit_are_still_refused():
    class Reading(Plain):
        def forward(self, x, rows):
            return super().forward(x, rows) + self.head.weight.to(torch.float64).sum()

    net = fs.functionalize(Reading(), UNITS)
    layout = fs.plan_layout(net, fs.make_mesh(device="cpu"))
    state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout)
    text = refusal(fs.value_and_grad(lambda p: net(p, INPUTS, ROWS).sum()), state.params)
    assert "head.weight" in text and "to used them outside" in text
