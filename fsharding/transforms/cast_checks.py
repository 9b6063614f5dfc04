"""Refuse casts to 8 bits in a differentiated graph: autograd would round their gradient without a scale.

Guarantee: a differentiated cast in the first graph of a function is found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from fsharding.base import _compat
from fsharding.base.errors import TransformError, message

__all__ = ["refuse_bare_casts"]

_CAST = "ToCopyBackward0"
_UNIT = "_GatherUnitBackward"
_NEAR = 16
"""Nodes between a cast and the weight that it is of, at most, for the weight to be named."""

_looked_at: WeakKeyDictionary[Callable[..., Any], set[Hashable]] = WeakKeyDictionary()


def refuse_bare_casts(
    outputs: Sequence[Tensor] | Sequence[GradientEdge], fn: Callable[..., Any], part: Hashable = None
) -> None:
    """Refuse a graph that has differentiated casts to 8 bits; each part of a function is inspected once."""
    while callable(inner := getattr(fn, "__wrapped__", None)):
        fn = inner
    try:
        seen = _looked_at.setdefault(fn, set())
    except TypeError:  # one that cannot be referred to weakly, or has no hash
        return
    if part in seen:
        return
    casts = _casts([x.node if isinstance(x, GradientEdge) else x.grad_fn for x in outputs])
    if not casts:
        seen.add(part)
        return
    kinds = sorted({str(_compat.result_of(node)[0]).removeprefix("torch.") for node in casts})
    rule = f"differentiates casts to {', '.join(kinds)}, which round the gradient without a scale: 700 becomes 448, and"
    mend = (
        "Write w = fs.formats.quantize(w, fs.formats.TENSORWISE), then fs.formats.dequantize(w) or"
        " fs.ops.scaled_matmul(x, w, 1), whose gradient is not rounded; or cast w.detach(), which has no gradient."
    )
    raise TransformError(message(f"{rule} 1e-4 becomes 0.", map(_describe, casts), mend))


def _casts(roots: Sequence[Node | None]) -> list[Node]:
    todo = [node for node in roots if node is not None]
    seen = set[Node]()
    found = list[Node]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == _CAST and _compat.result_of(node)[0] in _BITS_8:
            found.append(node)
        todo += [before for before, _ in node.next_functions if before is not None]
    return found


_BITS_8 = {
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
}


def _describe(cast: Node) -> str:
    """A cast, with the gathered weight that is near it in the graph."""
    dtype, shape = _compat.result_of(cast)
    what = f"a tensor {list(shape)}"
    todo = [*cast.next_functions]
    for _ in range(_NEAR):
        if not todo:
            break
        node, number = todo.pop(0)
        if node is None:
            continue
        if node.name() == _UNIT and _compat.result_of(node, number)[1].numel() == shape.numel():
            unit: Any = node
            what = f"{unit.context.path_of(unit.unit.index[number])} {list(shape)}"
            break
        todo += node.next_functions
    return f"{what} is cast to {str(dtype).removeprefix('torch.')}"
