"""Calls of a loss function by a step: with a random key and buffers if it takes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.errors import TransformError, listed, message
from fsharding.base.public import kind_of
from fsharding.base.tree import Tree
from fsharding.sharding.leaf_plan import kind_text
from fsharding.sharding.random import fold_in
from fsharding.train.buffers import Buffers
from fsharding.train.state import TrainState
from fsharding.transforms.value_and_grad import Loss, results_text

__all__ = ["Beside", "LossFunction"]


class Beside(NamedTuple):
    """The results of a loss function besides its loss."""

    aux: Any  # None without `has_aux`
    buffers: Buffers  # new values; {} for a function that takes none


class LossFunction(NamedTuple):
    """A loss function, and how a step calls it."""

    loss_fn: Callable[..., Any]  # `(params, batch, **keywords) -> result`, as the user wrote it
    takes_key: bool  # whether it has a parameter `key`, passed by name
    takes_buffers: bool  # whether it has a parameter `buffers`; then it returns `(loss, buffers)`
    has_aux: bool  # whether its last result is aux
    signature: inspect.Signature | None  # without key and buffers; None if unknown

    @classmethod
    def of(cls, loss_fn: Callable[..., Any], *, has_aux: bool) -> LossFunction:
        """Inspect the function's parameters."""
        try:
            signature = inspect.signature(loss_fn)
        except (TypeError, ValueError):  # a callable without a signature
            return cls(loss_fn, False, False, has_aux, None)
        takes = {name for name in ("key", "buffers") if _is_asked(signature.parameters.get(name))}
        kept = [parameter for name, parameter in signature.parameters.items() if name not in takes]
        bound = signature.replace(parameters=kept)
        return cls(loss_fn, "key" in takes, "buffers" in takes, has_aux, bound)

    def key(self, state: TrainState) -> Tensor | None:
        """Return the random key of a step; None for a function that takes none."""
        return fold_in(state.key, state.step) if self.takes_key else None

    @property
    def results(self) -> str:
        """Name the function's results, for errors."""
        return ", ".join(["loss", *(["buffers"] * self.takes_buffers), *(["aux"] * self.has_aux)])

    def buffers(self, state: TrainState) -> Buffers:
        """Return the state's buffers; {} for a function that takes none."""
        return state.buffers if self.takes_buffers else {}

    def bound(self, buffers: Buffers, key: Tensor | None = None) -> Callable[[Tree, Tree], Any]:
        """Bind key and buffers: return a function `(params, batch) -> (loss, Beside)`."""

        def run(values: Tree, microbatch: Tree) -> Any:
            given: dict[str, Any] = {"key": key} if self.takes_key else {}
            # Clones: a forward may write to them, and a step that is refused or run again needs the old values.
            given |= {"buffers": tree.map(torch.clone, buffers)} if self.takes_buffers else {}
            return self._apart(self.loss_fn(values, microbatch, **given), buffers)

        functools.update_wrapper(run, self.loss_fn, updated=())  # for errors that name the arguments
        if self.signature is not None:
            vars(run)["__signature__"] = self.signature
        return run

    def _apart(self, result: Any, before: Buffers) -> tuple[Any, Beside]:
        """Split the function's result into loss and the rest."""
        count = 1 + self.takes_buffers + self.has_aux
        if count == 1:
            return result, Beside(None, {})
        parts = cast("tuple[Any, ...]", result)
        if not isinstance(result, tuple) or isinstance(result, Loss) or len(parts) != count:
            mend = f"Return ({self.results})"
            mend += ", or leave has_aux out." if self.has_aux else "; loss may be (sum, count)."
            rule = f"needs ({self.results}); got {results_text(result)}."
            raise TransformError(message(rule, mend=mend))
        buffers = self._checked(parts[1], before) if self.takes_buffers else {}
        return parts[0], Beside(parts[-1] if self.has_aux else None, buffers)

    def _checked(self, buffers: Any, before: Buffers) -> Buffers:
        """Check new buffers, and copy them without autograd history."""
        if not isinstance(buffers, Mapping):
            mend = "Return the buffers that net(params, x, buffers=buffers) returns, or a dict of tensors by name."
            rule = f"needs ({self.results}), with buffers as a dict; got {kind_of(buffers)}."
            raise TransformError(message(rule, mend=mend))
        after = cast("Mapping[Any, Any]", buffers)
        rows = [f"buffers.{name} is missing" for name in before if name not in after]
        rows += [f"buffers.{name} is new" for name in after if name not in before]
        for name, old in before.items():
            now = after.get(name, old)
            plain = isinstance(now, Tensor) and not isinstance(now, DTensor)
            if not plain or (now.shape, now.dtype, now.device) != (old.shape, old.dtype, old.device):
                rows.append(f"buffers.{name} is {kind_of(now)}; before it was {kind_text(old)} on {old.device}")
        if rows:
            rule = "has a loss function that returns different buffers than it was given."
            mend = f"Return a tensor of the same shape and dtype for each of {listed([*before])}."
            raise TransformError(message(rule, rows, mend))
        # Copies: a buffer may be a view of an activation or of a gathered unit, whose memory is reused after the call.
        return {name: after[name].detach().clone() for name in before}


def _is_asked(parameter: inspect.Parameter | None) -> bool:
    """Return whether a step passes this parameter: it exists, and its default isn't a value."""
    return parameter is not None and parameter.default in (inspect.Parameter.empty, None)
