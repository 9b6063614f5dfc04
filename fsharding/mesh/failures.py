"""Lost ranks: who is gone, and who is somewhere else, when a collective fails; asked and answered in the store of all.

In: a failure of communication, and the ranks that it was with. Out: a `RankError` on every rank that is left.
A failing rank records which ranks it was waiting for and its position; a rank that raises records the exception; a
live rank answers with its position, from a thread of its own; a dead one does not answer.
Guarantees: blame goes on from rank to rank until it meets the cause; all of it takes a bounded time; where nothing
fails, nothing is written. `meet` compares what ranks are about to do where no other bytes travel.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import inspect
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsharding.base import _compat
from fsharding.base.calls import LIBRARY, call_as, name_of
from fsharding.base.errors import CheckpointError, RankError, message, report
from fsharding.mesh import call_stacks
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.backends import default_store, has_fake_backend, is_served_by_rank, own_connection
from fsharding.mesh.unit_order import UnitOrder, UnlikeRanks, differences

__all__ = [
    "Cause",
    "UnlikeSizes",
    "among",
    "called_by_all",
    "follow",
    "is_fake_world",
    "is_network_error",
    "kept_as_it_was",
    "meet",
    "naming_lost",
    "order_here",
    "own_rank",
    "place_of",
    "set_meeting",
    "unlike_ranks",
    "world_size",
    "write_stacks",
]

_T = TypeVar("_T")
_Args = ParamSpec("_Args")

_CHECKPOINTER = "fs.checkpoint.Checkpointer"
_TIMED = {
    **{name: name for name in ("fs.checkpoint.save", "fs.checkpoint.save_async", "fs.hf.save", "fs.megatron.save")},
    f"{_CHECKPOINTER}.save": _CHECKPOINTER,
}
"""What was given the timeout of a call that does not wait as long as the mesh says."""

_KEY = "fsharding_lost_{}"
_PLACE_KEY = "fsharding_place_{}"
_QUESTION = "fsharding_question"
_OVER = "the store ends"
_SILENT = "is gone, or does not answer"
_PEERS, _TOLD = "_fsharding_peers", "_fsharding_told"  # marks on exceptions
_LEAST_S = 1.5
_MOST_S = 4.0
_LINGER_S = 2.0
"""How long the rank that has the store stays for the questions of the others."""
_LOOK_S = 0.1
"""How often a rank looks whether it is asked; less often where there are so many that the store would feel it."""
_SHOWN = 10
_MOST_STACKS = 64
_REMIND_S = 10.0
_REPORT_S = 10.0
"""How long ranks that differ wait for the reports of each other."""
_SPEAKERS = 2
"""So many ranks say that they wait for others."""

_log = logging.getLogger("fsharding")


def own_rank() -> int:
    """The global rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


# ------------------------------------------------------------------------------------------------- where this rank is
_entered: dict[int, naming_lost] = {}
"""By thread: the outermost collective call of the library that it is in."""

_waiting: dict[int, among] = {}
"""By thread: the communication that it waits for."""


class among:
    """Says of a failure inside that it is one of communication with some ranks; what is said first stays.

    Where no `naming_lost` is around it, the failure becomes a `RankError` here.

    Args:
        ranks: global; this one may be among them.
        doing: what was going on, for the error.
    """

    __slots__ = ("_before", "_begin", "_thread", "doing", "ranks")

    def __init__(self, ranks: Sequence[int], doing: str = "") -> None:
        self.ranks = ranks
        self.doing = doing

    def __enter__(self) -> None:
        self._thread, self._begin = threading.get_ident(), time.monotonic()
        self._before = _waiting.get(self._thread)
        _waiting[self._thread] = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if isinstance(error, RuntimeError):
                known, text = _mark(error)
                setattr(error, _PEERS, (tuple(self.ranks) if known is None else known, text or self.doing))
                if self._before is None and self._thread not in _entered and not hasattr(error, _TOLD):
                    frame = inspect.currentframe()
                    raise _explained(_loose_call(frame, waits=True), None, self._begin, error) from error
        finally:
            if self._before is None:
                del _waiting[self._thread]
            else:
                _waiting[self._thread] = self._before


def _mark(error: BaseException) -> tuple[tuple[int, ...] | None, str]:
    return getattr(error, _PEERS, (None, ""))


class naming_lost:
    """Turns a failure of communication inside into an error that names the ranks that caused it.

    What else is raised inside goes on as it is, and is written down for the ranks that will miss this one. Of calls
    inside each other the outermost counts. It has the order of the units that are gathered and reduced inside.

    Args:
        function: the public function, for the error.
        mesh: which tells coordinates; or the ranks that take part, where there is none yet. None, and a mesh without
            process groups, change nothing.
        step: the number of the step, where there is one: int64, 0-d.

    Raises:
        RankError: communication failed; its cause is the original error, its `ranks` are those that are lost, or that
            are in another call, or in none.
    """

    __slots__ = ("_begin", "_frame", "_outermost", "_thread", "function", "mesh", "order", "step")

    def __init__(
        self, function: str, mesh: DeviceMesh | AbstractMesh | Sequence[int] | None, *, step: Tensor | None = None
    ) -> None:
        self.function = function
        self.mesh = mesh
        self.step = step

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._outermost = _entered.get(self._thread)
        if self._outermost is not None or self.mesh is None or isinstance(self.mesh, AbstractMesh) or world_size() == 1:
            return
        _forget()
        _listen()
        self.order = UnitOrder()
        here = inspect.currentframe()
        self._frame = None if here is None else here.f_back
        self._begin = time.monotonic()
        self._outermost = _entered[self._thread] = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        outermost = self._outermost
        if outermost is None:
            return
        try:
            if error is not None:
                # At once, while the others are still where they are.
                outermost._name(error)
        finally:
            if outermost is self:
                del _entered[self._thread]
                self._frame = self._outermost = None

    def _name(self, error: BaseException) -> None:
        if hasattr(error, _TOLD):
            return
        setattr(error, _TOLD, True)
        if isinstance(error, UnlikeRanks):
            note = {"raised": f"raised: {error}", "call": str(self.call()), **_failed(error)}
            _bounded(lambda: _post(note), 1.0)
            raise call_as(self.function, unlike_ranks, self.mesh, error.ranks, self.order) from error
        peers, doing = _mark(error)
        if peers is None and is_network_error(error):
            setattr(error, _PEERS, (self.ranks(), doing))
        elif isinstance(error, CheckpointError):
            return  # All ranks raise it. The disk may be full, and with it the file of a store.
        elif peers is None:
            call = self.call()
            note = {"raised": f"raised {_in_one_line(error)}", "call": str(call), **_failed(error)}
            _bounded(lambda: _post(note), 1.0)
            return
        raise _explained(self.call(), self.mesh, self._begin, error) from error

    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        assert self.mesh is not None and not isinstance(self.mesh, AbstractMesh)
        with _compat.with_values():
            return tuple(self.mesh.mesh.flatten().tolist() if isinstance(self.mesh, DeviceMesh) else self.mesh)

    def call(self) -> _Call:
        """Where this rank is."""
        text = self.function
        step = self.step
        # An error may be about the step itself, which is then anything that a user has put there.
        if isinstance(step, Tensor) and step.dtype == torch.int64 and step.numel() == 1:
            text += "" if step.is_meta or _compat.is_fake(step) else f" {int(step)}"
        return _Call(self.function, text, call_stacks.site(self._frame))


def order_here() -> UnitOrder | None:
    """The order of units of the outermost collective call that this thread is in; None outside, and in one process."""
    entry = _entered.get(threading.get_ident())
    return None if entry is None else entry.order


def _failed(error: BaseException) -> dict[str, Any]:
    """This rank's own report, written where an error comes up."""
    order = order_here()
    said = _doing(call_stacks.lines_of(error), _mark(error)[1])
    said |= {} if order is None else {"order": order.report(facts=False)}
    return {**said, "sizes": str(error)} if isinstance(error, UnlikeSizes) else said


class UnlikeSizes(RuntimeError):
    """Data of another size came than this rank sends: ranks that live, in one call, with unlike tensors."""


class _Call(NamedTuple):
    """A call of a collective.

    Attributes:
        function: which; "" for none.
        text: the function, and the number of the step.
        site: file and line of the caller.
    """

    function: str
    text: str
    site: str

    def __str__(self) -> str:
        return f"{self.text} at {self.site}" if self.function else f"in no collective, at {self.site}"


def _loose_call(frame: FrameType | None, *, waits: bool) -> _Call:
    """The collective that a stack is in without saying so: the caller's call of the library, or of torch.

    Args:
        waits: whether it is known to wait in the library; else it can be seen in a collective of torch alone.
    """
    inside: list[FrameType] = []
    for outer in call_stacks.outwards(frame):
        if call_stacks.is_users(outer):
            break
        inside.append(outer)
    where = LIBRARY if waits else call_stacks.DISTRIBUTED
    codes = [outer.f_code for outer in reversed(inside) if outer.f_code.co_filename.startswith(where)]
    if waits:
        known = next(filter(None, map(name_of, codes)), "")
        backward = any(code.co_name == "backward" for code in codes)
        inner = "a backward pass" if backward else codes[0].co_qualname.replace("<locals>.", "") if codes else ""
        function = known or inner
    else:
        function = next((f"torch's {code.co_name}" for code in codes if code.co_name != "wrapper"), "")
    return _Call(function, function, call_stacks.site(frame))


def _places() -> list[dict[str, Any]]:
    """Where the threads of this rank are: those in collectives, and the main one."""
    main = threading.main_thread().ident or 0
    now = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    threads = dict.fromkeys([main, *_entered, *_waiting])
    return [_place(thread, now.get(thread)) for thread in threads]


def _place(thread: int, frame: FrameType | None) -> dict[str, Any]:
    entry = _entered.get(thread)
    wait = _waiting.get(thread)
    call = entry.call() if entry is not None else _loose_call(frame, waits=wait is not None)
    waits = {} if wait is None else {"waits": [*wait.ranks]}
    doing = _doing(call_stacks.lines(frame), "" if wait is None else wait.doing)
    doing |= {} if entry is None else {"order": entry.order.report(facts=False)}
    return {"function": call.function, "call": str(call), "now": _innermost(frame), **waits, **doing}


def _doing(stack: Sequence[call_stacks.Line], doing: str) -> dict[str, Any]:
    """Describes a rank by its stack: the part of the work, the collective that it is in, and the lines."""
    region = ", ".join(filter(None, [call_stacks.region(stack), doing]))
    return {"region": region, "collective": call_stacks.collective(stack), "stack": call_stacks.describe(stack)}


def _innermost(frame: FrameType | None) -> str:
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


def place_of(thread: int | None = None) -> dict[str, Any]:
    """This rank's answer about a thread.

    "function", "call" and "now" say where it is, "region" and "collective" what it does, "stack" how it came there;
    "waits": the ranks that it waits for, if any.

    Args:
        thread: its number; by default the caller's.
    """
    thread = threading.get_ident() if thread is None else thread
    return _place(thread, sys._current_frames().get(thread))  # pyright: ignore[reportPrivateUsage]


# ---------------------------------------------------------------------------------------------------------- the thread
class _Listener(threading.Thread):
    """Answers where this rank is, while its other threads wait or compute."""

    def __init__(self, world: Any, store: Any) -> None:
        super().__init__(name="fsharding-listener", daemon=True)
        self.world, self._store, self._rank = world, store, own_rank()
        self._look = max(_LOOK_S, world_size() / 2000)
        self._end = threading.Event()
        self._asked = b""

    def run(self) -> None:
        # The process that has the store may end first; then nothing is left to answer.
        with suppress(RuntimeError):
            while not self._end.wait(self._look):
                if dist.group.WORLD is not self.world or not self._answer():
                    return
            error = getattr(sys, "last_value", None)
            ended = "has ended" if error is None else f"has ended: {_in_one_line(error)}"
            # Kept beside what it has found out: others may still be on their way to the same cause.
            self._store.set(_KEY.format(self._rank), json.dumps({**_own_note, "raised": ended}))
            if _host() == self._rank:
                # torch writes a page on each rank whose store is gone while it looks.
                self._store.set(_QUESTION, _OVER)
                time.sleep(2 * self._look)

    def _answer(self) -> bool:
        """Answers the question that stands, if it is a new one; whether there may be others."""
        asked = self._store.get(_QUESTION) if self._store.check([_QUESTION]) else b""
        key = _PLACE_KEY.format(self._rank)
        if asked.decode() == _OVER:
            return False
        if asked and asked != self._asked:
            self._store.set(key, json.dumps({"to": asked.decode(), "places": _places()}))
        elif self._asked and not asked:
            self._store.delete_key(key)
        self._asked = asked
        return True

    def end(self) -> None:
        """Stops it; it has a moment to say so."""
        self._end.set()
        self.join(1.0)


_listener: _Listener | None = None


def _listen() -> None:
    """Has this rank answer where it is."""
    global _listener
    world = dist.group.WORLD
    if (_listener is not None and _listener.world is world) or is_fake_world():
        return
    if _listener is None:
        atexit.register(_end_listener)
    _listener = _Listener(world, own_connection(default_store()))
    _listener.start()


def is_fake_world() -> bool:
    """Whether the ranks are torch's fake ones, of which only this one is there."""
    world = dist.group.WORLD
    return world is not None and has_fake_backend(world)


def _end_listener() -> None:
    if _listener is not None:
        _listener.end()


# ----------------------------------------------------------------------------------------------------------- the notes
_own_note: Mapping[str, Any] = {}
"""The latest that this rank has written of itself and not taken back."""


def _post(note: Mapping[str, Any]) -> None:
    global _own_note
    _own_note = note
    store = default_store()
    if store is not None:
        store.set(_KEY.format(own_rank()), json.dumps(note))


def _forget() -> None:
    """Takes back what was written at an earlier failure, after which this rank goes on all the same."""
    global _own_note
    if not _own_note:
        return
    store = default_store()
    _own_note = {}
    if store is not None:
        with suppress(RuntimeError, NotImplementedError):
            for key in (_KEY.format(own_rank()), _QUESTION):
                store.delete_key(key)


def _read(rank: int, asked: str, function: str, *, at: Any = None) -> Mapping[str, Any] | None:
    """Return the report of a failed rank, else its answer, preferably from a thread in the same function."""
    store = default_store() if at is None else at
    assert store is not None
    note, answer = (
        json.loads(store.get(key)) if store.check([key]) else None
        for key in (_KEY.format(rank), _PLACE_KEY.format(rank))
    )
    places = answer["places"] if answer is not None and answer["to"] == asked else []
    # A thread that waits says more than one that waits for that thread.
    inside = sorted(
        (place for place in places if place["function"] == function), key=lambda place: "waits" not in place
    )
    place = next(iter(inside), None)
    if note is None:
        return place or next(iter(places), None)
    return place if place is not None and note.get("function", function) != function else note


def _bounded(call: Callable[[], _T], seconds: float) -> _T | None:
    """Runs a call with a time limit; None if it fails or takes longer: the machine that has the store may be gone."""
    result: list[_T] = []

    def run() -> None:
        with suppress(RuntimeError, OSError):
            result.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


# ----------------------------------------------------------------------------------------------------------- the blame
class Cause(NamedTuple):
    """A rank that is the cause of a failure.

    Attributes:
        kind: "gone", "raised", "elsewhere" (in another call, or in none), "busy" (in this one, without waiting) or
            "sizes" (in this one, and others sent it data of another size).
        text: for people.
        function: the one that it is in, if it is elsewhere; "" for none.
    """

    kind: str
    text: str
    function: str = ""


@dataclasses.dataclass
class Followed:
    """Where blame leads.

    Attributes:
        causes: the ranks that are the cause.
        silent: ranks that are blamed and say nothing.
        met: where the ranks are that wait in the same function.
        cause_known: whether one of them has found the cause out already.
        stacks: what each rank said of itself, this one included, as far as it was heard of in time.
        orders: the units that each rank in the same function has gathered and reduced, as `UnitOrder.report` gives it.
    """

    causes: dict[int, Cause] = dataclasses.field(default_factory=dict[int, Cause])
    silent: list[int] = dataclasses.field(default_factory=list[int])
    met: dict[int, str] = dataclasses.field(default_factory=dict[int, str])
    cause_known: bool = False
    stacks: dict[int, str] = dataclasses.field(default_factory=dict[int, str])
    orders: dict[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict[int, Any])


def follow(
    peers: Sequence[int], me: int, read: Callable[[int], Mapping[str, Any] | None], function: str = ""
) -> Followed:
    """Follows blame from rank to rank.

    Args:
        peers: the ranks that this one blames.
        read: the note of a rank, None if there is none. One that has failed: {"peers": ranks that it blames}, with
            "causes", what it has found out, once it has; or {"raised": what}, which of one that ends after it has
            failed stands beside its causes. One that lives: {"waits": ranks}, or neither.
            Both say where it is: "function", "call" and "now".
    """
    result = Followed()
    seen = {me}
    front = list(peers)
    while front:
        rank = front.pop(0)
        if rank in seen:
            continue
        seen.add(rank)
        note = read(rank)
        if note is None:
            result.silent.append(rank)
        elif "raised" in note and not (note.get("causes") and note.get("function", function) == function):
            result.causes[rank] = Cause("raised", note["raised"])
        elif "sizes" in note and note.get("function", function) == function:
            result.causes[rank] = Cause("sizes", note["sizes"])
        elif note.get("function", function) != function:
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


def _lost(peers: tuple[int, ...], patience: float, call: _Call, here: Mapping[str, Any]) -> Followed:
    """Follow blame to its end; without other notes, to the ranks that this rank blames."""
    host = _host()
    result = _bounded(lambda: _asked(peers, patience, call, here), patience + _LEAST_S)
    if result is None:
        lost_peers = peers if host is None or host == own_rank() else (host,)
        causes = dict.fromkeys(lost_peers, Cause("gone", _SILENT))
        return Followed(causes, stacks={own_rank(): _in_lines([{**here, "call": str(call), "waits": peers}])})
    if host == own_rank():
        _bounded(lambda: _linger(result.causes), _LINGER_S)
    if not result.causes:
        result.causes = dict.fromkeys(peers, Cause("gone", "lives, but the connection to it is lost"))
    return result


def _asked(peers: tuple[int, ...], patience: float, call: _Call, here: Mapping[str, Any]) -> Followed:
    me = own_rank()
    until = time.monotonic() + patience
    note = {"peers": peers, "function": call.function, "call": str(call), **here}
    _post(note)
    _ask(f"{time.time_ns()} {me}", again=True)
    while True:
        # Several ranks ask, and each may go on and take its question back.
        asked = _ask(f"{time.time_ns()} {me}")
        read = functools.partial(_read, asked=asked, function=call.function)
        result = follow(peers, me, read, call.function)
        kinds = {cause.kind for cause in result.causes.values()}
        # One that seems busy may be about to fail, too, and say so.
        open_ends = bool(result.silent) or "busy" in kinds
        if result.cause_known or "raised" in kinds or not open_ends or time.monotonic() > until:
            break
        time.sleep(0.02)
    result.causes = _causes(result, call)
    _post({**note, "causes": result.causes})
    places = _reports(asked, {me: [note]}, result.silent)
    result.stacks = {rank: _in_lines(of_rank) for rank, of_rank in places.items()}
    result.orders = {
        rank: place["order"]
        for rank, of_rank in places.items()
        for place in of_rank
        if "order" in place and place["call"].partition(" at ")[0] == call.text
    }
    return result


def _reports(
    asked: str, known: Mapping[int, Sequence[Mapping[str, Any]]], silent: Sequence[int]
) -> dict[int, Sequence[Mapping[str, Any]]]:
    """The reports of all ranks, once each has looked whether it is asked; of very many ranks, the first ones."""
    result = dict(known)
    store = default_store()
    assert store is not None
    until = time.monotonic() + 2 * max(_LOOK_S, world_size() / 2000)
    left = [rank for rank in range(min(world_size(), _MOST_STACKS)) if rank not in {*result, *silent}]
    while left:
        for rank in left:
            note, answer = (
                json.loads(store.get(key)) if store.check([key]) else None
                for key in (_KEY.format(rank), _PLACE_KEY.format(rank))
            )
            # Where it failed says more than where it stands now, which is here.
            if note is not None and "stack" in note:
                result[rank] = [note]
            elif answer is not None and answer["to"] == asked:
                result[rank] = answer["places"]
        left = [rank for rank in left if rank not in result]
        if time.monotonic() > until:
            break
        time.sleep(0.02 if left else 0.0)
    return dict(sorted(result.items()))


def _in_lines(places: Sequence[Mapping[str, Any]]) -> str:
    """Where the threads of a rank are, for people: a line for each thing that is known, then the stacks."""
    result: list[str] = []
    for place in places:
        ranks = place.get("peers") or place.get("waits") or ()
        waits = f"{place['collective'] or 'an answer'} of {rank_numbers([*ranks])}" if ranks else place["collective"]
        result += [f"call: {place['call']}"] if "call" in place else []
        result += [f"{name}: {text}" for name, text in (("doing", place["region"]), ("waits for", waits)) if text]
        result += [place["raised"]] if "raised" in place else []
        result += ["stack, the user's lines first:", *(f"  {line}" for line in place["stack"])]
    return "\n".join(result)


def _ask(question: str, again: bool = False, *, at: Any = None) -> str:
    """Has all ranks say where they are; the question that stands now, in the store of all, or a connection to it."""
    store = default_store() if at is None else at
    assert store is not None
    if again or not store.check([_QUESTION]):
        store.set(_QUESTION, question)
    return store.get(_QUESTION).decode()


def _causes(result: Followed, call: _Call) -> dict[int, Cause]:
    """Those that explain most: one that is gone may be why others are elsewhere, and that, why others are busy."""
    known = {**dict.fromkeys(result.silent, Cause("gone", _SILENT)), **result.causes}
    for kinds in (("gone", "raised"), ("elsewhere",), ("busy",)):
        if causes := {rank: it for rank, it in sorted(known.items()) if it.kind in kinds}:
            return causes
    # All wait in this function: then not all have called it from the same place, or in the same step.
    return {r: Cause("elsewhere", at, call.function) for r, at in sorted(result.met.items()) if at and at != str(call)}


def _host() -> int | None:
    """The rank with which the store ends."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if is_served_by_rank(default_store()) and not agents else None


def _linger(lost: Mapping[int, Cause]) -> None:
    others = {*range(world_size())} - {own_rank(), *lost}
    until = time.monotonic() + _LINGER_S
    store = default_store()
    assert store is not None
    while others and time.monotonic() < until:
        notes = {rank: store.get(key) for rank in others if store.check([key := _KEY.format(rank)])}
        others = {rank for rank in others if not {"causes", "raised"} & {*json.loads(notes.get(rank, b"{}"))}}
        time.sleep(0.02)
    time.sleep(0.1 if lost else 0.0)


# ----------------------------------------------------------------------------------------------------------- the words
def _explained(
    call: _Call, mesh: DeviceMesh | AbstractMesh | Sequence[int] | None, begin: float, error: BaseException
) -> RankError:
    """The error in place of a failure of communication that began some time ago."""
    peers, doing = _mark(error)
    # Ranks are as far apart as what they do is long.
    patience = min(max((time.monotonic() - begin) / 2, _LEAST_S), _MOST_S)
    me = own_rank()
    followed = _lost(tuple(rank for rank in peers or () if rank != me), patience, call, _failed(error))
    causes = followed.causes
    names = _names(mesh if isinstance(mesh, DeviceMesh) else _latest_mesh and _latest_mesh())
    noticed = f"{_who([me], names)} noticed it{' in ' if doing else ''}{doing}: {_in_one_line(error)}"
    kinds = {it.kind for it in causes.values()}
    coordinates = _coordinates(mesh if isinstance(mesh, DeviceMesh) else None)
    who = functools.partial(_who, names=names)
    unlike = call_as(call.function, differences, followed.orders, coordinates, who)
    if unlike is not None:
        text = unlike.text
        causes = dict.fromkeys(unlike.ranks, Cause("elsewhere", noticed, call.function))
    elif isinstance(error, UnlikeSizes) and kinds <= {"gone", "sizes"}:
        text = _unlike(call, me, peers or (), names, str(error))
    elif kinds == {"sizes"}:
        text = _unlike(call, next(iter(causes)), (me,), names, next(iter(causes.values())).text)
    elif me in causes:
        text = _given_up(call, me, names, noticed)
    elif kinds == {"elsewhere"}:
        text = _scattered(call, followed, names)
    else:
        text = _lost_text(call, causes, names, noticed, slow=kinds == {"busy"})
    by_rank = {rank: f"{_who([rank], names)}\n{stack}" for rank, stack in followed.stacks.items()}
    lost = (me,) if me in causes and unlike is None else tuple(causes)
    explained = RankError(text, ranks=lost, stacks=by_rank)
    setattr(explained, _TOLD, True)
    return explained


_unlike_before: Counter[tuple[int, ...]] = Counter()
"""How often some ranks have found that they differ: all of them count alike."""


def unlike_ranks(
    mesh: DeviceMesh | AbstractMesh | Sequence[int] | None, ranks: Sequence[int], order: UnitOrder
) -> RankError:
    """The error of ranks that have found together that they differ. Each tells the others what it did.

    Args:
        ranks: global ranks, each of which calls this.
        order: what this rank did, with the facts that it shares with others.
    """
    own = order.report()
    me = own_rank()
    key = f"fsharding_unlike_{hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]}"
    key += f"_{_unlike_before[tuple(ranks)]}_{{}}"
    _unlike_before[tuple(ranks)] += 1
    reports = {me: own, **(_bounded(lambda: _exchanged(key, own, ranks), 2 * _REPORT_S) or {})}
    coordinates = _coordinates(mesh if isinstance(mesh, DeviceMesh) else None)
    names = _names(mesh if isinstance(mesh, DeviceMesh) else _latest_mesh and _latest_mesh())
    found = differences(reports, coordinates, functools.partial(_who, names=names))
    if found is None:
        rows = [f"{_who([rank], names)}: no answer" for rank in ranks if rank not in reports]
        text = message("finds that ranks differ in units or rows.", rows, "Look at what each did last.")
        odd = tuple(ranks)
    else:
        text, odd = found
    explained = RankError(text, ranks=tuple(odd))
    setattr(explained, _TOLD, True)
    return explained


def _exchanged(key: str, own: Mapping[str, Any], ranks: Sequence[int]) -> dict[int, Mapping[str, Any]]:
    """The reports of ranks that all write theirs into the store, as far as they come in time."""
    store = default_store()
    until = time.monotonic() + _REPORT_S
    assert store is not None
    store.set(key.format(own_rank()), json.dumps(own))
    result = dict[int, Mapping[str, Any]]()
    while len(result) < len(ranks) and time.monotonic() < until:
        for rank in [rank for rank in ranks if rank not in result]:
            if store.check([key.format(rank)]):
                result[rank] = json.loads(store.get(key.format(rank)))
        time.sleep(0.0 if len(result) == len(ranks) else 0.01)
    return result


def _lost_text(call: _Call, causes: Mapping[int, Cause], names: Mapping[int, str], noticed: str, *, slow: bool) -> str:
    rows = [f"{_who([rank], names)} {it.text}" for rank, it in [*causes.items()][:_SHOWN]]
    rows += [f"and {len(causes) - _SHOWN} more"] if len(causes) > _SHOWN else []
    mend = f"Look at what {rank_numbers([*causes])} said last; all ranks have to start again."
    if slow:
        mend = f"If it is only slow, give {_TIMED.get(call.function, 'make_mesh')} a longer timeout=. {mend}"
    return report(f"{call.function} lost {_who([*causes], names)}.", [*rows, noticed], mend)


def _unlike(call: _Call, rank: int, others: Sequence[int], names: Mapping[int, str], said: str) -> str:
    """Ranks that are in one call with tensors of other sizes; what one of them said."""
    rule = f"got tensors of other sizes on {_who([rank], names)} than on {_who([*others], names)}."
    mend = "Give all ranks the same shapes and dtypes: one of them has another state, layout, precision or batch."
    return report(f"{call.function} {rule}", [f"{_who([rank], names)}: {said}"], mend)


def _given_up(call: _Call, me: int, names: Mapping[int, str], noticed: str) -> str:
    rule = f"was given up by the other ranks: they have waited for {_who([me], names)}, this one, in vain."
    owner = _TIMED.get(call.function, "the mesh")
    mend = f"It was stopped, or busy, for longer than the timeout of {owner}; all ranks have to start again."
    return report(f"{call.function} {rule}", [noticed], mend)


def _scattered(call: _Call, followed: Followed, names: Mapping[int, str]) -> str:
    """Ranks that live, and are in several calls."""
    here = _here(call, followed)
    causes = followed.causes
    by_function: dict[str, list[int]] = {}
    for rank in sorted({*here, *causes}):
        by_function.setdefault(causes[rank].function if rank in causes else call.function, []).append(rank)
    # The call of fewest ranks is the one too many; steps are what all make, and `if rank == 0` is what people write.
    odd = min(by_function, key=lambda f: (not f, len(by_function[f]), f == _STEP, by_function[f][0]))
    idle = not any(it.function for it in causes.values())
    if odd == call.function and not (idle and len(here) > len(causes)):
        alone = " alone" if len(by_function) > 1 else ", and not at one place"
        rule = f"is called on {_who([*here], names)}{alone}."
    else:
        which = "in no collective" if idle else "in another call"
        rule = f"waits for {_who([*causes], names)}, which {'is' if len(causes) == 1 else 'are'} {which}."
    mend = f"Every rank has to call {odd}: move it out of the `if rank == 0:`."
    if idle:
        mend += " If the others are only slow, give make_mesh a longer timeout=."
    return report(f"{call.function} {rule}", _table(call, followed, names), mend)


def _here(call: _Call, followed: Followed) -> dict[int, str]:
    """Where the ranks are that are in the same function as this one."""
    return {own_rank(): str(call), **{rank: at for rank, at in followed.met.items() if rank not in followed.causes}}


def _table(call: _Call, followed: Followed, names: Mapping[int, str]) -> list[str]:
    """Which ranks are where."""
    by_text: dict[str, list[int]] = {}
    places = {**_here(call, followed), **{rank: it.text for rank, it in followed.causes.items()}}
    for rank, text in sorted({**places, **dict.fromkeys(followed.silent, "no answer")}.items()):
        by_text.setdefault(text, []).append(rank)
    rows = [f"{_who(ranks, names)}: {text}" for text, ranks in [*by_text.items()][:_SHOWN]]
    return rows + ([f"and {len(by_text) - _SHOWN} more calls"] if len(by_text) > _SHOWN else [])


_STEP = "train step"


def _who(ranks: Sequence[int], names: Mapping[int, str]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}{names.get(ranks[0], '')}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks {', '.join(f'{rank}{names.get(rank, str())}' for rank in ranks[:_SHOWN])}{more}"


def rank_numbers(ranks: Sequence[int]) -> str:
    """Name ranks by their numbers, such as "rank 2" or "ranks 0, 3"."""
    return _who(ranks, {})


def _coordinates(mesh: DeviceMesh | None) -> dict[int, dict[str, int]]:
    """The coordinates of each rank."""
    if mesh is None or mesh.mesh_dim_names is None:
        return {}
    names = mesh.mesh_dim_names
    with _compat.with_values():
        places = mesh.mesh.new_ones(mesh.mesh.shape).nonzero().tolist()
        return {int(mesh.mesh[tuple(place)]): dict(zip(names, place, strict=True)) for place in places}


def _names(mesh: DeviceMesh | None) -> dict[int, str]:
    """The coordinates of each rank in words, on the axes that have several."""
    result = dict[int, str]()
    if mesh is None or mesh.mesh_dim_names is None:
        return result
    sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    for rank, place in _coordinates(mesh).items():
        text = ", ".join(f"{axis}={i}" for axis, i in place.items() if sizes[axis] > 1)
        result[rank] = f" ({text})" if text else ""
    return result


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")


def write_stacks(error: RankError, folder: Path) -> None:
    """Writes where all ranks are that were heard of into a file of this rank, which the text of the error then names.

    Below them stands the record of torch's collectives, where torch keeps one: with NCCL it does unless it is told not
    to, with `TORCH_FR_BUFFER_SIZE=2000` set it does with gloo, too.

    Args:
        error: gets another line; one without stacks stays as it is.
        folder: is made if it is not there. Where it cannot be written the line says why.
    """
    if not error.stacks:
        return
    record = _compat.flight_record()
    file = folder / f"stacks-{own_rank()}.txt"
    parts = [str(error), *error.stacks.values(), *(["flight recorder of torch:", record] if record else [])]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text("\n\n".join(parts) + "\n")
        line = f"Where {rank_numbers([*error.stacks])} {'stands' if len(error.stacks) == 1 else 'stand'}: {file}"
    except OSError as reason:
        line = f"Stacks could not be written: {reason}"
    error.args = (f"{error}\n{line}", *error.args[1:])


def is_network_error(error: BaseException) -> bool:
    """Whether torch raised an error because processes could not talk; gloo's are known by their text alone."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/" in str(error))


# --------------------------------------------------------------------------------------------------------- the meeting
_timeout = timedelta(minutes=10)
_meeting: tuple[Any, dist.ProcessGroup] | None = None
_latest_mesh: weakref.ref[DeviceMesh] | None = None


def set_meeting(timeout: timedelta, mesh: DeviceMesh | None = None) -> None:
    """Says how long ranks wait for each other in `meet` from here on, and which mesh was made last.

    Args:
        mesh: whose coordinates errors tell, where a call does not say.
    """
    global _timeout, _latest_mesh
    _timeout = timeout
    if _meeting is not None and _meeting[0] is dist.group.WORLD:
        _meeting[1].set_timeout(timeout)
    if mesh is not None:
        _latest_mesh = weakref.ref(mesh)


@contextmanager
def kept_as_it_was() -> Generator[None]:
    """Restore after this block how ranks meet, and which mesh was made last."""
    global _timeout, _meeting, _latest_mesh
    timeout, meeting, latest = _timeout, _meeting, _latest_mesh
    _meeting = None  # its group's timeout stays
    try:
        yield
    finally:
        _timeout = timeout
        _meeting = meeting
        _latest_mesh = latest


def meet(number: int = 0) -> list[int]:
    """Compares what all ranks are about to do, before any of them does it. Collective over all ranks there are.

    Ranks that are in different calls would take each other's bytes for their own. So calls that are rare begin here:
    every rank sends 16 bytes in a group in which nothing else travels, and which call it is in is half of them.

    Args:
        number: an int64 of each rank, for all to know.

    Returns:
        The number of each rank, in rank order; only this one's if no `naming_lost` with a mesh is around this.

    Raises:
        RuntimeError: some are in another call, or not in any before the timeout of the mesh that was made last;
            `naming_lost` makes a `RankError` of it.
    """
    entry = _entered.get(threading.get_ident())
    if entry is None:
        return [number]
    if is_fake_world():
        return [number] * world_size()
    call = int.from_bytes(hashlib.sha256(entry.function.encode()).digest()[:8], "big") >> 1
    own = torch.tensor([call, number], dtype=torch.int64, device="cpu")
    everyone = torch.empty(world_size(), 2, dtype=torch.int64, device="cpu")
    with among(range(world_size())), _reminding(entry):
        _compat.all_gather_single(everyone.view(-1), own, group=_meeting_group())
    calls, numbers = everyone.unbind(1)
    if others := (calls != call).nonzero().flatten().tolist():
        with among(others):
            raise RuntimeError("the ranks are in different calls")
    return numbers.tolist()


def called_by_all(fn: Callable[_Args, _T]) -> Callable[_Args, _T]:
    """Make a public function one that all ranks there are begin with `meet`, inside `naming_lost`."""
    code = inspect.unwrap(fn).__code__

    @functools.wraps(fn)
    def run(*args: _Args.args, **kwargs: _Args.kwargs) -> _T:
        with naming_lost(name_of(code), range(world_size())):
            meet()
            return fn(*args, **kwargs)

    return run


@contextmanager
def _reminding(entry: naming_lost) -> Generator[None]:
    """Logs which ranks are where when what is inside takes long: the timeout may be minutes away."""
    timer = threading.Timer(_REMIND_S, _remind, (entry.call(), entry.mesh))
    timer.daemon = True
    if own_rank() < _SPEAKERS:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _remind(call: _Call, mesh: Any) -> None:
    with suppress(RuntimeError):
        store = own_connection(default_store())
        asked = _ask(f"{time.time_ns()} {own_rank()}", again=True, at=store)
        until = time.monotonic() + _LEAST_S
        read = functools.partial(_read, asked=asked, function=call.function, at=store)
        followed = Followed(silent=[-1])
        while followed.silent and time.monotonic() < until:
            time.sleep(0.05)
            followed = follow(range(world_size()), own_rank(), read, call.function)
        store.delete_key(_QUESTION)
        if followed.causes or followed.silent:
            names = _names(mesh if isinstance(mesh, DeviceMesh) else _latest_mesh and _latest_mesh())
            rule = f"has waited for the other ranks for {_REMIND_S:g} s on rank {own_rank()}."
            _log.warning(report(f"{call.function} {rule}", _table(call, followed, names), "All ranks have to call it."))


def _meeting_group() -> dist.ProcessGroup:
    global _meeting
    world = dist.group.WORLD
    if _meeting is None or _meeting[0] is not world:
        made = dist.new_group(backend="gloo", timeout=_timeout)
        assert isinstance(made, dist.ProcessGroup)
        _meeting = world, made
    return _meeting[1]
