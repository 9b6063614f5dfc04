"""Check a loss function at its first call: what it depends on, where its random numbers come from, what it casts.

If the loss of a train step depends on no parameter on some rank, all ranks refuse it before backward.
"""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import random as python_random
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from types import CodeType
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from fsharding.base import _compat, devices
from fsharding.base.calls import public_name
from fsharding.base.errors import TransformError, message, report
from fsharding.comm.step_agreement import numbers_of_all
from fsharding.mesh.device_mesh import Mesh
from fsharding.sharding import random
from fsharding.transforms.gather_context import GatherContext
from fsharding.transforms.loss_checks import content_of, line_of_user

__all__ = ["FirstCall", "first_call", "is_pair", "refuse_bare_casts", "refuse_named_scaler"]

_UNIT = "_GatherUnitBackward"
_LEAF = "torch::autograd::AccumulateGrad"
_SCALED = {"MulBackward0", "DivBackward0"}
_PASSED_ON = {"ToCopyBackward0", "ViewBackward0", "SqueezeBackward0", "AliasBackward0", "CloneBackward0"}
_MEAN = 1  # `reduction="mean"` in the nodes of torch's losses
_MOST_ALIKE = 8  # functions of one code that are checked: a loop may define its loss function again in each step
_CAST = "ToCopyBackward0"
_NEAR = 16  # most nodes between a cast and the weight named in its error

# Finished checks of each loss function, unwrapped, and the number of first calls by code.
_checked: WeakKeyDictionary[Callable[..., Any], set[Hashable]] = WeakKeyDictionary()
_alike: Counter[Any] = Counter()


class FirstCall:
    """The checks of one call of a loss function, or of one call for each microbatch."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        # With a mesh all its ranks together refuse a loss that depends on no parameter; without one this rank warns.
        self._name = public_name()
        self._mesh = mesh
        self._lines: dict[tuple[int, int], list[str]] = {}  # the user's line of the first draw with a key
        self._warned: set[str] = set()

    def watched(self, fn: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
        """Wrap a loss function to warn of draws without a key, keys used twice, and means returned with a count."""

        @functools.wraps(fn, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            if _compat.makes_fakes():
                return fn(*args, **kwargs)
            before = _generators()
            with random.observing_draws(self._note_draw):
                result = fn(*args, **kwargs)
            after = _generators()
            if changed := [name for name, state in before.items() if state != after[name]]:
                self._warn_of_generators(changed)
            loss = result[0] if has_aux and is_pair(result) else result
            if is_pair(loss):
                self._look_at_count(*loss)
            return result

        return run

    def look(self, total: Tensor, context: GatherContext, leaves: Sequence[Tensor]) -> None:
        """Refuse a loss that depends on no parameter, or warn of it. With a mesh, collective over its ranks."""
        _refuse_scaler(total, self._name)
        depends = _reaches(total.grad_fn, context, leaves)
        if _compat.makes_fakes():
            return
        if self._mesh is None:
            wrong = [] if depends else [0]
        else:
            wrong = [rank for rank, answer in numbers_of_all(self._mesh, int(depends)).items() if not answer]
        if not wrong:
            return
        mend = (
            'Compute it from the first argument, such as w = fs.gather_unit(params["head"]), or call the function that'
            " fs.functionalize returns, net(params, x), instead of the module. Remove detach and no_grad."
        )
        if not leaves:
            row = "every leaf is frozen"
            mend = "Train at least one leaf (frozen=, grads=); fs.evaluate(loss_fn) computes a loss without gradients."
        elif depends:
            row = f"it does on this rank, but not on rank {', '.join(map(str, wrong[:8]))}"
            mend = "If no token of a batch counts, return (losses * mask).sum() instead of a constant."
        elif total.requires_grad:
            row = "it was computed from other tensors that require grad, such as the parameters of an nn.Module"
        else:
            row = "it does not require grad: it was detached, computed under torch.no_grad, or from other parameters"
        if self._mesh is None:
            self._warn(
                "constant", "has a loss that does not depend on its parameters: all gradients are 0.", [row], mend
            )
        else:
            rule = "has a loss that does not depend on its parameters, so nothing would be trained."
            raise TransformError(report(f"{self._name} {rule}", [row], mend))

    def _note_draw(self, words: tuple[int, int]) -> None:
        line = line_of_user()
        if words not in self._lines:
            self._lines[words] = line
            return
        rule = "has a loss function that draws twice with one key, so both draws have the same numbers."
        mend = (
            "Use one key per draw: first, second = fs.random.split(key), or fs.random.fold_in(key, i) in layer i. To"
            " use one mask twice, draw it once with fs.random.bernoulli."
        )
        self._warn("key", rule, dict.fromkeys(self._lines[words] + line), mend)

    def _warn_of_generators(self, names: Sequence[str]) -> None:
        rule = f"has a loss function that draws from the global generator of {' and '.join(names)}, so its numbers"
        rule += " change with the layout and when a run is resumed."
        mend = "Draw with a key: add a parameter key to the loss function, then call fs.random.dropout(x, p, key), or"
        mend += " fs.random.normal(key, x.shape).tensor(device=x.device)."
        self._warn("generator", rule, (), mend)

    def _look_at_count(self, total: Any, count: Any) -> None:
        is_number = isinstance(count, int | float) or (isinstance(count, Tensor) and not count.ndim)
        if not isinstance(total, Tensor) or not is_number:
            return
        number = float(count)
        if number > 1 and _is_mean(total, number):
            rule = f"got (mean, {number:g}), but takes (sum, count): the mean is divided by the count again."
            mend = 'Return (losses.sum(), number of tokens), with reduction="sum"; or the mean alone.'
            self._warn("mean", rule, (), mend)

    def _warn(self, kind: str, rule: str, rows: Iterable[str], mend: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(report(f"{self._name} {rule}", rows, mend), stacklevel=2)


def _refuse_scaler(total: Tensor, name: str) -> None:
    """Refuse a loss that is a product with the scale of a `GradScaler`: its gradients would stay scaled."""
    saved = [getattr(node, "_saved_other", None) for node in _chain(total.grad_fn, {*_SCALED, *_PASSED_ON})]
    factors = [x.data_ptr() for x in saved if isinstance(x, Tensor) and not x.ndim and not _compat.is_fake(x)]
    # The scaler is the object whose scale has the address of a factor. The search over all objects takes long, so it
    # runs only if a 0-d tensor scales the loss.
    scalers = (x for x in gc.get_objects() if issubclass(type(x), torch.amp.GradScaler)) if factors else ()
    if any(isinstance(s := vars(x).get("_scale"), Tensor) and s.data_ptr() in factors for x in scalers):
        raise _scaled(name, "gradients")


def _scaled(name: str, what: str) -> TransformError:
    rule = f"{name} has a loss function that calls GradScaler.scale: {what} would be that many times too large."
    mend = "Return the unscaled loss; precision=fs.FP16 scales it, unscales gradients and skips steps."
    return TransformError(report(rule, (), mend))


def refuse_named_scaler(fn: Callable[..., Any]) -> None:
    """Refuse a loss function whose code names a `GradScaler` and `scale`: an evaluation has no graph to search."""
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None)
    if not isinstance(code, CodeType) or "scale" not in code.co_names:
        return
    held = [fn.__globals__.get(name) for name in code.co_names]
    held += [content_of(cell) for cell in fn.__closure__ or ()]
    if any(isinstance(x, torch.amp.GradScaler) for x in held):
        raise _scaled(public_name(), "losses")


def _checks_of(fn: Callable[..., Any]) -> set[Hashable] | None:
    """Return the finished checks of a loss function; None if it can't be hashed or weakly referenced."""
    try:
        return _checked.setdefault(fn, set())
    except TypeError:
        return None


def first_call(fn: Callable[..., Any]) -> FirstCall | None:
    """Return the checks for a call of a loss function; None if it was called before, also in a wrapper."""
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", type(fn))
    checks = _checks_of(fn) if _alike[code] < _MOST_ALIKE else None
    if checks is None or "first call" in checks:
        return None
    checks.add("first call")
    _alike[code] += 1
    return FirstCall()


def is_pair(x: Any) -> bool:
    """Return whether a loss function returned two values."""
    return isinstance(x, tuple) and len(cast("tuple[Any, ...]", x)) == 2


def _generators() -> dict[str, bytes]:
    """Read the states of the global generators; an accelerator's only if it is initialized."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": pickle.dumps(python_random.getstate()),
        "numpy": pickle.dumps(np.random.get_state()),
    }
    if (here := devices.accelerator()) != "cpu":
        module = torch.get_device_module(here)
        if module.is_initialized() and hasattr(module, "get_rng_state"):
            states[f"torch.{here}"] = module.get_rng_state().numpy().tobytes()
    return states


def _nodes(roots: Iterable[Node | None]) -> Generator[Any]:
    """Yield each node of a graph once, starting at its outputs."""
    todo = [*roots]
    seen = set[Node | None]((None,))
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [before for before, _ in node.next_functions]


def _chain(node: Node | None, names: set[str]) -> Generator[Any]:
    """Yield a node and its chain of first inputs, as long as they have one of these names."""
    while node is not None and node.name() in names:
        yield node
        node = node.next_functions[0][0]


def _reaches(root: Node | None, context: GatherContext, leaves: Iterable[Tensor]) -> bool:
    """Return whether a graph contains a unit of this context, or a leaf that was used without its unit."""
    ours = {id(x) for x in leaves}
    return any(
        (node.name() == _UNIT and node.context is context) or (node.name() == _LEAF and id(node.variable) in ours)
        for node in _nodes([root])
    )


def _is_mean(total: Tensor, count: float) -> bool:
    """Return whether the last operation of a loss, in its graph, is a mean or a division by its count."""
    node: Any = total.grad_fn
    for passed in _chain(node, _PASSED_ON):
        node = passed.next_functions[0][0]
    if node is None:
        return False
    if node.name() in _SCALED:
        factor = node._saved_other
        if not isinstance(factor, Tensor) or factor.numel() != 1:
            return False
        wanted = count if node.name() == "DivBackward0" else 1 / count
        return abs(float(factor) / wanted - 1) < 1e-6
    return node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN


# -------------------------------------------------------------------------------------------------------------- casts
def refuse_bare_casts(
    outputs: Sequence[Tensor] | Sequence[GradientEdge], fn: Callable[..., Any], part: Hashable
) -> None:
    """Refuse a graph with differentiated casts to 8 bits; each part of a function is inspected once."""
    checks = _checks_of(inspect.unwrap(fn))
    if checks is None or (_CAST, part) in checks:
        return
    casts = _casts([x.node if isinstance(x, GradientEdge) else x.grad_fn for x in outputs])
    if not casts:
        checks.add((_CAST, part))
        return
    kinds = sorted({str(_compat.result_of(node)[0]).removeprefix("torch.") for node in casts})
    rule = f"differentiates casts to {', '.join(kinds)}, which round the gradient without a scale: 700 becomes 448, and"
    mend = (
        "Write w = fs.formats.quantize(w, fs.formats.TENSORWISE), then fs.formats.dequantize(w) or"
        " fs.ops.scaled_matmul(x, w, 1), whose gradient is not rounded; or cast w.detach(), which has no gradient."
    )
    raise TransformError(message(f"{rule} 1e-4 becomes 0.", map(_describe, casts), mend))


def _casts(roots: Sequence[Node | None]) -> list[Node]:
    found = ((node, _compat.result_of(node)[0]) for node in _nodes(roots) if node.name() == _CAST)
    return [node for node, dtype in found if dtype.itemsize == 1 and dtype.is_floating_point]


def _describe(cast: Node) -> str:
    """Describe a cast, with the gathered weight that it is of if that is near in the graph."""
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
