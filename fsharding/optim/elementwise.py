"""Optimizers that compute each element by itself: a rule of a few lines, and the driver of all such rules.

In: a rule on lists of tensors. Out: a transformation. The driver brings gradients into the shardings of the moments,
widens moments, takes those of 8 bits a chunk at a time, keeps donated memory, and applies the rate and weight decay.
Law: an element's update depends on its gradient, moments and parameter alone, so all strategies agree bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding import _compat, tree
from fsharding.calls import call_as
from fsharding.comm.redistribute import redistribute
from fsharding.errors import ConfigError, message
from fsharding.formats import Blocks
from fsharding.optim.base import (
    ContextTransformation,
    InitContext,
    UpdateContext,
    add_decay_,
    check_moments,
    check_update,
    like,
    local_leaves,
    local_params,
    narrow,
    new_zeros,
    refuse_no_gradients,
    refuse_other_shapes,
    shardings_of,
    widen,
)
from fsharding.optim.chunked_update import Chunk, change_leaves, init_moments, leaves_of, rebuilt, step_key
from fsharding.optim.coded_moment import carriers, is_coded, moment_leaves
from fsharding.optim.schedules import Schedule, as_schedule, rate_at
from fsharding.optim.validation import FROM_0, check_moment_kind, check_settings
from fsharding.precision import wide
from fsharding.public import check_function, public
from fsharding.tree import Tree

__all__ = ["ElementwiseState", "Rule", "State", "driven", "elementwise"]

Rule: TypeAlias = Callable[..., list[Tensor]]
"""`rule(grads, *moments, count) -> directions`; see `elementwise`."""

_ROLES = ("mu", "nu", "xi", "pi")
"""What the rounding of the first, second, ... moment depends on besides key, step and place."""


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
    """How the state of an optimizer holds its moments.

    Attributes:
        kind: its type.
        make: from the count and the moments.
        moments: of a state.
    """

    kind: type
    make: Callable[[Tensor, list[Tree]], Any]
    moments: Callable[[Any], list[Tree]]


@public("fs.optim.elementwise")
def elementwise(
    rule: Rule,
    learning_rate: float | Schedule,
    names: Sequence[str] = ("mu",),
    *,
    roots: Sequence[str] = (),
    weight_decay: float = 0.0,
    moments: torch.dtype | Blocks | None = None,
) -> ContextTransformation:
    """Makes an optimizer of a rule that computes each element by itself: update `-lr * (direction + weight_decay * p)`.

    Args:
        rule: `rule(grads, *moments, count) -> directions`: gradients and moments are lists of tensors, of one dtype
            for each leaf, float32 at least; the moments are overwritten with their new values. `count` is int64, 0-d:
            the number of updates before this one. A list may have the tensors of all leaves, or a chunk of one leaf,
            and with moments of 8 bits a chunk may be computed twice: the rule has no other state.
        learning_rate: a number, or a function of the number of updates so far.
        names: of the moments, at most four; each begins as zeros.
        roots: moments that are never negative, of which a format of 8 bits keeps the root.
        weight_decay: decoupled decay, times the learning rate.
        moments: the dtype, or the format of 8 bits, in which moments are kept, as in `fs.adamw`.

    Raises:
        ConfigError: numbers below 0; moments in a dtype that kernels lack; a name twice, or too many.
        TreeError: from the update: no parameters, though they decay; or something else than gradients and this state.

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
    if len({*named}) != len(named) or len(named) > len(_ROLES):
        mend = f"Give each moment a name of its own, and at most {len(_ROLES)}."
        raise ConfigError(message(f"got names={named!r}.", mend=mend))
    state = State(
        ElementwiseState,
        lambda count, trees: ElementwiseState(count, dict(zip(named, trees, strict=True))),
        lambda state: [state.moments[name] for name in named],
    )
    return driven(
        "fs.optim.elementwise", rule, learning_rate, state, named, roots=roots, weight_decay=weight_decay,
        moments=moments,
    )  # fmt: skip


def driven(
    name: str,
    rule: Rule,
    learning_rate: float | Schedule,
    state_of: State,
    names: Sequence[str],
    *,
    roots: Sequence[str] = (),
    weight_decay: float = 0.0,
    l2: float = 0.0,
    moments: torch.dtype | Blocks | None = None,
) -> ContextTransformation:
    """See `elementwise`; `name` is the public function, and `l2` a weight decay that is added to gradients."""
    own = check_moment_kind(moments)
    rate = as_schedule(learning_rate)

    def start(params: Tree, context: InitContext) -> Any:
        trees = [init_moments(params, own, context, root=moment in roots) for moment in names]
        return state_of.make(torch.zeros((), dtype=torch.int64), trees)

    def advance(updates: Tree, state: Any, params: Tree, context: UpdateContext) -> tuple[Tree, Any]:
        check_update(state_of.kind, updates, state, params, decay=weight_decay or l2)
        before = state_of.moments(state)
        if before:
            check_moments(**dict(zip(names, before, strict=True)))
        if params is not None:
            params = tree.prune(params, updates, ("parameters", "gradients"))
        home = carriers(before[0]) if before else updates if params is None else params
        lr = rate_at(rate, state.count)  # A schedule that raises does so before anything is written.
        refuse_no_gradients(updates, home)
        refuse_other_shapes(updates, home, ("gradients", "moments" if before else "parameters"))
        grads = local_leaves(redistribute(updates, shardings_of(home)))
        if l2:
            main = [p.to(g.dtype) for p, g in zip(local_params(params, home), grads, strict=True)]
            grads = _compat.foreach_add(grads, _compat.foreach_mul(main, l2))

        def change(grads: list[Tensor], parts: list[list[Tensor]]) -> list[Tensor]:
            if parts:
                grads = [g.to(m.dtype) for g, m in zip(grads, parts[0], strict=True)]
            return _compat.foreach_mul(rule(grads, *parts, state.count), -lr)

        if any(is_coded(m) for moment in before for m in moment_leaves(moment)):
            deltas, after = _in_chunks(change, grads, before, state.count, context)
        else:
            parts = [widen(moment, donate=context.donate) for moment in before]
            deltas = change(grads, parts)
            pairs = zip(before, parts, strict=True)
            after = [narrow(moment, new, donate=context.donate) for moment, new in pairs]
        if weight_decay:
            add_decay_(deltas, params, home, -lr * weight_decay)
        return like(home, deltas), state_of.make(state.count + 1, after)

    # All optimizers share the code of these two, so errors cannot tell by it which of them was called.
    @public(f"{name}(...).init")
    def init(params: Tree, context: InitContext = InitContext()) -> Any:
        return call_as(name, start, params, context)

    @public(f"{name}(...).update")
    def update(
        updates: Tree, state: Any, params: Tree = None, context: UpdateContext = UpdateContext()
    ) -> tuple[Tree, Any]:
        return call_as(name, advance, updates, state, params, context)

    return ContextTransformation(init, update)


def _in_chunks(
    change: Callable[[list[Tensor], list[list[Tensor]]], list[Tensor]],
    grads: list[Tensor],
    before: list[Tree],
    count: Tensor,
    context: UpdateContext,
) -> tuple[list[Tensor], list[Tree]]:
    """Deltas, and new moments of which some have 8 bits. Collective where blocks are on several ranks."""
    deltas = [new_zeros(g, wide(g.dtype)) for g in grads]

    def change_chunk(i: int, chunk: Chunk, parts: list[Tensor], trial: bool) -> None:
        (delta,) = change([grads[i][chunk.place]], [[part] for part in parts])
        deltas[i][chunk.place].copy_(delta)

    after = change_leaves(
        leaves_of(before[0], context.shardings),
        [moment_leaves(moment) for moment in before],
        change_chunk,
        roles=_ROLES[: len(before)],
        key=lambda: step_key(context, count),
        donate=context.donate,
    )
    return deltas, [rebuilt(moment, new) for moment, new in zip(before, after, strict=True)]
