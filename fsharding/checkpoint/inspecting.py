"""`inspect`: what a checkpoint holds and whether it is whole, as a value that prints as text and as JSON.

In: a directory. Out: every leaf with its type and spec, the layout, every file with its size, and what is damaged.
Sizes and checksums of all files are compared with the manifest; no tensor is read.
Law: `damaged` is empty exactly when `load` would take the files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsharding.checkpoint import store
from fsharding.checkpoint.manifest import MANIFEST, Manifest, SavedLeaf
from fsharding.checkpoint.source import damage
from fsharding.checkpoint.store import StrPath
from fsharding.errors import CheckpointError

__all__ = ["Inspection", "inspect"]


@dataclass(frozen=True)
class Inspection:
    """A checkpoint seen from outside.

    Attributes:
        path: where it is.
        manifest: what it says of itself; None where that is damaged.
        damaged: what is wrong, one row a file; empty when all is well.
    """

    path: Path
    manifest: Manifest | None
    damaged: tuple[str, ...]

    @property
    def leaf_bytes(self) -> int:
        """Bytes of all leaves."""
        return sum(map(_bytes, self.manifest.tree.values())) if self.manifest else 0

    @property
    def file_bytes(self) -> int:
        """Bytes of all files that the manifest names."""
        return sum(file.bytes for file in self.manifest.files.values()) if self.manifest else 0

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        manifest = self.manifest
        found: dict[str, Any] = {"path": str(self.path), "ok": not self.damaged, "damaged": [*self.damaged]}
        if manifest is None:
            return found
        return found | {
            "step": manifest.step,
            "layout": manifest.layout,
            "leaves": {
                path: {"shape": [*leaf.shape], "dtype": leaf.dtype, "spec": leaf.spec, "bytes": _bytes(leaf)}
                for path, leaf in manifest.tree.items()
            },
            "files": {name: file.bytes for name, file in manifest.files.items()},
            "leaf_bytes": self.leaf_bytes,
            "file_bytes": self.file_bytes,
            "extra": manifest.extra,
            "torch": manifest.torch,
            "fsharding": manifest.fsharding,
            "version": manifest.version,
        }

    def __str__(self) -> str:
        lines = [f"{self.path}: {'damaged' if self.damaged else 'whole'}"]
        lines += [f"  damaged: {row}" for row in self.damaged]
        if self.manifest is None:
            return "\n".join(lines)
        manifest, how = self.manifest, self.manifest.layout
        mesh = ", ".join(f"{axis}={size}" for axis, size in how.get("mesh", {}).items())
        lines.append(f"step {manifest.step}, saved by fsharding {manifest.fsharding} on torch {manifest.torch}")
        lines.append(f"mesh {mesh} ({how.get('ranks')} ranks), strategy {how.get('strategy')}")
        leaves = [
            (path, str(leaf), leaf.spec or "", f"{_bytes(leaf):,}") for path, leaf in sorted(manifest.tree.items())
        ]
        lines += ["", *_table([("leaf", "type", "cut", "bytes"), *leaves])]
        files = [(name, f"{file.bytes:,}") for name, file in manifest.files.items()]
        lines += ["", *_table([("file", "bytes"), *files]), ""]
        lines.append(
            f"{len(manifest.tree)} leaves of {self.leaf_bytes:,} bytes in {len(manifest.files)} files of "
            f"{self.file_bytes:,} bytes"
        )
        return "\n".join(lines)


def inspect(path: StrPath) -> Inspection:
    """Looks at a checkpoint, and reads all of its files once to compare checksums. On one process.

    Args:
        path: the directory.

    Raises:
        CheckpointError: there is no checkpoint. One that is damaged is returned as such.
    """
    folder = store.find(path)
    try:
        manifest = store.read_manifest("fs.checkpoint.inspect", folder)
    except CheckpointError as error:
        if not (folder / MANIFEST).is_file():
            raise
        text = " ".join(line.strip() for line in str(error).splitlines()[:2])
        return Inspection(folder, None, (f"{MANIFEST}: {text}",))
    return Inspection(folder, manifest, tuple(damage(folder, manifest.files)))


def _bytes(leaf: SavedLeaf) -> int:
    return math.prod(leaf.shape) * getattr(torch, leaf.dtype).itemsize


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns side by side; the last one, numbers, to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join([*cells, row[-1].rjust(widths[-1])]).rstrip())
    return lines
