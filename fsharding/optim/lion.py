"""Lion: the sign of an interpolated momentum (Chen et al. 2023, algorithm 2), on local tensors.

In: gradients, momentum and main parameters in the same shardings. Out: updates to be added, and the new momentum.
Every weight changes by the learning rate, so rates are three to ten times below AdamW's, and decay as much above.
Law: each element is updated by itself, so an update does not depend on where a leaf is cut, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsharding import _compat
from fsharding.formats import Blocks
from fsharding.optim.base import (
    ContextTransformation,
    InitContext,
    UpdateContext,
    add_decay_,
    check_moments,
    check_update,
    like,
    local_grads,
    narrow,
    new_zeros,
    widen,
)
from fsharding.optim.chunked_update import Chunk, change_moment, init_moments
from fsharding.optim.coded_moment import carriers, is_coded, moment_leaves
from fsharding.optim.schedules import Schedule, as_schedule, rate_at
from fsharding.optim.validation import FROM_0, TO_1, check_moment_kind, check_settings
from fsharding.precision import wide
from fsharding.public import public
from fsharding.tree import Tree

__all__ = ["LionState", "lion"]


class LionState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), and the momentum.

    Example:
        >>> fs.optim.lion(1e-4).init({"w": torch.ones(2)}).mu
        {'w': tensor([0., 0.])}
    """

    count: Tensor
    mu: Tree


@public("fs.optim.lion")
def lion(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    moments: torch.dtype | Blocks | None = None,
) -> ContextTransformation:
    """Lion: update `-lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p)`, then `m = b2 * m + (1 - b2) * g`.

    Args:
        learning_rate: a number, or a function of the number of updates so far.
        b1: share of the momentum in the direction of the update.
        b2: decay of the momentum.
        weight_decay: decoupled decay, times the learning rate.
        moments: the dtype in which the momentum is kept; by default that of the layout's `Precision`, or else float32
            at least. An update is computed in float32 at least, and the momentum is rounded after it. Or a format of 8
            bits, as in `fs.adamw`.

    Raises:
        ConfigError: numbers below 0, or above 1 for the momentum; all of them are listed. A momentum in a dtype that
            kernels lack.
        TreeError: from the update: no parameters, though they decay; or something else than gradients and this state.

    Example:
        >>> params, opt = {"w": torch.ones(2)}, fs.optim.lion(0.1)
        >>> updates, state = opt.update({"w": torch.tensor([3.0, -0.5])}, opt.init(params), params)
        >>> updates
        {'w': tensor([-0.1000,  0.1000])}
    """
    above = {"learning_rate": learning_rate, "weight_decay": weight_decay}
    check_settings((FROM_0, above), (TO_1, {"b1": b1, "b2": b2}))
    own = check_moment_kind(moments)
    rate = as_schedule(learning_rate)

    @public("fs.optim.lion(...).init")
    def init(params: Tree, context: InitContext = InitContext()) -> LionState:
        return LionState(torch.zeros((), dtype=torch.int64), init_moments(params, own, context))

    @public("fs.optim.lion(...).update")
    def update(
        updates: Tree, state: LionState, params: Tree = None, context: UpdateContext = UpdateContext()
    ) -> tuple[Tree, LionState]:
        check_update(LionState, updates, state, params, decay=weight_decay)
        check_moments(mu=state.mu)
        held = carriers(state.mu)
        lr, local = rate_at(rate, state.count), local_grads(updates, held)

        def change(mu: list[Tensor], local: list[Tensor]) -> list[Tensor]:
            grads = [g.to(m.dtype) for g, m in zip(local, mu, strict=True)]
            deltas = _compat.foreach_mul(mu, b1)
            _compat.foreach_add_(deltas, _compat.foreach_mul(grads, 1 - b1))
            for delta in deltas:
                delta.sign_()
            _compat.foreach_mul_(deltas, -lr)
            _compat.foreach_mul_(mu, b2)
            _compat.foreach_add_(mu, _compat.foreach_mul(grads, 1 - b2))
            return deltas

        if any(map(is_coded, moment_leaves(state.mu))):
            deltas = [new_zeros(g, wide(g.dtype)) for g in local]

            def change_chunk(i: int, chunk: Chunk, m: Tensor) -> None:
                deltas[i][chunk.place].copy_(change([m], [local[i][chunk.place]])[0])

            new_mu = change_moment(state.mu, context, state.count, change_chunk)
        else:
            mu = widen(state.mu, donate=context.donate)
            deltas = change(mu, local)
            new_mu = narrow(state.mu, mu, donate=context.donate)
        if weight_decay:
            add_decay_(deltas, params, held, -lr * weight_decay)
        return like(held, deltas), LionState(state.count + 1, new_mu)

    return ContextTransformation(init, update)
