"""Expert parallelism: send tokens to the ranks that own their experts, and combine the results."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsharding.base import _compat, _functorch
from fsharding.base.errors import SpecError, TransformError, message
from fsharding.base.public import public
from fsharding.comm.transport import transport_for
from fsharding.formats.quantized import Weight, dequantize
from fsharding.mesh.device_mesh import Group, Mesh, axis_group, axis_size, current_mesh
from fsharding.ops.capacity import note_capacity
from fsharding.ops.collectives import Linear, all_to_all_rows, apply_linear, psum, pvary
from fsharding.ops.grouped_matmul import even_shares, grouped_matmul
from fsharding.ops.router import Routing, count_choices
from fsharding.sharding import boxes

__all__ = ["Dispatched", "Plan", "capacity_of", "combine", "dispatch", "experts_swiglu", "owned_experts"]


@dataclass(frozen=True, eq=False)
class _Reorder:
    """Put rows in a different order: row j of the result is row `order[j]`; `inverse` is the way back."""

    # Rows of the result that aren't `filled` are zero; on the way back, rows that aren't `back_filled`. With `copies`,
    # each row is repeated first; the way back sums the copies of a row in the order of choices, on every mesh.
    order: Tensor
    inverse: Tensor
    filled: Tensor | None = None
    back_filled: Tensor | None = None
    copies: int = 0  # 0 reorders only
    back: bool = False
    dim: int = 0

    def run(self, x: Tensor) -> Tensor:
        rows = x.index_select(self.dim, self.order // self.copies if self.copies and not self.back else self.order)
        if self.filled is not None:
            rows = rows.masked_fill(self.filled.logical_not().view(-1, *(1,) * (x.ndim - self.dim - 1)), 0)
        if not (self.copies and self.back):
            return rows
        return rows.unflatten(self.dim, (self.order.numel() // self.copies, self.copies)).sum(self.dim + 1)

    def dual(self) -> _Reorder:
        return _Reorder(self.inverse, self.order, self.back_filled, self.filled, self.copies, not self.back, self.dim)

    def batched(self) -> Linear:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True, eq=False)
class _Route:
    """Where rows are sent and received, according to the choices of the tokens."""

    send: tuple[int, ...]  # rows to each rank of the axis
    receive: tuple[int, ...]  # rows from each
    by_expert: _Reorder = field(repr=False)  # from copies of tokens to the order of experts
    arrived: _Reorder | None = field(repr=False)  # from ranks to this rank's experts; None on one rank
    capacity: int | None = None  # C; None without a capacity
    overflow: Tensor | None = field(default=None, repr=False)  # whether an expert has too many rows (bool, 0-d)


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan(_Route):
    """The record that `dispatch` makes for `combine`."""

    weights: Tensor = field(repr=False)  # [N, k]; all NaN if an expert has too many rows
    axis: tuple[str, ...]
    mesh: Mesh | None = field(repr=False)  # None if rows stay here


class Dispatched(NamedTuple):
    """The tokens that this rank's experts receive."""

    # Tokens [M, D], sorted by expert; with a capacity, each rank's tokens for an expert are padded with zeros.
    rows: Tensor
    counts: Tensor  # rows of each expert of this rank (int64[E])
    plan: Plan  # for `combine`


@functools.lru_cache(maxsize=256)
def owned_experts(experts: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the experts (start, stop) of each rank in ceil-chunks, as a dim named "expert" is sharded."""
    coords = product(*(range(size) for size in sizes))
    return tuple(boxes.nested_chunk(experts, list(zip(sizes, coord, strict=True))) for coord in coords)


@public
def dispatch(
    x_ND: Tensor,
    routing: Routing,
    experts: int,
    *,
    axis: str | Sequence[str] = "ep",
    mesh: Mesh | None = None,
    capacity: float | None = None,
    drop: bool = False,
) -> Dispatched:
    """Send each token to the ranks that own its experts: `[N, D] -> [M, D]`. Collective along the axis.

    Args:
        x_ND: This rank's tokens, floating point [N, D]. Without a capacity, N may be 0 and differ between ranks.
        routing: Result of `ops.route` for these tokens.
        experts: X, the number of experts on all ranks.
        axis: Mesh axes that shard experts, in ceil-chunks. Without a mesh, or on a mesh without them, nothing is sent.
        mesh: Device mesh; by default the one of `fs.set_mesh`.
        capacity: Rows that an expert takes from each rank, as a multiple of an equal share: C is `ceil(capacity * N * k
            / X)`, at most N (Lepikhin et al. 2020, GShard, arXiv:2006.16668). If more tokens choose an expert, the
            output of `combine` is NaN. The host reads counts only without a capacity.
        drop: Whether a full expert drops the tokens with its lowest scores instead, later ones first; they add nothing
            to the output of `combine`. Which are dropped depends on the sharding of tokens.

    Returns:
        `(rows, counts, plan)`: rows [M, D] sorted by expert; int64[E], rows of each expert here; a plan for `combine`.

    Raises:
        MeshError: The axis is unknown.
        SpecError: The routing has other tokens, or an expert that does not exist; or the capacity is below 1 (with
            `drop`, not above 0), or missing with `drop`.
        TransformError: The routing differs within a `vmap`, so ranks could not agree on row counts.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> routing = fs.ops.route(torch.tensor([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]]), top_k=1)
        >>> rows, counts, plan = fs.ops.dispatch(x, routing, experts=2)
        >>> rows.flatten(), counts
        (tensor([2., 1., 3.]), tensor([1, 2]))
        >>> fs.ops.dispatch(x, routing, experts=2, capacity=0.5, drop=True).rows.flatten()  # one token for each expert
        tensor([2., 1.])
    """
    axes = tuple(name for name in ((axis,) if isinstance(axis, str) else axis) if axis_size(name, mesh) > 1)
    where = mesh if mesh is not None or not axes else current_mesh()
    group = Group((0,), 0, None) if where is None else axis_group(where, axes)
    chosen_NK = _functorch.unwrapped(routing.experts)
    if chosen_NK is None:
        mend = "Flatten the batch into the tokens before routing."
        raise TransformError(message("cannot run under a vmap over tokens.", mend=mend))
    if chosen_NK.ndim != 2 or x_ND.ndim != 2 or chosen_NK.shape[0] != x_ND.shape[0]:
        rows = [f"x is {list(x_ND.shape)}, experts are {list(chosen_NK.shape)}"]
        mend = "Pass the x_ND whose logits ops.route got, with batch and positions flattened."
        raise SpecError(message("needs x [N, D] and experts [N, k] of the same tokens.", rows, mend))
    if drop and capacity is None:
        mend = "Pass capacity= as well, as a multiple of an equal share of the tokens."
        raise SpecError(message("got drop=True without a capacity.", mend=mend))
    if capacity is not None and not (capacity > 0 if drop else capacity >= 1):
        least = "a number above 0" if drop else "at least 1, an equal share of the tokens for each expert"
        raise SpecError(message(f"got capacity={capacity}: some tokens would have no expert.", mend=f"Pass {least}."))
    owned = owned_experts(experts, tuple(axis_size(a, where) for a in axes))
    scores_NX = _functorch.unwrapped(routing.scores.detach())
    route = _dropless
    if capacity is not None:
        assert scores_NX is not None
        route = functools.partial(_in_slots, capacity=capacity, scores_NX=scores_NX, drop=drop)
    with _functorch.outside_transforms():
        counts_E, found = route(chosen_NK, experts, owned, group)
    weights, full = routing.weights, found.overflow
    weights = weights if full is None else weights.masked_fill(full, torch.nan)
    plan = Plan(**vars(found), weights=weights, axis=axes, mesh=where)
    rows = apply_linear(x_ND, replace(plan.by_expert, copies=chosen_NK.shape[1]))
    if plan.arrived is not None:
        rows = all_to_all_rows(rows, axes, send=plan.send, receive=plan.receive, mesh=where)
        rows = apply_linear(rows, plan.arrived)
    return Dispatched(rows, counts_E, plan)


def capacity_of(factor: float, tokens: int, choices: int, experts: int) -> int:
    """Return C, the rows of an expert for the tokens of a rank (Lepikhin et al. 2020, GShard, sec. 2.2)."""
    # A token chooses an expert once, so with `factor = experts / choices` none can have too many rows.
    return min(math.ceil(factor * tokens * choices / experts), tokens)


def _dropless(chosen_NK: Tensor, experts: int, owned: Sequence[tuple[int, int]], group: Group) -> tuple[Tensor, _Route]:
    """Route all rows: ranks exchange their counts, and the host reads them."""
    # Each rank has a range of experts, so rows in the order of experts are in the order of ranks, too.
    by_expert = _order(chosen_NK.reshape(-1))
    counts_X = count_choices(chosen_NK, experts)
    coming_RE = _coming(counts_X, owned, group)
    send, receive = _rows_between(counts_X, coming_RE, owned, group, chosen_NK)
    arrived = None
    if group.size > 1:
        numbers = torch.arange(coming_RE.shape[1], device=chosen_NK.device).expand_as(coming_RE).reshape(-1)
        arrived = _order(numbers.repeat_interleave(coming_RE.reshape(-1), output_size=sum(receive)))
    return coming_RE.sum(0), _Route(send, receive, by_expert, arrived)


def _in_slots(
    chosen_NK: Tensor,
    experts: int,
    owned: Sequence[tuple[int, int]],
    group: Group,
    *,
    capacity: float,
    scores_NX: Tensor,
    drop: bool,
) -> tuple[Tensor, _Route]:
    """Route C rows for each expert from every rank: the host's part does not depend on values."""
    tokens, choices = chosen_NK.shape
    size = capacity_of(capacity, tokens, choices, experts)
    keys = chosen_NK.reshape(-1).clamp(0, experts - 1)
    counts_X = count_choices(chosen_NK, experts)
    starts_X = counts_X.cumsum(0) - counts_X
    order = _order(keys)
    if drop:
        # Stable: of equal scores, the earlier token stays.
        best = scores_NX.gather(1, chosen_NK.clamp(0, experts - 1)).reshape(-1).argsort(descending=True, stable=True)
        order = _inverted(best[keys[best].argsort(stable=True)])
    places = order.inverse - starts_X[keys]  # rank of a choice among all choices of its expert
    slots = keys * size + places.clamp(max=size - 1)
    kept = places < size
    # A choice without a slot is written behind the last one, which is then dropped.
    written = slots.where(kept, experts * size)
    taken = slots.new_zeros(experts * size + 1).scatter_(0, written, torch.arange(keys.numel(), device=keys.device))
    filled = torch.zeros_like(taken, dtype=torch.bool).scatter_(0, written, True)
    full = (counts_X > size).any()
    # `count_choices` leaves out choices of experts that do not exist.
    unknown = counts_X.sum() != keys.numel()
    overflow = unknown if drop else full | unknown
    # Scores that aren't finite all choose the same experts: that isn't a lack of capacity.
    note_capacity(full & scores_NX.isfinite().all() & (not drop), kept.logical_not().sum() * drop)
    start, stop = owned[group.index]
    send = tuple((last - first) * size for first, last in owned)
    receive = ((stop - start) * size,) * group.size
    arrived = None
    if group.size > 1:
        rows = torch.arange(sum(receive), device=keys.device)
        shapes = (group.size, stop - start, size), (stop - start, group.size, size)
        order, inverse = (rows.view(shape).transpose(0, 1).reshape(-1) for shape in shapes)
        arrived = _Reorder(order, inverse)
    counts_E = torch.full((stop - start,), group.size * size, device=keys.device)
    by_expert = _Reorder(taken[:-1], slots, filled[:-1], kept if drop else None)
    return counts_E, _Route(send, receive, by_expert, arrived, size, overflow)


def _order(keys: Tensor) -> _Reorder:
    """Return the stable order of keys, and its inverse."""
    return _inverted(keys.argsort(stable=True))


def _inverted(order: Tensor) -> _Reorder:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return _Reorder(order, inverse)


def _coming(counts_X: Tensor, owned: Sequence[tuple[int, int]], group: Group) -> Tensor:
    """Exchange how many rows each rank of the group has for each expert of this rank: int64[ranks, E]."""
    width = max(stop - start for start, stop in owned)
    exchange = transport_for(group, counts_X.device).all_to_all(width, counts_X.dtype)
    # Chunks may be uneven; every row is as long as the widest, and the ends are ignored.
    exchange.own.zero_()
    for row, (start, stop) in zip(exchange.own, owned, strict=True):
        row[: stop - start] = counts_X[start:stop]
    handle = exchange.start()
    received = torch.stack([*handle.wait()])
    handle.release()
    start, stop = owned[group.index]
    return received[:, : stop - start]


def _rows_between(
    counts_X: Tensor, coming_RE: Tensor, owned: Sequence[tuple[int, int]], group: Group, chosen_NK: Tensor
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many rows are sent to each rank of the group, and received from each."""
    # Fake tensors have no counts: assume as many tokens on every rank, and equal shares of experts.
    fake = _compat.is_fake(counts_X)
    going = even_shares(chosen_NK.numel(), counts_X.numel()) if fake else counts_X.tolist()
    if sum(going) != chosen_NK.numel():
        unknown = chosen_NK[(chosen_NK < 0) | (chosen_NK >= counts_X.numel())]
        rows = [f"a token goes to expert {int(unknown[0])}"]
        mend = "Pass experts=, the number of all experts that ops.route chose from."
        raise SpecError(message(f"has {counts_X.numel()} experts, from 0 on.", rows, mend))
    send = tuple(sum(going[start:stop]) for start, stop in owned)
    return send, (send[group.index],) * group.size if fake else tuple(map(int, coming_RE.sum(1).tolist()))


@public
def combine(y_MD: Tensor, plan: Plan) -> Tensor:
    """Return the results of experts to their tokens, and sum them with the weights of the routing: `[M, D] -> [N, D]`.

    The inverse of `dispatch`. Collective along the axis.

    Args:
        y_MD: Results for the rows of `dispatch`, in their order.
        plan: The plan of that call of `dispatch`.

    Returns:
        `[N, D]` in the dtype of `y_MD`.

    Raises:
        SpecError: The number of rows isn't what was dispatched.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> routing = fs.ops.route(torch.tensor([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]]), top_k=1)
        >>> rows, counts, plan = fs.ops.dispatch(x, routing, experts=2)
        >>> fs.ops.combine(10 * rows, plan).flatten()
        tensor([10., 20., 30.])
    """
    if y_MD.ndim != 2 or y_MD.shape[0] != sum(plan.receive):
        text = f"needs results [M, D] for the {sum(plan.receive)} rows of the dispatch."
        mend = "Pass one result for each row of dispatch, padding included."
        raise SpecError(message(text, [f"y is {list(y_MD.shape)}"], mend))
    if plan.arrived is not None:
        y_MD = apply_linear(y_MD, plan.arrived.dual())
        y_MD = all_to_all_rows(y_MD, plan.axis, send=plan.receive, receive=plan.send, mesh=plan.mesh)
    y_NKD = apply_linear(y_MD, plan.by_expert.dual()).unflatten(0, plan.weights.shape)
    return (y_NKD * plan.weights.to(y_MD.dtype).unsqueeze(-1)).sum(1)


@public
def experts_swiglu(
    x_ND: Tensor,
    gate_EFD: Weight,
    up_EFD: Weight,
    down_EFD: Weight,
    routing: Routing,
    *,
    axis: str | Sequence[str] = "ep",
    tp: str | None = "tp",
    mesh: Mesh | None = None,
    capacity: float | None = None,
    drop: bool = False,
) -> Tensor:
    """Compute SwiGLU experts (Shazeer 2020, arXiv:2002.05202): `sum_j weight_j * down(silu(gate(x)) * up(x))`, [N, D].

    The sum is over the k experts of each token. Weights are gathered leaves named `("expert", "mlp", "embed")`: this
    rank's E experts, with F sharded over `tp` if the mesh has it; x and the result are then the same on all ranks of
    `tp`. A `Quantized` is dequantized.

    Args:
        x_ND: This rank's tokens, floating point [N, D].
        gate_EFD, up_EFD, down_EFD: Weights [E, F of this rank, D]; `down_EFD` is applied transposed.
        routing: Result of `ops.route` for these tokens, over all experts.
        axis: Mesh axes over which experts are sharded, as in `dispatch`.
        tp: Mesh axis that shards F, or None if nothing does.
        mesh: Device mesh; by default the one of `fs.set_mesh`.
        capacity, drop: Capacity factor of experts, and whether full experts drop tokens, as in `dispatch`.

    Returns:
        `[N, D]` in the dtype of x; NaN if an expert has more tokens than its capacity and `drop` is False.

    Raises:
        SpecError: The weights do not belong to this rank's experts.

    Example:
        >>> gate, up, down = (torch.ones(2, 4, 3) for _ in range(3))  # two experts, D = 3, F = 4
        >>> x = torch.ones(5, 3)
        >>> routing = fs.ops.route(torch.zeros(5, 2), top_k=1)
        >>> fs.ops.experts_swiglu(x, gate, up, down, routing).shape
        torch.Size([5, 3])
    """
    experts = routing.scores.shape[-1]
    tp = tp if tp is not None and axis_size(tp, mesh) > 1 else None
    if tp is not None:
        x_ND = pvary(x_ND, tp, mesh=mesh)
        routing = routing._replace(weights=pvary(routing.weights, tp, mesh=mesh))
    x_MD, counts_E, plan = dispatch(x_ND, routing, experts, axis=axis, mesh=mesh, capacity=capacity, drop=drop)
    held = {name: list(w.shape) for name, w in (("gate", gate_EFD), ("up", up_EFD), ("down", down_EFD))}
    if any(shape[0] != counts_E.numel() for shape in held.values()):
        rows = [f"{name} is {shape}" for name, shape in held.items()]
        text = f"needs weights of the {counts_E.numel()} experts of this rank, of {experts} in all."
        mend = 'Name their dim "expert" in plan_layout(names=...), with the rule expert="ep".'
        raise SpecError(message(text, rows, mend))
    gate_EFD, up_EFD, down_EFD = map(dequantize, (gate_EFD, up_EFD, down_EFD))
    # With a capacity experts have equally many rows, and the host reads no count.
    product = functools.partial(grouped_matmul, counts_X=counts_E) if plan.capacity is None else _equal_matmul
    hidden_MF = F.silu(product(x_MD, gate_EFD.mT)) * product(x_MD, up_EFD.mT)
    y_ND = combine(product(hidden_MF, down_EFD), plan)
    return psum(y_ND, tp, mesh=mesh) if tp is not None else y_ND


def _equal_matmul(x_MD: Tensor, w_XDF: Tensor) -> Tensor:
    """Compute `grouped_matmul` for groups of equally many rows."""
    groups = w_XDF.shape[0]
    x_XCD = x_MD.view(groups, x_MD.shape[0] // max(groups, 1), x_MD.shape[1])
    return torch.bmm(x_XCD, w_XDF).flatten(0, 1)
