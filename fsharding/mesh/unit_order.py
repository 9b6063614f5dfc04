"""Record the units that a rank gathers and reduces in one collective call, in order, as a hash and as text.

Equal sequences have equal hashes on every machine; a record keeps no tensor alive.
"""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from fsharding.base.errors import message
from fsharding.mesh import call_stacks

__all__ = [
    "COUNTED", "DIGEST_BITS", "SAME_BUFFERS", "SAME_CONSTANTS", "SAME_KEYS", "SAME_RATES", "Comparison", "Difference",
    "UnitOrder", "UnlikeRanks", "differences", "unlike_facts",
]  # fmt: skip

_T = TypeVar("_T", bound=Hashable)

DIGEST_BITS = 64
_MASK = (1 << DIGEST_BITS) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_KEPT = 1024  # notes kept for error messages; the hash covers all
_END = "ends"
COUNTED = "state.step"  # name of the fact about a step count on the device
SAME_CONSTANTS = "computes with"  # kind of a note about buffers and tensor attributes of a module
SAME_KEYS = "uses the key"  # kind of a note about the run's key and the number of the step
SAME_RATES = "was last updated with"  # kind of a note about the learning rates of the previous update

Site = tuple[str, int]  # file and line of the user's call


class UnlikeRanks(RuntimeError):
    """Ranks that have to do the same differ; `naming_lost` turns it into a `RankError`."""

    # `ranks`: the global ranks that compared; all of them raise it.

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__("ranks that have to do the same differ")
        self.ranks = tuple(ranks)


class Comparison(NamedTuple):
    """A way to compare a number between ranks."""

    ranks: Sequence[int]
    ask: Callable[[int], Sequence[int]]  # all-gathers an int64 of each rank


class Difference(NamedTuple):
    """A difference between ranks: the error's text, and the ranks in the minority."""

    text: str
    ranks: tuple[int, ...]


class _Note(NamedTuple):
    code: int
    kind: str
    name: Callable[[], str]
    site: Site | None

    def words(self) -> str:
        place = "" if self.site is None else f" at {call_stacks.shown(*self.site)}"
        return f"{self.kind} {self.name()}{place}"


class UnitOrder:
    """The units of one call, in order."""

    # `digest`: hash of kinds and units since `restart`, `DIGEST_BITS` wide.
    # `comparison`: how each note of this sequence is compared between ranks, if it is. `always`: the same for later
    # sequences of the call, and for the plan of each collective.
    # `facts`: what ranks with the same data have to share, by name; callables, because only errors need the values.
    # `names`: names of leaves by storage, for gathers of leaves that aren't in a parameter tree.

    def __init__(self) -> None:
        self.digest = 0
        self.comparison: Comparison | None = None
        self.always: Comparison | None = None
        self.facts: Mapping[str, Callable[[], str]] = {}
        self.names: Mapping[int, str] = {}
        self._notes: deque[_Note] = deque(maxlen=_KEPT)
        self._count = 0

    def restart(self) -> None:
        """Start a new sequence."""
        self.digest = 0
        self._count = 0
        self.comparison = self.always
        self._notes.clear()

    def note(self, kind: str, unit: Hashable, name: Callable[[], str], site: Site | None) -> None:
        """Record that the collectives of a unit start."""
        code = _code(kind, unit)
        self.digest = (self.digest * _MULTIPLIER + code) & _MASK
        self._notes.append(_Note(code, kind, name, site))
        self._count += 1
        if self.comparison is not None:
            own = self.digest >> 1  # int64
            if any(other != own for other in self.comparison.ask(own)):
                raise UnlikeRanks(self.comparison.ranks)

    def end(self, what: str) -> None:
        """Record the end of a phase, so that a rank with fewer units than the others has a different hash."""
        self.note(_END, what, lambda: f"its {what}", None)

    def report(self, *, facts: bool = True) -> dict[str, Any]:
        """Return the sequence, and optionally the facts, as JSON values."""
        notes = [(note.code, note.words()) for note in self._notes.copy()]
        values = {name: text() for name, text in self.facts.items()} if facts else {}
        return {"count": self._count, "units": notes, "facts": values}


@functools.lru_cache(maxsize=1 << 14)
def _code(kind: str, unit: Hashable) -> int:
    return int.from_bytes(hashlib.blake2b(repr((kind, unit)).encode(), digest_size=8).digest(), "big")


# ----------------------------------------------------------------------------------------------------------- the words
Who = Callable[[Sequence[int]], str]  # names ranks, with their coordinates

_ORDER = (
    "Gather the same units in the same order on every rank: choose branches and dropped layers by a key that all ranks"
    " share, such as the step's, and gather a unit also on ranks that don't need it."
)
SAME_BUFFERS = (
    "Build the module from one seed or file on every rank, or send the buffers of one rank to all before"
    " fs.functionalize: torch.distributed.broadcast(buffer, 0)."
)
_RATES = (
    "Compute rates from the count alone, or from numbers that all ranks share, such as metrics.loss. Resume from a"
    " checkpoint before that update."
)
_STEPS = "Use the same state.key and state.step on every rank: a step derives its keys from both."
_ROWS = "Read the same rows on ranks along tp and pp: use fs.local_batch(batch, mesh), or fs.data_rank_and_size(mesh)."


def differences(
    reports: Mapping[int, Mapping[str, Any]], coordinates: Mapping[int, Mapping[str, int]], who: Who
) -> Difference | None:
    """Word how the sequences or facts of ranks differ; None if they don't."""
    # A sequence that is a prefix of a different one doesn't count: its rank may only be slower.
    for ranks in _sharing(reports, coordinates, apart=("pp",)):
        if rows := _at_first_difference({rank: reports[rank] for rank in ranks}):
            odd = rows[0][0]
            others = [rank for ranks, _ in rows[1:] for rank in ranks]
            rule = f"does different things on {who(odd)} than on {who(sorted(others))}."
            mends = {SAME_CONSTANTS: SAME_BUFFERS, SAME_RATES: _RATES, SAME_KEYS: _STEPS}
            kinds = (kind for kind in mends if all(text.startswith(kind) for _, text in rows))
            mend = mends.get(next(kinds, ""), _ORDER)
            text = message(rule, [f"{who(ranks)}: {text}" for ranks, text in rows], mend)
            return Difference(text, tuple(odd))
    for ranks in _sharing(reports, coordinates, apart=("replica", "dp", "ep", "cp")):
        rows = [
            f"{name}: {who(some)} {'has' if len(some) == 1 else 'have'} {text}"
            for name, parts in unlike_facts({rank: reports[rank]["facts"] for rank in ranks})
            for some, text in parts
        ]
        if rows:
            rule, mend = f"gets different rows on {who(sorted(ranks))}, which have to read the same.", _ROWS
            if rows[0].startswith(f"{COUNTED}: "):
                rule, mend = f"gets states of different steps on {who(sorted(ranks))}.", _STEPS
            return Difference(message(rule, rows, mend), tuple(ranks))
    return None


def _sharing(
    reports: Iterable[int], coordinates: Mapping[int, Mapping[str, int]], apart: Sequence[str]
) -> list[list[int]]:
    """Group the ranks that have reports by their coordinates along some axes."""
    result: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(reports):
        place = coordinates.get(rank, {})
        result.setdefault(tuple(place.get(axis, 0) for axis in apart), []).append(rank)
    return [ranks for ranks in result.values() if len(ranks) > 1]


def _at_first_difference(reports: Mapping[int, Mapping[str, Any]]) -> list[tuple[list[int], str]]:
    """Return the ranks at each unit where sequences first differ, the rarest first; [] if they don't."""
    firsts = {rank: report["count"] - len(report["units"]) for rank, report in reports.items()}
    ends = [report["count"] for report in reports.values()]
    for place in range(max(firsts.values()), max(ends)):
        here = {
            rank: report["units"][place - firsts[rank]] for rank, report in reports.items() if place < report["count"]
        }
        if len(parts := _by_value({rank: code for rank, (code, _) in here.items()})) > 1:
            return [(ranks, f"{here[ranks[0]][1]}, entry {place + 1:,} of the call") for ranks, _ in parts]
    return []


def unlike_facts(facts: Mapping[int, Mapping[str, str]]) -> Iterator[tuple[str, list[tuple[list[int], str]]]]:
    """Yield the name of each fact that differs, and the ranks at each value, the rarest first."""
    for name in dict.fromkeys(name for own in facts.values() for name in own):
        having = _by_value({rank: own.get(name, "nothing") for rank, own in facts.items()})
        if len(having) > 1:
            yield name, having


def _by_value(values: Mapping[int, _T]) -> list[tuple[list[int], _T]]:
    """Group ranks by value, the rarest first."""
    having: dict[_T, list[int]] = {}
    for rank, value in values.items():
        having.setdefault(value, []).append(rank)
    return [(ranks, value) for value, ranks in sorted(having.items(), key=lambda item: (len(item[1]), -item[1][0]))]
