"""Adafactor: second moments of matrices as means over rows and columns (Shazeer & Stern 2018), however they are cut.

In: gradients and parameters, cut alike. Out: updates to be added, and new statistics, cut as the parameters along the
dims that they have. A mean is of the whole matrix: what the ranks of a row or a column have is summed in float64.
Of the two published versions this is the one of 2018: decay `1 - t^-0.8`, updates scaled by the root mean square of the
parameters and clipped by their own, no momentum. (Zhai et al. 2022 cap the decay and add momentum.)
Law: `torch.optim.Adafactor` has the same updates; a unit of a stack has those of the unit alone.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding import tree
from fsharding.optim.base import (
    GradientTransformation,
    like,
    like_leaf,
    local_leaves,
    new_zeros,
    refuse_unlike,
    required,
    shardings_of,
)
from fsharding.optim.schedules import Schedule, as_schedule
from fsharding.optim.settings import ABOVE_0, FROM_0, check_settings
from fsharding.optim.units import STACKS, refuse_hidden, stacked_dims, sum_dims
from fsharding.planning import mean_over
from fsharding.precision import wide
from fsharding.redistribute import redistribute
from fsharding.sharding import NamedSharding, local_of, sharding_of
from fsharding.tree import Tree

__all__ = ["AdafactorState", "adafactor"]

_NAME = "fs.optim.adafactor"


class AdafactorState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), and second moments: float32 at least.

    Attributes:
        count: of updates.
        row: of matrices [..., M, N], means over their columns [..., M, 1]; None for other leaves.
        col: of matrices, means over their rows [..., 1, N]; None for other leaves.
        full: of all other leaves, in their shape; None for matrices.
    """

    count: Tensor
    row: Tree
    col: Tree
    full: Tree


class _Leaf(NamedTuple):
    """One leaf of an update: its gradient, the local tensors that it needs, and its dims."""

    leaf: Tensor
    grad: Tensor
    param: Tensor
    unit: tuple[int, ...]
    factored: bool

    @property
    def count(self) -> int:
        """Elements of a unit."""
        return max(math.prod(self.leaf.shape[dim] for dim in self.unit), 1)


def adafactor(
    learning_rate: float | Schedule = 1e-2,
    *,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    clip: float = 1.0,
    weight_decay: float = 0.0,
    stacks: tuple[str, ...] = STACKS,
) -> GradientTransformation:
    """Adafactor, with the parameters of `torch.optim.Adafactor` and what it makes of them.

    The moments are `v = t^beta2_decay * g^2 + (1 - t^beta2_decay) * v`, their means over rows and columns for matrices;
    `u = g / sqrt(row * col / mean(row))`, or `g / sqrt(v)`; the update is
    `-max(eps[1], rms(p)) * min(lr, 1 / sqrt(t)) * u / max(1, rms(u) / clip) - lr * weight_decay * p`.

    Args:
        learning_rate: largest relative step: a number, or a function of the number of updates so far.
        beta2_decay: power of the number of updates in the decay of the moments.
        eps: smallest denominator, by default the eps of the dtype; and smallest root mean square of a parameter.
        clip: largest root mean square of an update, before the learning rate.
        weight_decay: decoupled decay, times the learning rate.
        stacks: dotted paths, or beginnings of them, of leaves whose first dim counts units: each unit has statistics of
            its own. Those of a `Model` are under `blocks`; name whatever else stages cut by layers.

    Raises:
        ConfigError: numbers below 0; all of them are listed.
    """
    above = {"learning_rate": learning_rate, "eps[0]": eps[0] or 0.0, "eps[1]": eps[1], "weight_decay": weight_decay}
    check_settings(_NAME, (FROM_0, above), (ABOVE_0, {"clip": clip}))
    rate = as_schedule(learning_rate)

    def init(params: Tree) -> AdafactorState:
        refuse_hidden(_NAME, tree.named_leaves(params), ("pp",))

        def zeros(path: str, x: Tensor, dim: int) -> Tensor | None:
            factored = x.ndim - stacked_dims(path, stacks) >= 2
            if factored == (dim == 0):
                return None
            return _mean_zeros(x, dim) if dim else like_leaf(x, new_zeros(local_of(x), wide(x.dtype)))

        row, col, full = (tree.map_with_path(lambda p, x, d=dim: zeros(p, x, d), params) for dim in (-1, -2, 0))
        return AdafactorState(torch.zeros((), dtype=torch.int64), row, col, full)

    def update(updates: Tree, state: AdafactorState, params: Tree = None) -> tuple[Tree, AdafactorState]:
        params = tree.prune(required(params, _NAME), updates, _NAME, ("parameters", "gradients"))
        refuse_unlike(_NAME, params, updates, ("parameters", "gradients"))
        where, t = shardings_of(updates), int(state.count) + 1
        grads, spec = tree.flatten(updates)
        main = local_leaves(redistribute(params, where))
        leaves: list[_Leaf] = []
        for path, g, p in zip(tree.paths(updates), grads, main, strict=True):
            lead, dtype = stacked_dims(path, stacks), wide(g.dtype)
            unit = tuple(range(lead, g.ndim))
            leaves.append(_Leaf(g, local_of(g).to(dtype), p.to(dtype), unit, len(unit) >= 2))
        olds = [
            tree.flatten_up_to(spec, x, _NAME, ("gradients", "moments")) for x in (state.row, state.col, state.full)
        ]
        moments, sizes = _moments(leaves, olds, t**beta2_decay)
        lr, scaled = rate(t - 1), _normalized(leaves, moments, eps[0])
        norms = sum_dims((u.square() for u in scaled), grads, [x.unit for x in leaves])
        deltas: list[Tensor] = []
        for x, u, p2, u2 in zip(leaves, scaled, sizes, norms, strict=True):
            size = (p2 / x.count).sqrt().clamp(min=eps[1]) * min(lr, t**-0.5)
            share = ((u2 / x.count).sqrt() / clip).clamp(min=1.0)
            delta = u.mul_((-size / share).to(u.dtype))
            deltas.append(delta.add_(x.param, alpha=-lr * weight_decay) if weight_decay else delta)
        placed = [_placed(moments[k], olds[k], grads, (-1, -2, 0)[k]) for k in range(3)]
        row, col, full = (tree.unflatten(spec, new) for new in placed)
        return like(updates, deltas), AdafactorState(state.count + 1, row, col, full)

    return GradientTransformation(init, update)


def _moments(
    leaves: list[_Leaf], olds: list[list[Any]], weight: float
) -> tuple[tuple[list[Any], list[Any], list[Any]], list[Tensor]]:
    """New local statistics (row, col, full), None where a leaf has none, and sums of squares of the parameters."""
    matrices = [i for i, x in enumerate(leaves) if x.factored]
    cut = [leaves[i] for i in matrices]
    found = sum_dims(
        itertools.chain((x.grad.square() for x in (*cut, *cut)), (x.param.square() for x in leaves)),
        [x.leaf for x in (*cut, *cut, *leaves)],
        [*((x.leaf.ndim - 1,) for x in cut), *((x.leaf.ndim - 2,) for x in cut), *(x.unit for x in leaves)],
    )
    result: tuple[list[Any], list[Any], list[Any]] = tuple([None] * len(leaves) for _ in range(3))  # pyright: ignore[reportAssignmentType]
    for k, dim in enumerate((-1, -2)):
        for at, i in enumerate(matrices):
            leaf = leaves[i].leaf
            mean = found[k * len(matrices) + at] / max(leaf.shape[dim], 1)
            old = _old(olds[k][i], leaf, dim)
            # A stage without the leaf has nothing of its means either.
            result[k][i] = old.lerp(mean.to(old.dtype), weight) if old.shape == mean.shape else old
    for i, x in enumerate(leaves):
        if not x.factored:
            result[2][i] = _old(olds[2][i], x.leaf, 0).lerp(x.grad.square(), weight)
    return result, found[2 * len(matrices) :]


def _normalized(
    leaves: list[_Leaf], moments: tuple[list[Any], list[Any], list[Any]], eps: float | None
) -> list[Tensor]:
    """Gradients over the roots of their second moments."""
    rows, cols, full = moments
    matrices = [i for i, x in enumerate(leaves) if x.factored]
    cut = [leaves[i].leaf for i in matrices]
    means = dict(zip(matrices, sum_dims([rows[i] for i in matrices], cut, [(x.ndim - 2,) for x in cut]), strict=True))
    result: list[Tensor] = []
    for i, x in enumerate(leaves):
        least = torch.finfo(x.leaf.dtype).eps if eps is None else eps
        if x.factored:
            mean = (means[i] / max(x.leaf.shape[-2], 1)).to(rows[i].dtype).clamp_(min=least)
            estimate = (rows[i] * cols[i]).div_(mean)
        else:
            estimate = full[i].clone()
        result.append(estimate.clamp_(min=least * least).rsqrt_().mul_(x.grad))
    return result


# ---------------------------------------------------------------------------------------------- where statistics are


def _sharding(x: DTensor, dim: int) -> NamedSharding:
    return mean_over(sharding_of(x), x.ndim, dim) if dim else sharding_of(x)


def _shape(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    at = len(shape) + dim
    return (*shape[:at], min(shape[at], 1), *shape[at + 1 :]) if dim else shape


def _mean_zeros(x: Tensor, dim: int) -> Tensor:
    """Zeros for the mean over a dim, cut as the leaf along the others."""
    if not isinstance(x, DTensor):
        at = x.ndim + dim
        return x.new_zeros((*x.shape[:at], 1, *x.shape[at + 1 :]), dtype=wide(x.dtype))
    where, shape = _sharding(x, dim), _shape(tuple(x.shape), dim)
    local = local_of(x).new_zeros(where.local_shape(shape), dtype=wide(x.dtype))
    return where.at_rest(local, shape)


def _old(x: Tensor, leaf: Tensor, dim: int) -> Tensor:
    """The local tensor of a statistic where the gradient of its leaf is."""
    return local_of(redistribute(x, _sharding(leaf, dim))) if isinstance(leaf, DTensor) else x


def _placed(news: list[Any], olds: list[Any], grads: list[Any], dim: int) -> list[Any]:
    """New statistics as leaves, where the old ones were."""
    result: list[Any] = []
    for new, old, grad in zip(news, olds, grads, strict=True):
        if new is None or not isinstance(grad, DTensor):
            result.append(new)
            continue
        at_grad = _sharding(grad, dim).at_rest(new, _shape(tuple(grad.shape), dim))
        result.append(redistribute(at_grad, sharding_of(old)))
    return result
