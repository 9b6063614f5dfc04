"""Operations on local tensors in flight: collectives with their transposes."""

from fsharding.ops.collectives import all_to_all, gather, ppermute, psum, scatter, vary

__all__ = ["all_to_all", "gather", "ppermute", "psum", "scatter", "vary"]
