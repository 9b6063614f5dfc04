"""AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019): torch's fused kernel as a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from fsharding.base import _compat
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.optim.base import ContextTransformation
from fsharding.optim.coded_moment import MomentType
from fsharding.optim.elementwise import State, Step, driven
from fsharding.optim.schedules import Schedule
from fsharding.optim.validation import BELOW_1, FROM_0, check_settings

__all__ = ["AdamState", "adamw"]

_VECTOR = 64
"""Elements that the kernel takes at once on every processor, or a multiple of that."""

_LARGE = 1 << 12
"""Size of a leaf from which on its whole vectors are updated in place, and only its end is copied."""

_Columns: TypeAlias = Sequence[list[Tensor]]
"""Parameters, gradients, first and second moments, leaf by leaf."""


class AdamState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), first and second moments.

    Example:
        >>> state = fs.adamw(1e-3).init({"w": torch.ones(2)})
        >>> int(state.count), state.mu, state.nu
        (0, {'w': tensor([0., 0.])}, {'w': tensor([0., 0.])})
    """

    count: Tensor
    mu: Tree
    nu: Tree


@public
def adamw(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    moments: MomentType = None,
) -> ContextTransformation:
    """AdamW: `-lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * p)`.

    Args:
        learning_rate: a number, or a function of the number of updates so far.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, times the learning rate.
        moments: the dtype in which both are kept; by default `Precision.moments` of the layout, or else float32 at
            least. An update is computed in float32 at least, and moments are rounded after it. Or a format of 8 bits,
            such as `fs.formats.MXFP8`: the moments of leaves of two dims and more and of 4096 elements and more are
            `fs.optim.CodedMoment`s. Of the second moment the root is kept, and it is rounded by key.

    Raises:
        ConfigError: numbers below 0, or decays of moments of 1 and more; all of them are listed. Moments in a dtype
            that kernels lack, or in a format that is none for moments.
        TreeError: from the update: no parameters, though they decay; or something else than gradients and this state.

    Example:
        >>> opt = fs.adamw(1e-3, weight_decay=0.1)
        >>> params = {"w": torch.ones(2)}
        >>> updates, state = opt.update({"w": torch.ones(2)}, opt.init(params), params)
        >>> fs.optim.apply_updates(params, updates)["w"]
        tensor([0.9989, 0.9989])
    """
    above = {"learning_rate": learning_rate, "eps": eps, "weight_decay": weight_decay}
    check_settings((FROM_0, above), (BELOW_1, {"b1": b1, "b2": b2}))

    def kernel(
        values: list[Tensor], grads: list[Tensor], mu: list[Tensor], nu: list[Tensor], step: Step
    ) -> list[Tensor]:
        device = values[0].device
        number = step.number.to(device, non_blocking=True)
        rate = step.rate.to(device, non_blocking=True) if isinstance(step.rate, Tensor) else step.rate
        settings = {"lr": rate, "beta1": b1, "beta2": b2, "eps": eps, "weight_decay": step.decay}
        _on_whole_vectors((values, grads, mu, nu), number, settings | {"scale": step.scale, "finite": step.finite})
        return values

    state = State(AdamState, ("mu", "nu"), roots=("nu",))
    return driven(kernel, learning_rate, state, weight_decay=weight_decay, moments=moments, in_place=True)


def _on_whole_vectors(columns: _Columns, number: Tensor, settings: dict[str, Any]) -> None:
    """Run torch's kernel in place on whole vectors, and on all small leaves and ends in one padded copy."""
    sizes = [x.numel() for x in columns[0]]
    even = [i for i, n in enumerate(sizes) if n and n % _VECTOR == 0]
    small = [i for i, n in enumerate(sizes) if n % _VECTOR and n < _LARGE]
    large = [i for i, n in enumerate(sizes) if n % _VECTOR and n >= _LARGE]
    bodies: list[list[Tensor]] = []
    ends: list[list[Tensor]] = []
    for column in columns:
        flat = [(column[i].view(-1), sizes[i] // _VECTOR * _VECTOR) for i in large]
        bodies.append([column[i] for i in even] + [x[:cut] for x, cut in flat])
        ends.append([column[i] for i in small] + [x[cut:] for x, cut in flat])
    if ends[0]:
        padding = number.new_zeros(-sum(x.numel() for x in ends[0]) % _VECTOR, dtype=ends[0][0].dtype)
        for body, end in zip(bodies, ends, strict=True):
            body.append(_compat.packed([*end, padding]))
    if not bodies[0]:
        return
    _compat.fused_adamw_(bodies[0], bodies[1], bodies[2], bodies[3], [number] * len(bodies[0]), **settings)
    if ends[0]:
        for k in (0, 2, 3):
            _compat.foreach_copy_(ends[k], _compat.unpack(bodies[k][-1], ends[k]))
