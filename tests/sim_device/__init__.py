"""A simulated asynchronous accelerator, `sim`: torch's PrivateUse1 device, whose kernels are the CPU's, run later.

In: a C++ compiler. Out: `torch.device("sim")` with streams, events, graphs and a caching allocator, from `start()`; and
from `log()` what its streams were given, and where the host read it. `device.cpp` says how it works. It is built once for
each torch and each change of its sources, below `build/`.
Guarantee: results are those of the CPU bit for bit, if and only if each stream waits for what it reads.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"
from torch.utils import cpp_extension

from fsharding.comm import native
from fsharding.comm.stream_log import COLLECTIVES, COMPUTE, Row
from fsharding.comm.streams import DeviceStreams, streams_for

NAME, BACKEND = "sim", "simccl"
ROOT = Path(__file__).resolve().parents[2]
BUILDS = ROOT / "build" / "sim_device"
BUILD_SECONDS = 1200


def _path() -> str:
    """Where tools are looked for: beside this Python, as pip installs ninja, then as usual."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def missing() -> str:
    """Say why the device cannot be built here; "" if it can."""
    absent = [tool for tool in ("g++", "ninja") if shutil.which(tool, path=_path()) is None]
    return f"the simulated device needs {' and '.join(absent)}" if absent else ""


@functools.cache
def build() -> None:
    """Compile the device in a process of its own, whose time no test of ranks has; this process stays without it."""
    program = "from tests import sim_device; sim_device.start()"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=BUILD_SECONDS
    )
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().rpartition("\n")[2])


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Have `build` fill a directory, in one of all processes that ask for it; the others wait for that one.

    The lock ends with its process, whatever ends that. Compilers may go on without the process that started them, so each
    build has a directory of its own, which gets its name when it is complete.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            own = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
            build(own)
            own.rename(folder)


@functools.cache
def start() -> ModuleType:
    """Build the device, and register it with torch, once in a process; returns the extension.

    Raises:
        RuntimeError: it does not compile; the compiler's first error.
    """
    os.environ["PATH"] = _path()
    sources = sorted(Path(__file__).parent.glob("*.*"))
    texts = b"".join(file.read_bytes() for file in sources)
    name = "fsharding_sim_" + hashlib.sha256(torch.__version__.encode() + sys.version.encode() + texts).hexdigest()[:12]

    def build(folder: Path) -> None:
        cpp_extension.load(
            name, [str(file) for file in sources if file.suffix == ".cpp"], ["-O1", "-w", "-DUSE_DISTRIBUTED"],
            build_directory=str(folder), is_python_module=False,
        )  # fmt: skip

    try:
        build_once(BUILDS / name, build)
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if " error: " in line]
        raise RuntimeError(lines[0] if lines else str(error)) from error
    loader = ExtensionFileLoader(name, str(BUILDS / name / f"{name}.so"))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    extension = module_from_spec(spec)
    loader.exec_module(extension)
    torch.utils.rename_privateuse1_backend(NAME)
    extension.register_hooks()
    extension.register_graphs()
    torch._register_device_module(NAME, _device_module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # torch's fake ranks serve every device that is registered before the group is made.
    dist.Backend.backend_capability["fake"].append(NAME)
    native.IN_PLACE.add(BACKEND)
    dist.Backend.register_backend(BACKEND, functools.partial(_communicator, extension), devices=[NAME])
    return extension


def join() -> None:
    """Start the device on a rank whose default process group is of gloo, and have that group serve the device too."""
    start()
    world = dist.group.WORLD
    if isinstance(world, dist.ProcessGroup) and NAME not in dist.get_backend_config(world):
        rank, size, store = dist.get_rank(), dist.get_world_size(), dist.PrefixStore(NAME, world.get_group_store())
        dist.destroy_process_group()
        backends = f"cpu:gloo,{NAME}:{BACKEND}"
        dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))


def _communicator(extension: ModuleType, store: Any, rank: int, size: int, timeout: Any) -> Any:
    """A communicator of the device, which sends through gloo."""
    return extension.SimBackend(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


def _device_module(extension: ModuleType) -> ModuleType:
    """What `torch.get_device_module("sim")` is."""
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.get_device_name = lambda device=None: "a simulated device"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.manual_seed_all = lambda seed: None
    module._is_in_bad_fork = lambda: False
    module.synchronize = lambda device=None: extension.synchronize()
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream = lambda device=None: torch.accelerator.current_stream(NAME)
    module.stream = lambda stream: stream
    module.is_current_stream_capturing = extension.is_capturing
    return module


class HostRead(NamedTuple):
    """A read of the device by the host: the operator, the function of the library that asked for it, and the stack."""

    operator: str
    line: str
    stack: tuple[str, ...]


class Log(NamedTuple):
    """What happened in a `log` block; `rows` are there at its end."""

    rows: list[Row]
    reads: list[HostRead]


@contextmanager
def log() -> Generator[Log]:
    """Keep a log of what the streams are given inside the `with` block, and of the host's reads of the device.

    A wait is named by the line of the library that asks for it; "the collective was called" is a communicator's own.
    """
    extension = start()
    result = Log([], [])

    def note(kind: str, name: str) -> str:
        stack = traceback.extract_stack()[:-1]
        lines = [f"{Path(frame.filename).name}:{frame.name}" for frame in reversed(stack) if _asks(frame.filename)]
        line = lines[0] if lines else ""
        if kind == "read":
            frames = tuple(f"{frame.filename}:{frame.lineno}" for frame in stack[-8:])
            result.reads.append(HostRead(name, line, frames))
        return line

    extension.synchronize()
    extension.on_note(note)
    extension.start_log()
    try:
        yield result
    finally:
        names = {0: COMPUTE} | {number: f"communicator {number}{COLLECTIVES}" for number in extension.communicators()}
        own = streams_for(torch.device(NAME, 0))
        names |= {x.stream_id: name for name, x in own._streams.items()} if isinstance(own, DeviceStreams) else {}
        rows = extension.end_log()
        extension.on_note(None)
        result.rows.extend(Row(names.get(row[0], f"stream {row[0]}"), *row[1:]) for row in rows)


def _asks(filename: str) -> bool:
    """Whether a file is one of the library's that asks for a wait or a read, not one that passes it on."""
    return "/fsharding/" in filename and not filename.endswith(
        ("comm/streams.py", "comm/transfers.py", "comm/handles.py")
    )


@contextmanager
def delays(microseconds: int, seed: int = 0) -> Generator[None]:
    """Delay each operator inside the block by a random time below a limit; the seed repeats the delays."""
    extension = start()
    extension.delay(microseconds, seed)
    try:
        yield
    finally:
        extension.delay(0, seed)
        extension.synchronize()


@contextmanager
def memory_limit(size: int) -> Generator[None]:
    """Have allocations above so many bytes raise `torch.OutOfMemoryError` inside the block."""
    extension = start()
    extension.limit(size)
    try:
        yield
    finally:
        extension.limit(0)
