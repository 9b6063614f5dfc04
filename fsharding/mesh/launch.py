"""Run a function on n local processes, which all end with the launcher."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
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
from fsharding.mesh.rendezvous import INIT_METHOD, local_variables, place_variables

__all__ = ["launch_ranks"]

_FORWARDED = (*SIGNALS, signal.SIGINT)  # signals that ranks receive, to save and exit, if there is a grace period
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # unless forwarded, these end all at once

_NOTICE_S = 8.0  # time for the other ranks, after a failure, to find the lost ranks and record their position
_EXIT_S = 10.0  # time for a rank to exit after its answer


def launch_ranks(fn: Callable[..., Any], ranks: int, *args: Any, grace: float | None = None) -> list[Any]:
    """Run `fn(*args)` on local ranks and wait for them."""
    call = pickle.dumps((fn, args))
    with ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="fsharding-", ignore_cleanup_errors=True))
        # It unblocks SIGTERM when it starts, which is when the first rank does.
        resource_tracker.ensure_running()
        signals = _Signals(_FORWARDED if grace is not None else (), held)
        started = _Ranks()
        held.callback(started.end)
        with _environment(ranks):
            for rank in range(ranks):
                signals.check()
                place = {**place_variables(rank, ranks), INIT_METHOD: Path(folder, "ranks").as_uri()}
                started.start(call, place)
        return _supervise(started, signals, grace)


@contextmanager
def _environment(ranks: int) -> Generator[None]:
    """Set the variables of all ranks, those that the user hasn't set, in this block."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "KINETO_LOG_LEVEL": "6",  # otherwise torch's profiler logs its starts and stops
        **local_variables(),
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


# -------------------------------------------------------------------------------------------------------------- signals
class _Signals:
    """Receive the signals of this process until a stack ends; outside of the main thread, none."""

    # Python writes the number of each handled signal to a pipe, which wakes the wait for ranks.

    def __init__(self, forwarded: Sequence[signal.Signals], held: ExitStack) -> None:
        self.forwarded = forwarded
        self.received: dict[signal.Signals, float] = {}  # the time of the first signal of each number
        self._ends = False
        self._read, write = os.pipe()
        for end in (self._read, write):
            held.callback(os.close, end)
        os.set_blocking(write, False)
        if threading.current_thread() is threading.main_thread():
            held.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write, warn_on_full_buffer=False))
            ignored = [number for number in (signal.SIGHUP,) if signal.getsignal(number) is signal.SIG_IGN]  # nohup
            numbers = [number for number in {*self.forwarded, *_ENDING} if number not in ignored]
            held.enter_context(handling(numbers, self._note))

    @property
    def began(self) -> float:
        """Time of the first forwarded signal; infinity without one."""
        return min((self.received[number] for number in self.forwarded if number in self.received), default=math.inf)

    def fileno(self) -> int:
        """Return the read end of the pipe, for `wait`."""
        return self._read

    def drain(self) -> None:
        """Empty the pipe, after handlers have recorded the signals."""
        os.read(self._read, 64)

    def check(self) -> None:
        """Raise KeyboardInterrupt after a signal that ends all ranks."""
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
    """Processes and their pipes."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self._context = multiprocessing.get_context("spawn")

    def end(self) -> None:
        """Kill the remaining processes."""
        self.send(signal.SIGKILL)
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(_EXIT_S)
            pipe.close()

    def start(self, call: bytes, place: dict[str, str]) -> None:
        """Start one more rank."""
        # Ranks inherit a mask that blocks these signals: the launcher decides which of them it sends on.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, *_ENDING})
        try:
            reader, writer = cast("tuple[Connection, Connection]", self._context.Pipe(duplex=False))
            name = f"fsharding-rank-{place['RANK']}"
            process = self._context.Process(target=run_rank, name=name, args=(os.getpid(), place, call, writer))
            process.start()
            self.processes.append(process)
            self.pipes.append(reader)
            writer.close()  # only the rank holds the write end now, so its death ends a read here
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def send(self, number: signal.Signals, to: Sequence[int] | None = None) -> None:
        """Send a signal to running ranks, by default to all."""
        for rank in range(len(self.processes)) if to is None else to:
            process = self.processes[rank]
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)


class _Failure(NamedTuple):
    """A failed rank. Failures sort by cause: a rank that died comes before one that noticed it."""

    blames_others: bool
    when: float
    rank: int
    rule: str
    said: str


def _supervise(ranks: _Ranks, signals: _Signals, grace: float | None) -> list[Any]:
    """Wait until all ranks have answered and exited; return their values."""
    answers: dict[int, Answer] = {}
    failures: list[_Failure] = []
    forwarded: set[signal.Signals] = set()
    waiting = dict(enumerate(ranks.pipes))
    while waiting:
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
        sources = [*waiting.values(), signals.fileno()]
        if signals.fileno() in wait(sources, None if until == math.inf else max(0.0, until - now)):
            signals.drain()
        for rank in [rank for rank, pipe in waiting.items() if pipe.poll()]:
            try:
                answer: Answer = pickle.loads(waiting.pop(rank).recv_bytes())
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
    return [answers[rank].value for rank in range(len(answers))]


def _died(rank: int, process: BaseProcess) -> _Failure:
    """Describe a rank that closed its pipe without an answer."""
    process.join(_EXIT_S)
    code = process.exitcode
    if code is None:
        how = f"it closed its pipe, but was still running {_EXIT_S:g} s later"
    else:
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    return _Failure(False, time.monotonic(), rank, f"lost rank {rank} ({how}).", "")


def _not_saved(signals: _Signals, grace: float) -> RankError:
    names = ", ".join(sorted(number.name for number in signals.received))
    rule = f"has killed its ranks, which had not saved {grace:g} s after {names}."
    return RankError(report(f"fsharding {rule}", mend="Pass a longer --grace, or use smaller steps."))
