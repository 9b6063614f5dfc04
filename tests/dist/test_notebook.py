"""Ranks behind a notebook: laws of their calls from this process, then cells and the notebooks of the examples in a kernel."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
from jupyter_client import KernelManager
from nbclient import NotebookClient

import fsharding as fs
from fsharding.apps.notebook import CallFailure, Ranks
from fsharding.base.errors import ArgumentError, ConfigError
from tests.helpers import full, refusal, until


@pytest.fixture(scope="module")
def shared() -> Generator[Ranks]:
    with Ranks(2) as pool:
        yield pool


@pytest.fixture
def pool(shared: Ranks) -> Generator[Ranks]:
    yield shared
    shared.timeout = None


def rank() -> int:
    return dist.get_rank()


def running(pid: int) -> bool:
    """Whether a process runs; one that has ended and nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def failure_of(call: Callable[..., Any], *args: Any) -> CallFailure:
    with pytest.raises(CallFailure) as caught:
        call(*args)
    return caught.value


# ------------------------------------------------------------------------------------------------------------- results
def test_a_call_returns_what_rank_0_returns_and_all_what_each_does(pool: Ranks):
    factor = 3
    assert pool(lambda x, y=0: factor * (x + y + rank()), 1, y=1) == 6
    assert pool.all(lambda x: factor * (x + rank()), 1) == [3, 6]
    # A global name has the value of the moment of the call.
    factor = 5
    assert pool.all(lambda x: factor * (x + rank()), 1) == [5, 10]


def test_functions_on_ranks_call_each_other(pool: Ranks):
    @pool.on_ranks
    def total(x: torch.Tensor) -> torch.Tensor:
        """A sum."""
        dist.all_reduce(x)
        return x

    @pool.on_ranks
    def doubled(n: int) -> list[float]:
        return (2 * total(torch.full((n,), rank() + 1.0))).tolist()

    assert doubled(2) == [6, 6]
    assert doubled.all(1) == [[6], [6]]
    assert pool.all(total, torch.ones(1)) == [torch.full((1,), 2.0)] * 2
    assert total.__doc__ == "A sum."
    assert repr(doubled).endswith("doubled, 2 ranks)")


def test_generators_are_seeded_at_the_start_and_then_go_on(pool: Ranks):
    pool.restart()
    first, second = (pool.all(lambda: torch.rand(3)) for _ in range(2))
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], second[0])
    pool.restart()
    assert torch.equal(pool(lambda: torch.rand(3)), first[0])


# ---------------------------------------------------------------------------------------------------------------- text
def test_rank_0_prints_into_the_cell(pool: Ranks, capsys: pytest.CaptureFixture[str]):
    def speak() -> None:
        print(f"rank {rank()} says ä")
        print("and complains", file=sys.stderr)
        print("no line", end="")

    pool(speak)
    assert capsys.readouterr() == ("rank 0 says ä\nno line", "and complains\n")
    pool(lambda: print("x" * 300_000, flush=True))  # more than a pipe holds
    assert capsys.readouterr().out == "x" * 300_000 + "\n"


def test_text_is_in_the_cell_while_the_call_runs(pool: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Stream:
        def write(self, text: str) -> None:
            (tmp_path / "seen").write_text(text)

        def flush(self) -> None: ...

    def wait() -> bool:
        print("begun")
        return until((tmp_path / "seen").exists)

    monkeypatch.setattr(sys, "stdout", Stream())
    assert pool(wait)


def test_a_thread_that_never_stops_printing_keeps_no_call(pool: Ranks, capsys: pytest.CaptureFixture[str]):
    def start() -> None:
        def speak() -> None:
            while True:
                print("x" * 1000)

        threading.Thread(target=speak, daemon=True).start()

    pool.timeout = 20
    pool(start)
    assert pool.all(rank) == [0, 1]
    pool.restart()
    assert "x" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- objects
def init(key: fs.random.Key) -> dict[str, Any]:
    return {"w": fs.random.normal(key, (4, 1))}


def loss_fn(params: Any, batch: Any) -> tuple[torch.Tensor, int]:
    error = batch["x"] @ fs.gather_unit(params)["w"] - batch["y"]
    return error.square().sum(), error.numel()


def setup() -> Any:
    return fs.setup(init, loss_fn, fs.adamw(1e-2), fs.random.key(0))


def steps(run: Any, count: int) -> tuple[Any, list[float]]:
    (state, step), losses = run, []
    for _ in range(count):
        x = fs.random.normal(fs.random.fold_in(state.key, int(state.step)), (8, 4)).tensor()
        state, metrics = step(state, fs.local_batch({"x": x, "y": x.sum(1, keepdim=True)}, state.layout.mesh))
        losses.append(float(metrics.loss))
    return (state, step), losses


def in_one_call() -> list[float]:
    return steps(setup(), 6)[1]


def test_training_in_several_calls_is_that_of_one_call(pool: Ranks):
    run, losses = pool.keep(setup), []
    for count in (1, 2, 3):
        out = pool.keep(steps, run, count)
        run = pool.keep(lambda out: out[0], out)
        losses += pool(lambda out: out[1], out)
    assert losses == pool(in_one_call) == fs.run_ranks(in_one_call, 2)[0]


def test_a_reference_is_each_ranks_own_object(pool: Ranks):
    ref = pool.keep(lambda: {"rank": rank()})
    assert repr(ref) == "ObjectRef({'rank': 0})"
    assert pool.all(lambda x: x["rank"], ref) == [0, 1]
    assert pool.all(lambda: ref["rank"]) == [0, 1], "a name of the function is the object too"  # type: ignore[index]
    pool(lambda x: x.update(more=1), ref)
    assert pool.all(len, ref) == [2, 2]
    assert repr(pool.keep(lambda: [torch.ones(2, 3), 1])) == "ObjectRef(list of 1 tensors, 6 elements)"
    assert repr(pool.keep(lambda: torch.ones(2, 3))) == "ObjectRef(Tensor (2, 3))"
    assert refusal(getattr, ref, "rank", kind=AttributeError) == (
        "fs.notebook.ObjectRef has no 'rank': its object is on the ranks.\nRead it there: pool(lambda x: x.rank, ref)."
    )


def objects_there() -> int:
    return len(fs.notebook._objects)


def test_an_object_without_a_reference_is_released(pool: Ranks):
    gc.collect()
    before = pool.all(objects_there)
    ref = pool.keep(lambda: torch.ones(3))
    assert pool.all(objects_there) == [n + 1 for n in before]
    del ref
    assert pool.all(objects_there) == before


def test_a_reference_to_ranks_that_have_ended_is_refused(pool: Ranks):
    ref = pool.keep(lambda: 1)
    pool.restart()
    expected = (
        "fs.notebook.ObjectRef stands for an object of ranks that have ended, or of another pool.\n"
        "Make it again: ref = pool.keep(f, ...)."
    )
    assert refusal(pool, lambda x: x, ref, kind=ArgumentError) == expected
    assert repr(ref) == "ObjectRef(of ranks that have ended)"
    pool.execute("x = 1")
    new, name, pids = pool.keep(lambda: 1), pool["x"], pool.pids
    with Ranks(1) as other:
        other.keep(lambda: 2)
        other.execute("x = 2")
        for foreign in (new, name):
            assert expected in str(failure_of(other, lambda x: x, foreign))
    assert pool.all(lambda a, b: (a, b), new, name) == [(1, 1)] * 2
    assert pool.pids == pids


# ------------------------------------------------------------------------------------------------------ text as a cell
def test_cells_share_names(pool: Ranks, capsys: pytest.CaptureFixture[str]):
    pool.execute("import dataclasses\nimport torch\n@dataclasses.dataclass\nclass Point:\n    x: int\np = Point(1)")
    pool.execute("p.x += torch.distributed.get_rank()\np")
    pool.execute("None")
    pool.execute("def f(x: int): ...\nf.__annotations__['x'] is int and Point.__module__")
    pool.execute("import pickle\npickle.loads(pickle.dumps(p)) == p")
    assert capsys.readouterr().out == "Point(x=1)\n'__main__'\nTrue\n"
    assert pool.all(lambda p: p.x, pool["p"]) == [1, 2]
    assert repr(pool["p"]) == "ObjectRef(p)"


def test_a_cell_that_fails_names_its_line(pool: Ranks):
    pids = pool.pids
    with pytest.raises(SyntaxError):
        pool.execute("1 +")
    failure = failure_of(pool.execute, "x = 1\nx / 0")
    assert pool.pids == pids
    number = str(failure).partition("<%%ranks cell ")[2].partition(">")[0]
    assert str(failure) == (
        "fs.notebook.ranks could not finish _execute on 2 ranks.\n"
        "  ranks 0, 1 raised ZeroDivisionError: division by zero\n"
        "The ranks go on, with the objects that they keep.\n\n"
        f"Rank {next(iter(failure.errors))}:\n"
        f"  File <%%ranks cell {number}>, line 2, in <module>\n    x / 0\nZeroDivisionError: division by zero"
    )
    assert (
        "fs.notebook.Ranks has no 'missing' on these ranks.\n"
        "Assign it in a cell that begins with %%ranks: missing = ..."
    ) in str(failure_of(pool, lambda x: x, pool["missing"]))


# ------------------------------------------------------------------------------------------------------------ failures
def test_ranks_that_raise_in_the_same_lines_go_on(pool: Ranks):
    run, pids = pool.keep(setup), pool.pids

    def raise_in_a_loss(run: Any) -> None:
        def loss(params: Any, batch: Any) -> Any:
            raise ValueError(f"no loss on rank {rank()}")

        fs.setup(init, loss, fs.adamw(1e-2), fs.random.key(0))[1](run[0], {"x": torch.ones(2, 4)})

    failure = failure_of(pool, raise_in_a_loss, run)
    assert "The ranks go on" in str(failure)
    assert "raise ValueError(" in failure.errors[0] and "no loss on rank 1" in failure.errors[1]
    assert {r: type(x) for r, x in failure.exceptions.items()} == {0: ValueError, 1: ValueError}
    assert pool(lambda run: steps(run, 6)[1], run) == pool(in_one_call)
    assert pool.pids == pids


def test_one_rank_that_raises_ends_all(pool: Ranks):
    ref, pids = pool.keep(lambda: 1), pool.pids

    def half() -> None:
        class OfACell(Exception):
            pass

        if rank() == 1:
            raise OfACell("only here") from KeyError("before")
        dist.barrier()

    failure = failure_of(pool, half)
    text = str(failure)
    assert "\n  rank 1 raised " in text and "OfACell: only here\n" in text and "after KeyError: 'before'" in text
    assert "The next call starts new ranks; objects that these kept are lost." in text
    assert "        raise OfACell".strip() in failure.errors[1]
    assert not any(running(pid) for pid in pids)
    assert repr(pool) == "Ranks(2, started by the next call)"
    assert "have ended" in refusal(pool, lambda x: x, ref, kind=ArgumentError)
    assert pool.all(rank) == [0, 1]


def test_a_rank_that_dies_in_a_call(pool: Ranks):
    pids = pool.pids
    failure = failure_of(pool, lambda: os.kill(os.getpid(), signal.SIGKILL) if rank() else dist.barrier())
    assert "rank 1 died of SIGKILL" in str(failure)
    assert not any(running(pid) for pid in pids)
    assert pool.all(rank) == [0, 1]


def test_a_rank_that_dies_between_calls(pool: Ranks):
    pids = pool.pids
    os.kill(pids[0], signal.SIGKILL)
    assert until(lambda: not Path(f"/proc/{pids[0]}").exists())
    assert str(failure_of(pool, rank)) == (
        "fs.notebook.ranks lost ranks between two calls.\n  rank 0 died of SIGKILL\n"
        "The next call starts new ranks; objects that these kept are lost."
    )
    assert not any(running(pid) for pid in pids)
    assert pool.all(rank) == [0, 1]


def test_a_call_that_hangs_ends_at_its_timeout(pool: Ranks):
    def hang() -> None:
        if rank() == 0:
            dist.barrier()

    pool.timeout = 1
    failure = failure_of(pool, hang)
    assert "hang on 2 ranks; rank 1 finished it.\n  rank 0 had not answered after 1 s\n" in str(failure)
    assert "Give it more seconds with pool.timeout = ..., or see below where the ranks stand." in str(failure)
    assert "    dist.barrier()\nStands in a library:\n" in str(failure)
    assert "fsharding/testing" not in str(failure) and "multiprocessing" not in str(failure)
    pool.timeout = 20
    assert pool.all(rank) == [0, 1]


def test_a_call_that_cannot_be_sent_changes_nothing(pool: Ranks):
    pids, lock = pool.pids, threading.Lock()
    text = refusal(pool, lambda: lock, kind=ArgumentError)
    assert "cannot send test_a_call_that_cannot_be_sent_changes_nothing.<locals>.<lambda> and its arguments" in text
    assert "_thread.lock" in text
    assert refusal(pool, lambda: pool(rank), kind=ArgumentError) == (
        "fs.notebook.ranks cannot send a pool to its own ranks.\n"
        "Pass what its functions need as arguments; they can call each other, also those with @pool.on_ranks."
    )
    assert refusal(pool, 3, kind=ArgumentError) == (
        "fs.notebook.ranks runs functions, got int.\nWrite pool(f, *args), or @pool.on_ranks above a function."
    )
    assert pool.pids == pids


def lock() -> Any:
    return threading.Lock()


def only_on_ranks() -> None:
    if not fs.notebook._identity:
        raise RuntimeError("not in the notebook")


class Unreadable:
    """An object that only a rank can unpickle."""

    def __reduce__(self) -> Any:
        return only_on_ranks, ()


def test_a_result_that_cannot_be_sent_or_read(pool: Ranks):
    pids = pool.pids
    failure = failure_of(pool.all, lock)
    assert str(failure) == (
        "fs.notebook.ranks cannot send a lock to the notebook, the result of lock.\n"
        "  TypeError: cannot pickle '_thread.lock' object\n"
        "Leave it on the ranks: ref = pool.keep(f, ...). Or return local tensors, numbers and containers of them."
    )
    failure = failure_of(pool, Unreadable)
    assert str(failure) == (
        "fs.notebook.ranks cannot read the result of Unreadable in the notebook.\n"
        "  RuntimeError: not in the notebook\n"
        "Leave it on the ranks: ref = pool.keep(f, ...). Or return local tensors, numbers and containers of them."
    )
    failure = failure_of(pool, lambda: {"state": setup()[0]})
    assert "cannot send a dict to the notebook, the result of " in str(failure)
    assert "\n  state.params.w is a DTensor\n" in str(failure)
    assert "\n  it is a DTensor\n" in str(failure_of(pool, lambda: setup()[0].params["w"]))
    assert pool.pids == pids


# ----------------------------------------------------------------------------------------------------- making and ending
@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
def test_a_bad_number_of_ranks(size: Any):
    text = f"fs.notebook.ranks cannot start {size!r} ranks.\nGive 1 or more, such as 2."
    assert refusal(fs.notebook.ranks, size, kind=ArgumentError) == text


@pytest.mark.parametrize("timeout", [0, -1.0, "5"])
def test_a_bad_timeout(pool: Ranks, timeout: Any):
    text = f"fs.notebook.ranks cannot wait for timeout={timeout!r}.\nGive seconds above 0, or None for no limit."
    assert refusal(Ranks, 2, timeout, kind=ArgumentError) == text
    pids, pool.timeout = pool.pids, timeout
    assert refusal(pool, rank, kind=ArgumentError) == text
    assert pool.pids == pids


def test_without_cloudpickle_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert refusal(fs.notebook.ranks, 2, kind=ConfigError) == (
        "fs.notebook.ranks needs cloudpickle to send functions of cells.\npip install 'fsharding[notebook]'"
    )


def test_a_second_call_of_ranks_ends_the_first_pool():
    first = fs.notebook.ranks(1)
    pids, second = first.pids, fs.notebook.ranks(1)
    assert first.closed and not any(running(pid) for pid in pids)
    assert str(failure_of(first, rank)) == (
        "fs.notebook.ranks got a pool that is closed, by close() or by a later call of fs.notebook.ranks.\n"
        "pool = fs.notebook.ranks(1), and run the cells with @pool.on_ranks again."
    )
    assert second(rank) == 0
    second.close()
    second.close()
    assert repr(second) == "Ranks(1, closed)"
    assert second.pids == []


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_pools_leave_no_process_and_no_open_file():
    Ranks(1).close()
    before = open_files()
    for _ in range(3):
        with Ranks(1) as pool:
            pids = pool.pids
            assert failure_of(pool, os._exit, 3).errors[0] == "exited with status 3"
        assert not any(running(pid) for pid in pids)
    forgotten = Ranks(1)
    pids = forgotten.pids
    del forgotten
    gc.collect()
    assert not any(running(pid) for pid in pids)
    assert open_files() <= before


# ------------------------------------------------------------------------------------------------------------ in a kernel
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


class Kernel:
    """One kernel for all tests, since it takes seconds to start; each test begins without names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    def start(self) -> None:
        self.manager = KernelManager(kernel_name="python3", transport="ipc", ip=str(self.folder / "kernel"))
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # As in a notebook, where calls have no limit: under pytest they have one.
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self.manager.start_kernel(cwd=str(self.folder), env={**env, "PYTHONPATH": path})

    def run(self, notebook: nbformat.NotebookNode, **options: Any) -> list[list[nbformat.NotebookNode]]:
        """The outputs of each cell."""
        client = NotebookClient(notebook, km=self.manager, timeout=240, **options)
        try:
            client.execute()
        finally:
            assert client.kc is not None
            client.kc.stop_channels()
        return [cell.get("outputs", []) for cell in notebook.cells]

    def cells(self, *sources: str) -> list[str]:
        """The text that each cell shows."""
        new = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
        return [
            "".join(
                shown.get("text") or "\n".join(shown.get("traceback", [])) or shown.data["text/plain"] for shown in out
            )
            for out in self.run(new, allow_errors=True)
        ]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Generator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    yield kernel
    if kernel.manager.is_alive():
        kernel.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(started: Kernel) -> Kernel:
    if started.manager.is_alive():
        started.cells("%reset -f")
    else:
        started.start()
    return started


START = "import json, os, signal, threading, time, torch\nimport fsharding as fs\npool = fs.notebook.ranks(2)"


@pytest.mark.timeout(300)
def test_cells_and_their_errors(kernel: Kernel):
    shown = kernel.cells(
        START,
        "factor = 2\ndef f(x):\n    print('rank', torch.distributed.get_rank())\n    return factor * x",
        "pool.all(f, 3)",
        "def g(x):\n    y = f(x)\n    if torch.distributed.get_rank() == 1:\n        y = torch.ones(2) @ torch.ones(3)\n"
        "    torch.distributed.barrier()",
        "pool(g, 1)",
        "pool(f, 5)",
    )
    assert shown[2] == "rank 0\n[6, 6]"
    number = shown[4].partition("Cell In[")[2].partition("]")[0]
    assert shown[4].startswith(
        "rank 0\nCallFailure: fs.notebook.ranks could not finish g on 2 ranks.\n  rank 1 raised Ru"
    )
    assert f"  Cell In[{number}], line 4, in g\n    y = torch.ones(2) @ torch.ones(3)\nRuntimeError: " in shown[4]
    assert shown[5] == "rank 0\n10"


def test_the_cell_magic(kernel: Kernel):
    shown = kernel.cells(
        START.replace("ranks(2)", "ranks(1)"),
        "pool.close()\n%load_ext fsharding",
        "%%ranks two\n1",
        "%%ranks 2\nimport torch\nx = torch.distributed.get_world_size()\nx",
        "%%ranks\nx + 1",
        "%%ranks\ny = 0\n\n1 / y",
        "%%ranks 2\nx",
    )
    assert shown[2].endswith("%%ranks takes a number of ranks, got 'two'.\nWrite %%ranks 2.")
    assert shown[3:5] == ["2\n", "3\n"]
    assert "line 3, in <module>\n    1 / y\nZeroDivisionError" in shown[5] and "The ranks go on" in shown[5]
    assert shown[6] == "2\n"


INTERRUPT = """\
def wait():
    if torch.distributed.get_rank() == 0:
        open("begun", "w").close()
        torch.distributed.barrier()
pids = pool.pids
def interrupt():
    while not os.path.exists("begun"):
        time.sleep(0.01)
    time.sleep(0.2)
    os.killpg(os.getpgrp(), signal.SIGINT)  # as a front end does: the ranks get it too
threading.Thread(target=interrupt).start()
pool(wait)
"""


def test_an_interrupt_ends_the_call_and_says_where_the_ranks_stood(kernel: Kernel):
    shown = kernel.cells(
        START, INTERRUPT, "[os.path.exists(f'/proc/{p}') for p in pids], pool.all(torch.distributed.get_rank)"
    )
    assert "The 2 ranks were ended in the middle of wait. The next call starts new ranks" in shown[1]
    assert "line 4, in wait\n    torch.distributed.barrier()\nStands in a library:" in shown[1]
    assert "Rank 1:\n  waited for the next call" in shown[1]
    assert shown[2] == "([False, False], [0, 1])"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(kernel: Kernel, path: Path):
    notebook = nbformat.read(path, as_version=4)
    outputs = kernel.run(notebook)
    assert any("image/png" in shown.get("data", {}) for out in outputs for shown in out)
    tagged = {
        number for number, cell in enumerate(notebook.cells) if "raises-exception" in cell.metadata.get("tags", [])
    }
    assert {number for number, out in enumerate(outputs) if any(s.output_type == "error" for s in out)} == tagged


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_short_and_stored_without_outputs(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert sum(len(cell.source.splitlines()) for cell in code) < 150
    assert notebook.cells[0].source.startswith("# ")
    assert path.read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"


@pytest.mark.parametrize("how", ["shut down", pytest.param("killed", marks=full)])
def test_no_rank_outlives_the_kernel(kernel: Kernel, how: str):
    busy = "threading.Thread(target=pool, args=(time.sleep, 100), daemon=True).start()" if how == "killed" else "0"
    pids = json.loads(kernel.cells(START, busy, "json.dumps(pool.pids)")[2].strip("'"))
    assert len(pids) == 2 and all(running(pid) for pid in pids)
    kernel.manager.shutdown_kernel(now=how == "killed")
    assert until(lambda: not any(running(pid) for pid in pids))
