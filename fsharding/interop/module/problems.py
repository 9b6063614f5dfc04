"""Problems of a module that a user brings along, collected so that one error tells all of them.

In: rows that describe what does not fit. Out: errors that are not raised yet; or one that is, with all their texts.
Guarantee: who mends everything that an error lists does not get another one for the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fsharding.base.errors import ConfigError, FshardingError, message

__all__ = ["FUNCTION", "check_module", "problem", "refuse_all"]

FUNCTION = "fs.functionalize"


def problem(kind: type[FshardingError], rule: str, rows: Sequence[str], mend: str) -> list[FshardingError]:
    """An error for some rows, if there are any."""
    return [kind(message(rule, rows, mend))] if rows else []


def refuse_all(problems: Sequence[FshardingError]) -> None:
    """Raises what is wrong, if something is.

    Raises:
        FshardingError: the only problem, as it is.
        ConfigError: several problems, one after the other.
    """
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError("\n".join(str(each) for each in problems))


def check_module(module: Any) -> None:
    """Refuses what is no module, and modules whose shapes are not known yet.

    Raises:
        ConfigError: it is one of these; all parameters and buffers without shapes are listed.
    """
    if not isinstance(module, nn.Module):
        mend = "Make one, or write the functions of a Model yourself: see fs.models.Model."
        kind = f"class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise ConfigError(message(f"needs an nn.Module; got {kind}.", mend=mend))
    lazy = [name for name, x in (*module.named_parameters(), *module.named_buffers()) if nn.parameter.is_lazy(x)]
    if lazy:
        raise ConfigError(message("needs shapes.", lazy, "Call the module once, with inputs as they will be."))
