"""Implementations that are found by name, so that the code that uses them does not import them.

Guarantee: names of a kind come in the order of their registration, and registering a name again replaces its place.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__all__ = ["find", "loaded", "names_of", "register"]

_places: dict[str, dict[str, str]] = {}


def register(kind: str, name: str, place: str) -> None:
    """Register an implementation without importing it."""
    _places.setdefault(kind, {})[name] = place


def names_of(kind: str) -> tuple[str, ...]:
    """Return the registered names of a kind."""
    return tuple(_places.get(kind, ()))


def loaded(kind: str) -> dict[str, Any]:
    """Return the implementations of a kind that are imported already, by name."""
    modules = {name: place.partition(":")[0] for name, place in _places.get(kind, {}).items()}
    return {name: find(kind, name) for name, module in modules.items() if module in sys.modules}


def find(kind: str, name: str) -> Any:
    """Import an implementation."""
    module, _, attribute = _places[kind][name].partition(":")
    found = import_module(module)  # lazy: the importer must not depend on what registers
    return getattr(found, attribute) if attribute else found
