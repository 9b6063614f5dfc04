"""Megatron Core writes directories that are read here, and reads those that are written here."""

import dataclasses

import pytest
import torch

import fsharding as fs
from fsharding import tree
from fsharding.base.errors import CheckpointError
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests import megatron_core as core
from tests import megatron_format as theirs

TOKENS = torch.randint(40, (4, 9), generator=torch.Generator().manual_seed(1))
KINDS = ("param", "exp_avg", "exp_avg_sq")

# Fields of Megatron's configuration, each changed alone: how the training script spells the change, then Megatron Core.
CHANGES = {
    "rotary_base": ({"rotary_base": 100}, {"gpt": {"rotary_base": 100}}),
    "rotary_percent": ({"rotary_percent": 0.5}, {"gpt": {"rotary_percent": 0.5}}),
    "rotary_interleaved": ({"rotary_interleaved": True}, {"rotary_interleaved": True}),
    "rope_scaling": (
        {"use_rope_scaling": True, "rotary_base": 100_000_000},
        {"gpt": {"rope_scaling": True, "rotary_base": 100_000_000}},
    ),
    "interpolation": ({"rotary_seq_len_interpolation_factor": 4}, {"gpt": {"seq_len_interpolation_factor": 4}}),
    "positions": ({"position_embedding_type": "none"}, {"gpt": {"position_embedding_type": "none"}}),
    "no_rope_freq": ({"no_rope_freq": [0, 1]}, {"no_rope_freq": [0, 1]}),
    "eps": ({"norm_epsilon": 0.1}, {"layernorm_epsilon": 0.1}),
    "normalization": ({"normalization": "LayerNorm"}, {"normalization": "LayerNorm"}),
    "activation": ({"swiglu": False}, {"activation_func": "gelu"}),
    "glu_linear_offset": ({"glu_linear_offset": 1.0}, {"glu_linear_offset": 1.0}),
    "clamp": ({"activation_func_clamp_value": 0.01}, {"activation_func_clamp_value": 0.01}),
    "softmax_scale": ({"softmax_scale": 2.0}, {"softmax_scale": 2.0}),
    "window_size": ({"window_size": (2, 0)}, {"window_size": (2, 0)}),
    "qk_l2_norm": ({"qk_l2_norm": True}, {"qk_l2_norm": True}),
    "qk_layernorm": ({"qk_layernorm": True}, {"qk_layernorm": True}),
    "tied": (
        {"untie_embeddings_and_output_weights": False},
        {"gpt": {"share_embeddings_and_output_weights": True}},
    ),
}
EXPERTS = {
    "topk": ({"moe_router_topk": 3}, {"moe_router_topk": 3}),
    "pre_softmax": ({"moe_router_pre_softmax": True}, {"moe_router_pre_softmax": True}),
    "score": ({"moe_router_score_function": "sigmoid"}, {"moe_router_score_function": "sigmoid"}),
    "scaling": ({"moe_router_topk_scaling_factor": 2.0}, {"moe_router_topk_scaling_factor": 2.0}),
    "capacity": ({"moe_expert_capacity_factor": 0.5}, {"moe_expert_capacity_factor": 0.5}),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Directories of a dense model, of one with experts, and of flat optimizer states; values, and losses."""
    folder = tmp_path_factory.mktemp("megatron")
    dense, moe, flat = (folder / name for name in ("dense", "moe", "flat"))
    jobs = [
        ("write", dense / "iter_0000003", {}),
        ("write", moe / "iter_0000003", {"experts": 4}),
        ("write", flat / "iter_0000003", {"sharding": "dp_reshardable"}),
        ("losses", dense / "iter_0000003", {"variants": [{}, *(change for _, change in CHANGES.values())]}),
        (
            "losses",
            moe / "iter_0000003",
            {"experts": 4, "variants": [{}, *(change for _, change in EXPERTS.values())]},
        ),
    ]
    results = core.run(folder / "results", TOKENS, jobs)
    return {"dense": dense, "moe": moe, "flat": flat, "values": results[:3], "losses": results[3:]}


def config_of(experts=0, **options):
    mixture = fs.models.Experts(experts, 2, core.SIZES["intermediate_size"]) if experts else None
    return fs.models.DecoderConfig(**core.SIZES, experts=mixture, **options)


def layout_of(config, strategy=None, **axes):
    mesh = fs.make_mesh(device="cpu", **(axes or {"dp": 1}))
    return fs.plan_layout(fs.models.decoder(config), mesh, strategy=strategy or fs.zero(3))


def tree_of(values, kind, experts=0):
    """The tree of `models.decoder`, of values by the names of Megatron's modules: every part is cut out by hand."""

    def layer(i):
        at = f"{kind}.decoder.layers.{i}."
        groups = values[f"{at}self_attention.linear_qkv.weight"].view(2, 4, 4, 16)  # two queries, a key, a value
        result = {
            "norm1": values[f"{at}input_layernorm.weight"],
            "norm2": values[f"{at}pre_mlp_layernorm.weight"],
            "q": groups[:, :2].reshape(16, 16),
            "k": groups[:, 2].reshape(8, 16),
            "v": groups[:, 3].reshape(8, 16),
            "o": values[f"{at}self_attention.linear_proj.weight"],
        }
        mlps = [f"{at}mlp.experts.local_experts.{j}." for j in range(experts)] or [f"{at}mlp."]
        first = torch.stack([values[f"{mlp}linear_fc1.weight"] for mlp in mlps])
        second = torch.stack([values[f"{mlp}linear_fc2.weight"] for mlp in mlps])
        parts = {"gate": first[:, :12], "up": first[:, 12:], "down": second}
        if not experts:
            return result | {name: x[0] for name, x in parts.items()}
        return result | parts | {"router": values[f"{at}mlp.router.weight"]}

    ends = {"embed": "embedding.word_embeddings", "norm": "decoder.final_layernorm", "head": "output_layer"}
    model = {ours: values[f"{kind}.{name}.weight"] for ours, name in ends.items()}
    return theirs.tree_of(model | {"layers": [layer(i) for i in range(core.SIZES["layers"])]})


def whole(values):
    return tree.map(fs.unshard, values)


def equals_megatron(folder, values, experts, strategy, axes):
    """Main parameters and moments in a layout are Megatron's, bit for bit."""
    config, opt = config_of(experts), fs.adamw(1e-3)
    layout = layout_of(config, strategy, **axes)
    state = fs.megatron.load_state(folder, opt, fs.random.key(0), layout, config)
    params, mu, nu = (tree_of(values, kind, experts) for kind in KINDS)
    assert_bitwise_equal(whole(fs.megatron.load(folder, layout, config)), params)
    assert_bitwise_equal(whole(state.params), params)
    assert_bitwise_equal(whole(state.opt_state.mu), mu)
    assert_bitwise_equal(whole(state.opt_state.nu), nu)
    assert int(state.step) == int(state.opt_state.count) == 3


@pytest.mark.parametrize(("name", "experts"), [("dense", 0), ("moe", 4)])
def test_main_parameters_and_moments_of_the_fully_reshardable_format_are_read(written, name, experts):
    values = written["values"][experts > 0]
    assert any(not torch.equal(values[key], values[key].bfloat16().float()) for key in values if key[:5] == "param")
    equals_megatron(written[name] / "iter_0000003", values, experts, fs.zero(1), {"dp": 1})
    run_ranks(equals_megatron, 2, written[name] / "iter_0000003", values, experts, fs.zero(3), {"tp": 2})


@pytest.mark.parametrize(("name", "experts"), [("dense", 0), ("moe", 4)])
def test_the_loss_is_the_loss_of_megatron(written, name, experts):
    config, opt = config_of(experts), fs.sgd(0.0)
    layout = layout_of(config)
    params = fs.megatron.load(written[name] / "iter_0000003", layout, config)
    state = fs.state_from_params(params, opt, fs.random.key(0), layout)
    batch = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
    loss = fs.make_train_step(fs.models.decoder(config), opt)(state, batch)[1].loss
    assert float(loss) == pytest.approx(written["losses"][experts > 0][0], rel=1e-5)


def refusal(folder, config, args, experts=0):
    """The error for a directory of Megatron's whose run had other arguments."""
    models = [theirs.layers_of(seed, experts) for seed in range(3)]
    theirs.write_core(folder, models[0], models[1:], args=args)
    with pytest.raises(CheckpointError) as caught:
        fs.megatron.load(folder, layout_of(config), config)
    return str(caught.value)


@pytest.mark.parametrize("experts", [0, 4])
def test_each_argument_that_changes_megatrons_loss_is_refused(written, tmp_path, experts):
    base, *losses = written["losses"][experts > 0]
    changes = {name: args for name, (args, _) in (EXPERTS if experts else CHANGES).items()}
    for (name, args), loss in zip(changes.items(), losses, strict=True):
        assert abs(loss - base) > 1e-4 * base, f"{name} changes nothing: {loss} and {base}"
        config = dataclasses.replace(config_of(experts), vocab_size=40)
        said = refusal(tmp_path / name, config, {**core.ARGS, "num_experts": experts or None, **args}, experts)
        for argument, value in args.items():
            assert f"{argument} is {value!r} there" in said, said


def test_flat_optimizer_states_are_refused_with_what_to_do(written):
    config, folder = config_of(), written["flat"] / "iter_0000003"
    layout = layout_of(config)
    for call in (
        lambda: fs.megatron.load(folder, layout, config),
        lambda: fs.megatron.load_state(folder, fs.adamw(1e-3), fs.random.key(0), layout, config),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        said = str(caught.value)
        assert "the format of the distributed optimizer is dp_reshardable" in said
        assert "save it with --dist-ckpt-optim-fully-reshardable" in said
    params = fs.megatron.load(folder, layout, config, extra="ignore")
    weights = {name: x.float() for name, x in written["values"][2].items()}
    assert_bitwise_equal(whole(params), tree_of(weights, "weight"))


def test_trained_weights_without_their_main_parameters_are_refused(tmp_path):
    models = [theirs.layers_of(seed) for seed in range(3)]
    rounded = tree.map(lambda x: x.bfloat16(), models[0])
    theirs.write_core(tmp_path / "a", rounded, models[1:])
    config = dataclasses.replace(config_of(), vocab_size=40)
    with pytest.raises(CheckpointError, match=r"blocks.wq: the main parameter of .*linear_qkv.weight is missing"):
        fs.megatron.load(tmp_path / "a", layout_of(config), config)
    theirs.write_core(tmp_path / "b", rounded)
    for folder, extra in (("a", "ignore"), ("b", "refuse")):
        params = fs.megatron.load(tmp_path / folder, layout_of(config), config, extra=extra)
        assert_bitwise_equal(whole(params), theirs.tree_of(tree.map(lambda x: x.float(), rounded)))


def test_megatron_reads_what_is_written_here(written, tmp_path):
    opt = fs.adamw(1e-3)
    jobs = []
    for name, experts in (("dense", 0), ("moe", 4)):
        config = config_of(experts)
        layout = layout_of(config)
        state = fs.megatron.load_state(written[name] / "iter_0000003", opt, fs.random.key(0), layout, config)
        saved = fs.megatron.save(
            tmp_path / name, state, config, dtype=torch.bfloat16, transformer_impl="local",
            settings={**core.SETTINGS, "max_lr": core.SETTINGS["lr"], "min_lr": 0.0}, samples=24,
        )  # fmt: skip
        again = fs.megatron.load_state(saved.path, opt, fs.random.key(0), layout, config)
        assert_bitwise_equal(again.opt_state, state.opt_state)
        jobs.append(("read", saved.path, {"experts": experts}))
    for values, read in zip(written["values"], core.run(tmp_path / "results", TOKENS, jobs), strict=False):
        for name, x in values.items():
            assert torch.equal(read[name], x), name
        for group in read["groups"]:
            assert {key: group[key] for key in core.SETTINGS} == core.SETTINGS
            assert group["step"] == 3
        assert [group["wd_mult"] for group in read["groups"]] == [1.0, 0.0]
        assert read["iteration"] == 3 and read["args"]["consumed_train_samples"] == 24
        assert {name: read["args"][name] for name in ("num_layers", "norm_epsilon", "swiglu")} == {
            name: core.ARGS[name] for name in ("num_layers", "norm_epsilon", "swiglu")
        }
        assert read["schedule"] == 24
