"""Models of transformers on real ranks: bits, logits and losses in every kind of layout, and back into transformers."""

import functools
import json
import os
import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fsharding as fs
from bench.rounds import allocated
from fsharding import checkpoint, ops
from fsharding.base.errors import CheckpointError, ConfigError, RankError
from fsharding.foreign.safetensors_files import tensor_files
from fsharding.interop import hf
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.sharding.named_sharding import LeafType, sharding_of
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.helpers import full
from tests.hf_configs import LONG, SIZES, YARN

MOE = {"num_experts_per_tok": 2, "num_experts": 4}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LONG}),
    "qwen2": ("Qwen2Config", {"rope_parameters": YARN, "max_position_embeddings": 64}),
    "qwen3": ("Qwen3Config", {"head_dim": 6}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mixtral": ("MixtralConfig", {"num_experts_per_tok": 2, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {**MOE, "moe_intermediate_size": 12, "head_dim": 8}),
}
TOKENS = torch.randint(40, (4, 20), generator=torch.Generator().manual_seed(1))


def moved(model):
    """A model whose norms and biases matter, too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.2 * torch.randn(x.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def transformers():
    """The package; imported here, because every process that collects these tests would need seconds for it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="module")
def theirs(tmp_path_factory, transformers):
    """Of a family: the directory, the model, its logits."""

    @functools.cache
    def make(name):
        kind, entries = FAMILIES[name]
        config = getattr(transformers, kind)(**SIZES, **entries)
        folder = tmp_path_factory.mktemp(name) / "model"
        torch.manual_seed(0)
        model = moved(transformers.AutoModelForCausalLM.from_config(config).float())
        model.save_pretrained(folder, max_shard_size="5KB")
        return folder, model, model(TOKENS).logits.detach()

    return make


# ---------------------------------------------------------------------------------------------------------- on the ranks
def layout_of(config, axes, strategy):
    mesh, model, stages = fs.make_mesh(device="cpu", **axes), fs.models.decoder(config), None
    if axes.get("pp", 1) > 1:
        stages = fs.pipeline.stages_of(model, fs.pipeline.plan_schedule("1f1b", axes["pp"], 2))
    return fs.plan_layout(model, mesh, strategy=strategy, stages=stages)


def logits_of(config, params, mesh, tokens):
    """All logits of this rank's rows."""
    model = fs.models.decoder(config)

    def head(params, stream, batch):
        logits_BTV = F.linear(ops.rms_norm(stream.x, params["norm"], eps=config.eps), params["unembed"])
        whole = logits_BTV.shape[-1] == config.vocab_size
        return logits_BTV if whole else ops.all_gather(logits_BTV, "tp", dim=2, size=config.vocab_size)

    with fs.set_mesh(mesh), torch.no_grad():
        return fs.model_loss(model._replace(head=head))(params, {"tokens": tokens})


def loss_of(config, params, layout, tokens):
    """The mean token loss of all ranks, by a step that changes nothing."""
    opt = fs.sgd(0.0)
    state = fs.state_from_params(params, opt, fs.random.key(0), layout)
    pieces = 2 if "pp" in layout.mesh.mesh_dim_names else 1
    step = fs.make_train_step(fs.models.decoder(config), opt, microbatches=pieces)
    return step(state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})[1].loss


def in_and_out(folder, axes, strategy, out):
    """Loads, computes and saves; returns logits, the rows that they are of, and a loss."""
    config = hf.config_of(folder)
    layout = layout_of(config, axes, strategy)
    params = hf.load(folder, layout)
    ready = fs.params_from_main(params, params, layout)
    hf.save(out, ready, config, layout, max_file_bytes=4000)
    assert_bitwise_equal(params, hf.load(out, layout))
    index, count = data_rank_and_size(layout.mesh)
    rows = slice(index * 4 // count, (index + 1) * 4 // count)
    logits = None if "pp" in axes else logits_of(config, ready, layout.mesh, TOKENS[rows])
    return rows, logits, loss_of(config, params, layout, TOKENS[rows])


LAYOUTS = {
    "one": ({"dp": 1}, fs.zero(3)),
    "zero3": ({"dp": 2}, fs.zero(3)),
    "tp": ({"tp": 2}, fs.zero(3)),
    "ep": ({"ep": 2}, fs.zero(3)),
    "pp": ({"pp": 2}, fs.zero(3)),
    "zero0": ({"dp": 2}, fs.zero(0)),
    "zero1": ({"dp": 2}, fs.zero(1)),
    "hsdp": ({"replica": 2, "dp": 2}, fs.hybrid()),
    "tp4": ({"tp": 4}, fs.zero(3)),
    "dp_tp": ({"dp": 2, "tp": 2}, fs.zero(3)),
    "pp_tp": ({"pp": 2, "tp": 2}, fs.zero(1)),
    "ep_tp": ({"ep": 2, "tp": 2}, fs.zero(3)),
    "pp_ep": ({"pp": 2, "ep": 2}, fs.zero(3)),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in ("tied", "mixtral") else full) for x in FAMILIES])
def test_a_loaded_model_generates_what_transformers_generates(theirs, name):
    folder, model, _ = theirs(name)
    config = hf.config_of(folder)
    params = hf.load(folder, layout_of(config, {"dp": 1}, fs.zero(3)))
    want = model.generate(TOKENS, max_new_tokens=9, do_sample=False, eos_token_id=None)[:, TOKENS.shape[1] :]
    assert torch.equal(fs.models.generate(config, params, TOKENS, 9), want)
    net = fs.functionalize(model)
    whole = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(net, fs.make_mesh(device="cpu")))
    assert torch.equal(fs.models.generate(net, whole, TOKENS, 9), want)


DEFAULT = {name: ["one", "zero3", "tp"] for name in FAMILIES}
DEFAULT |= {name: ["one", "zero3", "tp", "ep", "pp"] for name in ("mixtral", "qwen3_moe")}
DEFAULT |= {"llama": ["zero3", "tp"]}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param(name, where, marks=[] if where in DEFAULT[name] else full)
        for name in FAMILIES
        for where in LAYOUTS
        if "ep" not in where or name in ("mixtral", "qwen3_moe")
    ],
)
def test_a_model_of_transformers_goes_in_and_out(name, where, theirs, transformers, tmp_path):
    folder, model, logits = theirs(name)
    axes, strategy = LAYOUTS[where]
    size = functools.reduce(int.__mul__, axes.values())
    what = folder, axes, strategy, tmp_path / "out"
    found = [in_and_out(*what)] if size == 1 else run_ranks(in_and_out, size, *what)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    for rows, mine, mean in found:
        torch.testing.assert_close(mean, loss, rtol=1e-5, atol=0)
        if mine is not None:
            torch.testing.assert_close(mine, logits[rows], rtol=1e-5, atol=2e-6)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_bitwise_equal({**again.state_dict()}, {**model.state_dict()})
    assert torch.equal(again(TOKENS).logits, logits)


def fused_in_and_out(folder, out):
    """A tree with fused leaves, of which each rank has a piece of each part."""
    shapes = {"wqkv": fs.random.zeros((2, 16, 32)), "gate_up": fs.random.zeros((2, 48, 16))}
    dims = {
        "wqkv": ("layers", "embed", fs.Fused("heads", (16, 8, 8))),
        "gate_up": ("layers", fs.Fused("mlp", (24, 24)), "embed"),
    }
    layer = "model.layers.{i}."
    names = {
        "wqkv": hf.Joined(tuple(hf.Transposed(f"{layer}self_attn.{x}_proj.weight") for x in "qkv")),
        "gate_up": hf.Joined(tuple(f"{layer}mlp.{x}_proj.weight" for x in ("gate", "up"))),
    }
    layout = fs.plan_layout(shapes, fs.make_mesh(device="cpu", tp=-1), names=dims)
    params = hf.load(folder, layout, names, extra="ignore")
    hf.save(out, params, {"model_type": "fused"}, layout, names=names)
    return {
        leaf.path: (leaf.main.boxes(leaf.shape), x.to_local())
        for leaf, x in zip(layout.leaves, fs.tree.leaves(params), strict=True)
    }


def test_fused_leaves_are_made_of_their_parts_on_every_rank(theirs, tmp_path):
    folder, model, _ = theirs("llama")
    x = model.state_dict()
    layer = "model.layers.{}.{}_proj.weight"
    wqkv = torch.stack([torch.cat([x[layer.format(i, f"self_attn.{n}")] for n in "qkv"]).T for i in range(2)])
    gate_up = torch.stack([torch.cat([x[layer.format(i, f"mlp.{n}")] for n in ("gate", "up")]) for i in range(2)])
    for found in run_ranks(fused_in_and_out, 2, folder, tmp_path / "out"):
        for path, whole in (("wqkv", wqkv), ("gate_up", gate_up)):
            held, local = found[path]
            dim = 2 if path == "wqkv" else 1
            parts = [whole[tuple(slice(a, b) for a, b in box)] for box in held]
            assert torch.equal(torch.cat(parts, dim), local)
    for file in (tmp_path / "out").glob("*.safetensors"):
        for name, tensor in safetensors.torch.load_file(file).items():
            assert torch.equal(tensor, x[name])


def bytes_read(folder, axes):
    """What a rank reads of the tensors, and what it holds."""
    layout, count, read = layout_of(hf.config_of(folder), axes, fs.zero(0)), [], os.preadv

    def counting(*args):
        count.append(read(*args))
        return count[-1]

    os.preadv = counting
    try:
        params = hf.load(folder, layout)
    finally:
        os.preadv = read
    return sum(count), fs.debug.state_bytes(params)


@pytest.mark.parametrize("axes", [{"pp": 2}, {"ep": 2}], ids=str)
def test_a_rank_reads_what_it_holds_and_nothing_else(axes, theirs):
    folder, model, _ = theirs("mixtral")
    for read, held in run_ranks(bytes_read, 2, folder, axes):
        assert read == held < 0.8 * sum(x.nbytes for x in model.parameters())


# ----------------------------------------------------------------------------------------------------------------- codes
CODES = fs.formats.Blocks(fs.formats.E4M3, (5, 6))
CODED = fs.models.DecoderConfig(vocab_size=40, dim=16, layers=2, heads=4, kv_heads=2, intermediate_size=26)
CODED_LAYOUTS = {
    "zero3": ({"dp": 4}, fs.zero(3)), "zero1": ({"dp": 4}, fs.zero(1)), "dp_tp": ({"tp": 2, "dp": 2}, fs.zero(3)),
    "tp4": ({"tp": 4}, fs.zero(0)), "pp_tp": ({"pp": 2, "tp": 2}, fs.zero(3)), "hsdp": ({"replica": 2, "dp": 2}, fs.hybrid()),
}  # fmt: skip


def codes_in_and_out(names, folder, out):
    """Plain weights saved as codes in every layout; what each layout reads of the codes; a refusal."""
    found = {}
    warnings.filterwarnings("ignore", "fs.hf.save writes .* not multiples")  # in this rank, of blocks at edges
    for name in names:
        axes, strategy = CODED_LAYOUTS[name]
        layout = layout_of(CODED, axes, strategy)
        hf.save(f"{out}/{name}", hf.load(folder, layout), CODED, layout, format=CODES, max_file_bytes=4000)
        read = hf.load(f"{out}/{name}", layout)
        found[name] = {
            leaf.path: ([] if x.to_local().numel() == 0 else leaf.main.boxes(leaf.shape), x.to_local())
            for leaf, x in zip(layout.leaves, fs.tree.leaves(read), strict=True)
            if "pp" not in axes
        }
    layout = layout_of(CODED, {"dp": 4}, fs.zero(3))
    params = hf.load(folder, layout)
    if dist.get_rank() == 3:
        params["blocks"]["down"].to_local()[...] = torch.nan
    try:
        hf.save(f"{out}/nan", params, CODED, layout, format=CODES)
    except CheckpointError as error:
        return found, str(error).splitlines()[1]


@pytest.mark.parametrize(
    "names",
    [("dp_tp", "pp_tp"), pytest.param(("zero3", "zero1", "tp4", "hsdp"), marks=full)],
    ids=lambda x: "-".join(x),
)
@pytest.mark.filterwarnings("ignore:fs.hf.save writes .* not multiples")
def test_codes_are_those_of_whole_weights_in_every_layout(names, tmp_path):
    layout = layout_of(CODED, {"dp": 1}, fs.zero(3))
    state = fs.init_state(fs.models.decoder(CODED), fs.sgd(0.1), fs.random.key(0), layout)
    hf.save(tmp_path / "plain", state, CODED)
    hf.save(tmp_path / "one", state, CODED, format=CODES, max_file_bytes=4000)
    whole = fs.tree.named_leaves(fs.unshard(hf.load(tmp_path / "one", layout)))
    (tmp_path / "out").mkdir()
    for found, refused in run_ranks(codes_in_and_out, 4, names, tmp_path / "plain", tmp_path / "out"):
        for name, leaves in found.items():
            for path, (held, local) in leaves.items():
                parts = [whole[path][tuple(slice(a, b) for a, b in box)] for box in held]
                assert sum(x.numel() for x in parts) == local.numel(), (name, path)
                assert len(parts) != 1 or torch.equal(parts[0], local), (name, path)
        assert refused.startswith("  model.layers.0.mlp.down_proj.weight has inf or NaN in ")
    assert {*os.listdir(tmp_path / "out")} == {*names}
    for file in (tmp_path / "one").iterdir():
        for name in names:
            assert (tmp_path / "out" / name / file.name).read_bytes() == file.read_bytes(), (name, file.name)


def test_transformers_reads_the_same_numbers_out_of_codes(transformers, tmp_path):
    """By the operation with which it reads such a directory where there is no GPU; the rest of it wants accelerate."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    config = fs.models.DecoderConfig(vocab_size=40, dim=256, layers=1, heads=4, kv_heads=2, intermediate_size=384)
    layout = layout_of(config, {"dp": 1}, fs.zero(3))
    state = fs.init_state(fs.models.decoder(config), fs.sgd(0.1), fs.random.key(0), layout)
    hf.save(tmp_path / "out", state, config, format=fs.formats.E4M3_128x128)
    entries = json.loads((tmp_path / "out/config.json").read_text())
    loaded = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    known = transformers.FineGrainedFP8Config.from_dict(dict(loaded.quantization_config))
    assert known.weight_block_size in ([128, 128], (128, 128)) and known.activation_scheme == "dynamic"
    assert known.modules_to_not_convert == entries["quantization_config"]["modules_to_not_convert"]
    tensors, read = safetensors.torch.load_file(tmp_path / "out/model.safetensors"), Fp8Dequantize(None)
    ours = fs.foreign.open_weights(tmp_path / "out")
    coded = [name for name, x in tensors.items() if x.dtype == torch.float8_e4m3fn]
    assert len(coded) == 7
    for name in coded:
        pair = {"weight": tensors[name], "weight_scale_inv": tensors[f"{name}_scale_inv"]}
        ours.read(name, tuple((0, n) for n in tensors[name].shape), out := torch.empty(tensors[name].shape))
        assert torch.equal(read.convert(pair)["weight"], out), name


@pytest.mark.parametrize("rows", [64, 128, 200, 256, 576])
@pytest.mark.parametrize("columns", [64, 130, 256])
def test_a_warning_names_the_tensors_that_transformers_dequantizes_wrongly(transformers, tmp_path, rows, columns):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    layout = fs.plan_layout({"w": torch.zeros(rows, columns)}, fs.make_mesh(dp=1))
    params = fs.shard({"w": torch.randn(rows, columns) * torch.logspace(-3, 3, rows)[:, None]}, layout)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hf.save(
            tmp_path / "out",
            params,
            {"model_type": "mine"},
            layout,
            names={"w": "w.weight"},
            format=fs.formats.E4M3_128x128,
        )
    tensors = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    codes, scales = tensors["w.weight"], tensors["w.weight_scale_inv"]
    want = codes.float() * scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    assert torch.equal(
        fs.foreign.load_weights(tmp_path / "out", {"w": torch.zeros(rows, columns)}, {"w": "w.weight"})["w"], want
    )
    try:
        theirs = Fp8Dequantize(None).convert({"weight": codes, "weight_scale_inv": scales})["weight"]
    except ValueError:
        theirs = None
    assert [f"\n  w.weight is [{rows}, {columns}]\n" in str(told.message) for told in told] == (
        [] if theirs is not None and torch.equal(theirs, want) else [True]
    )


# -------------------------------------------------------------------------------------------------- modules of any kind
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
HEAD = ("model.norm", "lm_head")
MODULES = {
    "deepseek_v3": (
        "DeepseekV3", ("model.embed_tokens", "model.layers.0", "model.layers.*", HEAD),
        {**SIZES, **ENDS, "num_key_value_heads": 4, "num_hidden_layers": 3, "moe_intermediate_size": 8,
         "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
         "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
    ),
    "qwen3_moe": (
        "Qwen3Moe", ("model.embed_tokens", "model.layers.1", "model.layers.*", HEAD),
        {**SIZES, **MOE, **ENDS, "num_hidden_layers": 4, "moe_intermediate_size": 12, "head_dim": 8,
         "mlp_only_layers": [1]},
    ),
    "t5": (
        "T5", ("encoder.block.0", "encoder.block.*", "decoder.block.0", "decoder.block.*"),
        {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 3, "num_heads": 4,
         "decoder_start_token_id": 0, "dropout_rate": 0.0},
    ),
}  # fmt: skip


def made(kind, sizes):
    """A module whose buffers are not those that a new one has."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    made = "T5ForConditionalGeneration" if kind == "T5" else f"{kind}ForCausalLM"
    module = moved(getattr(transformers, made)(config)).eval()
    for _, buffer in module.named_buffers():
        if buffer.dtype == torch.float32 and buffer.shape == (8,):
            buffer.copy_(torch.arange(8.0))
    return module


def modules_out(kinds, folder):
    """Every module trained for a step, saved by its names, and read again in another layout."""
    found = {}
    for name in kinds:
        kind, units, sizes = MODULES[name]
        module, out = made(kind, sizes), f"{folder}/{name}"
        net = fs.functionalize(module, units)
        layout, opt = fs.plan_layout(net, fs.make_mesh(dp=2)), fs.sgd(0.1)
        more = {"decoder_input_ids": TOKENS[:, :5]} if kind == "T5" else {}

        def loss(params, batch, net=net, more=more):
            return net(params, batch, use_cache=False, **more).logits.square().sum(), 1

        state, _ = fs.make_train_step(loss, opt)(fs.init_state(net, opt, fs.random.key(0), layout), TOKENS)
        entries = module.config.to_dict() | {"architectures": [type(module).__name__]}
        hf.save(out, state, entries, names=net.files, dtype=torch.float64)
        there = fs.tree.map(lambda x: x.double(), fs.unshard(state.params))
        zero1 = layout.with_strategy(fs.zero(1))
        for read in (hf.load(out, zero1, net.files), fs.foreign.load_weights(out, zero1, net.sources, cast=True)):
            assert_bitwise_equal(fs.tree.map(lambda x: x.double(), fs.unshard(read)), there, name)
        with torch.no_grad():
            found[name] = net(fs.unshard(state.params), TOKENS, use_cache=False, **more).logits
            checkpoint.save(f"{out} saved", state)
            if dist.get_rank() == 0:
                fs.foreign.export(f"{out} saved", f"{out}.pt", "torch", net.sources)
    return found


def test_modules_of_any_kind_go_out_with_their_buffers_and_the_numbers_of_their_blocks(transformers, tmp_path):
    found, _ = run_ranks(modules_out, 2, [*MODULES], tmp_path)
    for name, (kind, _, sizes) in MODULES.items():
        module = made(kind, sizes)
        again = type(module).from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        more = {"decoder_input_ids": TOKENS[:, :5]} if kind == "T5" else {}
        exported = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        missing, others = module.load_state_dict(exported, strict=False)
        assert not others and {*missing} <= {
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "lm_head.weight",
        }
        for other in (again, module):
            with torch.no_grad():
                assert torch.equal(other(TOKENS, use_cache=False, **more).logits, found[name]), name


FUSED = {"*.qkv_proj.weight": ("heads", "embed"), "*.o_proj.weight": ("embed", "heads"),
         "*.gate_up_proj.weight": ("mlp", "embed"), "*.down_proj.weight": ("embed", "mlp"), "*": None}  # fmt: skip
FUSED_ROLES = {"*.qkv_proj": "column", "*.o_proj": "row", "*.gate_up_proj": "column", "*.down_proj": "row"}


def test_roles_that_modules_of_others_cannot_have_are_refused_with_the_layer(transformers):
    llama = fs.hf.families.FAMILIES["llama"]
    weights = {pattern: names for pattern, names in llama.names.items() if not pattern.endswith("bias")}
    roles = {pattern: role for pattern, role in llama.roles.items() if role != "inside"}
    tables = {"Olmo2": ({**weights, "*": None}, roles), "Phi3": (FUSED, FUSED_ROLES)}
    attn = "model.layers.0.self_attn"
    wanted = {
        "Olmo2": [
            f"{attn}.{x}_proj has role 'column', and a rank has {n // 2} of its {n} outputs: {attn}.{x}_norm (Olmo2RMSNorm) "
            "takes mean over all of them"
            for x, n in (("q", 16), ("k", 8))
        ],
        "Phi3": [
            f"{attn}.qkv_proj has role 'column', and a rank has 16 of its 32 outputs: Phi3Attention selects some by index",
            "model.layers.0.mlp.gate_up_proj has role 'column', and a rank has 24 of its 48 outputs: Phi3MLP selects some by "
            "index",
        ],
    }
    for kind, (names, roles) in tables.items():
        config = getattr(transformers, f"{kind}Config")(**SIZES, **ENDS, pad_token_id=0)
        module = transformers.AutoModelForCausalLM.from_config(config)
        units = ("model.embed_tokens", "model.layers.*", HEAD)
        net = fs.functionalize(module, units, names=names, roles=roles)
        with pytest.raises(ConfigError) as caught:
            fs.plan_layout(net, fs.AbstractMesh(("tp",), (2,)))
        assert [row.strip() for row in str(caught.value).splitlines()[1:-1]] == wanted[kind]


def test_files_with_other_buffers_than_the_module_are_refused(transformers, tmp_path):
    kind, units, sizes = MODULES["deepseek_v3"]
    net = fs.functionalize(made(kind, sizes), units)
    layout = fs.plan_layout(net, fs.make_mesh(dp=1))
    hf.save(tmp_path / "out", fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout), {}, names=net.files)
    module = made(kind, sizes)
    (gate,) = (m for name, m in module.named_modules() if name == "model.layers.1.mlp.gate")
    gate.e_score_correction_bias.zero_()
    new = fs.functionalize(module, units)
    row = "model.layers.1.mlp.gate.e_score_correction_bias is float32[8], but a buffer of the module, float32[8], "
    for load in (hf.load, fs.foreign.load_weights):
        for extra in ("refuse", "ignore"):
            with pytest.raises(CheckpointError) as caught:
                load(tmp_path / "out", layout, new.files if load is hf.load else new.sources, extra=extra)
            _, *rows, mend = str(caught.value).splitlines()
            assert rows == [f"  {row}with different values"], load
            assert "; load the buffers into the module before fs.functionalize, with its load_state_dict" in mend


# --------------------------------------------------------------------------------------------------------------- memory
BIG = fs.models.DecoderConfig(
    vocab_size=8192, dim=1024, layers=4, heads=8, kv_heads=8, intermediate_size=3072, tied=True
)


def peak(folder, out):
    """Bytes of the shard, and how far loading and saving went above what was there before."""
    layout = fs.plan_layout(fs.models.decoder(BIG), fs.make_mesh(device="cpu", dp=2))
    params, loading = risen(functools.partial(hf.load, folder, layout))
    _, saving = risen(functools.partial(hf.save, out, params, BIG))
    return layout.memory().params, loading, saving


def risen(run):
    """What a function returns, and the most bytes that it had allocated at once."""
    results = []
    _, most = allocated(lambda: results.append(run()))
    return results[0], most


def test_a_rank_holds_its_shard_and_a_window(tmp_path):
    """Of 240 MB of weights; the files are holes, which read as zeros."""
    names = hf.names_of(BIG)
    shapes = {
        leaf.path: leaf.shape for leaf in fs.plan_layout(fs.models.decoder(BIG), fs.AbstractMesh(("dp",), (1,))).leaves
    }
    pieces = [piece for path, name in names.items() for piece in hf.naming.pieces_of(name, shapes[path])]
    (tmp_path / "model").mkdir()
    for file in tensor_files({piece.name: LeafType(piece.shape, torch.float32) for piece in pieces}, 100 << 20):
        with (tmp_path / "model" / file.name).open("xb") as stream:
            stream.write(file.header)
            stream.truncate(file.size)
        table = dict.fromkeys(file.offsets, file.name)
        index = tmp_path / "model/model.safetensors.index.json"
        old = json.loads(index.read_text())["weight_map"] if index.exists() else {}
        index.write_text(json.dumps({"weight_map": old | table}))
    (tmp_path / "model/config.json").write_text(json.dumps(hf.config_json(BIG)))
    for shard, loading, saving in run_ranks(peak, 2, tmp_path / "model", tmp_path / "out"):
        assert shard > 100 << 20
        assert shard <= loading < shard + (64 << 20), (shard, loading)
        assert 0 < saving < 64 << 20


# -------------------------------------------------------------------------------------------------------------- refusals
def load_at(folder):
    return hf.load(folder, layout_of(hf.config_of(folder.parent / "model"), {"dp": 2}, fs.zero(3))) and None


def test_every_rank_refuses_what_does_not_fit(theirs, tmp_path):
    folder, _, _ = theirs("llama")
    (tmp_path / "model").mkdir()
    for name in os.listdir(folder):
        (tmp_path / "model" / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "torn").symlink_to(tmp_path / "model")
    first, second = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))[:2]
    os.truncate(tmp_path / "model" / first, 100)
    (tmp_path / "model" / second).unlink()
    with pytest.raises(RankError) as caught:
        run_ranks(load_at, 2, tmp_path / "torn")
    refusals = [caught.value.exceptions[r] for r in range(2)]
    assert all(isinstance(e, CheckpointError) for e in refusals) and str(refusals[0]) == str(refusals[1])
    assert str(refusals[0]).splitlines()[1:-1] == [
        f"  {first}: it is cut off: its header has {json_bytes(folder / first):,} bytes, the file 100",
        f"  {second}: is missing",
    ]


def json_bytes(file):
    return int.from_bytes(file.read_bytes()[:8], "little")


def over_one_rank(folder, out):
    """In and out on rank 1 alone; rank 0 takes part in the calls."""
    config = hf.config_of(folder)
    # The slice of a pipeline's mesh that has its last stage is equal to a mesh over rank 1, and must not be taken for it.
    fs.tree.map(lambda x: sharding_of(x).device_mesh(), hf.load(folder, layout_of(config, {"pp": 2}, fs.zero(3))))
    layout = fs.plan_layout(fs.models.decoder(config), fs.make_mesh(device="cpu", dp=1, ranks=(1,)))
    params = hf.load(folder, layout)
    hf.save(out, params, config)
    return fs.debug.state_bytes(params)


def test_ranks_outside_of_the_mesh_hold_nothing(theirs, tmp_path):
    folder, model, _ = theirs("llama")
    held = sum(x.nbytes for x in model.parameters())
    assert run_ranks(over_one_rank, 2, folder, tmp_path / "out") == [0, held]
    found = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert_bitwise_equal(found, {**model.state_dict()})


def save_on_a_part(member, out):
    """Plain leaves that each rank fills with its number, beside leaves on the mesh of one rank."""
    net = fs.functionalize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), ("0",))
    layout = fs.plan_layout(net, fs.make_mesh(device="cpu", dp=1, ranks=(member,)))
    buffers = fs.tree.map(lambda x: torch.full_like(x, dist.get_rank()), dict(net.init_buffers()))
    state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout, buffers=buffers)
    hf.save(f"{out}/state", state, {}, names=net.files)
    params = {"w": state.params["0"]["weight"], "scales": torch.full((4,), float(dist.get_rank()))}
    hf.save(f"{out}/tree", params, {}, names={"w": "w", "scales": "scales"})
    params = {"w": torch.full((2, 2), float(dist.get_rank())), "v": torch.full((2,), float(dist.get_rank()))}
    hf.save(f"{out}/plain", params, {}, layout, names={"w": "w", "v": "v"})


@pytest.mark.parametrize("member", range(3))
def test_ranks_outside_of_the_mesh_write_no_plain_leaves(member, tmp_path):
    run_ranks(save_on_a_part, 3, member, tmp_path)
    for name, leaves in {"state": ("1.running_mean", "1.running_var"), "tree": ("scales",), "plain": "wv"}.items():
        found = safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        assert all((found[leaf] == member).all() for leaf in leaves), (name, found)


def save_on_a_full_disk(out):
    config = fs.models.DecoderConfig(vocab_size=8, dim=8, layers=1, heads=2, kv_heads=2, intermediate_size=8)
    layout = layout_of(config, {"dp": 2}, fs.zero(3))
    state = fs.init_state(fs.models.decoder(config), fs.sgd(0.1), fs.random.key(0), layout)
    put = os.pwrite
    try:
        if dist.get_rank() == 1:
            os.pwrite = lambda *_: os.write(-1, b"")
        hf.save(out, state, config)
    except CheckpointError as error:
        return str(error)
    finally:
        os.pwrite = put


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path):
    found = run_ranks(save_on_a_full_disk, 2, tmp_path / "out")
    path = tmp_path / "out"
    text = f"fs.hf.save failed on 1 of 2 ranks.\n  rank 1: OSError: [Errno 9] Bad file descriptor: '{path}'"
    assert found == [text, text] and os.listdir(tmp_path) == []
