"""The second half of a step, from gradients to the next state: of `make_train_step`, and of one written by hand."""

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
from fsharding.train.state import TrainState, donated_if_written, main_of, rounding_key, sealed, spread

__all__ = ["update", "update_facts", "updated"]


@public
@_compat.never_inlined
def update(state: TrainState, grads: Tree, opt: GradientTransformation) -> TrainState:
    """Updates optimizer state, main parameters and parameters, and counts the step.

    Args:
        state: the state to update, which stays as it is.
        grads: mean gradients, as `fs.value_and_grad` gives them; None at frozen leaves, and at leaves that
            keep their values and moments in this update. Made with
            `grads=state.layout.main` they are where the optimizer wants them; others are resharded.
        opt: the optimizer that the state was made with.

    Returns:
        The next state. Gradients are not checked for NaN or infinity, and a loss scale is not updated: use
        `fs.make_train_step` for scaled losses.

    Raises:
        ArgumentError: an argument of another kind, or gradients and state are swapped.
        TreeError: gradients or optimizer do not fit the state.

    Example:
        >>> loss = lambda params, x: (x @ fs.gather_unit(params)["w"]).square().mean()
        >>> opt = fs.sgd(0.1)
        >>> state, _ = fs.setup(lambda key: {"w": fs.random.ones((4,))}, loss, opt, fs.random.key(0))
        >>> value, grads = fs.value_and_grad(loss, grads=state.layout.main)(state.params, torch.ones(2, 4))
        >>> state = fs.update(state, grads, opt)
        >>> int(state.step), [round(x, 4) for x in fs.unshard(state.params["w"]).tolist()]
        (1, [0.2, 0.2, 0.2, 0.2])
    """
    refuse_compiled("Call it as it is: its kernels are fused already.")
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
    """Return what a layout says about every update in it."""
    return UpdateContext(
        shardings=layout.main, rounding=layout.precision.rounding, on_host=layout.updated_on_host,
        may_be_away=layout.is_away, stacked=layout.stacked,
    )  # fmt: skip


def updated(
    state: TrainState, grads: Tree, opt: GradientTransformation, facts: UpdateContext, scale: float | Tensor = 1.0
) -> TrainState:
    """Update a state by gradients that are where the optimizer wants them; `facts` are those that no state tells."""
    layout, donate = state.layout, facts.donate
    context = replace(facts, key=state.key, step=state.step)
    with donated_if_written(state) if donate else nullcontext():
        with _compat.region("optimizer"):
            main, opt_state = apply_gradients(opt, grads, state.opt_state, main_of(state), context, scale=scale)
        with _compat.region("spread"):
            step = next_count(state.step, facts.finite)
            key = rounding_key(state.key, step, layout)
            params = spread(main, state.params, layout, donate=donate, key=key)
    kept = main if state.main is not None else None
    before = state.donate() if donate else state
    return before.replace(step=step, params=params, main=kept, opt_state=opt_state)
