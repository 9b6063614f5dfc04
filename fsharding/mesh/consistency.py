"""Agreement: whether all ranks were given the same configuration; asked once, before anything else is sent.

Guarantee: ranks that disagree all raise the same text, and none of them has started what would hang or mix up bytes.
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
from fsharding.mesh.groups import meet_first
from fsharding.mesh.unit_order import by_value

__all__ = ["checksum", "compare", "differences", "digest", "facts_of", "gather_numbers", "refuse_differences"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_LONG = 1000
_LOADS = ("LOAD_DEREF", "LOAD_FAST", "LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST")
"""Instructions that end by loading a variable; by others, code may write it."""
_Step: TypeAlias = tuple[str, Any]
_ATTRIBUTE, _KEY = "attribute", "key"


def compare(
    facts: Mapping[str, str],
    *,
    ranks: Sequence[int],
    group: dist.ProcessGroup | None,
    device: str,
    ask: Callable[[int], list[int]] | None = None,
) -> dict[int, dict[str, str]]:
    """The facts of all ranks of a group by rank, where they differ; nothing where all have the same. Collective."""
    if group is None:
        return {}
    own = digest(facts)
    everyones = gather_numbers(own, len(ranks), group, device) if ask is None else ask(own)
    if all(other == own for other in everyones):
        return {}
    answers: list[Any] = [None] * len(ranks)
    with among(ranks):
        dist.all_gather_object(answers, dict(facts), group=group)
    return dict(zip(ranks, answers, strict=True))


def gather_numbers(own: int, size: int, group: dist.ProcessGroup, device: str) -> list[int]:
    """The numbers of all ranks of a group, in its order. Collective."""
    # They go by the host where the group has a backend for it: numbers on a device would wait for what it computes.
    where = "cpu" if backend_of(group, "cpu") else device
    term = torch.full((1,), own, dtype=torch.int64, device=where)
    result = term.expand(size).contiguous()  # of its own, where the other ranks are not there
    meet_first(group, where, _compat.group_timeout(group))
    with among(dist.get_process_group_ranks(group)):
        _compat.all_gather_single(result, term, group=group)
    return result.tolist()


def refuse_differences(facts: Mapping[int, Mapping[str, str]]) -> None:
    """Refuses ranks whose facts differ."""
    if rows := differences(facts):
        rule = "is set up differently on different ranks."
        raise ConfigError(message(rule, rows, "Start every rank with the same program and arguments."))


def digest(value: Any) -> int:
    """63 bits of a hash of what JSON can say, or of how it prints otherwise: the same on every machine."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def checksum(*rows: torch.Tensor) -> int:
    """63 bits of the sha256 of the bytes of a tensor, or of the rows of one: the same on every machine."""
    result = hashlib.sha256()
    for x in rows:
        result.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(result.digest()[:8], "big") >> 1


def differences(facts: Mapping[int, Mapping[str, str]], *, each: bool = False) -> list[str]:
    """One row for each fact that differs, the rarest value first."""
    result: dict[tuple[str, str], str] = {}
    for name in dict.fromkeys(name for own in facts.values() for name in own):
        having = by_value({rank: own.get(name, "nothing") for rank, own in facts.items()})
        if len(having) > 1:
            text = ", ".join(f"{_ranks(ranks)} {value}" for ranks, value in having)
            result.setdefault((name if each else name.rpartition(".")[2], text), name)
    return [f"{name}: {text}" for (_, text), name in result.items()]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"


# ------------------------------------------------------------------------------------------------------ values in words
def facts_of(name: str, value: Any) -> dict[str, str]:
    """Describes the parts of a value as facts: `{"optimizer.b1": "0.9", ...}`."""
    # Numbers, text and dtypes are told as they are; containers and dataclasses entry by entry, very long ones by their
    # length; a function by its name and by what it closes over, which is where an optimizer or a model has its
    # settings; anything else by its type alone, since a device, a file or a generator may well differ between ranks. Of
    # a dataclass, mapping or sequence that a function closes over, has as a default, or gets from a partial, only the
    # entries that its code reads are told, if it reads nothing else of it.
    result: dict[str, str] = {}
    _tell(result, name, value, ())
    return result


def _tell(facts: dict[str, str], name: str, value: Any, above: tuple[int, ...]) -> None:
    if isinstance(value, _PLAIN):
        facts[name] = repr(value)
        return
    facts[name] = _head(value)
    if id(value) not in above:
        for part, inner in _parts(value):
            _tell(facts, f"{name}.{part}", inner, (*above, id(value)))


def _head(value: Any) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__.replace("<locals>.", "")
    kind = type(value).__name__
    return f"{kind} of {len(value)}" if isinstance(value, tuple | list | Mapping) else kind


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The named parts of a value."""
    if isinstance(value, functools.partial):
        whole = cast("functools.partial[Any]", value)
        yield "func", whole.func
        yield from _bound(whole)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, tuple | list | Mapping) and len(cast("Sequence[Any]", value)) > _LONG:
        return
    elif isinstance(value, tuple | list):
        entries = cast("Sequence[Any]", value)
        yield from zip(getattr(entries, "_fields", map(str, range(len(entries)))), entries, strict=True)
    elif isinstance(value, Mapping):
        yield from ((str(key), x) for key, x in cast("Mapping[Any, Any]", value).items())
    elif callable(value):
        yield from _closed_over(value)


def _bound(fn: functools.partial[Any]) -> Iterator[tuple[str, Any]]:
    """The arguments that a partial gives, as its function reads them."""
    code = getattr(inspect.unwrap(fn.func), "__code__", None)
    try:
        given = inspect.signature(fn.func).bind_partial(*fn.args, **fn.keywords).arguments
    except (TypeError, ValueError):  # such as a function in C, without a signature
        code = None
        given = {**{str(i): x for i, x in enumerate(fn.args)}, **fn.keywords}
    for name, x in given.items():
        yield from ((name, x),) if code is None else _as_read(name, x, code)


def _closed_over(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Defaults of a function's arguments, and what it closes over, as it reads them; a cell may still be empty."""
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
        except ValueError:
            yield name, None


def _as_read(name: str, value: Any, code: CodeType) -> Iterator[tuple[str, Any]]:
    """What code reads of the value of a variable: entries of dataclasses, mappings and sequences, or all of it."""
    for path in dict.fromkeys(_paths_read(name, code)) if _entries(value) else ((),):
        part, at = name, value
        for step in path:
            entries = _entries(at)
            if step not in entries:
                break
            part, at = f"{part}.{step[1]}", entries[step]
        yield part, at


def _entries(value: Any) -> dict[_Step, Any]:
    """The entries of a value by the step that reads one."""
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
    """Chains of attributes and constant keys that code reads of a variable; the empty one where it uses the value."""
    steps = [*dis.get_instructions(code)]
    # Only DEREF reads a variable that is shared with an inner function; other loads hand its cell on.
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
    """The attributes and constant keys that instructions read one of the other, first to last."""
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
