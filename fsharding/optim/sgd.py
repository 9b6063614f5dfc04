"""Stochastic gradient descent, with momentum if asked for (Sutskever et al. 2013), as a rule."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.base.errors import ConfigError, message
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.optim.base import ContextTransformation
from fsharding.optim.coded_moment import MomentType
from fsharding.optim.elementwise import State, driven
from fsharding.optim.schedules import Schedule
from fsharding.optim.validation import FROM_0, check_settings

__all__ = ["SgdState", "sgd"]


class SgdState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), and the trace of gradients; None without momentum.

    Example:
        >>> fs.sgd(0.1, momentum=0.9).init({"w": torch.ones(2)}).trace
        {'w': tensor([0., 0.])}
        >>> fs.sgd(0.1).init({"w": torch.ones(2)}).trace is None
        True
    """

    count: Tensor
    trace: Tree = None


@public
def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    moments: MomentType = None,
) -> ContextTransformation:
    """SGD: `t = momentum * t + d`, update `-lr * t`; with Nesterov's, `-lr * (d + momentum * t)`.

    Here `d = g + weight_decay * p`, of which `t` gets the share `1 - dampening`, but all of the first one.

    Args:
        learning_rate: a number, or a function of the number of updates so far.
        momentum: decay of the trace; 0 keeps none.
        dampening: share of a gradient that is not added to the trace.
        nesterov: look ahead; without dampening only.
        weight_decay: added to the gradient, as in `torch.optim.SGD`.
        moments: the dtype, or the format of 8 bits, in which the trace is kept, as in `fs.adamw`.

    Raises:
        ConfigError: Nesterov's with dampening or without momentum; numbers below 0; a trace in a dtype without kernels.
        TreeError: from the update: no parameters, though they decay; or something else than gradients and this state.

    Example:
        >>> opt = fs.sgd(0.5, momentum=0.9)
        >>> params = {"w": torch.ones(2)}
        >>> updates, state = opt.update({"w": torch.ones(2)}, opt.init(params), params)
        >>> updates["w"]
        tensor([-0.5000, -0.5000])
    """
    above = {"learning_rate": learning_rate, "momentum": momentum, "weight_decay": weight_decay}
    check_settings((FROM_0, above))
    if nesterov and (dampening or not momentum):
        text = f"got nesterov=True with momentum={momentum} and dampening={dampening}."
        raise ConfigError(message(text, mend="Nesterov's needs momentum and no dampening."))

    def plain(grads: list[Tensor], count: Tensor) -> list[Tensor]:
        return grads

    def with_momentum(grads: list[Tensor], trace: list[Tensor], count: Tensor) -> list[Tensor]:
        added = grads
        if dampening:
            # The first gradient is added whole.
            one = torch.ones((), dtype=torch.float64, device=count.device)
            added = _compat.foreach_mul(grads, torch.where(count > 0, 1 - dampening, one))
        _compat.foreach_mul_(trace, momentum)
        _compat.foreach_add_(trace, added)
        return _compat.foreach_add(grads, _compat.foreach_mul(trace, momentum)) if nesterov else trace

    rule, names = (with_momentum, ("trace",)) if momentum else (plain, ())
    return driven(rule, learning_rate, State(SgdState, names), l2=weight_decay, moments=moments)
