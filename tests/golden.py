"""Whole texts of errors, pinned in one file: `tests/errors.golden`.

Tests assert the kind of an error and what it says to type; a change of wording is seen here, as a diff of that file.
`FSHARDING_UPDATE_GOLDEN=1 pytest -n 0 tests/unit/test_mistakes.py` writes the texts of today.
"""

import os
import re
from pathlib import Path

GOLDEN = Path(__file__).with_name("errors.golden")
HEAD = "== "


def texts() -> dict[str, str]:
    """The pinned texts by the name of the mistake: the kind of error, a colon, and its words."""
    parts = re.split(rf"^{HEAD}(.*)\n", GOLDEN.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {name: text.rstrip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def check(name: str, error: Exception) -> None:
    """Compare an error with its pinned text, in which a line of a test is `...` and the folder of tests `tests`."""
    text = f"{type(error).__name__}: {error}".replace(str(GOLDEN.parent), "tests")
    text = re.sub(r"^  test_\w+\.py:.*$", "  ...", text, flags=re.MULTILINE)
    text = text.replace("failed: addmm: mat1", "failed: mat1")  # torch 2.15 names the operator
    if os.environ.get("FSHARDING_UPDATE_GOLDEN"):
        known = texts() | {name: text}
        GOLDEN.write_text("\n".join(f"{HEAD}{name}\n{text}\n" for name, text in known.items()), encoding="utf-8")
    assert text == texts()[name]
