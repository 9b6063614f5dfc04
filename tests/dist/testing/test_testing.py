"""The rank pool: results in rank order, one pool for many calls, and no call that hangs or spoils the next."""

import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsharding.base.errors import ConfigError, RankError
from fsharding.testing import RankFailure, RankPool, assert_bitwise_equal, assert_trees_close, run_ranks
from fsharding.testing.ranks import _Worker
from tests.helpers import full, until

ROOT = pathlib.Path(__file__).resolve().parents[3]


def rank_and_arguments(*args, **kwargs):
    return dist.get_rank(), args, kwargs


def pid():
    return os.getpid()


def imported_by_itself():
    """Modules that are not from the fork server: what a process needs to be one comes first of all."""
    names = [*sys.modules]
    own = names[names.index("multiprocessing.popen_fork") :]
    return [name for name in own if name.split(".")[0] in ("torch", "fsharding")]


def environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCH_GLOO_LAZY_INIT")
    return {name: os.environ[name] for name in names} | {"threads": torch.get_num_threads()}


def summed(tensor):
    total = tensor * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total


def summed_in_subgroup(ranks):
    group = dist.new_group(ranks)
    total = torch.tensor([float(dist.get_rank())])
    if dist.get_rank() in ranks:
        dist.all_reduce(total, group=group)
    return total.item()


def random_numbers():
    return torch.rand(3), torch.get_default_dtype()


def echo(tensor):
    return tensor


def boom(rank, text):
    if dist.get_rank() == rank:
        raise ValueError(text)
    return dist.get_rank()


def boom_before_collective(rank):
    if dist.get_rank() == rank:
        raise ValueError("no")
    return summed(torch.ones(2))


def boom_everywhere(text):
    raise ZeroDivisionError(text)


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def boom_unpicklable():
    raise Unpicklable(1, 2)


def hang(rank):
    while dist.get_rank() == rank:
        time.sleep(0.01)


def die(rank, how):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(3)
    dist.barrier()


def leave_with_system_exit():
    sys.exit(4)


def unpicklable_result():
    return lambda: None


def warn():
    warnings.warn("careful", UserWarning, stacklevel=1)
    return "warned"


def compare_dtensors():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    cut, same = (distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]) for _ in range(2))
    assert_bitwise_equal({"w": cut}, {"w": same})
    assert_trees_close({"w": cut}, {"w": same})
    with pytest.raises(AssertionError) as caught:
        assert_bitwise_equal({"w": cut}, {"w": cut.redistribute(placements=[Replicate()])})
    return str(caught.value)


def failure(fn, n, *args, **kwargs):
    with pytest.raises(RankError) as caught:
        run_ranks(fn, n, *args, **kwargs)
    assert isinstance(caught.value, RankFailure)
    return caught.value


def test_ranks_have_torch_and_the_library_from_the_fork_server():
    """Each rank would take half a second for them."""
    with RankPool(2) as pool:
        assert pool.run(imported_by_itself) == [[], []]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_results_come_in_rank_order(n):
    assert run_ranks(rank_and_arguments, n, 3, x="a") == [(rank, (3,), {"x": "a"}) for rank in range(n)]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_collectives_cross_ranks(n):
    for total in run_ranks(summed, n, torch.arange(3.0)):
        assert torch.equal(total, torch.arange(3.0) * (n * (n + 1) / 2))


def test_subgroups():
    assert run_ranks(summed_in_subgroup, 4, [1, 3]) == [0.0, 4.0, 2.0, 4.0]


def test_dtensors_are_compared_with_their_placements():
    for text in run_ranks(compare_dtensors, 2):
        assert "\n  w is float32[5] with (Shard(dim=0),) on DeviceMesh(" in text
        assert " against float32[5] with (Replicate(),) on DeviceMesh(" in text


def test_environment_of_a_rank():
    for rank, env in enumerate(run_ranks(environment, 2)):
        assert env == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "TORCH_GLOO_LAZY_INIT": "1",
            "threads": 1,
        }


def test_the_pool_is_kept():
    pids = run_ranks(pid, 2)
    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    run_ranks(pid, 3)
    assert run_ranks(pid, 2) == pids


def many_groups():
    for _ in range(30):
        dist.new_group([0, 1])
    return os.getpid()


def test_a_pool_that_is_full_of_process_groups_is_renewed():
    pids = run_ranks(many_groups, 2)
    assert not set(run_ranks(pid, 2)) & set(pids)


def test_an_example_does_not_depend_on_the_ones_before_it():
    results = [*run_ranks(random_numbers, 2), *run_ranks(random_numbers, 2)]
    assert all(torch.equal(numbers, results[0][0]) for numbers, _ in results)
    assert all(not torch.equal(numbers, results[0][0]) for numbers, _ in run_ranks(random_numbers, 2, seed=1))


@given(st.lists(st.floats(width=32), min_size=0, max_size=5), st.sampled_from([torch.float32, torch.bfloat16]))
def test_tensors_cross_the_pipe_bit_by_bit(values, dtype):
    tensor = torch.tensor(values, dtype=torch.float32).to(dtype)
    for back in run_ranks(echo, 2, tensor):
        assert back.dtype == dtype
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_a_large_tensor_crosses_and_needs_no_shared_memory():
    tensor = torch.arange(1 << 20)
    backs = run_ranks(echo, 2, tensor)
    assert all(torch.equal(back, tensor) and not back.is_shared() for back in backs)


def test_warnings_are_what_they_are_for_the_caller():
    assert "UserWarning: careful" in str(failure(warn, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(warn, 2) == ["warned", "warned"]


def test_an_exception_names_the_rank_and_the_example():
    pids = run_ranks(pid, 4)
    error = failure(boom, 4, 2, text="one\ntwo")
    text = str(error)
    name = f"{boom.__module__}.boom"
    head = (
        f"fs.run_ranks could not finish {name} on 4 ranks.\n"
        "  rank 2 raised ValueError: one\n"
        "    two\n"
        "To repeat it: run_ranks(boom, 4, 2, text='one\\ntwo', seed=0)\n\n"
        "Rank 2:\nTraceback (most recent call last):\n"
    )
    assert text.startswith(head)
    assert text.endswith("ValueError: one\ntwo")
    assert text.count("File ") == 1, "only frames of the example"
    assert list(error.errors) == [2]
    assert error.errors[2].endswith("ValueError: one\ntwo\n")
    assert isinstance(error.exceptions[2], ValueError)
    assert error.__cause__ is error.exceptions[2]
    assert not set(run_ranks(pid, 4)) & set(pids)


def test_peers_that_wait_in_a_collective_are_not_waited_for():
    run_ranks(pid, 3)
    error = failure(boom_before_collective, 3, 1)
    assert "\n  rank 1 raised ValueError: no\n" in str(error)
    assert "\n  ranks 0, 2 had not answered 1 s after rank 1 failed\n" in str(error)
    assert list(error.errors) == [1, 0, 2]
    assert error.exceptions[0] is None
    assert run_ranks(summed, 3, torch.ones(1)) == [torch.tensor([6.0])] * 3


def test_ranks_that_fail_alike_share_a_row():
    error = failure(boom_everywhere, 3, "x" * 3000, seed=7)
    text = str(error)
    assert f"\n  ranks 0, 1, 2 raised ZeroDivisionError: {'x' * 300}" in text and " (3,040 characters)\n" in text
    assert text.count("Traceback") == 1
    example = "boom_everywhere, 3, '" + "x" * 3000
    assert f"To repeat it: run_ranks({example[:2000]} ..., seed=7)\n" in text
    assert sorted(error.errors) == [0, 1, 2]
    assert all(isinstance(exception, ZeroDivisionError) for exception in error.exceptions.values())


def test_an_exception_that_cannot_be_pickled():
    error = failure(boom_unpicklable, 2)
    assert "\n  ranks 0, 1 raised Unpicklable: 1 and 2\n" in str(error)
    assert error.exceptions == {0: None, 1: None}


def test_system_exit_is_an_answer():
    assert "\n  ranks 0, 1 raised SystemExit: 4\n" in str(failure(leave_with_system_exit, 2))


def test_a_result_that_cannot_be_pickled():
    assert "ranks 0, 1 raised AttributeError: Can't" in str(failure(unpicklable_result, 2))


def test_a_hang_ends_at_the_timeout_and_says_where():
    pids = run_ranks(pid, 2)
    error = failure(hang, 2, 1, timeout=0.5)
    text = str(error)
    assert text.startswith(
        f"fs.run_ranks could not finish {hang.__module__}.hang on 2 ranks.\n"
        "  rank 1 had not answered after 0.5 s\n"
        "Pass a larger timeout=, or see below where each rank was.\n"
        "To repeat it: run_ranks(hang, 2, 1, seed=0)\n\n"
        "Rank 1:\n"
    )
    assert "in hang\n" in text
    assert list(error.errors) == [1]
    wait_until_gone(pids)
    assert run_ranks(rank_and_arguments, 2) == [(0, (), {}), (1, (), {})]


@pytest.mark.parametrize(("how", "said"), [("kill", "died of SIGKILL"), ("exit", "exited with status 3")])
def test_a_dead_rank_is_noticed_at_once(how, said):
    run_ranks(pid, 3)
    error = failure(die, 3, 1, how)
    assert str(error).split("\n")[1] == f"  rank 1 {said}"
    assert next(iter(error.errors.items())) == (1, said)
    assert run_ranks(summed, 3, torch.ones(1)) == [torch.tensor([6.0])] * 3


def test_a_rank_that_died_between_calls_is_replaced():
    pids = run_ranks(pid, 2)
    os.kill(pids[0], signal.SIGKILL)
    wait_until_gone(pids[:1])
    assert set(run_ranks(pid, 2)).isdisjoint(pids)


def wait_until_gone(pids):
    assert until(lambda: not any(pathlib.Path(f"/proc/{one}").exists() for one in pids))


def test_what_cannot_be_sent_is_refused_before_the_ranks_see_it():
    # A lock, and not a lambda: where workers of pytest-xdist run the tests, nothing can import their `__main__`, so that
    # a lambda is sent by value.
    pids, unsendable = run_ranks(pid, 2), threading.Lock()
    with pytest.raises(RankError) as caught:
        run_ranks(pid, 2, unsendable)
    with pytest.raises(TypeError) as of_python:
        pickle.dumps(unsendable)
    first, second, third = str(caught.value).split("\n")
    assert first.startswith("fs.run_ranks cannot send ")
    assert first.endswith("pid and its arguments to the ranks.")
    assert second == f"  {of_python.type.__name__}: {of_python.value}", "in the words of this Python"
    assert (
        third == "Define the function at the top level of a module, and pass tensors, numbers and containers of them."
    )
    assert run_ranks(pid, 2) == pids


def test_fewer_than_one_rank():
    with pytest.raises(RankError) as caught:
        run_ranks(pid, 0)
    assert str(caught.value) == "fs.testing.RankPool cannot start 0 ranks.\nPass a size of 1 or more."


def test_a_pool_of_ones_own():
    with RankPool(2, timeout=0.5) as pool:
        pids = pool.run(pid)
        assert pool.pids == pids
        assert pool.alive
        assert pool.run(rank_and_arguments, timeout=30.0)[1] == (1, (), {})
    assert not pool.alive
    assert pool.pids == []
    pool.close()
    with pytest.raises(RankError) as caught:
        pool.run(pid)
    assert str(caught.value) == "fs.testing.RankPool.run got a pool that has ended.\nMake a new fs.testing.RankPool."
    with RankPool(2, timeout=0.5) as pool, pytest.raises(RankError, match=r"rank 0 had not answered after 0\.5 s"):
        pool.run(hang, 0)


def script(tmp_path, text, **kwargs):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=60, env=env, **kwargs
    )


@full
def test_a_script_can_send_its_own_functions(tmp_path):
    done = script(
        tmp_path,
        """
        import torch.distributed as dist
        from fsharding.testing import run_ranks

        def double(x):
            return x * 2 + dist.get_rank()

        if __name__ == "__main__":
            print(run_ranks(double, 2, 4))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[8, 9]\n"
    assert done.stderr == ""


def test_a_script_without_a_guard_is_told_so(tmp_path):
    done = script(
        tmp_path,
        """
        from fsharding.testing import run_ranks
        print(run_ranks(max, 2, 2, 3))
        """,
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1 and len(done.stderr.splitlines()) < 20
    assert done.stderr.endswith(
        "fs.run_ranks cannot start ranks: they import the script, which would start ranks again.\n"
        'Put the code of a script that calls run_ranks under `if __name__ == "__main__":`.\n'
    )


def test_a_function_below_the_guard_is_told_so(tmp_path):
    done = script(
        tmp_path,
        """
        from fsharding.testing import run_ranks

        if __name__ == "__main__":
            def double(x):
                return 2 * x

            run_ranks(double, 1, 4)
        """,
    )
    assert done.returncode == 1
    assert (
        "cannot find double on the ranks: they import the script, without the code under its `if __name__`.\n"
        "Define it above that line, at the top level of the file.\n"
    ) in done.stderr


CELLS = """
from functools import partial
import torch
import fsharding as fs
def rank(): return torch.distributed.get_rank()
factor = 3
def scaled(x): return factor * (x + rank())
assert fs.run_ranks(scaled, 2, torch.ones(2))[1].tolist() == [6, 6]
factor = 5  # a global name has the value of the moment of the call
assert fs.run_ranks(partial(scaled, 1), 2) == fs.run_ranks(lambda x: scaled(x), 2, 1) == [5, 10]
"""


def typed(code):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable], input=code, capture_output=True, text=True, timeout=60, env=env)


def tutorial():
    """The first blocks of "First steps", and the block for notebooks."""
    page = (ROOT / "docs" / "tutorials" / "first-steps.md").read_text(encoding="utf-8")
    blocks = page.partition("## Evaluate")[0].split("```python\n")[1:]
    return "\n\n".join(block.partition("```")[0] for block in [*blocks, page.split("```text\n")[1]])


@pytest.mark.parametrize("code", [CELLS, tutorial()], ids=["functions", "tutorial"])
def test_functions_typed_into_an_interpreter_are_sent_by_value(code):
    done = typed(code)
    assert done.returncode == 0, done.stderr


def test_without_cloudpickle_a_function_of_an_interpreter_names_the_extra(monkeypatch):
    def f():
        pass

    f.__module__, f.__qualname__ = "__main__", "f"
    monkeypatch.setattr("fsharding.testing.ranks._is_typed", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        run_ranks(f, 2)
    assert str(caught.value) == (
        "fs.run_ranks cannot send __main__.f to the ranks, which can't import a notebook or an interpreter.\n"
        "Install cloudpickle: pip install 'fsharding[notebook]'. Or define the function in a file and import it."
    )


@full
def test_ranks_end_with_their_caller(tmp_path):
    done = script(
        tmp_path,
        """
        import os, signal, time
        from fsharding.testing import run_ranks

        def linger():
            if os.environ["RANK"] == "0":
                time.sleep(600)

        if __name__ == "__main__":
            print(*run_ranks(os.getpid, 2), flush=True)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            run_ranks(linger, 2)
        """,
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(text) for text in done.stdout.split()]
    assert len(pids) == 2
    wait_until_gone(pids)
    assert not list(tmp_path.glob("fsharding-ranks-*"))


def test_a_rank_whose_end_is_not_known_yet_is_not_said_to_have_exited():
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    slow = SimpleNamespace(join=lambda timeout: None, exitcode=None)
    failure = _Worker(slow, ours).receive()
    assert failure.died and failure.what == "closed its pipe, and had not exited 10 s later"
