"""Check that all ranks are in the same call, at the start of rare collective calls."""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsharding.base import _compat
from fsharding.base.calls import public_name
from fsharding.base.errors import report
from fsharding.mesh.backends import default_store, own_connection
from fsharding.mesh.call_stacks import Call
from fsharding.mesh.failures import among, entry_here, naming_lost, set_latest_mesh, table, whose
from fsharding.mesh.lost_ranks import (
    LEAST_S,
    QUESTION,
    Followed,
    ask,
    follow,
    is_fake_world,
    own_rank,
    read_report,
    world_size,
)

__all__ = ["called_by_all", "kept_as_it_was", "meet", "set_meeting"]

_T = TypeVar("_T")
_Args = ParamSpec("_Args")

_REMIND_S = 10.0
_SPEAKERS = 2  # ranks that log that they wait for others

_log = logging.getLogger("fsharding")
_timeout = timedelta(minutes=10)
_meeting: tuple[Any, dist.ProcessGroup] | None = None


def set_meeting(timeout: timedelta, mesh: DeviceMesh | None = None) -> None:
    """Set the timeout of `meet`, and the latest mesh."""
    global _timeout
    _timeout = timeout
    if _meeting is not None and _meeting[0] is dist.group.WORLD:
        _meeting[1].set_timeout(timeout)
    if mesh is not None:
        set_latest_mesh(weakref.ref(mesh))


@contextmanager
def kept_as_it_was() -> Generator[None]:
    """Restore the timeout of `meet`, its group and the latest mesh after this block."""
    global _timeout, _meeting
    timeout, meeting, latest = _timeout, _meeting, set_latest_mesh(None)
    set_latest_mesh(latest)
    _meeting = None  # its group's timeout stays
    try:
        yield
    finally:
        _timeout = timeout
        _meeting = meeting
        set_latest_mesh(latest)


def meet(number: int = 0) -> list[int]:
    """Return the int64 of each rank once all are in the same call; outside of a `naming_lost`, only this rank's."""
    # Ranks in different calls would use each other's bytes as their own. So every rank first sends 16 bytes in a group
    # that nothing else uses: a hash of its call, and the number. `naming_lost` turns the RuntimeError of a difference
    # or a timeout into a `RankError`.
    entry = entry_here()
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
    """Have all ranks begin a public function with `meet`, inside `naming_lost`; `public` is the outer decorator."""

    @functools.wraps(fn)
    def run(*args: _Args.args, **kwargs: _Args.kwargs) -> _T:
        with naming_lost(public_name(), range(world_size())):
            meet()
            return fn(*args, **kwargs)

    return run


@contextmanager
def _reminding(entry: naming_lost) -> Generator[None]:
    """Log where each rank is if this block takes long: the timeout may be minutes away."""
    timer = threading.Timer(_REMIND_S, _remind, (entry.call(), entry.mesh))
    timer.daemon = True
    if own_rank() < _SPEAKERS:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _remind(call: Call, mesh: Any) -> None:
    with suppress(RuntimeError):
        store = own_connection(default_store())
        asked = ask(store, again=True)
        until = time.monotonic() + LEAST_S
        followed = Followed(silent=[-1])
        while followed.silent and time.monotonic() < until:
            time.sleep(0.05)
            read = functools.partial(read_report, asked=asked, function=call.function, store=store)
            followed = follow(range(world_size()), own_rank(), read, call.function)
        store.delete_key(QUESTION)
        if followed.causes or followed.silent:
            rule = f"has waited for the other ranks for {_REMIND_S:g} s on rank {own_rank()}."
            rows = table(call, followed, whose(mesh))
            _log.warning(report(f"{call.function} {rule}", rows, "Call it on all ranks."))


def _meeting_group() -> dist.ProcessGroup:
    global _meeting
    world = dist.group.WORLD
    if _meeting is None or _meeting[0] is not world:
        made = dist.new_group(backend="gloo", timeout=_timeout)
        assert isinstance(made, dist.ProcessGroup)
        _meeting = world, made
    return _meeting[1]
