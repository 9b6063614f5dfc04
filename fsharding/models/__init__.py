"""Models as tuples of pure functions."""

from fsharding.models.base import Model
from fsharding.models.decoder import DecoderConfig, decoder

__all__ = ["DecoderConfig", "Model", "decoder"]
