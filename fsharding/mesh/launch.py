"""Local ranks: start a function on n processes, and end all of them together.

Guarantee: no rank outlives the launcher; neither does the directory, unless the launcher is killed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

from fsharding.base.errors import RankError, report
from fsharding.mesh.preemption import SIGNALS, announce, handling
from fsharding.mesh.rank_process import Answer, run_rank
from fsharding.mesh.rendezvous import INIT_METHOD, local_variables

__all__ = ["launch_ranks"]

_FORWARDED = (*SIGNALS, signal.SIGINT)  # signals after which ranks save and end, where there is a grace

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end ranks and launcher at once, unless they are forwarded."""

_NOTICE_S = 8.0
"""After a failure the other ranks have so long to find out which ranks are lost, and to record their position."""

_EXIT_S = 10.0  # a rank that has answered has so long to exit


def launch_ranks(fn: Callable[..., Any], ranks: int, *args: Any, grace: float | None = None) -> list[Any]:
    """Run `fn(*args)` on local ranks and wait for them."""
    call = pickle.dumps((fn, args))
    with ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="fsharding-", ignore_cleanup_errors=True))
        # It unblocks SIGTERM when it starts, which is when the first rank does.
        resource_tracker.ensure_running()
        signals = held.enter_context(_Signals(_FORWARDED if grace is not None else ()))
        started = held.enter_context(_Ranks())
        with _environment(_variables(ranks)):
            for rank in range(ranks):
                signals.check()
                started.start(call, _place(rank, ranks, folder))
        return _supervise(started, signals, grace)


def _place(rank: int, ranks: int, folder: str) -> dict[str, str]:
    """The variables that differ between ranks, and where they meet."""
    own = str(rank)
    all_ranks = str(ranks)
    names = {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": all_ranks, "LOCAL_WORLD_SIZE": all_ranks}
    return {**names, INIT_METHOD: Path(folder, "ranks").as_uri()}


def _variables(ranks: int) -> dict[str, str]:
    """The environment of ranks, besides what the user has set."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "KINETO_LOG_LEVEL": "6",  # or torch's profiler writes about its starts and stops
        **local_variables(),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set variables for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# -------------------------------------------------------------------------------------------------------------- signals
class _Signals:
    """The signals that this process gets inside the block; outside the main thread, none."""

    # Python writes the number of each signal that has a handler into a pipe, so that the wait for ranks ends.

    def __init__(self, forwarded: Sequence[signal.Signals]) -> None:
        self.forwarded = forwarded
        self.received: dict[signal.Signals, float] = {}  # the time of the first signal of each number
        self._ends = False

    def __enter__(self) -> _Signals:
        self._held = ExitStack()
        self._read, write = os.pipe()
        for end in (self._read, write):
            self._held.callback(os.close, end)
        os.set_blocking(write, False)
        if threading.current_thread() is threading.main_thread():
            self._held.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write, warn_on_full_buffer=False))
            ignored = [number for number in (signal.SIGHUP,) if signal.getsignal(number) is signal.SIG_IGN]  # nohup
            numbers = [number for number in {*self.forwarded, *_ENDING} if number not in ignored]
            self._held.enter_context(handling(numbers, self._note))
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def began(self) -> float:
        """When the first signal came that is forwarded."""
        return min((self.received[number] for number in self.forwarded if number in self.received), default=math.inf)

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._read

    def drain(self) -> None:
        """Forget the numbers in the pipe; handlers have noted them."""
        os.read(self._read, 64)

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come that ends everything."""
        if self._ends:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        got = signal.Signals(number)
        again = got is signal.SIGINT and got in self.received
        self._ends = self._ends or again or got not in self.forwarded
        self.received.setdefault(got, time.monotonic())
        if got is signal.SIGINT and not self._ends:
            announce()


# ---------------------------------------------------------------------------------------------------------------- ranks
class _Ranks:
    """Processes and their pipes; those that are left at the end of the block are killed."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self._context = multiprocessing.get_context("spawn")

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(_EXIT_S)
            pipe.close()

    def start(self, call: bytes, place: dict[str, str]) -> None:
        """Start one more rank. It inherits that all signals of the launcher are blocked: it gets them from there."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, *_ENDING})
        try:
            reader, writer = cast("tuple[Connection, Connection]", self._context.Pipe(duplex=False))
            name = f"fsharding-rank-{place['RANK']}"
            process = self._context.Process(target=run_rank, name=name, args=(os.getpid(), place, call, writer))
            process.start()
            self.processes.append(process)
            self.pipes.append(reader)
            writer.close()  # the rank alone holds it: its end ends a read here
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def send(self, number: signal.Signals, to: Sequence[int] | None = None) -> None:
        """Send a signal to ranks that have not ended; by default to all."""
        for rank in range(len(self.processes)) if to is None else to:
            process = self.processes[rank]
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)


class _Failure(NamedTuple):
    """A rank that has failed, with its order among failures: a rank that died before one that noticed."""

    blames_others: bool
    when: float
    rank: int
    rule: str
    said: str


def _supervise(ranks: _Ranks, signals: _Signals, grace: float | None) -> list[Any]:
    """Wait until all ranks have answered and exited; what they returned."""
    answers: dict[int, Answer] = {}
    failures: list[_Failure] = []
    forwarded: set[signal.Signals] = set()
    size = len(ranks.processes)
    while len(answers) + len(failures) < size:
        signals.check()
        for number in {*signals.received} - forwarded:
            ranks.send(number)
            forwarded.add(number)
        now = time.monotonic()
        if grace is not None and now >= signals.began + grace:
            raise _not_saved(signals, grace)
        until = min((failure.when + _NOTICE_S for failure in failures), default=math.inf)
        if now >= until:
            break
        until = min(until, signals.began + (grace or 0.0))
        open_ranks = [rank for rank in range(size) if rank not in answers and rank not in {f.rank for f in failures}]
        waited = [ranks.pipes[rank] for rank in open_ranks]
        if signals.fileno() in wait([*waited, signals.fileno()], None if until == math.inf else max(0.0, until - now)):
            signals.drain()
        for rank in open_ranks:
            if not ranks.pipes[rank].poll():
                continue
            try:
                answer: Answer = pickle.loads(ranks.pipes[rank].recv_bytes())
            except (EOFError, OSError):
                failures.append(_died(rank, ranks.processes[rank]))
                continue
            if answer.error:
                rule = f"failed on rank {rank}."
                failures.append(_Failure(answer.blames_others, time.monotonic(), rank, rule, answer.error))
            else:
                answers[rank] = answer
    if failures:
        first = min(failures)
        raise RankError(report(f"fsharding {first.rule}", [first.said] if first.said else []), ranks=(first.rank,))
    until = time.monotonic() + _EXIT_S
    for process in ranks.processes:
        process.join(max(0.0, until - time.monotonic()))
    return [answers[rank].value for rank in range(size)]


def _died(rank: int, process: BaseProcess) -> _Failure:
    """A rank whose end of the pipe is closed, and that has not answered."""
    process.join(_EXIT_S)
    code = process.exitcode
    if code is None:
        how = f"it closed its pipe, and had not ended {_EXIT_S:g} s later"
    else:
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    return _Failure(False, time.monotonic(), rank, f"lost rank {rank} ({how}).", "")


def _not_saved(signals: _Signals, grace: float) -> RankError:
    names = ", ".join(sorted(number.name for number in signals.received))
    rule = f"has killed its ranks, which had not saved {grace:g} s after {names}."
    return RankError(report(f"fsharding {rule}", mend="Give a longer --grace, or smaller steps."))
