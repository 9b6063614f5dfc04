"""Shows the `Example:` of a docstring as code: the parser of Google's style knows the section as `Examples:` only."""

from __future__ import annotations

from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """An extension of griffe, which reads the docstrings for the pages."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the section in one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
