"""Ranks that are alone: a start without its peers, and `full_tensor` on one rank, say for whom they wait, and end in time."""

import os
import re
import socket
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import sys, warnings
    warnings.simplefilter("error")
    from datetime import timedelta
    import fsharding as fs
    from fsharding.base.errors import FshardingError
    from fsharding.mesh import rendezvous
    if __name__ == "__main__":
        rendezvous._REMIND_S = float(sys.argv[2])
        try:
            mesh = fs.make_mesh(dp=-1, device="cpu", timeout=timedelta(seconds=float(sys.argv[1])))
            print("made", mesh.size())
        except FshardingError as error:
            print(type(error).__name__, error)
"""


def free_port():
    with socket.socket() as it:
        it.bind(("localhost", 0))
        return it.getsockname()[1]


def start(timeout, remind=1.0, **env):
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "FSHARDING_INIT_METHOD")
    env = {**{name: value for name, value in os.environ.items() if name not in unwanted}, **env}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(timeout), str(remind)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def ended(process):
    out, err = process.communicate(timeout=100)
    return out.strip(), err


def variables(rank, size, port):
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


MEND = "Call it on every rank, and look at the logs of the others. For one process, unset RANK and WORLD_SIZE."


@pytest.mark.parametrize("where", ["port", "file"])
def test_a_rank_without_its_peer_says_so_and_ends(where, tmp_path):
    env, place = variables(0, 2, port := free_port()), f"localhost:{port}"
    if where == "file":
        place = (tmp_path / "meet").as_uri()
        env = {"RANK": "0", "WORLD_SIZE": "2", "FSHARDING_INIT_METHOD": place}
    text, err = ended(start(4, **env))
    assert text == (
        f"RankError fs.make_mesh on rank 0 has not met all of 2 ranks at {place}.\n  rank 1: no call after 4 s\n{MEND}"
    )
    assert err == (
        f"fs.make_mesh on rank 0 is waiting for 1 of 2 ranks at {place}: rank 1.\n"
        "Call it on every rank. For one process, unset RANK and WORLD_SIZE.\n"
    )


RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1"}


@pytest.mark.parametrize("launcher", [{}, RESTARTED], ids=["first start", "started again"])
def test_a_rank_whose_store_nobody_serves_says_so_and_ends(launcher):
    """Such as the ranks of a torchrun that was killed while it started them again."""
    port = free_port()
    text, err = ended(start(4, **variables(1, 2, port), **launcher))
    head, row, mend = text.split("\n")
    assert (head, mend) == (f"RankError fs.make_mesh on rank 1 has not met all of 2 ranks at localhost:{port}.", MEND)
    assert "timed out" in row
    assert f"fs.make_mesh on rank 1 is waiting for 1 of 2 ranks at localhost:{port}: rank 0.\n" in err


def test_ranks_that_are_late_are_waited_for():
    port = free_port()
    first = start(40, **variables(0, 3, port))
    second = start(40, **variables(1, 3, port))
    line = first.stderr.readline()
    assert re.fullmatch(
        rf"fs.make_mesh on rank 0 is waiting for [12] of 3 ranks at localhost:{port}: ranks? .*2\.\n", line
    )
    third = start(40, remind=100, **variables(2, 3, port))
    assert [ended(run)[0] for run in (first, second, third)] == ["made 3"] * 3


def test_half_of_a_launcher_is_refused():
    text, _ = ended(start(4, WORLD_SIZE="2"))
    assert text == (
        "ConfigError fs.make_mesh finds WORLD_SIZE=2, but RANK is not set.\n"
        "Start the program with torchrun, or unset WORLD_SIZE for one process."
    )
    text, _ = ended(start(4, WORLD_SIZE="2", RANK="0", MASTER_ADDR="localhost"))
    assert text == (
        "ConfigError fs.make_mesh finds RANK, but not all variables of a launcher.\n  MASTER_PORT is not set\n"
        "Start the program with torchrun, or unset RANK for one process."
    )


FULL_TENSOR = """
    import os, sys
    from datetime import timedelta
    import torch
    import fsharding as fs
    from fsharding.base.errors import RankError
    if __name__ == "__main__":
        fs.make_mesh(dp=2, device="cpu", timeout=timedelta(seconds=60))  # they start at different times
        mesh = fs.make_mesh(dp=2, device="cpu", timeout=timedelta(seconds=5))
        layout = fs.plan_layout({"w": torch.zeros(8, 4)}, mesh, names={"w": ("embed", None)}, strategy=fs.zero(3))
        w = fs.shard({"w": torch.ones(8, 4)}, layout)["w"]
        if sys.argv[1] == "warm":
            assert w.full_tensor().tolist() == [[1.0] * 4] * 8
        if mesh.get_rank() == 1:
            sys.stdin.readline()  # until rank 0 has ended
            os._exit(0)
        try:
            w.full_tensor()
        except RankError as error:
            print(error.ranks, error, sep="\\n")
        sys.stdout.flush()
        os._exit(0)
"""


@pytest.mark.parametrize("state", ["cold", "warm"])
def test_full_tensor_on_one_rank_alone_ends_within_the_timeout_of_the_mesh(state):
    port = free_port()
    env = {name: value for name, value in os.environ.items() if name != "FSHARDING_INIT_METHOD"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(FULL_TENSOR), state],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**env, **variables(rank, 2, port)},
        )
        for rank in range(2)
    ]  # fmt: skip
    found, *_ = [run.communicate(timeout=100)[0] for run in ranks]  # of rank 1 it closes the input
    lost, head, *_ = found.strip().split("\n")
    # Rank 1 sleeps. Whether it answers in time where it is depends on the load of the machine.
    answered, silent = "is called on rank 0 (dp=0) alone.", "lost rank 1 (dp=1)."
    assert lost == "(1,)" and head in (f"DTensor.full_tensor {answered}", f"DTensor.full_tensor {silent}"), found
    if head.endswith(answered):
        assert "\n  rank 0 (dp=0): DTensor.full_tensor at " in found
        assert "\n  rank 1 (dp=1): in no collective, at " in found
        assert "\nEvery rank has to call DTensor.full_tensor" in found
