"""Megatron's directories in every kind of layout, and back; torch's own DCP writes and reads the other side."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import fsharding as fs
from fsharding import tree
from fsharding.base.errors import CheckpointError, ConfigError
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests import megatron_format as theirs

TOKENS = torch.randint(40, (4, 9), generator=torch.Generator().manual_seed(1))
LAYOUTS = [
    *((({"dp": 2}, fs.zero(level))) for level in range(4)),
    ({"replica": 2, "dp": 1}, fs.hybrid()),
    ({"tp": 2}, fs.zero(3)),
]


def config_of(experts=0, **options):
    mixture = fs.models.Experts(experts, 2, theirs.SIZES["intermediate_size"]) if experts else None
    return fs.models.DecoderConfig(**theirs.SIZES, experts=mixture, **options)


def layout_of(config, axes, strategy):
    return fs.plan_layout(fs.models.decoder(config), fs.make_mesh(device="cpu", **axes), strategy=strategy)


def whole(values):
    return tree.map(lambda x: x.full_tensor(), values)


def written(folder, name, experts=0, **options):
    """A directory in a dialect, and the models whose numbers it has."""
    models = [theirs.layers_of(seed, experts) for seed in range(3)]
    write = theirs.write_fsdp if name == "fsdp" else theirs.write_core
    return write(folder, models[0], models[1:], **options), models


def through(folder, experts, out, layouts):
    """Reads a directory into layouts, writes both formats from each, and reads them again."""
    config, opt = config_of(experts), fs.adamw(1e-3)
    models = [theirs.tree_of(theirs.layers_of(seed, experts)) for seed in range(3)]
    for number, (axes, strategy) in enumerate(layouts):
        layout = layout_of(config, axes, strategy)
        state = fs.megatron.load_state(folder, opt, fs.random.key(0), layout, config, step=7)
        assert_bitwise_equal(whole(fs.megatron.load(folder, layout, config)), models[0])
        assert_bitwise_equal(whole(state.opt_state.mu), models[1])
        assert_bitwise_equal(whole(state.opt_state.nu), models[2])
        assert int(state.step) == int(state.opt_state.count) == 7
        for form in ("torch_dist", "fsdp_dtensor"):
            saved = fs.megatron.save(f"{out}/{number}.{form}", state, config, form)
            again = fs.megatron.load_state(saved.path, opt, fs.random.key(0), layout, config)
            assert_bitwise_equal(again.params, state.params)
            assert_bitwise_equal(again.opt_state, state.opt_state)
            assert int(again.step) == 7


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("name", ["core", "fsdp"])
def test_directories_are_read_into_every_layout_and_written_back(tmp_path, name, experts):
    folder, _ = written(tmp_path / "iter_0000007", name, experts)
    layouts = LAYOUTS if (name, experts) == ("core", 0) else LAYOUTS[3::2]
    run_ranks(through, 2, folder, experts, tmp_path, layouts)


@pytest.mark.parametrize("options", [{"stacked": False}, {"fused_norms": False}, {}])
def test_every_dialect_of_torch_dist_is_read(tmp_path, options):
    folder, models = written(tmp_path / "iter_0000007", "core", **options)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    layout = layout_of(config_of(), {"dp": 1}, fs.zero(3))
    assert_bitwise_equal(whole(fs.megatron.load(tmp_path, layout, config_of())), theirs.tree_of(models[0]))
    joined = config_of(fused=True)
    params = fs.megatron.load(folder, layout_of(joined, {"dp": 1}, fs.zero(3)), joined)
    ours = theirs.tree_of(models[0])["blocks"]
    assert_bitwise_equal(whole(params)["blocks"]["wqkv"], torch.cat([ours[x] for x in ("wq", "wk", "wv")], 1))
    assert_bitwise_equal(whole(params)["blocks"]["gate_up"], torch.cat([ours["gate"], ours["up"]], 1))


def test_the_loss_of_a_directory_is_that_of_plain_torch(tmp_path):
    folder, models = written(tmp_path / "iter_0000007", "core")
    config, opt = config_of(), fs.sgd(0.0)
    layout = layout_of(config, {"dp": 1}, fs.zero(3))
    state = fs.state_from_params(fs.megatron.load(folder, layout, config), opt, fs.random.key(0), layout)
    batch = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
    loss = fs.make_train_step(fs.models.decoder(config), opt)(state, batch)[1].loss
    torch.testing.assert_close(torch.as_tensor(float(loss)), theirs.loss_of(models[0], TOKENS), rtol=1e-5, atol=1e-6)


def test_torch_reads_what_was_written(tmp_path):
    folder, models = written(tmp_path / "iter_0000007", "core")
    config, opt = config_of(), fs.adamw(1e-3)
    state = fs.megatron.load_state(folder, opt, fs.random.key(0), layout_of(config, {"dp": 1}, fs.zero(3)), config)
    saved = fs.megatron.save(tmp_path / "out", state, config)
    wanted = {name: x for name, (x, _) in theirs.core_tensors(models[0]).items()}
    for kind, model in zip(("param", "exp_avg", "exp_avg_sq"), models, strict=True):
        wanted |= {f"optimizer.state.{kind}.{name}": x for name, (x, _) in theirs.core_tensors(model).items()}
    there = dcp.FileSystemReader(saved.path).read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in there.items() if "_extra_state" not in name}
    assert {name: entry.size for name, entry in tensors.items()} == {name: x.shape for name, x in wanted.items()}
    read = {name: torch.empty_like(x) for name, x in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(read, checkpoint_id=str(saved.path), no_dist=True)
    for name, x in wanted.items():
        rows = 40 if "word_embeddings" in name or "output_layer" in name else len(x)
        assert torch.equal(read[name][:rows], x[:rows]) and not read[name][rows:].any(), name
    assert torch.load(saved.path / "common.pt", weights_only=False)["iteration"] == 7


@pytest.mark.parametrize("format", ["torch_dist", "fsdp_dtensor"])
def test_a_config_of_another_model_is_refused(tmp_path, format):
    config, path = config_of(), tmp_path / "out"
    model, mesh = fs.models.decoder(config), fs.make_mesh(dp=1, device="cpu")
    state, _ = fs.setup(model, None, fs.adamw(1e-3), fs.random.key(0), mesh=mesh)
    refused = [
        (replace(config, layers=3), "blocks.norm1 is [2, 16], and [3, 16] in the model"),
        (replace(config, vocab_size=32), "embed.table is [40, 16], and [32, 16] in the model"),
        (replace(config, qk_norm=not config.qk_norm), "blocks.q_norm: only in the "),
        (replace(config, tied=not config.tied), "head.unembed: only in the "),
        (replace(config, rope_base=5.0), "rope_theta is 5.0 in the config, and 10000.0 in the layout's model"),
        (replace(config, heads=2, kv_heads=1), "num_attention_heads is 2 in the config, and 4 in the layout's model"),
    ]
    for other, row in refused:
        with pytest.raises(CheckpointError) as caught:
            fs.megatron.save(path, state, other, format)
        lines = str(caught.value).splitlines()
        assert any(line.strip().startswith(row) for line in lines), str(caught.value)
        assert lines[0] == f"fs.megatron.save cannot write {path}." and not path.exists()
        assert lines[-1] == "Pass the config that the state's model was made of."


def test_arguments_and_iteration_are_found_where_each_format_has_them(tmp_path):
    args = {"num_attention_heads": 8, "num_query_groups": 2, "group_query_attention": True, "rotary_percent": 0.5}
    config = config_of()
    layout = layout_of(config, {"dp": 1}, fs.zero(3))
    writers = {
        "core": lambda folder, **said: written(folder, "core", **said),
        "newer": lambda folder, **said: written(folder, "core", beside=False, **said),
        "fsdp": lambda folder, **said: written(folder, "fsdp", **said),
    }
    for name, write in writers.items():
        folder, _ = write(tmp_path / name / "x", args=args)
        with pytest.raises(CheckpointError) as caught:
            fs.megatron.load(folder, layout, config)
        assert "num_attention_heads is 8 there, 4 in the config" in str(caught.value), name
        assert "rotary_percent is 0.5 there, 1.0 in the config" in str(caught.value), name
        folder, _ = write(tmp_path / name / "iter_0000007", args={"num_attention_heads": 4})
        state = fs.megatron.load_state(folder, fs.adamw(1e-3), fs.random.key(0), layout, config)
        assert int(state.step) == 7


def saved_by_members(out, form):
    """The iteration of ranks 1 and 2, of which rank 0 is none; and the error if members have different ones."""
    config, opt = config_of(), fs.adamw(1e-3)
    layout = fs.plan_layout(fs.models.decoder(config), fs.make_mesh(dp=2, device="cpu", ranks=(1, 2)))
    state = fs.init_state(fs.models.decoder(config), opt, fs.random.key(0), layout)
    rank = dist.get_rank()
    saved = fs.megatron.save(f"{out}/7", state.replace(step=torch.tensor(7 if rank else 3)), config, form)
    with pytest.raises(CheckpointError) as caught:
        fs.megatron.save(f"{out}/8", state.replace(step=torch.tensor(rank)), config, form)
    alone = fs.plan_layout(fs.models.decoder(config), fs.make_mesh(dp=3, device="cpu"))
    again = fs.megatron.load_state(saved.path, opt, fs.random.key(0), alone, config)
    return int(again.step), str(caught.value).splitlines()[:2]


@pytest.mark.parametrize("form", ["torch_dist", "fsdp_dtensor"])
def test_the_iteration_is_that_of_the_ranks_of_the_mesh(tmp_path, form):
    rows = ["fs.megatron.save got different values on different ranks.", "  step: rank 2 has 2, ranks 0, 1 have 1"]
    assert run_ranks(saved_by_members, 3, tmp_path, form) == [(7, rows)] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_other_models_and_broken_directories_are_refused(tmp_path):
    folder, _ = written(tmp_path / "iter_0000007", "core")
    config = config_of()
    layout = layout_of(config, {"dp": 1}, fs.zero(3))
    model = theirs.layers_of(0)
    model["layers"][1]["gate"] = model["layers"][1]["gate"][:8]
    model["layers"][1]["up"] = model["layers"][1]["up"][:8]
    other = theirs.write_core(tmp_path / "other", model, stacked=False)
    with pytest.raises(
        CheckpointError, match=r"layers.1.mlp.linear_fc1.weight is float32\[16, 16\], wanted is \[24, 16\]"
    ):
        fs.megatron.load(other, layout, config)
    with pytest.raises(CheckpointError, match=r"exp_avg of decoder.layers.0.mlp.linear_fc2.weight is missing"):
        fs.megatron.load_state(other, fs.adamw(1e-3), fs.random.key(0), layout, config)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="in no file"):
        fs.megatron.load(folder, layout, config)
    shared = fs.models.DecoderConfig(**theirs.SIZES, experts=fs.models.Experts(4, 2, 12, shared=1))
    with pytest.raises(ConfigError, match="shared experts"):
        fs.megatron.load(other, layout, shared)
