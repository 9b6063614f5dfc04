"""The page of measured facts names the scripts that measure them, and the table of findings theirs, each once."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "bench" / "facts").glob("*.py"))
FINDINGS = sorted((ROOT / "findings").glob("*-*.sh"))


def test_every_script_is_named_on_a_page():
    pages = [ROOT / "contributing" / "facts.md", ROOT / "contributing" / "runtime.md"]
    named = [name for page in pages for name in re.findall(r"`bench/facts/(\w+\.py)`", page.read_text())]
    assert sorted(named) == [script.name for script in SCRIPTS]


def test_every_script_says_what_it_measures():
    assert SCRIPTS
    for script in SCRIPTS:
        assert ast.get_docstring(ast.parse(script.read_text())), script


def test_every_finding_is_in_the_table_and_pages_name_only_findings_that_exist():
    table = re.findall(r"^\| `([\w-]+\.sh)`", (ROOT / "findings" / "README.md").read_text(), re.MULTILINE)
    assert sorted(table) == [script.name for script in FINDINGS]
    pages = [ROOT / "contributing" / "facts.md", ROOT / "docs" / "reference" / "troubleshooting.md"]
    named = {name for page in pages for name in re.findall(r"findings/([\w-]+\.sh)", page.read_text())}
    assert named <= set(table)


def test_every_finding_records_versions_and_an_output_and_does_not_use_the_library():
    head = re.compile(
        r"#!/usr/bin/env bash\n# torch \d[^\n]*\n(# .*\n)*# Expected: .*\n(# .*\n)*# Seen:\n(#   .*\n)+set -euo pipefail\n"
    )
    for script in FINDINGS:
        text = script.read_text()
        assert head.match(text), script
        assert re.search(r"^ *packages torch==", text, re.MULTILINE), script
        assert "import fsharding" not in text, script
