"""Learning rates as pure functions of the number of updates: `schedule(count) -> rate`."""

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
    """Mark a custom schedule as one that also takes the count as a tensor, so that no update waits for the device.

    It is called with a 0-d float64 tensor and returns a number or a 0-d tensor. Others get an int that the host reads.

    Args:
        rate: A function of arithmetic and functions of torch, without an `if` on the count.

    Returns:
        The same function.

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
    """Return the rate at a count that is a tensor.

    Args:
        schedule: Any schedule; unless it is marked by `tensor_schedule`, the host reads the count.
        count: Number of updates so far, int64, 0-d.

    Returns:
        A number; or, from a `tensor_schedule`, a 0-d float64 tensor on the device of the count.

    Example:
        >>> fs.optim.schedules.rate_at(fs.optim.schedules.linear(0.0, 1.0, 4), torch.tensor(1))
        tensor(0.2500, dtype=torch.float64)
        >>> fs.optim.schedules.rate_at(lambda count: 0.1 if count < 10 else 0.01, torch.tensor(1))
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

    Returns:
        A context manager of a list of rates. Rates that are tensors are left out: comparing them would read the device.

    Example:
        >>> with fs.optim.schedules.noting_rates() as rates:
        ...     _ = fs.optim.schedules.rate_at(lambda count: 0.1 * count, torch.tensor(2))
        >>> rates
        [0.2]
    """
    rates: list[float] = []
    with scoped(_noted, rates):
        yield rates


def constant(value: float) -> Schedule:
    """Return a schedule with the same rate at every step.

    Args:
        value: The rate.

    Returns:
        A `tensor_schedule`.

    Example:
        >>> fs.optim.schedules.constant(0.1)(1000)
        0.1
    """
    return tensor_schedule(lambda count: value)


@public
def linear(start: float, end: float, steps: int) -> Schedule:
    """Interpolate linearly: `start + (end - start) * min(count / steps, 1)`, as `optax.linear_schedule`.

    Args:
        start: Rate at count 0.
        end: Rate from count `steps` on.
        steps: Number of equal steps between them, 1 or more.

    Returns:
        A `tensor_schedule`.

    Raises:
        ConfigError: `steps` is below 1.

    Example:
        >>> rate = fs.optim.schedules.linear(0.0, 1.0, 4)
        >>> [rate(count) for count in range(6)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if steps < 1:
        mend = "Pass 1 or more, or use fs.optim.schedules.constant."
        raise ConfigError(message(f"got steps={steps}.", mend=mend))
    return tensor_schedule(lambda count: start + (end - start) * _at_most_1(count / steps))


@public
def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, *, end: float = 0.0) -> Schedule:
    """Warm up linearly to a peak, then decay by half a cosine (SGDR, Loshchilov & Hutter 2017, arXiv:1608.03983).

    The rate is `peak * (count + 1) / warmup_steps` during warm-up: the first update has a rate above
    0, unlike `optax.warmup_cosine_decay_schedule` with `init_value=0`.

    Args:
        peak: Largest rate.
        warmup_steps: Number of warm-up steps; 0 starts at the peak.
        total_steps: Number of steps, warm-up included, after which the rate stays at `end`.
        end: Final rate.

    Returns:
        A `tensor_schedule`.

    Raises:
        ConfigError: `warmup_steps` is negative, or above `total_steps`.

    Example:
        >>> rate = fs.optim.schedules.warmup_cosine(1.0, 2, 6)
        >>> [round(rate(count), 3) for count in range(7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if not 0 <= warmup_steps <= total_steps:
        mend = "Pass warmup_steps from 0 to total_steps; fs.optim.schedules.linear only warms up."
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
    """Return a schedule for a number; a schedule is returned as it is.

    Args:
        rate: A number or a schedule.

    Returns:
        A schedule.

    Example:
        >>> fs.optim.schedules.as_schedule(0.1)(5)
        0.1
    """
    return rate if callable(rate) else constant(rate)
