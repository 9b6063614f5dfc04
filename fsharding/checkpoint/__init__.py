"""Checkpoints: a directory that loads into any layout, or is refused by name; see `save` and `load`."""

from fsharding.checkpoint.background import PendingSave
from fsharding.checkpoint.checkpointer import Checkpointer
from fsharding.checkpoint.directory import latest, metadata
from fsharding.checkpoint.inspecting import Inspection, inspect
from fsharding.checkpoint.loading import load, load_leaves
from fsharding.checkpoint.manifest import Manifest, SavedFile, SavedLeaf
from fsharding.checkpoint.offline_reshard import reshard_checkpoint
from fsharding.checkpoint.saving import save, save_async
from fsharding.checkpoint.serialized_layout import layout_of

__all__ = [
    "Checkpointer", "Inspection", "Manifest", "PendingSave", "SavedFile", "SavedLeaf", "inspect", "latest", "layout_of",
    "load", "load_leaves", "metadata", "reshard_checkpoint", "save", "save_async",
]  # fmt: skip
