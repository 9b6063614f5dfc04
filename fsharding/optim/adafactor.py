"""Adafactor: second moments of matrices as means over rows and columns (Shazeer & Stern 2018), however they are cut.

In: gradients and parameters in the same shardings. Out: updates to be added, and new statistics, sharded as the
parameters along the dims that they have. A mean is of the whole matrix: ranks add their parts of it in float64.
Of the two published versions this is the one of 2018: decay `1 - t^-0.8`, updates scaled by the root mean square of the
parameters and clipped by their own, no momentum. (Zhai et al. 2022 cap the decay and add momentum.)
Guarantee: `torch.optim.Adafactor` has the same updates; a unit of a stack is updated as the unit alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsharding.base import tree
from fsharding.base.dtypes import wide
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.comm.redistribute import redistribute
from fsharding.optim.base import (
    ContextTransformation,
    InitContext,
    UpdateContext,
    check_update,
    like,
    like_leaf,
    local_leaves,
    new_zeros,
    refuse_other_shapes,
    require_params,
    shardings_of,
)
from fsharding.optim.chunked_update import leaf_of, round_whole_moment, step_key
from fsharding.optim.coded_moment import refuse_format
from fsharding.optim.schedules import Schedule, as_schedule, rate_at
from fsharding.optim.stacked import STACKS, assigned_shardings, stacked_dims, sum_dims, whole_shape
from fsharding.optim.validation import ABOVE_0, FROM_0, check_dtype, check_settings
from fsharding.sharding.leaf_plan import mean_over
from fsharding.sharding.named_sharding import NamedSharding, local_of, sharding_of

__all__ = ["AdafactorState", "adafactor"]

_STAGES = ("pp",)


class AdafactorState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), and second moments: float32 at least.

    Attributes:
        count: of updates.
        row: of matrices [..., M, N], means over their columns [..., M, 1]; None for other leaves.
        col: of matrices, means over their rows [..., 1, N]; None for other leaves.
        full: of all other leaves, in their shape; None for matrices.

    Example:
        >>> state = fs.optim.adafactor().init({"w": torch.ones(4, 2)})
        >>> state.row["w"].shape, state.col["w"].shape, state.full["w"]
        (torch.Size([4, 1]), torch.Size([1, 2]), None)
    """

    count: Tensor
    row: Tree
    col: Tree
    full: Tree

    MEANS_OVER = (("row", -1), ("col", -2))


class _Leaf(NamedTuple):
    """One leaf of an update.

    Attributes:
        path: of the parameter.
        leaf: its gradient.
        sharding: of the gradient, with assignments; None for a plain tensor.
        shape: of the whole leaf.
        grad: the local gradient, in float32 at least.
        param: the local parameter, so too.
        unit: the dims of one unit of a stack, or all dims.
        factored: whether it has means over rows and columns.
    """

    path: str
    leaf: Tensor
    sharding: NamedSharding | None
    shape: tuple[int, ...]
    grad: Tensor
    param: Tensor
    unit: tuple[int, ...]
    factored: bool

    @property
    def count(self) -> int:
        """Elements of a unit."""
        return max(math.prod(self.shape[dim] for dim in self.unit), 1)


@public("fs.optim.adafactor")
def adafactor(
    learning_rate: float | Schedule = 1e-2,
    *,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    clip: float = 1.0,
    weight_decay: float = 0.0,
    stacks: tuple[str, ...] = STACKS,
    moments: torch.dtype | None = None,
) -> ContextTransformation:
    """Adafactor, with the parameters and the updates of `torch.optim.Adafactor`.

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
        moments: the dtype in which statistics are kept; by default `Precision.moments` of the layout, or else float32
            at least. An update is computed in float32 at least, and they are rounded after it.

    Raises:
        ConfigError: numbers below 0; all of them are listed. Statistics in a dtype that kernels lack.
        LayoutError: leaves with explicit assignments without `shardings` in the context; all of them are listed.
        TreeError: from the update: no parameters, or something else than gradients and this state.

    Example:
        >>> params, opt = {"w": torch.ones(4, 2)}, fs.optim.adafactor(0.1)
        >>> updates, state = opt.update({"w": torch.full((4, 2), 3.0)}, opt.init(params), params)
        >>> fs.optim.apply_updates(params, updates)["w"][0]
        tensor([0.9000, 0.9000])
    """
    above = {"learning_rate": learning_rate, "eps[0]": eps[0] or 0.0, "eps[1]": eps[1], "weight_decay": weight_decay}
    check_settings((FROM_0, above), (ABOVE_0, {"clip": clip}))
    own = check_dtype("moments", moments)
    rate = as_schedule(learning_rate)

    @public("fs.optim.adafactor(...).init")
    def init(params: Tree, context: InitContext = InitContext()) -> AdafactorState:
        kept = own or refuse_format(context.moments, "it has means of moments, and no moments")
        flat, spec = tree.flatten(params)
        shardings = assigned_shardings(params, context.shardings, known=_STAGES)

        def zeros(path: str, x: Tensor, sharding: NamedSharding | None, dim: int) -> Tensor | None:
            factored = x.ndim - stacked_dims(path, stacks) >= 2
            if factored == (dim == 0):
                return None
            dtype = kept or wide(x.dtype)
            return _mean_zeros(x, sharding, dim, dtype) if dim else like_leaf(x, new_zeros(local_of(x), dtype))

        named = [*zip(tree.paths(params), flat, shardings, strict=True)]
        row, col, full = (tree.unflatten(spec, [zeros(*leaf, dim) for leaf in named]) for dim in (-1, -2, 0))
        return AdafactorState(torch.zeros((), dtype=torch.int64), row, col, full)

    @public("fs.optim.adafactor(...).update")
    def update(
        updates: Tree, state: AdafactorState, params: Tree = None, context: UpdateContext = UpdateContext()
    ) -> tuple[Tree, AdafactorState]:
        check_update(AdafactorState, updates, state, require_params(params))
        params = tree.prune(params, updates, ("parameters", "gradients"))
        refuse_other_shapes(params, updates, ("parameters", "gradients"))
        grads, spec = tree.flatten(updates)
        main = local_leaves(redistribute(params, shardings_of(updates)))
        leaves: list[_Leaf] = []
        shardings = assigned_shardings(updates, context.shardings, known=_STAGES)
        for path, g, sharding, p in zip(tree.paths(updates), grads, shardings, main, strict=True):
            lead = stacked_dims(path, stacks)
            dtype = wide(g.dtype)
            unit = tuple(range(lead, g.ndim))
            shape = whole_shape(g, sharding)
            factored = len(unit) >= 2
            leaves.append(_Leaf(path, g, sharding, shape, local_of(g).to(dtype), p.to(dtype), unit, factored))
        olds = [tree.flatten_up_to(spec, x, ("gradients", "moments")) for x in (state.row, state.col, state.full)]
        device = leaves[0].param.device if leaves else state.count.device
        count = state.count.to(device, non_blocking=True)
        t = count.double() + 1
        moments, sizes = _moments(leaves, olds, t**beta2_decay)
        lr = rate_at(rate, count)
        lr = lr.double() if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float64, device=device)
        scaled = _normalized(leaves, moments, eps[0])
        norms = _sums((u.square() for u in scaled), leaves, [x.unit for x in leaves])
        deltas: list[Tensor] = []
        for x, u, p2, u2 in zip(leaves, scaled, sizes, norms, strict=True):
            size = (p2 / x.count).sqrt().clamp(min=eps[1]) * torch.minimum(lr, t**-0.5)
            share = ((u2 / x.count).sqrt() / clip).clamp(min=1.0)
            delta = u.mul_((-size / share).to(u.dtype))
            deltas.append(delta.sub_(x.param * (lr * weight_decay)) if weight_decay else delta)
        key = functools.cache(lambda: step_key(context, state.count))
        rounded = functools.partial(round_whole_moment, context=context, key=key)
        placed = [_placed(moments[k], olds[k], leaves, (-1, -2, 0)[k], rounded) for k in range(3)]
        row, col, full = (tree.unflatten(spec, new) for new in placed)
        return like(updates, deltas), AdafactorState(state.count + 1, row, col, full)

    return ContextTransformation(init, update)


def _sums(terms: Iterable[Tensor], leaves: Sequence[_Leaf], dims: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return sum_dims(terms, [x.leaf for x in leaves], dims, shardings=[x.sharding for x in leaves])


def _moments(
    leaves: list[_Leaf], olds: list[list[Any]], weight: Tensor
) -> tuple[tuple[list[Any], list[Any], list[Any]], list[Tensor]]:
    """New local statistics (row, col, full), None where a leaf has none, and sums of squares of the parameters."""
    matrices = [i for i, x in enumerate(leaves) if x.factored]
    factored = [leaves[i] for i in matrices]
    sums = _sums(
        itertools.chain((x.grad.square() for x in (*factored, *factored)), (x.param.square() for x in leaves)),
        [*factored, *factored, *leaves],
        [*((x.leaf.ndim - 1,) for x in factored), *((x.leaf.ndim - 2,) for x in factored), *(x.unit for x in leaves)],
    )
    result: tuple[list[Any], list[Any], list[Any]] = tuple([None] * len(leaves) for _ in range(3))  # pyright: ignore[reportAssignmentType]
    for k, dim in enumerate((-1, -2)):
        for at, i in enumerate(matrices):
            mean = sums[k * len(matrices) + at] / max(leaves[i].shape[dim], 1)
            old = _old(olds[k][i], leaves[i], dim)
            # A stage without the leaf has no elements of its means either.
            result[k][i] = old.lerp(mean.to(old.dtype), weight.to(old.dtype)) if old.shape == mean.shape else old
    for i, x in enumerate(leaves):
        if not x.factored:
            old = _old(olds[2][i], x, 0)
            result[2][i] = old.lerp(x.grad.square().to(old.dtype), weight.to(old.dtype))
    return result, sums[2 * len(matrices) :]


def _normalized(
    leaves: list[_Leaf], moments: tuple[list[Any], list[Any], list[Any]], eps: float | None
) -> list[Tensor]:
    """Gradients over the roots of their second moments."""
    rows, cols, full = moments
    matrices = [i for i, x in enumerate(leaves) if x.factored]
    factored = [leaves[i] for i in matrices]
    sums = _sums([rows[i] for i in matrices], factored, [(x.leaf.ndim - 2,) for x in factored])
    means = dict(zip(matrices, sums, strict=True))
    result: list[Tensor] = []
    for i, x in enumerate(leaves):
        least = torch.finfo(x.leaf.dtype).eps if eps is None else eps
        if x.factored:
            mean = (means[i] / max(x.shape[-2], 1)).to(rows[i].dtype).clamp_(min=least)
            estimate = (rows[i] * cols[i]).div_(mean)
        else:
            estimate = full[i].clone()
        result.append(estimate.clamp_(min=least * least).rsqrt_().mul_(x.grad))
    return result


# -------------------------------------------------------------------------------------------- shardings of statistics


def _statistic_sharding(sharding: NamedSharding, ndim: int, dim: int) -> NamedSharding:
    return mean_over(sharding, ndim, dim) if dim else sharding


def _statistic_shape(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    at = len(shape) + dim
    return (*shape[:at], min(shape[at], 1), *shape[at + 1 :]) if dim else shape


def _mean_zeros(x: Tensor, sharding: NamedSharding | None, dim: int, dtype: torch.dtype) -> Tensor:
    """Zeros for the mean over a dim, cut as the leaf along the others."""
    if sharding is None:
        at = x.ndim + dim
        return x.new_zeros((*x.shape[:at], 1, *x.shape[at + 1 :]), dtype=dtype)
    target = _statistic_sharding(sharding, x.ndim, dim)
    shape = _statistic_shape(whole_shape(x, sharding), dim)
    return target.to_dtensor(local_of(x).new_zeros(target.local_shape(shape), dtype=dtype), shape)


def _old(x: Tensor, leaf: _Leaf, dim: int) -> Tensor:
    """The local tensor of a statistic in the sharding of its leaf's gradient, in float32 at least."""
    if leaf.sharding is not None:
        x = local_of(redistribute(x, _statistic_sharding(leaf.sharding, leaf.leaf.ndim, dim)))
    return x.to(wide(x.dtype))


def _placed(
    news: list[Any], olds: list[Any], leaves: list[_Leaf], dim: int, rounded: Callable[..., Tensor]
) -> list[Any]:
    """New statistics as leaves, in the shardings of the old ones and rounded to their dtypes."""
    result: list[Any] = []
    for new, old, leaf in zip(news, olds, leaves, strict=True):
        if new is None:
            result.append(None)
            continue
        at_grad = leaf.sharding and _statistic_sharding(leaf.sharding, leaf.leaf.ndim, dim)
        shape = _statistic_shape(leaf.shape, dim)
        new = rounded(new, old.dtype, leaf=leaf_of(leaf.path, shape, at_grad), role=str(dim))
        if at_grad is None:
            result.append(new)
            continue
        placed = at_grad.to_dtensor(new, shape)
        result.append(redistribute(placed, replace(sharding_of(old), mesh=at_grad.mesh, assigned=at_grad.assigned)))
    return result
