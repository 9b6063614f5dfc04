"""Adafactor (Shazeer & Stern 2018): statistics of full matrices, summed over ranks in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fsharding.base import tree
from fsharding.base.dtypes import wide
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.comm.redistribute import redistribute
from fsharding.optim import base
from fsharding.optim.base import ContextTransformation, InitContext, UpdateContext
from fsharding.optim.chunked_update import round_whole_moment, step_key
from fsharding.optim.coded_moment import leaf_of, refuse_format
from fsharding.optim.elementwise import step_at
from fsharding.optim.schedules import Schedule, as_schedule
from fsharding.optim.stacked import STACKS, assigned_shardings, stacked_dims, sum_dims, whole_shape
from fsharding.optim.validation import ABOVE_0, FROM_0, check_dtype, check_settings
from fsharding.sharding.leaf_plan import mean_over
from fsharding.sharding.named_sharding import NamedSharding, local_of, sharding_of

__all__ = ["AdafactorState", "adafactor"]

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
    """A parameter, and where it is."""

    path: str
    value: Tensor
    sharding: NamedSharding | None  # with assignments; None for a plain tensor

    def statistic(self, dim: int) -> tuple[tuple[int, ...], NamedSharding | None]:
        """Return the shape and the sharding of a statistic."""
        shape = whole_shape(self.value, self.sharding)
        if dim == 0:
            return shape, self.sharding
        at = len(shape) + dim
        size = 1 if self.sharding is None else min(shape[at], 1)
        return (*shape[:at], size, *shape[at + 1 :]), self.sharding and mean_over(self.sharding, len(shape), dim)


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
        leaves, spec = _leaves(params, context)

        def zeros(x: _Leaf, dim: int) -> Tensor | None:
            if (x.value.ndim - stacked_dims(x.path, stacks) >= 2) == (dim == 0):
                return None
            shape, target = x.statistic(dim)
            here = target.local_shape(shape) if target else shape
            local = local_of(x.value).new_zeros(here, dtype=kept or wide(x.value.dtype))
            return target.to_dtensor(local, shape) if target else local

        row, col, full = (tree.unflatten(spec, [zeros(x, dim) for x in leaves]) for dim in _DIMS)
        return AdafactorState(torch.zeros((), dtype=torch.int64), row, col, full)

    return base.transformation(first, functools.partial(_Adafactor.update, rule))


def _leaves(params: Tree, context: InitContext | UpdateContext) -> tuple[list[_Leaf], Any]:
    flat, spec = tree.flatten(params)
    shardings = assigned_shardings(params, context.shardings, known=("pp",))
    return [*map(_Leaf, tree.paths(params), flat, shardings)], spec


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
        grads = base.local_grads(updates, params, "parameters")
        leaves, spec = _leaves(params, context)
        columns = [tree.flatten_up_to(spec, x, ("parameters", "moments")) for x in state[1:]]
        step = step_at(self.rate, state.count, grads)
        t = step.number.double()
        weight = t**self.beta2_decay
        lr = step.rate.to(t) if isinstance(step.rate, Tensor) else torch.full_like(t, step.rate)
        key = functools.cache(lambda: step_key(context, state.count))

        def run(x: _Leaf, given: Tensor, *held: Tensor | None) -> Generator[Any, list[Tensor], None]:
            shape = whole_shape(x.value, x.sharding)
            grad = given.to(wide(given.dtype))
            param = local_of(x.value).to(grad.dtype)
            unit = tuple(range(stacked_dims(x.path, self.stacks), len(shape)))  # all dims, or those of a stacked unit
            size = max(math.prod(shape[dim] for dim in unit), 1)
            olds = {dim: old for dim, old in zip(_DIMS, held, strict=True) if old is not None}
            means = [dim for dim in olds if dim]
            *totals, of_param = yield [*((grad.square, (len(shape) + dim,)) for dim in means), (param.square, unit)]
            squares = [total / max(shape[dim], 1) for dim, total in zip(means, totals, strict=True)] or [grad.square()]
            new = {dim: _averaged(x, dim, olds[dim], y, weight) for dim, y in zip(olds, squares, strict=True)}
            least = torch.finfo(given.dtype).eps if self.eps[0] is None else self.eps[0]
            if means:
                (total,) = yield [(lambda: new[-1], (len(shape) - 2,))]
                mean = (total / max(shape[-2], 1)).to(new[-1].dtype).clamp_(min=least)
                estimate = (new[-1] * new[-2]).div_(mean)
            else:
                yield []
                estimate = new[0].clone()
            u = estimate.clamp_(min=least * least).rsqrt_().mul_(grad)
            (of_update,) = yield [(u.square, unit)]
            rate = (of_param / size).sqrt().clamp(min=self.eps[1]) * torch.minimum(lr, t**-0.5)
            share = ((of_update / size).sqrt() / self.clip).clamp(min=1.0)
            delta = u.mul_((-rate / share).to(u.dtype))
            delta = delta.sub_(param * (lr * self.weight_decay)) if self.weight_decay else delta
            kept: dict[int, Tensor] = {}
            for (dim, y), old in zip(new.items(), olds.values(), strict=True):
                of_mean, sharding = x.statistic(dim)
                kept[dim] = round_whole_moment(y, old.dtype, context, leaf_of(x.path, of_mean, sharding), str(dim), key)
                if sharding is not None:
                    kept[dim] = redistribute(sharding.to_dtensor(kept[dim], of_mean), sharding_of(cast(Any, old)))
            yield delta, kept

        results = _together(leaves, [run(*each) for each in zip(leaves, grads, *columns, strict=True)])
        row, col, full = (tree.unflatten(spec, [kept.get(dim) for _, kept in results]) for dim in _DIMS)
        return base.like(params, [delta for delta, _ in results]), AdafactorState(state.count + 1, row, col, full)


def _together(leaves: list[_Leaf], runs: list[Generator[Any, list[Tensor], None]]) -> list[Any]:
    """Run the updates of all leaves side by side: each asks for sums three times, then yields its result."""
    # Ranks hold parts of rows and columns, so means need sums over ranks: in each round one collective for all leaves.
    # A term is made when it is summed, so that not all of them exist at once.
    asked: list[Any] = [next(run) for run in runs]
    for _ in range(3):
        rows = [(x, *row) for x, of_leaf in zip(leaves, asked, strict=True) for row in of_leaf]
        given = [x.value for x, _, _ in rows]
        shardings = [x.sharding for x, _, _ in rows]
        sums = iter(sum_dims((term() for _, term, _ in rows), given, [dims for *_, dims in rows], shardings=shardings))
        asked = [run.send([next(sums) for _ in of_leaf]) for run, of_leaf in zip(runs, asked, strict=True)]
    return asked


def _averaged(x: _Leaf, dim: int, old: Tensor, new: Tensor, weight: Tensor) -> Tensor:
    """Move an old statistic toward a new value, in the sharding of the parameter and in float32 at least."""
    if x.sharding is not None:
        old = local_of(redistribute(old, x.statistic(dim)[1]))
    old = old.to(wide(old.dtype))
    # A stage that doesn't own the leaf has no elements of its means either, so shapes differ there.
    return old.lerp(new.to(old.dtype), weight.to(old.dtype)) if old.shape == new.shape else old
