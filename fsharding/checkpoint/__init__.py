"""Checkpoints: a directory that loads into any layout, or is refused by name; see `save` and `load`."""

from fsharding.checkpoint.background import PendingSave
from fsharding.checkpoint.checkpointer import Checkpointer
from fsharding.checkpoint.layouts import layout_of
from fsharding.checkpoint.loading import load, load_leaves
from fsharding.checkpoint.manifest import Manifest, SavedFile, SavedLeaf
from fsharding.checkpoint.saving import save, save_async
from fsharding.checkpoint.store import latest, metadata

__all__ = [
    "Checkpointer",
    "Manifest",
    "PendingSave",
    "SavedFile",
    "SavedLeaf",
    "latest",
    "layout_of",
    "load",
    "load_leaves",
    "metadata",
    "save",
    "save_async",
]
