"""Muon: momentum, made orthogonal matrix by matrix with a Newton-Schulz iteration (Jordan et al. 2024)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.dtypes import wide
from fsharding.base.errors import ConfigError, LayoutError, message
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.comm.reshard_plan import MovedLeaf, plan_routes
from fsharding.comm.reshard_run import exchange
from fsharding.mesh.device_mesh import Mesh, abstract, axis_group, own_rank
from fsharding.optim.base import (
    ContextTransformation,
    InitContext,
    UpdateContext,
    add_decay_,
    check_update,
    like,
    local_grads,
    transformation,
)
from fsharding.optim.chunked_update import init_moments
from fsharding.optim.coded_moment import MomentType, carriers, check_moment_type, check_moments, moment_leaves, parts_of
from fsharding.optim.elementwise import Step, owned, run_rule, step_at
from fsharding.optim.schedules import Schedule, as_schedule
from fsharding.optim.stacked import assigned_shardings, whole_shape
from fsharding.optim.validation import FROM_0, FROM_1, check_dtype, check_settings
from fsharding.sharding import mesh_view
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import P

__all__ = ["MuonState", "muon"]

_STAGES = ("pp",)
"""Axes whose coordinates own layers, or leaves: each stage has whole matrices."""

_ADJUST = ("original", "match_rms_adamw")


class MuonState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), and the momentum.

    Example:
        >>> fs.optim.muon(1e-2).init({"w": torch.ones(2, 2)}).mu["w"].shape
        torch.Size([2, 2])
    """

    count: Tensor
    mu: Tree


@public
def muon(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    adjust: str = "original",
    coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    moments: MomentType = None,
) -> ContextTransformation:
    """Muon, with the parameters of `torch.optim.Muon` and its numbers, on matrices [..., M, N].

    With `m = momentum * m + (1 - momentum) * g`, and `x = momentum * m + (1 - momentum) * g` again (Nesterov) or `m`,
    the update is `-lr * ratio * orthogonal(x) - lr * weight_decay * p`. Other leaves need another optimizer:
    `fs.optim.multi_transform({"matrix": fs.optim.muon(1e-2), "other": fs.adamw(3e-4)}, fs.optim.label_matrices())`.
    A matrix that is not in a stack is iterated on by every rank.

    Args:
        learning_rate: a number, or a function of the number of updates so far.
        momentum: decay of the momentum, 0 or more.
        nesterov: the update looks one step ahead, as Nesterov's does.
        weight_decay: decoupled decay, times the learning rate.
        adjust: the ratio: "original", `sqrt(max(1, M / N))`; or "match_rms_adamw", `0.2 * sqrt(max(M, N))`, which takes
            the learning rates of AdamW (Liu et al. 2025).
        coefficients: of x, x x^T x and (x x^T)^2 x in the iteration.
        steps: Newton-Schulz iterations of each update.
        eps: smallest norm that a matrix is divided by.
        dtype: in which the iteration runs, and its matrices travel.
        moments: the dtype, or the format of 8 bits, in which the momentum is kept, as in `fs.adamw`.

    Raises:
        ConfigError: an unknown `adjust`; numbers below 0, all of them listed. A dtype that kernels lack.
        LayoutError: at `init`: leaves with fewer than two dims; all of them are listed.
        TreeError: from the update: no parameters, though they decay; or something else than gradients and this state.

    Example:
        >>> groups = {"matrix": fs.optim.muon(1e-2), "other": fs.adamw(3e-4)}
        >>> opt = fs.optim.multi_transform(groups, fs.optim.label_matrices())
        >>> params = {"blocks": {"w": torch.ones(2, 3, 4)}, "norm": torch.ones(4)}
        >>> opt.init(params).groups["matrix"].mu["blocks"]["w"].shape
        torch.Size([2, 3, 4])
    """
    if adjust not in _ADJUST:
        text = f"knows no adjust={adjust!r}."
        raise ConfigError(message(text, mend=f"Use one of {', '.join(map(repr, _ADJUST))}."))
    above = {"learning_rate": learning_rate, "momentum": momentum, "weight_decay": weight_decay, "eps": eps}
    check_settings((FROM_0, above), (FROM_1, {"steps": steps}))
    own = check_moment_type(moments)
    check_dtype("dtype", dtype)
    orthogonal = functools.partial(_orthogonal, coefficients=coefficients, steps=steps, eps=eps)
    rule = _Muon(as_schedule(learning_rate), momentum, nesterov, weight_decay, adjust, orthogonal, dtype)

    def first(params: Tree, context: InitContext) -> MuonState:
        assigned_shardings(params, context.shardings, known=_STAGES)
        _refuse_vectors(params)
        return MuonState(torch.zeros((), dtype=torch.int64), init_moments(params, own, context))

    return transformation(first, functools.partial(_Muon.update, rule))


@dataclass(frozen=True)
class _Muon:
    """The settings of an update; see `muon`."""

    rate: Schedule
    momentum: float
    nesterov: bool
    weight_decay: float
    adjust: str
    orthogonal: Callable[[Tensor], Tensor]
    dtype: torch.dtype

    def kernel(self, _: None, grads: list[Tensor], mu: list[Tensor], step: Step) -> list[Tensor]:
        """Advance the momentum; return the matrices to make orthogonal."""
        for m, g in zip(mu, grads, strict=True):
            m.lerp_(g, 1 - self.momentum)
        ahead = [g.lerp(m, self.momentum) for m, g in zip(mu, grads, strict=True)] if self.nesterov else mu
        return [x.to(self.dtype) for x in ahead]

    def update(self, updates: Tree, state: MuonState, params: Tree, context: UpdateContext) -> tuple[Tree, MuonState]:
        """Advance the momentum, and make it orthogonal on full matrices, which ranks exchange."""
        check_update(MuonState, updates, state, params, decay=self.weight_decay)
        check_moments(mu=state.mu)
        held = carriers(state.mu)
        local = local_grads(updates, held)
        shardings = assigned_shardings(held, context.shardings, known=_STAGES)
        wholes = [_whole(x, sharding) for x, sharding in zip(tree.leaves(held), shardings, strict=True)]
        new_mu = owned(state.mu, donate=context.donate)
        step = step_at(self.rate, state.count, local)
        directions = run_rule(self.kernel, step, None, local, [parts_of(new_mu)], new_mu, context, dtype=self.dtype)
        kinds = [wide(m.dtype) if isinstance(m, Tensor) else torch.float32 for m in moment_leaves(state.mu)]
        deltas = [
            x.to(kind) * (-step.rate * _ratio(self.adjust, whole.shape))
            for x, kind, whole in zip(_on_whole(self.orthogonal, directions, wholes), kinds, wholes, strict=True)
        ]
        if self.weight_decay:
            add_decay_(deltas, params, held, -step.rate * self.weight_decay)
        return like(held, deltas), MuonState(state.count + 1, new_mu)


def _refuse_vectors(params: Tree) -> None:
    named = tree.named_leaves(params)
    if rows := [f"{path} is {list(x.shape)}" for path, x in named.items() if x.ndim < 2]:
        mend = (
            'fs.optim.multi_transform({"matrix": fs.optim.muon(...), "other": fs.adamw(...)},'
            " fs.optim.label_matrices()) splits them."
        )
        raise LayoutError(message("takes matrices and stacks of them only.", rows, mend))


def _ratio(adjust: str, shape: tuple[int, ...]) -> float:
    rows = max(shape[-2], 1)
    columns = max(shape[-1], 1)
    return math.sqrt(max(1.0, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(rows, columns))


def _orthogonal(x: Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Of each matrix of [..., M, N] about the nearest one with orthonormal rows or columns, in its dtype."""
    if not x.numel():
        return x
    a, b, c = coefficients
    # A processor without bfloat16 products takes fifty times as long for them as in float32, which rounds to the same.
    work = torch.float32 if x.device.type == "cpu" and x.dtype == torch.bfloat16 else x.dtype

    def rounded(y: Tensor) -> Tensor:
        return y if work == x.dtype else y.to(x.dtype).to(work)

    y_BMN = x.reshape(-1, *x.shape[-2:]).to(work)
    tall = x.shape[-2] > x.shape[-1]
    y_BMN = y_BMN.mT.contiguous() if tall else y_BMN
    y_BMN = rounded(y_BMN / rounded(y_BMN.norm(dim=(-2, -1), keepdim=True)).clamp(min=eps))
    for _ in range(steps):
        gram_BMM = rounded(y_BMN @ y_BMN.mT)
        both_BMM = rounded(torch.baddbmm(gram_BMM, gram_BMM, gram_BMM, beta=b, alpha=c))
        y_BMN = rounded(torch.baddbmm(y_BMN, both_BMM, y_BMN, beta=a))
    return (y_BMN.mT if tall else y_BMN).reshape(x.shape).to(x.dtype)


# ----------------------------------------------------------------------------------------------------- whole matrices


class _Whole(NamedTuple):
    """A leaf among the ranks that have its matrices: all of the mesh, or one stage."""

    shape: tuple[int, ...]  # of the leaf on all of these ranks
    sharding: NamedSharding | None  # None for a plain tensor
    mesh: Mesh | None  # with all groups that they need


def _whole(x: Tensor, sharding: NamedSharding | None) -> _Whole:
    if sharding is None or not isinstance(x, DTensor):
        return _Whole(tuple(x.shape), None, None)
    whole = mesh_view.base(x.device_mesh).whole
    if not sharding.assigned:
        return _Whole(tuple(x.shape), sharding, sharding.mesh if whole is None else whole)
    assert whole is not None
    # Stages have matrices of their own, or none at all; along other axes a matrix has several owners.
    own = tuple(a for a in sharding.assigned if a.axis not in _STAGES)
    staged = {a.axis for a in sharding.assigned} - {a.axis for a in own}
    names = tuple(name for name in abstract(whole).names if name not in staged)
    on_stage = replace(sharding, mesh=mesh_view.slice_of(whole, names) if staged else whole, assigned=own)
    shape = whole_shape(x, sharding if sharding.grid(x.shape) is None else on_stage)
    return _Whole(shape, on_stage, whole)


def _on_whole(fn: Callable[[Tensor], Tensor], local: list[Tensor], wholes: list[_Whole]) -> list[Tensor]:
    """Runs a function on whole matrices: of a stack, each rank has some. Collective over the meshes of the leaves."""
    result = list(local)
    groups: dict[Mesh, list[int]] = {}
    for i, whole in enumerate(wholes):
        if whole.sharding is not None and abstract(whole.sharding.mesh).size > 1:
            groups.setdefault(whole.sharding.mesh, []).append(i)
        else:
            result[i] = fn(local[i])
    for members in groups.values():
        leaves = [wholes[i] for i in members]
        sharded = [_abstract(leaf) for leaf in leaves]
        by_matrix = [_by_matrix(s, leaf.shape) for s, leaf in zip(sharded, leaves, strict=True)]
        matrices = _reshard([local[i] for i in members], leaves, sharded, by_matrix)
        back = _reshard([fn(x) for x in matrices], leaves, by_matrix, sharded)
        for i, x in zip(members, back, strict=True):
            result[i] = x
    return result


def _abstract(whole: _Whole) -> NamedSharding:
    assert whole.sharding is not None
    return replace(whole.sharding, mesh=abstract(whole.sharding.mesh), owned=()).simplified()


@functools.lru_cache(maxsize=1024)
def _by_matrix(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Return a sharding with full matrices: the largest stacked dim takes all axes that shard no other one."""
    lead = range(len(shape) - 2)
    if not lead:
        return NamedSharding(sharding.mesh)
    cuts = [sharding.axes(dim) for dim in lead]
    free = tuple(a for a in abstract(sharding.mesh).names if all(a not in axes for axes in cuts))
    widest = max(lead, key=lambda dim: shape[dim])
    return NamedSharding(sharding.mesh, P(*((*axes, *free) if d == widest else axes for d, axes in enumerate(cuts))))


def _reshard(
    local: list[Tensor], wholes: list[_Whole], sources: list[NamedSharding], targets: list[NamedSharding]
) -> list[Tensor]:
    routes = (
        MovedLeaf(whole.shape, x.dtype.itemsize, source, target)
        for whole, x, source, target in zip(wholes, local, sources, targets, strict=True)
    )
    mesh = abstract(sources[0].mesh)
    device = local[0].device
    assert wholes[0].mesh is not None
    group = axis_group(wholes[0].mesh, mesh.names)
    dtypes = [x.dtype for x in local]
    resharded = exchange(
        plan_routes(tuple(routes)), [*local], dtypes, rank=own_rank(), group=group, device=device, donate=True
    )
    coord = mesh.coordinate(own_rank())
    return [x.reshape(t.local_shape(w.shape, coord)) for x, t, w in zip(resharded, targets, wholes, strict=True)]
