"""Signals before `fsharding train` has anything to save, and progress until the first step."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsharding.apps.cli.options import TrainConfig

__all__ = ["hold", "quit_on_signals", "tell"]

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_held = False


def hold(args: Sequence[str] = ()) -> None:
    """Block signals if the command of this process is `train`; a call without arguments blocks them again."""
    global _held
    _held = _held or "train" in args[:1]
    if _held:
        signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)


def quit_on_signals(status: int) -> None:
    """End this process at once on a signal, with `status`, or 130 for SIGINT."""
    if not _held or "RANK" in os.environ:  # other launched ranks may be running
        return

    def leave(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        os.write(2, f"fsharding train: ended by {name} before it began; nothing was written.\n".encode())
        os._exit(130 if number == signal.SIGINT else status)

    for number in _NUMBERS:
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)


def tell(config: TrainConfig, text: str) -> None:
    """Print a line of progress on rank 0, unless only the options are printed."""
    if os.environ.get("RANK", "0") == "0" and not config.print_config:
        print(text, file=sys.stderr if config.json else sys.stdout, flush=True)
