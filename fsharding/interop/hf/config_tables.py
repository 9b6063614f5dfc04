"""Families of models: `config.json` of a Hugging Face directory, and the decoder that it means.

Guarantee: `config_of(config_json(c))` computes what `c` computes, for every config that a family can say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fsharding.base.errors import ConfigError, listed, message, report
from fsharding.base.local_paths import check_local
from fsharding.base.public import public
from fsharding.base.untrusted import beside, read_json
from fsharding.foreign.coded_weights import CONFIG_LIMIT, blocks_of
from fsharding.models.decoder import DecoderConfig
from fsharding.models.moe import Experts
from fsharding.ops.rotary import LlamaScaling, Scaling, YarnScaling

__all__ = [
    "FAMILIES", "FIELDS", "GENERATION", "IGNORED", "ONLY", "READ", "SIZES", "Family", "Fields", "Only", "config_json",
    "config_of", "decoder_config", "read_config",
]  # fmt: skip

GENERATION = "generation_config.json"
SIZES = {
    "vocab_size": "vocab_size", "dim": "hidden_size", "intermediate_size": "intermediate_size",
    "layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
}  # fmt: skip
"""Fields of a `DecoderConfig`, and what they are called in every `config.json`."""

_KEPT = (
    "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache",
    "max_window_layers", "sliding_window", "use_sliding_window", "attention_dropout", "pretraining_tp",
)  # fmt: skip
"""Entries that a decoder computes nothing with, and that are written as they were read."""

_MEND = "Use another model, or bring its weights into a tree of your own: fs.hf.load(path, layout, names)."


@dataclass(frozen=True)
class Family:
    """The conventions that models of a `model_type` share."""

    architecture: str  # the class of transformers
    bias: bool = False  # queries, keys and values have biases
    qk_norm: bool = False  # query and key heads have norms
    experts: str | None = None  # the key of the number of experts; None for a dense family
    rope_base: float = 10_000.0  # where `config.json` has none


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "mixtral": Family("MixtralForCausalLM", experts="num_local_experts", rope_base=1_000_000.0),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, experts="num_experts"),
}
"""Families by `model_type`; `FIELDS` has the fields of their configs."""

_LACKS = "models.decoder has no such thing"
_LACKED = {"gpt2": "learned positions, LayerNorm with biases, and a GELU in the place of SwiGLU"}


# -------------------------------------------------------------------------------------------------------------- fields
# Each field of a `config.json` changes the computation and is read, has one value that is computed, or is neutral.
class Only(NamedTuple):
    """A field that changes what the model computes, of which `models.decoder` computes some values."""

    default: Any  # of the config class, where `config.json` has no entry
    accepted: tuple[Any, ...]  # the values that the decoder computes; the entries of a list are compared one by one


class Fields(NamedTuple):
    """The fields of the config class of a family."""

    # fields that a `DecoderConfig` says too, with the default of the class; None where a file must have one
    read: dict[str, Any]
    only: dict[str, Only]  # fields of which the decoder computes some values
    neutral: frozenset[str]  # fields that change no logits


READ: frozenset[str] = frozenset(
    ("model_type", "head_dim", "rope_theta", "rope_scaling", "original_max_position_embeddings", "quantization_config")
)
"""Entries that are read although some config classes have no such field: names of older releases, and common ones."""

ONLY: dict[str, Only] = {
    "attention_bias": Only(False, (False, None)),
    "attention_chunk_size": Only(None, (None,)),
    "decoder_sparse_step": Only(1, (1,)),
    "is_causal": Only(True, (True,)),
    "layer_types": Only(None, ("full_attention", None)),
    "mlp_bias": Only(False, (False, None)),
    "mlp_only_layers": Only(None, (None,)),
    "partial_rotary_factor": Only(None, (None, 1)),
    "per_layer_config": Only(None, (None,)),
    "pruned_heads": Only(None, (None, {})),
    "rope_interleaved": Only(False, (False, None)),
    "router_jitter_noise": Only(0.0, (0, None)),
    "use_mrope": Only(False, (False, None)),
}
"""Entries that change what a model of some family computes, and that files of other families have as well."""

_NEUTRAL = frozenset(
    (
        "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
        "initializer_range", "is_encoder_decoder", "label2id", "max_position_embeddings", "output_hidden_states",
        "pad_token_id", "problem_type", "return_dict", "transformers_version", "use_cache",
    )
)  # fmt: skip
"""Fields of every config class."""

IGNORED = frozenset(
    (
        # How the model is loaded, called, or trained.
        "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_experts_implementation",
        "_flash_attn_2_enabled", "_name_or_path", "attn_implementation", "auto_map", "experts_implementation",
        "gradient_checkpointing", "name_or_path", "output_attentions", "pretraining_tp", "torch_dtype", "torchscript",
        "use_return_dict",
        # Of models that are no decoders alone, or have another task, in files of transformers 4.
        "add_cross_attention", "classifier_dropout", "cross_attention_hidden_size", "decoder_start_token_id",
        "finetuning_task", "is_decoder", "num_labels", "prefix", "sep_token_id", "task_specific_params",
        "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "use_bfloat16",
        # Defaults of generation, which transformers takes out of the config.
        "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
        "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
        "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values",
        "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p",
        "typical_p",
        # Fields of one family in files of another, whose class has none.
        "max_window_layers", "norm_topk_prob", "output_router_logits", "router_aux_loss_coef", "sliding_window",
        "use_sliding_window",
        # Notes of tools that write directories.
        "is_llama_config", "transformers.js_config", "unsloth_fixed", "unsloth_version",
    )
)  # fmt: skip
"""Entries that change no logits, and are no fields of the config class: `Fields` come first."""


def _fields(
    read: dict[str, Any], *shared: str, only: dict[str, Only] | None = None, neutral: tuple[str, ...] = ()
) -> Fields:
    """The fields of a family, whose sizes every class has; `shared` are those of `ONLY` that its class has."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    every = {"tie_word_embeddings": False, "rope_parameters": None, "rms_norm_eps": 1e-6}
    activations = {"hidden_act": Only("silu", ("silu", "swish")), "attention_dropout": Only(0.0, (0, None))}
    some = activations | (only or {}) | {name: ONLY[name] for name in shared}
    return Fields(dict.fromkeys(sizes) | every | read, some, _NEUTRAL.union(neutral))


_WINDOW = {"sliding_window": Only(4096, (None,))}
_ROUTER = {
    "num_experts_per_tok": None, "num_local_experts": None, "num_experts": None, "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
_SWITCHED = {"use_sliding_window": False}  # the window counts only where this is true

FIELDS: dict[str, Fields] = {
    "llama": _fields(
        {"num_key_value_heads": None, "head_dim": None}, "attention_bias", "mlp_bias", neutral=("pretraining_tp",)
    ),
    "mistral": _fields({"num_key_value_heads": 8, "head_dim": None}, only=_WINDOW),
    "qwen2": _fields(
        {"num_key_value_heads": 32, **_SWITCHED}, "layer_types", only=_WINDOW,
        neutral=("attention_bias", "max_window_layers"),  # its biases are always there
    ),
    "qwen3": _fields(
        {"num_key_value_heads": 32, "head_dim": 128, **_SWITCHED}, "layer_types", "attention_bias", only=_WINDOW,
        neutral=("max_window_layers",),
    ),
    "mixtral": _fields(
        {"num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-5, **_ROUTER}, "router_jitter_noise",
        only={"sliding_window": Only(None, (None,))},
    ),
    "qwen3_moe": _fields(
        {"num_key_value_heads": 4, "moe_intermediate_size": None, "norm_topk_prob": False, **_SWITCHED, **_ROUTER},
        "attention_bias", "mlp_only_layers", "decoder_sparse_step", only=_WINDOW, neutral=("max_window_layers",),
    ),
}  # fmt: skip
"""By `model_type`."""


# ------------------------------------------------------------------------------------------------------------------ in
@public
def config_of(source: str | os.PathLike[str] | Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a `config.json` means.

    A router's balance loss counts where transformers would add it, that is with `output_router_logits`; shares of
    experts are those of one layer here, and those of all layers there. The config keeps the entries of `config.json`
    and `generation_config.json`: `fs.hf.save` writes those again that compute nothing, such as token ids.

    Args:
        source: the entries; or a directory with a `config.json`, or the path of such a file.

    Raises:
        ConfigError: no such file, an unknown family, entries that are missing, or that the decoder lacks; all of them
            are listed.

    Example:
        >>> entries = fs.hf.config_json(fs.models.presets.llama3_8b())  # or the path of a directory
        >>> config = fs.hf.config_of(entries)
        >>> config.layers, config.heads, config.rope_base
        (32, 32, 500000.0)
    """
    check_local(source)
    entries = source if isinstance(source, Mapping) else read_config(source)
    published = {"config.json": dict(entries)}
    if not isinstance(source, Mapping) and os.path.lexists(Path(os.path.realpath(source)) / GENERATION):
        mend = "Get the file again, or remove it: the model computes the same without it."
        published[GENERATION] = _read(source, GENERATION, mend)
    kind = entries.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not isinstance(kind, str):
        rows = [f"model_type is {kind!r}" + (f": it has {_LACKED[kind]}" if kind in [*_LACKED] else "")]
        mend = f"Families are {', '.join(FAMILIES)}. {_MEND}"
        raise ConfigError(message("knows no such family.", rows, mend))
    unknown = _unknown(entries, kind)
    # Fields that a file leaves out have the defaults of the config class.
    entries = {**FIELDS[kind].read, **entries}
    if "use_sliding_window" in FIELDS[kind].read and not entries["use_sliding_window"]:
        entries["sliding_window"] = None
    rows = _wrong_numbers(entries, family)
    rows += [*_foreign(entries, kind), *unknown]
    scaling = _scaling(entries, rows)
    if rows:
        mend = f"{_MEND} {_TAKE_OUT}" if unknown else _MEND
        raise ConfigError(message(f"cannot make a decoder of this {kind}.", rows, mend))
    return replace(_decoder(entries, family, scaling), published=published)


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The entries of a `config.json`, given the file or its directory."""
    mend = "Give a directory that has a config.json, as save_pretrained of transformers makes it."
    return _read(path, "config.json", mend)


def _read(path: str | os.PathLike[str], name: str, mend: str) -> dict[str, Any]:
    """The entries of a JSON file, given it or its directory."""
    file = Path(path)
    try:
        file = file / name if file.is_dir() else file
        # A path that a user named may be any link; an entry of a directory only one inside its own tree.
        real = Path(os.path.realpath(path))
        real = beside(real, name) if real.is_dir() else real
        entries = read_json(real, most=CONFIG_LIMIT, finite=False)
        if not isinstance(entries, dict):
            raise ValueError(f"it holds a {type(entries).__name__}, not an object")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(report(f"fs.hf.config_of cannot read {file}.", [str(why)], mend)) from error
    return entries


_MOST: dict[str, int] = {"num_hidden_layers": 10_000, "num_experts": 100_000, "num_local_experts": 100_000}
_COUNTS = ("num_experts", "num_local_experts")
_MOST_ELSE = 1 << 24
"""Above every model, and below what makes plans of it slow, or its bytes more than a number holds."""


def _sizes(entries: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The sizes that have to be there, as they are, and those that may be there, where they are."""
    keys = [theirs for ours, theirs in SIZES.items() if ours != "kv_heads"]
    keys += ["num_experts_per_tok"] if family.experts is not None else []
    result = {key: entries.get(key) for key in keys}
    if family.experts is not None:
        # Two names of one field: transformers lets the one that the class does not have win.
        counts = [entries[key] for key in (*{*_COUNTS} - {family.experts}, family.experts) if entries[key] is not None]
        result[family.experts] = counts[0] if counts else None
        result |= {"moe_intermediate_size": entries.get("moe_intermediate_size")} if family.qk_norm else {}
    return result | {key: entries[key] for key in ("num_key_value_heads", "head_dim") if entries.get(key) is not None}


def _wrong_numbers(entries: Mapping[str, Any], family: Family) -> list[str]:
    """Sizes and other numbers that no model can have, one row each."""
    sizes = _sizes(entries, family).items()
    rows = [f"{key} is {x!r}: a whole number above 0" for key, x in sizes if not _is_size(x)]
    most = ((key, x, _MOST.get(key, _MOST_ELSE)) for key, x in sizes if _is_size(x))
    rows += [f"{key} is {x:,}: at most {limit:,}" for key, x, limit in most if x > limit]
    eps = entries["rms_norm_eps"]
    theta = _rope(entries).get("rope_theta", family.rope_base)
    rows += [] if _is_number(eps, 0, 1) else [f"rms_norm_eps is {eps!r}: a number from 0 to 1"]
    rows += [] if _is_number(theta, 1, _LARGEST) else [f"rope_theta is {theta!r}: a number from 1 to {_LARGEST:g}"]
    flags = ("tie_word_embeddings", "norm_topk_prob", "output_router_logits", "use_sliding_window")
    said = ((key, entries.get(key)) for key in flags)
    rows += [f"{key} is {x!r}: true or false" for key, x in said if not isinstance(x, bool | None)]
    if entries.get("output_router_logits"):
        share = entries["router_aux_loss_coef"]
        wrong = not _is_number(share, 0, _LARGEST)
        rows += [f"router_aux_loss_coef is {share!r}: a number from 0 on"] if wrong else []
    if not rows and (count := _largest(dict(sizes))) > _MOST_ELEMENTS:
        rows.append(f"one leaf of it would have {count:,} elements: at most {_MOST_ELEMENTS:,}")
    return rows


def _largest(sizes: Mapping[str, int]) -> int:
    """About how many elements the largest leaf has."""
    dim = sizes["hidden_size"]
    layers = sizes["num_hidden_layers"]
    hidden = sizes["intermediate_size"]
    experts = max(sizes.get("num_experts", 1), sizes.get("num_local_experts", 1))
    heads = sizes["num_attention_heads"] * sizes.get("head_dim", dim)
    return dim * max(sizes["vocab_size"], layers * experts * max(hidden, sizes.get("moe_intermediate_size", 1)), heads)


_LARGEST = 1e15
_MOST_ELEMENTS = 1 << 50


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _foreign(entries: Mapping[str, Any], kind: str) -> list[str]:
    """Fields whose value the decoder does not compute, one row each."""
    fields = FIELDS[kind]
    only = fields.only | {name: field for name, field in ONLY.items() if name not in {*fields.neutral, *fields.only}}
    said = {name: entries.get(name, field.default) for name, field in only.items()}
    rows = [
        f"{name} is {x!r}: {_LACKS}"
        for name, x in said.items()
        if any(one not in only[name].accepted for one in (x if isinstance(x, list) else [x]))
    ]
    try:
        blocks_of(entries)
    except ValueError as error:
        rows.append(str(error))
    return rows


def _unknown(entries: Mapping[str, Any], kind: str) -> list[str]:
    """Entries that the tables do not have, one row each: they may change what the model computes."""
    read, only, neutral = FIELDS[kind]
    known = {*read, *only, *neutral, *READ, *ONLY, *IGNORED}
    named = f"{FAMILIES[kind].architecture.removesuffix('ForCausalLM')}Config"
    unknown = {name: value for name, value in entries.items() if name not in known and value is not None}
    return [f"{name} is {value!r}: no field of {named} that this library knows" for name, value in unknown.items()]


_TAKE_OUT = "An entry that changes no logits can be taken out of config.json."


def _rope(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary entries of files of transformers 4 and 5 in the form of 5."""
    said = entries.get("rope_scaling") or entries.get("rope_parameters") or {}
    rope = dict(said) if isinstance(said, Mapping) else {"rope_type": said}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if "rope_theta" not in rope and entries.get("rope_theta") is not None:
        rope["rope_theta"] = entries["rope_theta"]
    if rope["rope_type"] in ("llama3", "yarn"):
        # As in transformers, the entry beside the nested ones wins.
        context = "original_max_position_embeddings"
        rope |= {context: entries[context]} if context in entries else {}
    return rope


def _scaling(entries: Mapping[str, Any], rows: list[str]) -> Scaling | None:
    """How rotary frequencies are scaled; what cannot be said is added to the rows."""
    rope = _rope(entries)
    if nested := sorted(key for key, value in rope.items() if isinstance(value, dict)):
        rows.append(f"the rotary positions differ between {listed(nested)}: {_LACKS}")
        return None
    kind = rope["rope_type"]
    known = {
        "default": (),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "original_max_position_embeddings"),
    }
    if kind not in [*known]:
        rows.append(f"rope_type is {kind!r}: types are {', '.join(known)}")
        return None
    numbers = {key: rope.get(key) for key in known[kind]} | {"rope_theta": rope.get("rope_theta", 1.0)}
    numbers |= {key: rope[key] for key in ("beta_slow", "beta_fast") if kind == "yarn" and rope.get(key) is not None}
    wrong = [f"{key} of the rotary positions is {x!r}: a number" for key, x in numbers.items() if not _is_number(x)]
    if not wrong and not _is_number(numbers.get("factor", 1), most=_MOST_FACTOR):
        wrong.append(f"factor of the rotary positions is {numbers['factor']!r}: at most {_MOST_FACTOR:,}")
    others = ("attention_factor", "mscale", "mscale_all_dim")
    odd = [key for key in others if rope.get(key) is not None]
    odd += ["partial_rotary_factor"] if rope.get("partial_rotary_factor") not in (None, 1) else []
    odd += ["truncate"] if kind == "yarn" and rope.get("truncate") is False else []
    wrong += [f"{key} of the rotary positions is {rope[key]!r}: {_LACKS}" for key in odd]
    rows += wrong
    if wrong or kind == "default":
        return None
    factor = float(rope["factor"])
    length = int(rope["original_max_position_embeddings"])
    if kind == "yarn":
        return YarnScaling(factor, length, float(rope.get("beta_slow") or 1), float(rope.get("beta_fast") or 32))
    return LlamaScaling(factor, length, float(rope["low_freq_factor"]), float(rope["high_freq_factor"]))


_MOST_FACTOR = 1_000_000
"""By which a context can grow."""


def _is_number(value: Any, least: float = -_LARGEST, most: float = _LARGEST) -> bool:
    """Whether it is a number in a range, which NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _decoder(entries: Mapping[str, Any], family: Family, scaling: Scaling | None) -> DecoderConfig:
    sizes = {ours: entries[theirs] for ours, theirs in SIZES.items()}
    dim, heads = sizes["dim"], sizes["heads"]
    sizes["kv_heads"] = sizes["kv_heads"] or heads
    size = entries.get("head_dim") or dim // heads
    experts = None
    if family.experts is not None:
        hidden = entries["moe_intermediate_size" if family.qk_norm else "intermediate_size"]
        balance = entries["router_aux_loss_coef"] if entries["output_router_logits"] else 0.0
        normalize = bool(entries["norm_topk_prob"]) if family.qk_norm else True
        count = _sizes(entries, family)[family.experts]
        active = entries["num_experts_per_tok"]
        experts = Experts(count, active, hidden, normalize=normalize, balance=balance)
    return DecoderConfig(
        **sizes,
        tied=bool(entries["tie_word_embeddings"]),
        rope_base=float(_rope(entries).get("rope_theta", family.rope_base)),
        eps=float(entries["rms_norm_eps"]),
        head_size=None if size * heads == dim else size,
        bias=family.bias,
        rope_scaling=scaling,
        qk_norm=family.qk_norm,
        experts=experts,
    )


# ----------------------------------------------------------------------------------------------------------------- out
def decoder_config(config: Any) -> DecoderConfig:
    """The config of a decoder, where it or a recipe that has it is given."""
    result = config if isinstance(config, DecoderConfig) else getattr(config, "config", None)
    if not isinstance(result, DecoderConfig):
        mend = "Pass a DecoderConfig, or a recipe such as fs.models.presets.llama3_8b()."
        raise ConfigError(message(f"needs the config of a decoder; got {type(config).__name__}.", mend=mend))
    return result


@public
def config_json(config: Any, **entries: Any) -> dict[str, Any]:
    """The `config.json` of a decoder, in the family that computes the same.

    A config of `config_of` has the token ids, `max_position_embeddings` and the like of the file that it was read from.

    Args:
        config: a `DecoderConfig`, or a recipe that has one.
        **entries: more entries, or others, such as `max_position_embeddings` or `eos_token_id`.

    Raises:
        ConfigError: no family has all that the decoder has, or it is no config.

    Example:
        >>> entries = fs.hf.config_json(fs.models.presets.llama3_8b(), eos_token_id=128_001)
        >>> entries["model_type"], entries["hidden_size"], entries["eos_token_id"]
        ('llama', 4096, 128001)
    """
    config = decoder_config(config)
    kind = _kind(config)
    experts = config.experts
    family = FAMILIES[kind]
    result: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": config.tied,
        **_rope_json(config),
    }
    result |= {"sliding_window": None} if kind == "mistral" else {}  # its class has a window by default
    if experts is not None:
        result |= {
            str(family.experts): experts.count,
            "num_experts_per_tok": experts.active,
            "output_router_logits": experts.balance > 0,
            "router_aux_loss_coef": experts.balance,
        }
        both = {"moe_intermediate_size": experts.intermediate_size, "norm_topk_prob": experts.normalize}
        result |= both if kind == "qwen3_moe" else {"intermediate_size": experts.intermediate_size}
    return result | _kept(config, kind) | entries


def _kept(config: DecoderConfig, kind: str) -> dict[str, Any]:
    """The entries of the `config.json` that a decoder was read from, as far as it computes nothing with them."""
    before = (config.published or {}).get("config.json", {})
    if before.get("model_type") != kind:
        return {}
    kept = {key: before[key] for key in _KEPT if key in before}
    if config_of(before).rope_scaling != config.rope_scaling:
        kept.pop("max_position_embeddings", None)  # it follows from the scaling
    return kept


def _rope_json(config: DecoderConfig) -> dict[str, Any]:
    """The rotary entries, for transformers 5 and, beside them, for 4, which would take another base in silence."""
    scaling = config.rope_scaling
    rope = dict[str, Any](rope_type="default")
    if scaling is not None:
        rope = {"rope_type": "yarn", "beta_slow": scaling.slow, "beta_fast": scaling.fast}
        if isinstance(scaling, LlamaScaling):
            rope = {"rope_type": "llama3", "low_freq_factor": scaling.slow, "high_freq_factor": scaling.fast}
        rope |= {"factor": scaling.factor, "original_max_position_embeddings": scaling.length}
    result = {"rope_parameters": {**rope, "rope_theta": config.rope_base}, "rope_theta": config.rope_base}
    if scaling is not None:
        result |= {"rope_scaling": rope, "max_position_embeddings": round(scaling.factor * scaling.length)}
    return result


def _kind(config: DecoderConfig) -> str:
    """The family of a decoder."""
    experts = config.experts
    rows = ["it has stacks of unlike blocks"] if config.stacks else []
    rows += [f"its attention is {type(config.attention).__name__}"] if config.attention is not None else []
    if experts is not None:
        plain = {"score": "softmax", "shared": 0, "scale": 1.0, "groups": 1, "z": 0.0, "bias_rate": None}
        odd = {key: getattr(experts, key) for key, usual in plain.items() if getattr(experts, key) != usual}
        rows += [f"its experts have {key}={value!r}" for key, value in odd.items()]
        if not experts.normalize and not config.qk_norm:
            rows.append("weights of its experts are not normalized, which only qwen3_moe knows, with qk_norm")
    wanted = config.bias, config.qk_norm, experts is not None
    fits = [kind for kind, f in FAMILIES.items() if wanted == (f.bias, f.qk_norm, f.experts is not None)]
    if not fits:
        with_or_without = "with" if experts else "without"
        rows.append(f"bias={config.bias} and qk_norm={config.qk_norm}, {with_or_without} experts, go not together")
    if rows:
        mend = f"Families are {', '.join(FAMILIES)}; give the entries of a config.json of another one yourself."
        raise ConfigError(message("finds no family that computes as this decoder.", rows, mend))
    before = (config.published or {}).get("config.json", {}).get("model_type")
    return before if before in fits else fits[0]
