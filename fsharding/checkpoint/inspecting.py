"""`inspect`: list the contents of a checkpoint and check its files, as text and as JSON.

Guarantee: if `damaged` is empty, `load` accepts the files; if not, `load` refuses them or torch reads wrong values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsharding.base.errors import CheckpointError, printable
from fsharding.base.public import public
from fsharding.checkpoint import directory
from fsharding.checkpoint.chunks import described
from fsharding.checkpoint.directory import StrPath
from fsharding.checkpoint.manifest import MANIFEST, METADATA, Manifest, SavedLeaf
from fsharding.checkpoint.reader import damage, open_source
from fsharding.sharding.named_sharding import LeafType

__all__ = ["Inspection", "inspect"]

_WIDTH = 80


@dataclass(frozen=True)
class Inspection:
    """Contents and condition of a checkpoint.

    Attributes:
        path: Directory.
        manifest: Manifest; None if it is damaged.
        damaged: Problems, one row per file, or the reason for which `load` would refuse it; empty if there are none.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: {"w": torch.ones(4)}, fs.sgd(0.1), fs.random.key(0), layout)
        >>> fs.checkpoint.save("run/5", state)
        >>> inspection = fs.checkpoint.inspect("run/5")
        >>> inspection.damaged, inspection.to_json()["leaves"]["params.w"]["bytes"]
        ((), 16)
    """

    path: Path
    manifest: Manifest | None
    damaged: tuple[str, ...]

    @property
    def leaf_bytes(self) -> int:
        """Total size of the leaves, in bytes."""
        return sum(map(_bytes, self.manifest.tree.values())) if self.manifest else 0

    @property
    def file_bytes(self) -> int:
        """Total size of the files in the manifest, in bytes."""
        return sum(file.bytes for file in self.manifest.files.values()) if self.manifest else 0

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values: dicts, lists, strings and numbers."""
        manifest = self.manifest
        result: dict[str, Any] = {"path": str(self.path), "ok": not self.damaged, "damaged": [*self.damaged]}
        if manifest is None:
            return result
        shown = ("step", "layout", "extra", "data", "torch", "fsharding", "version")
        result |= {name: getattr(manifest, name) for name in shown}
        return result | {
            "leaves": {
                path: {"shape": [*leaf.shape], "dtype": leaf.dtype, "spec": leaf.spec, "bytes": _bytes(leaf)}
                for path, leaf in manifest.tree.items()
            },
            "files": {name: file.bytes for name, file in manifest.files.items()},
            "leaf_bytes": self.leaf_bytes,
            "file_bytes": self.file_bytes,
        }

    def __str__(self) -> str:
        lines = [f"{printable(str(self.path))}: {'damaged' if self.damaged else 'whole'}"]
        lines += [f"  damaged: {printable(row)}" for row in self.damaged]
        if self.manifest is None:
            return "\n".join(lines)
        manifest, layout = self.manifest, self.manifest.layout
        mesh = ", ".join(f"{axis}={size}" for axis, size in layout.get("mesh", {}).items())
        lines.append(
            printable(f"step {manifest.step}, saved by fsharding {manifest.fsharding} on torch {manifest.torch}")
        )
        lines.append(printable(f"mesh {mesh} ({layout.get('ranks')} ranks), strategy {layout.get('strategy')}"))
        leaves = [
            (printable(path), str(leaf), printable(leaf.spec or ""), f"{_bytes(leaf):,}")
            for path, leaf in sorted(manifest.tree.items())
        ]
        lines += ["", *_table([("leaf", "type", "cut", "bytes"), *leaves])]
        files = [(printable(name), f"{file.bytes:,}") for name, file in manifest.files.items()]
        lines += ["", *_table([("file", "bytes"), *files]), ""]
        lines.append(
            f"{len(manifest.tree)} leaves of {self.leaf_bytes:,} bytes in {len(manifest.files)} files of "
            f"{self.file_bytes:,} bytes"
        )
        return "\n".join(lines)


@public
def inspect(path: StrPath) -> Inspection:
    """Check a checkpoint: read all of its files once and compare checksums. Any process can call it alone.

    Args:
        path: Checkpoint directory.

    Returns:
        Contents, and in `damaged` the problems for which `load` would refuse it.

    Raises:
        CheckpointError: the path isn't a checkpoint; the message describes what it is instead.

    Example:
        >>> import os
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: {"w": torch.ones(4)}, fs.sgd(0.1), fs.random.key(0), layout)
        >>> fs.checkpoint.save("run/5", state)
        >>> os.remove("run/5/.metadata")
        >>> fs.checkpoint.inspect("run/5").damaged
        ('.metadata is missing',)
    """
    with directory.wording_failures():
        folder = directory.find(path)
        try:
            manifest = directory.read_manifest(folder)
        except CheckpointError as error:
            if not os.path.lexists(folder / MANIFEST):
                raise
            return Inspection(folder, None, (f"{MANIFEST}: {directory.in_one_line(error)}",))
        return Inspection(folder, manifest, tuple(damage(folder, manifest.files) or _objections(folder, manifest)))


def _objections(folder: Path, manifest: Manifest) -> list[str]:
    """List why `load` would refuse files that have the right checksums."""
    try:
        source = open_source(folder, manifest, as_torch=True)
        chunks = described(source.located())
        if manifest.chunks not in (None, chunks):
            return [f"{METADATA}: its chunks are not where {MANIFEST} says"]
        if source.leaves.get("step") == LeafType((), torch.int64):
            source.read("step", (), step := torch.zeros((), dtype=torch.int64))
            if int(step) != manifest.step:
                return [f"{MANIFEST}: it says step {manifest.step}, the files say step {int(step)}"]
    except CheckpointError as error:
        return [directory.in_one_line(error)]
    return []


def _bytes(leaf: SavedLeaf) -> int:
    return math.prod(leaf.shape) * getattr(torch, leaf.dtype).itemsize


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Align rows as columns, the last one to the right; a name that is too long gets a separate line."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    widths[0] = max(len(rows[0][0]), min(widths[0], _WIDTH - sum(width + 2 for width in widths[1:])))
    for name, *rest in rows:
        if len(name) > widths[0]:
            yield name
            name = ""
        cells = [cell.ljust(width) for cell, width in zip((name, *rest[:-1]), widths, strict=False)]
        yield "  ".join([*cells, rest[-1].rjust(widths[-1])]).rstrip()
