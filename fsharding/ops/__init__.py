"""Operations on local tensors in flight: collectives with their transposes, and attention over a cut sequence."""

from fsharding.ops.attention import attention, plan_ring
from fsharding.ops.collectives import all_to_all, gather, ppermute, psum, scatter, vary
from fsharding.ops.sequence import cut_sequence, positions, rotary

__all__ = [
    "all_to_all",
    "attention",
    "cut_sequence",
    "gather",
    "plan_ring",
    "positions",
    "ppermute",
    "psum",
    "rotary",
    "scatter",
    "vary",
]
