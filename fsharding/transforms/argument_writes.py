"""Refuse functions that write into their arguments, where a policy runs them on copies and runs them again in backward.

Guarantee: after a call without an error the arguments hold the same tensors, with the same values, as before.
"""

from __future__ import annotations

import re
import types
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, cast

from torch import Tensor

from fsharding.base import _compat, tree
from fsharding.base.calls import public_name
from fsharding.base.errors import TransformError, report
from fsharding.base.public import kind_of
from fsharding.mesh.device_mesh import Mesh
from fsharding.sharding.named_sharding import Local
from fsharding.transforms.loss_checks import names_of

__all__ = ["call_unwritten", "content_of"]

_MOST = 10_000  # objects that are looked at in one call; an argument may lead to a data set
_NOT_WALKED = (type, Mesh, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def call_unwritten(fn: Callable[..., Any], args: tuple[Any, ...], *, closure: bool = False) -> Any:
    """`fn(*args)`, which must not write into `args`, nor tensors into lists, dicts and sets that it closes over."""
    watched = [(name, x, True) for name, x in zip(names_of(fn, len(args)), args, strict=True)]
    cells = getattr(fn, "__closure__", None) or ()
    if closure and cells:
        held = zip(fn.__code__.co_freevars, map(content_of, cells), strict=True)
        watched += [(name, x, False) for name, x in held if isinstance(x, list | dict | set | deque)]
    before = _held(watched)
    out = fn(*args)
    after = _held(watched)
    rows = [f"{_shown(path)} is new: {kind_of(now)}" for path, (now, _) in after.items() if path not in before]
    for path, (was, version) in before.items():
        if path not in after:
            rows.append(f"{_shown(path)} is gone: {kind_of(was)}")
        elif (now := after[path][0]) is not was:
            rows.append(f"{_shown(path)} is another one: {kind_of(was)} before, {kind_of(now)} after")
        elif after[path][1] != version:
            rows.append(f"{_shown(path)} was changed in place: {kind_of(was)}")
    if rows:
        name = getattr(fn, "__name__", type(fn).__name__)
        caller = "fs.scan_units" if public_name() == "fs.scan_units" else "fs.remat"
        rule = f"{caller} recomputes {name} in backward, so what {name} writes into its arguments would be lost."
        mend = (
            "Return the value instead: return x, aux, or a new list, [*kept, aux]; fs.scan_units(..., has_aux=True)"
            " stacks what blocks return beside their carry. Write x = x * 2 instead of x.mul_(2). Under"
            " policy=fs.policies.save_except_gathered nothing is recomputed, and a block may write. Models of Hugging"
            " Face write into a cache of keys and values unless they are called with use_cache=False."
        )
        raise TransformError(report(rule, rows, mend))
    return out


def _shown(path: str) -> str:
    """A path without the identities of items of sets."""
    return re.sub(r"\{[0-9a-f]+\}", "{...}", path)


def content_of(cell: types.CellType) -> Any:
    """Return what a cell of a closure holds; None if nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _held(watched: Iterable[tuple[str, Any, bool]]) -> dict[str, tuple[Any, int]]:
    """What named values hold, by path: tensors anywhere, each with its version, and, if asked, other entries."""
    found: dict[str, tuple[Any, int]] = {}
    seen = set[int]()
    todo = deque(watched)
    for _ in range(_MOST):
        if not todo:
            break
        path, x, is_entry = todo.popleft()
        if isinstance(x, Local):
            x = x.value
        if isinstance(x, Tensor):
            found[path] = x, 0 if x.is_inference() else _compat.version_of(x)
            continue
        children = None if id(x) in seen else _children(x)
        seen.add(id(x))
        if children is None:
            if is_entry:
                found[path] = x, 0
            continue
        todo.extend((path + step, child, is_entry and not step.startswith(".")) for step, child in children)
    return found


def _children(x: Any) -> Iterable[tuple[str, Any]] | None:
    """What a container or an object holds; None for one that holds nothing."""
    if isinstance(x, dict):
        return [(f"[{key!r}]", value) for key, value in islice(cast("dict[Any, Any]", x).items(), _MOST)]
    if isinstance(x, list | tuple | deque):
        return [(f"[{i}]", item) for i, item in enumerate(islice(cast("Iterable[Any]", x), _MOST))]
    if isinstance(x, set | frozenset):
        # By identity: a set has no order of its own.
        return [(f"{{{id(item):x}}}", item) for item in islice(cast("Iterable[Any]", x), _MOST)]
    if isinstance(x, _NOT_WALKED):
        return None
    if type(x).__module__.startswith("fsharding."):
        # Its tensors alone: a quantized weight also has the context of its gathers, which other threads change.
        return [(f".{name}", child) for name, child in (tree.children(x) or {}).items()] or None
    own = {name for kind in type(x).__mro__ for name in vars(kind).get("__slots__", ())} | {*getattr(x, "__dict__", ())}
    return [(f".{name}", getattr(x, name)) for name in sorted(own) if hasattr(x, name)] or None
