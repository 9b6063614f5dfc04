"""The page of measured facts names the scripts that measure them, each once, and each of them is Python."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "bench" / "facts").glob("*.py"))


def test_every_script_is_named_on_a_page():
    pages = [ROOT / "bench" / "facts.md", ROOT / "docs" / "explanation" / "runtime.md"]
    named = [name for page in pages for name in re.findall(r"`bench/facts/(\w+\.py)`", page.read_text())]
    assert sorted(named) == [script.name for script in SCRIPTS]


def test_every_script_says_what_it_measures():
    assert SCRIPTS
    for script in SCRIPTS:
        assert ast.get_docstring(ast.parse(script.read_text())), script
