"""Memory between rounds of a benchmark.

In: nothing. Out: freed memory goes back to the system, so that no contender gets pages that another has paid for.
Law: every contender begins a round with the same memory.
"""

from __future__ import annotations

import ctypes

__all__ = ["give_back"]


def give_back() -> None:
    """Returns freed memory to the system, where the C library can."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
