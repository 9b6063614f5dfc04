"""AdamW with torch's fused kernel on local tensors (Kingma & Ba 2015; Loshchilov & Hutter 2019).

In: gradients, moments and main parameters cut alike. Out: updates to be added, and new moments.
The kernel's last elements, past a multiple of its vector width, round differently: they go through a padded copy.
It wants leaves without gaps; slices of larger ones are updated where they are, through a copy in the cache.
Law: an element's update does not depend on where in a shard it stands, so all strategies agree bitwise.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
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
    in_place,
    like,
    local_leaves,
    new_zeros,
    zeros,
)
from fsharding.optim.schedules import Schedule, as_schedule
from fsharding.optim.settings import BELOW_1, FROM_0, check_settings
from fsharding.public import public
from fsharding.tree import Tree

__all__ = ["AdamState", "adamw"]

_NAME = "fs.adamw"
_VECTOR = 64
"""Elements that the kernel takes at once on every processor, or a multiple of that."""

_LARGE = 1 << 12
"""Elements of a leaf from which on its whole vectors are not worth a copy."""

_CHUNK = 1 << 16
"""Elements of a leaf with gaps that are copied at once: few enough for a core's cache."""


class AdamState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), first and second moments."""

    count: Tensor
    mu: Tree
    nu: Tree


@public("fs.adamw")
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

    Raises:
        ConfigError: numbers below 0, or decays of moments of 1 and more; all of them are listed.
    """
    above = {"learning_rate": learning_rate, "eps": eps, "weight_decay": weight_decay}
    check_settings(_NAME, (FROM_0, above), (BELOW_1, {"b1": b1, "b2": b2}))
    rate = as_schedule(learning_rate)

    def init(params: Tree) -> AdamState:
        return AdamState(torch.zeros((), dtype=torch.int64), zeros(params, moments), zeros(params, moments))

    def update(updates: Tree, state: AdamState, params: Tree = None, *, donate: bool = False) -> tuple[Tree, AdamState]:
        grads, mu, nu = _inputs(updates, state, donate)
        deltas = [new_zeros(x, x.dtype) for x in mu]
        kernel(deltas, grads, mu, nu, int(state.count), decay=0.0)
        if weight_decay and params is not None:
            add_decay_(_NAME, deltas, params, state.mu, -rate(int(state.count)) * weight_decay)
        return like(state.mu, deltas), _successor(state, mu, nu)

    def apply(
        updates: Tree, state: AdamState, params: Tree, *, donate: bool = False, scale: float = 1.0
    ) -> tuple[Tree, AdamState]:
        columns = in_place(params, updates, state.mu, state.nu) if donate else None
        if columns is not None:
            main, grads, mu, nu = columns
            kernel(main, grads, mu, nu, int(state.count), decay=weight_decay, scale=scale)
            return params, AdamState(state.count + 1, state.mu, state.nu)
        grads, mu, nu = _inputs(updates, state, donate)
        if scale != 1.0 and not donate:
            grads = [clone(g) for g in grads]  # the kernel scales them where they are

        def change(slices: list[Tensor]) -> list[Tensor]:
            main = [p.to(m.dtype) for p, m in zip(slices, mu, strict=True)]
            main = [x.contiguous() if donate or x is not p else clone(x) for x, p in zip(main, slices, strict=True)]
            kernel(main, grads, mu, nu, int(state.count), decay=weight_decay, scale=scale)
            return [x.to(p.dtype) for x, p in zip(main, slices, strict=True)]

        return change_slices(params, state.mu, change, donate=donate, function=_NAME), _successor(state, mu, nu)

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

    return GradientTransformation(init, update, apply)


def _inputs(updates: Tree, state: AdamState, donate: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    grads = grads_where(_NAME, updates, state.mu)
    mu, nu = ([x.contiguous() if donate else clone(x) for x in local_leaves(m)] for m in (state.mu, state.nu))
    return [g.to(m.dtype).contiguous() for g, m in zip(grads, mu, strict=True)], mu, nu


def _successor(state: AdamState, mu: list[Tensor], nu: list[Tensor]) -> AdamState:
    return AdamState(state.count + 1, like(state.mu, mu), like(state.nu, nu))


def _fused(
    values: list[Tensor], grads: list[Tensor], mu: list[Tensor], nu: list[Tensor], step: int, settings: dict[str, float]
) -> None:
    """Runs the kernel on the leaves of each dtype and device."""
    kinds = [(x.dtype, x.device) for x in values]
    for kind in dict.fromkeys(kinds):
        chosen = [i for i, other in enumerate(kinds) if other == kind]
        columns = [[column[i] for i in chosen] for column in (values, grads, mu, nu)]
        _fused_alike(columns, torch.tensor(float(step), device=kind[1]), settings)


def _fused_alike(columns: Sequence[list[Tensor]], step: Tensor, settings: dict[str, float]) -> None:
    """On leaves without gaps at once, and one by one on others, such as slices of leaves that are whole elsewhere."""
    leaves = list(zip(*columns, strict=True))
    dense = [all(x.is_contiguous() for x in leaf) for leaf in leaves]
    _fused_dense([list(itertools.compress(column, dense)) for column in columns], step, settings)
    for leaf in itertools.compress(leaves, map(operator.not_, dense)):
        for chunk in zip(*map(_chunks, leaf), strict=True):
            copies = [x.contiguous() for x in chunk]
            _fused_dense([[x] for x in copies], step, settings)
            for x, copy in zip(chunk, copies, strict=True):
                if x is not copy:
                    x.copy_(copy)


def _chunks(x: Tensor) -> list[Tensor]:
    """A leaf in order, cut along its first dims on the CPU, whose caches are what chunks are for."""
    if x.device.type != "cpu":
        return [x]
    rows = _CHUNK * x.shape[0] // max(x.numel(), 1)
    return list(x.split(rows)) if rows else [chunk for row in x.unbind(0) for chunk in _chunks(row)]


def _fused_dense(columns: Sequence[list[Tensor]], step: Tensor, settings: dict[str, float]) -> None:
    """On leaves of whole vectors where they are, so on the whole vectors of large ones, and on the rest in one copy."""
    sizes = [x.numel() for x in columns[0]]
    even = [i for i, n in enumerate(sizes) if n and n % _VECTOR == 0]
    small = [i for i, n in enumerate(sizes) if n % _VECTOR and n < _LARGE]
    large = [i for i, n in enumerate(sizes) if n % _VECTOR and n >= _LARGE]
    bodies: list[list[Tensor]] = []
    rests: list[list[Tensor]] = []
    for column in columns:
        flat = [(column[i].view(-1), sizes[i] // _VECTOR * _VECTOR) for i in large]
        bodies.append([column[i] for i in even] + [x[:cut] for x, cut in flat])
        rests.append([column[i] for i in small] + [x[cut:] for x, cut in flat])
    if rests[0]:
        blank = step.new_zeros(-sum(x.numel() for x in rests[0]) % _VECTOR, dtype=rests[0][0].dtype)
        for body, rest in zip(bodies, rests, strict=True):
            body.append(_compat.packed([*rest, blank]))
    if not bodies[0]:
        return
    _compat.fused_adamw_(bodies[0], bodies[1], bodies[2], bodies[3], [step] * len(bodies[0]), **settings)
    if rests[0]:
        for k in (0, 2, 3):
            _compat.foreach_copy_(rests[k], _compat.unpack(bodies[k][-1], rests[k]))
