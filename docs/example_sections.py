"""Prepares docstrings for the parser of Google's style: `Example:` is `Examples:`, and every entry has one name."""

from __future__ import annotations

import re
from typing import Any

import griffe

SHARED = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def _split(entry: re.Match[str]) -> str:
    return "\n".join(f"    {name}: {entry[2]}" for name in entry[1].split(", "))


class ExampleSections(griffe.Extension):
    """An extension of griffe, which reads the docstrings for the pages."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = SHARED.sub(_split, text)
