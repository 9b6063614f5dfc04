"""Compare a `config.json` with the model of a layout, by the fields that change what the model computes."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsharding.base.errors import ConfigError
from fsharding.interop.hf.config_tables import FAMILIES, IGNORED, ONLY, SIZES, config_of
from fsharding.models.decoder import DecoderConfig

__all__ = ["ModuleConfig", "config_of_module", "differences", "generation_of", "unlike_decoders"]

_ABSENT: Any = "nothing"
_CALLED = {**SIZES, "tied": "tie_word_embeddings", "rope_base": "rope_theta", "eps": "rms_norm_eps"}

_TRAINING_OF_EXPERTS = ("balance", "z", "bias_rate")
_HARMLESS = re.compile(
    r"_.*|architectures|auto_map|.*dropout.*|.*_pdrop|.*drop_rate|.*jitter.*|dtype|torch_dtype|id2label|label2id|num_labels"
    r"|problem_type|initializer_.*|router_aux_loss_coef|output_.*|return_dict|use_cache|bos_token_id|eos_token_id"
    r"|transformers_version|quantization_config|summary_.*|n_ctx"
)
"""Fields of a module's config that don't change the logits: names, training, initialization, and kinds of outputs."""


@dataclass(frozen=True)
class ModuleConfig:
    """The config of a module."""

    entries: Mapping[str, Any]  # of its `config.json`
    kind: Any  # the class of the config, whose `from_dict` reads such entries
    generation: Mapping[str, Any] | None  # entries of its `generation_config.json`; None if it has none


def config_of_module(module: nn.Module) -> ModuleConfig | None:
    """Read the config of a transformers module, or of one whose config has the same methods; None for others."""
    config: Any = getattr(module, "config", None)
    if not callable(getattr(config, "to_dict", None)) or not callable(getattr(type(config), "from_dict", None)):
        return None
    generation: Any = getattr(module, "generation_config", None)
    text = generation.to_json_string() if hasattr(generation, "to_json_string") else None
    return ModuleConfig(_plain(config.to_dict()), type(config), None if text is None else json.loads(text))


def generation_of(config: Any) -> Mapping[str, Any] | None:
    """Return the entries of the `generation_config.json` of a config; None if it has none."""
    if isinstance(config, DecoderConfig):
        return (config.published or {}).get("generation_config.json")
    return config.generation if isinstance(config, ModuleConfig) else None


def differences(entries: Mapping[str, Any], config: Any) -> list[str]:
    """List the fields in which a `config.json` and the model of a layout compute something different, one row each."""
    if isinstance(config, DecoderConfig):
        return _of_decoders(entries, config) if entries.get("model_type") in [*FAMILIES] else []
    if isinstance(config, ModuleConfig) and "model_type" in entries:
        return _of_modules(entries, config)
    return []


def _of_decoders(entries: Mapping[str, Any], config: DecoderConfig) -> list[str]:
    try:
        theirs = config_of(entries)
    except ConfigError as error:
        return [row.strip() for row in str(error).splitlines()[1:-1]]
    return unlike_decoders(theirs, config)


def unlike_decoders(given: DecoderConfig, made_of: Any, where: str = "config.json") -> list[str]:
    """List the fields in which two decoders compute something different; none unless a layout's config is known."""
    ours = made_of if isinstance(made_of, DecoderConfig) else given
    return _rows(dict(_computed(given)), dict(_computed(ours)), where)


def _computed(config: DecoderConfig) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a decoder that change what it computes."""
    # If all blocks have experts, no dense part has this size.
    unused = () if config.experts is None else ("intermediate_size",)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "experts" and value is not None:
            for part in dataclasses.fields(value):
                if part.name not in _TRAINING_OF_EXPERTS:
                    yield f"experts.{part.name}", getattr(value, part.name)
        elif field.name == "head_size":
            yield "head_dim", config.head_dim
        elif field.compare and field.name != "fused" and field.name not in unused:
            yield _CALLED.get(field.name, field.name), value


def _of_modules(entries: Mapping[str, Any], config: ModuleConfig) -> list[str]:
    ours = dict(config.entries)
    if entries["model_type"] != ours.get("model_type"):
        return _rows({"model_type": entries["model_type"]}, {"model_type": ours.get("model_type")})
    try:
        read = config.kind.from_dict(copy.deepcopy(dict(entries)))  # `from_dict` modifies its argument
        # Building a model calls this again, and then a top-level rotary entry has precedence over the nested one.
        getattr(read, "standardize_rope_params", dict)()
        theirs = _plain(read.to_dict())
    except Exception as error:  # a class of transformers may raise anything for invalid entries
        return [f"{config.kind.__name__} cannot read it: {type(error).__name__}: {str(error).partition(chr(10))[0]}"]
    kept = [key for key in {**ours, **theirs} if not _HARMLESS.fullmatch(key)]
    kept = [key for key in kept if key in ours or not _is_unread(key, theirs[key])]
    read, own = ({key: of[key] for key in kept if key in of} for of in (theirs, ours))
    return _rows(dict(_flat(read)), dict(_flat(own)))


def _is_unread(name: str, value: Any) -> bool:
    """Whether an entry that the module's config lacks has no effect."""
    return name in IGNORED or (value in ONLY[name].accepted if name in ONLY else value is None)


def _flat(entries: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested entries by dotted name."""
    for key, value in entries.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _plain(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Convert entries to JSON and back, so that tuples equal lists."""
    return json.loads(json.dumps(entries, default=str))


def _rows(theirs: Mapping[str, Any], ours: Mapping[str, Any], where: str = "config.json") -> list[str]:
    pairs = {name: (theirs.get(name, _ABSENT), ours.get(name, _ABSENT)) for name in [*theirs, *ours]}
    return [f"{name} is {a} in {where}, and {b} in the layout's model" for name, (a, b) in pairs.items() if a != b]
