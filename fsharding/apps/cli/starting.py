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

__all__ = ["hold", "hold_again", "quit_on_signals", "tell"]

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_held = False


def hold(args: Sequence[str]) -> None:
    """Block signals for the rest of this process if the command is `train`."""
    global _held
    if args and args[0] == "train":
        _held = True
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


def hold_again() -> None:
    """Block signals again where `hold` did: `preemption.watch` or the launcher unblocks them."""
    if _held:
        signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)


def tell(config: TrainConfig, text: str) -> None:
    """Print a line of progress on rank 0, unless only the options are printed."""
    if os.environ.get("RANK", "0") == "0" and not config.print_config:
        print(text, file=sys.stderr if config.json else sys.stdout, flush=True)
