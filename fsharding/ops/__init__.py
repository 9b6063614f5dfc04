"""Operations on local tensors in flight: collectives with their transposes, and what models compute over model axes."""

from fsharding.ops.attention import attention, plan_ring
from fsharding.ops.collectives import all_to_all, gather, ppermute, psum, scatter, vary
from fsharding.ops.embedding import embedding
from fsharding.ops.linear import column_linear, enter, leave, row_linear
from fsharding.ops.loss import cross_entropy
from fsharding.ops.norm import rms_norm
from fsharding.ops.rotary import LlamaScaling, YarnScaling, rotary, rotary_frequencies
from fsharding.ops.sequence import cut_sequence, document_positions, positions

__all__ = [
    "LlamaScaling",
    "YarnScaling",
    "all_to_all",
    "attention",
    "column_linear",
    "cross_entropy",
    "cut_sequence",
    "document_positions",
    "embedding",
    "enter",
    "gather",
    "leave",
    "plan_ring",
    "positions",
    "ppermute",
    "psum",
    "rms_norm",
    "rotary",
    "rotary_frequencies",
    "row_linear",
    "scatter",
    "vary",
]
