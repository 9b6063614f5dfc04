"""Implementations by kind and name, so that code can use them without importing them."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__all__ = ["find", "loaded", "names_of", "register"]

_places: dict[str, dict[str, str]] = {}


def register(kind: str, name: str, place: str) -> None:
    """Register an implementation, "module:attribute", without importing it, or replace an earlier one."""
    _places.setdefault(kind, {})[name] = place


def names_of(kind: str) -> tuple[str, ...]:
    """Return the registered names of a kind, in order of registration."""
    return tuple(_places.get(kind, ()))


def loaded(kind: str) -> dict[str, Any]:
    """Return the implementations of a kind whose modules are already imported, by name."""
    modules = {name: place.partition(":")[0] for name, place in _places.get(kind, {}).items()}
    return {name: find(kind, name) for name, module in modules.items() if module in sys.modules}


def find(kind: str, name: str) -> Any:
    """Import an implementation."""
    module, _, attribute = _places[kind][name].partition(":")
    found = import_module(module)  # lazy: the importer must not depend on what registers
    return getattr(found, attribute) if attribute else found
