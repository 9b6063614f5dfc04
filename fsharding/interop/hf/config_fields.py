"""The fields of a `config.json`, by family: each changes the computation and is read, has one value, or is neutral."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["FIELDS", "IGNORED", "ONLY", "READ", "Fields", "Only"]


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
    read: dict[str, Any], *, only: dict[str, Only] | None = None, neutral: frozenset[str] = frozenset()
) -> Fields:
    """The fields of a family, whose sizes every class has."""
    sizes = dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    )
    every = {"tie_word_embeddings": False, "rope_parameters": None, "rms_norm_eps": 1e-6}
    activations = {"hidden_act": Only("silu", ("silu", "swish")), "attention_dropout": Only(0.0, (0, None))}
    return Fields(sizes | every | read, activations | (only or {}), _NEUTRAL | neutral)


_WINDOW = {"sliding_window": Only(4096, (None,))}

_ROUTER = {"output_router_logits": False, "router_aux_loss_coef": 0.001}

FIELDS: dict[str, Fields] = {
    "llama": _fields(
        {"num_key_value_heads": None, "head_dim": None},
        only={name: ONLY[name] for name in ("attention_bias", "mlp_bias")},
        neutral=frozenset(("pretraining_tp",)),
    ),
    "mistral": _fields(
        {"num_key_value_heads": 8, "head_dim": None},
        only=_WINDOW,
    ),
    "qwen2": _fields(
        {"num_key_value_heads": 32, "use_sliding_window": False},
        only=_WINDOW | {"layer_types": ONLY["layer_types"]},
        neutral=frozenset(("attention_bias", "max_window_layers")),  # its biases are always there
    ),
    "qwen3": _fields(
        {"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False},
        only=_WINDOW | {name: ONLY[name] for name in ("layer_types", "attention_bias")},
        neutral=frozenset(("max_window_layers",)),
    ),
    "mixtral": _fields(
        {
            "num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-5,
            "num_experts_per_tok": None, "num_local_experts": None, "num_experts": None, **_ROUTER,
        },
        only={"sliding_window": Only(None, (None,)), "router_jitter_noise": ONLY["router_jitter_noise"]},
    ),
    "qwen3_moe": _fields(
        {
            "num_key_value_heads": 4, "use_sliding_window": False, "num_experts_per_tok": None,
            "num_experts": None, "num_local_experts": None, "moe_intermediate_size": None, "norm_topk_prob": False,
            **_ROUTER,
        },
        only=_WINDOW | {name: ONLY[name] for name in ("attention_bias", "mlp_only_layers", "decoder_sparse_step")},
        neutral=frozenset(("max_window_layers",)),
    ),
}  # fmt: skip
"""By `model_type`."""
