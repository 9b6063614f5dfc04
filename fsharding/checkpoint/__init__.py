"""Checkpoints: a directory that loads into any layout, or is refused by name; see `save` and `load`."""

from fsharding.checkpoint.loading import load
from fsharding.checkpoint.manifest import Manifest, SavedFile, SavedLeaf
from fsharding.checkpoint.saving import save
from fsharding.checkpoint.store import latest, metadata

__all__ = ["Manifest", "SavedFile", "SavedLeaf", "latest", "load", "metadata", "save"]
