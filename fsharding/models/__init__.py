"""Models as tuples of pure functions."""

from fsharding.models.base import Model
from fsharding.models.decoder import DecoderConfig, decoder
from fsharding.models.experts import Experts

__all__ = ["DecoderConfig", "Experts", "Model", "decoder"]
