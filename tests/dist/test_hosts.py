"""Two hosts: what ranks of several machines do is what ranks of one do, bit for bit, and nothing of a host stays behind.

The hosts are namespaces of this machine; where they cannot be made these tests are skipped with the reason.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import fsharding as fs
from bench.hosts import arguments_of, on_two_hosts
from bench.options import StepConfig
from fsharding.base.errors import ConfigError, RankError
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests import on_hosts
from tests.helpers import full, refusal, until
from tests.two_hosts import HostPair

ROOT = Path(__file__).resolve().parents[2]
REASON = HostPair.unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"two hosts cannot be made here: {REASON}")
AGAIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
MACHINES, MACHINE = (
    "pairwise (its ranks are on several machines)",
    "shared_memory (its ranks are processes of one machine)",
)


CLIENT = """
import socket, time
for attempt in range(1500):
    try:
        socket.create_connection(("host0", 5000), 15).sendall(socket.gethostname().encode())
        break
    except ConnectionRefusedError:
        assert attempt < 1499
        time.sleep(0.01)
"""


def running(mark):
    """Whether any process of this machine has a word in its command line."""
    return any(mark in read(path / "cmdline") for path in Path("/proc").iterdir() if path.name.isdigit())


def read(file):
    try:
        return file.read_text(errors="replace")
    except OSError:  # it has ended
        return ""


def traces():
    """What hosts could leave: network interfaces, and folders of temporary files."""
    folders = Path(tempfile.gettempdir()).glob("fsharding-hosts-*")
    return sorted(map(str, [*Path("/sys/class/net").iterdir(), *folders]))


# ---------------------------------------------------------------------------------------------------------- the hosts
def test_a_host_sees_its_own_processes_memory_and_files_and_the_other_by_address(tmp_path):
    text = (
        "cat /proc/sys/kernel/hostname; ls /proc | grep -c '^[0-9]'; ls -A /tmp /dev/shm; cat /sys/class/net/eth0/mtu; "
        f"touch /tmp/own /dev/shm/own; readlink /proc/self/ns/ipc; pwd; touch {tmp_path}/$(cat /proc/sys/kernel/hostname)"
    )
    with HostPair(shared=[tmp_path], mtu=9000) as pair:
        first, second = pair.run(["sh", "-c", text], timeout=20)
        assert (pair[0].root / "tmp" / "own").exists() and not Path("/tmp/own").exists()
        server = "import socket; s = socket.create_server(('', 5000)); print(s.accept()[0].recv(99))"
        listens = pair[0].popen([sys.executable, "-S", "-c", server], stdout=subprocess.PIPE, text=True)
        assert pair[1].popen([sys.executable, "-S", "-c", CLIENT]).wait(20) == 0
        assert listens.communicate(timeout=20)[0] == "b'host1'\n"
    a, b = first.stdout.split("\n"), second.stdout.split("\n")
    assert (a[0], b[0], first.stderr, second.stderr) == ("host0", "host1", "", "")
    assert int(a[1]) < 8, "its own processes alone"
    # The checkout and its Python are shared too, which matters where they are below /tmp.
    places = [Path(x).resolve().parts for x in (tmp_path, sys.prefix, sys.base_prefix, fs.__path__[0], os.getcwd())]
    shared = ["/dev/shm:", "", "/tmp:", *sorted({parts[2] for parts in places if parts[1] == "tmp"})]
    end = 2 + len(shared)
    assert a[2:end] == b[2:end] == shared, "nothing in them but what is shared"
    assert a[end + 1] != b[end + 1] and a[end + 1] != os.readlink("/proc/self/ns/ipc")
    assert a[end + 2] == os.getcwd()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host0", "host1"]


def test_statuses_and_what_was_written_come_from_each_host():
    with HostPair() as pair:
        runs = pair.run(["sh", "-c", 'echo "$X"; echo no >&2; exit $((4 + $(hostname | grep -c 1)))'], env={"X": "y"})
        assert [(run.returncode, run.stdout, run.stderr) for run in runs] == [(4, "y\n", "no\n"), (5, "y\n", "no\n")]
        pair[1].kill()
        assert (pair[0].alive, pair[1].alive) == (True, False)
        assert refusal(pair[1].popen, ["true"]) == (
            "Host.popen cannot start true on host1, which does not run.\nCall its start() first."
        )
        pair[1].start()
        assert [run.returncode for run in pair.run(["true"], timeout=20)] == [0, 0]
    assert not pair[0].alive


@pytest.mark.parametrize("how", ["end", "exception", "interrupt", "timeout"])
def test_nothing_is_left_behind(how):
    before, mark = traces(), f"98765.{os.getpid()}"
    error = {"exception": ZeroDivisionError, "interrupt": KeyboardInterrupt}.get(how)

    def work():
        with HostPair() as pair:
            orphan = f"(setsid sleep {mark} &) ; echo there"
            assert [run.stdout for run in pair.run(["sh", "-c", orphan], timeout=20)] == ["there\n"] * 2
            assert running(mark)
            if how == "timeout":
                text = refusal(pair.run, ["sh", "-c", f"echo begun; sleep {mark}"], timeout=2, kind=RankError)
                # A killed process is there until its parent has waited for it.
                assert until(lambda: not running(mark)), "and the hosts are as new"
                assert text == (
                    "HostPair.run has killed sh, which had not ended after 2 s.\n"
                    "  host0: begun\n  host1: begun\nGive it more seconds with timeout=."
                )
                assert [run.returncode for run in pair.run(["true"], timeout=20)] == [0, 0]
            if error is not None:
                pair[0].popen(["sleep", mark])
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(error):
            work()
    assert until(lambda: not running(mark))
    assert traces() == before


def test_nothing_is_left_of_a_program_that_is_killed():
    before, mark = traces(), f"98764.{os.getpid()}"
    text = f"""
from tests.two_hosts import HostPair
with HostPair() as pair:
    pair[1].popen(["sleep", "{mark}"])
    print("there", flush=True)
    pair[0].popen(["sleep", "{mark}"]).wait()
"""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd=ROOT) as program:
        assert program.stdout.readline() == "there\n"
        assert until(lambda: running(mark))
        program.kill()
    assert until(lambda: not running(mark))
    assert traces() == before


def test_what_cannot_be_made_is_refused(monkeypatch, tmp_path):
    assert refusal(HostPair, shared=[tmp_path / "absent"], kind=ConfigError) == (
        f"HostPair got a shared= directory that is not there.\n  {tmp_path}/absent\nMake it."
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert refusal(HostPair, kind=ConfigError) == (
        "HostPair cannot make two hosts.\n  only root may make namespaces that are joined\n"
        "Two hosts need Linux, root (in a container, --privileged), and the tools of util-linux and iproute2."
    )


# --------------------------------------------------------------------------------------- one start of torchrun, many laws
@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("laws")
    with HostPair(shared=[folder]) as pair:
        line = pair.torchrun(["-m", "tests.on_hosts", "laws", str(folder)], ranks=2)
        runs = pair.run(line, timeout=110)
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.mark.timeout(180)
def test_losses_and_parameters_are_those_of_one_host(answers):
    _, ranks = answers
    assert [rank["host"] for rank in ranks] == ["host0", "host0", "host1", "host1"]
    for one_host, rank in zip(run_ranks(on_hosts.trained, 4), ranks, strict=True):
        assert [*one_host] == [*rank["trained"]] == ["zero3", "zero1", "hsdp", "tp"]
        assert_bitwise_equal(rank["trained"], one_host)


def test_memory_is_shared_inside_of_a_host_only_and_the_mesh_says_so(answers):
    for rank in answers[1]:
        assert rank["choices"] == {
            ("zero3", "dp"): MACHINES, ("zero1", "dp"): MACHINES, ("hsdp", "replica"): MACHINES,
            ("hsdp", "dp"): MACHINE, ("tp", "dp"): MACHINES, ("tp", "tp"): MACHINE,
        }  # fmt: skip
        assert f"replica by {MACHINES}; dp by {MACHINE}" in rank["meshes"]["hsdp"]


def test_checkpoints_in_a_shared_directory_go_on_bitwise_on_the_same_hosts_and_on_one(answers):
    folder, ranks = answers
    wanted = run_ranks(on_hosts.reference, 4)[0]
    for rank in ranks:
        assert {**rank["saved"], **rank["loaded"]} == wanted
    assert run_ranks(on_hosts.goes_on, 2, folder)[0].keys() == ranks[0]["loaded"].keys()
    assert run_ranks(on_hosts.goes_on, 4, folder) == [rank["loaded"] for rank in ranks]


def test_a_save_into_separate_directories_is_one_error_that_leaves_nothing(answers):
    for rank in answers[1]:
        text = rank["separate"]
        assert text == (
            "CheckpointError: fs.checkpoint.save failed on 2 of 4 ranks.\n"
            "  ranks 2, 3: fs.checkpoint.save needs a directory that all ranks share; /tmp/run isn't shared.\n"
            "      /tmp/run/.step-3.partial: not there on host1\n"
            "    Pass a path on a file system that every host has mounted at the same place."
        )
        assert rank["left"] == []


def test_a_load_needs_the_checkpoint_on_every_host_and_no_shared_directory(answers):
    for rank in answers[1]:
        assert rank["one_has_it"].startswith(
            "CheckpointError: fs.checkpoint.load failed on 2 of 4 ranks.\n"
            "  ranks 2, 3: fs.checkpoint.load finds no checkpoint at /tmp/run/copy: there is no such directory.\n"
        )
        assert rank["copies"] == rank["loaded"]


# ------------------------------------------------------------------------------------------------------ losses of hosts
def errors(folder):
    return {rank: json.loads(file.read_text()) for rank in range(4) if (file := folder / f"error-{rank}.json").exists()}


def started(pair, folder, how):
    line = pair.torchrun(["-m", "tests.on_hosts", "lost", str(folder)], ranks=2, options=["--max-restarts", "1"])

    def start(host):
        env = {**AGAIN, "STOPS": how, "TIMEOUT_S": "20" if how == "killed" else "5"}
        with (folder / f"{host.name}.log").open("a") as log:
            return host.popen(line, env=env, stdout=log, stderr=log)

    return start


def assert_both_end_well(runs, folder, seconds):
    """That both hosts end within so long, with status 0; else, what they wrote last."""
    ended = until(lambda: all(run.poll() is not None for run in runs), seconds)
    logs = [f"{name}:\n{(folder / name).read_text()[-3000:]}" for name in ("host0.log", "host1.log")]
    assert ended and [run.returncode for run in runs] == [0, 0], "\n".join(logs)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", [pytest.param("host", marks=full), pytest.param("killed", marks=full)])
def test_a_lost_host_is_named_and_its_successor_goes_on(tmp_path, how):
    with HostPair(shared=[tmp_path]) as pair:
        start = started(pair, tmp_path, how)
        runs = [start(host) for host in pair]
        assert until(lambda: all((tmp_path / f"stopped-{rank}").exists() for rank in (2, 3)))
        if how == "host":
            pair[1].kill()
            # torchrun ends the ranks of the other host as soon as a successor is there.
            assert until(lambda: {*errors(tmp_path)} == {0, 1}), (tmp_path / "host0.log").read_text()[-3000:]
            pair[1].start()
            runs[1] = start(pair[1])
        assert_both_end_well(runs, tmp_path, 150)
    found = errors(tmp_path)
    if how == "host":
        for error in found.values():
            assert {*error["ranks"]} <= {2, 3}, error["text"]
            assert error["text"].startswith("train step lost rank")
    losses = [
        [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(4)]
        for name in ("first", "second")
    ]
    wanted = {str(step): loss for step, loss in run_ranks(on_hosts.reference, 4)[0].items()}
    for first, second in zip(*losses, strict=True):
        assert {**first, **second} == wanted


@full
@pytest.mark.timeout(180)
def test_a_cable_that_is_pulled_ends_both_hosts_within_the_timeout(tmp_path):
    with HostPair(shared=[tmp_path]) as pair:
        start = started(pair, tmp_path, "host")
        runs = [start(host) for host in pair]
        assert until(lambda: all((tmp_path / f"stopped-{rank}").exists() for rank in (2, 3)))
        pair[1].unplug()
        assert until(lambda: {0, 1} <= {*errors(tmp_path)}), (tmp_path / "host1.log").read_text()
        assert all(run.poll() is None or run.returncode for run in runs)
    for rank in (0, 1):
        assert {*errors(tmp_path)[rank]["ranks"]} <= {2, 3}


# ---------------------------------------------------------------------------------------------------- Slurm and benches
def slurm_script():
    """The script of the examples, with the sizes of this machine and a small model."""
    script = (ROOT / "examples" / "launch" / "slurm.sh").read_text()
    for large, small in {
        "--nnodes 4": "--nnodes 2", "--nproc-per-node 8": "--nproc-per-node 1", "llama3_8b": "tiny", "eth1": "eth0",
        "replica=4": "replica=2", "--steps 100000": "--steps 3 --batch 2 --seq 32 --dtype float32", "/shared/run7": "$SHARED/run7",
    }.items():  # fmt: skip
        assert large in script, large
        script = script.replace(large, small)
    return script


@full
@pytest.mark.timeout(180)
def test_the_slurm_script_of_the_page_stops_before_its_end_and_goes_on_in_the_next_job(tmp_path):
    """Slurm's own commands are stood in for: `srun` starts on each host what the script starts on all."""
    for name, text in {"srun": 'exec "$@"', "scontrol": 'test "$3" = "host[0-1]" && printf "host0\\nhost1\\n"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "run7.sh").write_text(slurm_script())
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    steps = []
    for job, seconds in (("17", 60), ("18", 3600)):
        slurm = {
            "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "host[0-1]", "SLURM_NNODES": "2", "SLURM_NTASKS": "2",
            "SLURM_JOB_END_TIME": str(int(time.time()) + seconds),  # no assert: what Slurm tells
            "SHARED": str(tmp_path), "PATH": path,
        }  # fmt: skip
        with HostPair(shared=[tmp_path]) as pair:
            runs = pair.run(["bash", str(tmp_path / "run7.sh")], env=slurm, timeout=80)
        assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
        lines = (tmp_path / "run7" / "metrics.jsonl").read_text().splitlines()
        steps.append([json.loads(line)["step"] for line in lines])
    assert steps[-1][-1] == 3 and len(steps[-1]) == 3, steps


@full
@pytest.mark.timeout(180)
def test_a_step_is_measured_on_two_hosts(capfd):
    config = StepConfig(hosts=2, preset="tiny", batch=1, seq_len=16, rounds=1, contenders=("ddp", "fsharding-zero3"))
    assert on_two_hosts(config) == 0
    table = capfd.readouterr().out
    assert "2 ranks on 2 hosts (pairwise)" in table and "fsharding-zero3" in table


def test_the_ranks_of_a_measurement_get_the_options_that_were_given(tmp_path):
    config = StepConfig(hosts=2, contenders=("ddp",), compiled=True, plot=tmp_path / "bars.png", seq_len=16)
    assert arguments_of(config) == [
        "--hosts", "2", "--contenders", "ddp", "--compiled", "--seq-len", "16", "--plot", str(tmp_path / "bars.png"),
    ]  # fmt: skip
    assert refusal(on_two_hosts, StepConfig(hosts=2, ranks=3)) == (
        "cannot put 3 ranks on 2 hosts.\nGive an even number: --ranks 4 --hosts 2."
    )
