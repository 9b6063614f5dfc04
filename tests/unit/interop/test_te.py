"""Modules of Transformer Engine as functions, through a stand-in of its interface: values, state, what is refused."""

import copy
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

import fsharding as fs
from fsharding import checkpoint
from fsharding.base.errors import ConfigError, TransformError, TreeError
from fsharding.testing import assert_bitwise_equal
from tests import te_standin
from tests.helpers import refusal

LAYERS = {
    "Linear": lambda: te_standin.Linear(16, 16),
    "LayerNormLinear": lambda: te_standin.LayerNormLinear(16, 16, bias=False),
    "LayerNormMLP": lambda: te_standin.LayerNormMLP(16, 32),
    "TransformerLayer": lambda: te_standin.TransformerLayer(16, 32, 2, hidden_dropout=0, attention_dropout=0),
}
KNOWN = (
    "Recipes are DelayedScaling, whose state is leaves, and Float8CurrentScaling, Float8BlockScaling and "
    "MXFP8BlockScaling, which have none."
)


@pytest.fixture(params=[("autocast", "fp8_autocast"), ("fp8_autocast",)], ids=["autocast", "fp8_autocast"])
def te(request, monkeypatch):
    """The stand-in under the names of the package, in the two forms that versions of it have."""
    for name, module in te_standin.packages(names=request.param).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(te_standin.Manager, "buffers", {True: [], False: []})
    return te_standin


def made(name):
    torch.manual_seed(0)
    return LAYERS[name]()


def inputs(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 8, 16, generator=generator) * 3**i for i in range(count)]


def run_of(net):
    """A state, and a function that trains it for a step."""
    opt = fs.sgd(0.1)
    layout = fs.plan_layout(net, fs.make_mesh(dp=1), strategy=fs.zero(3))

    def loss(params, x):
        return (net(params, x) - 1).square().mean()

    grad = fs.te.value_and_grad(loss, grads=layout.main)

    def step(state, x):
        value, grads, fp8 = grad(state.params, x)
        state = fs.update(state, grads, opt)
        return state.replace(params=net.with_state(state.params, fp8)), float(value)

    return fs.init_state(net, opt, fs.random.key(0), layout), step


def by_itself(module, recipe, xs):
    """Losses of the module, which is trained as users of the package do."""
    found = []
    for x in xs:
        with te_standin.autocast(recipe=recipe):
            loss = (module(x) - 1).square().mean()
        grads = torch.autograd.grad(loss, [*module.parameters()])
        with torch.no_grad():
            for weight, grad in zip(module.parameters(), grads, strict=True):
                weight.add_(grad * -0.1)
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_losses_and_states_are_those_of_the_module_by_itself(te, name):
    module, recipe, xs = made(name), te.DelayedScaling(), inputs(5)
    net = fs.te.functionalize(module, recipe)
    state, step = run_of(net)
    first, found = state, []
    for x in xs:
        state, loss = step(state, x)
        found.append(loss)
    assert found == by_itself(made(name), recipe, xs)
    _, loss = step(first, xs[0])
    assert loss == found[0], "the state that came in counts, and nothing that stayed in the module"
    assert all(not m.fp8_meta for m in module.modules() if hasattr(m, "fp8_meta")), "the module itself was never run"
    plain = copy.deepcopy(module)
    by_itself(plain, te.DelayedScaling(), xs)
    fp8 = fs.tree.named_leaves(fs.unshard(state.params)[fs.te.STATE])
    for path, layer in plain.named_modules():
        for side in ("scaling_fwd", "scaling_bwd") if getattr(layer, "fp8_meta", None) else ():
            for leaf in ("scale", "amax_history"):
                at = ".".join(filter(None, (path, side, leaf)))
                assert torch.equal(fp8[at].view(torch.float32), getattr(layer.fp8_meta[side], leaf)), at


def test_the_state_is_saved_and_trains_on(te, tmp_path):
    net, xs = fs.te.functionalize(made("TransformerLayer"), te.DelayedScaling()), inputs(5)
    state, step = run_of(net)
    for x in xs[:3]:
        state, _ = step(state, x)
    checkpoint.save(tmp_path / "3", state)
    wanted, after = [], state
    for x in xs[3:]:
        after, loss = step(after, x)
        wanted.append(loss)
    other = fs.te.functionalize(made("TransformerLayer"), te.DelayedScaling())
    # The bits of the state survive every precision: here main parameters become bfloat16, and it does not.
    loaded = checkpoint.load(tmp_path / "3", state.layout)
    narrow = checkpoint.load(
        tmp_path / "3", state.layout.with_precision(fs.Precision(params=torch.bfloat16)), cast=True
    )
    assert_bitwise_equal(fs.unshard(narrow.params)[fs.te.STATE], fs.unshard(state.params)[fs.te.STATE])
    _, step = run_of(other)
    for x, loss in zip(xs[3:], wanted, strict=True):
        loaded, again = step(loaded, x)
        assert again == loss
    assert_bitwise_equal(fs.unshard(loaded.params), fs.unshard(after.params))


def transformer_layers(text):
    """Every construction of a `TransformerLayer` in a text, as an expression."""
    return re.findall(r"(?:te\.)?TransformerLayer\([^)]*\)", text)


def test_layers_on_the_page_and_in_docstrings_draw_nothing_and_layers_that_draw_need_a_key(te):
    page = (Path(fs.__file__).parents[1] / "docs/how-to/precision.md").read_text(encoding="utf-8")
    shown = [*transformer_layers(page), *transformer_layers(fs.te.functionalize.__doc__)]
    assert len(shown) == 3
    for expression in shown:
        layer = eval(expression, {"te": te, "TransformerLayer": te.TransformerLayer})
        assert (layer.hidden_dropout, layer.attention_dropout) == (0, 0), expression
    torch.manual_seed(0)
    layer, x = te.TransformerLayer(16, 32, 2), inputs(1)[0]
    net = fs.te.functionalize(layer, te.Float8CurrentScaling())
    params = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(net, fs.make_mesh(dp=1))).params
    text = refusal(fs.value_and_grad(lambda p: net(p, x).sum()), params, kind=TransformError)
    assert "needs a random_key for a forward that draws" in text
    one, two = (fs.value_and_grad(lambda p: net(p, x, random_key=fs.random.key(1)).sum())(params) for _ in range(2))
    assert_bitwise_equal(one, two)


def test_recipes_without_state_train_as_any_module(te):
    net = fs.te.functionalize(made("TransformerLayer"), te.Float8CurrentScaling())
    assert fs.te.STATE not in net.init(fs.random.key(0)) and net.layers == ()
    opt, xs = fs.sgd(0.1), inputs(3)
    layout = fs.plan_layout(net, fs.make_mesh(dp=1), strategy=fs.zero(3))
    state = fs.init_state(net, opt, fs.random.key(0), layout)
    step = fs.make_train_step(lambda params, x: (net(params, x) - 1).square().mean(), opt)
    found = []
    for x in xs:
        state, metrics = step(state, x)
        found.append(float(metrics.loss))
    assert found == by_itself(made("TransformerLayer"), te.Float8CurrentScaling(), xs)
    _, _, fp8 = fs.te.value_and_grad(lambda params: net(params, xs[0]).sum())(state.params)
    assert fp8 == {} and net.with_state(state.params, fp8) is state.params


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_of_a_format(te, bias):
    x, weight = inputs(1)[0].requires_grad_(), torch.randn(24, 16, requires_grad=True)
    b = torch.randn(24, requires_grad=True) if bias else None
    y = fs.te.scaled_linear(x, weight, fs.formats.TENSORWISE, b)
    wanted = x @ weight.T + (0 if b is None else b)
    assert y.shape == (2, 8, 24) and 0 < (y - wanted).abs().max() < 0.1 * wanted.abs().max()
    given = [x, weight, *([b] if bias else [])]
    for mine, exact in zip(
        torch.autograd.grad(y.square().sum(), given), torch.autograd.grad(wanted.square().sum(), given), strict=True
    ):
        assert (mine - exact).norm() < 0.2 * exact.norm()
    for format in (fs.formats.MXFP8, fs.formats.E4M3_128x128, fs.formats.E4M3_1x128):
        assert fs.te.scaled_linear(x, weight, format).shape == (2, 8, 24)
    assert refusal(fs.te.scaled_linear, x, weight, fs.formats.NVFP4, kind=ConfigError) == (
        "fs.te.scaled_linear has no recipe for float4_e2m1fn_x2[1x16, e4m3].\n"
        "  float8_e4m3fn[tensor, float32] is Float8CurrentScaling\n"
        "  float8_e4m3fn[1x128, float32] is Float8BlockScaling\n"
        "  float8_e4m3fn[128x128, float32] is Float8BlockScaling\n"
        "  float8_e4m3fn[1x32, e8m0] is MXFP8BlockScaling\n"
        "Use one of these formats."
    )
    text = refusal(
        torch.func.grad(lambda w: fs.te.scaled_linear(x, w, fs.formats.TENSORWISE).sum()), weight, kind=TransformError
    )
    assert text.startswith("fs.te.scaled_linear cannot be differentiated by torch.func: autograd Functions of")


# ------------------------------------------------------------------------------------------------------------- refusals
def test_without_the_package_one_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    for call, name in (
        (lambda: fs.te.functionalize(torch.nn.Linear(2, 2), None), "functionalize"),
        (lambda: fs.te.scaled_linear(torch.ones(1, 2), torch.ones(2, 2), fs.formats.MXFP8), "scaled_linear"),
    ):
        head, row, mend = refusal(call, kind=ConfigError).splitlines()
        assert head == f"fs.te.{name} needs Transformer Engine." and "ModuleNotFoundError: " in row
        assert mend == "On a machine with a CUDA toolchain: pip install 'fsharding[te]'."


@pytest.mark.parametrize(
    ("recipe", "row"),
    [
        (te_standin.NVFP4BlockScaling(), "NVFP4BlockScaling rounds with different random numbers on each rank"),
        (te_standin.CustomRecipe(), "CustomRecipe may keep anything"),
        (
            te_standin.DelayedScaling(fp8_dpa=True),
            "DelayedScaling has fp8_dpa or fp8_mha, under which attention has state",
        ),
        (None, "NoneType may keep anything"),
    ],
)
def test_recipes_that_keep_something_elsewhere_are_refused(te, recipe, row):
    assert refusal(fs.te.functionalize, made("Linear"), recipe, kind=ConfigError) == (
        f"fs.te.functionalize got a recipe with state outside of leaves.\n  {row}\n{KNOWN}"
    )


def test_a_recipe_that_turns_out_to_have_state_is_refused_by_its_tensors(te):
    net = fs.te.functionalize(made("LayerNormMLP"), te.Forgetful())
    params = fs.shard(net.init(fs.random.key(0)), fs.plan_layout(net, fs.make_mesh(dp=1)))
    assert refusal(fs.value_and_grad(lambda p: net(p, inputs(1)[0]).sum()), params, kind=TransformError) == (
        "te module got a recipe with state outside of leaves, Forgetful.\n"
        "  the module keeps scaling_fwd.scale\n"
        "  the module keeps scaling_fwd.amax_history\n"
        "  the module keeps scaling_bwd.scale\n"
        f"  the module keeps scaling_bwd.amax_history\n{KNOWN}"
    )


def test_layers_whose_state_would_be_no_leaf_are_refused(te):
    net = torch.nn.Sequential(*(made("Linear") for _ in range(4)), te.GroupedLinear())
    with te.autocast(recipe=te.DelayedScaling()):
        net[0](inputs(1)[0])
    net[1].fuse_wgrad_accumulation, net[2].primary_weights_in_fp8, net[3].tp_size = True, True, 2
    assert refusal(fs.te.functionalize, net, te.DelayedScaling(), kind=ConfigError) == (
        "fs.te.functionalize has layers whose state isn't a leaf.\n"
        "  0 has run in fp8 already: make a new one, and load its state dict\n"
        "  1 has fuse_wgrad_accumulation=True: it adds gradients to main_grad\n"
        "  2 has weights in fp8 alone: make it outside of quantized_model_init\n"
        "  3 has tp_size=2: it sends by itself\n"
        "  4 is GroupedLinear: layers with fp8 state are Linear, LayerNormLinear, LayerNormMLP\n"
        "Use the layers and settings above; the layout shards the weights and reduces the gradients."
    )


def test_calls_that_would_lose_the_state_are_refused(te):
    net, (x,) = fs.te.functionalize(made("Linear"), te.DelayedScaling()), inputs(1)
    params = fs.shard(net.init(fs.random.key(0)), fs.plan_layout(net, fs.make_mesh(dp=1)))

    def loss(p, times=1):
        return sum(net(p, x).square().mean() for _ in range(times))

    assert refusal(fs.value_and_grad(loss), params, kind=TransformError) == (
        "te module has fp8 state that a call changes, which would be lost.\n"
        "  recipe DelayedScaling changes 1 layers' amaxes\n"
        "Use fs.te.value_and_grad, which returns the next state; evaluate under torch.no_grad()."
    )
    assert refusal(fs.te.value_and_grad(loss), params, 2, kind=TransformError).startswith(
        "fs.te.value_and_grad can follow the fp8 state of one call of one module in a loss function.\n"
    )
    whole = fs.unshard(params)
    text = refusal(
        torch.func.grad(lambda w: net({**whole, "weight": w}, x).sum()), whole["weight"], kind=TransformError
    )
    assert text == (
        "te module cannot be differentiated by torch.func: autograd Functions of Transformer Engine have no "
        "setup_context.\nUse fs.te.value_and_grad, or fs.value_and_grad with a recipe without state."
    )
    with torch.no_grad(), warnings.catch_warnings():
        first = net(whole, x)
        assert torch.equal(net(whole, x), first)
        assert refusal(net, {"weight": whole["weight"]}, x, kind=TreeError) == (
            "te module finds no 'fp8_state' in the parameters.\n"
            "Give all of the tree that net.init makes; net.with_state(params, state) puts the next state in."
        )
        assert refusal(net, whole, x, is_first_microbatch=True, kind=TransformError) == (
            "te module keeps no weights in fp8 between calls.\nLeave is_first_microbatch out."
        )
    lonely = fs.te.functionalize(made("Linear"), te.DelayedScaling(reduce_amax=False))
    assert refusal(fs.plan_layout, lonely, fs.AbstractMesh(("dp",), (2,)), kind=ConfigError) == (
        "fs.plan_layout got a recipe of one rank on the mesh {dp: 2}.\n"
        "Make the recipe with reduce_amax=True: the state is one value for all ranks."
    )
