"""Deep-copy a module, including the functions stored on it, so that they refer to the copy.

Guarantee: a function stored on the copy reads no tensor of the original.
"""

from __future__ import annotations

import copy
import dis
import functools
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from fsharding.base import _compat
from fsharding.base.errors import ConfigError, message
from fsharding.sharding.leaf_names import joined

__all__ = ["copy_module"]

_OWN = ("_parameters", "_buffers", "_modules")


def copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module and rebind the functions stored on it."""
    try:
        own = (x for part in module.modules() for x in (*vars(part)["_buffers"].values(), *vars(part).values()))
        # Deep copies of fake tensors fail in torch.
        memo |= {id(x): x.detach().clone() for x in own if isinstance(x, Tensor) and _compat.is_fake(x)}
        # Afterward the memo maps the id of every copied object to its copy; `_Rebinding` uses it.
        with _compat.with_values():
            copied = copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        mend = "Detach tensors that the module keeps between calls, and remove attributes that cannot be copied."
        rows = [str(error).split(".  ")[0]]
        raise ConfigError(message(f"cannot copy {type(module).__name__}.", rows, mend)) from error
    rebinding = _Rebinding(memo)
    rows = list[str]()
    for path, part in copied.named_modules():
        for key, value in vars(part).items():
            rebinding.globals = []
            if key.endswith("_hooks"):
                value.update({number: rebinding(hook) for number, hook in value.items()})
            elif key not in _OWN:
                vars(part)[key] = rebinding(value)
            rows += [f"{joined(path, key)} is a function that reads {name!r}, a global" for name in rebinding.globals]
    if rows:
        rule = f"cannot copy {type(module).__name__}: functions on it read its layers from globals."
        mend = "Make each a method of its layer, with argument self: layer.forward = types.MethodType(forward, layer)."
        raise ConfigError(message(rule, rows, mend))
    return copied


class _Rebinding:
    """Maps values that refer to a module to equal values that refer to its copy."""

    # `globals`: names of the globals through which functions read the original; it can't be rebound.

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._done: dict[int, Any] = {}
        self.globals: list[str] = []

    def __call__(self, x: Any) -> Any:
        if isinstance(x, nn.Module | Tensor):
            return self._memo.get(id(x), x)
        if isinstance(x, types.MethodType):
            function = self(x.__func__)
            owner = self(x.__self__)
            return x if function is x.__func__ and owner is x.__self__ else types.MethodType(function, owner)
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, functools.partial):
            old = (x.func, x.args, x.keywords)
            new = tuple(map(self, old))
            return x if _same(old, new) else functools.partial(new[0], *new[1], **new[2])
        if type(x) in (list, tuple):
            items = [self(item) for item in x]
            return x if _same(x, items) else type(x)(items)
        if type(x) is dict:
            values = [self(value) for value in x.values()]
            return x if _same(x.values(), values) else dict(zip(x, values, strict=True))
        return x

    def _function(self, x: types.FunctionType) -> Any:
        """Rebind the closure and defaults of a function to the copy; return `x` itself if nothing changes."""
        if id(x) in self._done:
            return self._done[id(x)]
        names = _global_names(x.__code__)
        self.globals += [name for name in sorted(names) if self._is_original(x.__globals__.get(name))]
        filled = [cell for cell in x.__closure__ or () if _is_filled(cell)]
        cells = {id(cell): types.CellType() for cell in filled}
        closure = tuple(cells.get(id(cell), cell) for cell in x.__closure__ or ())
        new = types.FunctionType(x.__code__, x.__globals__, x.__name__, None, closure)
        self._done[id(x)] = new  # before its cells are filled: a function may be in its own closure
        old = [*(cell.cell_contents for cell in filled), x.__defaults__, x.__kwdefaults__]
        *contents, new.__defaults__, new.__kwdefaults__ = results = [self(value) for value in old]
        for cell, value in zip(filled, contents, strict=True):
            cells[id(cell)].cell_contents = value
        new.__qualname__ = x.__qualname__
        new.__module__ = x.__module__
        new.__doc__ = x.__doc__
        vars(new).update(vars(x))
        if all(a is b or b is new for a, b in zip(old, results, strict=True)):
            self._done[id(x)] = x
        return self._done[id(x)]

    def _is_original(self, x: Any) -> bool:
        owner = getattr(x, "__self__", x)
        return isinstance(owner, nn.Module | Tensor) and id(owner) in self._memo


def _same(old: Iterable[Any], new: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(old, new, strict=True))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # an empty cell, whose name is bound later
        return False


def _global_names(code: types.CodeType) -> set[str]:
    """Collect the globals that a function and its inner functions read."""
    names = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))
