"""Hugging Face directories on one process: configs, names and pieces, reading, writing, and what is refused."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch

import fsharding as fs
from fsharding import ops
from fsharding.base.errors import CheckpointError, ConfigError
from fsharding.checkpoint import byte_ranges
from fsharding.interop import hf
from fsharding.interop.hf.config_tables import FAMILIES
from fsharding.interop.hf.naming import pieces_by_leaf
from fsharding.models import MLA, DecoderConfig, Experts, Stack
from fsharding.testing import assert_bitwise_equal
from tests.helpers import refusal

SIZES = {"vocab_size": 10, "dim": 8, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 12, "eps": 1e-6}
CONFIGS = {
    "llama": DecoderConfig(**SIZES, rope_scaling=ops.LlamaScaling(length=32)),
    "tied": DecoderConfig(**SIZES, tied=True, head_size=6),
    "qwen2": DecoderConfig(**SIZES, bias=True, rope_base=1e6, rope_scaling=ops.YarnScaling(4.0, 32)),
    "qwen3": DecoderConfig(**SIZES, qk_norm=True, head_size=6),
    "mixtral": DecoderConfig(**SIZES, experts=Experts(4, 2, 12, balance=0.02)),
    "qwen3_moe": DecoderConfig(**SIZES, qk_norm=True, experts=Experts(3, 2, 6, normalize=False)),
}


def layout_of(config, **how):
    return fs.plan_layout(fs.models.decoder(config), fs.make_mesh(dp=1), **how)


def params_of(layout, seed=0):
    """Random parameters in a layout."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(leaf.shape, generator=generator) for leaf in layout.leaves]
    return fs.shard(fs.tree.unflatten(layout.structure, values), layout)


def in_files(folder):
    """All tensors of a directory, as the package of the format reads them."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in safetensors.torch.load_file(file).items()}


# ------------------------------------------------------------------------------------------------------------- configs
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192}, "vocab_size": 128256,
}  # fmt: skip
QWEN_72B = {
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 29568,
    "max_window_layers": 70, "model_type": "qwen2", "num_attention_heads": 64, "num_hidden_layers": 80,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": 131072,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
MIXTRAL = {
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "model_type": "mixtral",
    "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip


def test_published_configs_are_the_recipes():
    assert hf.config_of(LLAMA_8B) == fs.models.presets.llama3_8b().config
    assert hf.config_of(QWEN_72B) == fs.models.presets.qwen2_5_72b().config
    wanted = fs.models.presets.mixtral_8x7b().config
    experts = Experts(8, 2, 14336)
    assert hf.config_of(MIXTRAL) == dataclasses.replace(wanted, experts=experts)
    balanced = hf.config_of({**MIXTRAL, "output_router_logits": True}).experts
    assert balanced == dataclasses.replace(experts, balance=0.02)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_comes_back(name):
    entries = hf.config_json(CONFIGS[name], eos_token_id=7)
    assert entries["model_type"] == {"tied": "llama"}.get(name, name) and entries["eos_token_id"] == 7
    assert entries["architectures"] == [FAMILIES[entries["model_type"]].architecture]
    assert hf.config_of(json.loads(json.dumps(entries))) == CONFIGS[name]


@pytest.mark.parametrize("name", ["llama3_405b", "mixtral_8x7b", "qwen2_5_72b", "tiny_mixtral", "tiny_qwen2_5"])
def test_a_recipe_goes_out_and_its_config_comes_back(name):
    recipe = getattr(fs.models.presets, name)()
    assert hf.config_of(hf.config_json(recipe)) == recipe.config
    assert hf.names_of(recipe) == hf.names_of(recipe.config)


def test_what_is_no_config_is_refused():
    assert refusal(hf.config_json, LLAMA_8B, kind=ConfigError) == (
        "fs.hf.config_json needs the config of a decoder; got dict.\n"
        "Pass a DecoderConfig, or a recipe such as fs.models.presets.llama3_8b()."
    )


def test_configs_that_the_decoder_cannot_be(tmp_path):
    assert refusal(hf.config_of, {"model_type": "gpt2"}, kind=ConfigError) == (
        "fs.hf.config_of does not support this family.\n"
        "  model_type is 'gpt2': it has learned positions, LayerNorm with biases, and GELU instead of SwiGLU\n"
        "Families are llama, mistral, qwen2, qwen3, mixtral, qwen3_moe. Use a different model, or load its weights into your "
        "own tree: fs.hf.load(path, layout, names)."
    )
    odd = {
        **LLAMA_8B, "hidden_act": "gelu", "attention_bias": True, "mlp_bias": True, "vocab_size": "many",
        "hidden_size": 0, "rope_scaling": {"type": "longrope"}, "quantization_config": {"bits": 4},
    }  # fmt: skip
    assert refusal(hf.config_of, odd, kind=ConfigError).splitlines()[:-1] == [
        "fs.hf.config_of cannot make a decoder of this llama.",
        "  vocab_size is 'many': an integer above 0",
        "  hidden_size is 0: an integer above 0",
        "  hidden_act is 'gelu': models.decoder does not support it",
        "  attention_bias is True: models.decoder does not support it",
        "  mlp_bias is True: models.decoder does not support it",
        "  quantization_config has quant_method None: supported is quant_method 'fp8' with weight_block_size [rows, "
        "columns], fmt 'e4m3' or 'e5m2' and activation_scheme 'dynamic'",
        "  rope_type is 'longrope': types are default, llama3, yarn",
    ]
    windows = {**QWEN_72B, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 80}
    assert "  sliding_window is 131072: models" in refusal(hf.config_of, windows, kind=ConfigError)
    assert "  layer_types is ['sliding" in refusal(hf.config_of, windows, kind=ConfigError)
    assert "  sliding_window is 4096" in refusal(hf.config_of, {**MIXTRAL, "sliding_window": 4096}, kind=ConfigError)
    sparse = hf.config_json(CONFIGS["qwen3_moe"], num_experts=None, mlp_only_layers=[0], decoder_sparse_step=2)
    assert refusal(hf.config_of, sparse, kind=ConfigError).splitlines()[1:-1] == [
        "  num_experts is None: an integer above 0",
        "  mlp_only_layers is [0]: models.decoder does not support it",
        "  decoder_sparse_step is 2: models.decoder does not support it",
    ]
    half = {**LLAMA_8B, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "attention_factor": 2.0}}
    assert refusal(hf.config_of, half, kind=ConfigError).splitlines()[1:-1] == [
        "  original_max_position_embeddings of the rotary positions is None: a number",
        "  low_freq_factor of the rotary positions is None: a number",
        "  high_freq_factor of the rotary positions is None: a number",
        "  attention_factor of the rotary positions is 2.0: models.decoder does not support it",
    ]
    by_kind = {**QWEN_72B, "rope_parameters": {"full_attention": {"rope_theta": 1e4}, "other": {"rope_theta": 1e5}}}
    assert refusal(hf.config_of, by_kind, kind=ConfigError).splitlines()[1:-1] == [
        "  the rotary positions differ between full_attention, other: models.decoder does not support it"
    ]
    assert "No such file or directory" in refusal(hf.config_of, tmp_path / "nowhere", kind=ConfigError)
    (tmp_path / "config.json").write_text("[1]")
    assert "it contains a list, not an object" in refusal(hf.config_of, tmp_path, kind=ConfigError)


def test_a_mistral_without_a_window_is_a_decoder_and_stays_a_mistral():
    entries = {**LLAMA_8B, "model_type": "mistral", "rope_scaling": None, "sliding_window": None}
    config = hf.config_of(entries)
    assert config == hf.config_of({**entries, "model_type": "llama"})
    written = hf.config_json(config)
    assert (written["model_type"], written["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert written["sliding_window"] is None and hf.config_of(written) == config
    # What transformers takes where the file says nothing.
    assert hf.config_of({k: v for k, v in entries.items() if k != "num_key_value_heads"}).kv_heads == 8
    for window in ({}, {"sliding_window": 4096}):
        text = refusal(hf.config_of, {k: v for k, v in entries.items() if k != "sliding_window"} | window)
        assert "  sliding_window is 4096: models.decoder does not support it" in text


def test_decoders_that_no_family_is():
    latent = MLA(4, 8, 8, 6, 4, 8)
    stacks = (Stack("a", 1), Stack("b", 1))
    experts = Experts(4, 2, 8, shared=1, normalize=False, scale=2.0)
    odd = DecoderConfig(**SIZES, attention=latent, stacks=stacks, experts=experts, bias=True)
    assert refusal(hf.config_json, odd, kind=ConfigError) == (
        "fs.hf.config_json finds no family that computes the same as this decoder.\n"
        "  it has stacks of unlike blocks\n"
        "  its attention is MLA\n"
        "  its experts have shared=1\n"
        "  its experts have scale=2.0\n"
        "  weights of its experts are not normalized, which only qwen3_moe supports, with qk_norm\n"
        "  no family has bias=True and qk_norm=False with experts\n"
        "Families are llama, mistral, qwen2, qwen3, mixtral, qwen3_moe; for a different one pass the entries of its config.json."
    )


# -------------------------------------------------------------------------------------------------------- out and in
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_come_back(name, tmp_path, monkeypatch):
    """In files of some tensors each, through windows of a few elements."""
    layout = layout_of(CONFIGS[name])
    params = params_of(layout)
    monkeypatch.setattr(byte_ranges, "WINDOW_BYTES", 100)
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/model.safetensors").touch()  # what a save that was killed has left
    saved = hf.save(tmp_path / "out", params, CONFIGS[name], max_file_bytes=1200)
    assert len(saved.files) > 3 and saved.tensors == len(in_files(tmp_path / "out"))
    assert all(size == (tmp_path / "out" / file).stat().st_size for file, size in saved.files.items())
    assert hf.config_of(tmp_path / "out") == CONFIGS[name]
    assert_bitwise_equal(hf.load(tmp_path / "out", layout), params)
    hf.save(tmp_path / "plain", fs.unshard(params), CONFIGS[name])
    assert_bitwise_equal(in_files(tmp_path / "plain"), in_files(tmp_path / "out"))
    assert sorted(os.listdir(tmp_path)) == ["out", "plain"]
    # A decoder whose leaves are fused has the same files.
    other = dataclasses.replace(CONFIGS[name], fused=True)
    fused = hf.load(tmp_path / "out", layout_of(other), hf.names_of(other))
    assert ("gate_up" in fused["blocks"]) == (other.experts is None) and "wqkv" in fused["blocks"]
    hf.save(tmp_path / "fused", fused, other, layout=layout_of(other))
    assert_bitwise_equal(in_files(tmp_path / "fused"), in_files(tmp_path / "out"))
    # Each tensor against our leaf, taken apart by hand.
    found, whole = in_files(tmp_path / "out"), fs.unshard(params)
    blocks, layer = whole["blocks"], "model.layers.1."
    assert torch.equal(found["model.embed_tokens.weight"], whole["embed"]["table"])
    assert ("lm_head.weight" in found) != (name == "tied")
    assert torch.equal(found[f"{layer}self_attn.k_proj.weight"], blocks["wk"][1])
    assert torch.equal(found[f"{layer}self_attn.o_proj.weight"], blocks["wo"][1].T)
    if name == "mixtral":
        assert torch.equal(found[f"{layer}block_sparse_moe.experts.3.w2.weight"], blocks["experts"]["down"][1, 3].T)
        assert torch.equal(found[f"{layer}block_sparse_moe.experts.3.w3.weight"], blocks["experts"]["up"][1, 3])


def test_a_state_is_saved_in_its_main_parameters_or_another_dtype(tmp_path):
    config = CONFIGS["qwen2"]
    layout = layout_of(config, precision=fs.BF16, strategy=fs.zero(1), frozen="embed")
    state = fs.state_from_params(params_of(layout), fs.adamw(1e-3), fs.random.key(0), layout)
    assert state.main is not None and state.params["blocks"]["wq"].dtype == torch.bfloat16
    hf.save(tmp_path / "main", state, config)
    assert_bitwise_equal(hf.load(tmp_path / "main", layout), params_of(layout))
    assert json.loads((tmp_path / "main/config.json").read_text())["dtype"] == "float32"
    given = hf.config_json(config) | {"torch_dtype": "float32", "bos_token_id": 3}
    hf.save(tmp_path / "half", state, given, dtype=torch.bfloat16)
    assert {x.dtype for x in in_files(tmp_path / "half").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half/config.json").read_text()) == {
        **hf.config_json(config),
        "dtype": "bfloat16",
        "bos_token_id": 3,
    }
    rounded = fs.tree.map(lambda x: x.full_tensor().bfloat16().float(), params_of(layout))
    assert_bitwise_equal(fs.unshard(hf.load(tmp_path / "half", layout)), rounded)


FUSED = {
    "table": fs.random.zeros((10, 8)),
    "blocks": {
        "wqkv": fs.random.zeros((2, 8, 12)),
        "gate": fs.random.zeros((2, 6, 8)),
        "up": fs.random.zeros((2, 6, 8)),
    },
}
FUSED_DIMS = {
    "table": ("vocab", "embed"),
    "blocks": {
        "wqkv": ("layers", "embed", fs.Fused("heads", (6, 4, 2))),
        **dict.fromkeys(("gate", "up"), ("layers", "mlp", "embed")),
    },
}
FUSED_NAMES = {
    "table": hf.Transposed("e"),
    "blocks.wqkv": hf.Joined(tuple(hf.Transposed(f"{{i}}.{x}") for x in "qkv")),
    "blocks.gate": hf.Section("{i}.gate_up", 0, (6, 6)),
    "blocks.up": hf.Section("{i}.gate_up", 1, (6, 6)),
}  # fmt: skip


def test_fused_leaves_are_taken_apart_and_put_together(tmp_path):
    layout = fs.plan_layout(FUSED, fs.make_mesh(dp=1), names=FUSED_DIMS)
    params = params_of(layout)
    hf.save(tmp_path / "out", params, LLAMA_8B, layout, names=FUSED_NAMES)
    found, whole = in_files(tmp_path / "out"), fs.unshard(params)
    assert {name: [*x.shape] for name, x in found.items() if not name.startswith("1")} == {
        "e": [8, 10], "0.q": [6, 8], "0.k": [4, 8], "0.v": [2, 8], "0.gate_up": [12, 8],
    }  # fmt: skip
    assert torch.equal(torch.cat([found[f"1.{x}"] for x in "qkv"]).T, whole["blocks"]["wqkv"][1])
    assert torch.equal(found["1.gate_up"], torch.cat((whole["blocks"]["gate"][1], whole["blocks"]["up"][1])))
    assert_bitwise_equal(hf.load(tmp_path / "out", layout, FUSED_NAMES), params)


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.fixture
def saved(tmp_path):
    """A directory of several files, and its layout."""
    layout = layout_of(CONFIGS["llama"])
    hf.save(tmp_path / "model", params_of(layout), CONFIGS["llama"], max_file_bytes=1200)
    return tmp_path / "model", layout


def rewrite(folder, change):
    """The directory with changed tensors, in one file."""
    tensors = in_files(folder)
    for file in folder.glob("model*"):
        file.unlink()
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def test_tensors_that_are_not_as_they_should_be(saved):
    folder, layout = saved

    def change(tensors):
        del tensors["lm_head.weight"], tensors["model.layers.1.self_attn.q_proj.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(8, 12)
        tensors["model.layers.0.input_layernorm.weight"] = torch.ones(8, dtype=torch.int8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(1)  # what old versions have stored
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(8)

    rewrite(folder, change)
    assert refusal(hf.load, folder, layout, kind=CheckpointError) == (
        f"fs.hf.load cannot use {folder}: its tensors differ from the layout's in 5 places.\n"
        "  blocks.norm1: model.layers.0.input_layernorm.weight is int8[8], wanted is float32[8]\n"
        "  blocks.up: model.layers.0.mlp.up_proj.weight is float32[8, 12], wanted is float32[12, 8]\n"
        "  blocks.wq: model.layers.1.self_attn.q_proj.weight is missing; wanted is float32[8, 8]\n"
        "  head.unembed: lm_head.weight is missing; wanted is float32[10, 8]\n"
        "  model.layers.0.self_attn.q_proj.bias is extra: float32[8]\n"
        "Plan the layout with models.decoder(fs.hf.config_of(path)), or pass names={ours: theirs}; extra='ignore' skips "
        "the rest."
    )
    other = layout_of(CONFIGS["qwen2"])
    other = dataclasses.replace(other, config=None)
    rows = refusal(hf.load, folder, other, extra="ignore", kind=CheckpointError).splitlines()
    assert "  blocks.q_bias has no name" in rows and not any(" is extra: " in row for row in rows)


def test_a_config_that_is_not_the_layouts_is_refused_with_every_field(tmp_path):
    config = CONFIGS["llama"]
    layout, folder = layout_of(config), tmp_path / "model"
    hf.save(folder, params_of(layout), config, layout)
    entries = json.loads((folder / "config.json").read_text())
    other = {
        **entries, "num_attention_heads": 2, "head_dim": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_scaling": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(other))
    rows = [
        "  num_attention_heads is 2 in config.json, and 4 in the layout's model",
        "  rope_theta is 500.0 in config.json, and 10000.0 in the layout's model",
        "  rms_norm_eps is 1e-05 in config.json, and 1e-06 in the layout's model",
        "  head_dim is 4 in config.json, and 2 in the layout's model",
        f"  rope_scaling is None in config.json, and {config.rope_scaling} in the layout's model",
    ]
    head, *found, mend = refusal(hf.load, folder, layout, kind=CheckpointError).splitlines()
    assert head == (
        f"fs.hf.load cannot use {folder}: its config.json and the model of the layout compute different things."
    )
    assert found == rows
    assert mend == "Plan the layout with the model of the directory, such as models.decoder(fs.hf.config_of(path))."
    head, *found, mend = refusal(hf.save, tmp_path / "out", params_of(layout), other, layout).splitlines()
    assert head == (
        f"fs.hf.save cannot write {tmp_path / 'out'}: the config and the model of the layout compute different things."
    )
    assert found == rows and mend == "Pass the config that the layout's model was made of."
    # Choices of training, how leaves are stored, and the size of a dense part that no block has are not the model's.
    routed = layout_of(dataclasses.replace(CONFIGS["mixtral"], intermediate_size=99, experts=Experts(4, 2, 12)))
    hf.save(tmp_path / "routed", params_of(routed), CONFIGS["mixtral"], routed)


def test_what_computes_nothing_is_written_as_it_was_read(tmp_path):
    config = CONFIGS["qwen2"]
    folder, layout = tmp_path / "model", layout_of(config)
    kept = {"max_position_embeddings": 777, "bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6}
    hf.save(folder, params_of(layout), hf.config_json(config, **kept, unsloth_version="ours"))
    generation = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [4, 5]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    read = hf.config_of(folder)
    assert read == config and hash(read) == hash(config)
    state = fs.state_from_params(params_of(layout), fs.sgd(0.1), fs.random.key(0), layout_of(read))
    for number, given in enumerate([read, {**hf.config_json(read)}]):
        out = hf.save(tmp_path / f"out{number}", state, given).path
        entries = json.loads((out / "config.json").read_text())
        assert entries == {**hf.config_json(config), **kept, "dtype": "float32"}
        assert json.loads((out / "generation_config.json").read_text()) == generation
    # Another scaling of positions has another length.
    longer = dataclasses.replace(read, rope_scaling=ops.YarnScaling(8.0, 32))
    assert hf.config_json(longer)["max_position_embeddings"] == 256 and hf.config_json(longer)["bos_token_id"] == 3
    assert "bos_token_id" not in hf.config_json(dataclasses.replace(read, bias=False))  # of another family
    (folder / "generation_config.json").write_text("[1]")
    assert refusal(hf.config_of, folder, kind=ConfigError) == (
        f"fs.hf.config_of cannot read {folder / 'generation_config.json'}.\n  it contains a list, not an object\n"
        "Get the file again, or remove it: the model computes the same without it."
    )


def test_a_tied_model_may_have_its_head_twice(tmp_path):
    layout = layout_of(CONFIGS["tied"])
    hf.save(tmp_path / "model", params_of(layout), CONFIGS["tied"])
    rewrite(
        tmp_path / "model", lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 0})
    )
    assert_bitwise_equal(hf.load(tmp_path / "model", layout), params_of(layout))
    # As transformers does, its one table may be there as the head alone.
    rewrite(tmp_path / "model", lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert_bitwise_equal(hf.load(tmp_path / "model", layout), params_of(layout))


def test_files_that_cannot_be_read(saved, tmp_path):
    folder, layout = saved
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    os.truncate(folder / names[0], (folder / names[0]).stat().st_size - 1)
    (folder / names[1]).unlink()
    (folder / names[2]).write_bytes(b"nonsense, all of it")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= {"ghost": names[3], "far": "../far.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    rows = refusal(hf.load, folder, layout, kind=CheckpointError).splitlines()
    assert rows[0] == f"fs.hf.load cannot read {folder}." and rows[1] == "  ../far.safetensors: isn't a plain file name"
    assert rows[2].startswith(f"  {names[0]}: ") and " ends at byte " in rows[2]
    assert rows[3:-1] == [
        f"  {names[1]}: is missing",
        f"  {names[2]}: its first bytes match no supported format",
        f"  ghost is not in {names[3]}, unlike the index",
    ]
    assert "  there is no such directory" in refusal(hf.load, tmp_path / "nowhere", layout, kind=CheckpointError)
    assert "it has 0 .safetensors files and no model.safetensors.index.json" in refusal(
        hf.load, tmp_path, layout, kind=CheckpointError
    )
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("{}")
    text = refusal(hf.load, folder, layout, kind=CheckpointError)
    assert "model.safetensors.index.json: it has no table weight_map" in text and "\n  model_type is None\n" in text


def test_an_unknown_family_is_refused_before_anything_is_read(saved):
    folder, layout = saved
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    text = refusal(hf.load, folder, layout, kind=CheckpointError)
    assert text == refusal(hf.config_of, folder, kind=ConfigError)
    assert_bitwise_equal(hf.load(folder, layout, hf.names_of(CONFIGS["llama"])), params_of(layout))


def test_what_cannot_be_saved(saved, tmp_path):
    folder, layout = saved
    params = params_of(layout)
    assert refusal(hf.save, folder, params, CONFIGS["qwen3"], kind=CheckpointError) == (
        f"fs.hf.save cannot write {folder}.\n"
        f"  {folder}: the path exists, and is never overwritten\n"
        "  blocks.wk is [2, 4, 8], and [2, 12, 8] in the model\n"
        "  blocks.wo is [2, 8, 8], and [2, 24, 8] in the model\n"
        "  blocks.wq is [2, 8, 8], and [2, 24, 8] in the model\n"
        "  blocks.wv is [2, 4, 8], and [2, 12, 8] in the model\n"
        "  blocks.q_norm matches no leaf; its name is 'model.layers.{i}.self_attn.q_norm.weight'\n"
        "  blocks.k_norm matches no leaf; its name is 'model.layers.{i}.self_attn.k_norm.weight'\n"
        "Pass the tree of models.decoder(config), or the tensors of each leaf: names={ours: theirs}."
    )
    fused = fs.plan_layout(FUSED, fs.make_mesh(dp=1), names=FUSED_DIMS)
    names = {
        **FUSED_NAMES,
        "blocks.up": hf.Section("{i}.gate_up", 0, (6, 6)),
        "blocks.gate": "{j}",
        "table": hf.Joined(("a", "b")),
    }
    rows = refusal(
        hf.save, tmp_path / "x", params_of(fused), LLAMA_8B, fused, names=names, kind=CheckpointError
    ).splitlines()
    assert rows[1:-1] == [
        "  blocks.gate: '{j}': use {i}, {j}, {k} in this order, at most one per dim",
        "  table: Joined has 2 names, and the layout none: name a dim fs.Fused(...)",
        "  0.gate_up has 96 elements; its leaves have 48, or overlap",
        "  1.gate_up has 96 elements; its leaves have 48, or overlap",
    ]
    wrong = {**FUSED_NAMES, "blocks.up": hf.Section("{i}.gate_up", 1, (6, 7))}
    assert "  blocks.up: '{i}.gate_up': part 1 has 7 along dim -2, ours 6" in refusal(
        hf.load, folder, fused, wrong, kind=CheckpointError
    )
    assert sorted(os.listdir(tmp_path)) == ["model"]


def test_a_leaf_without_pieces_has_a_row():
    names = {"w": "layers.{i}.w", "many": "layers.{i}.{j}", "gone": "gone", "odd": "{j}"}
    found, rows = pieces_by_leaf(names, {"w": (3, 2), "many": (2, 2), "odd": (2,), "bare": (1,)}, None, most=2)
    assert [(piece.name, piece.shape, piece.box) for piece in found["w"]] == [
        (f"layers.{i}.w", (2,), ((i, i + 1), (0, 2))) for i in range(3)
    ]
    assert rows == [
        "gone matches no leaf; its name is 'gone'",
        "many has more tensors than the 2 of the files",
        "odd: '{j}': use {i}, {j}, {k} in this order, at most one per dim",
        "bare has no name",
    ]


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    layout = layout_of(CONFIGS["llama"])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    text = refusal(hf.save, tmp_path / "out", params_of(layout), CONFIGS["llama"], kind=CheckpointError)
    assert text == f"fs.hf.save failed.\n  OSError: [Errno 28] No space left on device: '{tmp_path / 'out'}'"
    assert os.listdir(tmp_path) == []


def test_the_changelog_names_the_families_that_there_are():
    text = (Path(__file__).resolve().parents[3] / "CHANGELOG.md").read_text(encoding="utf-8")
    (names,) = re.findall(
        r"families of Hugging Face, read and written: ([\w, ]+) as modules, and all but (?:[\w, ]+) as decoders", text
    )
    assert set(re.split(r", | and ", names)) == set(fs.hf.families.FAMILIES)
    (rest,) = re.findall(r"as modules, and all but ([\w, ]+) as decoders", text)
    assert set(re.split(r", | and ", rest)) == set(fs.hf.families.FAMILIES) - set(FAMILIES)
