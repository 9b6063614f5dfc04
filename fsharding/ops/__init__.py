"""Operations on local tensors in flight: collectives with their transposes, and experts."""

from fsharding.ops.collectives import all_to_all, all_to_all_rows, gather, ppermute, psum, scatter, vary
from fsharding.ops.grouped import grouped_matmul
from fsharding.ops.moe import combine, dispatch, experts_swiglu
from fsharding.ops.routing import Routing, balance_loss, expert_counts, next_bias, route, z_loss

__all__ = [
    "Routing", "all_to_all", "all_to_all_rows", "balance_loss", "combine", "dispatch", "expert_counts",
    "experts_swiglu", "gather", "grouped_matmul", "next_bias", "ppermute", "psum", "route", "scatter", "vary", "z_loss",
]  # fmt: skip
