"""Tables of the pages as data: rows by their first cell, the code in a cell, and the message of a mistake."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

CODE = re.compile(r" *[\w.]+\.py:\d+: ")
DOCS = Path(__file__).resolve().parents[1] / "docs"


def rows_of(page: str, *, section: str = "", without: str = "") -> dict[str, tuple[str, ...]]:
    """The other cells of each row by its first, of the tables of three columns on a page.

    Args:
        page: below docs/.
        section: the only heading whose tables count; by default all.
        without: a heading whose tables do not count.
    """
    heading, rows = "", dict[str, tuple[str, ...]]()
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 3 or cells[0] == "mistake" or set(cells[0]) <= {"-"}:
            continue
        if heading != without and section in ("", heading):
            assert cells[0] not in rows, f"two rows of {cells[0]}"
            rows[cells[0]] = tuple(cells[1:])
    return rows


def errors_of(**sections: str) -> dict[str, tuple[str, ...]]:
    """The rows of all mistakes: those that readers look up, and those whose message is enough."""
    pages = [rows_of(page, **sections) for page in ("reference/troubleshooting.md", "../contributing/errors.md")]
    assert not pages[0].keys() & pages[1].keys()
    return pages[0] | pages[1]


def code_spans(cell: str) -> list[str]:
    """The pieces of code in a cell; `...` in one stands for anything."""
    return [part.strip() for span in re.findall(r"`([^`]+)`", cell) for part in span.split("...") if part.strip()]


def said(mistake: Callable[..., Any], *args: Any) -> str:
    """The text of the error or of the warning that a call ends with, on one line, without the lines of code in it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            mistake(*args)
        except Exception as error:
            text = str(error)
        else:
            text = "\n".join(str(warning.message) for warning in caught)
    assert text, "nobody was told"
    return " ".join(" ".join(line for line in text.splitlines() if not CODE.match(line)).split())
