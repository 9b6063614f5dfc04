"""AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019): torch's fused kernel as a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fsharding.base import _compat
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.optim.base import ContextTransformation
from fsharding.optim.chunked_update import Step
from fsharding.optim.coded_moment import MomentType
from fsharding.optim.elementwise import State, driven
from fsharding.optim.schedules import Schedule
from fsharding.optim.validation import BELOW_1, FROM_0, check_settings

__all__ = ["AdamState", "adamw"]

_VECTOR = 64  # a multiple of the vector length of the kernel on every processor
_LARGE = 1 << 12  # size of a leaf from which its full vectors are updated in place, and only its end is copied


class AdamState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), first moments and second moments.

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
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101): `-lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p)`.

    `m_hat = m / (1 - b1^t)` and `v_hat = v / (1 - b2^t)` are the moments of Adam (Kingma & Ba 2015, arXiv:1412.6980).
    Defaults suit LLM pre-training: `b2=0.95` (torch and optax 0.999) and `weight_decay=0` (torch 0.01, optax 1e-4).

    Args:
        learning_rate: Step size: a float, or a schedule `count -> rate`.
        b1, b2: Decay rates of the first and second moments, in [0, 1).
        eps: Number added to the denominator, outside the square root.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        moments: Storage dtype of both moments, or an 8-bit format such as `fs.formats.MXFP8`. By default
            `Precision.moments` of the layout, else float32 at least. The update is computed in float32 at least;
            narrower moments are rounded stochastically. A format applies to leaves of two dims and 4096 elements or
            more, as `fs.optim.CodedMoment`s, and stores the root of the second moment.

    Returns:
        A `ContextTransformation`; its state is an `AdamState` of two trees like the parameters.

    Raises:
        ConfigError: Settings are out of range (all are listed); or `moments` isn't a dtype or format for moments.
        TreeError: From the update: parameters are missing, though they decay; or gradients or state don't match.

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
        _on_full_vectors((values, grads, mu, nu), number, settings | {"scale": step.scale, "finite": step.finite})
        return values

    state = State(AdamState, ("mu", "nu"), roots=("nu",))
    return driven(kernel, learning_rate, state, weight_decay=weight_decay, moments=moments, in_place=True)


def _on_full_vectors(columns: Sequence[list[Tensor]], number: Tensor, settings: dict[str, Any]) -> None:
    """Run torch's kernel in place on full vectors, and on all small leaves and ends in one padded copy."""
    # The kernel rounds the elements after a leaf's last full vector differently, so where a shard ends would change
    # its bits. Padding gives every element the arithmetic of a full vector.
    sizes = [x.numel() for x in columns[0]]
    even = [i for i, n in enumerate(sizes) if n and n % _VECTOR == 0]
    small = [i for i, n in enumerate(sizes) if n % _VECTOR and n < _LARGE]
    large = [i for i, n in enumerate(sizes) if n % _VECTOR and n >= _LARGE]
    bodies: list[list[Tensor]] = []
    ends: list[list[Tensor]] = []
    for column in columns:
        flat = [(column[i].view(-1), sizes[i] // _VECTOR * _VECTOR) for i in large]
        bodies.append([column[i] for i in even] + [x[:end] for x, end in flat])
        ends.append([column[i] for i in small] + [x[end:] for x, end in flat])
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
