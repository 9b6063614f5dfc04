"""Lost ranks: who is really gone when communication fails, from notes that the others leave in the store of all ranks.

In: a failure of communication, and the ranks that it was with. Out: a `RankError` on every rank that is left.
A rank that fails because of others writes whom it blames, one that raises by itself writes what; a rank that is gone
writes nothing. Whoever is blamed and silent after a moment is gone; whoever finds that out writes it for the rest.
Laws: blame goes on from rank to rank until it meets one that is gone; all of it takes a bounded time.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsharding import _compat
from fsharding.errors import RankError, message
from fsharding.mesh import Mesh, abstract, own_rank, world_size

__all__ = ["among", "follow", "is_network_error", "naming_lost"]

_T = TypeVar("_T")

_KEY = "fsharding_lost_{}"
_SILENT = "is gone, or does not answer"
_PEERS, _TOLD = "_fsharding_peers", "_fsharding_told"  # marks on exceptions
_LEAST_S, _MOST_S = 0.5, 4.0
_LINGER_S = 2.0
"""How long the rank that has the store stays for the questions of the others."""


_function: ContextVar[str] = ContextVar("fsharding_naming_lost", default="")


@contextmanager
def among(ranks: Sequence[int], doing: str = "") -> Generator[None]:
    """Says of a failure inside that it is one of communication with some ranks; what is said first stays.

    Args:
        ranks: global; this one may be among them.
        doing: what was going on, for the error.
    """
    try:
        yield
    except RuntimeError as error:
        known, text = _mark(error)
        setattr(error, _PEERS, (tuple(ranks) if known is None else known, text or doing))
        raise


def _mark(error: BaseException) -> tuple[tuple[int, ...] | None, str]:
    return getattr(error, _PEERS, (None, ""))


@contextmanager
def naming_lost(function: str, mesh: Mesh | None) -> Generator[None]:
    """Turns a failure of communication inside into an error that names the ranks that caused it.

    What else is raised inside goes on as it is, and is written down for the ranks that will miss this one.

    Args:
        function: the public function, for the error.
        mesh: which tells coordinates; None, and a mesh without process groups, change nothing.

    Raises:
        RankError: communication failed; its cause is the original error, its `ranks` are those that are lost.
    """
    if not isinstance(mesh, DeviceMesh) or world_size() == 1:
        yield
        return
    _forget()
    begin = time.monotonic()
    outermost = _function.get() or function
    token = _function.set(outermost)
    try:
        yield
    except BaseException as error:
        if hasattr(error, _TOLD):
            raise
        setattr(error, _TOLD, True)
        peers, doing = _mark(error)
        if peers is None and is_network_error(error):
            peers = tuple(abstract(mesh).members)
        if peers is None:
            note = {"raised": f"raised {_in_one_line(error)}"}
            _bounded(lambda: _post(note), 1.0)
            raise
        # Ranks are as far apart as what they do is long.
        patience = min(max((time.monotonic() - begin) / 2, _LEAST_S), _MOST_S)
        lost = _lost(tuple(rank for rank in peers if rank != own_rank()), patience)
        found = RankError(_words(outermost, mesh, lost, doing, error), ranks=tuple(lost))
        setattr(found, _TOLD, True)
        raise found from error
    finally:
        _function.reset(token)


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")


# ------------------------------------------------------------------------------------------------------------ the notes
_posted = threading.Event()


def _post(note: Mapping[str, Any]) -> None:
    _posted.set()
    store = _compat.default_store()
    if store is not None:
        store.set(_KEY.format(own_rank()), json.dumps(note))


def _forget() -> None:
    """Takes back what was written at an earlier failure, after which this rank goes on all the same."""
    store = _compat.default_store() if _posted.is_set() else None
    _posted.clear()
    if store is not None:
        with suppress(RuntimeError, NotImplementedError):
            store.delete_key(_KEY.format(own_rank()))


def _read(rank: int) -> Mapping[str, Any] | None:
    store, key = _compat.default_store(), _KEY.format(rank)
    assert store is not None
    return json.loads(store.get(key)) if store.check([key]) else None


def _bounded(call: Callable[[], _T], seconds: float) -> _T | None:
    """What a call returns; None if it fails or takes longer: the machine that has the store may be gone."""
    result: list[_T] = []

    def run() -> None:
        with suppress(RuntimeError, OSError):
            result.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


# ----------------------------------------------------------------------------------------------------------- the blame
def follow(
    peers: Sequence[int], me: int, read: Callable[[int], Mapping[str, Any] | None]
) -> tuple[dict[int, str], list[int]]:
    """Follows blame from rank to rank.

    Args:
        peers: whom this rank blames.
        me: this rank.
        read: the note of a rank, None if there is none: {"peers": whom it blames}, with "found", what it has found out,
            once it has; or {"raised": what}.

    Returns:
        (what is known of the ranks that are the cause, ranks that are blamed and silent).
    """
    found: dict[int, str] = {}
    silent: list[int] = []
    seen, front = {me}, list(peers)
    while front:
        rank = front.pop(0)
        if rank in seen:
            continue
        seen.add(rank)
        note = read(rank)
        if note is None:
            silent.append(rank)
        elif "raised" in note:
            found[rank] = note["raised"]
        elif note.get("found"):
            found |= {int(other): what for other, what in note["found"].items()}
        else:
            front += note["peers"]
    return dict(sorted(found.items())), sorted(silent)


def _lost(peers: tuple[int, ...], patience: float) -> dict[int, str]:
    """What is known of the ranks that are the cause; whom this rank blames if there is nobody to ask."""
    host = _host()
    lost = _bounded(lambda: _asked(peers, patience), patience + _LEAST_S)
    if lost is None:
        gone = peers if host is None or host == own_rank() else (host,)
        return dict.fromkeys(gone, _SILENT)
    if host == own_rank():
        _bounded(lambda: _linger(lost), _LINGER_S)
    return lost or dict.fromkeys(peers, "lives, but the connection to it is lost")


def _asked(peers: tuple[int, ...], patience: float) -> dict[int, str]:
    me, until = own_rank(), time.monotonic() + patience
    _post({"peers": peers})
    while True:
        found, silent = follow(peers, me, _read)
        if found or not silent or time.monotonic() > until:
            found = found or dict.fromkeys(silent, _SILENT)
            _post({"peers": peers, "found": found})
            return found
        time.sleep(0.02)


def _host() -> int | None:
    """The rank whose end is that of the store."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if _compat.is_served_by_rank(_compat.default_store()) and not agents else None


def _linger(lost: Mapping[int, str]) -> None:
    others = {*range(world_size())} - {own_rank(), *lost}
    until = time.monotonic() + _LINGER_S
    while others and time.monotonic() < until:
        others = {rank for rank in others if not {"found", "raised"} & {*(_read(rank) or ())}}
        time.sleep(0.02)
    time.sleep(0.1 if lost else 0.0)


# ----------------------------------------------------------------------------------------------------------- the words
def _words(function: str, mesh: DeviceMesh, lost: Mapping[int, str], doing: str, error: BaseException) -> str:
    names = _names(mesh)

    def name(rank: int) -> str:
        return f"rank {rank}{names.get(rank, '')}"

    rows = [f"{name(rank)} {what}" for rank, what in lost.items()]
    rows.append(f"{name(own_rank())} noticed it{' in ' if doing else ''}{doing}: {_in_one_line(error)}")
    who = "rank" if len(lost) == 1 else "ranks"
    mend = f"Look at what {who} {', '.join(map(str, lost))} said last; all ranks have to start again."
    return message(function, f"lost {', '.join(map(name, lost))}.", rows, mend)


def _names(mesh: DeviceMesh) -> dict[int, str]:
    """The coordinates of each rank, on the axes that have several."""
    shape, names = abstract(mesh), dict[int, str]()
    for coord in shape.coordinates():
        text = ", ".join(f"{axis}={i}" for axis, i in coord.items() if shape.axis_size(axis) > 1)
        names[shape.rank_at(coord)] = f" ({text})" if text else ""
    return names


def is_network_error(error: BaseException) -> bool:
    """Whether torch raised an error because processes could not talk; those of gloo are known by their text alone."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/" in str(error))
