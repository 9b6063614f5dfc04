"""Models as tuples of pure functions."""

from fsharding.models import presets
from fsharding.models.block_parts import Stream
from fsharding.models.decoder import DecoderConfig, Stack, decoder
from fsharding.models.generate import generate
from fsharding.models.grouped_query import GQA
from fsharding.models.latent_attention import MLA
from fsharding.models.mlp import Dense
from fsharding.models.model import Model
from fsharding.models.moe import Experts
from fsharding.models.stacks import scan_stacks

__all__ = [
    "DecoderConfig", "Dense", "Experts", "GQA", "MLA", "Model", "Stack", "Stream", "decoder", "generate", "presets",
    "scan_stacks",
]  # fmt: skip
