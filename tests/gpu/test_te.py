"""Modules of Transformer Engine as functions, with the package itself on one GPU: losses and states beside the module's own.

Without a GPU or without the package every test here is skipped, and says so; tests/unit/interop/test_te.py has the same laws
through a stand-in.
"""

import copy
import warnings
from importlib.util import find_spec

import pytest
import torch

import fsharding as fs
from fsharding import checkpoint

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs pip install 'fsharding[te]'"),
]

RECIPES = ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"]
LAYERS = {
    "Linear": lambda te: te.Linear(128, 128),
    "LayerNormLinear": lambda te: te.LayerNormLinear(128, 128),
    "LayerNormMLP": lambda te: te.LayerNormMLP(128, 256),
    "TransformerLayer": lambda te: te.TransformerLayer(128, 256, 4, hidden_dropout=0.0, attention_dropout=0.0),
}


@pytest.fixture
def te():
    import transformer_engine.pytorch

    return transformer_engine.pytorch


def recipe_of(te, name):
    """A recipe that this GPU can run; else the test is skipped with the package's reason."""
    from transformer_engine.common import recipe

    if not hasattr(recipe, name):
        pytest.skip(f"this version has no {name}")
    made = getattr(recipe, name)()
    layer, x = te.Linear(128, 128), torch.ones(128, 128, device="cuda")
    try:
        with autocast(te, made), torch.no_grad():
            layer(x)
    except (AssertionError, RuntimeError) as error:
        pytest.skip(f"{name}: {str(error).splitlines()[0]}")
    return made


def autocast(te, recipe):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if hasattr(te, "autocast"):
            return te.autocast(enabled=True, recipe=recipe)
        return te.fp8_autocast(enabled=True, fp8_recipe=recipe)


def inputs(count):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(32, 4, 128, generator=generator) * 3**i).cuda() for i in range(count)]


def started(net):
    opt = fs.sgd(0.1)
    layout = fs.plan_layout(net, fs.make_mesh(dp=1, device="cuda"), strategy=fs.zero(3))
    grad = fs.te.value_and_grad(lambda p, x: (net(p, x) - 1).square().mean(), grads=layout.main)

    def step(state, x):
        value, grads, fp8 = grad(state.params, x)
        state = fs.update(state, grads, opt)
        return state.replace(params=net.with_state(state.params, fp8)), float(value)

    return fs.init_state(net, opt, fs.random.key(0), layout), step


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_losses_are_those_of_the_module_by_itself(te, name, recipe):
    recipe, xs = recipe_of(te, recipe), inputs(5)
    torch.manual_seed(0)
    module = LAYERS[name](te)
    plain = copy.deepcopy(module)
    state, step = started(fs.te.functionalize(module, recipe))
    for x in xs:
        state, loss = step(state, x)
        with autocast(te, recipe):
            wanted = (plain(x) - 1).square().mean()
        grads = torch.autograd.grad(wanted, [*plain.parameters()])
        with torch.no_grad():
            for weight, grad in zip(plain.parameters(), grads, strict=True):
                weight.add_(grad * -0.1)
        assert loss == pytest.approx(float(wanted.detach()), rel=1e-3)


def test_the_state_is_saved_and_trains_on(te, tmp_path):
    recipe, xs = recipe_of(te, "DelayedScaling"), inputs(5)
    torch.manual_seed(0)
    net = fs.te.functionalize(LAYERS["TransformerLayer"](te), recipe)
    state, step = started(net)
    for x in xs[:3]:
        state, _ = step(state, x)
    checkpoint.save(tmp_path / "3", state)
    loaded = checkpoint.load(tmp_path / "3", state.layout)
    for x in xs[3:]:
        state, wanted = step(state, x)
        loaded, loss = step(loaded, x)
        assert loss == wanted


def test_a_linear_of_a_format(te):
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = fs.te.scaled_linear(x, weight, fs.formats.TENSORWISE)
    wanted = x @ weight.T
    assert (y - wanted).float().norm() < 0.1 * wanted.float().norm()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.float().square().sum(), [x, weight]))
