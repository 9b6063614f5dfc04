"""Local ranks: starts a function on n processes through torchrun's own launcher.

In: an importable function, its arguments, a number of ranks. Out: what each rank returned.
A rank that dies ends all others, and its error comes up here. Launcher and ranks meet in files of a directory that only
their user can enter, and listen on loopback alone. Laws: no rank outlives the launcher; neither does the directory,
unless the launcher is killed: then it is left to whoever cleans the system's temporary files.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import select
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fsharding import errors
from fsharding.errors import RankError, message
from fsharding.mesh.preemption import SIGNALS
from fsharding.mesh.rendezvous import INIT_METHOD, local_variables

__all__ = ["launch_ranks", "under_launcher"]


def under_launcher() -> bool:
    """Whether a launcher such as torchrun has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch_ranks(fn: Callable[..., Any], ranks: int, *args: Any, grace: float | None = None) -> list[Any]:
    """Runs `fn(*args)` on local ranks and waits for them.

    Args:
        fn: a module-level function; sent by name.
        ranks: how many processes.
        *args: what can be pickled.
        grace: sends `preemption.SIGNALS` on to the ranks, which begin with them blocked until `preemption.watch` lets
            them through, and waits so many seconds for the ranks to end. By default SIGTERM ends ranks and launcher.

    Returns:
        What each rank returned, in order.

    Raises:
        RankError: a rank raised or died; the text has its number and its error. Or ranks had not ended after `grace`.
        KeyboardInterrupt: the launcher was interrupted; all ranks are gone.
    """
    forwarder = None if grace is None else _Forwarder(grace)
    # The launcher logs a failure line by line; ours says it once.
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="fsharding-", ignore_cleanup_errors=True) as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder, "launcher")),
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
            signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT" if grace is None else "SIGINT,SIGHUP,SIGQUIT",
        )
        try:
            with _environment(_variables(ranks)), forwarder or nullcontext():
                results = elastic_launch(config, _run_rank)(Path(folder, "ranks").as_uri(), fn, *args)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            text = f"lost rank {rank} (exit code {failure.exitcode})."
            if forwarder is not None and forwarder.killed:
                text = f"has killed its ranks, which had not saved {grace:g} s after {forwarder.killed}."
                mend = "Give a longer --grace, or smaller steps; complete checkpoints are intact."
                raise RankError(message("fsharding", text, mend=mend)) from error
            raise RankError(message("fsharding", text, [_reason(failure.message)])) from error
        except SignalException as error:
            raise KeyboardInterrupt from error
    return [results[rank] for rank in range(ranks)]


def _run_rank(init_method: str, fn: Callable[..., Any], *args: Any) -> Any:
    """The function that each rank runs."""
    os.environ[INIT_METHOD] = init_method
    return fn(*args)


def _variables(ranks: int) -> dict[str, str]:
    """The environment of ranks, besides what the user has set."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "KINETO_LOG_LEVEL": "6",  # or torch's profiler writes about its starts and stops
        **local_variables(),
    }
    # The launcher would share a TCP store of its own with the ranks, on every address.
    sharing = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**{name: value for name, value in wanted.items() if name not in os.environ}, **sharing}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None]:
    """Sets variables for the processes that are started inside."""
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


class _Forwarder:
    """Sends signals of this process on to its ranks, inside the block, and kills those that are left after a while.

    A thread of its own does it: the main one starts ranks and waits for them. Ranks inherit that the signals are
    blocked, so one that comes while they start waits until they have handlers.

    Args:
        grace: seconds from the first signal until ranks are killed.

    Attributes:
        killed: the signal after which ranks were killed; empty before.
    """

    def __init__(self, grace: float) -> None:
        self._grace, self.killed = grace, ""

    def __enter__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._run, name="fsharding-forwarder", daemon=True)
        self._thread.start()
        # It unblocks SIGTERM when it starts, which is when the first rank does.
        resource_tracker.ensure_running()
        # Python writes the number of each signal that has a handler; this thread is the one that lets them through.
        self._wakeup = signal.set_wakeup_fd(self._write)
        self._before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._write, bytes([_END]))
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _run(self) -> None:
        asked: set[signal.Signals] = set()
        reported: set[tuple[int | None, signal.Signals]] = set()
        until = math.inf
        while True:
            # Ranks may start after the signal, and are looked for until the end.
            ready = select.select([self._read], [], [], _LOOK_S if asked else None)[0]
            numbers = os.read(self._read, 64) if ready else b""
            if _END in numbers:
                return
            asked |= {number for number in SIGNALS if number in numbers}
            if asked and until == math.inf and not self.killed:
                until = time.monotonic() + self._grace
            ranks = multiprocessing.active_children()
            for rank, number in ((rank.pid, number) for rank in ranks for number in asked):
                if (rank, number) not in reported:
                    reported.add((rank, number))
                    _send(rank, number)
            if time.monotonic() >= until:
                self.killed, until = ", ".join(sorted(number.name for number in asked)), math.inf
                for rank in ranks:
                    _send(rank.pid, signal.SIGKILL)


_END, _LOOK_S = 0, 0.1


def _send(rank: int | None, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        if rank is not None:
            os.kill(rank, number)


def _reason(recorded: Any) -> str:
    """The error of a rank in its own words, with the stack when it is none of ours."""
    if isinstance(recorded, str):
        try:
            recorded = json.loads(recorded)
        except json.JSONDecodeError:
            return str(recorded)
    stack, inner = "", recorded
    while isinstance(inner, dict) and "message" in inner:
        result = cast(dict[str, Any], inner)
        stack = cast(dict[str, str], result.get("extraInfo", {})).get("py_callstack", stack)
        inner = result["message"]
    text = str(inner)
    return text if text.partition(":")[0] in errors.__all__ else f"{text}\n{stack}".rstrip()
