"""Check a loss function at its first call: does it depend on the parameters, and where do its random numbers come from?

Guarantee: if the loss of a train step depends on no parameter on some rank, all ranks refuse it before backward.
"""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import random as python_random
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any, cast
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import Node

from fsharding.base import _compat, devices
from fsharding.base.calls import public_name
from fsharding.base.errors import TransformError, report
from fsharding.comm.step_agreement import numbers_of_all
from fsharding.mesh.device_mesh import Mesh
from fsharding.sharding import random
from fsharding.transforms.argument_writes import content_of
from fsharding.transforms.gather_context import GatherContext
from fsharding.transforms.loss_checks import line_of_user

__all__ = ["FirstCall", "first_call", "refuse_named_scaler"]

_UNIT = "_GatherUnitBackward"
_LEAF = "torch::autograd::AccumulateGrad"
_PASSED_ON = {"ToCopyBackward0", "ViewBackward0", "SqueezeBackward0", "AliasBackward0", "CloneBackward0"}
_MEAN = 1
"""The value of `reduction="mean"` in the nodes of torch's losses."""
_MOST_ALIKE = 8
"""A loop may define its loss function again in each step, so only this many functions of one code are checked."""


class FirstCall:
    """The checks of one call of a loss function, or of one for each microbatch."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        # `mesh`: whose ranks refuse together a loss that depends on no parameter; without one this rank warns of it.
        self._name = public_name()
        self._mesh = mesh
        self._lines: dict[tuple[int, int], str] = {}  # of the user, where a key was first drawn with
        self._warned: set[str] = set()

    def watched(self, fn: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
        """Wrap a loss function to warn of random numbers without a key, of keys used twice, and of divided means."""

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
            loss = result[0] if has_aux and _is_pair(result) else result
            if _is_pair(loss):
                self._look_at_weight(*loss)
            return result

        return run

    def look(self, total: Tensor, context: GatherContext, leaves: Sequence[Tensor]) -> None:
        """Refuse a loss that depends on no parameter, or warn of it. With a mesh collective over all its ranks."""
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
            " fs.functionalize returns, net(params, x), instead of the module. Leave detach and no_grad out."
        )
        if not leaves:
            row = "every leaf is frozen"
            mend = "Leave at least one leaf out of frozen=, or of the None in grads=; fs.evaluate gives a loss alone."
        elif depends:
            row = f"it does on this rank, but not on rank {', '.join(map(str, wrong[:8]))}"
            mend = "Where a batch has no token that counts, return (losses * mask).sum() instead of a constant."
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
        line = line_of_user(traceback.extract_stack())
        if words not in self._lines:
            self._lines[words] = line
            return
        rule = "has a loss function that draws twice with one key, which gives the same numbers."
        mend = (
            "Give each draw its own key: first, second = fs.random.split(key), or fs.random.fold_in(key, i) in layer i."
            " To use one mask twice, draw it once with fs.random.bernoulli."
        )
        self._warn("key", rule, dict.fromkeys(filter(None, (self._lines[words], line))), mend)

    def _warn_of_generators(self, names: Sequence[str]) -> None:
        rule = (
            f"has a loss function that draws from the global generator of {' and '.join(names)}, so its numbers change"
            " with the layout and when a run is resumed."
        )
        mend = (
            "Draw by key: give the loss function a parameter key, then call fs.random.dropout(x, p, key), or"
            " fs.random.normal(key, x.shape).tensor(device=x.device)."
        )
        self._warn("generator", rule, (), mend)

    def _look_at_weight(self, total: Any, weight: Any) -> None:
        if (
            not isinstance(total, Tensor)
            or not isinstance(weight, int | float | Tensor)
            or torch.as_tensor(weight).ndim
        ):
            return
        number = float(weight)
        if number > 1 and _is_mean(total, number):
            rule = f"got (mean, {number:g}) where it takes (sum, weight): the mean is divided by the weight again."
            mend = 'Return (losses.sum(), number of tokens), as reduction="sum" gives it; or the mean alone.'
            self._warn("mean", rule, (), mend)

    def _warn(self, kind: str, rule: str, rows: Iterable[str], mend: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(report(f"{self._name} {rule}", rows, mend), stacklevel=2)


def _refuse_scaler(total: Tensor, name: str) -> None:
    """Refuse a loss that is a product with the scale of a `GradScaler`: its gradients would stay scaled."""
    node: Any = total.grad_fn
    factors: list[int] = []
    while node is not None and node.name() in {"MulBackward0", "DivBackward0", *_PASSED_ON}:
        saved = getattr(node, "_saved_other", None)
        factors += (
            [saved.data_ptr()] if isinstance(saved, Tensor) and not saved.ndim and not _compat.is_fake(saved) else []
        )
        node = node.next_functions[0][0]
    # A scaler is found by its scale, and looked for only where a 0-d tensor scales the loss.
    scalers = (x for x in gc.get_objects() if issubclass(type(x), torch.amp.GradScaler)) if factors else ()
    if any(isinstance(s := vars(x).get("_scale"), Tensor) and s.data_ptr() in factors for x in scalers):
        raise _scaled(name, "gradients")


def _scaled(name: str, what: str) -> TransformError:
    rule = f"{name} has a loss function that calls GradScaler.scale: {what} would be that many times too large."
    mend = "Return the loss itself; precision=fs.FP16 scales it, unscales gradients and skips steps."
    return TransformError(report(rule, (), mend))


def refuse_named_scaler(fn: Callable[..., Any]) -> None:
    """Refuse a loss function that names a `GradScaler` and its `scale`: an evaluation has no graph to find it in."""
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None)
    if not isinstance(code, CodeType) or "scale" not in code.co_names:
        return
    held = [fn.__globals__.get(name) for name in code.co_names]
    held += [content_of(cell) for cell in fn.__closure__ or ()]
    if any(isinstance(x, torch.amp.GradScaler) for x in held):
        raise _scaled(public_name(), "losses")


class _Checked:
    """The loss functions that have had their first call, and how many there were of one code."""

    def __init__(self) -> None:
        self.functions: WeakSet[Callable[..., Any]] = WeakSet()
        self.alike: Counter[Any] = Counter()


_checked = _Checked()


def first_call(fn: Callable[..., Any]) -> FirstCall | None:
    """Return the checks of a call of a loss function, unwrapped; None if it was called before."""
    while callable(inner := getattr(fn, "__wrapped__", None)):
        fn = inner
    code = getattr(fn, "__code__", type(fn))
    if _checked.alike[code] >= _MOST_ALIKE or not _is_weakly_hashable(fn) or fn in _checked.functions:
        return None
    _checked.functions.add(fn)
    _checked.alike[code] += 1
    return FirstCall()


def _is_weakly_hashable(fn: Callable[..., Any]) -> bool:
    try:
        hash(weakref.ref(fn))
    except TypeError:
        return False
    return True


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple) and len(cast("tuple[Any, ...]", x)) == 2


def _generators() -> dict[str, bytes]:
    """Read the states of the global generators; an accelerator's only if it has been used."""
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


def _reaches(root: Node | None, context: GatherContext, leaves: Iterable[Tensor]) -> bool:
    """Whether a graph leads to a unit that a context gathered, or to a leaf that was used otherwise."""
    ours = {id(x) for x in leaves}
    todo = [root]
    seen = set[Node | None]((None,))
    while todo:
        node: Any = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == _UNIT and node.context is context:
            return True
        if node.name() == _LEAF and id(node.variable) in ours:
            return True
        todo += [before for before, _ in node.next_functions]
    return False


def _is_mean(total: Tensor, weight: float) -> bool:
    """Whether the last operation of a loss is a mean, or a division by its weight. The graph tells, not the value."""
    node: Any = total.grad_fn
    while node is not None and node.name() in _PASSED_ON:
        node = node.next_functions[0][0]
    if node is None:
        return False
    if node.name() in ("DivBackward0", "MulBackward0"):
        factor = node._saved_other
        if not isinstance(factor, Tensor) or factor.numel() != 1:
            return False
        wanted = weight if node.name() == "DivBackward0" else 1 / weight
        return abs(float(factor) / wanted - 1) < 1e-6
    return node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN
