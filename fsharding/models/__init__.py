"""Models as tuples of pure functions."""

from fsharding.models.base import Model
from fsharding.models.decoder import DecoderConfig, Stack, decoder
from fsharding.models.dense import Dense
from fsharding.models.experts import Experts
from fsharding.models.grouped import Grouped
from fsharding.models.latent import Latent
from fsharding.models.parts import Stream

__all__ = ["DecoderConfig", "Dense", "Experts", "Grouped", "Latent", "Model", "Stack", "Stream", "decoder"]
