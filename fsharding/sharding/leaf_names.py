"""Rules for leaf names: a path must be usable in layouts, checkpoints, exported files and errors.

Guarantee: exporting leaves under their own paths and loading them gives the same leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

__all__ = ["MARKS", "MEND", "RESERVED", "begins", "joined", "objections_to_names"]

MARKS = ("{i}", "{j}", "{k}")  # placeholders for the indices of stacked leaves in tables of names

RESERVED = "__metadata__"  # the entry of a safetensors header that isn't a tensor

MEND = "Rename keys: the keys of a leaf, joined by dots, are its name in layouts, checkpoints and exported files."


def joined(*parts: str | None) -> str:
    """Join the parts of a dotted path, without empty ones."""
    return ".".join(filter(None, parts))


def begins(path: str, entry: str) -> bool:
    """Return whether a dotted path equals `entry` or is below it."""
    return path == entry or path.startswith(entry + ".")


def objections_to_names(paths: Sequence[str]) -> list[str]:
    """Return a row for each path that cannot be a leaf name."""
    rows = [f"{path!r} is the path of {n} leaves" for path, n in Counter(paths).items() if n > 1]
    for path in dict.fromkeys(paths):
        if path == RESERVED:
            rows.append(f"{path!r} is reserved by the safetensors format")
        elif marks := [mark for mark in MARKS if mark in path]:
            rows.append(f"{path!r} contains {marks[0]}, which stands for an index in tables of names")
        elif len(paths) > 1 and "" in path.split("."):
            rows.append(f"{path!r} contains an empty key")
        elif not path.isprintable():  # lone surrogates, which UTF-8 cannot encode, are not printable either
            rows.append(f"{path!a} contains characters that cannot be written")
    return rows
