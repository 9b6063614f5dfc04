"""Families of models: `config.json` of a Hugging Face directory, and the decoder that it means.

Guarantee: `config_of(config_json(c))` computes what `c` computes, for every config that a family can say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsharding.base.errors import ConfigError, listed, message, report
from fsharding.base.local_paths import check_local
from fsharding.base.public import public
from fsharding.base.untrusted import beside, read_json
from fsharding.foreign.coded_weights import CONFIG_LIMIT, blocks_of
from fsharding.interop.hf.config_fields import FIELDS, IGNORED, ONLY, READ, Only
from fsharding.models.decoder import DecoderConfig
from fsharding.models.moe import Experts
from fsharding.ops.rotary import LlamaScaling, Scaling, YarnScaling

__all__ = ["FAMILIES", "GENERATION", "Family", "config_json", "config_of"]

GENERATION = "generation_config.json"
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
_LACKED = {
    "gpt2": "learned positions, LayerNorm with biases, and a GELU in the place of SwiGLU",
}


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
    if not isinstance(source, Mapping) and (generation := _read_generation(source)) is not None:
        published["generation_config.json"] = generation
    kind = entries.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        rows = [f"model_type is {kind!r}" + (f": it has {_LACKED[kind]}" if kind in [*_LACKED] else "")]
        mend = f"Families are {', '.join(FAMILIES)}. {_MEND}"
        raise ConfigError(message("knows no such family.", rows, mend))
    assert isinstance(kind, str)
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


def _read_generation(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The entries of the `generation_config.json` of a directory; None if there is none."""
    if not os.path.lexists(Path(os.path.realpath(path)) / GENERATION):
        return None
    return _read(path, GENERATION, "Get the file again, or remove it: the model computes the same without it.")


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
    keys = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
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
    rows = [f"{name} is {x!r}: {_LACKS}" for name, x in said.items() if not _is_accepted(x, only[name])]
    try:
        blocks_of(entries)
    except ValueError as error:
        rows.append(str(error))
    return rows


def _is_accepted(value: Any, field: Only) -> bool:
    """Whether the decoder computes a value of a field, or each entry of a list."""
    return all(x in field.accepted for x in (value if isinstance(value, list) else [value]))


def _unknown(entries: Mapping[str, Any], kind: str) -> list[str]:
    """Entries that the tables do not have, one row each: they may change what the model computes."""
    read, only, neutral = FIELDS[kind]
    known = {*read, *only, *neutral, *READ, *ONLY, *IGNORED}
    named = f"{FAMILIES[kind].architecture.removesuffix('ForCausalLM')}Config"
    return [
        f"{name} is {value!r}: no field of {named} that this library knows"
        for name, value in entries.items()
        if name not in known and value is not None
    ]


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
    theta = rope.get("rope_theta", 1.0)
    known = {
        "default": (),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "original_max_position_embeddings"),
    }
    if kind not in [*known]:
        rows.append(f"rope_type is {kind!r}: types are {', '.join(known)}")
        return None
    numbers = {key: rope.get(key) for key in known[kind]} | {"rope_theta": theta}
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
    dim = entries["hidden_size"]
    heads = entries["num_attention_heads"]
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
        vocab_size=entries["vocab_size"],
        dim=dim,
        layers=entries["num_hidden_layers"],
        heads=heads,
        kv_heads=entries["num_key_value_heads"] or heads,
        intermediate_size=entries["intermediate_size"],
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
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
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
