"""`plan_layout` by example: where data axes go, what is frozen, bytes, and the texts for what cannot be planned."""

import warnings

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import ConfigError, LayoutError, SpecError, TreeError
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.sharding.partition_spec import P
from tests.helpers import refusal

MESH = AbstractMesh(("dp", "tp"), (4, 2))
GRID = AbstractMesh(("replica", "dp", "cp", "tp"), (2, 2, 2, 2))


def leaf(*shape, dtype=torch.float32):
    return fs.random.zeros(shape, dtype=dtype)


def plan(model, mesh=MESH, *, tp="replicate", **how):
    return fs.plan_layout(model, mesh, tp=tp, **how)


def specs(layout, kind="params"):
    return fs.tree.map(lambda s: s.spec, getattr(layout, kind))


# ------------------------------------------------------------------------------------------------------ where things go
def test_data_axes_go_where_a_rule_puts_them():
    names = {"wq": ("layers", "heads", "embed"), "wo": ("layers", "embed", "heads"), "norm": ("layers", "embed")}
    layout = plan({"wq": leaf(3, 8, 16), "wo": leaf(3, 16, 8), "norm": leaf(3, 16)}, names=names)
    assert specs(layout) == {"wq": P(None, "tp", "dp"), "wo": P(None, "dp", "tp"), "norm": P(None, "dp")}
    assert layout.params["wq"] == fs.NamedSharding(MESH, P(None, "tp", "dp"))


def test_without_a_rule_the_first_free_dim_is_cut_and_never_the_layers():
    rules = fs.AxisRules(layers="pp", mlp="tp", other=None)
    names = {
        "a": ("mlp", "other"),
        "b": ("layers", "mlp", "other"),
        "c": ("layers",),
        "d": (None, "other"),
        "e": ("mlp",),
        "f": (),
    }
    shapes = {"a": leaf(8, 3), "b": leaf(2, 8, 3), "c": leaf(2), "d": leaf(5, 5), "e": leaf(8), "f": leaf()}
    layout = plan(shapes, rules=rules, names=names)
    assert specs(layout) == {
        "a": P("tp", "dp"), "b": P(None, "tp", "dp"), "c": P(), "d": P("dp"), "e": P(("tp", "dp")), "f": P(),
    }  # fmt: skip


def test_leaves_without_names_are_cut_along_their_first_dim():
    assert specs(plan([leaf(5, 3), leaf(), {"b": leaf(7)}])) == [P("dp"), P(), {"b": P("dp")}]


def test_what_each_strategy_cuts():
    def of(strategy):
        layout = plan({"w": leaf(16, 4)}, GRID, strategy=strategy)
        return [str(getattr(layout, kind)["w"]) for kind in ("params", "grads", "main")]

    both = "P(('dp', 'cp'))"
    assert of(fs.zero(0)) == ["P()", "P() unreduced over replica, dp, cp", "P()"]
    assert of(fs.zero(1)) == ["P()", "P() unreduced over replica, dp, cp", both]
    assert of(fs.zero(2)) == ["P()", f"{both} unreduced over replica", both]
    assert of(fs.zero(3)) == [both, f"{both} unreduced over replica", both]
    assert of(fs.hybrid()) == of(fs.zero(3))
    assert of(fs.hybrid(opt_state=True)) == [both, f"{both} unreduced over replica", "P(('dp', 'cp', 'replica'))"]
    assert of(fs.hybrid(params=True, grads=True, opt_state=True)) == ["P(('dp', 'cp', 'replica'))"] * 3


def test_frozen_leaves_have_neither_gradients_nor_moments():
    shapes = {
        "embed": {"table": leaf(8, 4)},
        "embedding": leaf(8),
        "head": {"w": leaf(4, 4), "steps": leaf(3, dtype=torch.int64)},
    }
    layout = plan(shapes, frozen=("embed", "head.w"))
    assert [(x.path, x.trainable) for x in layout.leaves] == [
        ("embed.table", False), ("embedding", True), ("head.steps", False), ("head.w", False),
    ]  # fmt: skip
    assert layout.grads["embed"]["table"] is None and layout.main["head"] == {"w": None, "steps": None}
    memory = layout.memory()
    assert memory.params == 4 * (2 * 4 + 2 + 4) + 8 and memory.grads == 4 * 2 and memory.opt_state == 8 * 2


def test_a_model_brings_its_names():
    config = fs.models.DecoderConfig(layers=2, dim=32, intermediate_size=64, vocab_size=48)
    layout = plan(fs.models.decoder(config))
    assert layout == plan(fs.models.decoder(config).init(fs.random.key(0)), names=fs.models.decoder(config).names)
    assert layout.params["blocks"]["wq"].spec == P(None, "tp", "dp")
    assert layout.params["embed"]["table"].spec == P("tp", "dp")


def test_layouts_print():
    layout = plan(
        {"w": leaf(8, 3), "s": leaf(dtype=torch.bfloat16)}, frozen=("s",), precision=fs.BF16, strategy=fs.zero(1)
    )
    assert str(layout) == (
        "Layout of 2 leaves on mesh {dp: 4, tp: 2}, strategy zero1\n"
        "  s: float32[] params P(), frozen\n"
        "  w: bfloat16[8, 3] params P(), grads P() unreduced over dp, opt_state P('dp')"
    )


# ----------------------------------------------------------------------------------------------------------- experts
WITH_EXPERTS = AbstractMesh(("replica", "dp", "ep", "cp", "tp"), (2, 2, 2, 2, 2))
EXPERTS = {"gate": leaf(2, 8, 6, 16), "dense": leaf(2, 6, 16), "bias": leaf(8)}
EXPERT_NAMES = {"gate": ("layers", "expert", "mlp", "embed"), "dense": ("layers", "mlp", "embed"), "bias": ("expert",)}


def test_experts_are_owned_along_their_axis_and_cut_over_the_other_data_axes():
    def of(strategy, name):
        layout = plan(EXPERTS, WITH_EXPERTS, names=EXPERT_NAMES, strategy=strategy)
        return [str(getattr(layout, kind)[name]) for kind in ("params", "grads", "main")]

    whole, cut = "P(None, 'ep', 'tp')", "P(None, 'ep', 'tp', ('dp', 'cp'))"
    assert of(fs.zero(1), "gate") == [
        f"{whole} owned over ep", f"{whole} unreduced over replica, dp, cp owned over ep", f"{cut} owned over ep",
    ]  # fmt: skip
    assert of(fs.hybrid(opt_state=True), "gate") == [
        f"{cut} owned over ep", f"{cut} unreduced over replica owned over ep",
        "P(None, 'ep', 'tp', ('dp', 'cp', 'replica')) owned over ep",
    ]  # fmt: skip
    assert of(fs.zero(3), "bias")[0] == "P(('ep', 'dp', 'cp')) owned over ep"
    assert of(fs.zero(2), "dense")[1:] == [
        "P(None, 'tp', ('dp', 'ep', 'cp')) unreduced over replica", "P(None, 'tp', ('dp', 'ep', 'cp'))",
    ]  # fmt: skip


def test_experts_follow_their_rule():
    def spec(expert, mesh=WITH_EXPERTS, **other):
        rules = fs.DEFAULT_RULES.replace(expert=expert, **other)
        return str(plan({"w": leaf(8, 6, 16)}, mesh, names={"w": ("expert", "mlp", "embed")}, rules=rules).params["w"])

    assert spec(None) == "P(None, 'tp', ('dp', 'ep', 'cp'))"
    assert spec(("cp", "dp")) == "P(('cp', 'dp'), 'tp', 'ep') owned over cp, dp"
    assert spec("tp", mlp=None) == "P('tp', None, ('dp', 'ep', 'cp'))"
    assert spec("ep", embed="ep") == "P('ep', 'tp') owned over ep", "nothing is left of the rule of embed"
    assert spec("ep", MESH) == "P(None, 'tp', 'dp')", "the mesh has no ep"


def test_bytes_of_experts():
    memory = plan(
        {"w": leaf(8, 6, 16)}, AbstractMesh(("dp", "ep"), (2, 4)), names={"w": ("expert", "mlp", "embed")}
    ).memory()
    assert memory == (4 * 8 * 6 * 16 // 8, 0, 4 * 8 * 6 * 16 // 8, 2 * 4 * 8 * 6 * 16 // 8, 0, {})
    zero1 = plan(
        {"w": leaf(8, 6, 16)},
        AbstractMesh(("dp", "ep"), (2, 4)),
        names={"w": ("expert", "mlp", "embed")},
        strategy=fs.zero(1),
    )
    assert zero1.memory() == (4 * 8 * 6 * 16 // 4, 0, 4 * 8 * 6 * 16 // 4, 2 * 4 * 8 * 6 * 16 // 8, 0, {})


# ------------------------------------------------------------------------------------------------------------- bytes
@pytest.mark.parametrize("d", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("precision", "level", "bytes_of"),
    [
        (fs.FP32, 0, lambda d: 16), (fs.FP32, 1, lambda d: 8 + 8 / d), (fs.FP32, 2, lambda d: 4 + 12 / d), (fs.FP32, 3, lambda d: 16 / d),
        (fs.BF16, 0, lambda d: 18), (fs.BF16, 1, lambda d: 6 + 12 / d), (fs.BF16, 2, lambda d: 2 + 16 / d), (fs.BF16, 3, lambda d: 16 / d),
    ],
)  # fmt: skip
def test_bytes_a_parameter(precision, level, bytes_of, d):
    mesh = AbstractMesh(("dp",), (d,))
    layout = plan({"w": leaf(16, 3), "b": leaf(8)}, mesh, strategy=fs.zero(level), precision=precision)
    assert layout.memory().total == 56 * bytes_of(d)
    assert layout.memory(fs.adamw(0.1)).total == 56 * bytes_of(d) + 8, "and a count"


def test_memory_of_other_optimizers_and_parts():
    layout = plan({"w": leaf(16, 3)}, AbstractMesh(("dp",), (4,)), strategy=fs.zero(1), precision=fs.BF16)
    assert layout.memory(fs.sgd(0.1)) == (96, 48, 192, 8, 0, {})
    assert layout.memory(fs.sgd(0.1, momentum=0.9)) == (96, 48, 192, 56, 0, {})
    memory = layout.memory()
    assert (memory.params, memory.main, memory.grads, memory.opt_state) == (96, 48, 192, 96)
    assert memory.state == 240 and memory.total == 432
    assert str(memory) == "432 bytes a rank (params 96, main 48, grads 192, opt_state 96, buffers 0)"


def test_the_last_rank_of_an_uneven_cut_holds_less():
    layout = plan({"w": leaf(5, 3)}, AbstractMesh(("dp",), (4,)))
    assert [layout.memory(coord={"dp": i}).params for i in range(4)] == [24, 24, 12, 0]
    assert layout.memory().params == 24


def test_gradients_and_moments_follow_the_main_dtype():
    layout = plan(
        {"w": leaf(4, dtype=torch.float64)}, AbstractMesh(("dp",), (1,)), precision=fs.BF16, strategy=fs.zero(0)
    )
    state = fs.init_state(
        lambda key: {"w": leaf(4, dtype=torch.float64)},
        fs.adamw(0.1),
        fs.random.key(0),
        layout.with_mesh(fs.make_mesh(device="cpu")),
    )
    assert state.main["w"].dtype == torch.float32
    assert layout.memory() == (8, 16, 16, 32, 0, {})


# ------------------------------------------------------------------------------------------------------------- changes
def test_a_layout_can_be_changed():
    layout = plan({"w": leaf(16, 3)}, frozen=("w",))
    assert layout.with_strategy(fs.zero(1)).strategy == fs.zero(1)
    assert layout.with_precision(fs.BF16).precision == fs.BF16
    moved = layout.with_mesh(AbstractMesh(("dp",), (2,)))
    assert moved.params["w"] == fs.NamedSharding(AbstractMesh(("dp",), (2,)), P("dp")) and not moved.leaves[0].trainable
    assert layout.with_strategy(fs.zero(1)).with_strategy(fs.zero(3)) == layout
    assert {layout: 1}[layout.with_mesh(MESH)] == 1


# ------------------------------------------------------------------------------------------------------------ refusals


def test_dim_names_without_a_rule():
    shapes, names = {"a": {"w": leaf(8, 6)}, "b": leaf(3, 3)}, {"a": {"w": ("mlp", "emebd")}, "b": ("embed", "foo")}
    assert refusal(lambda: plan(shapes, names=names), kind=SpecError) == (
        "fs.plan_layout got dims without a rule, on mesh {dp: 4, tp: 2}.\n"
        "  a.w is float32[8, 6], dim 1 ('emebd', size 6): no rule 'emebd'.\n"
        "  b is float32[3, 3], dim 1 ('foo', size 3): no rule 'foo'.\n"
        "Add emebd=None to the AxisRules, or the axes that shard it. Did you mean 'embed'?\n"
        "Add foo=None to the AxisRules, or the axes that shard it."
    )


def test_experts_have_no_parts():
    shapes, names = {"a": leaf(8, 6)}, {"a": (fs.Fused("expert", (4, 4)), "embed")}
    assert refusal(lambda: plan(shapes, names=names), kind=LayoutError) == (
        "fs.plan_layout cannot plan these leaves.\n"
        "  a is float32[8, 6], dim 0 (Fused('expert', (4, 4))): the dim of experts cannot be fused"
    )


def test_one_axis_for_two_dims_of_a_leaf():
    shapes, names = {"a": leaf(8, 6), "b": leaf(4)}, {"a": ("mlp", "heads"), "b": ("mlp",)}
    assert refusal(lambda: plan(shapes, names=names), kind=SpecError) == (
        "fs.plan_layout cannot shard two dims of a leaf over one axis, on mesh {dp: 4, tp: 2}.\n"
        "  a is float32[8, 6]: axis 'tp' would shard dim 0 ('mlp', size 8) and dim 1 ('heads', size 6).\n"
        "Give one of the dims a different name, with a separate rule."
    )


def test_an_axis_that_the_mesh_lacks_cuts_nothing_twice():
    shapes, names = {"a": leaf(8, 6)}, {"a": ("embed", "embed")}
    text = refusal(lambda: plan(shapes, names=names), kind=SpecError)
    assert "axis 'dp'" in text and "axis 'cp'" not in text and text.count("\n  ") == 1


def test_names_that_do_not_fit_a_shape():
    shapes, names = {"a": leaf(8, 6), "b": leaf(3)}, {"a": ("mlp",), "b": ("embed",)}
    assert refusal(lambda: plan(shapes, names=names), kind=LayoutError) == (
        "fs.plan_layout got leaves whose dims and names differ in number.\n  a is float32[8, 6] but has names ('mlp',): write ('mlp', None), for example"
    )


def test_names_for_another_tree():
    text = refusal(lambda: plan({"a": leaf(8, 6), "b": leaf(3)}, names={"a": ("mlp", "embed")}), kind=TreeError)
    lines = text.split("\n")
    assert lines[0] == "fs.plan_layout got names that do not match the model."
    assert lines[1:] == [
        "  b: only in the model",
        "Give names an entry for each leaf of the model, None for a leaf without names.",
    ]


def test_frozen_paths_that_no_leaf_has():
    assert refusal(lambda: plan({"a": leaf(8, 6), "b": leaf(3)}, frozen=("b", "c")), kind=LayoutError) == (
        "fs.plan_layout cannot plan these leaves.\n  frozen path 'c' matches no leaf; leaves are a, b\n"
        "Pass dotted paths of leaves, or prefixes of them."
    )


def test_one_frozen_path_may_be_text():
    shapes = {"embed": leaf(3), "m": leaf(2)}
    assert plan(shapes, frozen="embed") == plan(shapes, frozen=("embed",))


def test_dtypes_that_kernels_lack():
    shapes = {
        "a": leaf(8, dtype=torch.float8_e4m3fn),
        "c": torch.empty(2, dtype=torch.complex64),
        "n": leaf(2, dtype=torch.int32),
    }
    assert refusal(lambda: plan(shapes), kind=LayoutError) == (
        "fs.plan_layout cannot plan these leaves.\n"
        "  a is float8_e4m3fn[8]: leaves can be float16, bfloat16, float32, float64, or integers\n"
        "  c is complex64[2]: leaves can be float16, bfloat16, float32, float64, or integers"
    )


def test_a_strategy_goes_by_its_name():
    shapes = {"w": leaf(8, 6)}
    assert plan(shapes, strategy="zero1") == plan(shapes, strategy=fs.zero(1))
    assert plan(shapes).with_strategy("hfsdp") == plan(shapes, strategy=fs.hybrid(opt_state=True))
    for odd in ("zero4", 3):
        text = refusal(lambda odd=odd: plan(shapes, strategy=odd), kind=ConfigError)
        assert text.startswith(f"fs.plan_layout got an unknown strategy, {odd!r}.\nStrategies are zero0, ")


# ------------------------------------------------------------------------------------------------- a tp that does nothing
def test_a_tp_axis_that_shards_no_leaf_is_refused_unless_replicas_are_meant():
    tree = {"up": leaf(64, 8), "out": leaf(8)}
    assert refusal(fs.plan_layout, tree, MESH, kind=ConfigError) == (
        "fs.plan_layout shards no leaf (2,080 bytes in all) over tp=2: its ranks would compute the same.\n"
        "  up is float32[64, 8] (no names)\n"
        "  out is float32[8] (no names)\n"
        "Use tp=1, and dp=8 for these ranks; or name the dims that tp shards: names= for a tree, names= and roles= of "
        'fs.functionalize for a module. If replicas are meant: tp="replicate".'
    )
    with warnings.catch_warnings(action="error"):
        assert specs(fs.plan_layout(tree, MESH, tp="replicate")) == {"up": P("dp"), "out": P("dp")}
        assert specs(plan(tree, tp="shard", names={"up": ("mlp", "embed"), "out": None}))["up"] == P("tp", "dp")
        fs.plan_layout(tree, AbstractMesh(("ep", "cp"), (2, 2)))  # data axes: they shard tokens
    assert 'got tp=2.\nPass tp="shard"' in refusal(plan, tree, tp=2)
    one = fs.plan_layout(tree, AbstractMesh(("dp",), (8,)))
    text = refusal(one.with_mesh, MESH, kind=ConfigError)
    assert text.startswith("fs.Layout.with_mesh shards no leaf (2,080 bytes in all) over tp=2")
    replicas = one.with_mesh(MESH, tp="replicate")
    assert replicas.with_mesh(MESH) == replicas == fs.plan_layout(tree, MESH, tp="replicate")


def test_a_tp_axis_that_shards_less_than_half_of_the_bytes_warns_with_both_numbers():
    names = {"small": ("mlp", "embed"), "large": (None, "embed")}
    sizes = {"small": leaf(4, 8), "large": leaf(9, 8, dtype=torch.bfloat16)}
    with pytest.warns(UserWarning, match="over tp=2") as caught:
        plan(sizes, names=names, tp="shard", frozen="large")
    assert str(caught[0].message).splitlines()[:2] == [
        "fs.plan_layout shards 128 of 272 bytes over tp=2: its ranks store and compute the rest redundantly.",
        "  large is bfloat16[9, 8] (None, 'embed')",
    ]
    with warnings.catch_warnings(action="error"):
        plan(sizes | {"large": leaf(8, 8, dtype=torch.bfloat16)}, names=names, tp="shard")  # just half
        plan(sizes, names=names, tp="replicate")


def test_a_leaf_of_parts_is_one_that_tp_shards():
    with warnings.catch_warnings(action="error"):
        layout = fs.plan_layout({"qkv": leaf(8, 4)}, MESH, names={"qkv": (fs.Fused("heads", (4, 2, 2)), "embed")})
    assert layout.params["qkv"].local_shape((8, 4)) == (4, 1)


def test_parts_of_a_dim_are_cut_on_borders_of_blocks():
    mesh = AbstractMesh(("pp", "dp", "tp"), (2, 4, 2))
    rules, names = fs.AxisRules(rows="pp", parts="tp"), {"w": ("rows", fs.Fused("parts", (64, 64)))}
    precision = fs.Precision(gather=fs.formats.MXFP8)
    fs.plan_layout({"w": leaf(64, 128)}, mesh, rules, names=names, precision=precision)
    text = refusal(
        fs.plan_layout, {"w": leaf(64, 128)}, mesh, rules, names=names, precision=precision, align=True,
        kind=LayoutError,
    )  # fmt: skip
    row = "  w is float32[64, 128], dim 1: 128 over dp, tp gives 8 shards of 16, blocks have 32"
    assert text.splitlines()[1] == row
