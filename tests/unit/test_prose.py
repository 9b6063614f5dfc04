"""Prose is counted: habits of translated English in docstrings, comments and pages, and sections of public docstrings.

A pattern is no law, and the plain word may be right in a sentence: rates are limited, not words. Limits only fall.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.public import CALLABLES

ROOT = Path(__file__).resolve().parents[2]
HABITS = re.compile(
    r"\b(?:that|those) of\b|\b(?:nobody|somebody|whoever|whom)\b|\bis no [a-z]+|\bcuts?\b|\bwhole\b|\b(?:says?|said)\b"
    r"|\banother\b|\bwhere (?:it|there|they) (?:is|are)\b|\b(?:asks?|tells?|knows?)\b|\bcodes\b|\bbeside\b|\btravels?\b"
    r"|^\s*\w+: (?:of|as|by|that|which|in which|to which|from which)\b|\bof (?:its|one's|their) own\b|\banew\b"
    r"|\b(?:goes? on|in the place of|lets? go|mends?)\b|\bthere is none\b|\bwhat is\b|\bgive[sn]? up\b",
    re.IGNORECASE | re.MULTILINE,
)
FRAGMENT = re.compile(r"^(?:of|as|by|that|which|in|to|from|for|if|with|without|on|at|whose)\b", re.IGNORECASE)

# Matches of HABITS in 10,000 words: optax has 4, FSDP2 7, peft 8, hypothesis 18.
OF_SOURCE, OF_PAGES = 14, 8
# Public functions whose docstring lacks a section, and entries of arguments that are no noun phrase.
WITHOUT_RETURNS, WITHOUT_ARGS, FRAGMENTS = 0, 0, 0


def prose_of(source: str) -> Iterable[str]:
    """Docstrings without their examples, and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines = node.value.value.splitlines()
            yield "\n".join(line for line in lines if not line.strip().startswith((">>>", "...")))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)


def rate(text: str) -> float:
    return 1e4 * len(HABITS.findall(text)) / len(text.split())


def sections(docstring: str) -> dict[str, str]:
    """The text below each heading of a docstring in Google's style."""
    found = re.split(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):$", docstring, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def entries(section: str) -> dict[str, str]:
    """What is written of each argument."""
    return dict(re.findall(r"^    \*{0,2}([\w, *]+?)(?: \([^)]*\))?: (.*)", section, flags=re.MULTILINE))


def documented() -> dict[str, tuple[inspect.Signature, dict[str, str]]]:
    """Signature and sections of every public function."""
    found = {name: x for name, x in CALLABLES if inspect.isfunction(inspect.unwrap(x)) and not inspect.isclass(x)}
    return {name: (inspect.signature(x), sections(inspect.getdoc(x) or "")) for name, x in found.items()}


def test_docstrings_and_comments_read_like_the_field():
    files = (ROOT / "fsharding").rglob("*.py")
    assert rate("\n".join(text for path in files for text in prose_of(path.read_text(encoding="utf-8")))) <= OF_SOURCE


def test_pages_read_like_the_field():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = (re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL) for page in pages)
    assert rate("\n".join(texts)) <= OF_PAGES


def test_public_functions_document_what_they_return():
    """A function without arguments, such as a preset, says it in its first line."""
    missing = [
        name
        for name, (signature, found) in documented().items()
        if signature.parameters
        and signature.return_annotation not in (None, "None", "NoReturn")
        and not {"Returns", "Yields"} & {*found}
    ]
    assert len(missing) <= WITHOUT_RETURNS, missing


def test_public_functions_document_their_arguments():
    missing = [
        name for name, (signature, found) in documented().items() if signature.parameters and "Args" not in found
    ]
    assert len(missing) <= WITHOUT_ARGS, missing


def test_entries_of_arguments_begin_with_a_noun():
    found = [
        f"{name}: {argument}: {text}"
        for name, (_, parts) in documented().items()
        for argument, text in entries(parts.get("Args", "")).items()
        if FRAGMENT.match(text)
    ]
    assert len(found) <= FRAGMENTS, "\n".join(found)


@pytest.mark.parametrize("text", ["those of a leaf", "It is no tensor.", "a whole leaf", "x: of the result"])
def test_the_rate_counts(text: str):
    assert rate(text) > 0 and rate("The unsharded leaf, gathered over the data axes.") == 0
