"""Signals that reach `fsharding train` before there is anything to save, and what it says until the first step.

In: SIGTERM, SIGUSR1 or SIGINT while the command reads its options, imports torch and checks its configuration. Out: the
exit status that was asked for, at once. Until the options say which, signals are blocked; once a run or its launcher
has begun they are blocked again, and `preemption.watch` or the launcher unblocks them.
Guarantee: nothing is imported here but the standard library, so that signals are blocked within milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsharding.apps.cli.options import TrainConfig

__all__ = ["hold", "hold_again", "quit_on_signals", "tell"]

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_held = False


def hold(args: Sequence[str]) -> None:
    """Block signals if a command has a use for them, for the rest of this process."""
    global _held
    if args and args[0] == "train":
        _held = True
        signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)


def quit_on_signals(status: int) -> None:
    """Have signals end this process at once: nothing has begun.

    Does nothing without `hold`, or under a launcher, whose other ranks may have begun.

    Args:
        status: for SIGTERM and SIGUSR1; SIGINT ends with 130.
    """
    if not _held or "RANK" in os.environ:
        return

    def leave(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        os.write(2, f"fsharding train: ended by {name} before it began; nothing was written.\n".encode())
        os._exit(130 if number == signal.SIGINT else status)

    for number in _NUMBERS:
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)


def hold_again() -> None:
    """Block signals again where `hold` did: a run begins, which handles them itself."""
    if _held:
        signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)


def tell(config: TrainConfig, text: str) -> None:
    """Print a line of progress on rank 0, unless the options alone are printed."""
    if os.environ.get("RANK", "0") == "0" and not config.print_config:
        print(text, file=sys.stderr if config.json else sys.stdout, flush=True)
