"""Muon: momentum, orthogonalized matrix by matrix with a Newton-Schulz iteration."""

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
from fsharding.optim import base
from fsharding.optim.base import ContextTransformation, InitContext, UpdateContext, transformation
from fsharding.optim.chunked_update import Step, init_moments, run_rule
from fsharding.optim.coded_moment import MomentType, carriers, check_moment_type, check_moments, moment_leaves, parts_of
from fsharding.optim.elementwise import owned, step_at
from fsharding.optim.schedules import Schedule, as_schedule
from fsharding.optim.stacked import assigned_shardings, whole_shape
from fsharding.optim.validation import FROM_0, FROM_1, check_dtype, check_settings
from fsharding.sharding import mesh_view
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import P

__all__ = ["MuonState", "muon"]

_STAGES = ("pp",)
"""Axes whose coordinates own layers, or leaves: each stage has full matrices."""

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
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) on matrices [..., M, N], as `torch.optim.Muon`.

    With `m = momentum * m + (1 - momentum) * g`, and x that average once more (Nesterov) or m itself, the update is
    `-lr * (ratio * orthogonal(x) + weight_decay * p)`. Weight decay is 0.1 by default, as in torch. Other leaves need a
    second optimizer: `fs.optim.multi_transform({"matrix": fs.optim.muon(1e-2), "other": fs.adamw(3e-4)},
    fs.optim.label_matrices())`. Ranks divide the matrices of a stack; other matrices are computed on every rank.

    Args:
        learning_rate: Step size: a float, or a schedule `count -> rate`.
        momentum: Decay rate of the momentum, 0 or more.
        nesterov: Whether to use Nesterov momentum.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        adjust: Ratio of the update: "original" is `sqrt(max(1, M / N))`; "match_rms_adamw" is `0.2 * sqrt(max(M, N))`,
            for learning rates tuned for AdamW (Liu et al. 2025, arXiv:2502.16982).
        coefficients: Factors of x, x x^T x and (x x^T)^2 x in the iteration.
        steps: Number of Newton-Schulz iterations.
        eps: Smallest norm that a matrix is divided by.
        dtype: Dtype in which the iteration runs and matrices are sent.
        moments: Storage dtype of the momentum, or an 8-bit format, as in `fs.adamw`.

    Returns:
        A `ContextTransformation`; its state is a `MuonState`.

    Raises:
        ConfigError: `adjust` is unknown; settings are below 0 (all are listed); or a dtype has no kernels.
        LayoutError: From `init`: leaves have fewer than two dims; all of them are listed.
        TreeError: From the update: parameters are missing, though they decay; or gradients or state don't match.

    Example:
        >>> groups = {"matrix": fs.optim.muon(1e-2), "other": fs.adamw(3e-4)}
        >>> opt = fs.optim.multi_transform(groups, fs.optim.label_matrices())
        >>> params = {"blocks": {"w": torch.ones(2, 3, 4)}, "norm": torch.ones(4)}
        >>> opt.init(params).groups["matrix"].mu["blocks"]["w"].shape
        torch.Size([2, 3, 4])
    """
    if adjust not in _ADJUST:
        mend = f"Use one of {', '.join(map(repr, _ADJUST))}."
        raise ConfigError(message(f"got an unknown adjust={adjust!r}.", mend=mend))
    above = {"learning_rate": learning_rate, "momentum": momentum, "weight_decay": weight_decay, "eps": eps}
    check_settings((FROM_0, above), (FROM_1, {"steps": steps}))
    own = check_moment_type(moments)
    check_dtype("dtype", dtype)
    orthogonal = functools.partial(_orthogonal, coefficients=coefficients, steps=steps, eps=eps)
    rule = _Muon(as_schedule(learning_rate), momentum, nesterov, weight_decay, adjust, orthogonal, dtype)

    def first(params: Tree, context: InitContext) -> MuonState:
        assigned_shardings(params, context.shardings, known=_STAGES)
        if rows := [f"{path} is {list(x.shape)}" for path, x in tree.named_leaves(params).items() if x.ndim < 2]:
            groups = '{"matrix": fs.optim.muon(...), "other": fs.adamw(...)}'
            mend = f"fs.optim.multi_transform({groups}, fs.optim.label_matrices()) separates them."
            raise LayoutError(message("takes matrices and stacks of them only.", rows, mend))
        return MuonState(torch.zeros((), dtype=torch.int64), init_moments(params, own, context))

    return transformation(first, functools.partial(_Muon.update, rule))


@dataclass(frozen=True)
class _Muon:
    """The settings of `muon`, and its update."""

    rate: Schedule
    momentum: float
    nesterov: bool
    weight_decay: float
    adjust: str
    orthogonal: Callable[[Tensor], Tensor]
    dtype: torch.dtype

    def kernel(self, _: None, grads: list[Tensor], mu: list[Tensor], step: Step) -> list[Tensor]:
        """Update the momentum; return the matrices to orthogonalize."""
        for m, g in zip(mu, grads, strict=True):
            m.lerp_(g, 1 - self.momentum)
        ahead = [g.lerp(m, self.momentum) for m, g in zip(mu, grads, strict=True)] if self.nesterov else mu
        return [x.to(self.dtype) for x in ahead]

    def update(self, updates: Tree, state: MuonState, params: Tree, context: UpdateContext) -> tuple[Tree, MuonState]:
        """Update the momentum, and orthogonalize it on full matrices, which ranks exchange."""
        base.check_update(MuonState, updates, state, params, decay=self.weight_decay)
        check_moments(mu=state.mu)
        held = carriers(state.mu)
        local = base.local_grads(updates, held)
        shardings = assigned_shardings(held, context.shardings, known=_STAGES)
        stacks = [_stack_of(x, sharding) for x, sharding in zip(tree.leaves(held), shardings, strict=True)]
        new_mu = owned(state.mu, donate=context.donate)
        step = step_at(self.rate, state.count, local)
        directions = run_rule(self.kernel, step, None, local, [parts_of(new_mu)], new_mu, context, dtype=self.dtype)
        kinds = [wide(m.dtype) if isinstance(m, Tensor) else torch.float32 for m in moment_leaves(state.mu)]
        deltas = [
            x.to(kind) * (-step.rate * _ratio(self.adjust, stack.shape))
            for x, kind, stack in zip(_on_full(self.orthogonal, directions, stacks), kinds, stacks, strict=True)
        ]
        if self.weight_decay:
            base.add_decay_(deltas, params, held, -step.rate * self.weight_decay)
        return base.like(held, deltas), MuonState(state.count + 1, new_mu)


def _ratio(adjust: str, shape: tuple[int, ...]) -> float:
    rows = max(shape[-2], 1)
    columns = max(shape[-1], 1)
    return math.sqrt(max(1.0, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(rows, columns))


def _orthogonal(x: Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Approximate, for each matrix of [..., M, N], the nearest one with orthonormal rows or columns."""
    if not x.numel():
        return x
    a, b, c = coefficients
    # CPUs without bfloat16 products take fifty times as long for them as for float32, which rounds to the same bits.
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


# ------------------------------------------------------------------------------------------------------ full matrices
class _Stack(NamedTuple):
    """A leaf over the ranks that share its matrices: the full mesh, or one stage."""

    shape: tuple[int, ...]  # the shape over all of these ranks
    sharding: NamedSharding | None  # None for a plain tensor
    mesh: Mesh | None  # the mesh that has the groups for an exchange


def _stack_of(x: Tensor, sharding: NamedSharding | None) -> _Stack:
    if sharding is None or not isinstance(x, DTensor):
        return _Stack(tuple(x.shape), None, None)
    full = mesh_view.base(x.device_mesh).whole
    if not sharding.assigned:
        return _Stack(tuple(x.shape), sharding, sharding.mesh if full is None else full)
    assert full is not None
    # A stage has matrices that no other stage has, or none; along other axes a matrix has several owners.
    own = tuple(a for a in sharding.assigned if a.axis not in _STAGES)
    staged = {a.axis for a in sharding.assigned} - {a.axis for a in own}
    names = tuple(name for name in abstract(full).names if name not in staged)
    on_stage = replace(sharding, mesh=mesh_view.slice_of(full, names) if staged else full, assigned=own)
    shape = whole_shape(x, sharding if sharding.grid(x.shape) is None else on_stage)
    return _Stack(shape, on_stage, full)


def _on_full(fn: Callable[[Tensor], Tensor], local: list[Tensor], stacks: list[_Stack]) -> list[Tensor]:
    """Call a function on full matrices; of a stack, each rank has some. Collective over the meshes of the leaves."""
    result = list(local)
    groups: dict[Mesh, list[int]] = {}
    for i, stack in enumerate(stacks):
        if stack.sharding is not None and abstract(stack.sharding.mesh).size > 1:
            groups.setdefault(stack.sharding.mesh, []).append(i)
        else:
            result[i] = fn(local[i])
    for members in groups.values():
        leaves = [stacks[i] for i in members]
        sharded = [_abstract(leaf) for leaf in leaves]
        by_matrix = [_by_matrix(s, leaf.shape) for s, leaf in zip(sharded, leaves, strict=True)]
        matrices = _reshard([local[i] for i in members], leaves, sharded, by_matrix)
        back = _reshard([fn(x) for x in matrices], leaves, by_matrix, sharded)
        for i, x in zip(members, back, strict=True):
            result[i] = x
    return result


def _abstract(stack: _Stack) -> NamedSharding:
    assert stack.sharding is not None
    return replace(stack.sharding, mesh=abstract(stack.sharding.mesh), owned=()).simplified()


@functools.lru_cache(maxsize=1024)
def _by_matrix(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Return a sharding with full matrices: the largest stacked dim takes all axes that shard no other one."""
    lead = range(len(shape) - 2)
    if not lead:
        return NamedSharding(sharding.mesh)
    sharded = [sharding.axes(dim) for dim in lead]
    free = tuple(a for a in abstract(sharding.mesh).names if all(a not in axes for axes in sharded))
    widest = max(lead, key=lambda dim: shape[dim])
    return NamedSharding(sharding.mesh, P(*((*axes, *free) if d == widest else axes for d, axes in enumerate(sharded))))


def _reshard(
    local: list[Tensor], stacks: list[_Stack], sources: list[NamedSharding], targets: list[NamedSharding]
) -> list[Tensor]:
    routes = (
        MovedLeaf(stack.shape, x.dtype.itemsize, source, target)
        for stack, x, source, target in zip(stacks, local, sources, targets, strict=True)
    )
    mesh = abstract(sources[0].mesh)
    device = local[0].device
    assert stacks[0].mesh is not None
    group = axis_group(stacks[0].mesh, mesh.names)
    dtypes = [x.dtype for x in local]
    resharded = exchange(
        plan_routes(tuple(routes)), [*local], dtypes, rank=own_rank(), group=group, device=device, donate=True
    )
    coord = mesh.coordinate(own_rank())
    return [x.reshape(t.local_shape(w.shape, coord)) for x, t, w in zip(resharded, targets, stacks, strict=True)]
