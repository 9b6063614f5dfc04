"""Operations on local tensors in flight: collectives with their transposes, and what models compute over axes."""

from fsharding.ops.attention import attention, plan_ring
from fsharding.ops.collectives import all_gather, all_to_all, all_to_all_rows, ppermute, psum, pvary, reduce_scatter
from fsharding.ops.context_parallel import cut_sequence, document_positions, positions
from fsharding.ops.embedding import embedding
from fsharding.ops.grouped_matmul import grouped_matmul
from fsharding.ops.linear import column_linear, copy_to_tp, reduce_from_tp, row_linear, split_fused
from fsharding.ops.loss import cross_entropy
from fsharding.ops.moe import combine, dispatch, experts_swiglu
from fsharding.ops.norm import rms_norm
from fsharding.ops.rotary import LlamaScaling, YarnScaling, rotary, rotary_frequencies
from fsharding.ops.router import Routing, balance_loss, expert_counts, next_bias, record_load, route, z_loss
from fsharding.ops.scaled_mm import ScaledKernel, scaled_kernel, scaled_matmul

__all__ = [
    "LlamaScaling", "Routing", "ScaledKernel", "YarnScaling", "all_to_all", "all_to_all_rows", "attention",
    "balance_loss", "column_linear", "combine", "cross_entropy", "cut_sequence", "dispatch", "document_positions",
    "embedding", "copy_to_tp", "expert_counts", "experts_swiglu", "all_gather", "grouped_matmul", "reduce_from_tp",
    "next_bias", "plan_ring", "positions", "ppermute", "scaled_matmul", "psum", "rms_norm", "rotary",
    "rotary_frequencies", "route", "row_linear", "scaled_kernel", "reduce_scatter", "split_fused", "record_load",
    "pvary", "z_loss",
]  # fmt: skip
