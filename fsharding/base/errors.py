"""Every exception the library raises, and the one form of their texts.

Guarantee: bad input is refused on every rank, before anything has changed.
"""

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
    """Base of everything that fsharding raises on purpose."""


class ArgumentError(FshardingError, TypeError):
    """An argument of another kind than the function takes, two that are swapped, or one that was changed in place."""


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
    """A random key of the wrong shape or dtype, or a seed that is out of range."""


class DataError(FshardingError, ValueError):
    """Training data that is missing, empty or too short, or what should be token ids and is not."""


class ConfigError(FshardingError, ValueError):
    """A configuration that cannot run: bad option, unwritable directory, absent extra."""


class CheckpointError(FshardingError, ValueError):
    """A checkpoint that is absent, incomplete, damaged, or of another model."""


class DiskError(FshardingError, OSError):
    """A file of a leaf that is kept on disk: no room, a write or read that failed, or other bytes than were written."""


class ScheduleError(FshardingError, ValueError):
    """A pipeline schedule that cannot be planned, or a table that is incomplete, out of order or never ends."""


class TransformError(FshardingError, TypeError):
    """A transform applied where it has no meaning; the text says what to use."""


class NotGatheredError(TransformError, AttributeError):
    """A leaf of the parameters was used as a tensor before its unit was gathered.

    Attributes:
        leaf: the `Local` node, until its path is known.
        use: what was done with it, as the rest of a sentence that begins with the leaf.
    """

    def __init__(self, text: str = "", leaf: object = None, use: str = "") -> None:
        super().__init__(text)
        self.leaf = leaf
        self.use = use

    def __reduce__(self) -> tuple[type[NotGatheredError], tuple[str]]:
        # A node is on a mesh, which cannot travel.
        return type(self), (str(self),)


class NotDequantizedError(TransformError, AttributeError):
    """A tensor that is held in a format of low precision was used as a plain one."""


class MissingKeyError(FshardingError, KeyError):
    """A loss function asks for an entry that neither its parameters nor its batch have."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))  # KeyError's own is the repr, with the lines in one


class MissingNameError(FshardingError, AttributeError):
    """A name of torch, JAX or optax that this library does not have; the text says what does the same here."""


class FrozenError(FshardingError, dataclasses.FrozenInstanceError):
    """An attribute of a value is assigned or deleted. Values don't change; the text says how to make another one."""


class ShapeError(FshardingError, RuntimeError):
    """A loss function computes with tensors whose shapes do not go together."""


class DtypeError(FshardingError, RuntimeError):
    """A loss function computes with a leaf of the batch whose dtype or device does not go with the parameters."""


class DonatedError(FshardingError, RuntimeError):
    """A state was used after it had been donated to a step."""


class NonFiniteError(FshardingError, FloatingPointError):
    """Loss or gradients are not finite; the step was refused on all ranks and the state is as before."""


class ReplicaError(FshardingError, RuntimeError):
    """Ranks that hold the same part of a state hold different values of it."""


class RankError(FshardingError, RuntimeError):
    """A rank raised, died or hung, or is in another call than those that wait for it.

    Attributes:
        ranks: which, where that is known of a step.
        stacks: where the ranks were that could still say so, by rank: their call, the part of the work that they were
            in, the collective and the ranks that they waited for, and the innermost lines of their Python stacks.
    """

    def __init__(self, text: str = "", ranks: tuple[int, ...] = (), stacks: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.ranks, self.stacks = ranks, dict(stacks or {})


def message(rule: str, rows: Iterable[str] = (), mend: str = "") -> str:
    """Word an error of the innermost public call: its name, then `rule` as the rest of the sentence; see `report`."""
    return report(f"{public_name()} {rule}", rows, mend)


def report(text: str, rows: Iterable[str] = (), mend: str = "") -> str:
    """Word an error: what is wrong, one indented row a leaf, then the edit.

    Args:
        text: a whole sentence.
        rows: one line for each offending leaf, all of them; the text has the first ten and says how many there are
            more. The lines of a row that has several are indented further, so that none can be taken for another row.
        mend: the edit that makes it work.

    Returns:
        The text of the exception; see `printable` for what becomes of its characters, and of long lines.
    """
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
    """Join names, such as "a, b, c"; of more than ten the first ten and the number of the others."""
    rest = iter(names)
    first = [*islice(rest, _MOST_ROWS)]
    left = sum(1 for _ in rest)
    return ", ".join(first or [none]) + (f" and {left:,} more" if left else "")


def printable(text: str, longest: int = _LONGEST_LINE) -> str:
    """Escape control characters, as Python writes them; keep only both ends of a text of more than `longest`."""
    if len(text) > longest:
        # Cut first: what is left out is not looked at.
        return f"{printable(text[:_HEAD])} ... {printable(text[-_TAIL:])} ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _lines(text: str, longest: int = _LONGEST_LINE) -> list[str]:
    """The lines of a text, each as `printable` has it."""
    lines = text.split("\n", _MOST_LINES)
    if len(lines) > _MOST_LINES:
        lines[-1] = f"... and {lines[-1].count(chr(10)) + 1:,} more lines"
    return [printable(line, longest) for line in lines]


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return " Did you mean 'x'?" for the known name that is most like `name`; "" if none is. `cutoff`: 0 to 1."""
    close = difflib.get_close_matches(name, list(known), 1, cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""
