"""Tables of Hugging Face model families: units, dim names, roles of layers, and parts.

Guarantee: every parameter of the family's causal language model has names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from fsharding import ops
from fsharding.base.tree import Tree
from fsharding.interop.hf.naming import EXPERTS, Joined, Name
from fsharding.interop.module.layers import Role, Roles
from fsharding.interop.module.structure import NameTable
from fsharding.mesh.device_mesh import axis_size
from fsharding.sharding.partition_spec import DimName

__all__ = ["FAMILIES", "Family", "Parts", "family_of"]


class Parts(NamedTuple):
    """Functions that together compute a module's forward and loss, for `fs.model_from_module`.

    Attributes:
        embed: Function `embed(module, batch) -> x`; x is any tree of tensors.
        block: Function `block(module, layer, x) -> x`.
        head: Function `head(module, x, batch) -> (sum of losses, token count)`.
        cp: Whether the functions accept shards of sequences over `cp`: they must take positions from `ops.positions`,
            and mix tokens only in `F.scaled_dot_product_attention`, which is replaced by `ops.attention`.

    Example:
        >>> fs.hf.families.FAMILIES["llama"].parts.cp
        True
    """

    embed: Callable[[Any, Tree], Any]
    block: Callable[[Any, Any, Any], Any]
    head: Callable[[Any, Any, Tree], tuple[Tensor, Tensor]]
    cp: bool = False


@dataclass(frozen=True)
class Family:
    """Default arguments of `fs.functionalize` and `fs.model_from_module` for a family of modules.

    Attributes:
        units: Units, as in `fs.functionalize`.
        names: Dim names, as in `fs.functionalize`.
        roles: Roles over `tp`, as in `fs.functionalize`.
        heads: Attributes of the config that must be multiples of `tp`.
        parts: Parts for `fs.model_from_module`, with full causal attention by torch's kernel; None if unsupported.
        files: Names of leaves that published files store in different tensors than the module.
        reset: Name of the module's method that initializes one submodule. Initialization of the model as a whole, such
            as GPT-2's scaled output projections, isn't done for meta parameters.

    Example:
        >>> fs.hf.families.FAMILIES["llama"].units
        ('model.embed_tokens', 'model.layers.*', ('model.norm', 'lm_head'))
    """

    units: tuple[str | tuple[str, ...], ...]
    names: NameTable
    roles: Roles = field(default_factory=dict)
    heads: tuple[str, ...] = ()
    parts: Parts | None = None
    files: Mapping[str, Name] = field(default_factory=dict[str, Name])
    reset: str | None = "_init_weights"

    def heads_of(self, module: nn.Module) -> Mapping[str, int]:
        """Return the numbers that must be multiples of `tp`, by name."""
        config = getattr(module, "config", None)
        return {name: int(getattr(config, name)) for name in self.heads}

    def objections(self, module: nn.Module) -> list[str]:
        """List why the parts would compute something different from the module's forward, one row each."""
        config: Any = getattr(module, "config", None)
        kind = getattr(config, "_attn_implementation", None)
        kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
        sliding = getattr(config, "sliding_window", None) is not None
        rows = [f"attention is {kind!r}, not 'sdpa'"] if kind != "sdpa" else []
        rows += [f"layers have {', '.join(sorted(kinds))}"] if kinds else []
        rows += [f"sliding_window is {config.sliding_window}"] if sliding else []
        by_layer = "scale_attn_by_inverse_layer_idx"
        if getattr(config, by_layer, False):
            rows.append(f"{by_layer} is True: every layer scales its attention by a different number")
        return rows


def _loss(logits: Tensor, batch: Tree) -> tuple[Tensor, Tensor]:
    targets = batch["targets"]
    return ops.cross_entropy(logits, targets).sum(), (targets != -100).sum()


def _positions(x: Tensor) -> Tensor:
    """Return the positions of this rank's tokens, dim 1 of x: int64[T]."""
    return ops.positions(x.shape[1] * axis_size("cp"), device=x.device)


def _llama_block(module: Any, layer: Any, x_BTD: Tensor) -> Tensor:
    at = _positions(x_BTD)[None]
    turns = module.model.rotary_emb(x_BTD, at)
    return layer(x_BTD, attention_mask=None, position_ids=at, position_embeddings=turns)


def _gpt2_embed(module: Any, batch: Tree) -> Tensor:
    tokens = batch["tokens"]
    model = module.transformer
    return model.drop(model.wte(tokens) + model.wpe(_positions(tokens)))


def _linear(path: str, out: DimName, inner: DimName) -> dict[str, tuple[DimName, ...]]:
    """Name the dims of the weight and the optional bias of an `nn.Linear`."""
    return {f"{path}.weight": (out, inner), f"{path}.bias": (out,)}


def _expert_files(kind: str) -> dict[str, Name]:
    """Name the tensors of experts, which are stacked in the module and separate in files."""
    router, gate, up, down = EXPERTS[kind]
    leaf = "model.layers.mlp.experts."
    both = Joined((gate, up), dim=-2)
    return {"model.layers.mlp.gate.weight": router, f"{leaf}gate_up_proj": both, f"{leaf}down_proj": down}


_VOCAB: dict[str, Role] = {"model.embed_tokens": "vocab", "lm_head": "logits"}
_QKV: dict[str, Role] = {f"*.self_attn.{x}_proj": "column" for x in "qkv"}
_LLAMA = Family(
    units=("model.embed_tokens", "model.layers.*", ("model.norm", "lm_head")),
    names={
        "model.embed_tokens.weight": ("vocab", "embed"),
        **_linear("lm_head", "vocab", "embed"),
        **_linear("*.q_proj", "heads", "embed"),
        **_linear("*.k_proj", "kv_heads", "embed"),
        **_linear("*.v_proj", "kv_heads", "embed"),
        **_linear("*.o_proj", "embed", "heads"),
        **_linear("*.mlp.gate_proj", "mlp", "embed"),
        **_linear("*.mlp.up_proj", "mlp", "embed"),
        **_linear("*.mlp.down_proj", "embed", "mlp"),
        "*norm.weight": (None,),
    },
    roles={
        **_VOCAB,
        **_QKV,
        "*.self_attn.o_proj": "row",
        "*.self_attn.q_norm": "inside",
        "*.self_attn.k_norm": "inside",
        "*.mlp.gate_proj": "column",
        "*.mlp.up_proj": "column",
        "*.mlp.down_proj": "row",
    },
    heads=("num_attention_heads", "num_key_value_heads"),
    parts=Parts(
        lambda module, batch: module.model.embed_tokens(batch["tokens"]),
        _llama_block,
        lambda module, x_BTD, batch: _loss(module.lm_head(module.model.norm(x_BTD)), batch),
        cp=True,
    ),
)

# The embedding, which is also the head, has a custom forward that scales, so it can't have a role over tp.
_GEMMA = replace(
    _LLAMA,
    names={**_LLAMA.names, **{f"{name}.weight": (None, "embed") for name in _VOCAB}},
    roles={name: role for name, role in _LLAMA.roles.items() if name not in _VOCAB},
)

# Queries, keys and values are one layer, and so are gate and up. No role splits a fused layer, so every rank of tp
# computes it in full.
_PHI3 = replace(
    _LLAMA,
    names={
        "model.embed_tokens.weight": ("vocab", "embed"),
        "lm_head.weight": ("vocab", "embed"),
        "*.qkv_proj.weight": (None, "embed"),
        "*.o_proj.weight": ("embed", None),
        "*.mlp.gate_up_proj.weight": (None, "embed"),
        "*.mlp.down_proj.weight": ("embed", None),
        "*norm.weight": (None,),
    },
    roles=_VOCAB,
    heads=(),
)

_PHI = Family(
    units=("model.embed_tokens", "model.layers.*", ("model.final_layernorm", "lm_head")),
    names={
        **_LLAMA.names,
        **_linear("*.self_attn.dense", "embed", "heads"),
        **_linear("*.mlp.fc1", "mlp", "embed"),
        **_linear("*.mlp.fc2", "embed", "mlp"),
        "*layernorm.weight": (None,),
        "*layernorm.bias": (None,),
    },
    roles={**_VOCAB, **_QKV, "*.self_attn.dense": "row", "*.mlp.fc1": "column", "*.mlp.fc2": "row"},
    heads=_LLAMA.heads,
)

_QWEN_MOE = replace(
    _LLAMA,
    names={
        **_LLAMA.names,
        "*.mlp.gate.weight": (None, "embed"),
        "*.experts.gate_up_proj": (None, None, "embed"),
        "*.experts.down_proj": (None, "embed", None),
    },
    files=_expert_files("qwen3_moe"),
)

_MIXTRAL = replace(_QWEN_MOE, files=_expert_files("mixtral"))

_GPT2 = Family(
    units=(("transformer.wte", "transformer.wpe"), "transformer.h.*", ("transformer.ln_f", "lm_head")),
    names={
        "transformer.wte.weight": ("vocab", "embed"),
        "transformer.wpe.weight": (None, "embed"),
        "lm_head.weight": ("vocab", "embed"),
        "*.attn.c_attn.weight": ("embed", "heads"),
        "*.attn.c_attn.bias": ("heads",),
        "*.attn.c_proj.weight": ("heads", "embed"),
        "*.mlp.c_fc.weight": ("embed", "mlp"),
        "*.mlp.c_fc.bias": ("mlp",),
        "*.mlp.c_proj.weight": ("mlp", "embed"),
        "*.c_proj.bias": ("embed",),
        "*ln_?.weight": (None,),
        "*ln_?.bias": (None,),
    },
    parts=Parts(
        _gpt2_embed,
        lambda module, layer, x_BTD: layer(x_BTD, attention_mask=None),
        lambda module, x_BTD, batch: _loss(module.lm_head(module.transformer.ln_f(x_BTD)), batch),
        cp=True,
    ),
)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN_MOE,
    "gpt2": _GPT2,
    "mistral": _LLAMA,
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, parts=None),
    "phi": _PHI,
    "phi3": _PHI3,
}
"""Families by `config.model_type`."""


def family_of(module: nn.Module) -> Family | None:
    """Look up the family of a module by the `model_type` of its config.

    Args:
        module: Module, usually from transformers.

    Returns:
        The family; None if the module has no config or an unknown `model_type`.

    Example:
        >>> fs.hf.families.family_of(torch.nn.Linear(2, 2)) is None
        True
    """
    return FAMILIES.get(getattr(getattr(module, "config", None), "model_type", ""))
