"""A loss function as a step calls it: with a random key where it takes one, and a loss that is scaled.

In: the function of a user. Out: functions of parameters and batch alone.
Law: where there is no key, as in evaluation, a function gets None for one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch import Tensor

from fsharding.precision import scaled_loss
from fsharding.random import fold_in
from fsharding.train.state import TrainState
from fsharding.tree import Tree

__all__ = ["LossFunction"]


class LossFunction(NamedTuple):
    """A loss function, and how a step calls it.

    Attributes:
        loss_fn: `(params, batch) -> loss`, or with `has_aux` `-> (loss, aux)`.
        takes_key: whether it has a parameter `key`, which it is given by name.
        has_aux: whether it returns aux.
    """

    loss_fn: Callable[..., Any]
    takes_key: bool
    has_aux: bool

    @classmethod
    def of(cls, loss_fn: Callable[..., Any], *, has_aux: bool) -> LossFunction:
        """Looks at the function's parameters."""
        return cls(loss_fn, _takes_key(loss_fn), has_aux)

    @property
    def without_key(self) -> Callable[[Tree, Tree], Any]:
        """The function of parameters and batch alone; its key is None."""
        if not self.takes_key:
            return self.loss_fn
        return functools.wraps(self.loss_fn, updated=())(functools.partial(self.loss_fn, key=None))

    def key(self, state: TrainState) -> Tensor | None:
        """The random key of a step; None for a function that takes none."""
        return fold_in(state.key, state.step) if self.takes_key else None

    def scaled(self, scale: Tensor | None, key: Tensor | None) -> Callable[[Tree, Tree], Any]:
        """The function of parameters and batch whose loss is `scale` times the loss, or with None the loss itself."""
        keywords = {} if key is None else {"key": key}

        @functools.wraps(self.loss_fn, updated=())  # for errors that say what its arguments are called
        def run(values: Tree, microbatch: Tree) -> Any:
            result = self.loss_fn(values, microbatch, **keywords)
            if self.has_aux:
                # value_and_grad refuses another shape.
                pair = isinstance(result, tuple) and len(cast("tuple[Any, ...]", result)) == 2
                return (_times(result[0], scale), result[1]) if pair else result
            return _times(result, scale)

        return run


def _takes_key(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss function asks for a random key: it has a parameter of that name without a value."""
    try:
        asked = inspect.signature(loss_fn).parameters.get("key")
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return asked is not None and asked.default in (inspect.Parameter.empty, None)


def _times(loss: Any, scale: Tensor | None) -> Any:
    if not isinstance(loss, tuple):
        loss = loss, 1.0
    if len(cast("tuple[Any, ...]", loss)) != 2 or not isinstance(loss[0], Tensor):
        return loss
    return scaled_loss(loss[0], scale), loss[1]
