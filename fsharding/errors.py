"""Every exception the library raises, and the one function that words them.

In: the public function, the rule that was broken, one row for each offending leaf, the edit that mends it.
Out: an exception whose text has all four. Law: bad input is refused on every rank, before anything has changed.
`ValueError` is in the family of whatever a user can mend; our own invariants are plain asserts.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "BatchError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DonatedError",
    "FshardingError",
    "LayoutError",
    "MeshError",
    "NonFiniteError",
    "RandomKeyError",
    "RankError",
    "ScheduleError",
    "SpecError",
    "TransformError",
    "TreeError",
    "message",
]


class FshardingError(Exception):
    """Base of everything that fsharding raises on purpose."""


class MeshError(FshardingError, ValueError):
    """A mesh that cannot be made: unknown axis, product differs from the world size."""


class SpecError(FshardingError, ValueError):
    """A `PartitionSpec` or rule that does not fit the leaf or the mesh."""


class LayoutError(FshardingError, ValueError):
    """A layout that cannot be planned, or a value that is not in the layout that it claims."""


class TreeError(FshardingError, ValueError):
    """Two trees that should match do not."""


class BatchError(FshardingError, ValueError):
    """A batch that cannot be divided as asked."""


class RandomKeyError(FshardingError, ValueError):
    """A random key of the wrong shape or dtype."""


class DataError(FshardingError, ValueError):
    """Training data that is missing, empty or too short, or what should be token ids and is not."""


class ConfigError(FshardingError, ValueError):
    """A configuration that cannot run: bad option, unwritable directory, absent extra."""


class CheckpointError(FshardingError, ValueError):
    """A checkpoint that is absent, incomplete, damaged, or of another model."""


class ScheduleError(FshardingError, ValueError):
    """A pipeline schedule that cannot be planned, or a table that is incomplete, out of order or never ends."""


class TransformError(FshardingError, TypeError):
    """A transform applied where it has no meaning; the text says what to use."""


class DonatedError(FshardingError, RuntimeError):
    """A state was used after it had been donated to a step."""


class NonFiniteError(FshardingError, FloatingPointError):
    """Loss or gradients are not finite; the step was refused on all ranks and the state is as before."""


class RankError(FshardingError, RuntimeError):
    """A rank raised, died or hung, or is in another call than those that wait for it.

    Attributes:
        ranks: which, where that is known of a step.
    """

    def __init__(self, text: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.ranks = ranks


def message(function: str, rule: str, rows: Iterable[str] = (), mend: str = "") -> str:
    """Words an error: function and rule on the first line, one indented row a leaf, then the edit.

    Args:
        function: the public function that was called.
        rule: what it cannot do, as the rest of a sentence that begins with `function`.
        rows: one line for each offending leaf; all of them.
        mend: the edit that makes it work.

    Returns:
        The text of the exception.
    """
    lines = [f"{function} {rule}", *(f"  {row}" for row in rows)]
    if mend:
        lines.append(mend)
    return "\n".join(lines)
