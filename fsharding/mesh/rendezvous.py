"""Where ranks of one machine meet, and on which addresses they listen: nowhere that another machine can reach.

In: the environment. Out: variables for ranks that are about to start, and arguments of torch's `init_process_group`.
torch's TCP store listens on every address and asks nobody who they are, so local ranks meet in a file that only their
user can read. Law: a variable that the user has set is left as it is.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from fsharding.errors import ConfigError, message
from fsharding.mesh.backends import launchers_store

__all__ = [
    "FRESH_STORE",
    "INIT_METHOD",
    "init_arguments",
    "local_variables",
    "loopback",
    "shares_launchers_store",
    "under_launcher",
]

INIT_METHOD = "FSHARDING_INIT_METHOD"
"""The variable with torch's `init_method` of the default process group; by default torch's own, `env://`."""

FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's variable; with 1 the ranks of each start meet in a store of their own, served by rank 0."""


def under_launcher() -> bool:
    """Whether a launcher such as torchrun has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def shares_launchers_store() -> bool:
    """Whether torchrun has started ranks on several machines, which would meet in one store at every start."""
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    return several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def loopback() -> str | None:
    """The interface that leads nowhere but to this machine; None where there is none under the usual name."""
    usual = "lo0" if sys.platform == "darwin" else "lo"
    return usual if usual in (name for _, name in socket.if_nameindex()) else None


def local_variables() -> dict[str, str]:
    """Variables for local ranks besides those that are set: they keep gloo and NCCL on the loopback interface."""
    interface = loopback()
    names = () if interface is None else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    wanted = {"TORCH_GLOO_LAZY_INIT": "1", **{name: str(interface) for name in names}}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def init_arguments() -> dict[str, Any]:
    """Arguments of `init_process_group` that say where the ranks meet; none at a first start under torchrun.

    torch reads the number of the rank from the environment by itself with `env://` only. When torchrun starts the ranks
    of one machine again, they meet in the store of the start before, with addresses of processes that are gone in it:
    so each start has a prefix of its own there. Agents of several machines count their restarts apart, and have no
    number in common to make a prefix of; a store of each start's own is what torch's variable `FRESH_STORE` gives.

    Raises:
        ConfigError: a start after the first, on several machines, in the store of the first.
    """
    method, start = os.environ.get(INIT_METHOD), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if start != "0" and not method and shares_launchers_store():
        rule = f"cannot start the ranks of {os.environ['GROUP_WORLD_SIZE']} machines again in the store of torchrun."
        rows = ["It has the addresses of ranks that are gone, and new ranks would wait for those."]
        raise ConfigError(message("fs.make_mesh", rule, rows, f"Start torchrun with {FRESH_STORE}=1 on every machine."))
    if method:
        where: dict[str, Any] = {"init_method": method}
    elif start != "0" and os.environ.get("GROUP_WORLD_SIZE") == "1":
        where = {"store": launchers_store(f"start_{start}")}
    else:
        return {}
    return {**where, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
