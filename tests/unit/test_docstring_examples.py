"""Every public function and class has an example in its docstring, and all of them are run."""

import doctest
import inspect

import pytest
import torch

import fsharding as fs

CALLABLES = [name for name in fs.__all__ if callable(getattr(fs, name))]


@pytest.mark.parametrize("name", CALLABLES)
def test_example(name):
    doc = inspect.getdoc(inspect.unwrap(getattr(fs, name))) or ""
    _, found, example = doc.partition("\nExample:\n")
    assert found, f"fs.{name} has no example"
    names = {"fs": fs, "torch": torch}
    test = doctest.DocTestParser().get_doctest(example, names, f"fs.{name}", None, None)
    assert test.examples
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert runner.run(test, out=report.append).failed == 0, "".join(report)
