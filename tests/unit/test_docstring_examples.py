"""Every public function and class has an example in its docstring, and all of them are run."""

import doctest
import inspect

import pytest
import torch

import fsharding as fs
from tests.public import CALLABLES


@pytest.mark.parametrize(("name", "public"), CALLABLES, ids=[name for name, _ in CALLABLES])
def test_example(name, public):
    doc = inspect.getdoc(inspect.unwrap(public)) or ""
    _, found, example = doc.partition("\nExample:\n")
    assert found, f"{name} has no example"
    names = {"fs": fs, "torch": torch}
    test = doctest.DocTestParser().get_doctest(example, names, name, None, None)
    assert test.examples
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert runner.run(test, out=report.append).failed == 0, "".join(report)
