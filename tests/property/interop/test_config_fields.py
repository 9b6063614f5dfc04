"""Fields of a `config.json`, each changed alone: what transformers then computes otherwise, `hf.load` and `hf.save` refuse.

The oracle is transformers: it reads the changed file and the same weights, and its logits are those of before or not.
"""

import copy
import functools
import json
import shutil

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fsharding as fs
from fsharding.base.errors import CheckpointError
from fsharding.interop import hf
from tests.helpers import examples, slow
from tests.hf_configs import LONG, SIZES, YARN

DECODERS = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LONG, "max_position_embeddings": 128}),
    "qwen2": ("Qwen2", {"rope_parameters": YARN, "max_position_embeddings": 64}),
    "qwen3": ("Qwen3", {"head_dim": 6}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_experts_per_tok": 2, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8}),
}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
MODULES = {
    **DECODERS,
    "gpt2": ("GPT2", GPT2),
    "phi": ("Phi", SIZES),
    "phi3": ("Phi3", {"pad_token_id": 0, "sliding_window": None}),
    "gemma3": ("Gemma3Text", {"head_dim": 4, "sliding_window": 8}),
    "deepseek_v3": (
        "DeepseekV3",
        {"num_key_value_heads": 4, "moe_intermediate_size": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
         "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
         "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
    ),
}  # fmt: skip
TOKENS = torch.randint(40, (2, 24), generator=torch.Generator().manual_seed(1))
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MANY = examples(30, 500)


@functools.cache
def made(kind, sizes):
    """A model of transformers whose norms and biases matter."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**json.loads(sizes))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.2 * torch.randn(x.shape))
    return model


def model_of(name):
    kind, sizes = MODULES[name]
    return made(kind, json.dumps(sizes if name == "gpt2" else {**SIZES, **ENDS, **sizes}))


@functools.cache
def pure(name):
    units = {"deepseek_v3": "model.layers.1", "gpt2": "transformer.h.*"}
    return fs.functionalize(model_of(name), units.get(name, "model.layers.*"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of a family: the directory that transformers saved, or `hf.save` for families without a table of names."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp(name) / "model"
        if name in DECODERS:
            model_of(name).save_pretrained(folder)
            return folder
        net = pure(name)
        state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(net, fs.make_mesh(dp=1)))
        return hf.save(folder, state, {**model_of(name).config.to_dict()}, names=net.files).path

    return make


def others(value):
    """Other values of a field of this kind."""
    if isinstance(value, bool):
        return st.just(not value)
    if isinstance(value, int):
        return st.sampled_from([0, 1, 2, 3, 4, 8, value + 1, 2 * value, value // 2]).filter(lambda x: x != value)
    if isinstance(value, float):
        return st.sampled_from([0.0, 0.5, 1e-3, 2 * value, value / 2, value + 1]).filter(lambda x: x != value)
    if isinstance(value, str):
        kinds = ["relu", "gelu", "gelu_new", "silu", "default", "linear", "dynamic", "yarn", "llama3"]
        return st.sampled_from(kinds).filter(lambda x: x != value)
    if isinstance(value, list):
        kinds = ["full_attention", "sliding_attention"]
        return st.sampled_from([value[1:], [0], [1], kinds, kinds[::-1], [kinds[1]] * 2]).filter(lambda x: x != value)
    return st.sampled_from([1, 2, 4, 8, 0.5, True])


ADDED = {"attention_bias": False, "sliding_window": None, "layer_types": None, "partial_rotary_factor": None,
         "rope_theta": None, "rope_scaling": None, "head_dim": None, "max_window_layers": 1, "norm_topk_prob": False,
         "use_sliding_window": False}  # fmt: skip
"""Fields that a file may have although its writer left them out."""


def changed(entries, draw):
    """The entries of a `config.json` with another value in one field."""
    flat = [(key, None) for key in {**ADDED, **entries} if key not in ("model_type", "architectures")]
    flat += [("rope_parameters", key) for key in entries.get("rope_parameters") or {}]
    key, inner = draw(st.sampled_from(sorted(flat, key=str)))
    entries = json.loads(json.dumps({**{key: ADDED.get(key)}, **entries}))
    if inner is None and isinstance(entries[key], dict):
        entries[key] = draw(st.sampled_from([LONG, YARN, {"rope_type": "default", "rope_theta": 77.0}]))
    elif inner is None:
        entries[key] = draw(others(entries[key]))
    else:
        entries[key][inner] = draw(others(entries[key][inner]))
    return entries, key


def logits_of(name, entries):
    """What transformers computes with these entries and the weights of a family; None if it cannot."""
    import transformers

    try:
        config = transformers.AutoConfig.for_model(entries["model_type"]).from_dict(copy.deepcopy(entries))
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        model.load_state_dict(model_of(name).state_dict())
        with torch.no_grad():
            return model(TOKENS, use_cache=False).logits
    except Exception:  # whatever transformers and torch raise for a model that cannot be
        return None


def refused(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return ""


def check(name, model, names, folders, tmp_path_factory, data):
    """Changes one field, and asks transformers whether the model is another one."""
    folder = tmp_path_factory.mktemp("case") / "model"
    shutil.copytree(folders(name), folder)
    before = json.loads((folder / "config.json").read_text())
    entries, field = changed(before, data.draw)
    with torch.no_grad():
        want = model_of(name)(TOKENS, use_cache=False).logits
    got = logits_of(name, entries)
    assume(got is not None)
    (folder / "config.json").write_text(json.dumps(entries))
    layout = fs.plan_layout(model, fs.make_mesh(dp=1))
    read, out, given = refused(hf.load, folder, layout, names), folder.parent / "out", copy.deepcopy(entries)
    written = refused(hf.save, out, hf.load(folders(name), layout, names), given, layout, names=names)
    assert given == entries, "a config that is given stays as it is"
    if not torch.equal(got, want):
        assert read and written, (field, before.get(field), entries[field], read, written)


@slow
@pytest.mark.parametrize("name", DECODERS)
@MANY
@given(data=st.data())
def test_of_a_decoder(name, folders, tmp_path_factory, data):
    check(name, fs.models.decoder(hf.config_of(folders(name))), None, folders, tmp_path_factory, data)


@slow
@pytest.mark.parametrize("name", [x for x in MODULES if x not in DECODERS or x == "llama3"])
@MANY
@given(data=st.data())
def test_of_a_module(name, folders, tmp_path_factory, data):
    net = pure(name)
    check(name, net, net.files, folders, tmp_path_factory, data)


def test_token_ids_and_generation_config_are_those_that_transformers_writes(tmp_path):
    model = model_of("llama3")
    model.generation_config.update(temperature=0.6, do_sample=True, eos_token_id=[2, 5])
    model.save_pretrained(tmp_path / "theirs")
    config, net = hf.config_of(tmp_path / "theirs"), fs.functionalize(model)
    for number, source in enumerate([fs.models.decoder(config), net]):
        layout, names = fs.plan_layout(source, fs.make_mesh(dp=1)), net.files if source is net else None
        params, given = hf.load(tmp_path / "theirs", layout, names), model.config.to_dict() if names else config
        out = hf.save(tmp_path / f"out{number}", params, given, layout, names=names).path
        ours, theirs = (json.loads((x / "generation_config.json").read_text()) for x in (out, tmp_path / "theirs"))
        assert ours == theirs
        ours, theirs = (json.loads((x / "config.json").read_text()) for x in (out, tmp_path / "theirs"))
        assert all(ours[key] == theirs[key] for key in (*ENDS, "max_position_embeddings", "rope_parameters"))
