"""Preemption: a signal on one rank, or a deadline, stops all ranks after the same step.

Each step sums one bit over the ranks; no other number of the step depends on it.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from types import FrameType

from torch import Tensor

from fsharding.base.errors import ArgumentError, ConfigError, message
from fsharding.base.public import public, refuse
from fsharding.mesh.consistency import gather_numbers
from fsharding.mesh.device_mesh import Mesh, everyone, world_size
from fsharding.mesh.failures import naming_lost
from fsharding.mesh.rendezvous import under_launcher

__all__ = ["SIGNALS", "Watch", "agree", "parse_deadline", "pending", "requested", "watch"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what schedulers send before they kill: Slurm can be told to send SIGUSR1


class Watch:
    """The stop requests that this rank has received in a `watch` block.

    Attributes:
        received: The last signal, or None.
        deadline: Unix time in seconds, or None.
        margin: How long before the deadline to request a stop. You may change it as you measure steps and saves.

    Example:
        >>> from datetime import timedelta
        >>> with fs.preemption.watch(deadline=timedelta(hours=4)) as watch:
        ...     soon = watch.pending()
        ...     watch.margin = timedelta(hours=5)  # a save has turned out to be slow
        ...     soon, watch.pending()
        (False, True)
    """

    def __init__(self, deadline: float | None, margin: timedelta) -> None:
        self.received: signal.Signals | None = None
        self.deadline = deadline
        self.margin = margin
        self._near = False

    def pending(self) -> bool:
        """Return whether this rank requests a stop: it received a signal, or the deadline is near. It stays true."""
        if self.deadline is not None and not self._near:
            self._near = time.time() >= self.deadline - self.margin.total_seconds()
        return self.received is not None or self._near

    def reason(self) -> str:
        """Return why to stop, such as "SIGTERM"."""
        if self.received is not None:
            return self.received.name
        if self._near and self.deadline is not None:
            return f"the deadline at {datetime.fromtimestamp(self.deadline):%Y-%m-%d %H:%M:%S}"
        return "a stop request on a different rank"

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: set a flag only, because Python may call it between any two instructions.

        Args:
            number: Number of the signal.
            frame: Current frame, unused.

        Raises:
            KeyboardInterrupt: A second SIGINT, except under a launcher, which may have forwarded the first one.
        """
        if number == signal.SIGINT and not under_launcher():
            if self.received is signal.SIGINT:
                raise KeyboardInterrupt
            announce()
        self.received = signal.Signals(number)


def announce() -> None:
    """Acknowledge a first SIGINT, with a write that is safe in a signal handler."""
    os.write(2, b"\nSIGINT: saves and exits after this step; a second SIGINT exits immediately, without saving.\n")


_active: Watch | None = None
_agreed: bool | Tensor = False
"""Whether any rank of the last sum requested a stop; equal on all of them. A tensor until it is read."""


@public
def watch(
    signals: Sequence[signal.Signals] = SIGNALS,
    *,
    deadline: datetime | timedelta | None = None,
    margin: timedelta = timedelta(0),
) -> AbstractContextManager[Watch]:
    """Turn signals and a deadline into requests to stop after a step, until the `with` block ends.

    Enter it on every rank, in the main thread. Signals interrupt nothing: a save, an evaluation or a compilation
    finishes, and the next step passes the request to all ranks. Blocked signals are unblocked in the block. SIGINT
    raises `KeyboardInterrupt` as usual; if it is in `signals`, only the second one does. The previous handlers are
    restored at the end.

    Args:
        signals: Signals to handle; empty for a deadline only.
        deadline: When this process has to exit: a time, local if it has no time zone, or a duration from now.
        margin: How long before the deadline to request a stop; longer than a step and a save.

    Returns:
        A context manager that returns a `Watch`.

    Raises:
        ArgumentError: The thread isn't the main thread, a `watch` is already open, the deadline is neither a datetime
            nor a timedelta, or a signal can't be handled.

    Example:
        >>> import signal
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> with fs.preemption.watch() as watch:
        ...     for step in range(1000):
        ...         signal.raise_signal(signal.SIGTERM)  # as a scheduler does before it preempts a job
        ...         if fs.preemption.requested(mesh):  # requested() after a train step, which compares all ranks
        ...             break  # after fs.checkpoint.save(...)
        >>> step, watch.reason()
        (0, 'SIGTERM')
    """
    if not isinstance(deadline, datetime | timedelta | None):
        mend = 'Write datetime.timedelta(hours=4), or fs.preemption.parse_deadline("3h50m").'
        raise refuse("deadline= as a datetime or a timedelta", deadline, mend)
    if _active is not None:
        raise ArgumentError(message("is open already.", mend="Open it once, around the run."))
    if signals and threading.current_thread() is not threading.main_thread():
        mend = "Open it in the main thread, or pass signals=() and a deadline."
        raise ArgumentError(message("needs the main thread to handle signals.", mend=mend))
    if wrong := [x for x in signals if not isinstance(x, signal.Signals) or x in (signal.SIGKILL, signal.SIGSTOP)]:
        mend = "Pass signal.Signals such as signal.SIGTERM; SIGKILL and SIGSTOP cannot be handled."
        raise refuse("signals that can be handled", wrong[0], mend)
    when = datetime.now() + deadline if isinstance(deadline, timedelta) else deadline
    return _watching(Watch(None if when is None else when.timestamp(), margin), signals)


@contextmanager
def handling(signals: Collection[signal.Signals], handle: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """Handle signals in this block, also blocked ones; then restore the previous handlers and mask."""
    before = {number: signal.signal(number, handle) for number in signals}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    try:
        yield
    finally:
        # Restore the mask first: a signal that was blocked before must not reach the previous handler in between.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            # None is a handler that wasn't set from Python, which Python can't set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _watching(opened: Watch, signals: Sequence[signal.Signals]) -> Generator[Watch]:
    global _active, _agreed
    _active = opened
    _agreed = False
    try:
        with handling(signals, opened.note):
            yield opened
    finally:
        _active = None


@public
def requested(mesh: Mesh | None = None) -> bool:
    """Return whether to save and stop: the same on all ranks that step together.

    The result changes only in collective calls: a train step, or `requested(mesh)`. So all ranks leave a training loop
    after the same step. A single process sees its signals and its deadline immediately. A rank outside of `watch`
    requests no stop, but sees the requests of others.

    Args:
        mesh: Mesh whose ranks to compare now; then the call is collective. For loops without train steps, such as an
            evaluation.

    Returns:
        True if any rank requested a stop.

    Raises:
        RankError: With `mesh`: a rank has exited, or didn't answer before the timeout of the mesh.

    Example:
        >>> import signal
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> with fs.preemption.watch():
        ...     signal.raise_signal(signal.SIGUSR1)
        ...     fs.preemption.requested(mesh)
        True
        >>> fs.preemption.requested(mesh)  # outside of watch
        False
    """
    global _agreed
    if mesh is not None:
        with naming_lost("fs.preemption.requested", mesh):
            device_type = getattr(mesh, "device_type", "cpu")
            _agreed = any(gather_numbers(int(pending()), everyone(mesh), device_type))
    elif isinstance(_agreed, Tensor):
        _agreed = bool(_agreed)
    return _agreed is True or (world_size() == 1 and pending())


def pending() -> bool:
    """Return whether this rank requests a stop; `requested` combines all ranks.

    Returns:
        True after a signal, or near the deadline, inside `watch`.

    Example:
        >>> import signal
        >>> with fs.preemption.watch():
        ...     signal.raise_signal(signal.SIGTERM)
        ...     fs.preemption.pending()
        True
        >>> fs.preemption.pending()  # outside of watch
        False
    """
    return _active is not None and _active.pending()


def agree(count: Tensor) -> None:
    """Set what `requested` returns after a step; for custom step functions.

    Args:
        count: Number of ranks that request a stop, 0-d: `pending()` summed over all ranks that step together.

    Example:
        >>> for count in (1, 0):  # one rank requests a stop, then none
        ...     fs.preemption.agree(torch.tensor(count))
        ...     fs.preemption.requested()
        True
        False
    """
    global _agreed
    # `requested` reads the tensor, so that a step doesn't wait for a device.
    _agreed = count > 0


# ------------------------------------------------------------------------------------------------------------ deadlines
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?")
_UNITS = ("days", "hours", "minutes", "seconds")


@public
def parse_deadline(text: str) -> datetime:
    """Parse a deadline in the format of the command line.

    Args:
        text: Duration from now, such as `3h50m`, `2d`, `90s` or `5400` (seconds); a time, such as
            `2030-01-31T18:00`; or `slurm`, the job's end in `SLURM_JOB_END_TIME`.

    Returns:
        A local time without a time zone, unless `text` has one.

    Raises:
        ConfigError: The text has none of these formats, or Slurm hasn't set an end.

    Example:
        >>> fs.preemption.parse_deadline("2030-01-31T18:00")
        datetime.datetime(2030, 1, 31, 18, 0)
        >>> fs.preemption.parse_deadline("3h50m") > fs.preemption.parse_deadline("3h")
        True
    """
    return read_deadline(text)


def read_deadline(text: str) -> datetime:
    """Parse a deadline; errors name the calling function, such as an option of the command line."""
    if text == "slurm":
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        if not end.isdecimal():
            rule = f"cannot find the end of the job: SLURM_JOB_END_TIME is {end!r}."
            raise ConfigError(message(rule, mend="Pass the deadline as a duration, such as 3h50m."))
        return datetime.fromtimestamp(int(end))
    result = _DURATION.fullmatch(text)
    try:
        if result is not None and text:
            return datetime.now() + timedelta(**dict(zip(_UNITS, map(float, result.groups("0")), strict=True)))
        return datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        mend = "Write 3h50m, a number of seconds, a time such as 2030-01-31T18:00, or slurm."
        raise ConfigError(message(f"cannot read the deadline {text!r}.", mend=mend)) from error
