"""Operations on local tensors in flight: collectives with their transposes, and what models compute over axes."""

from fsharding.ops.attention import attention, plan_ring
from fsharding.ops.collectives import all_to_all, all_to_all_rows, gather, ppermute, psum, scatter, vary
from fsharding.ops.context_parallel import cut_sequence, document_positions, positions
from fsharding.ops.embedding import embedding
from fsharding.ops.grouped_matmul import grouped_matmul
from fsharding.ops.linear import column_linear, enter, leave, row_linear, split_parts
from fsharding.ops.loss import cross_entropy
from fsharding.ops.matmul import product
from fsharding.ops.moe import combine, dispatch, experts_swiglu
from fsharding.ops.norm import rms_norm
from fsharding.ops.rotary import LlamaScaling, YarnScaling, rotary, rotary_frequencies
from fsharding.ops.router import Routing, balance_loss, expert_counts, next_bias, route, tell_load, z_loss
from fsharding.ops.scaled_mm import ScaledKernel, scaled_kernel

__all__ = [
    "LlamaScaling",
    "Routing",
    "ScaledKernel",
    "YarnScaling",
    "all_to_all",
    "all_to_all_rows",
    "attention",
    "balance_loss",
    "column_linear",
    "combine",
    "cross_entropy",
    "cut_sequence",
    "dispatch",
    "document_positions",
    "embedding",
    "enter",
    "expert_counts",
    "experts_swiglu",
    "gather",
    "grouped_matmul",
    "leave",
    "next_bias",
    "plan_ring",
    "positions",
    "ppermute",
    "product",
    "psum",
    "rms_norm",
    "rotary",
    "rotary_frequencies",
    "route",
    "row_linear",
    "scaled_kernel",
    "scatter",
    "split_parts",
    "tell_load",
    "vary",
    "z_loss",
]
