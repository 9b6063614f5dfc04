"""Every mark of contributing/what-works.md is a test that `make test` collects and never skips."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def page():
    spec = importlib.util.spec_from_file_location("what_works", ROOT / "docs" / "what_works.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_its_script_writes(page):
    assert page.PAGE.read_text(encoding="utf-8") == page.render(), "run `python docs/what_works.py`"
    assert page.GUARANTEES.read_text(encoding="utf-8") == page.render_for_users(), "run `python docs/what_works.py`"
    assert all(row in page.render_for_users() for row in page.rows_for_users()) and len(page.rows_for_users()) > 5


COLLECT = """
import pytest, sys


class Report:
    def pytest_collection_modifyitems(self, items):
        for item in items:
            skipped = [mark for mark in item.iter_markers() if mark.name in ("skip", "skipif", "xfail")]
            print("SKIPPED" if skipped else "COLLECTED", item.nodeid)


plain = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-n0"]
sys.exit(pytest.main([*plain, *sys.argv[1:]], plugins=[Report()]))
"""


@slow
def test_every_mark_is_a_test_that_runs(page):
    """In a process of its own: the options of this run, such as `-k`, would leave tests out."""
    wanted = page.tests()
    files = sorted({test.partition("::")[0] for test in wanted})
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-c", COLLECT, *files],
        cwd=ROOT, env=environment, timeout=100, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    collected = set(re.findall(r"^COLLECTED (.+)$", run.stdout, re.MULTILINE))
    assert not [test for test in wanted if test not in collected]


def test_none_skips_itself(page):
    for test in page.tests():
        file, _, name = test.partition("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert "pytest.skip(" not in source and "importorskip" not in source, file
        assert f"def {name.partition('[')[0]}(" in source, test


def test_a_cell_is_of_its_place_and_feature(page):
    """The ids of the file that was written for this page say what they show."""
    features = page.features()
    shown = {test for row in features.rows.values() for test in row.values() if "::test_a_feature_in_a_place[" in test}
    for row in features.rows.values():
        for place, test in row.items():
            assert test not in shown or f"[{place}-" in test
    assert len(shown) > 100
