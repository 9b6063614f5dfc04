"""Lion: the sign of an interpolated momentum, as a rule."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fsharding.base import _compat
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.optim.base import ContextTransformation
from fsharding.optim.coded_moment import MomentType
from fsharding.optim.elementwise import State, driven
from fsharding.optim.schedules import Schedule
from fsharding.optim.validation import FROM_0, TO_1, check_settings

__all__ = ["LionState", "lion"]


class LionState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), and the momentum.

    Example:
        >>> fs.optim.lion(1e-4).init({"w": torch.ones(2)}).mu
        {'w': tensor([0., 0.])}
    """

    count: Tensor
    mu: Tree


@public
def lion(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    moments: MomentType = None,
) -> ContextTransformation:
    """Lion (Chen et al. 2023, arXiv:2302.06675): `-lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p)`.

    Then `m = b2 * m + (1 - b2) * g`. Weight decay is off by default (optax 1e-3).

    Args:
        learning_rate: Step size: a float, or a schedule `count -> rate`.
        b1: Share of the momentum in the direction of the update, in [0, 1].
        b2: Decay rate of the momentum, in [0, 1].
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        moments: Storage dtype of the momentum, or an 8-bit format, as in `fs.adamw`.

    Returns:
        A `ContextTransformation`; its state is a `LionState`.

    Raises:
        ConfigError: Settings are out of range (all are listed); or `moments` is a dtype without kernels.
        TreeError: From the update: parameters are missing, though they decay; or gradients or state don't match.

    Example:
        >>> params, opt = {"w": torch.ones(2)}, fs.optim.lion(0.1)
        >>> updates, state = opt.update({"w": torch.tensor([3.0, -0.5])}, opt.init(params), params)
        >>> updates
        {'w': tensor([-0.1000,  0.1000])}
    """
    above = {"learning_rate": learning_rate, "weight_decay": weight_decay}
    check_settings((FROM_0, above), (TO_1, {"b1": b1, "b2": b2}))

    def rule(grads: list[Tensor], mu: list[Tensor], count: Tensor) -> list[Tensor]:
        directions = _compat.foreach_mul(mu, b1)
        _compat.foreach_add_(directions, _compat.foreach_mul(grads, 1 - b1))
        _compat.foreach_mul_(mu, b2)
        _compat.foreach_add_(mu, _compat.foreach_mul(grads, 1 - b2))
        return [direction.sign_() for direction in directions]

    state = State(LionState, ("mu",))
    return driven(rule, learning_rate, state, weight_decay=weight_decay, moments=moments)
