"""Operations on local tensors in flight: collectives with their transposes, and what models compute over model axes."""

from fsharding.ops.collectives import all_to_all, gather, ppermute, psum, scatter, vary
from fsharding.ops.embedding import embedding
from fsharding.ops.linear import column_linear, enter, leave, row_linear
from fsharding.ops.loss import cross_entropy
from fsharding.ops.norm import rms_norm

__all__ = [
    "all_to_all",
    "column_linear",
    "cross_entropy",
    "embedding",
    "enter",
    "gather",
    "leave",
    "ppermute",
    "psum",
    "rms_norm",
    "row_linear",
    "scatter",
    "vary",
]
