"""Find the ranks that a failure is due to: reports in a store, a listener that answers, and blame followed."""

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
_LINGER_S = 2.0  # how long the rank that has the store stays for the questions of the others
_LOOK_S = 0.1  # how often a rank looks whether it is asked; less often where there are many, for the store's sake
_MOST_STACKS = 64


def own_rank() -> int:
    """Return the global rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return how many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_fake_world() -> bool:
    """Return whether the ranks are torch's fake ones, of which only this one exists."""
    world = dist.group.WORLD
    return world is not None and has_fake_backend(world)


def in_one_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")


# ------------------------------------------------------------------------------------------------------- the listener
class Listener(threading.Thread):
    """Answer where this rank is, while its other threads wait or compute."""

    def __init__(self, world: Any, store: Any, places: Callable[[], list[dict[str, Any]]]) -> None:
        super().__init__(name="fsharding-listener", daemon=True)
        self.world, self._store, self._rank = world, store, own_rank()
        self._look = max(_LOOK_S, world_size() / 2000)
        self._end = threading.Event()
        self._asked = b""
        self._places = places

    def run(self) -> None:
        """Answer until the process ends, then record that."""
        # The process that has the store may end first; then nothing is left to answer.
        with suppress(RuntimeError):
            while not self._end.wait(self._look):
                if dist.group.WORLD is not self.world or not self._answer():
                    return
            error = getattr(sys, "last_value", None)
            ended = "has ended" if error is None else f"has ended: {in_one_line(error)}"
            # Kept beside what it has found out: others may still be on their way to the same cause.
            self._store.set(KEY.format(self._rank), json.dumps({**_own_note, "raised": ended}))
            if _host() == self._rank:
                # torch writes a page on each rank whose store is gone while it looks.
                self._store.set(QUESTION, _OVER)
                time.sleep(2 * self._look)

    def _answer(self) -> bool:
        """Answer the current question if it is a new one; return whether there may be others."""
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
        """Stop it; it has a moment to record that the process ends."""
        self._end.set()
        self.join(1.0)


_listener: Listener | None = None


def listen(places: Callable[[], list[dict[str, Any]]]) -> None:
    """Start the listener of this rank, once a world; it answers with the places of its threads."""
    global _listener
    world = dist.group.WORLD
    if (_listener is not None and _listener.world is world) or is_fake_world():
        return
    if _listener is None:
        atexit.register(lambda: None if _listener is None else _listener.end())
    _listener = Listener(world, own_connection(default_store()), places)
    _listener.start()


_own_note: Notes = {}  # the latest that this rank has written of itself and not taken back


def post(note: Notes) -> None:
    """Write a note of this rank into the store of all."""
    global _own_note
    _own_note = note
    store = default_store()
    if store is not None:
        store.set(KEY.format(own_rank()), json.dumps(note))


def forget() -> None:
    """Take back what was written at an earlier failure, after which this rank goes on all the same."""
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
    """Return the note of a rank that has failed, None without one, and where its threads are if it has answered."""
    note, answer = (
        json.loads(store.get(key)) if store.check([key]) else None for key in (KEY.format(rank), PLACE_KEY.format(rank))
    )
    return note, answer["places"] if answer is not None and answer["to"] == asked else []


def read_report(rank: int, asked: str, function: str, store: Any) -> Notes | None:
    """Return the report of a failed rank, else its answer, preferably from a thread in the same function."""
    note, places = _written(store, rank, asked)
    # A thread that waits says more than one that waits for that thread.
    inside = [place for place in places if place["function"] == function]
    place = min(inside, key=lambda place: "waits" not in place, default=None)
    if note is None:
        return place or next(iter(places), None)
    return place if place is not None and note.get("function", function) != function else note


def ask(store: Any, again: bool = False) -> str:
    """Ask all ranks where they are; return the question that stands now in the store."""
    if again or not store.check([QUESTION]):
        store.set(QUESTION, f"{time.time_ns()} {own_rank()}")
    return store.get(QUESTION).decode()


def bounded(call: Callable[[], _T], seconds: float) -> _T | None:
    """Run a call with a time limit; None if it fails or takes longer: the machine that has the store may be gone."""
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
    """A rank that is the cause of a failure."""

    kind: str  # gone, raised, elsewhere (in another call, or in none), busy (in this one) or sizes (in this one)
    text: str
    function: str = ""  # that it is in, if it is elsewhere; "" for none


@dataclasses.dataclass
class Followed:
    """Where blame leads."""

    causes: dict[int, Cause] = dataclasses.field(default_factory=dict[int, Cause])
    silent: list[int] = dataclasses.field(default_factory=list[int])  # blamed, and without an answer
    met: dict[int, str] = dataclasses.field(default_factory=dict[int, str])  # where ranks wait in the same function
    cause_known: bool = False  # one of them has found the cause out already
    places: dict[int, Sequence[Notes]] = dataclasses.field(default_factory=dict[int, Any])  # what each rank has said


def follow(peers: Sequence[int], me: int, read: Callable[[int], Notes | None], function: str = "") -> Followed:
    """Follow blame from rank to rank, by the report of each: of one that has failed, or of one that lives."""
    # A report has "function", "call" and "now"; of a failure also {"peers": ranks that it blames}, with "causes" once
    # it has found them, or {"raised": what}, which stands beside causes if it has ended since; else {"waits": ranks}.
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
    """Follow blame to its end; without other notes, to the ranks that this rank blames."""
    host = _host()
    result = bounded(lambda: _asked(peers, patience, call, here), patience + LEAST_S)
    if result is None:
        lost_peers = peers if host is None or host == own_rank() else (host,)
        causes = dict.fromkeys(lost_peers, Cause("gone", GONE))
        return Followed(causes, places={own_rank(): [{**here, "call": str(call), "waits": peers}]})
    if host == own_rank():
        bounded(lambda: _linger(result.causes), _LINGER_S)
    if not result.causes:
        result.causes = dict.fromkeys(peers, Cause("gone", "lives, but the connection to it is lost"))
    return result


def _asked(peers: tuple[int, ...], patience: float, call: Call, here: Notes) -> Followed:
    me, store = own_rank(), default_store()
    until = time.monotonic() + patience
    note = {"peers": peers, "function": call.function, "call": str(call), **here}
    post(note)
    ask(store, again=True)
    while True:
        # Several ranks ask, and each may go on and take its question back.
        asked = ask(store)
        read = functools.partial(read_report, asked=asked, function=call.function, store=store)
        result = follow(peers, me, read, call.function)
        kinds = {cause.kind for cause in result.causes.values()}
        # One that seems busy may be about to fail, too, and say so.
        open_ends = bool(result.silent) or "busy" in kinds
        if result.cause_known or "raised" in kinds or not open_ends or time.monotonic() > until:
            break
        time.sleep(0.02)
    result.causes = _causes(result, call)
    post({**note, "causes": result.causes})
    result.places = _reports(asked, {me: [note]}, result.silent)
    return result


def _reports(asked: str, known: Mapping[int, Sequence[Notes]], silent: Sequence[int]) -> dict[int, Sequence[Notes]]:
    """Return the reports of all ranks, once each has looked whether it is asked; of very many ranks, the first ones."""
    result = dict(known)
    store = default_store()
    until = time.monotonic() + 2 * max(_LOOK_S, world_size() / 2000)
    left = [rank for rank in range(min(world_size(), _MOST_STACKS)) if rank not in {*result, *silent}]
    while left:
        for rank in left:
            note, places = _written(store, rank, asked)
            # Where it failed says more than where it stands now, which is here.
            if found := [note] if note is not None and "stack" in note else places:
                result[rank] = found
        left = [rank for rank in left if rank not in result]
        if time.monotonic() > until:
            break
        time.sleep(0.02 if left else 0.0)
    return dict(sorted(result.items()))


def _causes(result: Followed, call: Call) -> dict[int, Cause]:
    """Keep those that explain most: one that is gone may be why others are elsewhere, and that, why others are busy."""
    known = {**dict.fromkeys(result.silent, Cause("gone", GONE)), **result.causes}
    for kinds in (("gone", "raised"), ("elsewhere",), ("busy",)):
        if causes := {rank: it for rank, it in sorted(known.items()) if it.kind in kinds}:
            return causes
    # All wait in this function: then not all have called it from the same place, or in the same step.
    return {r: Cause("elsewhere", at, call.function) for r, at in sorted(result.met.items()) if at and at != str(call)}


def _host() -> int | None:
    """Return the rank with which the store ends."""
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
