"""Hugging Face: convert `config.json` to a decoder config, load safetensors into any layout, and save them."""

from fsharding.interop.hf.config_tables import config_json, config_of
from fsharding.interop.hf.loading import load
from fsharding.interop.hf.naming import Joined, Name, Names, Rows, Section, Transposed, names_of
from fsharding.interop.hf.saving import Saved, save
from fsharding.interop.module import hf_tables as families

__all__ = [
    "Joined", "Name", "Names", "Rows", "Saved", "Section", "Transposed", "config_json", "config_of", "families", "load",
    "names_of", "save",
]  # fmt: skip
