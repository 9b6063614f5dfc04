"""Words that help someone who mistyped a name.

In: a name that nothing has, and the names that there are. Out: the end of a sentence for an error.
Law: it names something that there is, or says nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A sentence to put after others, about the known name that is most like an unknown one; "" where none is.

    Args:
        name: the unknown one.
        known: what there is.
        cutoff: how like it has to be, from 0 to 1.
    """
    close = difflib.get_close_matches(name, list(known), 1, cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""
