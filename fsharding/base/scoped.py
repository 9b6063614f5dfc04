"""Context variables with a value for one `with` block."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

__all__ = ["scoped"]

T = TypeVar("T")


@contextmanager
def scoped(variable: ContextVar[T], value: T) -> Generator[None]:
    """Set a context variable in this block, then restore its previous value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
