"""Learning rates as pure functions of the number of updates: `schedule(count) -> float`."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from fsharding.base.errors import ConfigError, message
from fsharding.base.public import public
from fsharding.base.scoped import scoped

__all__ = [
    "Schedule", "as_schedule", "constant", "linear", "noting_rates", "rate_at", "tensor_schedule", "warmup_cosine",
]  # fmt: skip

Schedule: TypeAlias = Callable[[int], float]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_TAKES_TENSORS = "takes_tensors"
_noted: ContextVar[list[float] | None] = ContextVar("noted rates", default=None)


def tensor_schedule(rate: _Function) -> _Function:
    """Marks a schedule of one's own as one that also takes the count as a tensor, so that no update reads it.

    An optimizer calls it with a float64 of no dims, and takes what it returns: a number, or a 0-d tensor. A schedule
    without this mark gets an int, for which the host waits until the device has counted the last update.

    Args:
        rate: a function of arithmetic and functions of torch, without an `if` on the count.

    Returns:
        The function itself.

    Example:
        >>> @fs.optim.schedules.tensor_schedule
        ... def inverse_root(count):
        ...     return 0.01 * (1 + count) ** -0.5
        >>> inverse_root(3), inverse_root(torch.tensor(3.0, dtype=torch.float64)).item()
        (0.005, 0.005)
    """
    setattr(rate, _TAKES_TENSORS, True)
    return rate


def rate_at(schedule: Schedule, count: Tensor) -> float | Tensor:
    """The rate at a count that is a tensor: a number, or float64 of no dims on the device of the count.

    Args:
        schedule: of any kind; one that is not marked as a `tensor_schedule` reads the count.
        count: of updates so far, int64, 0-d.

    Example:
        >>> from fsharding.optim import schedules
        >>> schedules.rate_at(schedules.linear(0.0, 1.0, 4), torch.tensor(1))
        tensor(0.2500, dtype=torch.float64)
        >>> schedules.rate_at(lambda count: 0.1 if count < 10 else 0.01, torch.tensor(1))
        0.1
    """
    if getattr(schedule, _TAKES_TENSORS, False):
        of_tensor: Callable[[Tensor], Any] = schedule  # pyright: ignore[reportAssignmentType]
        return of_tensor(count.double())
    rate = schedule(int(count))
    noted = _noted.get()
    if noted is not None and not isinstance(rate, Tensor):  # Comparing a tensor would read the device.
        noted.append(rate)
    return rate


@contextmanager
def noting_rates() -> Generator[list[float]]:
    """Collect the rates that the host computes in the block, in order.

    Example:
        >>> from fsharding.optim import schedules
        >>> with schedules.noting_rates() as rates:
        ...     _ = schedules.rate_at(lambda count: 0.1 * count, torch.tensor(2))
        >>> rates
        [0.2]
    """
    rates: list[float] = []
    with scoped(_noted, rates):
        yield rates


def constant(value: float) -> Schedule:
    """The same rate at every step.

    Example:
        >>> rate = fs.optim.schedules.constant(0.1)
        >>> rate(0), rate(1000)
        (0.1, 0.1)
    """
    return tensor_schedule(lambda count: value)


@public
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
        raise ConfigError(message(f"got steps={steps}.", mend=mend))
    return tensor_schedule(lambda count: start + (end - start) * _at_most_1(count / steps))


@public
def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, *, end: float = 0.0) -> Schedule:
    """Linear up to `peak` in `warmup_steps`, then half a cosine to `end` at `total_steps` (Loshchilov & Hutter 2017).

    Raises:
        ConfigError: a negative number of steps, or more than `total_steps` of warm-up.

    Example:
        >>> rate = fs.optim.schedules.warmup_cosine(1.0, 2, 6)
        >>> [round(rate(count), 3) for count in range(7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if not 0 <= warmup_steps <= total_steps:
        mend = "Give a warm-up from 0 to total_steps; fs.optim.schedules.linear warms up alone."
        text = f"got warmup_steps={warmup_steps} and total_steps={total_steps}."
        raise ConfigError(message(text, mend=mend))

    @tensor_schedule
    def rate(count: Any) -> Any:
        rising = peak * (count + 1) / max(warmup_steps, 1)
        angle = math.pi * _at_most_1((count - warmup_steps) / max(total_steps - warmup_steps, 1))
        if isinstance(count, Tensor):
            falling = end + (peak - end) * 0.5 * (1.0 + torch.cos(angle))
            return torch.where(count < warmup_steps, rising, falling)
        return rising if count < warmup_steps else end + (peak - end) * 0.5 * (1.0 + math.cos(angle))

    return rate


def _at_most_1(share: Any) -> Any:
    return share.clamp(max=1.0) if isinstance(share, Tensor) else min(share, 1.0)


def as_schedule(rate: float | Schedule) -> Schedule:
    """A schedule from a schedule or a number.

    Example:
        >>> fs.optim.schedules.as_schedule(0.1)(5)
        0.1
    """
    return rate if callable(rate) else constant(rate)
