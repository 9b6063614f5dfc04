"""`fsharding doctor`: what this machine has, how ranks will talk on it, and what of it other machines can reach.

In: this machine and the environment. Out: findings, each with what is wrong and its mend where something is.
Two ranks are started as `fsharding train --ranks 2` does; what they and their launcher listen on is read from Linux.
Guarantee: nothing is changed, and the exit status is 0 where ranks start and nothing listens for other machines.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsharding import formats
from fsharding.apps.cli.options import DoctorConfig
from fsharding.base import devices
from fsharding.base.errors import DiskError, RankError
from fsharding.base.version import own_version
from fsharding.comm.disk import disk_folder, store
from fsharding.comm.transport import choice_for
from fsharding.contrib.pairwise import Pairwise
from fsharding.mesh.device_mesh import everyone, make_mesh
from fsharding.mesh.launch import launch_ranks
from fsharding.ops.scaled_mm import scaled_kernel

__all__ = ["Finding", "Socket", "doctor", "listening", "transport"]

_SHARED_MEMORY = "FSHARDING_SHARED_MEMORY"
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_PREFIXES = ("GLOO_", "NCCL_", "MASTER_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCHELASTIC_", "FSHARDING_")
_NAMES = (*_OF_A_LAUNCHER, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_FEW_FILES = 4096
_LITTLE_MEMORY = 1 << 30
_LITTLE_SHM = 256 << 20
_COPIED = 256 << 20
_WIDE = 1000
_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Finding:
    """One row.

    Attributes:
        name: of what was looked at.
        value: what was found.
        wrong: what is wrong with it; "" for nothing.
        mend: what puts it right.
        grave: whether ranks cannot run so, or other machines can reach them.
    """

    name: str
    value: str
    wrong: str = ""
    mend: str = ""
    grave: bool = False


@dataclass(frozen=True)
class Socket:
    """A TCP socket that waits for connections.

    Attributes:
        process: "launcher", "rank 0" and so on.
        address: it is bound to.
        port: its number.
    """

    process: str
    address: str
    port: int

    @property
    def outside(self) -> bool:
        """Whether another machine can reach it."""
        return not ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        return f"{f'[{self.address}]' if ':' in self.address else self.address}:{self.port}"


def doctor(config: DoctorConfig) -> int:
    """Looks at this machine and prints what it finds.

    Returns:
        The exit status: 1 if two local ranks cannot run, or if other machines can reach them; else 0.
    """
    result = [*_machine(), *_variables()]
    print("fsharding doctor: starts two ranks, which takes some seconds", file=sys.stderr, flush=True)
    result += _ranks()
    healthy = not any(finding.grave for finding in result)
    if config.json:
        print(json.dumps({"healthy": healthy, "findings": [*map(dataclasses.asdict, result)]}), flush=True)
    else:
        _show(result)
    return 0 if healthy else 1


def _show(findings: Iterable[Finding]) -> None:
    table = Table("what", "found", "wrong, and the mend", box=None, pad_edge=False)
    for finding in findings:
        table.add_row(*map(Text, (finding.name, finding.value, f"{finding.wrong} {finding.mend}".strip() or "-")))
    # Rows are read by people and by grep: they break on a terminal only.
    width = None if Console().is_terminal else _WIDE
    Console(width=width).print(table)


# -------------------------------------------------------------------------------------------------------- this machine
def _machine() -> Iterator[Finding]:
    """Rows that do not depend on ranks."""
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("torch", f"{torch.__version__}, {_build()}")
    yield Finding("optree", metadata.version("optree"))
    yield Finding("fsharding", own_version())
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}, {socket.gethostname()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", f"{cores} of {os.cpu_count()}")
    yield _memory()
    yield from _copies()
    yield _disk()
    yield from _devices()
    yield from _kernels()
    yield _shm()
    yield _open_files()


def _memory() -> Finding:
    total = _meminfo("MemTotal")
    left = _meminfo("MemAvailable")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit() and int(text) < total:
        used = Path("/sys/fs/cgroup/memory.current").read_text()
        total = int(text)
        left = min(left, int(text) - int(used))
    value = f"{_size(total)}, {_size(left)} free" if total else "not known: no /proc/meminfo"
    if total and left < _LITTLE_MEMORY:
        return Finding("memory", value, "Two ranks that have torch loaded take about 1 GiB.", "End other programs.")
    return Finding("memory", value)


def _meminfo(name: str) -> int:
    """Bytes, as Linux says; 0 elsewhere."""
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)


def _copies() -> Iterator[Finding]:
    """How fast leaves of the host are copied to a device and back."""
    if not devices.device_count():
        return
    device = devices.accelerator()
    there = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    here = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    for name, source, target in (("host to device", here, there), ("device to host", there, here)):
        target.copy_(source)
        devices.synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        devices.synchronize()
        yield Finding(f"copies, {name}", _rate(begun))


def _disk() -> Finding:
    """How fast leaves on disk are written and read, with their checksums."""
    name = f"disk, {disk_folder()}"
    try:
        begun = time.perf_counter()
        stored = store(torch.zeros(_COPIED, dtype=torch.uint8))
        stored.settle()
        written = _rate(begun)
        begun = time.perf_counter()
        stored.read()
        read = _rate(begun)
    except DiskError as error:
        return Finding(name, "no file can be made here", str(error).partition("\n")[0], "Set FSHARDING_DISK.")
    free = shutil.disk_usage(disk_folder()).free
    return Finding(name, f"{_size(free)} free, written at {written}, read at {read} from the cache of files")


def _rate(begun: float) -> str:
    return f"{_COPIED / (time.perf_counter() - begun) / 1e9:.1f} GB/s"


def _build() -> str:
    """What the installed torch was built for; the version alone need not show it."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip} build"
    return f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"


def _devices() -> Iterator[Finding]:
    here, count = devices.accelerator(), devices.device_count()
    kinds = f"{count} x {devices.name_of(here)}, {_build().removesuffix(' build')}"
    yield Finding("devices", kinds if count else "the CPU alone")
    needed = devices.backend_for(here)
    there = {name: dist.is_backend_available(name) for name in dict.fromkeys(("gloo", "nccl", *filter(None, [needed])))}
    value = ", ".join(f"{name}: {'yes' if has else 'no'}" for name, has in there.items())
    wrong = (
        ""
        if there.get(needed)
        else f"{f'{here} devices need' if count else 'Ranks on the CPU need'} {needed or 'a backend'}."
    )
    yield Finding("backends", value, wrong, "Install a build of torch that has it." if wrong else "", bool(wrong))


_FORMATS = ("TENSORWISE", "ROWWISE", "E4M3_1x128", "E4M3_128x128", "MXFP8", "MXFP4", "NVFP4")


def _kernels() -> Iterator[Finding]:
    """Which formats of low precision a device has a product for; all others are dequantized first."""
    for device in dict.fromkeys(("cpu", devices.accelerator())):
        kernels = {name: scaled_kernel(getattr(formats, name), device) for name in _FORMATS}
        for name, kernel in kernels.items():
            if kernel.exists or device != "cpu":
                yield Finding(f"{name} on {device}", str(kernel).partition(": ")[2])
        if device == "cpu":
            without = ", ".join(name for name, kernel in kernels.items() if not kernel.exists)
            yield Finding("dequantized on cpu", without)


def _shm() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("/dev/shm", "none", *_no_shm("NCCL shares memory of one machine through it."))
    usage = shutil.disk_usage(path)
    value = f"{_size(usage.total)}, {_size(usage.free)} free; gloo ranks do not need it"
    if devices.device_count() and usage.free < _LITTLE_SHM:
        return Finding("/dev/shm", value, *_no_shm("NCCL shares memory of one machine through it, and data loaders."))
    return Finding("/dev/shm", value)


def _no_shm(wrong: str) -> tuple[str, str]:
    return (wrong, "Mount it, or give the container --shm-size=1g.") if devices.device_count() else ("", "")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = [str(n) if n != resource.RLIM_INFINITY else "unlimited" for n in (soft, hard)]
    value = f"{text[0]}, may be raised to {text[1]}"
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        wrong = "Each process group of a rank has a few open files for each of its peers: meshes of many ranks run out."
        most = _FEW_FILES if hard == resource.RLIM_INFINITY else min(hard, _FEW_FILES)
        return Finding("open files", value, wrong, f"Run `ulimit -n {most}` first.")
    return Finding("open files", value)


def _size(n: int) -> str:
    return f"{n / 2**30:.1f} GiB"


# ---------------------------------------------------------------------------------------------------------- variables
def _variables() -> Iterator[Finding]:
    """List the environment variables that ranks read."""
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) or name in _NAMES)
    for name in names:
        yield Finding(name, os.environ[name], *_trouble(name, os.environ[name]))
    if not names:
        yield Finding("variables", "none is set that ranks read")


def _trouble(name: str, value: str) -> tuple[str, str]:
    """The problem of a variable, and the mend."""
    if name in _OF_A_LAUNCHER:
        return "A launcher sets it: commands of this shell take themselves for one rank of many.", f"unset {name}"
    if name in _INTERFACES:
        there = [interface for _, interface in socket.if_nameindex()]
        # NCCL takes prefixes, lists, and ^ for all but these.
        plain = name.startswith("GLOO") or not set("^=,") & set(value)
        if plain and not any(interface.startswith(value) for interface in there):
            return f"There is no such interface: there are {', '.join(there)}.", f"unset {name}"
    if name == "MASTER_ADDR":
        try:
            socket.getaddrinfo(value, None)
        except OSError as error:
            return f"It is not found: {error.strerror or error}.", "Give the address of the machine of rank 0."
    return "", ""


# -------------------------------------------------------------------------------------------------------------- ranks
def _ranks() -> Iterator[Finding]:
    """Rows that two local ranks report."""
    try:
        answers: list[dict[str, Any]] = launch_ranks(_look, 2)
    except RankError as error:
        yield Finding("two local ranks", "do not run", f"{error}", "See the error of the rank.", grave=True)
        return
    yield Finding("two local ranks", "run")
    yield Finding("transport", *transport(*answers[0]["transport"]))
    if not all(rank["readable"] for rank in answers):
        yield Finding("listening", "not known", "What listens is read from /proc, which is not there.", "Use Linux.")
    sockets = [Socket(*row) for rank in answers for row in rank["sockets"]]
    for it in sockets:
        value = f"{it.process}, {'reachable from outside' if it.outside else 'for this machine only'}"
        yield Finding(f"listening on {it}", value, *_exposed(it), grave=it.outside)
    if not sockets:
        yield Finding("listening", "no process of a local run")


def _exposed(it: Socket) -> tuple[str, str]:
    if not it.outside:
        return "", ""
    wrong = "Any process that reaches this address can talk to a run, without a password."
    chosen = [f"{name}={os.environ[name]}" for name in _INTERFACES if name in os.environ]
    return wrong, f"Unset {', '.join(chosen)}, or keep strangers off the network." if chosen else (
        "Keep strangers off the network, by a firewall or a namespace of its own."
    )


def transport(name: str, reason: str) -> tuple[str, str, str]:
    """How tensors travel between ranks of this machine: the transport and why, what is wrong with that, and the mend.

    Args:
        name: of the transport that two ranks have chosen.
    """
    value = f"{name}: {reason}"
    if name != Pairwise.name:
        return value, "", ""
    wrong = "Every byte goes through a socket, which is slower than memory that ranks share."
    if os.environ.get(_SHARED_MEMORY) == "0":
        return value, wrong, f"unset {_SHARED_MEMORY}"
    return (
        value,
        wrong,
        "Run all ranks as one user, in one container, on Linux with /proc/PID/fd.",
    )


def _look() -> dict[str, Any]:
    """The report of a rank that has talked to the others; rank 0 looks at the launcher, too."""
    enough = devices.device_count() >= int(os.environ["WORLD_SIZE"])
    mesh = make_mesh(dp=-1, device=None if enough else "cpu", timeout=_TIMEOUT)
    try:
        group = everyone(mesh)
        dist.all_reduce(torch.ones(1, device=mesh.device_type), group=group.process_group)
        choice = choice_for(group, torch.device(mesh.device_type))
        sockets = [(f"rank {dist.get_rank()}", *row) for row in listening(os.getpid())]
        if dist.get_rank() == 0:
            sockets = [*(("launcher", *row) for row in listening(os.getppid())), *sockets]
    finally:
        dist.destroy_process_group()
    return {
        "transport": (choice.kind.name, choice.reason),
        "sockets": sockets,
        "readable": Path("/proc/self/net/tcp").exists(),
    }


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports of the TCP sockets of a process that wait for connections, as Linux tells them.

    Args:
        pid: of a process of the same user.
    """
    inodes = {*_inodes(pid)}
    result: list[tuple[str, int]] = []
    for table in (Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")):
        for row in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_, inode = row.split()[:10]
            if state == "0A" and inode in inodes:
                address, _, port = local.partition(":")
                result.append((_address(address), int(port, 16)))
    return sorted(result)


def _inodes(pid: int) -> Iterator[str]:
    folder = Path(f"/proc/{pid}/fd")
    for link in folder.iterdir() if folder.exists() else ():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # closed since
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _address(words: str) -> str:
    """An address from the hexadecimal words of 32 bits, each in the byte order of this machine, that Linux writes."""
    parts = [int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8)]
    result = ipaddress.ip_address(b"".join(parts))
    return str(getattr(result, "ipv4_mapped", None) or result)
