"""Buffers and attributes of a module: how blocks differ in them, and which ones a forward has changed.

Guarantee: if there are no rows, the tensors of a module are unchanged.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsharding.base import _compat, _functorch
from fsharding.base.errors import ConfigError, message
from fsharding.sharding.leaf_names import joined
from fsharding.sharding.leaf_plan import kind_text
from fsharding.transforms.loss_checks import content_of

__all__ = ["Original", "Watch", "unlike_blocks"]

_OWN_INDEX = ("idx", "index", "layer_id", "layer_idx", "layer_index", "layer_number")
_SIMPLE = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None))


# -------------------------------------------------------------------------------------------------- in what they differ
def unlike_blocks(blocks: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the differences between blocks and the first one in types, buffers, numbers, flags and functions."""
    # The index of a block, such as `layer_idx`, may differ. Other objects are compared by type only.
    (first, template), *others = blocks.items()
    wanted = dict(_state(template))
    for path, block in others:
        for name, a, b in sorted(_differing(wanted, dict(_state(block))), key=lambda row: row[0]):
            alike = isinstance(a, Tensor) and isinstance(b, Tensor) and _shown(a) == _shown(b)
            values = " of other values" if alike else ""
            yield f"{name}: {_shown(a)} in {first}, {_shown(b)} in {path}{values}"


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the names whose values differ, with both values."""
    for name in {**before, **now}:
        a, b = before.get(name, _NOT_THERE), now.get(name, _NOT_THERE)
        if not _alike(a, b):
            yield name, a, b


class _Object(NamedTuple):
    """The identity of an object, without keeping it alive."""

    id: int
    name: str

    def __repr__(self) -> str:
        return self.name


_NOT_THERE = _Object(0, "not there")


def _state(block: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a block and of its submodules by name."""
    for path, child in block.named_modules(remove_duplicate=False):
        lead = f"{path}." if path else ""
        yield f"{lead}forward of", type(child)
        for key, value in vars(child).items():
            if key == "_buffers":
                yield from ((lead + name, x) for name, x in value.items())
            elif key.endswith("_hooks"):
                yield lead + key.strip("_"), [*value.values()]
            elif not key.startswith("_") and not (key in _OWN_INDEX and isinstance(value, int)):
                yield lead + key, value


def _alike(a: Any, b: Any, depth: int = 4) -> bool:
    """Whether two values are equal, as far as it can be checked."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _equal(a, b)
    if isinstance(a, type) or isinstance(b, type):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_alike(x, y, depth) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return [*a] == [*b] and _alike([*a.values()], [*b.values()], depth)
    if isinstance(a, _SIMPLE):
        return a == b or (a != a and b != b)
    if (code := getattr(a, "__code__", None)) is not None:
        return code is b.__code__ and (depth == 0 or _alike(_carried(a), _carried(b), depth - 1))
    if isinstance(a, functools.partial):
        return _alike((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), depth)
    return not isinstance(a, type(len)) or a == b  # builtin functions, such as torch.relu


def _carried(fn: Any) -> list[Any]:
    """Return the closure and the defaults of a function."""
    return [*map(content_of, fn.__closure__ or ()), *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal values; NaN equals NaN."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return a is b or torch.equal(a, b) or bool((a.isnan() & b.isnan() | (a == b)).all())


def _shown(x: Any) -> str:
    if isinstance(x, Tensor):
        return kind_text(x)
    if isinstance(x, type) or callable(x):
        return getattr(x, "__name__", type(x).__name__)
    return repr(x) if isinstance(x, (*_SIMPLE, list, tuple, dict)) else type(x).__name__


# ------------------------------------------------------------------------------------------- changes after the copy
class Original:
    """Modes, flags, attributes and buffers of a module when it was copied."""

    def __init__(self, module: nn.Module, copies: Callable[[], Mapping[str, Tensor]]) -> None:
        """Record the settings of a module."""
        self._module = module
        self._copies = copies
        self._settings = dict(_settings(module))

    def check(self) -> None:
        """Check that the module is unchanged, except for the values of parameters."""
        changed = _differing(self._settings, dict(_settings(self._module)))
        rows = [f"{name}: {_shown(a)} before, {_shown(b)} now" for name, a, b in changed]
        copies = self._copies()
        for name, x in self._module.named_buffers():
            copied = copies.get(name, x)
            known = not any(y.is_meta or _compat.is_fake(y) for y in (x, copied)) and x.device == copied.device
            rows += [f"{name}: different values than before"] if known and not _equal(x, copied) else []
        if rows:
            rule = f"got {type(self._module).__name__}, which was changed after fs.functionalize had copied it."
            mend = "Call fs.functionalize after the change. fs.evaluate needs no .eval(): it runs in eval mode."
            raise ConfigError(message(rule, rows, mend))


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a copy of a module keeps besides tensor values: simple values, and other objects by identity."""
    for path, part in module.named_modules():
        lead = f"{path}." if path else ""
        for key, value in vars(part).items():
            if key == "_parameters":
                for name, p in value.items():
                    kind = None if p is None else kind_text(p)
                    yield lead + name, kind if p is None or p.requires_grad else f"{kind}, frozen"
            elif key == "_modules":
                yield from ((lead + name, child) for name, child in value.items())
            elif key.endswith("_hooks"):
                yield from ((f"{lead}{key.strip('_')}.{number}", hook) for number, hook in value.items())
            elif not key.startswith("_"):
                yield from _simple(lead + key, value, 4)


def _simple(name: str, x: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the simple values inside an attribute by name, or its identity if there are none."""
    inside: Iterator[tuple[Any, Any]] | None = None
    if isinstance(x, list | tuple):
        inside = ((f"[{i}]", item) for i, item in enumerate(x))
    elif isinstance(x, dict):
        inside = ((f"[{key!r}]", value) for key, value in x.items())
    elif hasattr(x, "__dict__") and not isinstance(x, (nn.Module, Tensor, type, *_SIMPLE)) and not callable(x):
        inside = ((f".{key}", value) for key, value in vars(x).items())
    if inside is None or depth == 0:
        known = isinstance(x, (*_SIMPLE, type))
        yield name, x if known else _Object(id(x), getattr(x, "__name__", type(x).__name__))
        return
    yield name, type(x)
    for step, value in [*inside]:
        yield from _simple(name + step, value, depth - 1)


# ----------------------------------------------------------------------------------------------------- what has changed
@dataclass
class _Held:
    """A buffer or a tensor attribute of a module; `real` has the value while `value` is fake."""

    name: str
    home: dict[str, Any]
    key: str
    value: Tensor
    real: Tensor | None = None
    version: int = 0


class Watch:
    """Watches the tensors of a module other than parameters for changes and replacements."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """Watch submodules by path, each without its children."""
        self._homes = [(path, home) for path, m in modules.items() for home in (vars(m)["_buffers"], vars(m))]
        # Compare the entries of dicts by identity: a forward may replace a tensor without modifying one.
        self._before = [dict(home) for _, home in self._homes]
        self._held: dict[tuple[int, str], _Held] = {
            (id(home), key): _Held(joined(path, key), home, key, x)
            for path, home in self._homes
            for key, x in home.items()
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)
        }
        self._values: list[Tensor] | None = None
        self._is_new = True

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers and tensor attributes by name."""
        return {held.name: held.value if held.real is None else held.real for held in self._held.values()}

    def begin(self) -> None:
        """Record versions, and in the first call values too."""
        for held in self._held.values():
            held.version = _compat.version_of(held.value)
        # Comparing values costs a copy, and a forward does the same in each call: check one.
        if self._is_new and not _compat.makes_fakes():
            with _functorch.outside_transforms(), torch.no_grad():
                self._values = [held.value.clone() for held in self._held.values()]

    def end(self) -> list[str]:
        """List the changes since `begin`; restore replaced tensors, and remove new ones."""
        rows: dict[str, Tensor] = {}
        for i, (path, home) in enumerate(self._homes):
            before = self._before[i]
            if len(home) != len(before) or not all(map(operator.is_, home.values(), before.values())):
                rows |= self._put_back(path, home, before)
                self._before[i] = dict(home)
        # Versions count in-place writes, except through `.data` and NumPy, which only values show.
        for held in self._held.values():
            if _compat.version_of(held.value) != held.version:
                rows[held.name] = held.value
        if self._values is not None:
            with _functorch.outside_transforms(), torch.no_grad():
                for held, value in zip(self._held.values(), self._values, strict=True):
                    rows |= {} if _equal(held.value, value) else {held.name: held.value}
            self._is_new = False
        self._values = None
        order = {held.name: i for i, held in enumerate(self._held.values())}
        return [f"{name} is {_shown(rows[name])}" for name in sorted(rows, key=lambda n: order.get(n, len(order)))]

    def _put_back(self, path: str, home: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of a submodule that were replaced or added; undo it."""
        rows: dict[str, Tensor] = {}
        for key in {**before, **home}:
            now = home.get(key)
            held = self._held.get((id(home), key))
            if held is not None and now is not held.value:
                rows[held.name] = now if isinstance(now, Tensor) else held.value
                home[key] = held.value
            elif held is None and isinstance(now, Tensor) and now is not before.get(key):
                rows[joined(path, key)] = now
                home.pop(key) if key not in before else home.update({key: before[key]})
        return rows

    def move(self, device: torch.device) -> None:
        """Move the tensors to a device; under `FakeTensorMode` use copies without values."""
        for held in self._held.values():
            own = held.value if held.real is None else held.real
            held.real = own if _compat.makes_fakes() and not _compat.is_fake(own) else None
            held.value = held.home[held.key] = own.to(device) if held.real is None else _compat.copied(own).to(device)
        self._before = [dict(home) for _, home in self._homes]
