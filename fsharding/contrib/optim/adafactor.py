"""Adafactor (Shazeer & Stern 2018): statistics of full matrices, summed over ranks in float64."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.dtypes import wide
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.comm.redistribute import redistribute
from fsharding.optim import base
from fsharding.optim.base import ContextTransformation, InitContext, UpdateContext
from fsharding.optim.chunked_update import round_whole_moment, step_key
from fsharding.optim.coded_moment import leaf_of, refuse_format
from fsharding.optim.schedules import Schedule, as_schedule, rate_at
from fsharding.optim.stacked import STACKS, assigned_shardings, stacked_dims, sum_dims, whole_shape
from fsharding.optim.validation import ABOVE_0, FROM_0, check_dtype, check_settings
from fsharding.sharding.leaf_plan import mean_over
from fsharding.sharding.named_sharding import NamedSharding, local_of, sharding_of

__all__ = ["AdafactorState", "adafactor"]

_Shape: TypeAlias = tuple[int, ...]
_STAGES = ("pp",)
_DIMS = (-1, -2, 0)  # over which `row` and `col` are means; 0 stands for `full`


class AdafactorState(NamedTuple):
    """State of `adafactor`: second moments, in float32 at least.

    Attributes:
        count: Number of updates (int64, 0-d, on the CPU).
        row, col: Means for matrices [..., M, N] over columns, [..., M, 1], and over rows, [..., 1, N]; else None.
        full: Moments of all other leaves, in their shapes; None for matrices.

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
    """One leaf of an update, with local values in float32 at least."""

    path: str
    leaf: Tensor  # the gradient as it was given
    sharding: NamedSharding | None  # of the gradient, with assignments; None for a plain tensor
    shape: _Shape  # global shape
    grad: Tensor
    param: Tensor
    unit: tuple[int, ...]  # the dims of one unit of a stack, or all dims
    olds: dict[int, Tensor]  # statistics by dim: -1 and -2 of a matrix, 0 of any other leaf

    def rms(self, squares: Tensor) -> Tensor:
        """Return the root mean square of each unit, from sums of squares."""
        return (squares / max(math.prod(self.shape[dim] for dim in self.unit), 1)).sqrt()


@public
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
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), with the defaults and updates of `torch.optim.Adafactor`.

    `v = t^beta2_decay * g^2 + (1 - t^beta2_decay) * v`, for matrices only its means over rows and columns;
    `u = g / sqrt(row * col / mean(row))` for matrices, else `g / sqrt(v)`; the update is
    `-max(eps[1], rms(p)) * min(lr, 1 / sqrt(t)) * u / max(1, rms(u) / clip) - lr * weight_decay * p`.

    Args:
        learning_rate: Largest relative step size: a float, or a schedule `count -> rate`.
        beta2_decay: Exponent of the step number in the decay rate of the moments.
        eps: Smallest denominator (None: the eps of the dtype), and smallest root mean square of a parameter.
        clip: Largest root mean square of an update, before the learning rate.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        stacks: Dotted paths, or prefixes of paths, of leaves whose first dim counts units with separate statistics.
            Default: those of a `Model`; list all other leaves that pipeline stages split by layers.
        moments: Dtype of the statistics. Default: the layout's `Precision.moments`, float32 at least.

    Returns:
        A `ContextTransformation` whose state is an `AdafactorState`; its update is collective if leaves are sharded.

    Raises:
        ConfigError: A number is below 0, or kernels lack the dtype of the statistics; all numbers are listed.
        LayoutError: Leaves have explicit assignments, and the context has no `shardings`; all are listed.
        TreeError: The update gets no parameters, or arguments that aren't gradients and this state.

    Example:
        >>> params, opt = {"w": torch.ones(4, 2)}, fs.optim.adafactor(0.1)
        >>> updates, state = opt.update({"w": torch.full((4, 2), 3.0)}, opt.init(params), params)
        >>> fs.optim.apply_updates(params, updates)["w"][0]
        tensor([0.9000, 0.9000])
    """
    above = {"learning_rate": learning_rate, "eps[0]": eps[0] or 0.0, "eps[1]": eps[1], "weight_decay": weight_decay}
    check_settings((FROM_0, above), (ABOVE_0, {"clip": clip}))
    own = check_dtype("moments", moments)
    rule = _Adafactor(as_schedule(learning_rate), beta2_decay, eps, clip, weight_decay, stacks)

    def first(params: Tree, context: InitContext) -> AdafactorState:
        kept = own or refuse_format(context.moments, "it has means of moments, and no moments")
        flat, spec = tree.flatten(params)
        shardings = assigned_shardings(params, context.shardings, known=_STAGES)
        leaves = [*zip(tree.paths(params), flat, shardings, strict=True)]

        def zeros(dim: int, path: str, x: Tensor, sharding: NamedSharding | None) -> Tensor | None:
            if (x.ndim - stacked_dims(path, stacks) >= 2) == (dim == 0):
                return None
            shape, target = _statistic(whole_shape(x, sharding), sharding, dim)
            local = local_of(x).new_zeros(target.local_shape(shape) if target else shape, dtype=kept or wide(x.dtype))
            return target.to_dtensor(local, shape) if target else local

        row, col, full = (tree.unflatten(spec, [zeros(dim, *leaf) for leaf in leaves]) for dim in _DIMS)
        return AdafactorState(torch.zeros((), dtype=torch.int64), row, col, full)

    return base.transformation(first, functools.partial(_Adafactor.update, rule))


@dataclass(frozen=True)
class _Adafactor:
    """The settings of an update; see `adafactor`."""

    rate: Schedule
    beta2_decay: float
    eps: tuple[float | None, float]
    clip: float
    weight_decay: float
    stacks: tuple[str, ...]

    def update(
        self, updates: Tree, state: AdafactorState, params: Tree, context: UpdateContext
    ) -> tuple[Tree, AdafactorState]:
        """Compute updates and new statistics. Collective over the axes that shard the leaves."""
        base.check_update(AdafactorState, updates, state, base.require_params(params))
        params = tree.prune(params, updates, ("parameters", "gradients"))
        base.refuse_other_shapes(params, updates, ("parameters", "gradients"))
        grads, spec = tree.flatten(updates)
        main = base.local_leaves(redistribute(params, base.shardings_of(updates)))
        shardings = assigned_shardings(updates, context.shardings, known=_STAGES)
        columns = [tree.flatten_up_to(spec, x, ("gradients", "moments")) for x in (state.row, state.col, state.full)]
        leaves: list[_Leaf] = []
        for path, g, sharding, p, *held in zip(tree.paths(updates), grads, shardings, main, *columns, strict=True):
            dtype, unit = wide(g.dtype), tuple(range(stacked_dims(path, self.stacks), g.ndim))
            olds = {dim: x for dim, x in zip(_DIMS, held, strict=True) if x is not None}
            shape = whole_shape(g, sharding)
            leaves.append(_Leaf(path, g, sharding, shape, local_of(g).to(dtype), p.to(dtype), unit, olds))
        device = leaves[0].param.device if leaves else state.count.device
        count = state.count.to(device, non_blocking=True)
        t = count.double() + 1
        moments, sizes = _moments(leaves, t**self.beta2_decay)
        lr = rate_at(self.rate, count)
        lr = lr.double() if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float64, device=device)
        scaled = _normalized(leaves, moments, self.eps[0])
        norms = _sums((u.square() for u in scaled), leaves, [x.unit for x in leaves])
        deltas: list[Tensor] = []
        for x, u, p2, u2 in zip(leaves, scaled, sizes, norms, strict=True):
            size = x.rms(p2).clamp(min=self.eps[1]) * torch.minimum(lr, t**-0.5)
            share = (x.rms(u2) / self.clip).clamp(min=1.0)
            delta = u.mul_((-size / share).to(u.dtype))
            deltas.append(delta.sub_(x.param * (lr * self.weight_decay)) if self.weight_decay else delta)
        key = functools.cache(lambda: step_key(context, state.count))
        pairs = [*zip(leaves, moments, strict=True)]
        row, col, full = (tree.unflatten(spec, [_kept(x, dim, new, context, key) for x, new in pairs]) for dim in _DIMS)
        return base.like(updates, deltas), AdafactorState(state.count + 1, row, col, full)


def _sums(terms: Iterable[Tensor], leaves: Sequence[_Leaf], dims: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return sum_dims(terms, [x.leaf for x in leaves], dims, shardings=[x.sharding for x in leaves])


def _moments(leaves: list[_Leaf], weight: Tensor) -> tuple[list[dict[int, Tensor]], list[Tensor]]:
    """Return the new local statistics of each leaf by dim, and the sums of squares of the parameters."""
    # Ranks hold parts of rows and columns, so means need sums over ranks: all of them in one collective.
    means = [(i, dim) for dim in (-1, -2) for i, x in enumerate(leaves) if dim in x.olds]
    factored = [leaves[i] for i, _ in means]
    sums = _sums(
        itertools.chain((x.grad.square() for x in factored), (x.param.square() for x in leaves)),
        [*factored, *leaves],
        [*((leaves[i].leaf.ndim + dim,) for i, dim in means), *(x.unit for x in leaves)],
    )
    moments: list[dict[int, Tensor]] = [{} for _ in leaves]
    for (i, dim), total in zip(means, sums, strict=False):
        moments[i][dim] = _averaged(leaves[i], dim, total / max(leaves[i].shape[dim], 1), weight)
    for new, x in zip(moments, leaves, strict=True):
        if 0 in x.olds:
            new[0] = _averaged(x, 0, x.grad.square(), weight)
    return moments, sums[len(means) :]


def _averaged(x: _Leaf, dim: int, new: Tensor, weight: Tensor) -> Tensor:
    """Move an old statistic toward a new value, in the sharding of the gradient and in float32 at least."""
    old = x.olds[dim]
    if x.sharding is not None:
        old = local_of(redistribute(old, _statistic(x.shape, x.sharding, dim)[1]))
    old = old.to(wide(old.dtype))
    # A stage that doesn't own the leaf has no elements of its means either, so shapes differ there.
    return old.lerp(new.to(old.dtype), weight.to(old.dtype)) if old.shape == new.shape else old


def _normalized(leaves: list[_Leaf], moments: list[dict[int, Tensor]], eps: float | None) -> list[Tensor]:
    """Divide gradients by the roots of their second moments."""
    factored = [(x, new) for x, new in zip(leaves, moments, strict=True) if 0 not in new]
    dims = [(x.leaf.ndim - 2,) for x, _ in factored]
    sums = iter(_sums((new[-1] for _, new in factored), [x for x, _ in factored], dims))
    result: list[Tensor] = []
    for x, new in zip(leaves, moments, strict=True):
        least = torch.finfo(x.leaf.dtype).eps if eps is None else eps
        if 0 in new:
            estimate = new[0].clone()
        else:
            mean = (next(sums) / max(x.shape[-2], 1)).to(new[-1].dtype).clamp_(min=least)
            estimate = (new[-1] * new[-2]).div_(mean)
        result.append(estimate.clamp_(min=least * least).rsqrt_().mul_(x.grad))
    return result


def _statistic(shape: _Shape, sharding: NamedSharding | None, dim: int) -> tuple[_Shape, NamedSharding | None]:
    """Return the shape and the sharding of a statistic of a leaf."""
    if dim == 0:
        return shape, sharding
    at = len(shape) + dim
    size = 1 if sharding is None else min(shape[at], 1)
    return (*shape[:at], size, *shape[at + 1 :]), sharding and mean_over(sharding, len(shape), dim)


def _kept(
    x: _Leaf, dim: int, moments: dict[int, Tensor], context: UpdateContext, key: Callable[[], Tensor]
) -> Tensor | None:
    """Return a new statistic in the sharding of the old one, rounded to its dtype."""
    if dim not in moments:
        return None
    shape, at_grad = _statistic(x.shape, x.sharding, dim)
    old, leaf = x.olds[dim], leaf_of(x.path, shape, at_grad)
    new = round_whole_moment(moments[dim], old.dtype, context, leaf, str(dim), key)
    if at_grad is None:
        return new
    target = replace(sharding_of(cast(DTensor, old)), mesh=at_grad.mesh, assigned=at_grad.assigned)
    return redistribute(at_grad.to_dtensor(new, shape), target)
