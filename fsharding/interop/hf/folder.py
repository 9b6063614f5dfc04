"""A Hugging Face directory as it lies on the disk: where its tensors are, and whether they are numbers or codes.

Guarantee: every file that cannot be read is named in one error.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch import Tensor

from fsharding.base.errors import CheckpointError, message
from fsharding.base.untrusted import beside
from fsharding.checkpoint.directory import StrPath, real_path
from fsharding.checkpoint.manifest import is_plain_name
from fsharding.foreign import coded_weights
from fsharding.foreign.coded_weights import Reader
from fsharding.foreign.foreign_weights import Weights, open_file, table_of
from fsharding.foreign.safetensors_layout import INDEX, SINGLE
from fsharding.sharding.boxes import Box
from fsharding.sharding.named_sharding import LeafType

__all__ = ["open_folder"]

_RUNTIME = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors that old versions of transformers stored although they follow from the config."""


def open_folder(path: StrPath) -> Weights:
    """Reads the headers of all safetensors files of a directory."""
    folder = real_path(path)
    rows: list[str] = []
    table = _table(folder, rows)
    opened: dict[str, Weights] = {}
    for name in sorted({*table.values()}) if table is not None else _files(folder, rows):
        try:
            if not is_plain_name(name):
                raise ValueError("is no plain file name")
            result = open_file(beside(folder, name))
            if result.format != "safetensors":
                raise ValueError("it is no safetensors file")
            opened[name] = result
        except FileNotFoundError:
            rows.append(f"{name} is missing")
        except (OSError, ValueError) as error:
            rows.append(f"{name}: {getattr(error, 'strerror', None) or error}")
    leaves = dict[str, LeafType]()
    files = dict[str, Weights]()
    unread = dict[str, str]()
    for name, weights in opened.items():
        own = [tensor for tensor in (*weights.leaves, *weights.unread) if table is None or table.get(tensor) == name]
        unread |= {tensor: weights.unread[tensor] for tensor in own if tensor in weights.unread}
        kept = [tensor for tensor in own if tensor not in unread and not _RUNTIME.search(tensor)]
        leaves |= {tensor: weights.leaves[tensor] for tensor in kept}
        files |= dict.fromkeys(own, weights)
    lost = [(tensor, name) for tensor, name in (table or {}).items() if name in opened and tensor not in files]
    rows += [f"{tensor} is not in {name}, where the index has it" for tensor, name in lost]

    def reader(name: str, box: Box, out: Tensor) -> None:
        files[name].read(name, box, out)

    if rows:
        mend = "Get the directory again, as save_pretrained(safe_serialization=True) of transformers makes it."
        raise CheckpointError(message(f"cannot read {folder}.", rows, mend))
    numbers, read = _as_numbers(folder, leaves, reader)
    return Weights(folder, "safetensors", numbers, (), read, unread)


def _as_numbers(folder: Path, leaves: dict[str, LeafType], reader: Reader) -> tuple[dict[str, LeafType], Reader]:
    """Tensors with codes as numbers, where the directory has codes."""
    try:
        blocks = coded_weights.blocks_in(folder)
        return (leaves, reader) if blocks is None else coded_weights.decoded(leaves, reader, blocks)
    except ValueError as error:
        rows = str(error).splitlines()
        raise CheckpointError(message(f"cannot read {folder}.", rows, coded_weights.MEND)) from error


def _table(folder: Path, rows: list[str]) -> dict[str, str] | None:
    """The file of each tensor, by the index; None where there is no index."""
    if not os.path.lexists(folder / INDEX):
        return None
    try:
        table = table_of(folder / INDEX)
        if not all(isinstance(name, str) for name in table.values()):
            raise ValueError("a tensor of it is in no file")
        if os.path.lexists(folder / SINGLE) and (other := sorted({*table.values()} - {SINGLE})):
            # transformers reads the single file and never looks at the index, whichever of the two is newer.
            what = f"lists {other[0]}, and {SINGLE} is there too: two saves in one directory"
            rows.append(f"{INDEX} {what}; remove {SINGLE}, or {INDEX} and its files")
    except (OSError, ValueError) as error:
        rows.append(f"{INDEX}: {getattr(error, 'strerror', None) or error}")
        return {}
    return table


def _files(folder: Path, rows: list[str]) -> list[str]:
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    result = [SINGLE] if SINGLE in names else [name for name in names if name.endswith(".safetensors")]
    if len(result) != 1:
        what = "there is no such directory" if not folder.is_dir() else f"it has {len(result)} .safetensors files"
        rows.append(what if not folder.is_dir() else f"{what} and no {INDEX}")
        if result and all(name.startswith("shard-") for name in result):
            rows.append("they are shards of torch's HuggingFaceStorageWriter, which fs.foreign.load_weights reads")
    return result[:1]
