"""Fields of a `config.json`, each changed alone: what transformers then computes otherwise, `hf.load` and `hf.save` refuse.

The oracle is transformers: it reads the changed file and the same weights, and its logits are those of before or not.
The tables of fields are compared with the config classes: every field is in them, with its default, and where it belongs.
"""

import copy
import dataclasses
import functools
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

import fsharding as fs
from fsharding import ops
from fsharding.base.errors import CheckpointError, ConfigError
from fsharding.interop import hf
from fsharding.interop.hf.config_tables import FIELDS, ONLY, READ
from tests.helpers import examples, slow
from tests.hf_configs import LONG, SIZES, YARN

DECODERS = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LONG, "max_position_embeddings": 128}),
    "qwen2": ("Qwen2", {"rope_parameters": YARN, "max_position_embeddings": 64}),
    "qwen3": ("Qwen3", {"head_dim": 6}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_experts_per_tok": 2, "num_local_experts": 4, "head_dim": 4}),
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


OTHER = {
    "is_causal": [False, None], "layer_types": [["sliding_attention"] * 2], "mlp_only_layers": [[0]],
    "decoder_sparse_step": [2], "partial_rotary_factor": [0.5], "rope_interleaved": [True], "pruned_heads": [{"0": [1]}],
    "original_max_position_embeddings": [8], "rope_theta": [77.0], "rope_scaling": [LONG, YARN],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 77.0}, {"rope_type": "linear", "factor": 2.0}],
    "sliding_window": [4], "hidden_act": ["gelu", "swish"], "dtype": ["bfloat16"], "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}], "problem_type": ["regression"], "architectures": [["LlamaModel"]], "head_dim": [8, None],
    "transformers_version": ["4.0.0"], "num_key_value_heads": [4, None], "attention_chunk_size": [4],
    "per_layer_config": [{"1": {"rms_norm_eps": 0.5}}], "tie_word_embeddings": [False, True], "rms_norm_eps": [0.5],
    "no_such_field": [1, False, "text"], "pretraining_tp": [2],
    "initializer_range": [0.5],
}  # fmt: skip
"""Other values of fields; those of the rest follow from the value that is there."""
NOT_ALONE = {"model_type", "quantization_config", "return_dict"}
"""Fields that say how all others are read, how weights are stored, or the form of outputs."""
ALIASES = {"use_sliding_window": "sliding_window"}


def changes(kind, entries):
    """Each field of a family and each that is known anywhere, with other values than it has."""
    import transformers

    of_class = {x.name for x in dataclasses.fields(transformers.CONFIG_MAPPING[kind])}
    for name in sorted({*of_class, *READ, *ONLY, "no_such_field"} - NOT_ALONE):
        value = entries.get(name, getattr(transformers.CONFIG_MAPPING[kind], name, None))
        usual = [value + 1] if type(value) in (int, float) else [not value]
        yield from ((name, x) for x in OTHER.get(name, usual) if x != value or type(x) is not type(value))


def theirs_of(folder):
    """The logits of the model that transformers reads; None if it cannot."""
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            return model(TOKENS, use_cache=False).logits
    except Exception:  # whatever transformers and torch raise for a model that cannot be
        return None


def ours_of(folder):
    """The logits of the decoder of a directory."""
    config = hf.config_of(folder)
    model = fs.models.decoder(config)
    params = hf.load(folder, layout := fs.plan_layout(model, fs.make_mesh(dp=1)))

    def head(params, stream, batch):
        return F.linear(ops.rms_norm(stream.x, params["norm"], eps=config.eps), params["unembed"])

    with fs.set_mesh(layout.mesh), torch.no_grad():
        return fs.model_loss(model._replace(head=head))(params, {"tokens": TOKENS})


def computed(folder):
    """Our logits, or None and why a directory is refused."""
    try:
        return ours_of(folder), ""
    except (CheckpointError, ConfigError) as error:
        return None, str(error)


QUICK = ("llama", "qwen3")


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=slow) for x in DECODERS])
def test_each_field_alone_is_read_as_transformers_reads_it_or_refused_by_name(name, folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders(name), folder)
    before = json.loads((folder / "config.json").read_text())
    kind = before["model_type"]
    if "use_sliding_window" in FIELDS[kind].read:
        before["sliding_window"] = 4  # which counts once `use_sliding_window` is true
        (folder / "config.json").write_text(json.dumps(before))
    base = theirs_of(folder)
    torch.testing.assert_close(ours_of(folder), base, atol=1e-4, rtol=1e-4)
    refusals, changed = {}, {}
    for field, value in changes(kind, before):
        (folder / "config.json").write_text(json.dumps({**before, field: value}))
        want = theirs_of(folder)
        changed[field] = changed.get(field, False) or want is None or not torch.allclose(want, base, atol=1e-6)
        got, why = computed(folder)
        if got is None:
            refusals[field] = why
            # A size that does not fit the weights is refused by the leaf.
            named = ALIASES.get(field, field) in why or field in {*FIELDS[kind].read, *READ}
            assert named, (field, value, why)
        else:
            assert want is not None, (field, value, "is read here and not by transformers")
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4, msg=f"{field}={value!r}")
    neutral = FIELDS[kind].neutral
    assert not neutral & refusals.keys(), "neutral fields are read with any value"
    assert not [x for x in neutral if changed.get(x)], "neutral fields change nothing"
    assert {*FIELDS[kind].only, "no_such_field"} <= {*refusals, *(ALIASES.get(field) for field in refusals)}


@pytest.mark.parametrize("kind", FIELDS)
def test_the_tables_have_every_field_of_the_config_class_with_its_default(kind):
    import transformers

    fields = {x.name: x.default for x in dataclasses.fields(transformers.CONFIG_MAPPING[kind])}
    read, only, neutral = FIELDS[kind]
    assert {*fields} <= {*read, *only, *neutral}, {*fields} - {*read, *only, *neutral}
    assert not {*read} & {*only} and not {*read} & neutral and not {*only} & neutral
    defaults = {name: x for name, x in read.items() if x is not None} | {name: x.default for name, x in only.items()}
    assert {name: fields[name] for name in defaults} == defaults


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
    model = copy.deepcopy(model_of("llama3"))
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


def test_a_tied_config_with_another_head_is_refused_where_transformers_unties(folders, tmp_path):
    import transformers

    folder = tmp_path / "model"
    shutil.copytree(folders("llama"), folder)
    entries = json.loads((folder / "config.json").read_text())
    untied = theirs_of(folder)  # its head has values of its own
    (folder / "config.json").write_text(json.dumps(entries | {"tie_word_embeddings": True}))
    torch.testing.assert_close(theirs_of(folder), untied)
    tied = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    tied.load_state_dict(
        {k: x for k, x in model_of("llama").state_dict().items() if k != "lm_head.weight"}, strict=False
    )
    assert not torch.allclose(tied(TOKENS).logits, untied, atol=0.1)
    text = refused(ours_of, folder)
    assert "\n  lm_head.weight and model.embed_tokens.weight differ, and tie_word_embeddings is true\n" in text
    (folder / "config.json").write_text(json.dumps(entries | {"tie_word_embeddings": False}))
    torch.testing.assert_close(ours_of(folder), untied, atol=1e-4, rtol=1e-4)


def test_two_saves_in_one_directory_are_refused_and_transformers_reads_the_single_file(tmp_path):
    folder = tmp_path / "model"
    model = copy.deepcopy(model_of("llama"))
    model.save_pretrained(folder)
    older = model(TOKENS).logits
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path / "newer", max_shard_size="5KB")
    for file in (tmp_path / "newer").iterdir():
        file.replace(folder / file.name)
    torch.testing.assert_close(theirs_of(folder), older)
    text = refused(ours_of, folder)
    assert "model.safetensors is there too: two saves in one directory; remove model.safetensors, or " in text
    (folder / "model.safetensors.index.json").unlink()
    torch.testing.assert_close(ours_of(folder), older, atol=1e-4, rtol=1e-4)
    shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")
    torch.testing.assert_close(ours_of(folder), older, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "entry", [{"is_causal": False}, {"original_max_position_embeddings": 8}], ids=["causal", "context"]
)
def test_an_entry_that_the_module_lacks_is_no_less_of_a_difference(entry, folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders("llama3"), folder)
    net = pure("llama3")
    layout = fs.plan_layout(net, fs.make_mesh(dp=1))
    base = theirs_of(folder)
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | {"no_generation": None, "n_ctx": 3, "do_sample": True}))
    hf.load(folder, layout, net.files)
    (folder / "config.json").write_text(json.dumps(entries | entry))
    assert not torch.allclose(theirs_of(folder), base, atol=1e-3)
    assert f"{next(iter(entry))} is " in refused(hf.load, folder, layout, net.files)
