"""Preemption: a signal on one rank, or a deadline, as one bit that every rank has after the same step.

Guarantee: ranks that step together are told after the same step, and no number of the step depends on the bit.
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

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send before they kill: SIGTERM, and SIGUSR1 where one asks Slurm for it."""


class Watch:
    """The stop request that this rank has received inside `watch`.

    Attributes:
        received: the signal that came last; None before any.
        deadline: seconds since 1970; None without one.
        margin: how long before the deadline the bit is set; may be changed as steps and saves are measured.

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
        """Whether this rank wants to stop: a signal has come, or the deadline is near. Once true, always true."""
        if self.deadline is not None and not self._near:
            self._near = time.time() >= self.deadline - self.margin.total_seconds()
        return self.received is not None or self._near

    def reason(self) -> str:
        """Why this rank wants to stop, in words."""
        if self.received is not None:
            return self.received.name
        if self._near and self.deadline is not None:
            return f"the deadline at {datetime.fromtimestamp(self.deadline):%Y-%m-%d %H:%M:%S}"
        return "another rank was told to"

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: set a flag, since Python calls this between any two instructions.

        Raises:
            KeyboardInterrupt: SIGINT for the second time. Under a launcher, which may have forwarded the first one, the
                launcher decides.
        """
        if number == signal.SIGINT and not under_launcher():
            if self.received is signal.SIGINT:
                raise KeyboardInterrupt
            announce()
        self.received = signal.Signals(number)


def announce() -> None:
    """Tell the user that a first SIGINT was noticed. Writes as a handler may."""
    os.write(2, b"\nSIGINT: saves and ends after the step under way; a second one ends at once, without saving.\n")


_active: Watch | None = None
_agreed: bool | Tensor = False
"""Whether ranks of the last sum want to stop, the same on all ranks of its mesh. A tensor until it is asked for."""


@public
def watch(
    signals: Sequence[signal.Signals] = SIGNALS,
    *,
    deadline: datetime | timedelta | None = None,
    margin: timedelta = timedelta(0),
) -> AbstractContextManager[Watch]:
    """Takes signals as the wish to stop after a step, until the `with` block ends; then the handlers before are back.

    Enter it on every rank, in the main thread. A signal, the first or a later one, interrupts nothing: a save, an
    evaluation or a compilation that is under way goes on, and the next step carries the bit. Signals that were blocked
    are let through inside. SIGINT stays `KeyboardInterrupt` unless it is listed; then the second one is.

    Args:
        signals: which; empty for a deadline alone.
        deadline: when this process has to be gone, or after how long. A time without a zone is local.
        margin: how long before the deadline to ask: longer than a step and a save.

    Returns:
        A `Watch`, whose `margin` may be changed and whose `reason()` says what came.

    Raises:
        ArgumentError: it is not the main thread, which alone can have handlers; it is open already; or a deadline of
            another kind, or something that is no signal or cannot be handled.

    Example:
        >>> import signal
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> with fs.preemption.watch() as watch:
        ...     for step in range(1000):
        ...         signal.raise_signal(signal.SIGTERM)  # as a scheduler does that wants its machines back
        ...         if fs.preemption.requested(mesh):  # without a mesh after a train step, which asks all ranks
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
        mend = "Open it in the main thread, or give signals=() and a deadline."
        raise ArgumentError(message("is opened in a thread without signals.", mend=mend))
    if wrong := [x for x in signals if not isinstance(x, signal.Signals) or x in (signal.SIGKILL, signal.SIGSTOP)]:
        mend = "Give some of signal.Signals, such as signal.SIGTERM; SIGKILL and SIGSTOP reach no handler."
        raise refuse("signals that can be handled", wrong[0], mend)
    when = datetime.now() + deadline if isinstance(deadline, timedelta) else deadline
    return _watching(Watch(None if when is None else when.timestamp(), margin), signals)


@contextmanager
def handling(signals: Collection[signal.Signals], handle: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """Handle signals in this block, blocked ones too; the handlers and the mask from before are back after it."""
    before = {number: signal.signal(number, handle) for number in signals}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    try:
        yield
    finally:
        # Blocked before unhandled: what was saved, or the result, stands, and a signal of this moment changes nothing.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            # None: not set from Python, so that Python cannot set it again.
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
    """Whether to save and stop: the same on all ranks of a mesh, because it is what their last step's sum said.

    It changes inside collective calls only, a train step or `requested(mesh)`: what comes in between shows after the
    next one. So all ranks leave a loop over steps after the same one. A single process agrees with itself and
    sees its own signals and deadline at once. Outside of `watch` a rank has no wish of its own, and hears the others'.

    Args:
        mesh: asks all its ranks now. Collective; for loops without train steps, such as an evaluation.

    Raises:
        RankError: with a mesh: another rank is gone, or does not answer within the timeout of the mesh.

    Example:
        >>> import signal
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> with fs.preemption.watch():
        ...     signal.raise_signal(signal.SIGUSR1)
        ...     fs.preemption.requested(mesh)
        True
        >>> fs.preemption.requested(mesh)  # outside of watch a rank has no wish
        False
    """
    global _agreed
    if mesh is not None:
        with naming_lost("fs.preemption.requested", mesh):
            ranks, device = everyone(mesh), getattr(mesh, "device_type", "cpu")
            wish = pending()
            if ranks.process_group is not None:
                wish = any(gather_numbers(int(wish), ranks.size, ranks.process_group, device))
            _agreed = wish
    elif isinstance(_agreed, Tensor):
        _agreed = bool(_agreed)
    return _agreed is True or (world_size() == 1 and pending())


def pending() -> bool:
    """Whether this rank wants to stop; `requested` says it of all ranks.

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
    """Ends a step: `requested` says from here whether any rank wanted to stop.

    Args:
        count: of the ranks that do, 0-d, summed over all ranks that stepped together.

    Example:
        >>> for count in (1, 0):  # one rank wants to stop, then none
        ...     fs.preemption.agree(torch.tensor(count))
        ...     fs.preemption.requested()
        True
        False
    """
    global _agreed
    # Read on request, so that a step does not wait for a device.
    _agreed = count > 0


# ------------------------------------------------------------------------------------------------------------ deadlines
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?")
_UNITS = ("days", "hours", "minutes", "seconds")


@public
def parse_deadline(text: str) -> datetime:
    """Reads a deadline as the command line takes it.

    Args:
        text: how long from now, such as `3h50m`, `2d`, `90s` or `5400`, which are seconds; a time, such as
            `2030-01-31T18:00`; or `slurm`, the end of the job that Slurm tells in `SLURM_JOB_END_TIME`.

    Raises:
        ConfigError: none of these, or Slurm tells no end.

    Example:
        >>> fs.preemption.parse_deadline("2030-01-31T18:00")
        datetime.datetime(2030, 1, 31, 18, 0)
        >>> fs.preemption.parse_deadline("3h50m") > fs.preemption.parse_deadline("3h")
        True
    """
    return read_deadline(text)


def read_deadline(text: str) -> datetime:
    """Read a deadline for a caller that has another public name, such as an option of the command line."""
    if text == "slurm":
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        if not end.isdecimal():
            rule = f"finds no end of the job: SLURM_JOB_END_TIME is {end!r}."
            raise ConfigError(message(rule, mend="Give the deadline as a duration, such as 3h50m."))
        return datetime.fromtimestamp(int(end))
    result = _DURATION.fullmatch(text)
    try:
        if result is not None and text:
            return datetime.now() + timedelta(**dict(zip(_UNITS, map(float, result.groups("0")), strict=True)))
        return datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        mend = "Write 3h50m, a number of seconds, a time such as 2030-01-31T18:00, or slurm."
        raise ConfigError(message(f"cannot read the deadline {text!r}.", mend=mend)) from error
