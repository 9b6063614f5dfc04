"""Problems of a module that a user brings along, collected so that one error tells all of them.

Guarantee: who mends everything that an error lists does not get another one for the same call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsharding.base import _compat
from fsharding.base.errors import ConfigError, FshardingError, message
from fsharding.base.public import refuse

__all__ = ["FUNCTION", "Problems", "check_memory", "check_module", "check_units"]

FUNCTION = "fs.functionalize"


class Problems:
    """What is wrong with a module, collected so that one error tells all of it."""

    def __init__(self) -> None:
        self.errors: list[FshardingError] = []

    def add(self, kind: type[FshardingError], rule: str, rows: Sequence[str], mend: str) -> None:
        """Add an error for some rows, if there are any."""
        self.errors += [kind(message(rule, rows, mend))] if rows else []

    def refuse(self) -> None:
        """Raise what is wrong, if something is."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise ConfigError("\n".join(map(str, self.errors)))


def _is_plain(p: Tensor) -> bool:
    """Whether operators see a tensor as its values alone: fake tensors and named subclasses of Parameter are so."""
    kind: Any = type(p)
    plain: Any = Tensor
    own = kind.__torch_dispatch__ is not plain.__torch_dispatch__ or kind.__torch_function__ not in _PLAIN
    return not own or nn.parameter.is_lazy(p) or _compat.is_fake(p)


_PLAIN: Any = (Tensor.__torch_function__, nn.Parameter.__torch_function__)


def check_memory(module: nn.Module, problems: Problems) -> None:
    """Object to weights that share memory with other tensors of the module: here each leaf has its own."""
    own = {id(p): (name, p) for name, p in module.named_parameters()}
    buffers = {id(b): (name, b) for name, b in module.named_buffers()}
    spans: dict[int, list[tuple[int, int, str, bool]]] = {}
    for name, x in (buffers | own).values():
        if x.is_meta or _compat.is_fake(x) or not x.numel() or x.layout != torch.strided:
            continue
        start = int(x.storage_offset()) * x.element_size()
        end = start + int(sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()
        spans.setdefault(_compat.storage_id(x), []).append((start, end, name, x.requires_grad))
    rows: list[str] = []
    for several in spans.values():
        several.sort()
        for (_, end, first, a), (start, _, second, b) in itertools.pairwise(several):
            rows += [f"{first} and {second} are views of one memory"] if start < end and (a or b) else []
    mend = "Tie the parameter itself, head.weight = embed.weight, instead of its .data; or give each a .clone()."
    problems.add(ConfigError, "would train weights apart that share memory.", rows, mend)


def check_units(units: Any) -> None:
    """Refuse units that have no order, or that are no paths."""
    if units is not None and not isinstance(units, str | list | tuple):
        mend = "Give the paths of modules: units='layers.*', or units=('embed', 'layers.*', ('norm', 'head'))."
        raise refuse("units= as a path, or a list of paths", units, mend)


def check_module(module: Any) -> None:
    """Refuses what is no module, and modules with tensor subclasses for parameters, or without shapes yet."""
    if not isinstance(module, nn.Module):
        mend = "Make one, or write the functions of a Model yourself: see fs.models.Model."
        kind = f"class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise ConfigError(message(f"needs an nn.Module; got {kind}.", mend=mend))
    given = {name: p for name, p in module.named_parameters() if not _is_plain(p)}
    if given:
        rows = [f"{name} is {type(p).__name__}{'' if p.requires_grad else ', frozen'}" for name, p in given.items()]
        mend = (
            "Give the module plain parameters: layer.weight = nn.Parameter(layer.weight.dequantize()), or"
            " .full_tensor() for a DTensor. Weights in few bits are formats of a precision, fs.Precision(compute=...)."
        )
        rule = "takes plain parameters; a tensor subclass would become a dense tensor, and lose its own operators."
        raise ConfigError(message(rule, rows, mend))
    lazy = [name for name, x in (*module.named_parameters(), *module.named_buffers()) if nn.parameter.is_lazy(x)]
    if lazy:
        raise ConfigError(message("needs shapes.", lazy, "Call the module once, with inputs as they will be."))
