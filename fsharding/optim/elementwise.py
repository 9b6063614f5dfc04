"""Elementwise optimizers: a rule of a few lines, and the driver of all such rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding.base import _compat, tree
from fsharding.base.errors import ConfigError, message
from fsharding.base.public import check_function, public
from fsharding.base.tree import Tree
from fsharding.optim import base
from fsharding.optim.base import ContextTransformation, InitContext, UpdateContext, transformation
from fsharding.optim.chunked_update import ROLES, Kernel, Step, init_moments, run_rule, zeros_of
from fsharding.optim.coded_moment import MomentType, carriers, check_moment_type, check_moments, parts_of
from fsharding.optim.schedules import Schedule, as_schedule, rate_at
from fsharding.optim.updates import change_slices
from fsharding.optim.validation import FROM_0, check_settings
from fsharding.sharding.named_sharding import local_of

__all__ = ["ElementwiseState", "Rule", "State", "driven", "elementwise", "owned", "step_at"]

Rule: TypeAlias = Callable[..., list[Tensor]]
"""`rule(grads, *moments, count) -> directions`; see `elementwise`."""


class ElementwiseState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), and the moments by name.

    Example:
        >>> opt = fs.optim.elementwise(lambda grads, mu, count: grads, 0.1)
        >>> opt.init({"w": torch.ones(2)}).moments
        {'mu': {'w': tensor([0., 0.])}}
    """

    count: Tensor
    moments: dict[str, Tree]


class State(NamedTuple):
    """The state of an optimizer: a NamedTuple with a field for each moment, or `ElementwiseState`."""

    kind: type
    names: Sequence[str]
    roots: Sequence[str] = ()  # moments that are never negative; an 8-bit format stores their root

    def make(self, count: Tensor, moments: Sequence[Tree]) -> Any:
        """Make a state from its moments."""
        named = dict(zip(self.names, moments, strict=True))
        return ElementwiseState(count, named) if self.kind is ElementwiseState else self.kind(count, **named)

    def first(self, params: Tree, kept: MomentType, context: InitContext) -> Any:
        """Make the initial state."""
        trees = [init_moments(params, kept, context, root=name in self.roots) for name in self.names]
        return self.make(torch.zeros((), dtype=torch.int64), trees)

    def moments(self, state: Any) -> list[Tree]:
        """Return the moments of a state, in the order of their names."""
        held = state.moments if self.kind is ElementwiseState else state._asdict()
        return [held[name] for name in self.names]


@public
def elementwise(
    rule: Rule,
    learning_rate: float | Schedule,
    names: Sequence[str] = ("mu",),
    *,
    roots: Sequence[str] = (),
    weight_decay: float = 0.0,
    moments: MomentType = None,
) -> ContextTransformation:
    """Make an optimizer from a rule that computes each element by itself: `-lr * (direction + weight_decay * p)`.

    Args:
        rule: `rule(grads, *moments, count) -> directions`. Gradients and moments are lists of leaves or chunks of
            leaves, of one dtype per leaf, float32 at least; moments are overwritten. `count` is the number of earlier
            updates, int64, 0-d. The rule must have no other state: it may see a chunk twice.
        learning_rate: Step size: a float, or a schedule `count -> rate`.
        names: Names of the moments, at most four; each starts as zeros.
        roots: Names of moments that are never negative: an 8-bit format stores their root.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        moments: Storage dtype of the moments, or an 8-bit format, as in `fs.adamw`.

    Returns:
        A `ContextTransformation`; its state is an `ElementwiseState`.

    Raises:
        ConfigError: Settings are below 0; `moments` is a dtype without kernels; or names are repeated, or too many.
        TreeError: From the update: parameters are missing, though they decay; or gradients or state don't match.

    Example:
        >>> def signs(grads, mu, count):  # signSGD with momentum (Bernstein et al., 2018)
        ...     for g, m in zip(grads, mu):
        ...         m.lerp_(g, 0.1)
        ...     return [m.sign() for m in mu]
        >>> params, opt = {"w": torch.ones(2)}, fs.optim.elementwise(signs, 0.1)
        >>> updates, state = opt.update({"w": torch.tensor([3.0, -0.5])}, opt.init(params), params)
        >>> updates
        {'w': tensor([-0.1000,  0.1000])}
    """
    check_function("a rule (grads, *moments, count)", rule, len(names) + 2)
    check_settings((FROM_0, {"learning_rate": learning_rate, "weight_decay": weight_decay}))
    named = tuple(names)
    if len({*named}) != len(named) or len(named) > len(ROLES):
        mend = f"Pass different names, at most {len(ROLES)}."
        raise ConfigError(message(f"got names={named!r}.", mend=mend))
    state = State(ElementwiseState, named, roots)
    return driven(rule, learning_rate, state, weight_decay=weight_decay, moments=moments)


def driven(
    rule: Rule | Kernel,
    learning_rate: float | Schedule,
    state_of: State,
    *,
    weight_decay: float = 0.0,
    l2: float = 0.0,
    moments: MomentType = None,
    in_place: bool = False,
) -> ContextTransformation:
    """Make an optimizer from a rule, as `elementwise` does, or from a kernel that changes parameters in place."""
    kept = check_moment_type(moments)
    rate = as_schedule(learning_rate)
    kernel = rule if in_place else _directed(rule)

    def first(params: Tree, context: InitContext) -> Any:
        return state_of.first(params, kept, context)

    def change(
        updates: Tree, state: Any, params: Tree, context: UpdateContext, scale: float | Tensor | None = None
    ) -> tuple[Tree, Any]:
        base.check_update(state_of.kind, updates, state, params, decay=weight_decay or l2)
        before = state_of.moments(state)
        count = base.next_count(state.count, context.finite)
        settings = {} if scale is None else {"decay": weight_decay, "scale": scale, "finite": context.finite}
        # The usual step: everything is donated, local and alike, so the kernel runs on all leaves at once.
        columns = base.writable_leaves(params, updates, *before) if context.donate and scale is not None else None
        if columns is not None:
            values, grads, *parts = columns
            step = step_at(rate, state.count, grads, **settings)
            run_rule(kernel, step, values, grads, parts, updates, context)
            return params, state_of.make(count, before)
        home = _home(dict(zip(state_of.names, before, strict=True)), updates, params)
        grads = base.local_grads(updates, home, "moments" if before else "parameters")
        if l2:
            main = [p.to(g.dtype) for p, g in zip(base.local_params(params, home), grads, strict=True)]
            grads = _compat.foreach_add(grads, _compat.foreach_mul(main, l2))
        # If the schedule raises, it does so here, before anything is written.
        step = step_at(rate, state.count, grads, **settings)
        after = [owned(moment, donate=context.donate) for moment in before]
        parts = [*map(parts_of, after)]

        def ruled(values: list[Tensor] | None) -> list[Tensor]:
            return run_rule(kernel, step, values, grads, parts, (after or [home])[0], context)

        if scale is None:
            result = ruled(zeros_of(parts[0]) if in_place else None)
            if weight_decay:
                base.add_decay_(result, params, home, -step.rate * weight_decay)
            return base.like(home, result), state_of.make(count, after)
        on_slices = ruled if context.donate else lambda slices: ruled([*map(base.clone, slices)])
        return change_slices(params, home, on_slices, donate=context.donate), state_of.make(count, after)

    return transformation(first, change, applies=in_place, masks=in_place, by_element=True)


def _home(before: dict[str, Tree], updates: Tree, params: Tree) -> Tree:
    """Return a tree in the shapes and shardings in which an update is computed: of moments if there are any."""
    if before:
        check_moments(**before)
        return carriers(next(iter(before.values())))
    return updates if params is None else tree.prune(params, updates, ("parameters", "gradients"))


def _directed(rule: Rule) -> Kernel:
    """Return the kernel of a rule that returns directions."""

    def kernel(_: None, grads: list[Tensor], *rest: Any) -> list[Tensor]:
        *moments, step = rest
        return _compat.foreach_mul(rule(grads, *moments, step.count), -step.rate)

    return kernel


def step_at(rate: Schedule, count: Tensor, grads: list[Tensor], **settings: Any) -> Step:
    """Return the scalars of the update after `count` others."""
    device = grads[0].device if grads else count.device
    return Step(count, (count.to(device, non_blocking=True) + 1).float(), rate_at(rate, count), **settings)


def owned(moments: Tree, *, donate: bool) -> Tree:
    """Return moments that may be overwritten: copies, unless they are donated."""
    return moments if donate else tree.map(lambda x: base.like_leaf(x, base.clone(local_of(x))), moments)
