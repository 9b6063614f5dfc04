"""Compare the configuration of all ranks, before a difference could hang them or mix up bytes.

Ranks that differ all raise the same error.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist

from fsharding.base import _compat
from fsharding.base.errors import ConfigError, message
from fsharding.mesh.backends import backend_of
from fsharding.mesh.failures import among
from fsharding.mesh.groups import Group, meet_first
from fsharding.mesh.unit_order import unlike_facts

__all__ = ["checksum", "compare", "differences", "digest", "facts_of", "gather_numbers", "refuse_differences"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_LONG = 1000
_LOADS = ("LOAD_DEREF", "LOAD_FAST", "LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST")
"""Instructions that load a variable last; others may also write it."""
_Step: TypeAlias = tuple[str, Any]
_ATTRIBUTE, _KEY = "attribute", "key"


def compare(
    facts: Mapping[str, str], group: Group, device_type: str, *, ask: Callable[[int], list[int]] | None = None
) -> dict[int, dict[str, str]]:
    """Return the facts of all ranks of a group if any differ, else nothing. Collective."""
    if group.process_group is None:
        return {}
    own = digest(facts)
    everyones = gather_numbers(own, group, device_type) if ask is None else ask(own)
    if all(other == own for other in everyones):
        return {}
    answers: list[Any] = [None] * group.size
    with among(group.ranks):
        dist.all_gather_object(answers, dict(facts), group=group.process_group)
    return {rank: answers[place] for rank, place in zip(group.ranks, group.order, strict=True)}


def gather_numbers(own: int, group: Group, device_type: str) -> list[int]:
    """All-gather an int64 of each rank of a group, in the order of its members. Collective."""
    process_group = group.process_group
    if process_group is None:
        return [own]
    # On the host if the group has a backend for it: on a device, the numbers would wait for its kernels.
    where = "cpu" if backend_of(process_group, "cpu") else device_type
    term = torch.full((1,), own, dtype=torch.int64, device=where)
    result = term.expand(group.size).contiguous()  # fake ranks leave this rank's number in place of theirs
    meet_first(process_group, where)
    with among(sorted(group.ranks)):
        _compat.all_gather_single(result, term, group=process_group)
    numbers = result.tolist()
    return [numbers[place] for place in group.order]


def refuse_differences(facts: Mapping[int, Mapping[str, str]]) -> None:
    """Raise if the facts of ranks differ."""
    if rows := differences(facts):
        rule = "is set up differently on different ranks."
        raise ConfigError(message(rule, rows, "Start every rank with the same program and arguments."))


def digest(value: Any) -> int:
    """Hash the JSON of a value, with `repr` of other objects, to 63 bits: the same on every machine."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def checksum(*rows: torch.Tensor) -> int:
    """Hash the bytes of tensors to 63 bits: the same on every machine, and however rows are grouped."""
    result = hashlib.sha256()
    for x in rows:
        result.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(result.digest()[:8], "big") >> 1


def differences(facts: Mapping[int, Mapping[str, str]], *, each: bool = False) -> list[str]:
    """Word each fact that differs, the rarest value first."""
    result: dict[tuple[str, str], str] = {}
    for name, having in unlike_facts(facts):
        text = ", ".join(f"{_ranks(ranks)} {value}" for ranks, value in having)
        result.setdefault((name if each else name.rpartition(".")[2], text), name)
    return [f"{name}: {text}" for (_, text), name in result.items()]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"


# ------------------------------------------------------------------------------------------------------ values in words
def facts_of(name: str, value: Any) -> dict[str, str]:
    """Describe the parts of a value as facts: `{"optimizer.b1": "0.9", ...}`."""
    # Numbers, strings and dtypes by value. Containers and dataclasses entry by entry, very long ones by length. A
    # function by its name, defaults and closure, which hold the settings of optimizers and models. Other objects by
    # type only: a device, a file or a generator may differ between ranks. If a function's code reads only some entries
    # of a dataclass, mapping or sequence in its closure, defaults or partial arguments, only these count: a config may
    # also have fields, such as an output directory, that differ.
    result: dict[str, str] = {}
    _describe(result, name, value, ())
    return result


def _describe(facts: dict[str, str], name: str, value: Any, above: tuple[int, ...]) -> None:
    if isinstance(value, _PLAIN):
        facts[name] = repr(value)
        return
    facts[name] = _head(value)
    if id(value) not in above:
        for part, inner in _parts(value):
            _describe(facts, f"{name}.{part}", inner, (*above, id(value)))


def _head(value: Any) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__.replace("<locals>.", "")
    kind = type(value).__name__
    return f"{kind} of {len(value)}" if isinstance(value, tuple | list | Mapping) else kind


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the named parts of a value."""
    if isinstance(value, functools.partial):
        partial = cast("functools.partial[Any]", value)
        yield "func", partial.func
        yield from _bound(partial)
    elif isinstance(value, tuple | list | Mapping) and len(cast("Sequence[Any]", value)) > _LONG:
        return
    elif entries := _entries(value):
        # A NamedTuple has each entry twice, by field and by position.
        kinds = (_ATTRIBUTE,) if hasattr(value, "_fields") else (_ATTRIBUTE, _KEY)
        yield from ((str(key), x) for (kind, key), x in entries.items() if kind in kinds)
    elif callable(value):
        yield from _closed_over(value)


def _bound(fn: functools.partial[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a partial, as far as its function reads them."""
    code = getattr(inspect.unwrap(fn.func), "__code__", None)
    try:
        given = inspect.signature(fn.func).bind_partial(*fn.args, **fn.keywords).arguments
    except (TypeError, ValueError):  # such as a function in C, without a signature
        code = None
        given = {**{str(i): x for i, x in enumerate(fn.args)}, **fn.keywords}
    for name, x in given.items():
        yield from ((name, x),) if code is None else _as_read(name, x, code)


def _closed_over(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the defaults and closure of a function, as far as it reads them."""
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None)
    if not isinstance(code, CodeType):
        return
    defaults: tuple[Any, ...] = getattr(fn, "__defaults__", None) or ()
    named = dict(zip(code.co_varnames[: code.co_argcount][::-1], defaults[::-1], strict=False))
    for name, x in {**named, **(getattr(fn, "__kwdefaults__", None) or {})}.items():
        yield from _as_read(name, x, code)
    for name, cell in zip(code.co_freevars, getattr(fn, "__closure__", None) or (), strict=True):
        try:
            yield from _as_read(name, cell.cell_contents, code)
        except ValueError:  # an empty cell, of a variable that isn't assigned yet
            yield name, None


def _as_read(name: str, value: Any, code: CodeType) -> Iterator[tuple[str, Any]]:
    """Yield what code reads of a variable: some entries of a dataclass, mapping or sequence, or the value itself."""
    for path in dict.fromkeys(_paths_read(name, code)) if _entries(value) else ((),):
        part, at = name, value
        for step in path:
            entries = _entries(at)
            if step not in entries:
                break
            part, at = f"{part}.{step[1]}", entries[step]
        yield part, at


def _entries(value: Any) -> dict[_Step, Any]:
    """Return the entries of a value, by the step (attribute or key) that reads one."""
    if isinstance(value, Mapping):
        return {(_KEY, key): x for key, x in cast("Mapping[Any, Any]", value).items()}
    result: dict[_Step, Any] = {}
    if isinstance(value, tuple | list):
        entries = cast("Sequence[Any]", value)
        result = {(_KEY, i): x for i, x in enumerate(entries)}
        result |= {(_ATTRIBUTE, key): x for key, x in zip(getattr(entries, "_fields", ()), entries, strict=False)}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = {(_ATTRIBUTE, field.name): getattr(value, field.name) for field in dataclasses.fields(value)}
    return result


def _paths_read(name: str, code: CodeType) -> Iterator[tuple[_Step, ...]]:
    """Yield the chains of attributes and constant keys that code reads of a variable; () for the value itself."""
    steps = [*dis.get_instructions(code)]
    # Only DEREF instructions read a variable shared with an inner function; other loads pass its cell on.
    access = "DEREF" if name in (*code.co_freevars, *code.co_cellvars) else "FAST"
    for i, step in enumerate(steps):
        variables = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if access not in step.opname or name not in variables:
            continue
        is_read = step.opname in _LOADS and variables[-1] == name and variables.count(name) == 1
        yield tuple(_chain(steps[i + 1 :])) if is_read else ()
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and name in inner.co_freevars:
            yield from _paths_read(name, inner)


def _chain(steps: Sequence[dis.Instruction]) -> Iterator[_Step]:
    """Yield the attributes and constant keys of a chain such as `x.a["b"]`, first to last."""
    at = 0
    while at + 1 < len(steps):
        step, use = steps[at : at + 2]
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield _ATTRIBUTE, step.argval
            at += 1
        elif isinstance(step.argval, str | int) and _is_key_read(step, use):
            yield _KEY, step.argval
            at += 2
        else:
            return


def _is_key_read(step: dis.Instruction, use: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and use.opname.startswith("BINARY_") and use.argrepr in ("", "[]")
