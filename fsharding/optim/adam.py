"""AdamW with torch's fused kernel on local tensors (Kingma & Ba 2015; Loshchilov & Hutter 2019).

In: gradients, moments and main parameters cut alike. Out: updates to be added, and new moments.
The kernel's last elements, past a multiple of its vector width, round differently: they go through a padded buffer.
Law: an element's update does not depend on where in a shard it stands, so all strategies agree bitwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsharding import _compat
from fsharding.optim.apply import change_slices
from fsharding.optim.base import (
    GradientTransformation,
    add_decay_,
    clone,
    grads_where,
    like,
    local_leaves,
    new_zeros,
    zeros,
)
from fsharding.optim.schedules import Schedule, as_schedule
from fsharding.tree import Tree

__all__ = ["AdamState", "adamw"]

_NAME = "fs.adamw"
_VECTOR = 64
"""Elements that the kernel takes at once on every processor, or a multiple of that."""


class AdamState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), first and second moments."""

    count: Tensor
    mu: Tree
    nu: Tree


def adamw(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    moments: torch.dtype | None = None,
) -> GradientTransformation:
    """AdamW: `-lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * p)`.

    Args:
        learning_rate: a number, or a function of the number of updates so far.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, times the learning rate.
        moments: their dtype; float32 at least by default.
    """
    rate = as_schedule(learning_rate)

    def init(params: Tree) -> AdamState:
        return AdamState(torch.zeros((), dtype=torch.int64), zeros(params, moments), zeros(params, moments))

    def update(updates: Tree, state: AdamState, params: Tree = None, *, donate: bool = False) -> tuple[Tree, AdamState]:
        grads, mu, nu = inputs(updates, state, donate)
        deltas = [new_zeros(x, x.dtype) for x in mu]
        kernel(deltas, grads, mu, nu, int(state.count), decay=0.0)
        if weight_decay and params is not None:
            add_decay_(_NAME, deltas, params, state.mu, -rate(int(state.count)) * weight_decay)
        return like(state.mu, deltas), successor(state, mu, nu)

    def apply(
        updates: Tree, state: AdamState, params: Tree, *, donate: bool = False, scale: float = 1.0
    ) -> tuple[Tree, AdamState]:
        grads, mu, nu = inputs(updates, state, donate)
        if scale != 1.0 and not donate:
            grads = [clone(g) for g in grads]  # the kernel scales them where they are

        def change(slices: list[Tensor]) -> list[Tensor]:
            main = [p.to(m.dtype) for p, m in zip(slices, mu, strict=True)]
            main = [x.contiguous() if donate or x is not p else clone(x) for x, p in zip(main, slices, strict=True)]
            kernel(main, grads, mu, nu, int(state.count), decay=weight_decay, scale=scale)
            return [x.to(p.dtype) for x, p in zip(main, slices, strict=True)]

        return change_slices(params, state.mu, change, donate=donate, function=_NAME), successor(state, mu, nu)

    def inputs(updates: Tree, state: AdamState, donate: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        grads = grads_where(_NAME, updates, state.mu)
        mu, nu = ([x.contiguous() if donate else clone(x) for x in local_leaves(m)] for m in (state.mu, state.nu))
        return [g.to(m.dtype) for g, m in zip(grads, mu, strict=True)], mu, nu

    def kernel(
        values: list[Tensor],
        grads: list[Tensor],
        mu: list[Tensor],
        nu: list[Tensor],
        count: int,
        *,
        decay: float,
        scale: float = 1.0,
    ) -> None:
        settings = {"lr": rate(count), "beta1": b1, "beta2": b2, "eps": eps, "weight_decay": decay, "scale": scale}
        _fused(values, grads, mu, nu, count + 1, settings)

    def successor(state: AdamState, mu: list[Tensor], nu: list[Tensor]) -> AdamState:
        return AdamState(state.count + 1, like(state.mu, mu), like(state.nu, nu))

    return GradientTransformation(init, update, apply)


def _fused(
    values: list[Tensor], grads: list[Tensor], mu: list[Tensor], nu: list[Tensor], step: int, settings: dict[str, float]
) -> None:
    """Runs the kernel on whole vectors of each leaf, and on all the tails in padded copies."""
    columns = [[x.reshape(-1) for x in column] for column in (values, grads, mu, nu)]
    bodies: list[list[Tensor]] = [[], [], [], []]
    tails: list[list[Tensor]] = [[], [], [], []]
    for leaf in zip(*columns, strict=True):
        cut = leaf[0].numel() // _VECTOR * _VECTOR
        for part, body, tail in zip(leaf, bodies, tails, strict=True):
            if cut:
                body.append(part[:cut])
            if cut < part.numel():
                tail.append(part[cut:])
    padded = _pad(tails) if tails[0] else []
    for body, (pad, _) in zip(bodies, padded, strict=False):
        body.append(pad)
    if not bodies[0]:
        return
    steps = [torch.tensor(float(step), device=x.device) for x in bodies[0]]
    _compat.fused_adamw_(bodies[0], bodies[1], bodies[2], bodies[3], steps, **settings)
    for (_, views), tail in zip(padded, tails, strict=False):
        _compat.foreach_copy_(tail, views)


def _pad(tails: list[list[Tensor]]) -> list[tuple[Tensor, list[Tensor]]]:
    """For each column, a zero buffer of whole vectors with the tails copied in, and the views that hold them."""
    result: list[tuple[Tensor, list[Tensor]]] = []
    for tail in tails:
        pad = torch.zeros(len(tail) * _VECTOR, dtype=tail[0].dtype, device=tail[0].device)
        views = [pad[i * _VECTOR : i * _VECTOR + x.numel()] for i, x in enumerate(tail)]
        _compat.foreach_copy_(views, tail)
        result.append((pad, views))
    return result
