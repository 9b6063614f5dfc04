"""Run the example of a docstring: here, or by name on the ranks of a pool. Every warning is an error, as in pytest."""

import doctest
import inspect
import os
import tomllib
import warnings
from pathlib import Path

import torch
from _pytest.config import parse_warning_filter

import fsharding as fs
from tests.public import CALLABLES

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = dict(CALLABLES)


def example_of(name: str) -> doctest.DocTest:
    """The example of a public name; in a docstring without one it has no statements."""
    doc = inspect.getdoc(inspect.unwrap(PUBLIC[name])) or ""
    _, _, text = doc.partition("\nExample:\n")
    return doctest.DocTestParser().get_doctest(text, {"fs": fs, "torch": torch}, name, None, None)


def failures(name: str, rank: int = 0) -> str:
    """What is wrong with an example that runs on a rank. Output `# on rank 0` is compared there alone."""
    test = example_of(name)
    for example in test.examples:
        if rank and "# on rank 0" in example.source:
            example.want, example.options[doctest.ELLIPSIS] = "...\n", True
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
    return "".join(report)


def failures_on_a_rank(name: str, folder: str) -> str:
    """`failures` on a rank of a pool, in a directory that all ranks share."""
    before = os.getcwd()
    os.chdir(folder)
    torch.set_printoptions(profile="default")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    try:
        with warnings.catch_warnings():
            for line in settings["filterwarnings"]:
                warnings.filterwarnings(*parse_warning_filter(line, escape=False))
            return failures(name, torch.distributed.get_rank())
    finally:
        os.chdir(before)
