"""What a rank does in one collective call: the units that it gathers and reduces, in order, as a hash and as text.

Guarantee: equal sequences have equal hashes on every machine; a note keeps no tensor alive.
"""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from fsharding.base.errors import message
from fsharding.mesh import call_stacks

__all__ = [
    "COUNTED", "DIGEST_BITS", "SAME_BUFFERS", "SAME_CONSTANTS", "SAME_KEYS", "SAME_RATES", "Comparison", "Difference",
    "UnitOrder", "UnlikeRanks", "by_value", "differences",
]  # fmt: skip

_T = TypeVar("_T", bound=Hashable)

DIGEST_BITS = 64
_MASK = (1 << DIGEST_BITS) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_KEPT = 1024  # notes that are kept for the text of an error; the hash is of all of them
_END = "ends"
COUNTED = "state.step"  # the name of the fact about a number of updates that a device counts
SAME_CONSTANTS = "computes with"  # the kind of a note about buffers and tensor attributes of a module
SAME_KEYS = "uses the key"
"""The kind of a note about the key of a run and the number of the step, from which keys of a step follow."""
SAME_RATES = "was last updated with"  # the kind of a note about the learning rates of the update before

Site = tuple[str, int]  # file and line of the user's call


class UnlikeRanks(RuntimeError):
    """Ranks that have to do the same do not; `naming_lost` makes a `RankError` of it."""

    # `ranks`: global ranks that compared, all of which raise it.

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__("ranks that have to do the same differ")
        self.ranks = tuple(ranks)


class Comparison(NamedTuple):
    """How ranks compare a number."""

    ranks: Sequence[int]
    ask: Callable[[int], Sequence[int]]  # given this rank's int64, the numbers of all of them. Collective


class Difference(NamedTuple):
    """What differs between ranks: the text of an error, and the ranks that are fewest."""

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

    # `digest`: a hash of kinds and units since `restart`, `DIGEST_BITS` wide.
    # `facts`: what ranks of one data position have to share, by name, as callables: they are asked for an error only.
    # `names`: of leaves by their storage, for gathers of leaves that no tree of parameters names.

    def __init__(self) -> None:
        self.digest = 0
        self.facts: Mapping[str, Callable[[], str]] = {}
        self.names: Mapping[int, str] = {}
        self._notes: deque[_Note] = deque(maxlen=_KEPT)
        self._count = 0
        self._comparison: Comparison | None = None
        self._always: Comparison | None = None

    @property
    def compares(self) -> bool:
        """Whether notes are compared."""
        return self._comparison is not None

    @property
    def compares_plans(self) -> bool:
        """Whether members of a group also compare what each collective is to do."""
        return self._always is not None

    def restart(self) -> None:
        """Begin a sequence."""
        self.digest = 0
        self._count = 0
        self._comparison = self._always
        self._notes.clear()

    def compare(self, comparison: Comparison) -> None:
        """Compare the hash at each note of this sequence, among ranks that have to do the same."""
        self._comparison = comparison

    def compare_always(self, comparison: Comparison) -> None:
        """Compare the hash at each note of this sequence and of those that follow it in the same call."""
        self._comparison = self._always = comparison

    def note(self, kind: str, unit: Hashable, name: Callable[[], str], site: Site | None) -> None:
        """Note that the collectives of a unit start now."""
        code = _code(kind, unit)
        self.digest = (self.digest * _MULTIPLIER + code) & _MASK
        self._notes.append(_Note(code, kind, name, site))
        self._count += 1
        if self._comparison is not None:
            own = self.digest >> 1  # int64
            if any(other != own for other in self._comparison.ask(own)):
                raise UnlikeRanks(self._comparison.ranks)

    def end(self, what: str) -> None:
        """Note that a part of the call ends, so a rank with fewer units is told from one with more."""
        self.note(_END, what, lambda: f"its {what}", None)

    def report(self, *, facts: bool = True) -> dict[str, Any]:
        """The sequence, and facts if they are wanted, as JSON can say it."""
        notes = [(note.code, note.words()) for note in self._notes.copy()]
        said = {name: text() for name, text in self.facts.items()} if facts else {}
        return {"count": self._count, "units": notes, "facts": said}


@functools.lru_cache(maxsize=1 << 14)
def _code(kind: str, unit: Hashable) -> int:
    return int.from_bytes(hashlib.blake2b(repr((kind, unit)).encode(), digest_size=8).digest(), "big")


# ----------------------------------------------------------------------------------------------------------- the words
Who = Callable[[Sequence[int]], str]  # words ranks, with their coordinates

_ORDER = (
    "Gather the same units in the same order on every rank: choose branches and dropped layers by a key that all ranks"
    " share, such as the step's, and gather a unit on the ranks that don't need it, too."
)
SAME_BUFFERS = (
    "Build the module from one seed or file on every rank, or send the buffers of one rank to all before"
    " fs.functionalize: torch.distributed.broadcast(buffer, 0)."
)
"""The edit for modules whose buffers differ between ranks."""
_RATES = (
    "Compute rates from the count alone, or from numbers that all ranks share, such as metrics.loss. Continue from a"
    " checkpoint of before that update."
)
_STEPS = "Give every rank the same state.key and state.step: the keys that a step draws with follow from both."
_ROWS = (
    "Ranks along tp and pp read the same rows: take them with fs.local_batch(batch, mesh), or by"
    " fs.data_rank_and_size(mesh)."
)


def differences(
    reports: Mapping[int, Mapping[str, Any]], coordinates: Mapping[int, Mapping[str, int]], who: Who
) -> Difference | None:
    """The text about ranks whose sequences or facts differ; None if those that are known do not."""
    # A sequence that ends where another one goes on is no difference: its rank may only be slower.
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
        facts = {rank: reports[rank]["facts"] for rank in ranks}
        names = dict.fromkeys(name for of_rank in facts.values() for name in of_rank)
        rows = [
            f"{name}: {who(some)} {'has' if len(some) == 1 else 'have'} {text}"
            for name in names
            if len(parts := by_value({rank: of_rank.get(name, "nothing") for rank, of_rank in facts.items()})) > 1
            for some, text in parts
        ]
        if rows:
            rule = f"gets different rows on {who(sorted(ranks))}, which have to read the same."
            if rows[0].startswith(f"{COUNTED}: "):
                rule = f"gets states of different steps on {who(sorted(ranks))}."
                return Difference(message(rule, rows, _STEPS), tuple(ranks))
            return Difference(message(rule, rows, _ROWS), tuple(ranks))
    return None


def _sharing(
    reports: Iterable[int], coordinates: Mapping[int, Mapping[str, int]], apart: Sequence[str]
) -> list[list[int]]:
    """The ranks with reports, together where they have the same coordinates along some axes."""
    result: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(reports):
        place = coordinates.get(rank, {})
        result.setdefault(tuple(place.get(axis, 0) for axis in apart), []).append(rank)
    return [ranks for ranks in result.values() if len(ranks) > 1]


def _at_first_difference(reports: Mapping[int, Mapping[str, Any]]) -> list[tuple[list[int], str]]:
    """Which ranks are at which unit where sequences first differ, the rarest first; nothing if they do not."""
    firsts = {rank: report["count"] - len(report["units"]) for rank, report in reports.items()}
    ends = [report["count"] for report in reports.values()]
    for place in range(max(firsts.values()), max(ends)):
        here = {
            rank: report["units"][place - firsts[rank]] for rank, report in reports.items() if place < report["count"]
        }
        if len(parts := by_value({rank: code for rank, (code, _) in here.items()})) > 1:
            return [(ranks, f"{here[ranks[0]][1]}, entry {place + 1:,} of the call") for ranks, _ in parts]
    return []


def by_value(values: Mapping[int, _T]) -> list[tuple[list[int], _T]]:
    """Ranks by their values, the rarest first."""
    having: dict[_T, list[int]] = {}
    for rank, value in values.items():
        having.setdefault(value, []).append(rank)
    return [(ranks, value) for value, ranks in sorted(having.items(), key=lambda item: (len(item[1]), -item[1][0]))]
