"""Fails the build of the pages if a numbered list shows other numbers than those that were written.

Markdown begins a list anew after a block of code, whatever its numbers say, unless `sane_lists` keeps them.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any


def on_page_content(html: str, page: Any, **_: Any) -> None:
    """The hook of mkdocs."""
    source = re.sub(r"^```.*?^```$", "", page.markdown, flags=re.MULTILINE | re.DOTALL)
    # Not one at the beginning of a line inside of a paragraph.
    items = re.finditer(r"(?:(?<=\n\n)|(?<=\A))(?:\d+\. .*\n(?: .*\n)*)+", source)
    written = [int(number) for item in items for number in re.findall(r"^(\d+)\. ", item[0], re.MULTILINE)]
    shown = numbers_of(html) if written else []
    if written != shown:
        raise SystemExit(f"{page.file.src_uri} has the numbers {written}, and its page shows {shown}")


def numbers_of(html: str) -> list[int]:
    """The numbers that a browser shows in the outermost lists of a page."""
    lists = _Lists()
    lists.feed(html)
    return lists.numbers


class _Lists(HTMLParser):
    """`next` has the number of the next item of each list that is open; 0 for one without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.next, self.numbers = list[int](), list[int]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("ol", "ul"):
            self.next.append(int(dict(attrs).get("start") or 1) if tag == "ol" else 0)
        elif tag == "li" and len(self.next) == 1 and self.next[0]:
            self.numbers.append(self.next[0])
            self.next[0] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in ("ol", "ul"):
            self.next.pop()
