"""Stochastic gradient descent, with momentum if asked for (Sutskever et al. 2013), on local tensors.

In: gradients and main parameters in the same shardings. Out: updates to be added, and the new trace.
Law: one correctly rounded operation at a time, so an element's update does not depend on its position in a shard.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsharding import _compat, tree
from fsharding.comm.redistribute import redistribute
from fsharding.errors import ConfigError, message
from fsharding.formats import Blocks
from fsharding.optim.base import (
    ContextTransformation,
    InitContext,
    UpdateContext,
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
from fsharding.optim.chunked_update import Chunk, change_moment, init_moments
from fsharding.optim.coded_moment import carriers, is_coded, moment_leaves
from fsharding.optim.schedules import Schedule, as_schedule, rate_at
from fsharding.optim.validation import FROM_0, check_moment_kind, check_settings
from fsharding.precision import wide
from fsharding.public import public
from fsharding.tree import Tree

__all__ = ["SgdState", "sgd"]


class SgdState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), and the trace of gradients; None without momentum.

    Example:
        >>> fs.sgd(0.1, momentum=0.9).init({"w": torch.ones(2)}).trace
        {'w': tensor([0., 0.])}
        >>> fs.sgd(0.1).init({"w": torch.ones(2)}).trace is None
        True
    """

    count: Tensor
    trace: Tree


@public("fs.sgd")
def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    moments: torch.dtype | Blocks | None = None,
) -> ContextTransformation:
    """SGD: `t = momentum * t + d`, update `-lr * t`; with Nesterov's, `-lr * (d + momentum * t)`.

    Here `d = g + weight_decay * p`, of which `t` gets the share `1 - dampening`, but all of the first one.

    Args:
        learning_rate: a number, or a function of the number of updates so far.
        momentum: decay of the trace; 0 keeps none.
        dampening: share of a gradient that is not added to the trace.
        nesterov: look ahead; without dampening only.
        weight_decay: added to the gradient, as in `torch.optim.SGD`.
        moments: the dtype in which the trace is kept; by default that of the layout's `Precision`, or else float32 at
            least. An update is computed in float32 at least, and it is rounded after it. Or a format of 8 bits, as in
            `fs.adamw`.

    Raises:
        ConfigError: Nesterov's with dampening, or without momentum; numbers below 0, all of them listed. A trace in a
            dtype that kernels lack.
        TreeError: from the update: no parameters, though they decay; or something else than gradients and this state.

    Example:
        >>> opt = fs.sgd(0.5, momentum=0.9)
        >>> params = {"w": torch.ones(2)}
        >>> updates, state = opt.update({"w": torch.ones(2)}, opt.init(params), params)
        >>> updates["w"]
        tensor([-0.5000, -0.5000])
    """
    above = {"learning_rate": learning_rate, "momentum": momentum, "weight_decay": weight_decay}
    check_settings((FROM_0, above))
    if nesterov and (dampening or not momentum):
        text = f"got nesterov=True with momentum={momentum} and dampening={dampening}."
        raise ConfigError(message(text, mend="Nesterov's needs momentum and no dampening."))
    own = check_moment_kind(moments)
    rate = as_schedule(learning_rate)

    @public("fs.sgd(...).init")
    def init(params: Tree, context: InitContext = InitContext()) -> SgdState:
        trace = init_moments(params, own, context) if momentum else None
        return SgdState(torch.zeros((), dtype=torch.int64), trace)

    @public("fs.sgd(...).update")
    def update(
        updates: Tree, state: SgdState, params: Tree = None, context: UpdateContext = UpdateContext()
    ) -> tuple[Tree, SgdState]:
        check_update(SgdState, updates, state, params, decay=weight_decay)
        if state.trace is not None:
            check_moments(trace=state.trace)
        params = tree.prune(params, updates, ("parameters", "gradients")) if params is not None else None
        held = None if state.trace is None else carriers(state.trace)
        sharded = next(x for x in (held, params, updates) if x is not None)
        refuse_no_gradients(updates, sharded)
        refuse_other_shapes(updates, sharded, ("gradients", "parameters" if state.trace is None else "the trace"))
        resharded = redistribute(updates, shardings_of(sharded))
        grads = local_leaves(resharded)
        if weight_decay:
            main = local_params(params, sharded)
            decay = [p.to(g.dtype) for p, g in zip(main, grads, strict=True)]
            grads = _compat.foreach_add(grads, _compat.foreach_mul(decay, weight_decay))
        share: float | Tensor = 1 - dampening
        if dampening:
            # The first gradient is added whole.
            one = torch.ones((), dtype=torch.float64, device=state.count.device)
            share = torch.where(state.count > 0, share, one)

        def change(momenta: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
            _compat.foreach_mul_(momenta, momentum)
            _compat.foreach_add_(momenta, _compat.foreach_mul(grads, share) if dampening else grads)
            return _compat.foreach_add(grads, _compat.foreach_mul(momenta, momentum)) if nesterov else momenta

        lr = rate_at(rate, state.count)  # A schedule that raises does so before anything is written.
        trace, grads = state.trace, list(grads)
        if momentum and any(map(is_coded, moment_leaves(trace))):
            of_chunks = [new_zeros(g, wide(g.dtype)) for g in grads]

            def change_chunk(i: int, chunk: Chunk, m: Tensor) -> None:
                of_chunks[i][chunk.place].copy_(change([m], [grads[i][chunk.place]])[0])

            trace = change_moment(trace, context, state.count, change_chunk)
            grads = of_chunks
        elif momentum:
            momenta = widen(trace, donate=context.donate)
            grads = change(momenta, grads)
            trace = narrow(trace, momenta, donate=context.donate)
        deltas = _compat.foreach_mul(grads, -lr)
        return like(resharded, deltas), SgdState(state.count + 1, trace)

    return ContextTransformation(init, update)
