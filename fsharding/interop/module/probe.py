"""Run a module's forward on the meta device with the shapes of one `tp` rank, to find roles that can't work.

Guarantee: a forward that slices or reduces column outputs in a way that a shard doesn't allow gets a row; a module
that can't run on the meta device gets none.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from fsharding.base import tree
from fsharding.interop.module.layers import Role
from fsharding.sharding import boxes

__all__ = ["unfit_roles"]


class _Cut(NamedTuple):
    """A tensor that will be sharded along a dim, which has the outputs of a column."""

    dim: int
    column: str  # path of the layer
    held: int  # outputs of one rank
    full: int  # outputs of the layer


_REDUCING = {
    "mean": 1, "sum": 1, "prod": 1, "amax": 1, "amin": 1, "max": 1, "min": 1, "argmax": 1, "argmin": 1, "var": 1,
    "std": 1, "var_mean": 1, "linalg_vector_norm": 2, "norm": 2, "_softmax": 1, "_log_softmax": 1, "logsumexp": 1,
    "cumsum": 1, "sort": 1, "topk": 2,
}  # fmt: skip
"""Operations over all elements of a dim, with the position of the argument `dim`."""

_LAST = {"sort", "topk"}
"""Operations whose default dim is the last one; for the others it is all dims."""

_NORMS = {"native_layer_norm", "_fused_rms_norm", "rms_norm"}
"""Operations whose second argument is the shape of the last dims, which they normalize over."""

_TAKING = {"slice": 1, "split": 2, "split_with_sizes": 2, "select": 1, "unbind": 1, "index_select": 1, "flip": 1}
"""Operations that select indices of a dim, with the position of the argument `dim`."""

_END = (1 << 63) - 1
"""Default end of a slice."""

_SAME = {"clone", "_to_copy", "detach", "alias", "contiguous"}
_VIEWS = {"view", "_unsafe_view", "reshape"}


def unfit_roles(module: nn.Module, roles: Mapping[str, Role], cut: Collection[str], tp: int) -> list[str]:
    """List why the forward of a module can't have its roles over `tp`: one row per layer, for the first equal block."""
    paths = {path for path in dict(module.named_modules()) if f"{path}.weight" in cut}
    regions = {path: role for path in paths if (role := roles.get(path)) in ("column", "row")}
    inputs = getattr(module, "dummy_inputs", None) if regions else None
    if not isinstance(inputs, Mapping):
        return []
    inputs = tree.map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, dict(inputs))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        # On the meta device, grouped products of experts support only bfloat16, and other modules may not.
        hollow = next(filter(None, (_tried(module, inputs, dtype) for dtype in (None, torch.bfloat16))), None)
        if hollow is None:
            return []
        following = _Following()
        rows = following.rows
        for path, part in hollow.named_modules():
            following.watch(path, part)
        layers: list[tuple[str, Any]] = [(path, hollow.get_submodule(path)) for path in regions]
        for path, layer in layers:
            if regions[path] == "column":
                layer.forward = functools.partial(_whole_column, layer, path, tp, following.cuts)
        with following:  # with full outputs: dims of heads are then longer than 1 and can be followed through views
            hollow(**inputs)
        # The second run has the shapes of one rank, with hooks and operators as in a step: torch checks the rest.
        for path, layer in layers:
            row = functools.partial(_row, layer, path, tp, rows)
            layer.forward = functools.partial(_column, layer, tp) if regions[path] == "column" else row
        try:
            if not rows:
                hollow(**inputs)
        except Exception as error:  # the first step would raise it without naming the layer
            rows += [] if rows else [f"{following.where()}: {type(error).__name__}: {str(error).splitlines()[0]}"]
    return rows


def _tried(module: nn.Module, inputs: dict[str, Any], dtype: torch.dtype | None) -> nn.Module | None:
    """Copy a module to the meta device and run it; None if it fails, for example because it reads values."""

    def hollow(x: Tensor) -> Tensor:
        new = torch.empty_like(x, device="meta", dtype=dtype if x.is_floating_point() else None)
        return nn.Parameter(new, requires_grad=False) if isinstance(x, nn.Parameter) else new

    own = {id(x): x for x in (*module.parameters(), *module.buffers())}
    copied = copy.deepcopy(module, {key: hollow(x) for key, x in own.items()})
    try:
        copied(**inputs)
    except Exception:  # whatever the module raises: its shapes are unknown then
        return None
    return copied


class _Following(TorchDispatchMode):
    """Follows the outputs of columns, and records operations that need more than a rank's shard."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[str] = []
        self.cuts: Any = WeakTensorKeyDictionary()
        self._inside: list[tuple[str, str]] = []
        self._reported: set[tuple[str, str]] = set()

    def watch(self, path: str, part: nn.Module) -> None:
        """Track the calls of a submodule."""
        here = path, type(part).__name__

        def leave(*_: Any) -> None:
            self._inside.pop()

        part.register_forward_pre_hook(lambda *_: self._inside.append(here))
        part.register_forward_hook(leave)

    def where(self) -> str:
        """Name the submodule that is running."""
        path, kind = self._inside[-1] if self._inside else ("", "")
        return f"{path} ({kind})" if path else "the module"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        followed = [(x, self.cuts[x]) for x in _tensors(args) if x in self.cuts]
        for x, cut in followed:
            if reason := _objection(name, x, cut, args, kwargs or {}):
                self._tell(cut, reason)
        result = func(*args, **(kwargs or {}))
        # Views have one input, and pointwise operations have inputs with equal shards: the first input is enough.
        if followed:
            x, cut = followed[0]
            for out in _tensors([result]):
                dim = _followed(name, func, x, cut.dim, out, args)
                if dim is not None:
                    self.cuts[out] = cut._replace(dim=dim)
        return result

    def _tell(self, cut: _Cut, reason: str) -> None:
        inner, kind = self._inside[-1] if self._inside else ("", "the module")
        who = kind if inner == cut.column.rpartition(".")[0] else f"{inner} ({kind})"
        known = ".".join("*" if part.isdecimal() else part for part in cut.column.split("."))
        if (known, reason) not in self._reported:
            self._reported.add((known, reason))
            held = f"and a rank has {cut.held} of its {cut.full} outputs"
            self.rows.append(f"{cut.column} has role 'column', {held}: {who} {reason}")


def _tensors(args: Any) -> list[Tensor]:
    flat = [y for x in args for y in (x if isinstance(x, list | tuple) else [x])]
    return [x for x in flat if isinstance(x, Tensor)]


def _dims(value: Any, ndim: int) -> set[int]:
    """Resolve the argument `dim`: None or an empty list means all dims; a tensor isn't a dim."""
    if isinstance(value, Tensor):
        return set()
    if value is None or (isinstance(value, list | tuple) and not value):
        return set(range(ndim))
    return {int(d) % ndim for d in (value if isinstance(value, list | tuple) else [value])}


def _objection(name: str, x: Tensor, cut: _Cut, args: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Explain why an operation needs more of a tensor than a rank's shard; None if it doesn't."""

    def argument(place: int, default: Any) -> Any:
        return kwargs.get("dim", args[place] if len(args) > place else default)

    all_or_last = -1 if name in _LAST else None
    if name in _REDUCING and cut.dim in _dims(argument(_REDUCING[name], all_or_last), x.ndim):
        return f"takes {name.strip('_').replace('linalg_vector_', '')} over all of them"
    if name in _NORMS and cut.dim >= x.ndim - len(args[1]):
        return "normalizes over all of them"
    if name in _TAKING and cut.dim in _dims(argument(_TAKING[name], 0), x.ndim):
        start, stop, step = (*args[2:5], *(0, _END, 1)[len(args[2:5]) :]) if name == "slice" else (None, None, None)
        is_all = step == 1 and not start and stop in (None, _END)
        return None if is_all else "selects some by index"
    return None


def _followed(name: str, func: Any, x: Tensor, dim: int, out: Tensor, args: Any) -> int | None:
    """Find the dim of an output that is sharded like a dim of an input; None if unknown."""
    if name in _VIEWS:
        return _viewed(tuple(x.shape), dim, tuple(out.shape))
    if name == "transpose":
        a, b = (int(d) % x.ndim for d in args[1:3])
        return {a: b, b: a}.get(dim, dim)
    if name == "t":
        return dim if x.ndim < 2 else 1 - dim
    if name == "permute":
        return [int(d) % x.ndim for d in args[1]].index(dim)
    if name == "unsqueeze":
        return dim + (int(args[1]) % (x.ndim + 1) <= dim)
    if name == "expand":
        return dim + out.ndim - x.ndim
    if name in ("select", "unbind"):
        removed = int(args[1] if len(args) > 1 else 0) % x.ndim
        return None if removed == dim else dim - (removed < dim)
    if name in ("slice", "split", "split_with_sizes", "cat"):
        return dim if out.shape[dim] == x.shape[dim] else None
    if name in _SAME or torch.Tag.pointwise in func.tags:
        dim += out.ndim - x.ndim
        return dim if out.shape[dim] == x.shape[dim - out.ndim + x.ndim] else None
    return None


def _viewed(before: tuple[int, ...], dim: int, after: tuple[int, ...]) -> int | None:
    """Find a dim after a view: the first dim with the same offset."""
    lead = math.prod(before[:dim])
    begins = [j for j in range(len(after)) if math.prod(after[:j]) == lead and (after[j] != 1 or before[dim] == 1)]
    return begins[0] if begins else None


def _whole_column(layer: nn.Linear, path: str, tp: int, cuts: Any, x: Tensor) -> Tensor:
    start, stop = boxes.chunk(layer.out_features, tp, 0)
    out = x.new_empty((*x.shape[:-1], layer.out_features))
    cuts[out] = _Cut(out.ndim - 1, path, stop - start, layer.out_features)
    return out


def _column(layer: nn.Linear, tp: int, x: Tensor) -> Tensor:
    start, stop = boxes.chunk(layer.out_features, tp, 0)
    return x.new_empty((*x.shape[:-1], stop - start))


def _row(layer: nn.Linear, path: str, tp: int, rows: list[str], x: Tensor) -> Tensor:
    start, stop = boxes.chunk(layer.in_features, tp, 0)
    if x.shape[-1] != stop - start and not rows:
        has = f"and a rank has {stop - start} of its {layer.in_features} inputs"
        rows.append(f"{path} has role 'row', {has}: it gets {x.shape[-1]}")
    return x.new_empty((*x.shape[:-1], layer.out_features))
