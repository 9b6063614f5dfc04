"""Run a function on several gloo ranks of this machine; a pool keeps their processes between calls."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import importlib
import importlib.util
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist

from fsharding.base.errors import ConfigError, message, report
from fsharding.base.public import public
from fsharding.mesh.rendezvous import local_variables, place_variables
from fsharding.testing.failures import Failure, RankFailure, name_of, repeat, worded

__all__ = ["RankPool", "run_ranks"]

Result = TypeVar("Result")
Pipe = multiprocessing.connection.Connection

_IN_TESTS = 60.0
_GROUP_IN_TESTS = datetime.timedelta(seconds=20)
_GROUP_TIMEOUT = datetime.timedelta(minutes=10)  # a hang is a failure of a test; elsewhere a call may train for a day
_UNGUARDED = 97  # exit status of a rank whose script starts ranks when it is imported
_GRACE = 1.0  # seconds for the other ranks to reply after one has failed
_EXIT_S = 10.0  # on a busy machine, the parent may see the exit of a killed process seconds later
_CROWD = 40  # threads: a gloo group has two or three, one of which wakes a hundred times a second
# Modules that the fork server imports once for all ranks, if this process has imported them or `_ALWAYS` covers them.
_PRELOAD = (
    "torch", "torch.distributed.tensor", "torch.distributed.checkpoint.filesystem", "numpy", "hypothesis", "pytest",
    "torch._dynamo", "fsharding.testing", "fsharding.api", "fsharding.checkpoint",
    "fsharding.interop.module.model_from_module", "fsharding.contrib.shared_memory.transport",
)  # fmt: skip
_ALWAYS = ("fsharding.", "torch.distributed.")


# ------------------------------------------------------------------------------------------------ in the rank's process
def _serve(rank: int, size: int, folder: str, environ: dict[str, str], pipe: Pipe) -> None:
    """Join the group, then answer calls until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update({**environ, **place_variables(rank, size)})
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, args=(folder,), daemon=True).start()
    with open(_stack_file(folder, rank), "w") as stack, contextlib.suppress(EOFError, BrokenPipeError):
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        group = {"init_method": Path(folder, "store").as_uri(), "rank": rank, "world_size": size}
        patience = _GROUP_IN_TESTS if _in_test() else _GROUP_TIMEOUT
        pipe.send_bytes(_answer(functools.partial(dist.init_process_group, "gloo", timeout=patience, **group)))
        while True:
            pipe.send_bytes(_answer(functools.partial(_perform, pipe.recv_bytes())))
    shutil.rmtree(folder, ignore_errors=True)


def _in_test() -> bool:
    """Return whether pytest runs a test; ranks inherit the environment of the process that starts them."""
    return "PYTEST_CURRENT_TEST" in os.environ


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stack-{rank}")


def _exit_with_parent(folder: str) -> None:
    parent = multiprocessing.process.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _answer(call: Callable[[], Any]) -> bytes:
    """Return the pickled bytes of a pickled result, or a pickled `Failure`."""
    try:
        return pickle.dumps(pickle.dumps(call()))
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        what = ": ".join(filter(None, (f"raised {type(error).__qualname__}", str(error))))
        failure = Failure(what, "".join(traceback.format_exception(type(error), error, trace)))
        try:
            data = pickle.dumps(dataclasses.replace(failure, exception=error))
            pickle.loads(data)  # some exceptions can be pickled but not unpickled
        except Exception:
            data = pickle.dumps(failure)
        return data


def _perform(call: bytes) -> Any:
    path, filters, seed, body = pickle.loads(call)
    sys.path[:] = path
    fn, args, kwargs = _unpack(body)
    if seed is not None:
        random.seed(seed)
        torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        # Right after a reset, which makes Python forget what earlier filters decided about a line.
        cast("list[Any]", warnings.filters).extend(filters)
        return fn(*args, **kwargs)


def _unpack(body: bytes) -> Any:
    try:
        return pickle.loads(body)
    except AttributeError as error:
        if "__mp_main__" not in str(error):
            raise
        name = str(error).partition("attribute '")[2].partition("'")[0]
        rule = f"cannot find {name} on the ranks: they import the script, without the code under its `if __name__`."
        raise RankFailure(message(rule, mend="Define it above that line, at the top level of the file.")) from None


# --------------------------------------------------------------------------------------------- in the caller's process


@dataclasses.dataclass(frozen=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Pipe

    def receive(self) -> bytes | Failure:
        """Return the rank's pickled result, or how it failed."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                return pickle.loads(self.pipe.recv_bytes())
        self.process.join(_EXIT_S)
        status = self.process.exitcode
        if status is None:
            return Failure(f"closed its pipe, and had not exited {_EXIT_S:g} s later", died=True)
        end = f"died of {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return Failure(end, died=True, status=status)


class RankPool:
    """A pool of `size` gloo ranks on this machine with one default process group.

    Each rank is a process with one torch thread and the environment of the caller at the start of the pool, with
    `RANK`, `LOCAL_RANK` and `WORLD_SIZE`. Collectives time out after 10 min, or 20 s in a pytest test. Process groups
    that a call makes stay until the pool ends. After the first pool, starting one takes 0.1 s.

    Attributes:
        size: Number of ranks.
        timeout: Default limit of a call in seconds; None as in `run_ranks`.

    Raises:
        RankError: `size` isn't positive, or the ranks don't start.

    Example:
        >>> import math
        >>> from fsharding.testing import RankPool
        >>> with RankPool(2) as pool:
        ...     pool.run(math.sqrt, 9.0)
        [3.0, 3.0]
        >>> pool.alive
        False
    """

    @public
    def __init__(self, size: int, timeout: float | None = None) -> None:
        if size < 1:
            raise RankFailure(message(f"cannot start {size} ranks.", mend="Pass a size of 1 or more."))
        self.size = size
        self.timeout = timeout
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._folder = tempfile.mkdtemp(prefix="fsharding-ranks-")
        self._workers: list[_Worker] = []
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        if getattr(multiprocessing.process.current_process(), "_inheriting", False):
            # This is a rank whose script starts ranks while it is imported. Exit; the caller raises the error, once.
            os._exit(_UNGUARDED)
        # IPython's %reset deletes attributes of the main module that multiprocessing reads.
        main = vars(sys.modules["__main__"])
        main.setdefault("__spec__", None)
        if _is_typed():
            main.pop("__file__", None)  # "<stdin>", which ranks would try to run
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([x for x in _PRELOAD if x in sys.modules or x.startswith(_ALWAYS)])
        environ = {**os.environ, **local_variables()}
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = (rank, self.size, self._folder, environ, theirs)
            process = context.Process(target=_serve, args=args, name=f"rank-{rank}")
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, cast("Pipe", ours)))
        replies = self._collect(60.0)
        if failed := {rank: reply for rank, reply in replies.items() if isinstance(reply, Failure)}:
            mend = 'Put the code of a script that calls run_ranks under `if __name__ == "__main__":`.'
            if all(reply.status == _UNGUARDED for reply in failed.values()):
                rule = "fs.run_ranks cannot start ranks: they import the script, which would start ranks again."
                raise RankFailure(report(rule, mend=mend))
            raise worded(f"could not start {self.size} ranks.", failed, mend)

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; empty once the pool has ended."""
        return [worker.process.pid or 0 for worker in self._workers]

    @property
    def alive(self) -> bool:
        """Whether the pool accepts calls: all ranks run, and this process has started them."""
        ours = self._owner == os.getpid() and bool(self._workers)
        return ours and all(worker.process.is_alive() for worker in self._workers)

    @property
    def crowded(self) -> bool:
        """Whether threads of process groups of earlier calls slow the ranks."""
        tasks = [Path(f"/proc/{pid}/task") for pid in self.pids[:1]]
        return any(folder.is_dir() and len(list(folder.iterdir())) > _CROWD for folder in tasks)

    def run(
        self, fn: Callable[..., Result], /, *args: Any, timeout: float | None = None, seed: int = 0, **kwargs: Any
    ) -> list[Result]:
        """Run `fn(*args, **kwargs)` on every rank, and return the results in rank order; see `run_ranks`.

        Raises:
            RankError: A rank raised, died or did not reply, which ends the pool; or the pool had ended before.
        """
        limit = self.timeout if timeout is None else timeout
        limit = (_IN_TESTS if _in_test() else math.inf) if limit is None else limit
        replies = self._replies(_pack(fn, seed, args, kwargs), limit)
        if failed := {rank: reply for rank, reply in replies.items() if isinstance(reply, Failure)}:
            self.kill()
            rule = f"could not finish {name_of(fn)} on {self.size} ranks."
            mend = repeat(fn, self.size, seed, args, kwargs)
            if any(reply.late for reply in failed.values()):
                mend = f"Pass a larger timeout=, or see below where each rank was.\n{mend}"
            raise worded(rule, failed, mend)
        return [pickle.loads(cast("bytes", replies[rank])) for rank in range(self.size)]

    def _replies(self, call: bytes, timeout: float) -> dict[int, bytes | Failure]:
        """Send a call to every rank and collect the replies; an interrupt notes where each rank stood."""
        with self._lock:
            if not self.alive:
                rule = "fs.testing.RankPool.run got a pool that has ended."
                raise RankFailure(report(rule, mend="Make a new fs.testing.RankPool."))
            try:
                for worker in self._workers:
                    with contextlib.suppress(BrokenPipeError):
                        worker.pipe.send_bytes(call)
                return self._collect(timeout)
            except KeyboardInterrupt as interrupt:
                try:
                    for rank, stack in self._stacks([*range(self.size)]).items():
                        interrupt.add_note(f"Rank {rank}:\n{stack}")
                finally:
                    self.kill()
                raise
            except BaseException:
                self.kill()
                raise

    def _collect(self, timeout: float) -> dict[int, bytes | Failure]:
        """Collect one reply from each rank: dead ranks first, since others fail because of them; silent ranks last."""
        deadline = time.monotonic() + timeout  # which may be infinite
        replies: dict[int, bytes | Failure] = {}
        failed: dict[int, Failure] = {}
        while len(replies) < self.size:
            waiting = [(rank, worker) for rank, worker in enumerate(self._workers) if rank not in replies]
            handles = {handle: rank for rank, worker in waiting for handle in (worker.pipe, worker.process.sentinel)}
            left = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(handles, left if math.isfinite(left) else None)
            if not ready:
                break
            for rank in sorted({handles[cast("Pipe", handle)] for handle in ready}):
                replies[rank] = reply = self._workers[rank].receive()
                if isinstance(reply, Failure):
                    if not failed:
                        deadline = min(deadline, time.monotonic() + _GRACE)
                    failed[rank] = reply
        failed = dict(sorted(failed.items(), key=lambda item: not item[1].died))
        silent = [rank for rank in range(self.size) if rank not in replies]
        if failed:
            what = f"had not answered {_GRACE:g} s after rank {next(iter(failed))} failed"
            return failed | replies | dict.fromkeys(silent, Failure(what))
        stacks = self._stacks(silent)
        what = f"had not answered after {timeout:g} s"
        return replies | {rank: Failure(what, stacks[rank], late=True) for rank in silent}

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Return the stack of each of these ranks; empty if it can't write one anymore."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.2 if ranks else 0.0)
        files = {rank: _stack_file(self._folder, rank) for rank in ranks}
        return {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}

    def close(self) -> None:
        """End the ranks, and kill those that still run after 2 s. Closing twice is allowed."""
        if self._owner == os.getpid():
            for worker in self._workers:
                worker.pipe.close()
            deadline = time.monotonic() + 2.0
            for worker in self._workers:
                worker.process.join(max(0.0, deadline - time.monotonic()))
            self.kill()

    def kill(self) -> None:
        """Kill the ranks."""
        if self._owner == os.getpid():
            for worker in self._workers:
                worker.process.kill()
            for worker in self._workers:
                worker.process.join()
                worker.process.close()
                worker.pipe.close()
            self._workers.clear()
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_POOLS: dict[int, RankPool] = {}  # by size, in the order of their last use
_IDLE_RANKS = 20  # most processes that wait for calls, since threads of each wake up regularly


@atexit.register
def _close_pools() -> None:
    for pool in _POOLS.values():
        pool.close()


@public
def run_ranks(
    fn: Callable[..., Result], n: int, /, *args: Any, timeout: float | None = None, seed: int = 0, **kwargs: Any
) -> list[Result]:
    """Run `fn(*args, **kwargs)` on each of `n` gloo ranks on this machine.

    Processes are kept for the next call with the same `n`. Before each call, the seeds of Python and torch and the
    caller's warning filters are set, so that calls don't depend on each other. Arguments and results are pickled:
    return local tensors, not DTensors.

    Args:
        fn: Function at the top level of a module. In a notebook or an interpreter, any function: it is pickled by
            value, which needs `pip install 'fsharding[notebook]'`.
        n: Number of ranks, at least 1.
        *args: Arguments, the same for every rank.
        timeout: Limit in seconds: by default 60 in a pytest test, otherwise none; `math.inf` for none everywhere.
        seed: Seed of Python's and torch's generators, the same on every rank.
        **kwargs: Keyword arguments of `fn`.

    Returns:
        A list of each rank's result, in rank order.

    Raises:
        RankError: `fn` or an argument can't be pickled, or a rank raised, died or did not reply in time; the other
            ranks get 1 s to reply, then all are killed. The exception is a `RankFailure`.
        ConfigError: `fn` is defined in a notebook, and cloudpickle isn't installed.

    Example:
        >>> import math
        >>> fs.run_ranks(math.sqrt, 2, 9.0)
        [3.0, 3.0]
    """
    pool = _POOLS.pop(n, None)
    if pool is not None and not pool.alive:
        pool.kill()
        pool = None
    # The dict is in the order of last use. With too many ranks, the least recently used pools are closed.
    _POOLS[n] = pool = pool or RankPool(n)
    while sum(_POOLS) > max(_IDLE_RANKS, n):
        _POOLS.pop(next(iter(_POOLS))).close()
    results = pool.run(fn, *args, timeout=timeout, seed=seed, **kwargs)
    if pool.crowded:
        pool.close()
    return results


def _pack(fn: Callable[..., Any], seed: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((sys.path, warnings.filters, seed, _body(fn, args, kwargs)))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        mend = "Define the function at the top level of a module, and pass tensors, numbers and containers of them."
    raise RankFailure(report(f"fs.run_ranks cannot send {name_of(fn)} and its arguments to the ranks.", [reason], mend))


def _is_typed() -> bool:
    """Return whether `__main__` is a notebook, an interpreter or standard input: ranks cannot import it."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is None and not os.path.isfile(getattr(main, "__file__", None) or "")


def _body(*call: Any) -> bytes:
    """Pickle a call: by reference in a script, by value in a notebook or an interpreter, which ranks cannot import."""
    # Not multiprocessing's pickler: it sends tensors as handles to shared memory, which may die with a rank.
    if not _is_typed():
        return pickle.dumps(call)
    if importlib.util.find_spec("cloudpickle") is not None:
        return importlib.import_module("cloudpickle").dumps(call)  # lazy: an extra
    if getattr(call[0], "__module__", None) == "__main__":
        rule = f"cannot send {name_of(call[0])} to the ranks, which can't import a notebook or an interpreter."
        mend = "Install cloudpickle: pip install 'fsharding[notebook]'. Or define the function in a file and import it."
        raise ConfigError(report(f"fs.run_ranks {rule}", mend=mend))
    return pickle.dumps(call)
