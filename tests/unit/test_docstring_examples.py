"""Every public function and class has an example in its docstring, and all of them are run."""

import doctest
import inspect
import operator
from typing import Any, get_origin

import pytest
import torch

import fsharding as fs

NAMESPACES = [
    "checkpoint", "data", "hf", "hf.families", "megatron", "models", "models.presets", "notebook", "ops", "optim", "optim.schedules",
    "pipeline", "policies", "preemption", "random", "te", "testing", "tree",
]  # fmt: skip


def public_callables(prefix, module):
    """(how users call it, the object) of each callable in `__all__`; aliases of types are left out."""
    named = {f"{prefix}.{name}": getattr(module, name) for name in module.__all__}
    return [(name, x) for name, x in named.items() if callable(x) and get_origin(x) is None and x is not Any]


CALLABLES = public_callables("fs", fs)
for namespace in NAMESPACES:
    CALLABLES += public_callables(f"fs.{namespace}", operator.attrgetter(namespace)(fs))


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
