"""Names in backticks on the pages exist: public names, files of the repository, and tests in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fsharding as fs

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "contributing").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
CODE = re.compile(r"`([^`\n]+)`")
PUBLIC = re.compile(r"(?<![\w./])fs((?:\.[A-Za-z_]\w*)+)")
FILE = re.compile(r"(?<![\w./-])((?:[a-z_]+/)+[\w./]*\w\.(?:py|md|sh|toml))(?:::(\w+))?")


def is_public(name: str) -> bool:
    """Whether a dotted name, such as `optim.ema`, is found on `fs`."""
    found = fs
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def missing_names(page: Path) -> list[str]:
    """Names in backticks, outside of blocks of code, that don't exist."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    missing: list[str] = []
    for code in CODE.findall(text):
        missing += [f"fs{name}" for name in PUBLIC.findall(code) if not is_public(name[1:])]
        for path, test in FILE.findall(code):
            files = [place / path for place in (ROOT, ROOT / "fsharding", page.parent) if (place / path).exists()]
            if not files:
                missing.append(path)
            elif test and f"def {test}(" not in files[0].read_text(encoding="utf-8"):
                missing.append(f"{path}::{test}")
    return missing


def test_names_in_docstrings_and_errors_exist():
    found: set[str] = set()
    for path in (ROOT / "fsharding").rglob("*.py"):
        texts = [n.value for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Constant)]
        found |= {name[1:] for text in texts if isinstance(text, str) for name in PUBLIC.findall(text)}
    assert len(found) > 200 and not {name for name in found if not is_public(name)}


def test_figures_of_results_stand_on_the_page_of_benchmarks():
    table = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    figures = {figure for line in table for figure in re.findall(r"\b[01]\.\d\d\b", line)}
    page = (ROOT / "bench" / "benchmarks.md").read_text(encoding="utf-8")
    assert len(figures) > 8 and not {figure for figure in figures if not re.search(rf"\b{figure}\b", page)}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_on_the_page_exist(page: Path):
    assert missing_names(page) == []


def test_the_rule_catches(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "`fs.adamw`, `fs.adamw2(1e-3)`, `comm/wires.py`, `comm/wire.py`, `tests/laws.py::nothing`\n", encoding="utf-8"
    )
    assert missing_names(page) == ["fs.adamw2", "comm/wire.py", "tests/laws.py::nothing"]
