"""Transformations around an optimizer: averages of parameters, and gradient noise that is equal in every layout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsharding.base import _compat, tree
from fsharding.base.dtypes import wide
from fsharding.base.errors import TreeError, message
from fsharding.base.public import check_optimizer, public
from fsharding.base.tree import Tree
from fsharding.optim import base
from fsharding.optim.base import ContextTransformation, GradientTransformation, InitContext, UpdateContext
from fsharding.optim.coded_moment import check_moments
from fsharding.optim.schedules import Schedule, as_schedule, rate_at
from fsharding.optim.stacked import assigned_shardings, whole_shape
from fsharding.optim.validation import FROM_0, FROM_1, TO_1, check_settings
from fsharding.sharding import random
from fsharding.sharding.named_sharding import NamedSharding, local_of
from fsharding.train.state import own_part

__all__ = ["EmaState", "LookaheadState", "NoiseState", "add_noise", "annealed", "ema", "ema_of", "lookahead"]


class EmaState(NamedTuple):
    """State of `ema`: number of updates (int64, 0-d, on the CPU), and averaged parameters, in float32 at least.

    Example:
        >>> fs.optim.ema(0.9).init({"w": torch.ones(2)}).average
        {'w': tensor([1., 1.])}
    """

    count: Tensor
    average: Tree


class LookaheadState(NamedTuple):
    """State of `lookahead`: number of updates (int64, 0-d, CPU), slow parameters (float32 at least), inner state.

    Example:
        >>> fs.optim.lookahead(fs.sgd(0.1)).init({"w": torch.ones(2)}).slow
        {'w': tensor([1., 1.])}
    """

    count: Tensor
    slow: Tree
    inner: Tree


@public
def ema(decay: float | Schedule = 0.999) -> ContextTransformation:
    """Exponential moving average of the parameters (after Polyak & Juditsky 1992); updates pass through unchanged.

    `average = decay * average + (1 - decay) * (p + update)`, starting from the first parameters. Put it last, as in
    `fs.optim.chain(fs.adamw(3e-4), fs.optim.ema(0.999))`. Router biases enter the average one step later.

    Args:
        decay: Weight of the old average: a float in [0, 1], or a schedule `count -> decay`.

    Returns:
        A `ContextTransformation` whose state is an `EmaState`; read the average with `ema_of`.

    Raises:
        ConfigError: `decay` is outside [0, 1].

    Example:
        >>> params, opt = {"w": torch.ones(2)}, fs.optim.chain(fs.sgd(1.0), fs.optim.ema(0.75))
        >>> updates, state = opt.update({"w": torch.ones(2)}, opt.init(params), params)
        >>> fs.optim.apply_updates(params, updates), fs.optim.ema_of(state)
        ({'w': tensor([0., 0.])}, {'w': tensor([0.7500, 0.7500])})
    """
    check_settings((TO_1, {"decay": decay}))
    rate = as_schedule(decay)

    def first(params: Tree, context: InitContext) -> EmaState:
        return EmaState(torch.zeros((), dtype=torch.int64), _wide_copy(params))

    def change(updates: Tree, state: EmaState, params: Tree, context: UpdateContext) -> tuple[Tree, EmaState]:
        base.check_update(EmaState, updates, state, params)
        check_moments(average=state.average)
        average = [x if context.donate else base.clone(x) for x in base.local_leaves(state.average)]
        updated = _updated(updates, base.local_params(base.require_params(params), state.average), state.average)
        share = rate_at(rate, state.count)
        _compat.foreach_mul_(average, share)
        _compat.foreach_mul_(updated, 1 - share)
        _compat.foreach_add_(average, updated)
        return updates, EmaState(state.count + 1, base.like(state.average, average))

    return base.transformation(first, change, by_element=True)


@public
def ema_of(opt_state: Tree) -> Tree:
    """Find the average of an `ema` in an optimizer state.

    Evaluate with `fs.params_from_main(fs.optim.ema_of(state.opt_state), state.params, state.layout)`.

    Args:
        opt_state: State of an optimizer that contains one `ema`.

    Returns:
        The averaged parameters, in the sharding of the main parameters.

    Raises:
        TreeError: The state has no `EmaState`, or several.

    Example:
        >>> opt = fs.optim.chain(fs.adamw(1e-3), fs.optim.ema(0.999))
        >>> fs.optim.ema_of(opt.init({"w": torch.ones(2)}))
        {'w': tensor([1., 1.])}
    """
    flat = tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, EmaState))
    averages = [x.average for x in flat if isinstance(x, EmaState)]
    if len(averages) != 1:
        mend = "Put one fs.optim.ema at the end of the chain, or take state.average out of the state yourself."
        raise TreeError(message(f"finds {len(averages)} averages in the optimizer state.", mend=mend))
    return averages[0]


@public
def lookahead(inner: GradientTransformation, *, every: int = 6, share: float = 0.5) -> ContextTransformation:
    """Lookahead (Zhang et al. 2019, arXiv:1907.08610): at times `slow += share * (fast - slow)`, and restart from it.

    Args:
        inner: Optimizer that makes the fast updates.
        every: Number of fast updates per slow one.
        share: Step size of slow updates, in [0, 1].

    Returns:
        A `ContextTransformation` whose state is a `LookaheadState`.

    Raises:
        ArgumentError: `inner` isn't an optimizer.
        ConfigError: `every` isn't an integer from 1, or `share` is outside [0, 1].

    Example:
        >>> params, opt = {"w": torch.ones(1)}, fs.optim.lookahead(fs.sgd(0.25), every=2, share=0.5)
        >>> fast, state = fs.optim.apply_gradients(opt, {"w": torch.ones(1)}, opt.init(params), params)
        >>> fast["w"], fs.optim.apply_gradients(opt, {"w": torch.ones(1)}, state, fast)[0]["w"]
        (tensor([0.7500]), tensor([0.7500]))
    """
    check_optimizer(inner)
    check_settings((FROM_1, {"every": every}), (TO_1, {"share": share}))
    fast = inner.with_context()

    def first(params: Tree, context: InitContext) -> LookaheadState:
        return LookaheadState(torch.zeros((), dtype=torch.int64), _wide_copy(params), fast.init(params, context))

    def change(
        updates: Tree, state: LookaheadState, params: Tree, context: UpdateContext
    ) -> tuple[Tree, LookaheadState]:
        base.check_update(LookaheadState, updates, state, params)
        check_moments(slow=state.slow)
        params = base.require_params(params)
        updates, inner_state = fast.update(updates, state.inner, params, context)
        count = state.count + 1
        slow = state.slow
        # Fake counts have no values: every fake update has the memory and operations of one that moves `slow`.
        if _compat.is_fake(count) or int(count) % every == 0:
            old = base.local_leaves(slow)
            current = base.local_params(params, slow)
            new = [s + share * (moved - s) for s, moved in zip(old, _updated(updates, current, slow), strict=True)]
            slow = base.like(slow, new)
            updates = base.like(slow, [s - p for s, p in zip(new, current, strict=True)])
        return updates, LookaheadState(count, slow, inner_state)

    return base.transformation(first, change, by_element=fast.by_element, needs_norm=fast.needs_norm)


def _wide_copy(params: Tree) -> Tree:
    """Copy parameters, in float32 at least: a narrow dtype would lose most changes of an average."""
    return tree.map(lambda x: base.like_leaf(x, local_of(x).contiguous().to(wide(x.dtype), copy=True)), params)


def _updated(updates: Tree, params: list[Tensor], average: Tree) -> list[Tensor]:
    """Add updates to local parameters in new memory, with the shardings and dtypes of an average."""
    columns = (params, base.local_grads(updates, average), base.local_leaves(average))
    return [(p.to(x.dtype) + u).to(x.dtype) for p, u, x in zip(*columns, strict=True)]


class NoiseState(NamedTuple):
    """State of `add_noise`: number of updates (int64, 0-d) and random key (int64[2]), both on the CPU.

    Example:
        >>> fs.optim.add_noise(0.1, fs.random.key(7)).init({"w": torch.ones(2)}).count
        tensor(0)
    """

    count: Tensor
    key: Tensor


def annealed(eta: float, gamma: float = 0.55) -> Schedule:
    """Decay the standard deviation for `add_noise`: `sqrt(eta / (1 + count)^gamma)` (arXiv:1511.06807, eq. 1).

    Args:
        eta: Variance of the first update.
        gamma: Exponent of the decay.

    Returns:
        A schedule `count -> std`.

    Example:
        >>> round(fs.optim.annealed(0.01)(100), 4)
        0.0281
    """
    return lambda count: (eta / (1 + count) ** gamma) ** 0.5


@public
def add_noise(std: float | Schedule, key: Tensor) -> ContextTransformation:
    """Add normal noise to gradients (Neelakantan et al. 2015, arXiv:1511.06807); put it before clipping and optimizer.

    Args:
        std: Standard deviation: a float, or a schedule `count -> std`, such as `annealed(0.3)`.
        key: Random key, int64[2], from which each update derives its noise.

    Returns:
        A `ContextTransformation` whose state is a `NoiseState`.

    Raises:
        ConfigError: `std` is below 0.
        LayoutError: Leaves have explicit assignments, and the context has no `shardings`; all are listed.

    Example:
        >>> opt, grads = fs.optim.add_noise(0.1, fs.random.key(0)), {"w": torch.zeros(2)}
        >>> first, same = (opt.update(grads, opt.init(grads))[0] for _ in range(2))
        >>> torch.equal(first["w"], same["w"]), bool(first["w"].any())
        (True, True)
    """
    check_settings((FROM_0, {"std": std}))

    def first(params: Tree, context: InitContext) -> NoiseState:
        return NoiseState(torch.zeros((), dtype=torch.int64), key.clone())

    def change(updates: Tree, state: NoiseState, params: Tree, context: UpdateContext) -> tuple[Tree, NoiseState]:
        base.check_state(NoiseState, updates, state)
        shardings = assigned_shardings(updates, context.shardings)
        count = int(state.count)
        scale = std(count) if callable(std) else std
        step_key = random.fold_in(state.key, count)
        flat, spec = tree.flatten(updates)

        def noisy(number: int, x: Tensor, sharding: NamedSharding | None) -> Tensor:
            draw = random.normal(random.fold_in(step_key, number), whole_shape(x, sharding), std=scale, dtype=x.dtype)
            noise = draw.tensor() if sharding is None else own_part(draw, sharding)
            return base.like_leaf(x, local_of(x) + noise.to(x.device))

        noisy_leaves = [*map(noisy, range(len(flat)), flat, shardings)]
        return tree.unflatten(spec, noisy_leaves), NoiseState(state.count + 1, state.key)

    return base.transformation(first, change)
