"""Every pattern of every argument matches a leaf, or is refused; and a pattern of layers means the layers that it says."""

import pytest
import torch
from torch import nn

import fsharding as fs
from fsharding.base.errors import ConfigError, LayoutError, SpecError, TreeError
from fsharding.formats.precision import KEEP, Precision

BF16 = torch.bfloat16
MX = fs.formats.MXFP8


def coded(*keep, gather=MX, **more):
    return Precision(params=torch.float32, compute=BF16, gather=gather, keep=keep, **more)


LAYERS = {
    "blocks[-2:]": (2, 3), "blocks[-1]": (3,), "blocks[-1:]": (3,), "blocks[0]": (0,), "blocks[1]": (1,), "blocks[:2]": (0, 1),
    "blocks[1:3]": (1, 2), "blocks[:-3]": (0,), "blocks[3:]": (3,), "blocks[-4]": (0,), "*[-1]": (3,), "b*[2]": (2,),
    "model.blocks[1:]": (1, 2, 3), "blocks[4]": (), "blocks[-5]": (), "block[-1]": (), "blocks": (),
}  # fmt: skip


@pytest.mark.parametrize("pattern", LAYERS)
def test_a_pattern_of_layers_means_these_layers(pattern):
    assert coded(pattern).kept_rows("model.blocks.w", 4) == LAYERS[pattern]


def stack(key=None):
    numbers = torch.Generator().manual_seed(0)
    draw = {"blocks": {"w": torch.randn(4, 32, 32, generator=numbers)}, "head": torch.randn(32, 64, generator=numbers)}
    return {"model": draw}


STACK = {"model": {"blocks": {"w": ("layers", None, None)}, "head": None}}


@pytest.mark.parametrize("strategy", range(4))
@pytest.mark.parametrize("pattern", [p for p, rows in LAYERS.items() if rows])
def test_the_layers_that_a_pattern_names_are_seen_unrounded(pattern, strategy):
    layout = fs.plan_layout(
        stack(), fs.make_mesh(device="cpu"), strategy=fs.zero(strategy), names=STACK, precision=coded(pattern)
    )
    state = fs.init_state(stack, fs.sgd(0.1), fs.random.key(0), layout)
    main = stack()["model"]["blocks"]["w"]

    def loss(params, batch):
        seen = [fs.gather_unit(fs.select_unit(params["model"]["blocks"], i))["w"] for i in range(4)]
        return (sum(w.sum() for w in seen).float(), 1), [w.detach() for w in seen]

    (_, seen), _ = fs.value_and_grad(loss, has_aux=True, precision=layout.in_flight(layout.precision))(
        state.params, None
    )
    assert tuple(i for i in range(4) if torch.equal(seen[i], main[i].to(BF16))) == LAYERS[pattern]


def test_a_pattern_of_layers_is_no_class_of_characters():
    tree = {"w1": torch.zeros(2, 2), "w-": torch.zeros(2, 2), "blocks1": torch.zeros(2, 2)}
    precision = coded("*[-1]", "blocks[1]")
    assert all(precision.format_of(path, 2) == MX for path in tree)


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        for layer in self.model.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("strategy", [1, 3])
@pytest.mark.parametrize("pattern", ["*[-1]", "layers[-1]", "model.layers[-1]"])
def test_the_last_layer_of_a_modules_stack_stays_in_the_dtype_of_compute(pattern, strategy):
    assert "*[-1]" in fs.NVFP4.keep
    torch.manual_seed(0)
    module, seen = Stacked(), []
    for layer in module.model.layers:
        layer.register_forward_hook(lambda layer, args, out: None)
    net = fs.functionalize(module, "model.layers.*")
    for layer in net.running.model.layers:
        layer.register_forward_hook(lambda layer, args, out: seen.append(out.detach()))
    precision = coded(*KEEP, pattern, gather=fs.formats.NVFP4)
    layout = fs.plan_layout(net, fs.make_mesh(device="cpu"), strategy=fs.zero(strategy), precision=precision)
    state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout)
    fs.value_and_grad(lambda p, x: net(p, x).float().sum(), precision=layout.in_flight(precision))(
        state.params, torch.eye(32, dtype=BF16)
    )
    exact = []
    for layer, x, out in zip(module.model.layers, (torch.eye(32, dtype=BF16), *seen), seen, strict=False):
        exact.append(torch.equal(out, nn.functional.linear(x, layer.weight.to(BF16), layer.bias.to(BF16))))
    assert exact == [False, False, True]


def test_nvfp4_for_a_module_without_a_stack_is_refused():
    net = fs.functionalize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ("0", "1"))
    with pytest.raises(LayoutError) as error:
        fs.plan_layout(net, fs.make_mesh(device="cpu"), precision=fs.NVFP4)
    assert str(error.value) == (
        "fs.plan_layout got a precision with patterns that match no leaf.\n"
        "  keep: '*[-1]' selects layers, but dim 0 of 0.bias isn't named 'layers'.\n"
        "Leaves are 0.bias, 0.weight, 1.bias, 1.weight. A pattern is a part of a path, or all of it; 'blocks[-1]' is a "
        "layer."
    )


IDLE = (*KEEP, "hed", "blocks[4]", "block[-1]", "head[0]", "blocks[-3:-3]")
ROWS = """
  keep: 'hed' matches no leaf. Did you mean 'head'?
  keep: 'blocks[4]' is out of range: model.blocks.w has 4 layers.
  keep: 'block[-1]' matches no leaf. Did you mean 'blocks'?
  keep: 'head[0]' selects layers, but dim 0 of model.head isn't named 'layers'.
  keep: 'blocks[-3:-3]' is out of range: model.blocks.w has 4 layers.
  columnwise: 'wq' matches no leaf. Did you mean 'w'?
  columnwise: 'hea*' matches no matrix that has a format
Leaves are model.blocks.w, model.head. A pattern is a part of a path, or all of it; 'blocks[-1]' is a layer."""


def test_patterns_of_a_precision_that_match_no_leaf_are_refused():
    precision = Precision(params=torch.float32, compute=MX, keep=IDLE, columnwise=("w", "wq", "hea*"))
    mesh, tree = fs.make_mesh(device="cpu"), stack()
    layout = fs.plan_layout(tree, mesh, names=STACK)
    params = fs.shard(tree, layout)
    calls = {
        "fs.plan_layout": lambda: fs.plan_layout(tree, mesh, names=STACK, precision=precision),
        "fs.Layout.with_precision": lambda: layout.with_precision(precision),
        "fs.Layout.in_flight": lambda: layout.in_flight(precision),
        "fs.value_and_grad": lambda: fs.value_and_grad(lambda p: p, precision=precision)(params),
    }
    for name, call in calls.items():
        with pytest.raises(LayoutError) as error:
            call()
        # Without dim names, as value_and_grad sees the leaves, a matrix is no stack.
        assert str(error.value) == f"{name} got a precision with patterns that match no leaf.{ROWS}"


def test_rules_for_dims_that_no_leaf_has_are_refused():
    rules = fs.DEFAULT_RULES.replace(heds="tp", mlps=None)
    with pytest.raises(SpecError) as error:
        fs.plan_layout({"w": torch.zeros(4, 4)}, fs.make_mesh(device="cpu"), rules, names={"w": ("heads", "mlp")})
    assert str(error.value) == (
        "fs.plan_layout got rules for dims that no leaf has.\n"
        "  heds=('tp',): no dim has this name. Did you mean 'heads'?\n"
        "  mlps=(): no dim has this name. Did you mean 'mlp'?\n"
        "Dims are named 'heads', 'mlp'. Remove the rule, or use one of these names."
    )


def test_groups_of_an_optimizer_that_no_leaf_is_in_are_refused():
    groups = {"decay": fs.adamw(1e-3, weight_decay=0.1), "rest": fs.adamw(1e-3)}
    opt = fs.optim.multi_transform(groups, lambda path, x: "decay" if path.endswith("wieght") else "rest")
    with pytest.raises(TreeError) as error:
        opt.init({"a": {"weight": torch.zeros(2)}, "b": torch.zeros(2)})
    assert str(error.value) == (
        "fs.optim.multi_transform has groups without a leaf.\n"
        "  'decay'\n"
        "Leaves have a.weight: 'rest', b: 'rest'. Remove the group, or fix the labels."
    )


@pytest.mark.parametrize("frozen", ["hed", ["head", "bloks"]])
def test_frozen_paths_that_no_leaf_begins_with_are_refused(frozen):
    with pytest.raises(LayoutError, match="matches no leaf; leaves are"):
        fs.plan_layout({"head": torch.zeros(2)}, fs.make_mesh(device="cpu"), frozen=frozen)


def test_patterns_of_tables_that_others_hide_are_refused():
    with pytest.raises(LayoutError) as error:
        fs.functionalize(Stacked(), "model.layers.*", names={"*": None, "*.weight": ("mlp", None)})
    assert str(error.value) == (
        "fs.functionalize got names that earlier patterns hide.\n"
        "  '*.weight' is after '*', which matches model.layers.weight\n"
        "Put narrow patterns first: the first pattern that matches a leaf counts."
    )
    with pytest.raises(
        ConfigError, match=r"'model\.layers\.0' is after '\*\.layers\.\*', which matches model\.layers\.0"
    ):
        fs.functionalize(Stacked(), "model.layers.*", roles={"*.layers.*": "column", "model.layers.0": "row"})
