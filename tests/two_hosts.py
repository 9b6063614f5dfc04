"""Two hosts on one machine: Linux namespaces joined by a virtual cable, for tests of ranks on several machines.

A host has its own network, processes, shared memory, /tmp and name; other directories are those of the machine. A host
lives as long as its first process, which ends with the pipe from the program that started it; the kernel removes the rest.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fsharding.base.errors import ConfigError, RankError, report

__all__ = ["Host", "HostPair"]

_TOOLS = ("unshare", "nsenter", "ip", "mount", "sh", "cat")
_NAMESPACES = ("--pid", "--ipc", "--mount", "--uts")
_START_S = 20.0
_TEMPORARY = Path("/tmp")
_NETWORK = "192.0.2"
"""RFC 5737 keeps these addresses for examples, so no route of the machine is hidden."""
_INTERFACE = "eth0"
_PORT = 29400
_OF_A_LAUNCHER = ("PET_", "TORCHELASTIC_", "GLOO_SOCKET_", "NCCL_SOCKET_", "MASTER_", "GROUP_", "ROLE_")
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FSHARDING_INIT_METHOD", "TMPDIR")
_LAST_LINES = 20

# A directory that all hosts see stays where it is: it is bound into the new /tmp before that covers the old one.
_FIRST_PROCESS = """
set -e
name=$1 folder=$2
shift 2
echo "$name" > /proc/sys/kernel/hostname
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs "$folder/tmp"
for path; do
    mkdir -p "$folder/tmp/${path#/tmp/}"
    mount --bind "$path" "$folder/tmp/${path#/tmp/}"
done
mount --move "$folder/tmp" /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
echo ready
exec cat > /dev/null
"""
_TRIAL = "ip link add left type veth peer name right && mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm"


def _failure(rule: str, rows: Sequence[str]) -> ConfigError:
    mend = "Two hosts need Linux, root (in a container, --privileged), and the tools of util-linux and iproute2."
    return ConfigError(report(f"HostPair {rule}", rows, mend))


def _checked(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=False)
    if done.returncode:
        raise _failure(
            f"could not run {command[-1] if len(command) < 4 else ' '.join(command)}.", [done.stderr.strip()]
        )


@dataclass
class Host:
    """One of the two hosts."""

    name: str  # the other host resolves it, too
    address: str  # of eth0, its only interface besides loopback
    _names: str
    _shared: tuple[Path, ...]
    _resources: ExitStack = field(default_factory=ExitStack)
    _first: subprocess.Popen[bytes] | None = None
    _pid: int = 0
    _network: int = -1
    _commands: list[subprocess.Popen[Any]] = field(default_factory=list[subprocess.Popen[Any]])

    def start(self) -> None:
        """Start it, or start it again after `kill`, with an empty /tmp and the same address."""
        if self.alive:
            return
        self.kill()
        net = ["nsenter", self._net_option()] if self._network >= 0 else []
        unshare = ["unshare", *_NAMESPACES, *([] if net else ["--net"]), "--fork", "--kill-child", "--mount-proc"]
        # Needed until everything is mounted, so that a program that is killed later leaves no folder.
        with tempfile.TemporaryDirectory(prefix="fsharding-hosts-") as folder:
            Path(folder, "hosts").write_text(self._names)
            Path(folder, "tmp").mkdir()
            shell = ["sh", "-c", _FIRST_PROCESS, "sh", self.name, folder, *map(str, self._shared)]
            self._first = first = subprocess.Popen(
                [*net, *unshare, *shell],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            assert first.stdout is not None and first.stderr is not None
            ready = bool(select.select([first.stdout], [], [], _START_S)[0]) and first.stdout.readline() == b"ready\n"
            if not ready:
                first.kill()
                self._first = None
                said = first.communicate()[1].decode(errors="replace").strip()
                raise _failure(f"could not start {self.name}.", [said])
        self._pid = int(Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()[0])
        if self._network < 0:
            self._network = os.open(f"/proc/{self._pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            self._resources.callback(os.close, self._network)
            self.ip("link", "set", "lo", "up")

    def kill(self) -> None:
        """Kill all of its processes, as a crash does, and wait until they are gone; its network stays."""
        if self._first is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._pid or self._first.pid, signal.SIGKILL)
        # The kernel lets the first process end when all others have.
        self._first.communicate()
        self._first = None
        self._pid = 0
        for command in self._commands:
            command.wait()
        self._commands.clear()

    def close(self) -> None:
        """Kill it, and remove its network."""
        self.kill()
        self._network = -1
        self._resources.close()

    @property
    def alive(self) -> bool:
        """Return whether it runs."""
        return self._first is not None and self._first.poll() is None

    @property
    def root(self) -> Path:
        """Return its file system as this process reaches it while it runs: `host.root / "tmp"`."""
        return Path(f"/proc/{self._pid}/root")

    def unplug(self) -> None:
        """Pull the cable: what is sent is lost, and neither side is told."""
        self.ip("link", "set", _INTERFACE, "down")

    def plug(self) -> None:
        """Put the cable back."""
        self.ip("link", "set", _INTERFACE, "up")

    def ip(self, *arguments: str) -> None:
        """Run iproute2's `ip` in its network."""
        _checked(["nsenter", self._net_option(), "ip", *arguments])

    def _net_option(self) -> str:
        return f"--net=/proc/{os.getpid()}/fd/{self._network}"

    def popen(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
        """Start a command in it, in the directory of this process; killing the returned process leaves the command."""
        if not self.alive:
            rule = f"cannot start {command[0]} on {self.name}, which does not run."
            raise ConfigError(report(f"Host.popen {rule}", mend="Call its start() first."))
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_OF_A_LAUNCHER) and name not in _OF_A_RANK
        }
        enter = ["nsenter", f"--target={self._pid}", self._net_option(), *_NAMESPACES, "--"]
        shell = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", os.getcwd()]
        process = subprocess.Popen(
            [*enter, *shell, *command], env={**kept, **(env or {})}, start_new_session=True, **kwargs
        )
        self._commands.append(process)
        return process

    def stop_commands(self) -> None:
        """Kill every command that was started in it, with its children."""
        # From inside, -1 is every process of the host but the first and the sender.
        enter = ["nsenter", f"--target={self._pid}", "--pid", "--mount", "--", "sh", "-c", "kill -KILL -1"]
        subprocess.run(enter, capture_output=True, timeout=_START_S, check=False)
        for command in self._commands:
            command.wait()
        self._commands.clear()


class HostPair:
    """Two hosts, `host0` and `host1`; both see the directories `shared` below /tmp.

    Example:
        with HostPair() as pair:
            names = [run.stdout for run in pair.run(["cat", "/proc/sys/kernel/hostname"])]
    """

    def __init__(self, *, shared: Sequence[Path | str] = (), mtu: int = 1500) -> None:
        if reason := self.unavailable():
            raise _failure("cannot make two hosts.", [reason])
        if missing := [str(path) for path in shared if not Path(path).is_dir()]:
            raise ConfigError(report("HostPair got a shared= directory that is not there.", missing, "Make it."))
        self._resources = ExitStack()
        try:
            addresses = {f"host{i}": f"{_NETWORK}.{i + 1}" for i in range(2)}
            lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
            names = "\n".join(lines) + "\n"
            seen = _below_temporary([*shared, sys.prefix, sys.base_prefix, Path(__file__).parents[1], Path.cwd()])
            self.hosts = tuple(Host(name, address, names, seen) for name, address in addresses.items())
            for host in self.hosts:
                self._resources.callback(host.close)
                host.start()
            first, second = self.hosts
            end = f"/proc/{os.getpid()}/fd/{second._network}"  # pyright: ignore[reportPrivateUsage]
            ends = [_INTERFACE, "mtu", str(mtu), "type", "veth", "peer", "name", _INTERFACE, "mtu", str(mtu)]
            first.ip("link", "add", *ends, "netns", end)
            for host in self.hosts:
                host.ip("address", "add", f"{host.address}/24", "dev", _INTERFACE)
                host.plug()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def unavailable() -> str:
        """Try it in a namespace that ends at once; return why this system cannot have two hosts, or ""."""
        if sys.platform != "linux":
            return f"{sys.platform} has no namespaces"
        if missing := [name for name in _TOOLS if shutil.which(name) is None]:
            return f"not installed: {', '.join(missing)}"
        if os.geteuid():
            return "only root may make namespaces that are joined"
        command = ["unshare", "--net", *_NAMESPACES, "--fork", "--mount-proc", "sh", "-c", _TRIAL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=False)
        return (done.stderr.strip() or "unshare failed") if done.returncode else ""

    def torchrun(self, arguments: Sequence[str], *, ranks: int, options: Sequence[str] = ()) -> list[str]:
        """Return the line that starts a program on `ranks` ranks of each host, with options of torchrun."""
        # With --max-restarts `run` needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or ranks of a later start look for those
        # of the first.
        name = uuid.uuid4().hex[:8]
        where = ["--rdzv-backend", "c10d", "--rdzv-id", name, "--rdzv-endpoint", f"{self.hosts[0].name}:{_PORT}"]
        size = ["--nnodes", "2", "--nproc-per-node", str(ranks)]
        return [sys.executable, "-m", "torch.distributed.run", *size, *options, *where, *arguments]

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        capture: bool = True,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run one command on both hosts at the same time; kill both if they have not ended after `timeout` seconds."""
        with ExitStack() as files:
            # Files, since a full pipe that is never read would block its writer.
            names = ("stdout", "stderr") if capture else ()
            outs = [
                {name: files.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for name in names}
                for _ in self.hosts
            ]
            try:
                started = [
                    host.popen(command, env=env, stdin=subprocess.DEVNULL, **out)
                    for host, out in zip(self.hosts, outs, strict=True)
                ]
                late = _wait(started, timeout)
            except BaseException:
                self._stop()
                raise
            if late:
                self._stop()
            texts = [[_text(file) for file in out.values()] or ["", ""] for out in outs]
            if late:
                rows = [
                    f"{host.name}: {line}"
                    for host, (out, err) in zip(self.hosts, texts, strict=True)
                    for line in (out + err).splitlines()[-_LAST_LINES:]
                ]
                rule = f"has killed {command[0]}, which had not ended after {timeout:g} s."
                raise RankError(report(f"HostPair.run {rule}", rows[-8:], "Give it more seconds with timeout=."))
        return [
            subprocess.CompletedProcess([*command], process.returncode, out, err)
            for process, (out, err) in zip(started, texts, strict=True)
        ]

    def _stop(self) -> None:
        for host in self.hosts:
            if host.alive:
                host.stop_commands()

    def close(self) -> None:
        """End both hosts and remove their network; closing twice is harmless."""
        self._resources.close()

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _below_temporary(paths: Sequence[Path | str]) -> tuple[Path, ...]:
    """Return the directories that a new /tmp would hide, without those inside of others."""
    below = sorted({Path(path).resolve() for path in paths if _TEMPORARY in Path(path).resolve().parents})
    return tuple(path for path in below if not {*path.parents} & {*below})


def _wait(processes: Sequence[subprocess.Popen[Any]], timeout: float | None) -> bool:
    """Wait for processes; return whether any is left after `timeout` seconds."""
    end = None if timeout is None else time.monotonic() + timeout  # no assert: a limit for hanging processes
    for process in processes:
        try:
            process.wait(None if end is None else max(0.0, end - time.monotonic()))  # no assert: as above
        except subprocess.TimeoutExpired:
            return True
    return False


def _text(file: Any) -> str:
    file.seek(0)
    return file.read()
