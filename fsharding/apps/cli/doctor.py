"""`fsharding doctor`: check this machine, how its ranks communicate, and what other machines can reach."""

from __future__ import annotations

import ipaddress
import json
import math
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

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
from fsharding.comm.transport import choice_for
from fsharding.contrib.disk import DISK, disk_folder, store
from fsharding.contrib.pairwise import Pairwise
from fsharding.mesh.device_mesh import everyone, make_mesh
from fsharding.mesh.launch import launch_ranks
from fsharding.ops.scaled_mm import scaled_kernel

__all__ = ["Finding", "listening", "on_socket", "run_doctor", "transport"]

_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_PREFIXES = ("GLOO_", "NCCL_", "MASTER_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCHELASTIC_", "FSHARDING_")
_NAMES = (*_OF_A_LAUNCHER, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_FORMATS = ("TENSORWISE", "ROWWISE", "E4M3_1x128", "E4M3_128x128", "MXFP8", "MXFP4", "NVFP4")
_FEW_FILES = 4096
_COPIED = 256 << 20  # bytes


class Finding(NamedTuple):
    """One row: a value, a problem if any, and its fix."""

    name: str
    value: str
    wrong: str = ""
    mend: str = ""
    grave: bool = False  # ranks cannot run, or other machines can reach them


def run_doctor(config: DoctorConfig) -> int:
    """Print the findings; return 1 if two local ranks cannot run or other machines can reach them, else 0."""
    findings = [*_machine(), *_variables()]
    print("fsharding doctor: starts two ranks, which takes some seconds", file=sys.stderr, flush=True)
    findings += _ranks()
    healthy = not any(finding.grave for finding in findings)
    if config.json:
        rows = [finding._asdict() for finding in findings]
        print(json.dumps({"healthy": healthy, "findings": rows}), flush=True)
    else:
        table = Table("item", "value", "problem and fix", box=None, pad_edge=False)
        for it in findings:
            table.add_row(*map(Text, (it.name, it.value, f"{it.wrong} {it.mend}".strip() or "-")))
        # Rows are read by people and by grep: they break on a terminal only.
        Console(width=None if Console().is_terminal else 1000).print(table)
    return 0 if healthy else 1


# -------------------------------------------------------------------------------------------------------- this machine
def _machine() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("torch", f"{torch.__version__}, {_build()} build")
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
    file = Path("/proc/meminfo")
    if not file.is_file():
        return Finding("memory", "unknown: no /proc/meminfo")
    kib = {line.split()[0]: int(line.split()[1]) for line in file.read_text().splitlines()}
    total = kib["MemTotal:"] << 10
    left = kib["MemAvailable:"] << 10
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit() and int(text) < total:
        total = int(text)
        left = min(left, total - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    finding = Finding("memory", f"{_size(total)}, {_size(left)} free")
    if left < 1 << 30:
        finding = finding._replace(wrong="Two ranks with torch take about 1 GiB.", mend="End other programs.")
    return finding


def _copies() -> Iterator[Finding]:
    """Yield the bandwidth of copies between host and device."""
    if not devices.device_count():
        return
    there = torch.empty(_COPIED, dtype=torch.uint8, device=devices.accelerator())
    here = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    for name, source, target in (("host to device", here, there), ("device to host", there, here)):
        target.copy_(source)
        devices.synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        devices.synchronize()
        yield Finding(f"copies, {name}", _rate(begun))


def _disk() -> Finding:
    """Return the bandwidth of leaves on disk, checksums included."""
    name = f"disk, {disk_folder()}"
    try:
        begun = time.perf_counter()
        stored = store(torch.zeros(_COPIED, dtype=torch.uint8))
        DISK.settle(stored, stored.device)
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
    """Return the platform of this build of torch; the version may not show it."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def _devices() -> Iterator[Finding]:
    here = devices.accelerator()
    count = devices.device_count()
    kinds = f"{count} x {devices.name_of(here)}, {_build()}"
    yield Finding("devices", kinds if count else "the CPU alone")
    needed = devices.backend_for(here)
    there = {name: dist.is_backend_available(name) for name in dict.fromkeys(("gloo", "nccl", needed)) if name}
    finding = Finding("backends", ", ".join(f"{name}: {'yes' if has else 'no'}" for name, has in there.items()))
    if not there.get(needed):
        wrong = f"{f'{here} devices' if count else 'Ranks on the CPU'} need {needed or 'a backend'}."
        finding = finding._replace(wrong=wrong, mend="Install a build of torch that has it.", grave=True)
    yield finding


def _kernels() -> Iterator[Finding]:
    """Yield the low-precision formats with a matmul kernel on a device; all others are dequantized first."""
    for device in dict.fromkeys(("cpu", devices.accelerator())):
        kernels = {name: scaled_kernel(getattr(formats, name), device) for name in _FORMATS}
        for name, kernel in kernels.items():
            if kernel.exists or device != "cpu":
                yield Finding(f"{name} on {device}", str(kernel).partition(": ")[2])
        if device == "cpu":
            yield Finding("dequantized on cpu", ", ".join(name for name in kernels if not kernels[name].exists))


def _shm() -> Finding:
    there = Path("/dev/shm").is_dir()
    usage = shutil.disk_usage("/dev/shm" if there else "/")
    value = f"{_size(usage.total)}, {_size(usage.free)} free; gloo ranks do not need it" if there else "none"
    if not devices.device_count() or (there and usage.free >= 256 << 20):
        return Finding("/dev/shm", value)
    wrong = "NCCL and data loaders share memory through it."
    return Finding("/dev/shm", value, wrong, "Mount it, or give the container --shm-size=1g.")


def _open_files() -> Finding:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if n == resource.RLIM_INFINITY else n for n in limits)
    value = f"{soft}, limit {hard}".replace("inf", "unlimited")
    if soft >= _FEW_FILES:
        return Finding("open files", value)
    wrong = "Each process group takes a few open files per peer: large meshes run out."
    return Finding("open files", value, wrong, f"Run `ulimit -n {min(hard, _FEW_FILES)}` first.")


def _size(n: int) -> str:
    return f"{n / 2**30:.1f} GiB"


# ---------------------------------------------------------------------------------------------------------- variables
def _variables() -> Iterator[Finding]:
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) or name in _NAMES)
    for name in names:
        yield Finding(name, os.environ[name], *_trouble(name, os.environ[name]))
    if not names:
        yield Finding("variables", "none set that ranks read")


def _trouble(name: str, value: str) -> tuple[str, str]:
    """Return the problem with a variable, and its fix."""
    if name in _OF_A_LAUNCHER:
        return "A launcher sets it: commands in this shell run as one rank of many.", f"unset {name}"
    if name in _INTERFACES:
        there = [interface for _, interface in socket.if_nameindex()]
        # Both accept prefixes and lists. NCCL also accepts = and ^, and needs only one of a list.
        wanted = [] if name.startswith("NCCL") and set("^=,") & set(value) else value.split(",")
        if not all(any(interface.startswith(prefix) for interface in there) for prefix in wanted):
            return f"No such interface; found {', '.join(there)}.", f"unset {name}"
    if name == "MASTER_ADDR":
        try:
            socket.getaddrinfo(value, None)
        except OSError as error:
            return f"Not found: {error.strerror or error}.", "Set it to the address of rank 0."
    return "", ""


# -------------------------------------------------------------------------------------------------------------- ranks
def _ranks() -> Iterator[Finding]:
    try:
        answers = launch_ranks(_look, 2)
    except RankError as error:
        yield Finding("two local ranks", "do not run", f"{error}", "See the error of the rank.", grave=True)
        return
    yield Finding("two local ranks", "run")
    yield Finding("transport", *transport(*answers[0][0]))
    if not Path("/proc/self/net/tcp").exists():
        yield Finding("listening", "unknown", "Listening sockets are read from /proc.", "Use Linux.")
    sockets = [on_socket(*row) for _, rows in answers for row in rows]
    yield from sockets or [Finding("listening", "no process of a local run")]


def on_socket(process: str, address: str, port: int) -> Finding:
    """Describe a listening TCP socket of the launcher or of a rank, and who can reach it."""
    name = f"listening on {f'[{address}]' if ':' in address else address}:{port}"
    if ipaddress.ip_address(address).is_loopback:
        return Finding(name, f"{process}, for this machine only")
    wrong = "Any process that reaches this address can talk to a run, unauthenticated."
    mend = "Isolate the network, with a firewall or a separate namespace."
    if chosen := [f"{name}={os.environ[name]}" for name in _INTERFACES if name in os.environ]:
        mend = f"Unset {', '.join(chosen)}, or isolate the network."
    return Finding(name, f"{process}, reachable from outside", wrong, mend, grave=True)


def transport(name: str, reason: str) -> tuple[str, str, str]:
    """Return the transport between local ranks and its reason, the problem with it, and the fix."""
    value = f"{name}: {reason}"
    if name != Pairwise.name:
        return value, "", ""
    mend = "Run all ranks as one user, in one container, on Linux with /proc/PID/fd."
    if os.environ.get("FSHARDING_SHARED_MEMORY") == "0":
        mend = "unset FSHARDING_SHARED_MEMORY"
    return value, "Every byte goes through a socket, slower than shared memory.", mend


def _look() -> tuple[tuple[str, str], list[tuple[str, str, int]]]:
    """Return a rank's transport and its reason, and its sockets; rank 0 adds the launcher's."""
    enough = devices.device_count() >= int(os.environ["WORLD_SIZE"])
    mesh = make_mesh(dp=-1, device=None if enough else "cpu", timeout=timedelta(seconds=60))
    try:
        group = everyone(mesh)
        dist.all_reduce(torch.ones(1, device=mesh.device_type), group=group.process_group)
        choice = choice_for(group, torch.device(mesh.device_type))
        sockets = [(f"rank {dist.get_rank()}", *row) for row in listening(os.getpid())]
        if dist.get_rank() == 0:
            sockets = [*(("launcher", *row) for row in listening(os.getppid())), *sockets]
    finally:
        dist.destroy_process_group()
    return (choice.kind.name, choice.reason), sockets


def listening(pid: int) -> list[tuple[str, int]]:
    """Return addresses and ports of the listening TCP sockets of a process, from /proc."""
    folder = Path(f"/proc/{pid}/fd")
    inodes: set[str] = set()
    for link in folder.iterdir() if folder.exists() else ():
        with suppress(FileNotFoundError):  # closed since
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    result: list[tuple[str, int]] = []
    for table in (Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")):
        for row in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_, inode = row.split()[:10]
            if state == "0A" and inode in inodes:
                address, _, port = local.partition(":")
                result.append((_address(address), int(port, 16)))
    return sorted(result)


def _address(words: str) -> str:
    """Read an address from hexadecimal 32-bit words in native byte order."""
    parts = [int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8)]
    result = ipaddress.ip_address(b"".join(parts))
    return str(getattr(result, "ipv4_mapped", None) or result)
