"""What users call: every callable in `__all__` of the package and its namespaces, by the name that they type."""

import inspect
import operator
from types import ModuleType
from typing import Any, get_origin

import fsharding as fs

NAMESPACES = [
    "checkpoint", "data", "debug", "foreign", "formats", "hf", "hf.families", "megatron", "models", "models.presets",
    "ops", "optim", "optim.schedules", "pipeline", "policies", "preemption", "random", "te", "testing", "tree",
]  # fmt: skip


def _callables(prefix, module):
    named = {f"{prefix}.{name}": getattr(module, name) for name in module.__all__}
    found = {name: x for name, x in named.items() if callable(x) and not isinstance(x, ModuleType)}
    return [(name, x) for name, x in found.items() if get_origin(x) is None and x is not Any]


CALLABLES = _callables("fs", fs)
for namespace in NAMESPACES:
    CALLABLES += _callables(f"fs.{namespace}", operator.attrgetter(namespace)(fs))
"""Pairs (name, object); aliases of types are left out."""

CLASSES = {x for _, x in CALLABLES if inspect.isclass(x)}
