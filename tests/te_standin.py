"""A stand-in for `transformer_engine.pytorch` on the CPU: the same names and signatures, and plain torch inside.

What it has of the package: layers with `fp8_meta` and `init_fp8_metadata`, recipes that say their kind, an autocast that
reduces amaxes over a group and updates histories and scales when it ends, and backward that does so for gradients. A
product rounds both sides by the scales of its recipe. Its autograd Functions have no `setup_context`, as there.
It shows how the library calls the package, and nothing about the package itself.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)


# ------------------------------------------------------------------------------------------------------------- recipes
@dataclass
class Recipe:
    def delayed(self):
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self):
        return isinstance(self, Float8CurrentScaling)

    def mxfp8(self):
        return isinstance(self, MXFP8BlockScaling)

    def float8_block_scaling(self):
        return isinstance(self, Float8BlockScaling)

    def nvfp4(self):
        return isinstance(self, NVFP4BlockScaling)

    def custom(self):
        return isinstance(self, CustomRecipe)


@dataclass
class DelayedScaling(Recipe):
    margin: int = 0
    amax_history_len: int = 4
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


class Float8CurrentScaling(Recipe):
    pass


class MXFP8BlockScaling(Recipe):
    pass


class Float8BlockScaling(Recipe):
    pass


class NVFP4BlockScaling(Recipe):
    pass


class CustomRecipe(Recipe):
    pass


class Forgetful(Float8CurrentScaling):
    """Says that it has no state, and keeps some."""


# -------------------------------------------------------------------------------------------------------------- state
class _State:
    """What a layer keeps for one direction under delayed scaling."""

    def __init__(self, recipe, count):
        if recipe.delayed() or isinstance(recipe, Forgetful):
            self.scale = torch.ones(count)
            self.amax_history = torch.zeros(getattr(recipe, "amax_history_len", 1), count)


class Manager:
    """The package's global state: what the running autocast says, and every tensor that it updates."""

    recipe, group, depth, is_first, buffers = None, None, 0, False, {True: [], False: []}

    @classmethod
    def update(cls, *, forward):
        """Reduces the amaxes of all layers, rolls their histories, and makes the next scales."""
        states = [state for recipe, state in cls.buffers[forward] if recipe is cls.recipe or not forward]
        if not states:
            return
        amaxes = torch.cat([state.amax_history[0] for state in states])
        recipe, largest = cls.buffers[forward][0][0], (E4M3 if forward else E5M2)[1]
        if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(cls.group) > 1:
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=cls.group)
        for state, amax in zip(states, amaxes.split([len(s.scale) for s in states]), strict=True):
            state.amax_history[0] = amax
            over = state.amax_history.amax(0)
            scale = largest / over / 2**recipe.margin
            state.scale.copy_(torch.where((over > 0) & over.isfinite(), scale, state.scale))
            state.amax_history.copy_(state.amax_history.roll(-1, 0))
            state.amax_history[0] = 0.0


@contextmanager
def autocast(
    enabled: bool = True, calibrating: bool = False, recipe=None, amax_reduction_group=None, _graph: bool = False
) -> Generator[None]:
    before = Manager.recipe, Manager.group
    Manager.recipe, Manager.group = (recipe if enabled else None), amax_reduction_group
    Manager.depth, Manager.is_first = Manager.depth + 1, True
    try:
        yield
        if Manager.depth == 1 and torch.is_grad_enabled() and recipe.delayed():
            Manager.update(forward=True)
    finally:
        Manager.depth -= 1
        Manager.recipe = before[0]


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe=None, fp8_group=None, _graph: bool = False
):
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


# ------------------------------------------------------------------------------------------------------------ products
def _rounded(x, kind, meta, place, recipe):
    """A tensor in fp8 by its scale, and what delayed scaling notes of it."""
    dtype, largest = kind
    if recipe.delayed():
        meta.amax_history[0][place] = torch.maximum(meta.amax_history[0][place], x.abs().amax())
        scale = meta.scale[place].clone()
    else:
        scale = largest / x.abs().amax().clamp(min=1e-30)
    return (x * scale).clamp(-largest, largest).to(dtype).to(x.dtype) / scale


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer, number):  # no setup_context
        recipe, metas = Manager.recipe, layer.fp8_meta
        x8 = _rounded(x, E4M3, metas["scaling_fwd"], 3 * number, recipe)
        w8 = _rounded(weight, E4M3, metas["scaling_fwd"], 3 * number + 1, recipe)
        ctx.save_for_backward(x8, w8)
        ctx.facts = layer, number, recipe, Manager.is_first
        Manager.is_first = False
        return x8 @ w8.T

    @staticmethod
    def backward(ctx, grad):
        x8, w8 = ctx.saved_tensors
        layer, number, recipe, is_first = ctx.facts
        g8 = _rounded(grad, E5M2, layer.fp8_meta["scaling_bwd"], 2 * number, recipe)
        if is_first and recipe.delayed():
            Manager.update(forward=False)
        return g8 @ w8, g8.flatten(0, -2).T @ x8.flatten(0, -2), None, None


# -------------------------------------------------------------------------------------------------------------- layers
class _Base(nn.Module):
    """As `TransformerEngineBaseModule`."""

    def __init__(self):
        super().__init__()
        self.fp8_meta, self.fp8_initialized, self.tp_size = {}, False, 1
        self.fuse_wgrad_accumulation, self.primary_weights_in_fp8 = False, False

    def init_fp8_metadata(self, num_gemms: int = 1):
        if self.fp8_initialized and self.fp8_meta["recipe"] is Manager.recipe:
            return
        recipe = Manager.recipe
        self.fp8_meta.update(
            recipe=recipe, scaling_fwd=_State(recipe, 3 * num_gemms), scaling_bwd=_State(recipe, 2 * num_gemms)
        )
        if recipe.delayed():
            Manager.buffers[True].append((recipe, self.fp8_meta["scaling_fwd"]))
            Manager.buffers[False].append((recipe, self.fp8_meta["scaling_bwd"]))
        self.fp8_initialized = True

    def product(self, x, weight, number=0, count=1):
        if Manager.recipe is None:
            return x @ weight.T
        self.init_fp8_metadata(count)
        return _Product.apply(x, weight, self, number)


class Linear(_Base):
    def __init__(self, in_features: int, out_features: int, bias: bool = True, params_dtype=None, device="cpu"):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype, device=device)) if bias else None
        nn.init.normal_(self.weight, std=0.2) if device != "meta" else None

    def forward(self, inp, is_first_microbatch=None):
        y = self.product(inp, self.weight)
        return y if self.bias is None else y + self.bias


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, **kwargs):
        super().__init__(in_features, out_features, **kwargs)
        self.layer_norm_weight, self.layer_norm_bias = (
            nn.Parameter(torch.ones(in_features)),
            nn.Parameter(torch.zeros(in_features)),
        )
        self.eps = eps

    def forward(self, inp, is_first_microbatch=None):
        normed = F.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps)
        return super().forward(normed)


class LayerNormMLP(_Base):
    def __init__(self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.layer_norm_weight, self.layer_norm_bias = (
            nn.Parameter(torch.ones(hidden_size)),
            nn.Parameter(torch.zeros(hidden_size)),
        )
        self.fc1_weight = nn.Parameter(torch.randn(ffn_hidden_size, hidden_size) * 0.2)
        self.fc2_weight = nn.Parameter(torch.randn(hidden_size, ffn_hidden_size) * 0.2)
        self.eps = eps

    def forward(self, inp, is_first_microbatch=None):
        x = F.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps)
        return self.product(F.gelu(self.product(x, self.fc1_weight, 0, 2)), self.fc2_weight, 1, 2)


class DotProductAttention(_Base):
    def forward(self, q, k, v, dropout=0.0):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout if self.training else 0.0, is_causal=True)


class GroupedLinear(_Base):
    pass


class TransformerLayer(nn.Module):
    """Its defaults are the package's: dropout of 0.1 after attention's weights and before each residual sum."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
    ):
        super().__init__()
        self.hidden_dropout, self.attention_dropout = hidden_dropout, attention_dropout
        self.qkv = LayerNormLinear(hidden_size, 3 * hidden_size)
        self.core_attention = DotProductAttention()
        self.proj = Linear(hidden_size, hidden_size)
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size)
        self.heads = num_attention_heads

    def forward(self, hidden_states, is_first_microbatch=None):
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in self.qkv(hidden_states).chunk(3, -1))
        x = self.proj(self.core_attention(q, k, v, self.attention_dropout).transpose(1, 2).flatten(2))
        x = hidden_states + F.dropout(x, self.hidden_dropout, self.training)
        return x + F.dropout(self.layernorm_mlp(x), self.hidden_dropout, self.training)


# ------------------------------------------------------------------------------------------------------------- package
def packages(*, names: tuple[str, ...] = ("autocast", "fp8_autocast")) -> dict[str, types.ModuleType]:
    """Modules for `sys.modules` under the names of the package, whose pytorch has some names for its autocast."""
    here = sys.modules[__name__]
    pytorch = types.ModuleType("transformer_engine.pytorch")
    layers = ("Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer", "DotProductAttention", "GroupedLinear")
    for name in (*layers, *names):
        setattr(pytorch, name, getattr(here, name))
    recipe = types.ModuleType("transformer_engine.common.recipe")
    for kind in (DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling, NVFP4BlockScaling):
        setattr(recipe, kind.__name__, kind)
    names_of = {"transformer_engine": types.ModuleType("transformer_engine"), "transformer_engine.pytorch": pytorch}
    return names_of | {
        "transformer_engine.common": types.ModuleType("transformer_engine.common"),
        "transformer_engine.common.recipe": recipe,
    }
