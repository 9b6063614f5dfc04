"""Families of models: convert a Hugging Face `config.json` to a `DecoderConfig`, and back.

Guarantee: `config_of(config_json(c))` computes the same as `c`, for every config that a family has entries for.
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
"""Fields of a `DecoderConfig` and their names in every `config.json`."""

_KEPT = (
    "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache",
    "max_window_layers", "sliding_window", "use_sliding_window", "attention_dropout", "pretraining_tp",
)  # fmt: skip
"""Entries that don't affect the computation and are written as they were read."""

_MEND = "Use a different model, or load its weights into your own tree: fs.hf.load(path, layout, names)."


@dataclass(frozen=True)
class Family:
    """Conventions shared by the models of one `model_type`."""

    architecture: str  # the class in transformers
    bias: bool = False  # whether queries, keys and values have biases
    qk_norm: bool = False  # whether query and key heads have norms
    experts: str | None = None  # the key of the number of experts; None for a dense family
    rope_base: float = 10_000.0  # default if `config.json` has none


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "mixtral": Family("MixtralForCausalLM", experts="num_local_experts", rope_base=1_000_000.0),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, experts="num_experts"),
}
"""Families by `model_type`; `FIELDS` has the fields of their configs."""

_LACKS = "models.decoder does not support it"
_LACKED = {"gpt2": "learned positions, LayerNorm with biases, and GELU instead of SwiGLU"}


# -------------------------------------------------------------------------------------------------------------- fields
# Every entry of a `config.json` is in one of three tables: read into the `DecoderConfig`, accepted with some values, or
# neutral. An entry in none is refused, since it may change the logits.
class Only(NamedTuple):
    """A field that changes the computation; `models.decoder` supports only some of its values."""

    default: Any  # of the config class, if `config.json` has no entry
    accepted: tuple[Any, ...]  # supported values; a list is supported if each of its entries is


class Fields(NamedTuple):
    """The fields of the config class of a family."""

    # Fields with an equivalent in `DecoderConfig`, and the class's default; None if a file must have the entry.
    read: dict[str, Any]
    only: dict[str, Only]  # fields with some supported values
    neutral: frozenset[str]  # fields that don't change the logits


READ: frozenset[str] = frozenset(
    ("model_type", "head_dim", "rope_theta", "rope_scaling", "original_max_position_embeddings", "quantization_config")
)
"""Entries that are read although some config classes lack the field: old names, and common ones."""

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
"""Entries that change the computation in some family and also occur in files of other families."""

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
        # Of encoders and other tasks, in files of transformers 4.
        "add_cross_attention", "classifier_dropout", "cross_attention_hidden_size", "decoder_start_token_id",
        "finetuning_task", "is_decoder", "num_labels", "prefix", "sep_token_id", "task_specific_params",
        "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "use_bfloat16",
        # Defaults of generation, which transformers removes from the config.
        "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
        "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
        "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values",
        "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p",
        "typical_p",
        # Fields of one family that also occur in files of families without them.
        "max_window_layers", "norm_topk_prob", "output_router_logits", "router_aux_loss_coef", "sliding_window",
        "use_sliding_window",
        # Notes of tools that write directories.
        "is_llama_config", "transformers.js_config", "unsloth_fixed", "unsloth_version",
    )
)  # fmt: skip
"""Entries that don't change the logits of families whose `Fields` lack them: `Fields` have precedence."""


def _fields(
    read: dict[str, Any], *shared: str, only: dict[str, Only] | None = None, neutral: tuple[str, ...] = ()
) -> Fields:
    """Build the fields of a family: the common ones, the given ones, and the `shared` names of `ONLY`."""
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
_SWITCHED = {"use_sliding_window": False}  # the window applies only if this is true

FIELDS: dict[str, Fields] = {
    "llama": _fields(
        {"num_key_value_heads": None, "head_dim": None}, "attention_bias", "mlp_bias", neutral=("pretraining_tp",)
    ),
    "mistral": _fields({"num_key_value_heads": 8, "head_dim": None}, only=_WINDOW),
    "qwen2": _fields(
        {"num_key_value_heads": 32, **_SWITCHED}, "layer_types", only=_WINDOW,
        neutral=("attention_bias", "max_window_layers"),  # the class always has biases
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
"""Fields of the config classes, by `model_type`."""


# ------------------------------------------------------------------------------------------------------------------ in
@public
def config_of(source: str | os.PathLike[str] | Mapping[str, Any]) -> DecoderConfig:
    """Read the `DecoderConfig` that a `config.json` describes.

    The balance loss of the router is on if `output_router_logits` is true; unlike transformers, which pools all layers,
    each layer computes its own expert loads. The config keeps the entries of `config.json` and
    `generation_config.json`, and `fs.hf.save` writes the ones that don't affect the computation, such as token ids.

    Args:
        source: Entries of the file, its path, or the directory that has it.

    Returns:
        The config of `models.decoder`.

    Raises:
        ConfigError: a missing file, an unknown family, or entries that are missing or not supported; all are listed.

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
        raise ConfigError(message("does not support this family.", rows, mend))
    unknown = _unknown(entries, kind)
    # A field that the file lacks has the default of the config class, not of `DecoderConfig`.
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
    """Read the entries of a `config.json`, given the file or its directory."""
    mend = "Pass a directory that has a config.json, as save_pretrained of transformers writes it."
    return _read(path, "config.json", mend)


def _read(path: str | os.PathLike[str], name: str, mend: str) -> dict[str, Any]:
    """Read the entries of a JSON file, given the file or its directory."""
    file = Path(path)
    try:
        file = file / name if file.is_dir() else file
        # The user's path may be any link; a link inside the directory must not lead out of its tree.
        real = Path(os.path.realpath(path))
        real = beside(real, name) if real.is_dir() else real
        entries = read_json(real, most=CONFIG_LIMIT, finite=False)
        if not isinstance(entries, dict):
            raise ValueError(f"it contains a {type(entries).__name__}, not an object")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(report(f"fs.hf.config_of cannot read {file}.", [str(why)], mend)) from error
    return entries


_MOST: dict[str, int] = {"num_hidden_layers": 10_000, "num_experts": 100_000, "num_local_experts": 100_000}
_COUNTS = ("num_experts", "num_local_experts")
_MOST_ELSE = 1 << 24
"""Larger than any model, and small enough that planning stays fast and sizes in bytes fit int64."""


def _sizes(entries: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Collect the required sizes, None if missing, and the optional sizes that the entries have."""
    keys = [theirs for ours, theirs in SIZES.items() if ours != "kv_heads"]
    keys += ["num_experts_per_tok"] if family.experts is not None else []
    result = {key: entries.get(key) for key in keys}
    if family.experts is not None:
        # Two names of one field: in transformers the alias has precedence over the class's own name.
        counts = [entries[key] for key in (*{*_COUNTS} - {family.experts}, family.experts) if entries[key] is not None]
        result[family.experts] = counts[0] if counts else None
        result |= {"moe_intermediate_size": entries.get("moe_intermediate_size")} if family.qk_norm else {}
    return result | {key: entries[key] for key in ("num_key_value_heads", "head_dim") if entries.get(key) is not None}


def _wrong_numbers(entries: Mapping[str, Any], family: Family) -> list[str]:
    """List sizes and other numbers that are out of range, one row each."""
    # The file isn't trusted: a size of 10**18 must fail here, not while the layout is planned.
    sizes = _sizes(entries, family).items()
    rows = [f"{key} is {x!r}: an integer above 0" for key, x in sizes if not _is_size(x)]
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
        rows.append(f"one leaf would have {count:,} elements: at most {_MOST_ELEMENTS:,}")
    return rows


def _largest(sizes: Mapping[str, int]) -> int:
    """Estimate the number of elements of the largest leaf."""
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
    """List fields with values that the decoder doesn't support, one row each."""
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
    """List entries in no table, one row each: they may change the computation."""
    read, only, neutral = FIELDS[kind]
    known = {*read, *only, *neutral, *READ, *ONLY, *IGNORED}
    named = f"{FAMILIES[kind].architecture.removesuffix('ForCausalLM')}Config"
    unknown = {name: value for name, value in entries.items() if name not in known and value is not None}
    return [f"{name} is {value!r}: not a supported field of {named}" for name, value in unknown.items()]


_TAKE_OUT = "If an entry does not change the logits, remove it from config.json."


def _rope(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the rotary entries of transformers 4 or 5 to the form of 5."""
    # Files of 4 have `rope_theta` at the top level, and `rope_scaling` with `type` or `rope_type`; files of 5 have both
    # in `rope_parameters`.
    said = entries.get("rope_scaling") or entries.get("rope_parameters") or {}
    rope = dict(said) if isinstance(said, Mapping) else {"rope_type": said}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if "rope_theta" not in rope and entries.get("rope_theta") is not None:
        rope["rope_theta"] = entries["rope_theta"]
    if rope["rope_type"] in ("llama3", "yarn"):
        # As in transformers, the top-level entry has precedence over the nested one.
        context = "original_max_position_embeddings"
        rope |= {context: entries[context]} if context in entries else {}
    return rope


def _scaling(entries: Mapping[str, Any], rows: list[str]) -> Scaling | None:
    """Read the scaling of rotary frequencies; add a row for each entry that isn't supported."""
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
"""Limit for the factor by which a context is extended."""


def _is_number(value: Any, least: float = -_LARGEST, most: float = _LARGEST) -> bool:
    """Whether a value is a number in a range; NaN isn't."""
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
    """Return the config of a decoder, given the config or a recipe that has one."""
    result = config if isinstance(config, DecoderConfig) else getattr(config, "config", None)
    if not isinstance(result, DecoderConfig):
        mend = "Pass a DecoderConfig, or a recipe such as fs.models.presets.llama3_8b()."
        raise ConfigError(message(f"needs the config of a decoder; got {type(config).__name__}.", mend=mend))
    return result


@public
def config_json(config: Any, **entries: Any) -> dict[str, Any]:
    """Convert a `DecoderConfig` to the entries of a `config.json` of a family that computes the same.

    A config from `config_of` keeps the token ids, `max_position_embeddings` and similar entries of its file.

    Args:
        config: `DecoderConfig`, or a recipe.
        **entries: Entries to add or replace, such as `eos_token_id`.

    Returns:
        Entries of the `config.json`, with rotary entries for transformers 4 and 5.

    Raises:
        ConfigError: the decoder has a feature that no family supports, or the argument isn't a config.

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
    result |= {"sliding_window": None} if kind == "mistral" else {}  # the class's default is a window
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
    """Keep the entries of the original `config.json` that don't affect the computation."""
    before = (config.published or {}).get("config.json", {})
    if before.get("model_type") != kind:
        return {}
    kept = {key: before[key] for key in _KEPT if key in before}
    if config_of(before).rope_scaling != config.rope_scaling:
        kept.pop("max_position_embeddings", None)  # computed from the scaling
    return kept


def _rope_json(config: DecoderConfig) -> dict[str, Any]:
    """Write the rotary entries of transformers 5, and of 4, which would silently use its default base otherwise."""
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
    """Find the family of a decoder."""
    experts = config.experts
    rows = ["it has stacks of unlike blocks"] if config.stacks else []
    rows += [f"its attention is {type(config.attention).__name__}"] if config.attention is not None else []
    if experts is not None:
        plain = {"score": "softmax", "shared": 0, "scale": 1.0, "groups": 1, "z": 0.0, "bias_rate": None}
        odd = {key: getattr(experts, key) for key, usual in plain.items() if getattr(experts, key) != usual}
        rows += [f"its experts have {key}={value!r}" for key, value in odd.items()]
        if not experts.normalize and not config.qk_norm:
            rows.append("weights of its experts are not normalized, which only qwen3_moe supports, with qk_norm")
    wanted = config.bias, config.qk_norm, experts is not None
    fits = [kind for kind, f in FAMILIES.items() if wanted == (f.bias, f.qk_norm, f.experts is not None)]
    if not fits:
        with_or_without = "with" if experts else "without"
        rows.append(f"no family has bias={config.bias} and qk_norm={config.qk_norm} {with_or_without} experts")
    if rows:
        mend = f"Families are {', '.join(FAMILIES)}; for a different one pass the entries of its config.json."
        raise ConfigError(message("finds no family that computes the same as this decoder.", rows, mend))
    before = (config.published or {}).get("config.json", {}).get("model_type")
    return before if before in fits else fits[0]
