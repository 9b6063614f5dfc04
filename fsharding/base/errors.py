"""Every exception that the library raises, and the format of their messages."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from itertools import islice

from fsharding.base.calls import public_name

__all__ = [
    "ArgumentError", "BatchError", "CheckpointError", "ConfigError", "DataError", "DiskError", "DonatedError",
    "DtypeError", "FrozenError", "FshardingError", "LayoutError", "MeshError", "MissingKeyError", "MissingNameError",
    "NonFiniteError", "NotDequantizedError", "NotGatheredError", "RandomKeyError", "RankError", "ReplicaError",
    "ScheduleError", "ShapeError", "SpecError", "TransformError", "TreeError", "did_you_mean", "listed", "message",
    "printable", "report",
]  # fmt: skip


_MOST_ROWS = 10
_MOST_LINES = 40
_LONGEST_LINE = 800
_LONGEST_MEND = 4_000
_HEAD = 400
_TAIL = 300


class FshardingError(Exception):
    """Base class of the library's exceptions."""


class ArgumentError(FshardingError, TypeError):
    """An argument has the wrong type, is swapped with a different one, or was modified in place."""


class MeshError(FshardingError, ValueError):
    """A mesh is invalid: for example, an axis is unknown, or its size differs from the world size."""


class SpecError(FshardingError, ValueError):
    """A `PartitionSpec` or rule doesn't fit the leaf or the mesh."""


class LayoutError(FshardingError, ValueError):
    """A layout can't be planned, or a value doesn't have the layout that it should have."""


class TreeError(FshardingError, ValueError):
    """Two trees don't match."""


class BatchError(FshardingError, ValueError):
    """A batch can't be divided as requested."""


class RandomKeyError(FshardingError, ValueError):
    """A random key has the wrong shape or dtype, or a seed is out of range."""


class DataError(FshardingError, ValueError):
    """Training data is missing, empty or too short, or token ids are invalid."""


class ConfigError(FshardingError, ValueError):
    """A configuration can't run: for example, a bad option, an unwritable directory, a missing extra."""


class CheckpointError(FshardingError, ValueError):
    """A checkpoint is missing, incomplete, damaged, or of a different model."""


class DiskError(FshardingError, OSError):
    """Leaves on disk: the disk is full, a read or write failed, or a file has changed."""


class ScheduleError(FshardingError, ValueError):
    """A pipeline schedule can't be planned, or a table is incomplete, out of order, or never ends."""


class TransformError(FshardingError, TypeError):
    """A transform is not supported here; the message shows what to use instead."""


class NotGatheredError(TransformError, AttributeError):
    """A parameter was used as a tensor before its unit was gathered.

    Attributes:
        leaf: The `Local` node, until its path is known.
        use: Description of the use, which completes a sentence that begins with the leaf.
    """

    def __init__(self, text: str = "", leaf: object = None, use: str = "") -> None:
        super().__init__(text)
        self.leaf = leaf
        self.use = use

    def __reduce__(self) -> tuple[type[NotGatheredError], tuple[str]]:
        # Without the leaf: its mesh can't be pickled.
        return type(self), (str(self),)


class NotDequantizedError(TransformError, AttributeError):
    """A tensor in a low-precision format was used as a plain one."""


class MissingKeyError(FshardingError, KeyError):
    """A loss function reads an entry that neither its parameters nor its batch have."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))  # `KeyError` shows the repr, on one line


class MissingNameError(FshardingError, AttributeError):
    """A name of torch, JAX or optax doesn't exist here; the message shows the equivalent."""


class FrozenError(FshardingError, dataclasses.FrozenInstanceError):
    """An attribute of an immutable value was assigned or deleted; the message shows how to make a new value."""


class ShapeError(FshardingError, RuntimeError):
    """A loss function combines tensors of incompatible shapes."""


class DtypeError(FshardingError, RuntimeError):
    """A loss function combines parameters with a batch leaf of an incompatible dtype or device."""


class DonatedError(FshardingError, RuntimeError):
    """A state was used after it was donated to a step."""


class NonFiniteError(FshardingError, FloatingPointError):
    """Loss or gradients aren't finite; all ranks rejected the step, and the state is unchanged."""


class ReplicaError(FshardingError, RuntimeError):
    """Ranks have different values of the same part of a state."""


class RankError(FshardingError, RuntimeError):
    """A rank raised, died or hung, or is in a different call than the ranks that wait for it.

    Attributes:
        ranks: Global ranks that caused it, if known.
        stacks: Positions by rank, of ranks that could still report: their call, phase, collective, awaited ranks and
            innermost stack lines.
    """

    def __init__(self, text: str = "", ranks: tuple[int, ...] = (), stacks: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.ranks, self.stacks = ranks, dict(stacks or {})


def message(rule: str, rows: Iterable[str] = (), mend: str = "") -> str:
    """Format an error of the innermost public call: its name, then `rule`, which completes the sentence."""
    return report(f"{public_name()} {rule}", rows, mend)


def report(text: str, rows: Iterable[str] = (), mend: str = "") -> str:
    """Format an error: a sentence, one indented row per offending leaf (the first ten, and a count), then the fix."""
    # More lines of a row are indented further, so that none looks like a row. `printable` bounds and escapes each line.
    rest = iter(rows)
    lines = _lines(text)
    for row in islice(rest, _MOST_ROWS):
        first, *more = _lines(row)
        lines += [f"  {first}", *(f"    {line}" for line in more)]
    if left := sum(1 for _ in rest):
        lines.append(f"  and {left:,} more")
    if mend:
        lines += _lines(mend, _LONGEST_MEND)
    return "\n".join(lines)


def listed(names: Iterable[str], *, none: str = "none") -> str:
    """Join names, such as "a, b, c": the first ten, and the number of the rest."""
    rest = iter(names)
    first = [*islice(rest, _MOST_ROWS)]
    left = sum(1 for _ in rest)
    return ", ".join(first or [none]) + (f" and {left:,} more" if left else "")


def printable(text: str, longest: int = _LONGEST_LINE) -> str:
    """Escape control characters like Python; keep only both ends of a text longer than `longest`."""
    if len(text) > longest:
        # Truncate first: a hostile text may be huge.
        return f"{printable(text[:_HEAD])} ... {printable(text[-_TAIL:])} ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _lines(text: str, longest: int = _LONGEST_LINE) -> list[str]:
    """Split a text into at most `_MOST_LINES` printable lines."""
    lines = text.split("\n", _MOST_LINES)
    if len(lines) > _MOST_LINES:
        lines[-1] = f"... and {lines[-1].count(chr(10)) + 1:,} more lines"
    return [printable(line, longest) for line in lines]


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return " Did you mean 'x'?" for the most similar known name; "" if none reaches the cutoff (0 to 1)."""
    close = difflib.get_close_matches(name, list(known), 1, cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""
