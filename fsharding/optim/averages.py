"""Averages of parameters: `ema`, which passes updates through, and `lookahead`, which returns to its average.

In: updates that are to be added, and the parameters that they will be added to. Out: updates, and the average as state.
The average has the sharding of the main parameters, also after reshards and in files. It is in float32 at least,
whatever the dtype of parameters and moments: a narrow dtype would round most changes of an average away.
Guarantee: each element is averaged by itself, so an average does not depend on where a leaf is cut, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fsharding.base import _compat, tree
from fsharding.base.calls import named
from fsharding.base.dtypes import wide
from fsharding.base.errors import TreeError, message
from fsharding.base.public import check_optimizer, public
from fsharding.base.tree import Tree
from fsharding.optim.base import (
    ContextTransformation,
    GradientTransformation,
    InitContext,
    UpdateContext,
    check_moments,
    check_update,
    clone,
    like,
    local_grads,
    local_leaves,
    local_params,
    require_params,
)
from fsharding.optim.schedules import Schedule, as_schedule, rate_at
from fsharding.optim.validation import FROM_1, TO_1, check_settings

__all__ = ["EmaState", "LookaheadState", "ema", "ema_of", "lookahead"]


class EmaState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), and the average of the parameters, in float32 at least.

    Example:
        >>> fs.optim.ema(0.9).init({"w": torch.ones(2)}).average
        {'w': tensor([1., 1.])}
    """

    count: Tensor
    average: Tree


class LookaheadState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), the slow parameters in float32 at least, and the inner state.

    Example:
        >>> state = fs.optim.lookahead(fs.sgd(0.1)).init({"w": torch.ones(2)})
        >>> state.slow, type(state.inner).__name__
        ({'w': tensor([1., 1.])}, 'SgdState')
    """

    count: Tensor
    slow: Tree
    inner: Tree


@named("fs.optim.ema")
def ema(decay: float | Schedule = 0.999) -> ContextTransformation:
    """An exponential moving average of the parameters, for evaluation; updates pass through unchanged.

    It belongs at the end of a chain: `fs.optim.chain(fs.adamw(3e-4), fs.optim.ema(0.999))`. The average begins as the
    first parameters. It is `decay * average + (1 - decay) * (p + update)`. A change of a parameter that a step makes
    after its optimizer, such as to biases of routers, is in the average one step later.

    Args:
        decay: a number, or a function of the number of updates so far, such as
            `lambda count: min(0.999, (1 + count) / (10 + count))`.

    Raises:
        ConfigError: a decay that is not from 0 to 1.

    Example:
        >>> params, opt = {"w": torch.ones(2)}, fs.optim.chain(fs.sgd(1.0), fs.optim.ema(0.75))
        >>> updates, state = opt.update({"w": torch.ones(2)}, opt.init(params), params)
        >>> fs.optim.apply_updates(params, updates), fs.optim.ema_of(state)
        ({'w': tensor([0., 0.])}, {'w': tensor([0.7500, 0.7500])})
    """
    check_settings((TO_1, {"decay": decay}))
    rate = as_schedule(decay)

    @public("fs.optim.ema(...).init")
    def init(params: Tree, context: InitContext = InitContext()) -> EmaState:
        return EmaState(torch.zeros((), dtype=torch.int64), _wide_copy(params))

    @public("fs.optim.ema(...).update")
    def update(
        updates: Tree, state: EmaState, params: Tree = None, context: UpdateContext = UpdateContext()
    ) -> tuple[Tree, EmaState]:
        check_update(EmaState, updates, state, params)
        check_moments(average=state.average)
        share = rate_at(rate, state.count)
        average = [x if context.donate else clone(x) for x in local_leaves(state.average)]
        updated = _updated(updates, require_params(params), state.average)
        _compat.foreach_mul_(average, share)
        _compat.foreach_mul_(updated, 1 - share)
        _compat.foreach_add_(average, updated)
        return updates, EmaState(state.count + 1, like(state.average, average))

    return ContextTransformation(init, update, by_element=True)


@named("fs.optim.ema_of")
def ema_of(opt_state: Tree) -> Tree:
    """The average that an `ema` somewhere in an optimizer state keeps, in the sharding of the main parameters.

    `fs.params_from_main(fs.optim.ema_of(state.opt_state), state.params, state.layout)` are parameters to evaluate with.

    Args:
        opt_state: the state of any optimizer that `ema` is part of.

    Raises:
        TreeError: there is no `EmaState` in it, or several.

    Example:
        >>> opt = fs.optim.chain(fs.adamw(1e-3), fs.optim.ema(0.999))
        >>> layout = fs.plan_layout({"w": torch.zeros(2)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.state_from_params(fs.shard({"w": torch.ones(2)}, layout), opt, fs.random.key(0), layout)
        >>> averaged = fs.params_from_main(fs.optim.ema_of(state.opt_state), state.params, state.layout)
        >>> fs.unshard(averaged["w"])
        tensor([1., 1.])
    """
    averages = [x for x in tree.leaves(opt_state, is_leaf=_is_ema) if _is_ema(x)]
    if len(averages) != 1:
        mend = "Put one fs.optim.ema at the end of the chain, or take state.average out of the state yourself."
        raise TreeError(message(f"finds {len(averages)} averages in the optimizer state.", mend=mend))
    return cast(EmaState, averages[0]).average


def _is_ema(node: Any) -> bool:
    return isinstance(node, EmaState)


@named("fs.optim.lookahead")
def lookahead(inner: GradientTransformation, *, every: int = 6, share: float = 0.5) -> ContextTransformation:
    """Lookahead (Zhang et al. 2019): after some updates, back to a point between their first and last parameters.

    Args:
        inner: the transformation that makes the fast updates.
        every: how many fast updates come between two slow ones.
        share: how far from the slow parameters to the fast ones the next slow parameters are.

    Raises:
        ConfigError: no optimizer inside; no whole number of updates from 1, or a share that is not from 0 to 1.

    Example:
        >>> params, opt = {"w": torch.ones(1)}, fs.optim.lookahead(fs.sgd(0.25), every=2, share=0.5)
        >>> state = opt.init(params)
        >>> for _ in range(2):
        ...     params, state = fs.optim.apply_gradients(opt, {"w": torch.ones(1)}, state, params)
        ...     print(params["w"])
        tensor([0.7500])
        tensor([0.7500])
    """
    check_optimizer(inner)
    check_settings((FROM_1, {"every": every}), (TO_1, {"share": share}))
    fast = inner.with_context()

    @public("fs.optim.lookahead(...).init")
    def init(params: Tree, context: InitContext = InitContext()) -> LookaheadState:
        return LookaheadState(torch.zeros((), dtype=torch.int64), _wide_copy(params), fast.init(params, context))

    @public("fs.optim.lookahead(...).update")
    def update(
        updates: Tree, state: LookaheadState, params: Tree = None, context: UpdateContext = UpdateContext()
    ) -> tuple[Tree, LookaheadState]:
        check_update(LookaheadState, updates, state, params)
        check_moments(slow=state.slow)
        params = require_params(params)
        updates, inner_state = fast.update(updates, state.inner, params, context)
        count = state.count + 1
        slow = state.slow
        # Fake counts have no values: every fake update then has the memory and operations of one that returns.
        if _compat.is_fake(count) or int(count) % every == 0:
            old = local_leaves(slow)
            new = [s + share * (new_fast - s) for s, new_fast in zip(old, _updated(updates, params, slow), strict=True)]
            current = local_params(params, slow)
            slow = like(slow, new)
            updates = like(slow, [s - p for s, p in zip(new, current, strict=True)])
        return updates, LookaheadState(count, slow, inner_state)

    return ContextTransformation(init, update, by_element=fast.by_element, needs_norm=fast.needs_norm)


def _wide_copy(params: Tree) -> Tree:
    """Parameters in float32 at least, in new memory."""
    return like(params, [clone(x) if x.dtype == wide(x.dtype) else x.to(wide(x.dtype)) for x in local_leaves(params)])


def _updated(updates: Tree, params: Tree, average: Tree) -> list[Tensor]:
    """The parameters after the update as local tensors in the shardings and dtypes of an average; in new memory."""
    local_updates = local_grads(updates, average)
    current = local_params(params, average)
    targets = local_leaves(average)
    return [(p.to(x.dtype) + u).to(x.dtype) for p, u, x in zip(current, local_updates, targets, strict=True)]
