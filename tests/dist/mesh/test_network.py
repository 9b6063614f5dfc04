"""Local ranks let nobody in: no port on an address that another machine reaches, and no file that another user opens."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsharding.testing import RankPool
from tests.helpers import full, until

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
SMALL = ["--seq", "32", "--batch", "8"]


def listening(pid):
    """Local addresses, in Linux's words, of the listening sockets of a process."""
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    columns = [row.split() for table in tables for row in table]
    return [row[1].partition(":")[0] for row in columns if row[3] == "0A" and row[9] in inodes]


def is_loopback(address):
    return address in ("00000000000000000000000001000000", "0000000000000000FFFF00000100007F") or (
        len(address) == 8 and address.endswith("7F")
    )


def family(pid):
    """A process and all that it has started."""
    children = [int(x) for f in Path(f"/proc/{pid}/task").glob("*/children") for x in f.read_text().split()]
    return [pid, *(each for child in children for each in family(child))]


def test_local_ranks_listen_on_loopback_alone_and_leave_nothing_behind(tmp_path):
    out, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    command = [
        sys.executable,
        "-m",
        "fsharding",
        "train",
        "--out",
        str(out),
        *SMALL,
        "--steps",
        "100000",
        "--ranks",
        "2",
    ]
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME", "PYTHONWARNINGS")
    env = {name: value for name, value in os.environ.items() if name not in unwanted} | {"TMPDIR": str(temporary)}
    metrics = out / "metrics.jsonl"
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        assert until(lambda: run.poll() is not None or (metrics.exists() and metrics.read_text()), 90)
        assert run.poll() is None, run.stdout.read()
        processes = family(run.pid)
        addresses = {pid: listening(pid) for pid in processes}
        modes = {path.name: path.stat().st_mode & 0o777 for path in temporary.iterdir() if path.is_dir()}
    finally:
        run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=60)[0]
    assert len(processes) >= 3, processes
    assert sum(map(len, addresses.values())) >= 2, f"gloo listens: {addresses}"
    assert all(is_loopback(address) for found in addresses.values() for address in found), addresses
    (name,) = [name for name in modes if name.startswith("fsharding-")]
    assert modes[name] == 0o700
    assert not any(path.name.startswith(("fsharding-", "torchelastic_")) for path in temporary.iterdir()), said


def own_addresses():
    dist.all_reduce(torch.ones(1))
    return listening(os.getpid())


def test_ranks_of_a_pool_listen_on_loopback_alone():
    with RankPool(2) as pool:
        found = pool.run(own_addresses)
        assert Path(pool._folder).stat().st_mode & 0o777 == 0o700
    assert all(found) and all(is_loopback(address) for addresses in found for address in addresses), found


def by_hand(rank, folder):
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "FSHARDING_INIT_METHOD": (folder / "meet").as_uri()}
    env = {name: value for name, value in env.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    text = "import fsharding as fs; print(fs.make_mesh(dp=2, device='cpu').get_rank())"
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env=env)


@full
def test_processes_started_by_hand_meet_in_a_file(tmp_path):
    runs = [by_hand(rank, tmp_path) for rank in range(2)]
    assert [run.communicate(timeout=90)[0].strip() for run in runs] == ["0", "1"]


def asked(*options, **env):
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PYTHONWARNINGS")
    env = {name: value for name, value in os.environ.items() if name not in unwanted} | env
    command = [sys.executable, "-W", "error", "-m", "fsharding", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


def test_doctor_says_how_ranks_talk_and_that_nobody_else_reaches_them():
    done = asked("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fsharding doctor: starts two ranks" in done.stderr
    answer = json.loads(done.stdout)
    found = {row["name"]: row for row in answer["findings"]}
    assert answer["healthy"] and not any(row["grave"] for row in answer["findings"])
    assert {"python", "torch", "optree", "fsharding", "cores", "memory", "devices", "backends", "open files"} <= {
        *found
    }
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    assert (
        found["torch"]["value"] == f"{torch.__version__}, {build} build" and found["two local ranks"]["value"] == "run"
    )
    sockets = {name: row["value"] for name, row in found.items() if name.startswith("listening on ")}
    assert any(value.startswith("rank 1") for value in sockets.values())
    assert all(value.endswith("for this machine only") for value in sockets.values()), sockets


def outer_interface():
    """One that is up, with an address that is not loopback's; None on a machine without network."""
    table = Path("/proc/net/fib_trie").read_text() if Path("/proc/net/fib_trie").exists() else ""
    routes = [row.split() for row in Path("/proc/net/route").read_text().splitlines()[1:]]
    return next((row[0] for row in routes), None) if "host LOCAL" in table else None


@pytest.mark.skipif(outer_interface() is None, reason="needs an interface that other machines reach")
def test_doctor_names_what_is_reachable_from_outside_and_fails():
    done = asked(GLOO_SOCKET_IFNAME=outer_interface(), FSHARDING_SHARED_MEMORY="0", MASTER_ADDR="no.such.host.invalid")
    assert done.returncode == 1, done.stdout + done.stderr
    rows = [row for row in done.stdout.splitlines() if row.startswith("listening on ")]
    outside = [row for row in rows if "reachable from outside" in row]
    assert outside and "127.0.0.1" not in "".join(outside)
    assert all(f"Unset GLOO_SOCKET_IFNAME={outer_interface()}, or isolate the network." in row for row in outside)
    (transport,) = [row for row in done.stdout.splitlines() if row.startswith("transport ")]
    assert "FSHARDING_SHARED_MEMORY=0" in transport and transport.rstrip().endswith("unset FSHARDING_SHARED_MEMORY")
    (master,) = [row for row in done.stdout.splitlines() if row.startswith("MASTER_ADDR ")]
    assert "Not found: " in master and "Set it to the address of rank 0." in master
