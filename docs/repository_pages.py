"""Gives files of the repository a page: each example with its code, and CONTRIBUTING.

A page links to an example as a reader of the repository would, `../../examples/mlp.py`; on the site the same link leads
to the page of the example. So a link is right in both places, and `--strict` refuses one that leads to nothing.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE_LINK = re.compile(r"\]\(\.\./((?:\.\./)*)examples/(\w+)\.py\)")
CONTRIBUTING_LINK = re.compile(r"\]\(\.\./((?:\.\./)*)CONTRIBUTING\.md(#[\w-]+)?\)")


def on_config(config: Any) -> Any:
    """Adds the examples to the navigation, before the reference."""
    pages = [{path.stem: f"examples/{path.stem}.md"} for path in examples()]
    at = next(i for i, part in enumerate(config["nav"]) if "Reference" in part)
    config["nav"] = [*config["nav"][:at], {"Examples": pages}, *config["nav"][at:], {"Contributing": "contributing.md"}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Makes the pages."""
    for path in examples():
        files.append(File.generated(config, f"examples/{path.stem}.md", content=page_of(path)))
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "contributing.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turns links to files of the repository into links to their pages."""
    return CONTRIBUTING_LINK.sub(r"](\1contributing.md\2)", EXAMPLE_LINK.sub(r"](\1examples/\2.md)", markdown))


def examples() -> list[Path]:
    """All examples, in the order of their names."""
    return sorted((ROOT / "examples").glob("*.py"))


def page_of(path: Path) -> str:
    """The docstring of an example as text, and all of the file as code."""
    source = path.read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) or ""
    return f'# {path.stem}\n\n{text}\n\n```python title="examples/{path.name}"\n{source}```\n'
