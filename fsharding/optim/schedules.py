"""Learning rates as pure functions of the step: `schedule(count) -> float`.

In: an int, the number of updates so far. Out: a rate. A plain float stands for a constant one.
Law: a schedule has no state, so a resumed run has the rates of one that never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from fsharding.errors import ConfigError, message

__all__ = ["Schedule", "as_schedule", "constant", "linear", "warmup_cosine"]

Schedule: TypeAlias = Callable[[int], float]


def constant(value: float) -> Schedule:
    """The same rate at every step.

    Example:
        >>> rate = fs.optim.schedules.constant(0.1)
        >>> rate(0), rate(1000)
        (0.1, 0.1)
    """
    return lambda count: value


def linear(start: float, end: float, steps: int) -> Schedule:
    """From `start` to `end` in `steps` equal steps, `end` from there on.

    Raises:
        ConfigError: fewer than 1 step.

    Example:
        >>> rate = fs.optim.schedules.linear(0.0, 1.0, 4)
        >>> [rate(count) for count in range(6)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if steps < 1:
        mend = "Give 1 or more, or use fs.optim.schedules.constant."
        raise ConfigError(message("fs.optim.schedules.linear", f"got steps={steps}.", mend=mend))
    return lambda count: start + (end - start) * min(count / steps, 1.0)


def warmup_cosine(peak: float, warmup: int, total: int, *, end: float = 0.0) -> Schedule:
    """Linear up to `peak` in `warmup` steps, then half a cosine to `end` at `total` (Loshchilov & Hutter 2017).

    Raises:
        ConfigError: a negative number of steps, or a warm-up that goes on after `total`.

    Example:
        >>> rate = fs.optim.schedules.warmup_cosine(1.0, 2, 6)
        >>> [round(rate(count), 3) for count in range(7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if not 0 <= warmup <= total:
        mend = "Give a warm-up from 0 to total; fs.optim.schedules.linear warms up alone."
        text = f"got warmup={warmup} and total={total}."
        raise ConfigError(message("fs.optim.schedules.warmup_cosine", text, mend=mend))

    def rate(count: int) -> float:
        if count < warmup:
            return peak * (count + 1) / warmup
        share = min((count - warmup) / max(total - warmup, 1), 1.0)
        return end + (peak - end) * 0.5 * (1.0 + math.cos(math.pi * share))

    return rate


def as_schedule(rate: float | Schedule) -> Schedule:
    """A schedule from a schedule or a number.

    Example:
        >>> fs.optim.schedules.as_schedule(0.1)(5)
        0.1
    """
    return rate if callable(rate) else constant(rate)
