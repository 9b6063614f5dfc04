"""The second half of a step, from gradients to the next state: for `make_train_step` and for hand-written loops."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from torch import Tensor

from fsharding.base import _compat, tree
from fsharding.base.errors import ArgumentError, message
from fsharding.base.public import check_optimizer, is_optimizer, kind_of, public, refuse, refuse_compiled
from fsharding.base.tree import Tree
from fsharding.comm.redistribute import redistribute
from fsharding.optim.base import GradientTransformation, UpdateContext, next_count, refuse_no_gradients
from fsharding.optim.updates import apply_gradients
from fsharding.sharding.layout import Layout
from fsharding.train.in_flight import left_in_flight, unread
from fsharding.train.state import TrainState, donated_if_written, main_of, rounding_key, sealed, spread

__all__ = ["update", "update_facts", "updated"]


@public
@_compat.never_inlined
def update(state: TrainState, grads: Tree, opt: GradientTransformation) -> TrainState:
    """Apply gradients to a state: update optimizer state, main parameters and parameters, and count the step.

    Gradients aren't checked for NaN or infinity, and a loss scale isn't updated: `fs.make_train_step` does both.

    Args:
        state: Current state; it isn't changed.
        grads: Mean gradients, as `fs.value_and_grad` returns them. None at a frozen leaf, or at one whose values and
            moments stay. With `value_and_grad(..., grads=state.layout.main)` nothing needs to be resharded.
        opt: Optimizer that the state was made with.

    Returns:
        The next state.

    Raises:
        ArgumentError: An argument has a wrong type, or gradients and state are swapped.
        TreeError: Gradients or optimizer don't match the state.

    Example:
        >>> loss = lambda params, x: (x @ fs.gather_unit(params)["w"]).square().mean()
        >>> opt = fs.sgd(0.1)
        >>> state, _ = fs.setup(lambda key: {"w": fs.random.ones((4,))}, loss, opt, fs.random.key(0))
        >>> value, grads = fs.value_and_grad(loss, grads=state.layout.main)(state.params, torch.ones(2, 4))
        >>> state = fs.update(state, grads, opt)
        >>> int(state.step), [round(x, 4) for x in fs.unshard(state.params["w"]).tolist()]
        (1, [0.2, 0.2, 0.2, 0.2])
    """
    refuse_compiled("Call it without torch.compile: its kernels are fused already.")
    if not isinstance(state, TrainState):
        swapped = isinstance(grads, TrainState)
        mend = "Swap the two: fs.update(state, grads, opt)." if swapped else "Make one with fs.setup or fs.init_state."
        raise ArgumentError(message(f"takes a TrainState first, got {kind_of(state)}.", mend=mend))
    if is_optimizer(grads) and not is_optimizer(opt):
        raise refuse("gradients, then an optimizer", grads, "Swap the two: fs.update(state, grads, opt).")
    check_optimizer(opt)
    refuse_no_gradients(grads, state.opt_state)
    layout = state.layout
    reduced, main = (tree.prune(x, grads, ("the layout", "grads")) for x in (layout.reduced, layout.main))
    return sealed(updated(state, redistribute(grads, reduced), opt, replace(update_facts(layout), shardings=main)))


def update_facts(layout: Layout) -> UpdateContext:
    """Return the part of an update's context that follows from the layout."""
    return UpdateContext(
        shardings=layout.main, rounding=layout.precision.rounding, on_host=layout.updated_on_host,
        may_be_away=bool(layout.strategy.memory), stacked=layout.stacked,
    )  # fmt: skip


def updated(
    state: TrainState, grads: Tree, opt: GradientTransformation, facts: UpdateContext, scale: float | Tensor = 1.0
) -> TrainState:
    """Update a state by gradients in `layout.reduced`; `facts` is a context without the state's key and step."""
    layout, donate = state.layout, facts.donate
    context = replace(facts, key=state.key, step=state.step)
    # If the update fails halfway `donated_if_written` donates the state, else `before` does.
    with donated_if_written(state) if donate else nullcontext():
        with _compat.region("optimizer"):
            held = unread(state, "opt_state")
            main, opt_state = apply_gradients(opt, grads, held, main_of(state), context, scale=scale)
            here = facts.copies.on_device(main)
        with _compat.region("spread"):
            step = next_count(state.step, facts.finite)
            key = rounding_key(state.key, step, layout)
            params = spread(here, state.params, layout, donate=donate, key=key)
    kept = main if unread(state, "main") is not None else None
    before = state.donate() if donate else state
    after = before.replace(step=step, params=params, main=kept, opt_state=opt_state)
    return left_in_flight(after, facts.copies.left())
