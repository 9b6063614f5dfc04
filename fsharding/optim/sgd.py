"""Stochastic gradient descent, optionally with momentum, as a rule."""

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
    """SGD with momentum (Sutskever et al. 2013): `-lr * t` with `t = momentum * t + d` and `d = g + weight_decay * p`.

    Equals `torch.optim.SGD`: with dampening, t gets the share `1 - dampening` of every d but the first; with `nesterov`
    the update is `-lr * (d + momentum * t)`. Unlike in AdamW, weight decay is added to the gradient.

    Args:
        learning_rate: Step size: a float, or a schedule `count -> rate`.
        momentum: Decay rate of the trace; 0 stores none.
        dampening: Share of a gradient that isn't added to the trace.
        nesterov: Whether to use Nesterov momentum, which needs momentum and no dampening.
        weight_decay: Factor of the parameters that are added to the gradient.
        moments: Storage dtype of the trace, or an 8-bit format, as in `fs.adamw`.

    Returns:
        A `ContextTransformation`; its state is an `SgdState`.

    Raises:
        ConfigError: `nesterov` lacks momentum or has dampening; settings are below 0; or `moments` has no kernels.
        TreeError: From the update: parameters are missing, though they decay; or gradients or state don't match.

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
        raise ConfigError(message(text, mend="Pass nesterov=True with a momentum above 0 and dampening=0."))

    def plain(grads: list[Tensor], count: Tensor) -> list[Tensor]:
        return grads

    def with_momentum(grads: list[Tensor], trace: list[Tensor], count: Tensor) -> list[Tensor]:
        added = grads
        if dampening:
            # The first gradient is added in full, as in torch.
            one = torch.ones((), dtype=torch.float64, device=count.device)
            added = _compat.foreach_mul(grads, torch.where(count > 0, 1 - dampening, one))
        _compat.foreach_mul_(trace, momentum)
        _compat.foreach_add_(trace, added)
        return _compat.foreach_add(grads, _compat.foreach_mul(trace, momentum)) if nesterov else trace

    rule, names = (with_momentum, ("trace",)) if momentum else (plain, ())
    return driven(rule, learning_rate, State(SgdState, names), l2=weight_decay, moments=moments)
