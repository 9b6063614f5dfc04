"""Fails the build of the pages if a public name has no docstring, leaves out a parameter, or stands on no page."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import fsharding as fs

_SPACES = (
    *("checkpoint", "data", "errors", "foreign", "formats", "hf", "megatron", "models", "ops", "optim"),
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
    public = {path: x for path, x in (loose | inside).items() if _has_code(x)}
    wrong += [f"{path} has no docstring" for path, x in public.items() if not x.__doc__]
    wrong += [f"{path} documents {listed}" for path, x in public.items() if (listed := _left_out(x))]
    if wrong:
        raise SystemExit("\n  ".join(["The reference is not complete:", *wrong]))


def _has_code(x: Any) -> bool:
    return inspect.isclass(x) or inspect.isroutine(x)


def _left_out(x: Any) -> str:
    """Say which parameters the Args of a function, or of the methods of a class, leave out; empty if none."""
    functions = [m for m in vars(x).values() if inspect.isfunction(m)] if inspect.isclass(x) else [x]
    missing = {fn.__name__: _undocumented(fn) for fn in functions if fn.__name__[0] != "_"}
    return "; ".join(f"{name} without {', '.join(sorted(names))}" for name, names in missing.items() if names)


def _undocumented(fn: Any) -> set[str]:
    """Return the parameters that the Args leave out; the options of a step are documented by `StepOptions`."""
    text = inspect.getdoc(fn) or ""
    if "Args:\n" not in text:
        return set()
    names = {name for name in inspect.signature(fn).parameters if name not in ("self", "cls") and name[0] != "_"}
    entries = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", text, re.MULTILINE)
    documented = {name.strip(" *") for entry in entries for name in entry.split(",")}
    return names - documented - fs.StepOptions.__annotations__.keys()
