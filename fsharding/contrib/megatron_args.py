"""Arguments of a Megatron run that change what its model computes, and the decoder config with which they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsharding.models.decoder import DecoderConfig
from fsharding.models.moe import Experts
from fsharding.ops.rotary import LlamaScaling

__all__ = ["ALIASES", "arguments_of", "contradictions", "unsayable"]

ALIASES = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
}
"""Newer names of arguments. A save writes both names."""


def contradictions(args: Mapping[str, Any], config: DecoderConfig, *, training: bool) -> list[str]:
    """Compare arguments with a config; return one row per difference."""
    wanted = {**_sizes(config), **_parts(config), **(_DROPOUTS if training else {})}
    wanted |= {new: wanted[old] for new, old in ALIASES.items()}
    wanted |= _FUNCTIONS
    said = dict(args)
    if said.get("group_query_attention") is False and said.get("num_attention_heads") is not None:
        # Megatron ignores num_query_groups then, and every head has a key of its own.
        said["num_query_groups"] = said["num_attention_heads"]
        del said["group_query_attention"]
    if not said.get("use_rope_scaling"):
        said.pop("rope_scaling_factor", None)
    if said.get("gated_linear_unit") is None:
        said.pop("activation_func", None)
    rows: list[str] = []
    for name, accepted in wanted.items():
        if name not in said or (said[name] is None and ALIASES.get(name, name) in _sizes(config)):
            continue
        there = list(said[name]) if type(said[name]) is tuple else said[name]
        several = there if name == "moe_router_load_balancing_type" and isinstance(there, list) else [there]
        if not all(_is_among(value, accepted) for value in several):
            rows.append(f"{name} is {said[name]!r} there, {accepted[0]!r} in the config")
    return rows


def _is_among(value: Any, accepted: Sequence[Any]) -> bool:
    """Whether a value is accepted; a flag is not taken for the number that it equals in Python."""
    return any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in accepted)


def arguments_of(config: DecoderConfig) -> dict[str, Any]:
    """The arguments with which Megatron computes what the config computes."""
    wanted = {**_sizes(config), **_parts(config), **_DROPOUTS}
    result = {name: accepted[0] for name, accepted in wanted.items()}
    return result | {new: result[old] for new, old in ALIASES.items()}


def unsayable(config: DecoderConfig) -> list[str]:
    """Fields of a config that no argument of Megatron stands for, one row each."""
    rows: list[str] = []
    if config.rope_scaling is not None and not _is_fixed(config.rope_scaling):
        rows.append(f"rope_scaling is {config.rope_scaling}: Megatron has LlamaScaling(factor, 8192, 1.0, 4.0) alone")
    experts = config.experts
    if experts is not None and experts.groups > 1 and not _same_groups(experts):
        rows.append("groups of experts are ranked by the sum of another number of scores in Megatron")
    if experts is not None and not _has_normalization(experts):
        rows.append(f"normalize is {experts.normalize} with {experts.score!r} scores of {experts.active} experts")
    if config.rope_base != int(config.rope_base):
        rows.append(f"rope_base is {config.rope_base}: rotary_base is a whole number")
    return rows


def _sizes(c: DecoderConfig) -> dict[str, tuple[Any, ...]]:
    """Accepted values by name, the one to write first."""
    result: dict[str, tuple[Any, ...]] = {
        "num_layers": (c.layers,),
        "hidden_size": (c.dim,),
        "num_attention_heads": (c.heads,),
        "num_query_groups": (c.kv_heads,),
        "kv_channels": (c.head_dim,),
        "rotary_base": (int(c.rope_base) if c.rope_base == int(c.rope_base) else c.rope_base,),
        "norm_epsilon": (c.eps,),
    }
    if c.experts is None:
        return result | {"ffn_hidden_size": (c.intermediate_size,)}
    return result | {"moe_ffn_hidden_size": (c.experts.intermediate_size,), "moe_router_topk": (c.experts.active,)}


def _parts(c: DecoderConfig) -> dict[str, tuple[Any, ...]]:
    """Accepted values of arguments that choose parts of the model, of which most are not in a decoder."""
    scaling = c.rope_scaling
    off = (False, None)
    none = (None,)
    result: dict[str, tuple[Any, ...]] = {
        # positions
        "position_embedding_type": ("rope",) if scaling is None or _is_fixed(scaling) else (scaling,),
        "rotary_percent": (1.0,),
        "rotary_interleaved": off,
        "rotary_seq_len_interpolation_factor": (None, 1),
        "use_rope_scaling": off if scaling is None else (True,) if _is_fixed(scaling) else (scaling,),
        "no_rope_freq": (None, [0] * c.layers),
        "mrope_section": none,
        # attention
        "group_query_attention": (c.kv_heads != c.heads, True),
        "add_qkv_bias": (True,) if c.bias else off,
        "qk_layernorm": (True,) if c.qk_norm else off,
        "qk_l2_norm": off,
        "window_size": (None, [-1, -1], [-1, 0]),
        "softmax_type": ("vanilla",),
        "softmax_scale": none,
        "attention_output_gate": off,
        "multi_latent_attention": off,
        "experimental_attention_variant": none,
        "linear_attention_freq": none,
        # norms and residuals
        "normalization": ("RMSNorm",),
        "apply_layernorm_1p": off,
        "apply_residual_connection_post_layernorm": off,
        # feed-forward part
        "swiglu": (True,),
        "squared_relu": off,
        "quick_geglu": off,
        "openai_gelu": off,
        "glu_linear_offset": (0.0,),
        "activation_func_clamp_value": none,
        "add_bias_linear": off,
        # the model
        "untie_embeddings_and_output_weights": (not c.tied,),
        "num_experts": none if c.experts is None else (c.experts.count,),
        "mtp_num_layers": (None, 0),
        "use_mup": off,
        "spec": (None, ["local"]),
        "heterogeneous_block_specs": off,
        "heterogeneous_layers_config_path": none,
        "heterogeneous_layers_config_encoded_json": none,
        "hybrid_layer_pattern": none,
        "hybrid_override_pattern": none,
        "is_hybrid_model": off,
    }
    if scaling is not None:
        result["rope_scaling_factor"] = (getattr(scaling, "factor", None),)
    return result if c.experts is None else result | _mixture(c.experts, c.layers)


def _mixture(e: Experts, layers: int) -> dict[str, tuple[Any, ...]]:
    """Accepted values of a mixture of experts."""
    grouped = e.groups > 1
    off = (False, None)
    none = (None,)
    result: dict[str, tuple[Any, ...]] = {
        "moe_layer_freq": (1, [1] * layers),
        "moe_router_score_function": (e.score,),
        # "sinkhorn" routes by its own algorithm; the others add a loss.
        "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        "moe_router_pre_softmax": (not e.normalize,) if e.score == "softmax" else (False, True, None),
        "moe_router_topk_scaling_factor": (e.scale,) if e.scale != 1 else (None, 1.0),
        "moe_router_num_groups": (e.groups,) if grouped else (None, 1),
        "moe_router_group_topk": (e.kept_groups,) if grouped else (None, 0, 1),
        "moe_router_topk_limited_devices": none,
        "moe_router_enable_expert_bias": off,
        "moe_router_force_load_balancing": off,
        "moe_router_force_biased": none,
        "moe_shared_expert_intermediate_size": (None, 0),
        "moe_expert_capacity_factor": none,
        "moe_expert_rank_capacity_factor": none,
        "moe_input_jitter_eps": (None, 0.0),
        "moe_apply_probs_on_input": off,
        "moe_latent_size": none,
        "moe_mlp_glu_interleave_size": none,
    }
    if grouped and not _same_groups(e):
        result["moe_router_num_groups"] = (e,)
    if not _has_normalization(e):
        result["moe_router_score_function"] = (e,)
    return result


_DROPOUTS: dict[str, tuple[Any, ...]] = {"hidden_dropout": (0.0,), "attention_dropout": (0.0,)}
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "gated_linear_unit": (True,),
    "activation_func": ("torch.nn.functional.silu",),
}
"""Fields of `TransformerConfig` that arguments spell differently; a save does not write them."""


def _is_fixed(scaling: Any) -> bool:
    """Whether a scaling is the only one that Megatron has, of which it chooses the factor."""
    return isinstance(scaling, LlamaScaling) and scaling == LlamaScaling(scaling.factor, 8192, 1.0, 4.0)


def _same_groups(e: Experts) -> bool:
    """Whether both rank a group by its two best scores, and by scores rather than logits."""
    return e.active // e.kept_groups == 2 and (e.score == "sigmoid" or not e.normalize)


def _has_normalization(e: Experts) -> bool:
    """Whether Megatron divides by the sum where the config does: sigmoids always, but for a single expert."""
    return e.score == "softmax" or e.normalize == (e.active > 1)
