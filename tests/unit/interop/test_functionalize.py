"""Modules as pure functions, on one process: values, derivatives, what is drawn, what is refused and in which words."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fsharding as fs
from fsharding.base.errors import ConfigError, FshardingError, LayoutError, TransformError, TreeError
from fsharding.interop.module.layers import layer_roles
from fsharding.interop.module.planning import ModuleOptions, ModulePlan
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests.helpers import refusal
from tests.modules import UNITS, VOCAB, Net, Shared, net_parts

TOKENS = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
KEY = fs.random.key(0)


class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.last = torch.zeros(4)

    def forward(self, x):
        self.calls += 1
        self.last = x.detach().mean(0)
        return self.fc(x)


class Hidden(nn.Module):
    """State that torch's version counters do not show."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", None)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        self.last, self.cache = x.detach() + 1, x.detach()
        return self.fc(x - self.mean)


class Scaled(nn.Module):
    """A block that knows its number and computes with it."""

    def __init__(self, i):
        super().__init__()
        self.fc, self.layer_idx, self.alpha = nn.Linear(7, 7), i, 1.0 + i // 2
        self.register_buffer("scale", torch.tensor(float(i + 1)))
        self.drop, self.act = nn.Dropout(0.1 * i).eval(), [F.gelu, F.gelu, F.relu][i]

    def forward(self, x, shift):
        return x + self.alpha * self.scale * self.act(self.fc(self.drop(x))), None


def scaled():
    module = Net()
    del module.heat
    module.layers = nn.ModuleList(Scaled(i) for i in range(3))
    return module


def by_layer():
    config = SimpleNamespace(model_type="gpt2", _attn_implementation="sdpa", scale_attn_by_inverse_layer_idx=True)
    module = Net()
    module.config = config
    return module


def whole_params(net):
    state = fs.init_state(net, fs.sgd(0.1), KEY, fs.plan_layout(net, fs.make_mesh()))
    return fs.unshard(state.params)


def values(width):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(0))


CASES = {
    "units": (Net, UNITS, TOKENS),
    "blocks": (Net, "layers.*", TOKENS),
    "no units": (Net, (), TOKENS),
    "a block of its own": (Net, ("layers.1", "layers.*"), TOKENS),
    "shared": (Shared, ("steps.*", "wide.*", "back.*"), values(5)),
    "a list": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "*", values(4)),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_module(case):
    make, units, inputs = CASES[case]
    torch.manual_seed(0)
    module = make()
    before = copy.deepcopy(module.state_dict())
    net = fs.functionalize(module, units)
    mesh = fs.make_mesh()
    layout = fs.plan_layout(net, mesh)
    state = fs.init_state(net, fs.sgd(0.1), KEY, layout)

    def total(out):
        return (out["logits"] if isinstance(out, dict) else out).square().sum()

    (loss, _), grads = fs.value_and_grad(lambda p: (total(net(p, inputs)), 1))(state.params)
    want = total(module(inputs))
    named = dict(
        zip(dict(module.named_parameters()), torch.autograd.grad(want, list(module.parameters())), strict=True)
    )
    assert_bitwise_equal(loss, want.detach(), "loss")
    found = fs.tree.named_leaves(fs.unshard(grads))
    for leaf in net.anatomy.leaves:
        rows = found[leaf.path] if leaf.stacked else [found[leaf.path]]
        for source, row in zip(leaf.sources, rows, strict=True):
            assert_trees_close(row, named[source], rtol=1e-5, atol=1e-6, what=source)
    assert {source for leaf in net.anatomy.leaves for source in leaf.sources} == {*named}
    assert_bitwise_equal(dict(module.state_dict()), dict(before), "the module itself")


def test_the_plan_is_a_value_that_says_what_is_gathered_together():
    anatomy = fs.functionalize(Net(), UNITS, names={"*.up.weight": ("mlp", "embed"), "*": None}).anatomy
    assert [unit.members for unit in anatomy.units] == [
        (), ("embed",), ("layers.0",), ("layers.1",), ("layers.2",), ("norm", "head"),
    ]  # fmt: skip
    leaves = {leaf.path: leaf for leaf in anatomy.leaves}
    assert leaves["layers.up.weight"].names == ("layers", "mlp", "embed")
    assert leaves["layers.up.weight"].sources == tuple(f"layers.{i}.up.weight" for i in range(3))
    assert leaves["layers.norm.bias"].names == ("layers", None)
    assert "embed.weight" in leaves and "head.weight" not in leaves
    assert "\n  layers.up.weight: float32[3, 10, 7] ('layers', 'mlp', 'embed')\n" in str(anatomy)
    sources = fs.functionalize(Net(), UNITS).sources
    assert sources["layers.up.weight"] == "layers.{i}.up.weight" and sources["heat"] == "heat"
    apart = fs.functionalize(Net(), ("embed", "layers.1", "layers.*", ("norm", "head"))).sources
    assert apart["layers.up.weight"] == fs.foreign.Rows("layers.{i}.up.weight", (0, 2))
    assert apart["layers.1.up.weight"] == "layers.1.up.weight"
    keyed = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4)), "b": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))})
    sources = fs.functionalize(keyed, "*.*").sources
    assert sources["weight"] == fs.foreign.Rows("{i}.weight", ("a.0", "b.0", "b.1"))
    shared = fs.functionalize(Shared(), ("steps.*", "wide.*", "back.*")).anatomy
    assert [leaf.path for leaf in shared.leaves] == [
        "steps.weight", "steps.bias", "wide.weight", "wide.bias", "back.weight", "back.0.bias",
    ]  # fmt: skip


def test_a_forward_that_fails_or_changes_tensors_leaves_them_in_their_places():
    net = fs.functionalize(Hidden(), ())
    params = whole_params(net)
    with pytest.raises(RuntimeError, match="size of tensor"):
        net(params, values(5))
    for _ in range(2):  # the second call has no values to compare: `.data` is seen at the first one alone
        with pytest.raises(TransformError, match=r"\n  last is float32.*\n  cache is float32"):
            net(params, values(4))


def test_transforms_of_torch_func_see_a_function():
    torch.manual_seed(0)
    net = fs.functionalize(Net(), UNITS, policy=fs.policies.nothing_saveable)
    params = whole_params(net)

    def loss(p, tokens):
        return net(p, tokens)["logits"].square().mean()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, TOKENS[:, None])
    mean = torch.func.grad(loss)(params, TOKENS)
    assert_trees_close(fs.tree.map(lambda g: g.mean(0), each), mean, rtol=1e-5, atol=1e-6)


def global_dot(a, b):
    return sum((x * y).sum() for x, y in zip(fs.tree.leaves(a), fs.tree.leaves(b), strict=True))


HIGHER = {
    "jvp": lambda f, p, v: torch.func.jvp(f, (p,), (v,))[1],
    "forward over reverse": lambda f, p, v: torch.func.jvp(torch.func.grad(f), (p,), (v,))[1],
    "reverse over reverse": lambda f, p, v: torch.func.grad(lambda p: global_dot(torch.func.grad(f)(p), v))(p),
}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("transform", HIGHER)
@pytest.mark.parametrize("policy", ["save_except_gathered", "nothing_saveable"])
def test_attention_of_torch_has_every_derivative(transform, policy):
    torch.manual_seed(0)
    module, x = Encoder(), values(4)[None]
    net = fs.functionalize(module, "layers.*", policy=fs.policies.POLICIES[policy])
    params = whole_params(net)
    tangents = fs.tree.map(lambda p: torch.sin(1 + torch.arange(p.numel()).view(p.shape)), params)
    found = HIGHER[transform](lambda p: net(p, x).sin().square().sum(), params, tangents)

    def plain(p):
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.functional_call(module, net.state_dict(p), x).sin().square().sum()

    assert_trees_close(found, HIGHER[transform](plain, params, tangents), rtol=1e-5, atol=1e-5)


def test_what_is_drawn_follows_from_the_key():
    net = fs.functionalize(Net(p=0.5), UNITS)
    params, state = whole_params(net), torch.get_rng_state()
    one, again, other = (net(params, TOKENS, random_key=fs.random.key(i))["logits"] for i in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator goes on as before"
    calm = fs.functionalize(Net(p=0.5).eval(), UNITS)
    calm(params, TOKENS)


def test_frozen_parameters_are_frozen_leaves():
    module = Net()
    module.embed.requires_grad_(False)
    net = fs.functionalize(module, UNITS)
    layout = fs.plan_layout(net, fs.make_mesh())
    assert [leaf.path for leaf in layout.leaves if not leaf.trainable] == ["embed.weight"]


def test_a_module_can_be_let_go_after_init():
    module = Net()
    net = fs.functionalize(module, UNITS)
    params = whole_params(net)
    want = module(TOKENS)["logits"]
    other = Net()
    other.load_state_dict(net.state_dict(params))  # every name of parameters and persistent buffers
    assert_bitwise_equal(other(TOKENS)["logits"], want, "another module with these parameters")
    module.to("meta")
    assert_bitwise_equal(net(params, TOKENS)["logits"], want, "logits")


class Aliased(nn.Module):
    """Modules that stand in several places: outside of units, in a unit, in a block, and a whole block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.also_first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3)) for _ in range(2))
        for block in self.blocks:
            block.also = block[0]
        self.last, self.norm = self.blocks[1], nn.BatchNorm1d(3)
        self.also_norm = self.norm

    def forward(self, x):
        return self.also_norm(self.last(self.blocks[0](self.also_first(x))))


@pytest.mark.parametrize("units", [(), ("first", "blocks.*")], ids=str)
def test_a_state_dict_has_every_name_of_modules_in_several_places(units):
    module = Aliased()
    net = fs.functionalize(module, units)
    mesh = fs.make_mesh(device="cpu")
    state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(net, mesh))
    found = net.state_dict(fs.unshard(state.params), state.buffers)
    assert_bitwise_equal(found, dict(module.state_dict()))
    Aliased().load_state_dict(found)


def sliding():
    module = Net()
    kinds = ["full_attention", "sliding_attention"]
    module.config = SimpleNamespace(
        model_type="qwen3", _attn_implementation="eager", layer_types=kinds, sliding_window=8
    )
    return module


def half_frozen():
    module = Net()
    module.norm.requires_grad_(False)
    return module


class Unlike(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(4, 4), nn.Linear(4, 5, bias=False), nn.Linear(4, 4).requires_grad_(False)]
        )


class Elsewhere(Net):
    def forward(self, tokens):
        return F.linear(self.norm(self.embed(tokens)), self.head.weight)


class Scaling(Net):
    def forward(self, tokens):
        return self.head(self.embed(tokens) * self.norm.weight)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers[:1]:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.layers[1](x)


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 16, 16))

    def forward(self, x):
        return F.grouped_mm(x, self.w, offs=torch.tensor([1, 3], dtype=torch.int32))


def forward_mode(module, x):
    net = fs.functionalize(module, ())
    params = whole_params(net)
    return torch.func.jvp(lambda x: net(params, x), (x,), (x,))


def estimated():
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), spectral, nn.BatchNorm1d(2).eval())


HOOKS = """cannot run hooks that assign weights.
  0.weight is assigned by torch.nn.utils.spectral_norm: use torch.nn.utils.parametrizations.spectral_norm
  1.weight is assigned by torch.nn.utils.weight_norm: use torch.nn.utils.parametrizations.weight_norm
  2.bias is assigned by torch.nn.utils.prune: make it permanent with torch.nn.utils.prune.remove, or multiply by the mask in a parametrization
  3.weight is assigned by torch.nn.utils.prune: make it permanent with torch.nn.utils.prune.remove, or multiply by the mask in a parametrization
Change the layers before the call; torch.nn.utils.parametrize computes weights from parameters in any forward."""


def hooked():
    """Layers with each of the utilities of torch that assign a weight in a hook, and one with its replacement."""
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    nn.utils.spectral_norm(module[0])
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        nn.utils.weight_norm(module[1])
    nn.utils.prune.identity(module[2], "bias")
    for prune in (nn.utils.prune.random_unstructured, nn.utils.prune.l1_unstructured):
        prune(module[3], "weight", 0.5)
    nn.utils.parametrizations.weight_norm(module[4])
    return module


def unready():
    module = nn.Linear(4, 4)
    module.scaled = module.weight * 2
    return module


def switched_on():
    module = Net()
    module.layers[1].gradient_checkpointing = True
    return module


def backward(module, units):
    net = fs.functionalize(module, units)
    state = fs.init_state(net, fs.sgd(0.1), KEY, fs.plan_layout(net, fs.make_mesh()))
    return fs.value_and_grad(lambda p: net(p, values(4)).sum())(state.params)


def normed():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4)))


def twice():
    module = nn.Sequential(Count(), Count())
    module[1].calls = module[0].calls
    return module


def out_of_params(module):
    net = fs.functionalize(module, ())
    return net.state_dict(whole_params(net))


def plain_meta():
    with torch.device("meta"):
        return nn.ModuleDict({"count": Count(), "own": Drawless()})


class Beside(nn.Sequential):
    def __init__(self, depth):
        super().__init__(*(nn.Linear(4, 4, bias=False) for _ in range(depth)))
        self.weight = nn.Parameter(torch.ones(()))


class Drawless(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(3))


def call(module, units, x, **settings):
    net = fs.functionalize(module, units, **settings)
    return net(whole_params(net), x)


def call_with(buffers, module):
    net = fs.functionalize(module, ())
    return net(whole_params(net), values(4), buffers=buffers)


def under(transform, module, x):
    net = fs.functionalize(module, ())
    return transform(lambda p: net(p, x).sum())(whole_params(net))


class Attended(nn.Module):
    """Attention of two heads, in one of several ways to write it."""

    def __init__(self, way):
        super().__init__()
        self.way, self.qkv, self.out = way, nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8 if way == "norm" else 4)
        self.gate_up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        if self.way == "places":
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k, v = (y.view(*x.shape[:2], -1, 4) for y in (q, k, v))
        elif self.way == "parts":
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, -1, 4).unbind(2)
        elif self.way == "number":
            q, k, v = self.qkv(x).view(*x.shape[:2], 2, 12).split(4, -1)
        else:
            q, k, v = self.qkv(x).view(*x.shape[:2], -1, 12).split(4, -1)
        q = self.norm(q.flatten(2)).view_as(q) if self.way == "norm" else self.norm(q)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        if self.way == "gate":
            gate, up = self.gate_up(x).chunk(2, -1)
        else:
            gate, up = self.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1)
        hidden = F.silu(gate) * up
        return x + self.down(hidden * self.scale if self.way == "scale" else hidden)


class Fused(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layers = nn.ModuleList(Attended(way) for _ in range(2))

    @property
    def dummy_inputs(self):
        return {"x": torch.ones(2, 3, 8)}

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


FUSED = {"*.qkv.weight": ("heads", None), "*.qkv.bias": ("heads",), "*.out.weight": (None, "heads"),
         "*.gate_up.weight": ("mlp", None), "*.gate_up.bias": ("mlp",), "*.down.weight": (None, "mlp"), "*": None}  # fmt: skip
FUSED_ROLES = {"*.qkv": "column", "*.out": "row", "*.norm": "inside", "*.gate_up": "column", "*.down": "row"}
QKV = "layers.0.qkv has role 'column', and a rank has 12 of its 24 outputs"
UNFIT = {
    "interleaved": None,
    "places": f"{QKV}: Attended selects some by index",
    "parts": f"{QKV}: Attended selects some by index",
    "norm": f"{QKV}: layers.0.norm (LayerNorm) normalizes over all of them",
    "number": "layers.0 (Attended): RuntimeError: ",
    "gate": "layers.0.gate_up has role 'column', and a rank has 16 of its 32 outputs: Attended selects some by index",
    "scale": "layers.0 (Attended): RuntimeError: ",
}  # fmt: skip


@pytest.mark.parametrize("way", UNFIT)
def test_roles_that_a_forward_cannot_have_are_refused_when_a_layout_is_planned(way):
    net = fs.functionalize(Fused(way), "layers.*", names=FUSED, roles=FUSED_ROLES)
    fs.plan_layout(net, fs.AbstractMesh(("dp",), (2,)))
    mesh = fs.AbstractMesh(("tp",), (2,))
    fs.plan_layout(net, mesh, fs.AxisRules(layers=None, heads=None, mlp=None), tp="replicate")
    if UNFIT[way] is None:
        assert any("tp" in leaf.params.spec.all_axes for leaf in fs.plan_layout(net, mesh).leaves)
        return
    with pytest.raises(ConfigError) as caught:
        fs.plan_layout(net, mesh)
    rule, row, mend = str(caught.value).splitlines()
    assert rule == "fs.plan_layout cannot shard this module on mesh {tp: 2}."
    assert row.startswith(f"  {UNFIT[way]}") and (row.endswith(UNFIT[way]) or "Error: " in row), "torch's words follow"
    assert mend.startswith("Remove the axis from the mesh, or pass roles=.") and 'tp="replicate"' in mend


def plan(module, units, names, roles, axes, **settings):
    mesh = fs.AbstractMesh(tuple(axes), tuple(axes.values()))
    return fs.plan_layout(fs.functionalize(module, units, names=names, roles=roles, **settings), mesh)


ERRORS = {
    "statistics": (lambda: call(normed(), (), values(4)), TransformError, """
fs.functionalize needs the buffers that its forward writes.
  1.running_mean is written by the forward, and not given
  1.running_var is written by the forward, and not given
  1.num_batches_tracked is written by the forward, and not given
  2.0.running_mean is written by the forward, and not given
  2.0.running_var is written by the forward, and not given
  2.0.num_batches_tracked is written by the forward, and not given
Add the argument buffers to the loss, call out, buffers = net(params, x, buffers=buffers), and return (loss, \
buffers). Or put modules in eval mode before fs.functionalize, to train with fixed statistics."""),
    "other buffers": (lambda: call_with({"2.mean": torch.ones(4)}, normed().eval()), TransformError, """
fs.functionalize needs the buffers that its forward writes.
  2.mean is given, and isn't a buffer of the module
Add the argument buffers to the loss, call out, buffers = net(params, x, buffers=buffers), and return (loss, \
buffers). Or put modules in eval mode before fs.functionalize, to train with fixed statistics."""),
    "names of no buffers": (lambda: fs.functionalize(normed(), (), buffers=["1.mean", "2.*_mean"]), ConfigError, """
fs.functionalize cannot find the buffers that a forward writes.
  '1.mean' matches no buffer
The buffers are 1.running_mean, 1.running_var, 1.num_batches_tracked, 2.0.running_mean, 2.0.running_var, \
2.0.num_batches_tracked; make each a separate tensor."""),
    "one buffer twice": (lambda: fs.functionalize(twice(), (), buffers="*.calls"), ConfigError, """
fs.functionalize cannot find the buffers that a forward writes.
  0.calls, 1.calls are one tensor
The buffers are 0.calls, 1.calls; make each a separate tensor."""),
    "a state dict without its buffers": (lambda: out_of_params(normed()), ConfigError, """
PureModule.state_dict needs the buffers that the forward writes.
  1.running_mean is written by the forward, and not given
  1.running_var is written by the forward, and not given
  1.num_batches_tracked is written by the forward, and not given
  2.0.running_mean is written by the forward, and not given
  2.0.running_var is written by the forward, and not given
  2.0.num_batches_tracked is written by the forward, and not given
Pass the state's buffers: net.state_dict(params, state.buffers)."""),
    "in place": (lambda: call(Count(), (), values(4)), TransformError, """
fs.functionalize needs a forward that changes no tensors of the module.
  calls is float32[]
  last is float32[4]
Name the buffers that the forward writes: fs.functionalize(module, units, buffers='name'). Keep other state outside of \
the module: pass it as an input, and return it as an output."""),
    "in place, hidden": (lambda: call(Hidden(), (), values(4)), TransformError, """
fs.functionalize needs a forward that changes no tensors of the module.
  mean is float32[4]
  last is float32[3, 4]
  cache is float32[3, 4]
Name the buffers that the forward writes: fs.functionalize(module, units, buffers='name'). Keep other state outside of \
the module: pass it as an input, and return it as an output."""),
    "in place, under grad": (lambda: under(torch.func.grad, Count(), values(4)), TransformError, """
fs.functionalize needs a forward that changes no tensors of the module.
  under torch.func: During a grad (vjp, jvp, grad, etc) transform, the function provided attempted to call in-place \
operation (aten::add_.Tensor) that would mutate a captured Tensor. This is not supported; please rewrite the function \
being transformed to explicitly accept the mutated Tensor(s) as inputs.
Name the buffers that the forward writes: fs.functionalize(module, units, buffers='name'). Keep other state outside of \
the module: pass it as an input, and return it as an output."""),
    "unlike but for weights": (lambda: fs.model_from_module(scaled(), UNITS, net_parts()), ConfigError, """
fs.model_from_module runs the first block with the weights of all, so blocks must agree.
  drop.p: 0.0 in layers.0, 0.1 in layers.1
  scale: float32[] in layers.0, float32[] in layers.1 of other values
  act: gelu in layers.0, relu in layers.2
  alpha: 1.0 in layers.0, 2.0 in layers.2
  drop.p: 0.0 in layers.0, 0.2 in layers.2
  scale: float32[] in layers.0, float32[] in layers.2 of other values
Make the differences inputs of the blocks, or use fs.functionalize(module), which runs each block."""),
    "layers that scale by their number": (lambda: fs.model_from_module(by_layer()), ConfigError, """
fs.model_from_module has no parts for this config.
  scale_attn_by_inverse_layer_idx is True: every layer scales its attention by a different number
Pass custom parts=, or use fs.functionalize(module), which runs the module's own forward."""),
    "no key": (lambda: call(Net(p=0.5), UNITS, TOKENS), TransformError, """
fs.functionalize needs a random_key for a forward that draws.
  layers.0.drop is Dropout(p=0.5, inplace=False)
  layers.1.drop is Dropout(p=0.5, inplace=False)
  layers.2.drop is Dropout(p=0.5, inplace=False)
Pass random_key=, a different one at each step, or put the module in eval mode before functionalize."""),
    "unknown family": (lambda: fs.functionalize(Net()), ConfigError, """
fs.functionalize has no default units for Net.
  embed is Embedding
  layers is ModuleList
  norm is LayerNorm
  head is Linear
Pass the paths of modules to gather together, such as units='layers.*'."""),
    "unknown pattern": (lambda: fs.functionalize(Shared(), ("blocks.*", "wide", ("back.0", "gone"))), ConfigError, """
fs.functionalize finds no units for a pattern.
  'blocks.*' matches no module
  wide is a ModuleList, which is never called itself
  'gone' matches no module
  modules are
    steps is ModuleList of 1 Linear
    steps.0 is Linear
    wide is ModuleList of 2 Linear
    wide.0 is Linear
    wide.1 is Linear
    back is ModuleList of 2 Linear
  and 2 more
Pass the path of the blocks' list and a star, such as units='layers.*'."""),
    "nested": (lambda: fs.functionalize(Net(), ("layers.*", "layers.1.up")), ConfigError, """
fs.functionalize got units inside units.
  layers.1.up is inside layers.1
Keep the outer or the inner ones."""),
    "clash": (lambda: fs.functionalize(Beside(2), "*"), ConfigError, """
fs.functionalize got two leaves at one path.
  weight: weight
  weight: 0.weight
Rename the module next to the blocks, or pass each block as a separate unit, without a star."""),
    "unlike": (lambda: fs.functionalize(Unlike(), "layers.*"), TreeError, """
fs.functionalize can stack only blocks with equal parameters.
  bias: float32[4] in layers.0, not there in layers.1
  weight: float32[4, 4] in layers.0, float32[5, 4] in layers.1
  bias: float32[4] in layers.0, float32[4], frozen in layers.2
  weight: float32[4, 4] in layers.0, float32[4, 4], frozen in layers.2
Put patterns for the blocks that differ first: units=('layers.0', 'layers.*')."""),
    "names": (lambda: fs.functionalize(Net(), UNITS, names={"*.weight": None, "heat": ()}), LayoutError, """
fs.functionalize finds leaves without names; the table has '*.weight', 'heat'.
  layers.norm.bias is float32[3, 7]
  layers.up.bias is float32[3, 10]
  norm.bias is float32[7]
Add a pattern for each, such as '*.weight': (None, 'embed'); None leaves all dims without names."""),
    "elsewhere": (lambda: call(Elsewhere(), UNITS, TOKENS), TransformError, """
fs.functionalize needs weights that are used only inside their unit; linear used them outside.
  embed.weight
Remove their module from units, or gather both modules together: units=(('embed', 'head'), ...)."""),
    "elsewhere, by an operator": (lambda: call(Scaling(), UNITS, TOKENS), TransformError, """
fs.functionalize needs weights that are used only inside their unit; mul used them outside.
  norm.weight
Remove their module from units, or gather both modules together: units=(('embed', 'head'), ...)."""),
    "checkpoints": (lambda: backward(Checkpointed(), "layers.*"), TransformError, """
fs.functionalize needs a module that does not run its layers again in the backward pass.
  layers.0 is called again
Switch its own checkpointing off, and pass policy=fs.policies.nothing_saveable, which recomputes blocks."""),
    "checkpointing that is switched on": (lambda: fs.functionalize(switched_on(), "layers.*"), TransformError, """
fs.functionalize needs a module that does not run its layers again in the backward pass.
  layers.1 is Block, gradient_checkpointing=True
Switch its own checkpointing off, and pass policy=fs.policies.nothing_saveable, which recomputes blocks."""),
    "meta buffers": (lambda: fs.functionalize(plain_meta(), ()), ConfigError, """
fs.functionalize finds buffers on the meta device that nothing fills.
  count.calls is float32[] of Count
Make these submodules with real tensors, or pass reset=, a function that fills the buffers of one."""),
    "meta parameters": (lambda: whole_params(fs.functionalize(Drawless().to("meta"), ())), ConfigError, """
fs.functionalize cannot initialize parameters on the meta device.
  w is float32[3] of Drawless, which has no reset_parameters
Make the module with real tensors, or pass reset=, a function that fills the parameters of a submodule."""),
    "axes": (lambda: plan(Net(), UNITS, {"*.up.weight": ("mlp", "embed"), "*": None}, {"*.up": "row"},
                          {"pp": 2, "cp": 2, "tp": 2}), ConfigError, """
fs.plan_layout cannot shard this module on mesh {pp: 2, cp: 2, tp: 2}.
  pp=2: a forward has no stages; see fs.model_from_module
  cp=2: the layers need full sequences; fs.hf.families.Parts(cp=True) may accept shards of them
  layers.up.weight is float32[3, 10, 7], dim 1 ('mlp') over tp: layers.0.up.weight is of a layer with role 'row'
Remove the axis from the mesh, or pass roles=. To compute these layers in full on all ranks, set the rules of the dims to None, as in fs.DEFAULT_RULES.replace(mlp=None), with tp="replicate" if no leaf is left for tp."""),
    "tied roles": (lambda: plan(Net(), UNITS, {"embed.weight": ("vocab", None), "*": None}, {"embed": "vocab"},
                                {"tp": 2}), ConfigError, """
fs.plan_layout cannot shard this module on mesh {tp: 2}.
  embed.weight is float32[13, 7], dim 0 ('vocab') over tp: head.weight is of a layer with no role
Remove the axis from the mesh, or pass roles=. To compute these layers in full on all ranks, set the rules of the dims to None, as in fs.DEFAULT_RULES.replace(mlp=None), with tp="replicate" if no leaf is left for tp."""),
    "no parts of a family": (lambda: fs.model_from_module(sliding()), ConfigError, """
fs.model_from_module has no parts for this config.
  attention is 'eager', not 'sdpa'
  layers have sliding_attention
  sliding_window is 8
Pass custom parts=, or use fs.functionalize(module), which runs the module's own forward."""),
    "no parts": (lambda: fs.model_from_module(Net()), ConfigError, """
fs.model_from_module has no default units and parts for Net.
Pass units=('embed', 'layers.*', 'head') and parts=fs.hf.families.Parts(embed, block, head)."""),
    "no stages": (lambda: fs.model_from_module(half_frozen(), ("layers.*", "norm"), net_parts()), ConfigError, """
fs.model_from_module needs units for an embedding, one stack of blocks, and a head.
  heat is in no unit
  embed.weight is in no unit
  head.weight is in no unit
  there is no unit before the blocks
  norm.weight is frozen
  norm.bias is frozen
Pass units=(before, 'layers.*', after) with all parameters; freeze leaves with plan_layout(frozen=...)."""),
    "two stacks": (lambda: fs.model_from_module(Shared(), ("steps.*", "wide.*", "back.*"), net_parts()), ConfigError, """
fs.model_from_module needs units for an embedding, one stack of blocks, and a head.
  there are 3 stacks: 'steps', 'wide', 'back'
  there is no unit before the blocks
  there is no unit after the blocks
  back.0.bias of a block is tied to back.0.bias
  back.1.bias of a block is tied to back.0.bias
  steps.0 is steps.1, steps.2 as well: one block
Pass units=(before, 'layers.*', after) with all parameters; freeze leaves with plan_layout(frozen=...)."""),
    "roles": (lambda: fs.functionalize(Net(), UNITS, roles={"*.norm": "column", "embed": "row"}), ConfigError, """
fs.functionalize cannot compute some layers over tp.
  embed is Embedding, role 'row' needs Linear
  layers.0.norm is LayerNorm, role 'column' needs Linear
  layers.1.norm is LayerNorm, role 'column' needs Linear
  layers.2.norm is LayerNorm, role 'column' needs Linear
Give only plain nn.Linear and nn.Embedding layers a role, one of 'column', 'row', 'inside', 'vocab', 'logits'."""),
    "tables that fit nothing": (lambda: fs.functionalize(
        Net(), UNITS, names={"*.up.wieght": ("mlp", "embed"), "*": None}, roles={"*.up": "colum", "*.dwn": "row"}
    ), ConfigError, """
fs.functionalize cannot compute some layers over tp.
  '*.up' has the unknown role 'colum'
  '*.dwn' matches no module
Give only plain nn.Linear and nn.Embedding layers a role, one of 'column', 'row', 'inside', 'vocab', 'logits'.
fs.functionalize got names that match no leaf.
  '*.up.wieght'
  leaves are
    heat
    embed.weight
    layers.norm.weight
    layers.norm.bias
    layers.up.weight
    layers.up.bias
    layers.down.weight
    norm.weight
  and 1 more
Remove them, or correct them; print(net) shows the leaves and their names."""),
    "many problems": (lambda: fs.functionalize(
        Unlike(), ("layers.*", "blocks.*", 1), names={"bias": None, "gone": None}
    ), ConfigError, """
fs.functionalize needs patterns that are paths, or tuples of them.
  1
Pass the path of the blocks' list and a star, such as units='layers.*'.
fs.functionalize finds no units for a pattern.
  'blocks.*' matches no module
  modules are
    layers is ModuleList of 3 Linear
    layers.0 is Linear
    layers.1 is Linear
    layers.2 is Linear
Pass the path of the blocks' list and a star, such as units='layers.*'.
fs.functionalize can stack only blocks with equal parameters.
  bias: float32[4] in layers.0, not there in layers.1
  weight: float32[4, 4] in layers.0, float32[5, 4] in layers.1
  bias: float32[4] in layers.0, float32[4], frozen in layers.2
  weight: float32[4, 4] in layers.0, float32[4, 4], frozen in layers.2
Put patterns for the blocks that differ first: units=('layers.0', 'layers.*').
fs.functionalize finds leaves without names; the table has 'bias', 'gone'.
  layers.weight is float32[3, 4, 4]
  layers.bias is float32[2, 4]
Add a pattern for each, such as '*.weight': (None, 'embed'); None leaves all dims without names."""),
    "no module": (lambda: fs.functionalize(Net, UNITS), ConfigError, """
fs.functionalize needs an nn.Module; got class Net.
Pass an nn.Module instance, or write the functions of a Model: see fs.models.Model."""),
    "no shapes": (lambda: fs.model_from_module(nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4))), ConfigError, """
fs.model_from_module needs shapes.
  0.weight
  0.bias
  1.weight
  1.bias
Call the module once, with inputs of the final shapes."""),
    "no copy": (lambda: fs.functionalize(unready(), ()), ConfigError, """
fs.functionalize cannot copy Linear.
  Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment
Detach tensors that the module keeps between calls, and remove attributes that cannot be copied."""),
    "written buffers, in stages": (lambda: fs.model_from_module(estimated(), ("0",), SimpleNamespace()), ConfigError, """
fs.model_from_module does not support buffers that the forward writes.
  1.running_mean of BatchNorm1d
  1.running_var of BatchNorm1d
  1.num_batches_tracked of BatchNorm1d
  2.parametrizations.weight.0._u of _SpectralNorm
  2.parametrizations.weight.0._v of _SpectralNorm
Use fs.functionalize, which supports them on meshes without pp, put these modules in eval mode, or use modules without running statistics, such as nn.GroupNorm."""),
    "hooks that assign weights": (lambda: fs.functionalize(hooked(), ()), ConfigError, f"""
fs.functionalize {HOOKS}"""),
    "hooks that assign weights, in stages": (lambda: fs.model_from_module(hooked(), ("4",), SimpleNamespace()), ConfigError, f"""
fs.model_from_module {HOOKS}"""),
    "grouped products": (lambda: forward_mode(Grouped(), torch.ones(3, 16)), TransformError, """
fs.functionalize cannot differentiate grouped products of experts by forward mode: torch has no such derivative.
Make the module with experts_implementation='eager' in its config, or use reverse mode: torch.func.grad, vjp."""),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_work_is_refused_in_one_error(case):
    run, kind, text = ERRORS[case]
    with pytest.raises(FshardingError) as caught:
        run()
    assert type(caught.value) is kind and str(caught.value) == text.strip()


def test_a_module_in_stages_is_a_model_with_its_leaves_by_part():
    torch.manual_seed(0)
    module = Net()
    del module.heat
    model = fs.model_from_module(module, UNITS, net_parts(), names={"*.up.weight": ("mlp", "embed"), "*": None})
    assert model.names["blocks"]["up"]["weight"] == ("layers", "mlp", "embed")
    assert model.tied == (("head.weight", "embed.embed.weight"),)
    layout = fs.plan_layout(model, fs.make_mesh())
    state = fs.init_state(model, fs.sgd(0.1), KEY, layout)
    batch = {"tokens": TOKENS, "targets": TOKENS.flip(1)}
    (loss, _), grads = fs.value_and_grad(fs.model_loss(model))(state.params, batch)
    module.heat = 1.0
    want = F.cross_entropy(module(TOKENS)["logits"].flatten(0, 1), batch["targets"].flatten())
    table, up = torch.autograd.grad(want, [module.embed.weight, module.layers[2].up.weight])
    assert_trees_close(loss, want.detach(), rtol=1e-6)
    assert_trees_close(grads["embed"]["embed"]["weight"].full_tensor(), table, rtol=1e-5, atol=1e-6)
    assert_trees_close(grads["blocks"]["up"]["weight"].full_tensor()[2], up, rtol=1e-5, atol=1e-6)


def test_only_parts_that_say_so_compute_over_cp_and_without_masks():
    mesh, module = fs.AbstractMesh(("cp",), (2,)), Net()
    del module.heat

    def block(module, layer, x):
        return F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool), dropout_p=0.5)

    whole, cut = (fs.model_from_module(module, UNITS, net_parts()._replace(block=block, cp=cp)) for cp in (False, True))
    with pytest.raises(ConfigError) as caught:
        fs.plan_layout(whole, mesh)
    why = "the layers need full sequences; fs.hf.families.Parts(cp=True) may accept shards of them"
    assert str(caught.value).splitlines()[:-1] == [
        "fs.plan_layout cannot shard this module on mesh {cp: 2}.",
        f"  cp=2: {why}",
    ]
    fs.plan_layout(cut, mesh)
    first = fs.tree.map(lambda x: x[0], whole_params(cut)["blocks"])
    with fs.set_mesh(mesh), pytest.raises(TransformError) as refused:
        cut.block(first, torch.ones(1, 2, 4, 4))
    assert str(refused.value).splitlines() == [
        "fs.model_from_module computes attention over cp without masks and dropout.",
        "  attn_mask is bool[4, 4]",
        "  dropout_p is 0.5",
        "Pass is_causal=True instead, or call ops.attention in the parts, which has masks for documents.",
    ]


def test_heads_that_tp_cannot_share_are_refused():
    names = {"*.up.weight": ("heads", None), "*": None}
    net = Net()
    net.config = SimpleNamespace(num_key_value_heads=2)
    family = fs.hf.families.Family((), {}, heads=("num_key_value_heads",))
    anatomy = fs.functionalize(Net(), UNITS, names=names).anatomy
    plan = ModulePlan(net, anatomy, layer_roles(net, {"*.up": "column"}), None, family, ModuleOptions())
    with pytest.raises(ConfigError, match="num_key_value_heads is 2: not a multiple of tp=4"):
        plan.check(fs.AbstractMesh(("tp",), (4,)), fs.DEFAULT_RULES)


def test_every_family_names_what_it_computes_over_tp():
    for family in fs.hf.families.FAMILIES.values():
        assert family.heads or not any("attn" in layer for layer in family.roles)
        called = {name for names in family.names.values() for name in names or () if name is not None}
        assert called <= {*fs.DEFAULT_RULES} - {"expert", "layers"}


class Cached(nn.Module):
    """Layers that leave something in a dict that they are given."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adding() for _ in range(2))

    def forward(self, x):
        kept = {}
        for number, layer in enumerate(self.layers):
            x = layer(x, number, kept=kept)
        return x.sum() + sum(kept.values())


class Adding(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, number, kept):
        kept[number] = 100 * x.square().sum()
        return super().forward(x)


def test_a_layer_that_is_recomputed_cannot_write_into_its_arguments():
    torch.manual_seed(0)
    module, x = Cached(), values(4)[None]
    net = fs.functionalize(module, "layers.*")
    assert_trees_close(net(whole_params(net), x), module(x).detach(), rtol=1e-5)
    net = fs.functionalize(module, "layers.*", policy=fs.policies.nothing_saveable)
    said = refusal(net, whole_params(net), x, kind=TransformError)
    assert "recomputes layers.0 in backward" in said and "kwargs['kept'][0] is new: a tensor float32[]" in said
