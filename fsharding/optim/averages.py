"""Averages of parameters: `ema`, which watches and changes nothing, and `lookahead`, which steps back to its average.

In: updates that are to be added, and the parameters that they will be added to. Out: updates, and the average as state.
The average lives where the optimizer's main parameters are, and goes with them in reshards and files. It is in their
dtype, whatever that of moments: most of what an average moves by is lost in a narrow one.
Law: each element is averaged by itself, so an average does not depend on where a leaf is cut, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fsharding import tree
from fsharding.arguments import check_optimizer
from fsharding.errors import TreeError, message
from fsharding.optim.base import (
    GradientTransformation,
    check_moments,
    check_update,
    clone,
    grads_where,
    like,
    local_leaves,
    local_where,
    required,
    run_update,
)
from fsharding.optim.schedules import Schedule, as_schedule
from fsharding.optim.validation import FROM_1, TO_1, check_settings
from fsharding.public import public
from fsharding.tree import Tree

__all__ = ["EmaState", "LookaheadState", "ema", "ema_of", "lookahead"]


class EmaState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), and the average of the parameters."""

    count: Tensor
    average: Tree


class LookaheadState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), the slow parameters, and the state of the inner optimizer."""

    count: Tensor
    slow: Tree
    inner: Tree


def ema(decay: float | Schedule = 0.999) -> GradientTransformation:
    """An exponential moving average of the parameters, for evaluation; updates pass through unchanged.

    It belongs at the end of a chain: `fs.chain(fs.adamw(3e-4), fs.optim.ema(0.999))`. The average begins as the first
    parameters. It is `decay * average + (1 - decay) * (p + update)`. What a step does to a parameter besides its
    optimizer, such as to biases of routers, is in the average one step later.

    Args:
        decay: a number, or a function of the number of updates so far, such as
            `lambda count: min(0.999, (1 + count) / (10 + count))`.

    Raises:
        ConfigError: a decay that is not from 0 to 1.
    """
    check_settings("fs.optim.ema", (TO_1, {"decay": decay}))
    rate = as_schedule(decay)

    @public("fs.optim.ema(...).init")
    def init(params: Tree) -> EmaState:
        return EmaState(torch.zeros((), dtype=torch.int64), like(params, [clone(x) for x in local_leaves(params)]))

    @public("fs.optim.ema(...).update")
    def update(updates: Tree, state: EmaState, params: Tree = None, *, donate: bool = False) -> tuple[Tree, EmaState]:
        check_update("fs.optim.ema", EmaState, updates, state, params)
        check_moments("fs.optim.ema", average=state.average)
        share = rate(int(state.count))
        average = [x if donate else clone(x) for x in local_leaves(state.average)]
        after = _after("fs.optim.ema", updates, required(params, "fs.optim.ema"), state.average)
        for old, new in zip(average, after, strict=True):
            old.mul_(share).add_(new.mul_(1 - share))
        return updates, EmaState(state.count + 1, like(state.average, average))

    return GradientTransformation(init, update)


def ema_of(opt_state: Tree) -> Tree:
    """The average that an `ema` somewhere in an optimizer state keeps, in the sharding of the main parameters.

    `fs.spread_main(fs.optim.ema_of(state.opt_state), state.params, state.layout)` are parameters to evaluate with.

    Args:
        opt_state: of any optimizer.

    Raises:
        TreeError: there is no `EmaState` in it, or several.
    """
    found = [x for x in tree.leaves(opt_state, is_leaf=_is_ema) if _is_ema(x)]
    if len(found) != 1:
        mend = "Put one fs.optim.ema at the end of the chain, or take state.average out of the state yourself."
        raise TreeError(message("fs.optim.ema_of", f"finds {len(found)} averages in the optimizer state.", mend=mend))
    return cast(EmaState, found[0]).average


def _is_ema(node: Any) -> bool:
    return isinstance(node, EmaState)


def lookahead(inner: GradientTransformation, *, every: int = 6, share: float = 0.5) -> GradientTransformation:
    """Lookahead (Zhang et al. 2019): after every so many updates, back to a point between where they began and ended.

    Args:
        inner: makes the fast updates.
        every: how many of them.
        share: how far from the slow parameters to the fast ones the next slow parameters are.

    Raises:
        ConfigError: no optimizer inside; no whole number of updates from 1, or a share that is not from 0 to 1.
    """
    check_optimizer("fs.optim.lookahead", inner)
    check_settings("fs.optim.lookahead", (FROM_1, {"every": every}), (TO_1, {"share": share}))

    @public("fs.optim.lookahead(...).init")
    def init(params: Tree, *, moments: torch.dtype | None = None, shardings: Tree = None) -> LookaheadState:
        slow = like(params, [clone(x) for x in local_leaves(params)])
        return LookaheadState(torch.zeros((), dtype=torch.int64), slow, inner.start(params, moments, shardings))

    @public("fs.optim.lookahead(...).update")
    def update(
        updates: Tree,
        state: LookaheadState,
        params: Tree = None,
        *,
        donate: bool = False,
        norm: Tensor | None = None,
        shardings: Tree = None,
    ) -> tuple[Tree, LookaheadState]:
        check_update("fs.optim.lookahead", LookaheadState, updates, state, params)
        check_moments("fs.optim.lookahead", slow=state.slow)
        params = required(params, "fs.optim.lookahead")
        known: Any = {"donate": donate, "norm": norm, "shardings": shardings}
        updates, inside = run_update(inner, updates, state.inner, params, **known)
        count, slow = state.count + 1, state.slow
        if int(count) % every == 0:
            old = local_leaves(slow)
            new = [
                s + share * (fast - s)
                for s, fast in zip(old, _after("fs.optim.lookahead", updates, params, slow), strict=True)
            ]
            now = local_where("fs.optim.lookahead", params, slow)
            slow = like(slow, new)
            updates = like(slow, [s - p for s, p in zip(new, now, strict=True)])
        return updates, LookaheadState(count, slow, inside)

    return GradientTransformation(init, update)


def _after(function: str, updates: Tree, params: Tree, where: Tree) -> list[Tensor]:
    """Local tensors of the parameters after the update, where another tree has them; in new memory."""
    moves = grads_where(function, updates, where)
    now, kept = local_where(function, params, where), local_leaves(where)
    return [(p + u).to(x.dtype) for p, u, x in zip(now, moves, kept, strict=True)]
