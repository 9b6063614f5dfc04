"""Rendezvous of ranks, and the addresses that local ranks listen on: only the loopback interface by default."""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from fsharding.base.calls import call_as, public_name
from fsharding.base.errors import ConfigError, RankError, message
from fsharding.mesh.backends import open_store, prefixed
from fsharding.mesh.failures import rank_numbers

__all__ = [
    "FRESH_STORE", "INIT_METHOD", "init_arguments", "local_variables", "loopback", "meet_all",
    "place_variables", "shares_launchers_store", "under_launcher",
]  # fmt: skip

INIT_METHOD = "FSHARDING_INIT_METHOD"  # variable with the `init_method` of the default process group; else `env://`
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torch's variable; "1" is a new store per start, served by rank 0

_REMIND_S = 10.0
_LOOK_S = 0.02
_SPEAKERS = 2  # ranks that log that they wait for others

_log = logging.getLogger("fsharding")


def under_launcher() -> bool:
    """Return whether a launcher such as torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def shares_launchers_store() -> bool:
    """Return whether torchrun started ranks on several machines that share its store across restarts."""
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    return several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def loopback() -> str | None:
    """Return the name of the loopback interface; None if it isn't the usual one."""
    usual = "lo0" if sys.platform == "darwin" else "lo"
    return usual if usual in (name for _, name in socket.if_nameindex()) else None


def local_variables() -> dict[str, str]:
    """Return variables, unless the user has set them, that keep gloo and NCCL on the loopback interface."""
    interface = loopback()
    names = () if interface is None else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    wanted = {"TORCH_GLOO_LAZY_INIT": "1", **{name: str(interface) for name in names}}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def place_variables(rank: int, ranks: int) -> dict[str, str]:
    """Return the variables by which a process finds its place among the ranks of this machine."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(number) for name, number in places.items()}


def init_arguments() -> dict[str, str]:
    """Return the rendezvous: an "init_method", a "prefix" in the launcher's store, or nothing for torch's default."""
    # When torchrun restarts the ranks of one machine, they use the same store, which still has the addresses of dead
    # processes: so each restart gets a prefix. Agents of several machines count restarts separately, so they have no
    # common number for a prefix; there, `FRESH_STORE` gives each start a new store.
    method = os.environ.get(INIT_METHOD)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if start != "0" and not method and shares_launchers_store():
        rule = f"cannot restart the ranks of {os.environ['GROUP_WORLD_SIZE']} machines in the store of torchrun."
        rows = ["It has the addresses of dead ranks, and new ranks would wait for those."]
        raise ConfigError(message(rule, rows, f"Start torchrun with {FRESH_STORE}=1 on every machine."))
    if method:
        return {"init_method": method}
    return {"prefix": f"start_{start}"} if start != "0" and os.environ.get("GROUP_WORLD_SIZE") == "1" else {}


def meet_all(timeout: timedelta) -> dict[str, Any]:
    """Wait for all ranks, and return the arguments of `init_process_group`."""
    # Waiting here, and not in torch, lets ranks 0 and 1 log after 10 s which ranks are missing, and at which address.
    where = init_arguments()
    url = where.get("init_method", "env://")
    needed = ("WORLD_SIZE", *(("MASTER_ADDR", "MASTER_PORT") if url == "env://" else ()))
    if missing := [f"{name} is not set" for name in needed if name not in os.environ]:
        mend = "Start the program with torchrun, or unset RANK for one process."
        raise ConfigError(message("finds RANK, but not all variables of a launcher.", missing, mend))
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if url == "env://" else url
    until = time.monotonic() + timeout.total_seconds()
    # Until rank 0 serves the store, the others can only wait for rank 0.
    timer = threading.Timer(_REMIND_S, call_as, (public_name(), _remind, rank, size, place, [0]))
    timer.daemon = True
    timer.start()
    lost: list[int] = []
    try:
        store = open_store(url, rank, size, timeout)
        if "prefix" in where:
            store = prefixed(where["prefix"], store)
        timer.cancel()
        lost = _wait(prefixed("fsharding_start", store), rank, size, until, place)
    except RuntimeError as error:
        rows = [str(error).strip().partition("\n")[0]]
        raise RankError(_not_met(rank, size, place, rows)) from error
    finally:
        timer.cancel()
    if lost:
        rows = [f"{rank_numbers(lost)}: no call after {timeout.total_seconds():g} s"]
        raise RankError(_not_met(rank, size, place, rows), ranks=tuple(lost))
    return {"store": prefixed("default_pg", store), "rank": rank, "world_size": size}


def _wait(store: Any, rank: int, size: int, until: float, place: str) -> list[int]:
    """Wait in a store for all ranks; return those that are missing at the timeout."""
    store.set(str(rank), "")
    if store.add("count", 1) >= size:
        store.set("all", "")
    remind = time.monotonic() + _REMIND_S
    # Not the store's `wait`: torch logs a warning if it times out.
    while not store.check(["all"]):
        now = time.monotonic()
        if now > min(remind, until):
            lost = [other for other in range(size) if not store.check([str(other)])]
            if now > until:
                return lost
            _remind(rank, size, place, lost)
            remind = math.inf
        time.sleep(max(_LOOK_S, size / 2000))
    return []


def _remind(rank: int, size: int, place: str, lost: list[int]) -> None:
    if rank < _SPEAKERS:
        rule = f"on rank {rank} is waiting for {len(lost)} of {size} ranks at {place}: {rank_numbers(lost)}."
        _log.warning(message(rule, mend="Call it on every rank. For one process, unset RANK and WORLD_SIZE."))


def _not_met(rank: int, size: int, place: str, rows: list[str]) -> str:
    mend = "Call it on every rank, and look at the logs of the others. For one process, unset RANK and WORLD_SIZE."
    return message(f"on rank {rank} has not met all of {size} ranks at {place}.", rows, mend)
