"""Checkpoints: a directory that loads into any layout, or is refused by name; see `save` and `load`.

`open_weights`, `load_weights` and `export` exchange weights with other programs.
`inspect` and `reshard_checkpoint` work on a checkpoint without ranks. The names for other programs' weights are
registered, and imported when they are first used: they are built on this package.
"""

from typing import TYPE_CHECKING, Any

from fsharding.checkpoint.background import PendingSave
from fsharding.checkpoint.checkpointer import Checkpointer
from fsharding.checkpoint.directory import latest, metadata
from fsharding.checkpoint.inspecting import Inspection, inspect
from fsharding.checkpoint.loading import load, load_leaves
from fsharding.checkpoint.manifest import Manifest, SavedFile, SavedLeaf
from fsharding.checkpoint.offline_reshard import reshard_checkpoint
from fsharding.checkpoint.saving import save, save_async
from fsharding.checkpoint.serialized_layout import layout_of
from fsharding.registry import find, names_of

if TYPE_CHECKING:
    from fsharding.checkpoint.exporting import Exported, export
    from fsharding.checkpoint.foreign_weights import Weights, open_weights
    from fsharding.checkpoint.importing import load_weights
    from fsharding.checkpoint.name_map import Names, Rows, Transposed

__all__ = [
    "Checkpointer",
    "Exported",
    "Inspection",
    "Manifest",
    "Names",
    "PendingSave",
    "Rows",
    "SavedFile",
    "SavedLeaf",
    "Transposed",
    "Weights",
    "export",
    "inspect",
    "latest",
    "layout_of",
    "load",
    "load_leaves",
    "load_weights",
    "metadata",
    "open_weights",
    "reshard_checkpoint",
    "save",
    "save_async",
]

if not TYPE_CHECKING:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> Any:
        if name not in names_of("checkpoint"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, find("checkpoint", name))
