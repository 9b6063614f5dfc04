"""Layers with forwards of their own: computed as written, and refused where a role over `tp` would replace them."""

import functools
import types
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsharding as fs
from fsharding.base.errors import ConfigError, TransformError
from fsharding.testing import assert_trees_close


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Negated(nn.Embedding):
    def forward(self, tokens):
        return -super().forward(tokens)


class Renamed(nn.Linear):
    """A subclass that computes as its parent does."""


class Called(nn.Linear):
    def __call__(self, x):
        return 3 * super().__call__(x)


class Pair(nn.Module):
    def __init__(self, up=nn.Linear, table=nn.Embedding):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.down = table(5, 4), up(4, 6), nn.Linear(6, 2)

    def forward(self, tokens):
        return self.down(torch.tanh(self.up(self.table(tokens))))


def method(pair):
    pair.up.forward = types.MethodType(lambda self, x: 2 * nn.Linear.forward(self, x), pair.up)


def closure_over_the_old_forward(pair):
    old = pair.up.forward
    pair.up.forward = lambda x: 2 * old(x)


def closure_over_the_layer(pair):
    layer = pair.up
    layer.forward = lambda x: F.linear(x, 2 * layer.weight, layer.bias)


def closure_over_another_layer(pair):
    pair.up.forward = lambda x: F.linear(x, pair.up.weight) + pair.down.bias.sum()


def default(pair):
    pair.up.forward = lambda x, layer=pair.up: F.linear(x, layer.weight, layer.bias).square()


def keyword_default(pair):
    def forward(x, *, layers=(pair.up,), by={"other": [pair.down]}):  # noqa: B006
        return F.linear(x, layers[0].weight) - by["other"][0].bias.sum()

    pair.up.forward = forward


def recursive(pair):
    def power(x, n):
        return x if n == 0 else power(torch.tanh(F.linear(x, pair.up.weight[:4])), n - 1)

    pair.up.forward = lambda x: F.linear(power(x, 2), pair.up.weight, pair.up.bias)


def new_forward(module, old, x):
    return 2 * old(x) + module.bias


def partial(pair):
    pair.up.forward = functools.update_wrapper(
        functools.partial(new_forward, pair.up, pair.up.forward), pair.up.forward
    )


def hook(pair):
    pair.up.register_forward_hook(lambda module, args, out: out * pair.up.bias.mean())


def hook_before(pair):
    pair.up.register_forward_pre_hook(lambda module, args: (args[0] + pair.table.weight.sum(0),))


def attribute(pair):
    other = pair.down
    pair.up.scale = lambda x: x * other.bias.sum()
    pair.up.forward = types.MethodType(lambda self, x: self.scale(nn.Linear.forward(self, x)), pair.up)


PATCHES = (
    method, closure_over_the_old_forward, closure_over_the_layer, closure_over_another_layer, default, keyword_default,
    recursive, partial, hook, hook_before, attribute,
)  # fmt: skip
TOKENS = torch.tensor([[0, 3], [4, 4]])


def assert_computes_as_written(pair, units=()):
    net = fs.functionalize(pair, units)
    params = fs.shard(net.init(fs.random.key(0)), fs.plan_layout(net, fs.make_mesh(device="cpu")))
    value, grads = fs.value_and_grad(lambda params: net(params, TOKENS).square().sum())(params)
    want = pair(TOKENS).square().sum()
    named = dict(pair.named_parameters())
    theirs = torch.autograd.grad(want, [*named.values()], allow_unused=True, materialize_grads=True)
    found = {name: fs.tree.at(grads, name).full_tensor() for name in named}
    assert_trees_close((value, found), (want.detach(), dict(zip(named, theirs, strict=True))), rtol=1e-5)


@pytest.mark.parametrize("patch", PATCHES)
def test_a_function_assigned_to_a_layer_computes_with_the_parameters_of_the_call(patch):
    pair = Pair()
    patch(pair)
    assert_computes_as_written(pair)


@pytest.mark.parametrize("patch", [method, closure_over_the_old_forward, default, partial])
def test_a_function_assigned_to_a_unit_computes_with_the_parameters_of_the_call(patch):
    pair = Pair()
    patch(pair)
    assert_computes_as_written(pair, ("table", "up", "down"))


@pytest.mark.parametrize("pair", [Pair(Doubled, Negated), Pair(Called), Pair(Renamed)], ids=["own", "call", "plain"])
def test_a_subclass_computes_as_written(pair):
    assert_computes_as_written(pair)
    assert_computes_as_written(pair, ("table", "up", "down"))


def test_a_function_that_holds_a_parameter_itself_is_refused():
    pair = Pair()
    bias = pair.down.bias
    pair.up.forward = lambda x: F.linear(x, pair.up.weight) - bias.sum()
    with pytest.raises(TransformError, match=r"(?s)used only inside their unit.*\n  down\.bias\n"):
        assert_computes_as_written(pair)


shared = Pair()


def test_a_function_that_reads_the_module_from_a_global_is_refused():
    shared.up.forward = lambda x: next(2 * F.linear(x, shared.up.weight) for _ in range(1))
    with pytest.raises(ConfigError) as error:
        fs.functionalize(shared, ())
    assert str(error.value) == (
        "fs.functionalize cannot copy Pair: functions on it read its layers from globals.\n"
        "  up.forward is a function that reads 'shared', a global\n"
        "Make each a method of its layer, with argument self: layer.forward = types.MethodType(forward, layer)."
    )


def test_functions_that_refer_to_nothing_of_the_module_are_kept():
    counts = []
    pair = Pair()
    pair.up.register_forward_hook(hooked := lambda module, args, out: counts.append(1))
    net = fs.functionalize(pair, ())
    assert [*net.running.up._forward_hooks.values()] == [hooked]


ROLES = {"table": "vocab", "up": "column", "down": "row"}


@pytest.mark.parametrize("patch", PATCHES[:-1])
def test_a_role_for_a_layer_with_a_forward_of_its_own_is_refused_by_name(patch):
    pair = Pair()
    patch(pair)
    what = "with hooks, which would get the shards" if patch in (hook, hook_before) else "with a forward assigned to it"
    with pytest.raises(ConfigError, match=f"up is Linear {what}"):
        fs.functionalize(pair, (), roles=ROLES)


def test_a_role_for_a_subclass_with_a_forward_of_its_own_is_refused_by_name():
    attention = nn.MultiheadAttention(4, 2)
    with pytest.raises(ConfigError) as error:
        fs.functionalize(nn.ModuleList([Pair(Doubled, Negated), Pair(Called), attention]), (), roles={
            "*.table": "vocab", "*.up": "column", "*.out_proj": "row",
        })  # fmt: skip
    assert str(error.value) == (
        "fs.functionalize cannot compute some layers over tp.\n"
        "  0.table is Negated, a Embedding with a custom forward, which role 'vocab' would replace\n"
        "  0.up is Doubled, a Linear with a custom forward, which role 'column' would replace\n"
        "  1.up is Called, a Linear with a custom forward, which role 'column' would replace\n"
        "  2.out_proj is NonDynamicallyQuantizableLinear, whose weight is read and which is never called: role 'row' "
        "replaces its forward\n"
        "Give only plain nn.Linear and nn.Embedding layers a role, one of 'column', 'row', 'inside', 'vocab', 'logits'."
    )
    fs.functionalize(Pair(Renamed), (), roles=ROLES)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate_proj, self.mlp.up_proj, self.mlp.down_proj = nn.Linear(4, 6), Doubled(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.mlp.down_proj(self.mlp.gate_proj(x) * self.mlp.up_proj(x))


class Llama(nn.Module):
    """The layers of a family whose roles the library knows, one of them with a forward of its own."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(model_type="llama", num_attention_heads=2, num_key_value_heads=2)
        self.model, self.lm_head = nn.Module(), nn.Linear(4, 8, bias=False)
        self.model.embed_tokens, self.model.norm = nn.Embedding(8, 4), nn.RMSNorm(4)
        self.model.layers = nn.ModuleList([Block()])

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x)
        return self.lm_head(self.model.norm(x))


def test_a_familys_role_for_a_layer_with_a_forward_of_its_own_is_refused_where_tp_cuts_it():
    module = Llama()
    net = fs.functionalize(module)
    params = fs.shard(net.init(fs.random.key(0)), fs.plan_layout(net, fs.make_mesh(device="cpu")))
    torch.testing.assert_close(net(params, TOKENS).detach(), module(TOKENS).detach())
    with pytest.raises(ConfigError) as error:
        fs.plan_layout(net, fs.AbstractMesh(("tp",), (2,)))
    assert str(error.value) == (
        "fs.plan_layout cannot shard this module on mesh {tp: 2}.\n"
        "  model.layers.mlp.up_proj.weight is float32[1, 6, 4], dim 1 ('mlp') over tp: model.layers.0.mlp.up_proj is "
        "Doubled, a Linear with a custom forward, which role 'column' would replace\n"
        "  model.layers.mlp.up_proj.bias is float32[1, 6], dim 1 ('mlp') over tp: model.layers.0.mlp.up_proj is "
        "Doubled, a Linear with a custom forward, which role 'column' would replace\n"
        "Remove the axis from the mesh, or pass roles=. To compute these layers in full on all ranks, set the rules of the "
        'dims to None, as in fs.DEFAULT_RULES.replace(mlp=None), with tp="replicate" if no leaf is left for tp.'
    )


def scaled_blocks(scales, bind):
    net = nn.Module()
    net.embed = nn.Embedding(5, 4)
    net.layers, net.head = nn.ModuleList(nn.Linear(4, 4) for _ in scales), nn.Linear(4, 5)
    for layer, scale in zip(net.layers, scales, strict=True):
        layer.forward = bind(layer, scale)
    return net


def by_closure(layer, scale):
    return lambda x: scale * F.linear(x, layer.weight)


def by_default(layer, scale):
    return lambda x, scale=scale: scale * F.linear(x, layer.weight)


def scaled(scale, x):
    return scale * x


def by_partial(layer, scale):
    return functools.partial(scaled, scale)


def by_closure_with_an_unbound_name(layer, scale):
    def forward(x):
        return scale * F.linear(x, layer.weight) if scale else later(x)

    if not scale:
        later = forward
    return forward


@pytest.mark.parametrize("bind", [by_closure, by_default, by_partial, by_closure_with_an_unbound_name])
def test_blocks_in_stages_may_not_differ_in_what_their_functions_carry(bind):
    parts = fs.hf.families.Parts(
        lambda net, batch: net.embed(batch),
        lambda net, layer, x: layer(x),
        lambda net, x, batch: (net.head(x).sum(), 1),
    )
    units = ("embed", "layers.*", "head")
    fs.model_from_module(scaled_blocks((2.0, 2.0), bind), units, parts)
    with pytest.raises(
        ConfigError, match=r"(?s)runs the first block with the weights of all.*forward: .* in layers.0, .* in layers.1"
    ):
        fs.model_from_module(scaled_blocks((2.0, 3.0), bind), units, parts)


@pytest.mark.parametrize(("option", "value"), [("max_norm", 1.0), ("scale_grad_by_freq", True), ("sparse", True)])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_options_that_a_pure_function_cannot_have_are_refused_without_tp(kind, option, value):
    with pytest.raises(ConfigError, match=f"0 is {kind.__name__}, {option}={value}: its "):
        fs.functionalize(nn.Sequential(kind(4, 2, **{option: value})), ())
