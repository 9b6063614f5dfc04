"""Import and export weights as torch files, safetensors, DCP or FSDP2 checkpoints.

Guarantee: every leaf is found exactly once, with its shape, or the call raises an error.
"""

from fsharding.foreign.exporting import Exported, export
from fsharding.foreign.foreign_weights import Weights, open_weights
from fsharding.foreign.importing import load_weights
from fsharding.foreign.name_map import Names, Rows, Transposed

__all__ = ["Exported", "Names", "Rows", "Transposed", "Weights", "export", "load_weights", "open_weights"]
