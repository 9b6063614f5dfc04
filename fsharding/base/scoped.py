"""Values that functions find without being handed them, for as long as a `with` block lasts.

Guarantee: the previous value is restored when the block ends, also after an exception.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

__all__ = ["scoped"]

T = TypeVar("T")


@contextmanager
def scoped(variable: ContextVar[T], value: T) -> Generator[None]:
    """Give a context variable a value inside the `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
