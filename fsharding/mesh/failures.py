"""Turn failures of communication into a `RankError` that names the ranks that caused them, and where each rank is."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsharding.base import _compat
from fsharding.base.calls import call_as
from fsharding.base.errors import CheckpointError, RankError, message, report
from fsharding.mesh import call_stacks
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.backends import default_store
from fsharding.mesh.call_stacks import Call
from fsharding.mesh.lost_ranks import (
    LEAST_S,
    Cause,
    Followed,
    Notes,
    bounded,
    forget,
    in_one_line,
    is_fake_world,
    listen,
    lost,
    own_rank,
    post,
    world_size,
)
from fsharding.mesh.unit_order import UnitOrder, UnlikeRanks, differences

__all__ = [
    "UnlikeSizes", "among", "entry_here", "is_fake_world", "is_network_error", "naming_lost",
    "order_here", "own_rank", "rank_numbers", "set_latest_mesh", "table", "unlike_ranks", "whose",
    "world_size", "write_stacks",
]  # fmt: skip

_Mesh: TypeAlias = DeviceMesh | AbstractMesh | Sequence[int] | None
Who: TypeAlias = Callable[[Sequence[int]], str]

_PEERS, _TOLD = "_fsharding_peers", "_fsharding_told"  # marks on exceptions
_MOST_S = 4.0
_REPORT_S = 10.0  # how long ranks that differ wait for the reports of each other
_SHOWN = 10

# The message and the fix, by what was found.
_LOGS = "Check the logs of {numbers}, then restart all ranks."
_MOVE = "Every rank has to call {odd}: move it out of the `if rank == 0:`."
_TEXTS = {
    "lost": ("lost {who}.", _LOGS),
    "slow": ("lost {who}.", "If it is only slow, pass {timed} a longer timeout=. " + _LOGS),
    "sizes": (
        "got tensors of different sizes on {who} than on {others}.",
        "Pass the same shapes and dtypes on all ranks: state, layout, precision and batch have to match.",
    ),
    "timed out": (
        "timed out on the other ranks, which waited for {who}, this one.",
        "It was stopped or busy for longer than the timeout of {owner}; restart all ranks.",
    ),
    "alone": ("is called on {here} alone.", _MOVE),
    "apart": ("is called on {here}, but not at one place.", _MOVE),
    "elsewhere": ("waits for {who}, which {are} in a different call.", _MOVE),
    "idle": ("waits for {who}, which {are} in no collective.", _MOVE),
}
_IF_SLOW = " If the others are only slow, pass make_mesh a longer timeout=."

# Calls with a separate timeout, and the function that takes it.
_TIMED = {
    **{name: name for name in ("fs.checkpoint.save", "fs.checkpoint.save_async", "fs.hf.save", "fs.megatron.save")},
    "fs.checkpoint.Checkpointer.save": "fs.checkpoint.Checkpointer",
}


def is_network_error(error: BaseException) -> bool:
    """Return whether an error of torch is a communication failure; gloo's are recognizable only by their text."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/" in str(error))


class UnlikeSizes(RuntimeError):
    """A message had a different size than this rank's: ranks are in the same call with different tensors."""


# ------------------------------------------------------------------------------------------------- where this rank is
_entered: dict[int, naming_lost] = {}  # by thread: its outermost collective call of the library
_waiting: dict[int, among] = {}  # by thread: the communication that it waits for


class among:
    """Mark an exception raised in this block as a communication failure with `ranks`; an existing mark is kept."""

    # An enclosing `naming_lost` turns the failure into a `RankError`; without one, this block does.

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
                    call = call_stacks.loose_call(inspect.currentframe(), self._thread, waits=True)
                    raise _explained(call, None, self._begin, error) from error
        finally:
            if self._before is None:
                del _waiting[self._thread]
            else:
                _waiting[self._thread] = self._before


def _mark(error: BaseException) -> tuple[tuple[int, ...] | None, str]:
    return getattr(error, _PEERS, (None, ""))


class naming_lost:
    """Turn a communication failure in this block into a `RankError` that names the ranks that caused it."""

    # Other exceptions pass, and are recorded for the ranks that will wait for this one. In nested calls the outermost
    # acts. Without a mesh, or on a mesh without process groups, this does nothing.

    __slots__ = ("_begin", "_frame", "_outermost", "_thread", "function", "mesh", "order", "step")

    def __init__(self, function: str, mesh: _Mesh, *, step: Tensor | None = None) -> None:
        self.function = function
        self.mesh = mesh
        self.step = step

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._outermost = _entered.get(self._thread)
        if self._outermost is not None or self.mesh is None or isinstance(self.mesh, AbstractMesh) or world_size() == 1:
            return
        forget()
        listen(_places)
        self.order = UnitOrder()
        # No variable holds this call's own frame: the cycle would keep the caller's tensors alive until a collection.
        self._frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        self._begin = time.monotonic()
        self._outermost = _entered[self._thread] = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        outermost = self._outermost
        if outermost is None:
            return
        try:
            if error is not None:
                outermost._name(error)  # immediately, while the other ranks are still in their calls
        finally:
            if outermost is self:
                del _entered[self._thread]
                self._frame = self._outermost = None

    def _name(self, error: BaseException) -> None:
        if hasattr(error, _TOLD):
            return
        setattr(error, _TOLD, True)
        peers, doing = _mark(error)
        unlike = isinstance(error, UnlikeRanks)
        if peers is None and not unlike and is_network_error(error):
            assert self.mesh is not None and not isinstance(self.mesh, AbstractMesh)
            with _compat.with_values():
                ranks = self.mesh.mesh.flatten().tolist() if isinstance(self.mesh, DeviceMesh) else self.mesh
            setattr(error, _PEERS, (tuple(ranks), doing))
        elif isinstance(error, CheckpointError):
            return  # all ranks raise it, and on a full disk a file store can't be written
        elif peers is None or unlike:
            raised = f"raised: {error}" if unlike else f"raised {in_one_line(error)}"
            note = {"raised": raised, "call": str(self.call()), **_failed(error)}
            bounded(lambda: post(note), 1.0)
            if isinstance(error, UnlikeRanks):
                raise call_as(self.function, unlike_ranks, self.mesh, error.ranks, self.order) from error
            return
        raise _explained(self.call(), self.mesh, self._begin, error) from error

    def call(self) -> Call:
        """Return this rank's call, with the number of the step."""
        text = self.function
        step = self.step
        # The user may have put anything into `state.step`, which can be what the error is about.
        if isinstance(step, Tensor) and step.dtype == torch.int64 and step.numel() == 1:
            text += "" if step.is_meta or _compat.is_fake(step) else f" {int(step)}"
        return Call(self.function, text, call_stacks.site(self._frame))


def entry_here() -> naming_lost | None:
    """Return the outermost collective call of this thread, if any; None in a single process."""
    return _entered.get(threading.get_ident())


def order_here() -> UnitOrder | None:
    """Return the order of units of this thread's outermost collective call."""
    entry = entry_here()
    return None if entry is None else entry.order


def _failed(error: BaseException) -> dict[str, Any]:
    """Return this rank's report about an error."""
    order = order_here()
    found = call_stacks.doing(call_stacks.lines_of(error), _mark(error)[1])
    found |= {} if order is None else {"order": order.report(facts=False)}
    return {**found, "sizes": str(error)} if isinstance(error, UnlikeSizes) else found


def _places() -> list[dict[str, Any]]:
    """Return the positions of this rank's main thread and of its threads in collectives."""
    now = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    threads = dict.fromkeys([threading.main_thread().ident or 0, *_entered, *_waiting])
    return [_place(thread, now.get(thread)) for thread in threads]


def _place(thread: int, frame: FrameType | None) -> dict[str, Any]:
    entry = _entered.get(thread)
    wait = _waiting.get(thread)
    call = entry.call() if entry is not None else call_stacks.loose_call(frame, thread, waits=wait is not None)
    place = {"function": call.function, "call": str(call), "now": call_stacks.innermost(frame)}
    place |= {} if wait is None else {"waits": [*wait.ranks]}
    place |= call_stacks.doing(call_stacks.lines(frame), "" if wait is None else wait.doing)
    return place | ({} if entry is None else {"order": entry.order.report(facts=False)})


# ---------------------------------------------------------------------------------------------------------- the texts
def _explained(call: Call, mesh: _Mesh, begin: float, error: BaseException) -> RankError:
    """Make the `RankError` of a communication failure in a call that began at `begin`."""
    peers, doing = _mark(error)
    # Ranks may notice at times as far apart as the call is long, so the patience grows with it.
    patience = min(max((time.monotonic() - begin) / 2, LEAST_S), _MOST_S)
    me = own_rank()
    followed = lost(tuple(rank for rank in peers or () if rank != me), patience, call, _failed(error))
    causes = followed.causes
    who = whose(mesh)
    noticed = f"{who([me])} noticed it{' in ' if doing else ''}{doing}: {in_one_line(error)}"
    kinds = {it.kind for it in causes.values()}
    say = functools.partial(_say, call, who)
    inside = [(rank, place) for rank, of_rank in followed.places.items() for place in of_rank if "order" in place]
    orders = {rank: place["order"] for rank, place in inside if place["call"].partition(" at ")[0] == call.text}
    unlike = call_as(call.function, differences, orders, _coordinates(mesh), who)
    if unlike is not None:
        text = unlike.text
        causes = dict.fromkeys(unlike.ranks, Cause("elsewhere", noticed, call.function))
    elif isinstance(error, UnlikeSizes) and kinds <= {"gone", "sizes"}:
        text = say("sizes", [me], [f"{who([me])}: {error}"], others=who(peers or ()))
    elif kinds == {"sizes"}:
        rank, cause = next(iter(causes.items()))
        text = say("sizes", [rank], [f"{who([rank])}: {cause.text}"], others=who([me]))
    elif me in causes:
        text = say("timed out", [me], [noticed])
    elif kinds == {"elsewhere"}:
        text = _scattered(call, followed, who)
    else:
        rows = [f"{who([rank])} {it.text}" for rank, it in [*causes.items()][:_SHOWN]]
        rows += [f"and {len(causes) - _SHOWN} more"] if len(causes) > _SHOWN else []
        text = say("slow" if kinds == {"busy"} else "lost", [*causes], [*rows, noticed])
    by_rank = {rank: f"{who([rank])}\n{_in_lines(of_rank)}" for rank, of_rank in followed.places.items()}
    return _told(text, (me,) if me in causes and unlike is None else tuple(causes), by_rank)


def _told(text: str, ranks: Sequence[int], stacks: dict[int, str] | None = None) -> RankError:
    explained = RankError(text, ranks=tuple(ranks), stacks=stacks or {})
    setattr(explained, _TOLD, True)
    return explained


def _say(call: Call, who: Who, kind: str, ranks: Sequence[int], rows: Sequence[str], **words: str) -> str:
    """Format an entry of `_TEXTS`."""
    owner = _TIMED.get(call.function)
    words |= {"who": who(ranks), "numbers": rank_numbers(ranks), "are": "is" if len(ranks) == 1 else "are"}
    words |= {"timed": owner or "make_mesh", "owner": owner or "the mesh"}
    rule, mend = (text.format(**words) for text in _TEXTS[kind])
    return report(f"{call.function} {rule}", rows, mend + words.get("more", ""))


def _scattered(call: Call, followed: Followed, who: Who) -> str:
    """Word that all ranks are alive, but in different calls."""
    causes = followed.causes
    here = [rank for rank in (own_rank(), *followed.met) if rank not in causes]
    by_function: dict[str, list[int]] = {}
    for rank in sorted({*here, *causes}):
        by_function.setdefault(causes[rank].function if rank in causes else call.function, []).append(rank)
    # The call with the fewest ranks is the wrong one; in a tie not the train step, which all ranks make, but the call
    # of rank 0, because `if rank == 0` is what people write.
    odd = min(by_function, key=lambda f: (not f, len(by_function[f]), f == "train step", by_function[f][0]))
    idle = not any(it.function for it in causes.values())
    kind = "idle" if idle else "elsewhere"
    if odd == call.function and not (idle and len(here) > len(causes)):
        kind = "alone" if len(by_function) > 1 else "apart"
    rows = table(call, followed, who)
    return _say(call, who, kind, [*causes], rows, odd=odd, here=who(here), more=_IF_SLOW if idle else "")


def table(call: Call, followed: Followed, who: Who) -> list[str]:
    """List the calls that ranks are in."""
    places = {own_rank(): str(call), **followed.met, **{rank: it.text for rank, it in followed.causes.items()}}
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted({**places, **dict.fromkeys(followed.silent, "no answer")}.items()):
        by_text.setdefault(text, []).append(rank)
    rows = [f"{who(ranks)}: {text}" for text, ranks in [*by_text.items()][:_SHOWN]]
    return rows + ([f"and {len(by_text) - _SHOWN} more calls"] if len(by_text) > _SHOWN else [])


def _in_lines(places: Sequence[Notes]) -> str:
    """Word the positions of a rank's threads, with their stacks."""
    result: list[str] = []
    for place in places:
        ranks = place.get("peers") or place.get("waits") or ()
        waits = f"{place['collective'] or 'an answer'} of {rank_numbers([*ranks])}" if ranks else place["collective"]
        result += [f"call: {place['call']}"] if "call" in place else []
        result += [f"{name}: {text}" for name, text in (("doing", place["region"]), ("waits for", waits)) if text]
        result += [place["raised"]] if "raised" in place else []
        result += ["stack, the user's lines first:", *(f"  {line}" for line in place["stack"])]
    return "\n".join(result)


_unlike_before: Counter[tuple[int, ...]] = Counter()  # how often ranks found a difference; equal on all of them


def unlike_ranks(mesh: _Mesh, ranks: Sequence[int], order: UnitOrder) -> RankError:
    """Make the error of ranks that found a difference in a comparison, after they have exchanged their reports."""
    own, me = order.report(), own_rank()
    key = f"fsharding_unlike_{hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]}"
    key += f"_{_unlike_before[tuple(ranks)]}_{{}}"
    _unlike_before[tuple(ranks)] += 1
    reports = {me: own, **(bounded(lambda: _exchanged(key, own, ranks), 2 * _REPORT_S) or {})}
    who = whose(mesh)
    found = differences(reports, _coordinates(mesh), who)
    if found is None:
        rows = [f"{who([rank])}: no answer" for rank in ranks if rank not in reports]
        return _told(message("finds that ranks differ in units or rows.", rows, "Check the log of each rank."), ranks)
    return _told(found.text, found.ranks)


def _exchanged(key: str, own: Notes, ranks: Sequence[int]) -> dict[int, Notes]:
    """Write this rank's report to the store, and read the others' until a time limit."""
    store = default_store()
    until = time.monotonic() + _REPORT_S
    assert store is not None
    store.set(key.format(own_rank()), json.dumps(own))
    result = dict[int, Notes]()
    while len(result) < len(ranks) and time.monotonic() < until:
        for rank in [rank for rank in ranks if rank not in result]:
            if store.check([key.format(rank)]):
                result[rank] = json.loads(store.get(key.format(rank)))
        time.sleep(0.0 if len(result) == len(ranks) else 0.01)
    return result


_latest_mesh: weakref.ref[DeviceMesh] | None = None  # errors show its coordinates if a call has no mesh


def set_latest_mesh(mesh: weakref.ref[DeviceMesh] | None) -> weakref.ref[DeviceMesh] | None:
    """Set the latest mesh; return the previous one."""
    global _latest_mesh
    before, _latest_mesh = _latest_mesh, mesh
    return before


def whose(mesh: _Mesh) -> Who:
    """Return a function that names ranks with their coordinates, such as "rank 2 (dp=1)"."""
    known = mesh if isinstance(mesh, DeviceMesh) else _latest_mesh and _latest_mesh()
    places = _coordinates(known)
    sizes = {} if known is None else dict(zip(known.mesh_dim_names or (), known.mesh.shape, strict=False))

    def named(rank: int) -> str:
        text = ", ".join(f"{axis}={i}" for axis, i in places.get(rank, {}).items() if sizes[axis] > 1)
        return f"{rank} ({text})" if text else f"{rank}"

    return functools.partial(rank_numbers, name=named)


def rank_numbers(ranks: Sequence[int], name: Callable[[int], str] = str) -> str:
    """Name ranks by their numbers, such as "rank 2" or "ranks 0, 3"."""
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(name, ranks[:_SHOWN]))}{more}"


def _coordinates(mesh: _Mesh) -> dict[int, dict[str, int]]:
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names is None:
        return {}
    with _compat.with_values():
        places = mesh.mesh.new_ones(mesh.mesh.shape).nonzero().tolist()
        return {int(mesh.mesh[tuple(at)]): dict(zip(mesh.mesh_dim_names, at, strict=True)) for at in places}


def write_stacks(error: RankError, folder: Path) -> None:
    """Write the stacks of ranks that answered, and torch's record of collectives, to a file that the error names."""
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
