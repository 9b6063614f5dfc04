"""Fails the build of the pages if a public name has no docstring, or stands on no page of the reference."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import fsharding as fs

_SPACES = (
    *("checkpoint", "data", "errors", "foreign", "formats", "hf", "megatron", "models", "notebook", "ops", "optim"),
    *("pipeline", "policies", "preemption", "random", "te", "testing", "tree"),
)


def on_pre_build(config: Any) -> None:
    """The hook of mkdocs."""
    pages = (Path(config["docs_dir"]) / "reference").glob("*.md")
    shown = {name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)}
    spaces = {name: getattr(fs, name, None) or importlib.import_module(f"fsharding.{name}") for name in _SPACES}
    inside = {f"fs.{space}.{name}": getattr(at, name) for space, at in spaces.items() for name in at.__all__}
    loose = {f"fs.{name}": getattr(fs, name) for name in fs.__all__ if name not in spaces}
    wrong = [f"fs.{name} stands on no page" for name in spaces if f"fsharding.{name}" not in shown]
    wrong += [
        f"{path} stands on no page"
        for path, x in loose.items()
        if path.replace("fs.", "fsharding.", 1) not in shown and not any(x is y for y in inside.values())
    ]
    wrong += [f"{path} has no docstring" for path, x in (loose | inside).items() if _has_code(x) and not x.__doc__]
    if wrong:
        raise SystemExit("\n  ".join(["The reference is not complete:", *wrong]))


def _has_code(x: Any) -> bool:
    return inspect.isclass(x) or inspect.isroutine(x)
