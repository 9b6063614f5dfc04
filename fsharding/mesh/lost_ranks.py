"""Find the ranks that caused a failure: ranks write reports to a store, and a listener answers for ranks that wait."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch.distributed as dist

from fsharding.mesh.backends import default_store, has_fake_backend, is_served_by_rank, own_connection
from fsharding.mesh.call_stacks import Call

__all__ = [
    "GONE", "KEY", "LEAST_S", "PLACE_KEY", "QUESTION", "Cause", "Followed", "Listener", "Notes", "ask", "bounded",
    "follow", "forget", "in_one_line", "is_fake_world", "listen", "lost", "own_rank", "post", "read_report",
    "world_size",
]  # fmt: skip

_T = TypeVar("_T")
Notes: TypeAlias = Mapping[str, Any]

KEY = "fsharding_lost_{}"
PLACE_KEY = "fsharding_place_{}"
QUESTION = "fsharding_question"
_OVER = "the store ends"
GONE = "is gone, or does not answer"
LEAST_S = 1.5
_LINGER_S = 2.0  # how long the rank that serves the store waits for the others to read it
_LOOK_S = 0.1  # interval at which a listener polls the store; longer with many ranks, to limit the store's load
_MOST_STACKS = 64


def own_rank() -> int:
    """Return the global rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_fake_world() -> bool:
    """Return whether the default group has torch's fake backend: only this rank exists."""
    world = dist.group.WORLD
    return world is not None and has_fake_backend(world)


def in_one_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")


# ------------------------------------------------------------------------------------------------------- the listener
class Listener(threading.Thread):
    """Report this rank's position on request, while its other threads wait or compute."""

    def __init__(self, world: Any, store: Any, places: Callable[[], list[dict[str, Any]]]) -> None:
        super().__init__(name="fsharding-listener", daemon=True)
        self.world, self._store, self._rank = world, store, own_rank()
        self._look = max(_LOOK_S, world_size() / 2000)
        self._end = threading.Event()
        self._asked = b""
        self._places = places

    def run(self) -> None:
        """Answer questions until the process ends, then record the end."""
        # The process that serves the store may end first: then the store raises, and nothing is left to answer.
        with suppress(RuntimeError):
            while not self._end.wait(self._look):
                if dist.group.WORLD is not self.world or not self._answer():
                    return
            error = getattr(sys, "last_value", None)
            ended = "has ended" if error is None else f"has ended: {in_one_line(error)}"
            # Keep the causes that it has found: others may still be looking for the same ones.
            self._store.set(KEY.format(self._rank), json.dumps({**_own_note, "raised": ended}))
            if _host() == self._rank:
                # Stop the other listeners first: torch logs a page on each rank whose store disappears during a read.
                self._store.set(QUESTION, _OVER)
                time.sleep(2 * self._look)

    def _answer(self) -> bool:
        """Answer the current question if it is new; return whether to continue."""
        asked = self._store.get(QUESTION) if self._store.check([QUESTION]) else b""
        key = PLACE_KEY.format(self._rank)
        if asked.decode() == _OVER:
            return False
        if asked and asked != self._asked:
            self._store.set(key, json.dumps({"to": asked.decode(), "places": self._places()}))
        elif self._asked and not asked:
            self._store.delete_key(key)
        self._asked = asked
        return True

    def end(self) -> None:
        """Stop the listener, which first records that the process ends."""
        self._end.set()
        self.join(1.0)


_listener: Listener | None = None


def listen(places: Callable[[], list[dict[str, Any]]]) -> None:
    """Start the listener of this rank, once per default process group; it answers with `places()`."""
    global _listener
    world = dist.group.WORLD
    if (_listener is not None and _listener.world is world) or is_fake_world():
        return
    if _listener is None:
        atexit.register(lambda: None if _listener is None else _listener.end())
    _listener = Listener(world, own_connection(default_store()), places)
    _listener.start()


_own_note: Notes = {}  # this rank's latest note, unless it was deleted


def post(note: Notes) -> None:
    """Write a note about this rank to the store."""
    global _own_note
    _own_note = note
    store = default_store()
    if store is not None:
        store.set(KEY.format(own_rank()), json.dumps(note))


def forget() -> None:
    """Delete the notes of an earlier failure that the program has handled."""
    global _own_note
    if not _own_note:
        return
    store = default_store()
    _own_note = {}
    if store is not None:
        with suppress(RuntimeError, NotImplementedError):
            for key in (KEY.format(own_rank()), QUESTION):
                store.delete_key(key)


def _written(store: Any, rank: int, asked: str) -> tuple[Any, list[Any]]:
    """Return a failed rank's note, or None, and the positions of its threads if it has answered the question."""
    note, answer = (
        json.loads(store.get(key)) if store.check([key]) else None for key in (KEY.format(rank), PLACE_KEY.format(rank))
    )
    return note, answer["places"] if answer is not None and answer["to"] == asked else []


def read_report(rank: int, asked: str, function: str, store: Any) -> Notes | None:
    """Return the report of a failed rank, else its answer, preferably of a thread in the same function."""
    note, places = _written(store, rank, asked)
    # Prefer a thread that waits for ranks over one that waits for that thread.
    inside = [place for place in places if place["function"] == function]
    place = min(inside, key=lambda place: "waits" not in place, default=None)
    if note is None:
        return place or next(iter(places), None)
    return place if place is not None and note.get("function", function) != function else note


def ask(store: Any, again: bool = False) -> str:
    """Request the positions of all ranks; return the question that is now in the store."""
    if again or not store.check([QUESTION]):
        store.set(QUESTION, f"{time.time_ns()} {own_rank()}")
    return store.get(QUESTION).decode()


def bounded(call: Callable[[], _T], seconds: float) -> _T | None:
    """Run a call with a time limit; None if it fails or takes longer: the store's machine may be down."""
    result: list[_T] = []

    def run() -> None:
        with suppress(RuntimeError, OSError):
            result.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


# ---------------------------------------------------------------------------------------------------------- the cause
class Cause(NamedTuple):
    """Why a rank caused a failure."""

    kind: str  # "gone", "raised", "elsewhere" (in a different call or none), or, in this call, "busy" or "sizes"
    text: str
    function: str = ""  # the different call, or ""


@dataclasses.dataclass
class Followed:
    """The result of following blame."""

    causes: dict[int, Cause] = dataclasses.field(default_factory=dict[int, Cause])
    silent: list[int] = dataclasses.field(default_factory=list[int])  # blamed ranks without an answer
    met: dict[int, str] = dataclasses.field(default_factory=dict[int, str])  # calls of ranks in the same function
    cause_known: bool = False  # whether one of them has already found the cause
    places: dict[int, Sequence[Notes]] = dataclasses.field(default_factory=dict[int, Any])  # reports by rank


def follow(peers: Sequence[int], me: int, read: Callable[[int], Notes | None], function: str = "") -> Followed:
    """Follow blame from rank to rank, by their reports."""
    # A report has "function", "call" and "now". A rank that lost others adds "peers", the ranks that it blames, and
    # "causes" once it has found them; one that raised or ended adds "raised"; one that waits adds "waits".
    result = Followed()
    seen = {me}
    front = list(peers)
    while front:
        rank = front.pop(0)
        if rank in seen:
            continue
        seen.add(rank)
        note = read(rank)
        here = note is not None and note.get("function", function) == function
        if note is None:
            result.silent.append(rank)
        elif "raised" in note and not (note.get("causes") and here):
            result.causes[rank] = Cause("raised", note["raised"])
        elif "sizes" in note and here:
            result.causes[rank] = Cause("sizes", note["sizes"])
        elif not here:
            result.causes[rank] = Cause("elsewhere", note["call"], note["function"])
        elif note.get("causes"):
            result.causes |= {int(other): Cause(*cause) for other, cause in note["causes"].items()}
            result.met[rank], result.cause_known = note.get("call", ""), True
        elif "peers" in note or "waits" in note:
            result.met[rank] = note.get("call", "")
            front += note.get("peers") or note.get("waits", ())
        else:
            result.causes[rank] = Cause("busy", f"is busy in {note['call']}: {note['now']}")
    result.causes = dict(sorted(result.causes.items()))
    result.silent.sort()
    return result


def lost(peers: tuple[int, ...], patience: float, call: Call, here: Notes) -> Followed:
    """Follow blame to its causes; without reports of others, these are the ranks that this rank blames."""
    host = _host()
    result = bounded(lambda: _asked(peers, patience, call, here), patience + LEAST_S)
    if result is None:
        lost_peers = peers if host is None or host == own_rank() else (host,)
        causes = dict.fromkeys(lost_peers, Cause("gone", GONE))
        return Followed(causes, places={own_rank(): [{**here, "call": str(call), "waits": peers}]})
    if host == own_rank():
        bounded(lambda: _linger(result.causes), _LINGER_S)
    if not result.causes:
        result.causes = dict.fromkeys(peers, Cause("gone", "is alive, but the connection to it is lost"))
    return result


def _asked(peers: tuple[int, ...], patience: float, call: Call, here: Notes) -> Followed:
    me, store = own_rank(), default_store()
    until = time.monotonic() + patience
    note = {"peers": peers, "function": call.function, "call": str(call), **here}
    post(note)
    ask(store, again=True)
    while True:
        # Read the question again each time: several ranks ask, and each may continue and delete its question.
        asked = ask(store)
        read = functools.partial(read_report, asked=asked, function=call.function, store=store)
        result = follow(peers, me, read, call.function)
        kinds = {cause.kind for cause in result.causes.values()}
        # A busy rank may be about to fail and report it.
        open_ends = bool(result.silent) or "busy" in kinds
        if result.cause_known or "raised" in kinds or not open_ends or time.monotonic() > until:
            break
        time.sleep(0.02)
    result.causes = _causes(result, call)
    post({**note, "causes": result.causes})
    result.places = _reports(asked, {me: [note]}, result.silent)
    return result


def _reports(asked: str, known: Mapping[int, Sequence[Notes]], silent: Sequence[int]) -> dict[int, Sequence[Notes]]:
    """Return the reports of all ranks, or of the first `_MOST_STACKS`, after each had time to answer."""
    result = dict(known)
    store = default_store()
    until = time.monotonic() + 2 * max(_LOOK_S, world_size() / 2000)
    left = [rank for rank in range(min(world_size(), _MOST_STACKS)) if rank not in {*result, *silent}]
    while left:
        for rank in left:
            note, places = _written(store, rank, asked)
            # Prefer the stack of the failure: a failed rank's current position is only this exchange.
            if found := [note] if note is not None and "stack" in note else places:
                result[rank] = found
        left = [rank for rank in left if rank not in result]
        if time.monotonic() > until:
            break
        time.sleep(0.02 if left else 0.0)
    return dict(sorted(result.items()))


def _causes(result: Followed, call: Call) -> dict[int, Cause]:
    """Keep the causes that explain the others."""
    # A lost rank may be why others are elsewhere, and that why some are busy.
    known = {**dict.fromkeys(result.silent, Cause("gone", GONE)), **result.causes}
    for kinds in (("gone", "raised"), ("elsewhere",), ("busy",)):
        if causes := {rank: it for rank, it in sorted(known.items()) if it.kind in kinds}:
            return causes
    # All ranks wait in this function, so some called it at a different place or in a different step.
    return {r: Cause("elsewhere", at, call.function) for r, at in sorted(result.met.items()) if at and at != str(call)}


def _host() -> int | None:
    """Return the rank that serves the store, if one does."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if is_served_by_rank(default_store()) and not agents else None


def _linger(lost: Mapping[int, Cause]) -> None:
    others = {*range(world_size())} - {own_rank(), *lost}
    until = time.monotonic() + _LINGER_S
    store = default_store()
    assert store is not None
    while others and time.monotonic() < until:
        notes = {rank: store.get(key) for rank in others if store.check([key := KEY.format(rank)])}
        others = {rank for rank in others if not {"causes", "raised"} & {*json.loads(notes.get(rank, b"{}"))}}
        time.sleep(0.02)
    time.sleep(0.1 if lost else 0.0)
