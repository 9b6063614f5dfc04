"""Checks of settings when an optimizer is made."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch

from fsharding.base.dtypes import FLOATS
from fsharding.base.errors import ConfigError, message
from fsharding.base.public import kind_of, without_parameters
from fsharding.optim.schedules import Schedule

__all__ = ["ABOVE_0", "BELOW_1", "FROM_0", "FROM_1", "TO_1", "Needs", "check_dtype", "check_settings"]


class Needs(NamedTuple):
    """A condition on a number, in words and as a test."""

    text: str
    holds: Callable[[Any], bool]


FROM_0 = Needs("a finite number from 0", lambda x: 0 <= x < math.inf)  # learning rates, weight decay, eps
ABOVE_0 = Needs("a number above 0", lambda x: x > 0)  # bounds; infinity means no bound
FROM_1 = Needs("an integer from 1", lambda x: x >= 1 and float(x).is_integer())
# Decay rates of moments: bias correction divides by 1 - decay.
BELOW_1 = Needs("a number from 0, below 1", lambda x: 0 <= x < 1)
TO_1 = Needs("a number from 0 to 1", lambda x: 0 <= x <= 1)


def check_settings(*groups: tuple[Needs, Mapping[str, Any]]) -> None:
    """Refuse numbers that violate their condition, and callables that aren't schedules; list all of them."""
    given = {name: value for _, values in groups for name, value in values.items()}
    if uncalled := [f"{name}: {why}" for name, value in given.items() if (why := _why_not_schedule(value))]:
        mend = "Make the schedule first, such as fs.optim.schedules.warmup_cosine(3e-4, 9, 99), and pass that."
        rule = "takes a schedule as a function of the number of updates alone."
        raise ConfigError(message(rule, uncalled, mend))
    rows = [
        f"{name}: {value!r}, needs {needs.text}"
        for needs, values in groups
        for name, value in values.items()
        if not callable(value) and not (isinstance(value, Real) and needs.holds(value))
    ]
    if rows:
        rate = given.get("learning_rate")
        if isinstance(rate, Iterable) and not isinstance(rate, str | torch.Tensor):
            raise without_parameters()
        raise ConfigError(message("cannot use these settings.", rows, "Pass numbers in these ranges."))


def _why_not_schedule(x: Any) -> str:
    """Return why a callable isn't a schedule; "" for a schedule, and for anything that can't be called."""
    if isinstance(x, type):
        return f"the class {x.__name__}, not an instance: {x.__name__}(...)"
    if not callable(x):
        return f"{kind_of(x)}, which sets the rate of a torch.optim optimizer" if hasattr(x, "get_last_lr") else ""
    try:
        signature = inspect.signature(x)
        signature.bind(0)
    except TypeError as error:
        return f"{getattr(x, '__name__', type(x).__name__)}, which cannot be called with a count: {error}"
    except ValueError:  # a callable without a signature
        return ""
    makes_one = signature.return_annotation in ("Schedule", Schedule)
    return f"{x.__name__}, which makes a schedule: {x.__name__}(...)" if makes_one else ""


def check_dtype(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype, or refuse one that kernels lack. None leaves it to the layout."""
    if dtype is not None and dtype not in FLOATS:
        mend = f"Use one of {', '.join(map(str, FLOATS))}, or None for the layout's dtype."
        raise ConfigError(message(f"got {name}={dtype!r}.", mend=mend))
    return dtype
