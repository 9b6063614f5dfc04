"""Gives files of the repository a page: each example with its code, each notebook with its cells, and CONTRIBUTING.

A page links to an example as a reader of the repository would, `../../examples/mlp.py`; on the site the same link leads
to the page of the example. So a link is right in both places, and `--strict` refuses one that leads to nothing.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE_LINK = re.compile(r"\]\(\.\./((?:\.\./)*)examples/((?:notebooks/)?\w+)\.(?:py|ipynb)\)")
CONTRIBUTING_LINK = re.compile(r"\]\(\.\./((?:\.\./)*)CONTRIBUTING\.md(#[\w-]+)?\)")


def on_config(config: Any) -> Any:
    """Adds the examples to the navigation, before the reference."""
    pages: list[Any] = [{path.stem: f"examples/{path.stem}.md"} for path in examples()]
    pages.append({"Notebooks": [{path.stem: f"examples/notebooks/{path.stem}.md"} for path in notebooks()]})
    at = next(i for i, part in enumerate(config["nav"]) if "Reference" in part)
    config["nav"] = [*config["nav"][:at], {"Examples": pages}, *config["nav"][at:], {"Contributing": "contributing.md"}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Makes the pages."""
    for path in examples():
        files.append(File.generated(config, f"examples/{path.stem}.md", content=page_of(path)))
    for path in notebooks():
        content = page_of_notebook(path)
        files.append(File.generated(config, f"examples/notebooks/{path.stem}.md", content=content))
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "contributing.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turns links to files of the repository into links to their pages."""
    return CONTRIBUTING_LINK.sub(r"](\1contributing.md\2)", EXAMPLE_LINK.sub(r"](\1examples/\2.md)", markdown))


def examples() -> list[Path]:
    """All examples, in the order of their names."""
    return sorted((ROOT / "examples").glob("*.py"))


def notebooks() -> list[Path]:
    """All notebooks, in the order of their names."""
    return sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def page_of(path: Path) -> str:
    """The docstring of an example as text, and all of the file as code."""
    source = path.read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) or ""
    return f'# {path.stem}\n\n{text}\n\n```python title="examples/{path.name}"\n{source}```\n'


def page_of_notebook(path: Path) -> str:
    """The cells of a notebook, which are stored without outputs, below its title."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    parts = [
        text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for cell, text in zip(cells, texts, strict=True)
    ]
    parts.insert(1, f"This is `examples/notebooks/{path.name}`; run it to see what the cells show.")
    return "\n\n".join(parts) + "\n"
