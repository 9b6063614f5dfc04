"""Top-k routing of tokens to experts, the losses that balance it, and balance without a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import Function

from fsharding.base import _functorch
from fsharding.base.dtypes import wide
from fsharding.base.errors import ConfigError, SpecError, TransformError, message
from fsharding.base.public import public
from fsharding.mesh.abstract_mesh import DATA_AXES
from fsharding.mesh.device_mesh import Mesh, axis_size
from fsharding.ops.collectives import psum

__all__ = [
    "Routing", "balance_loss", "count_choices", "expert_counts", "misfits", "next_bias", "route", "record_load",
    "z_loss",
]  # fmt: skip


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        experts: the experts of each token, best first (int64[N, k]).
        weights: with what their results are multiplied (float32[N, k]).
        scores: of all experts, before any choice (float32[N, X]).

    Example:
        >>> tokens = torch.tensor([[5], [2], [3]])  # a router of one's own: token ids modulo two experts
        >>> routing = fs.ops.Routing(tokens % 2, weights=torch.ones(3, 1), scores=torch.full((3, 2), 0.5))
        >>> fs.ops.expert_counts(routing)
        tensor([1, 2])
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor


@public
def route(
    logits_NX: Tensor,
    *,
    top_k: int,
    score: str = "softmax",
    bias: Tensor | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    kept_groups: int = 1,
) -> Routing:
    """Chooses the experts of each token; of equal scores the expert with the lower number goes first.

    With "softmax", the gate of Switch (Fedus et al. 2021, eq. 1 and 2; top_k=1, normalize=False) and of Mixtral (Jiang
    et al. 2024, sec. 2.1: a softmax over the chosen logits is the normalized softmax over all). With "sigmoid" and a
    bias, that of DeepSeek-V3 (2024, eq. 13 to 16): chosen by score plus bias, weighted by the score alone.

    Args:
        logits_NX: of the router.
        top_k: how many experts each token goes to.
        score: "softmax" over experts, or "sigmoid" of each.
        bias: added to the scores when experts are chosen ([X]); it gets no gradient.
        normalize: divide the weights of a token by their sum.
        scale: factor of the weights, after that.
        groups: experts are in so many groups of neighbors, of which a token sees some.
        kept_groups: how many: those with the largest sum of their two best scores (DeepSeek-V3, sec. 2.1.2).

    Raises:
        ConfigError: numbers of experts, groups and choices that do not fit, or an unknown score.
        SpecError: logits that are not `[N, X]`, or a bias that is not `[X]`.

    Example:
        >>> routing = fs.ops.route(torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]]), top_k=2)
        >>> routing.experts
        tensor([[0, 2],
                [1, 0]])
        >>> routing.weights
        tensor([[0.7311, 0.2689],
                [0.9526, 0.0474]])
    """
    if logits_NX.ndim != 2 or (bias is not None and bias.shape != logits_NX.shape[1:]):
        rows = [f"logits are {list(logits_NX.shape)}"] + ([] if bias is None else [f"bias is {list(bias.shape)}"])
        mend = "Flatten batch and positions to tokens first."
        raise SpecError(message("needs logits [N, X] and a bias [X].", rows, mend))
    if rows := misfits(logits_NX.shape[1], top_k, score, groups, kept_groups):
        raise ConfigError(message(f"cannot choose among {logits_NX.shape[1]} experts.", rows))
    logits_NX = logits_NX.to(wide(logits_NX.dtype))
    scores_NX = torch.softmax(logits_NX, -1) if score == "softmax" else torch.sigmoid(logits_NX)
    ranked_NX = scores_NX.detach() if bias is None else scores_NX.detach() + bias.detach().to(scores_NX.dtype)
    if groups > 1:
        ranked_NX = _without_worst_groups(ranked_NX, groups, kept_groups)
    # Not topk: which of equals it takes depends on the device and on how many tokens there are.
    experts_NK = torch.sort(ranked_NX, dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weights_NK = scores_NX.gather(-1, experts_NK)
    if normalize:
        # Sigmoids can all be 0 in float32.
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts_NK, weights_NK * scale if scale != 1.0 else weights_NK, scores_NX)


def misfits(experts: int, top_k: int, score: str, groups: int, kept_groups: int) -> list[str]:
    """Objections to numbers that `route` is to be called with, for an error."""
    wrong: list[str] = []
    if score not in ("softmax", "sigmoid"):
        wrong.append(f"score={score!r}: scores are 'softmax' and 'sigmoid'")
    if groups < 1 or experts % groups or not 1 <= kept_groups <= groups:
        wrong.append(f"groups={groups}, kept_groups={kept_groups}: {experts} experts are cut into equal groups")
    elif not 1 <= top_k <= experts // groups * kept_groups:
        wrong.append(f"top_k={top_k}: a token sees {experts // groups * kept_groups} experts")
    return wrong


def _without_worst_groups(scores_NX: Tensor, groups: int, kept: int) -> Tensor:
    """The scores, with -inf in all but the best groups."""
    scores_NGE = scores_NX.unflatten(-1, (groups, -1))
    best_NG = scores_NGE.sort(-1, descending=True).values[..., :2].sum(-1)
    worst = torch.sort(best_NG, dim=-1, descending=True, stable=True).indices[:, kept:]
    dropped_NG = torch.zeros_like(best_NG, dtype=torch.bool).scatter(-1, worst, True)
    return scores_NGE.masked_fill(dropped_NG.unsqueeze(-1), float("-inf")).flatten(-2)


def count_choices(chosen: Tensor, experts: int, counted: Tensor | None = None) -> Tensor:
    """Count how often each expert is chosen, int64[X], without a read; `counted` masks choices."""
    known = (chosen >= 0) & (chosen < experts)
    if counted is not None:
        known = known & counted
    numbers = chosen.clamp(0, experts - 1).reshape(-1)
    return numbers.new_zeros(experts).scatter_add_(0, numbers, known.reshape(-1).to(numbers.dtype))


@public
def expert_counts(
    routing: Routing,
    *,
    counted_N: Tensor | None = None,
    axes: Sequence[str] | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """How many tokens of all ranks go to each expert: int64[X], the same on all of them.

    Args:
        routing: what `route` returned for this rank's tokens.
        counted_N: bool; tokens that count. By default all of them.
        axes: along which ranks have different tokens; by default the data axes.
        mesh: by default the mesh of `fs.set_mesh`; without one, this rank's tokens are all.

    Raises:
        TransformError: the routing differs within a `vmap`.

    Example:
        >>> routing = fs.ops.route(torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]]), top_k=2)
        >>> fs.ops.expert_counts(routing)
        tensor([2, 1, 1])
        >>> fs.ops.expert_counts(routing, counted_N=torch.tensor([True, False]))
        tensor([1, 0, 1])
    """
    known = [_functorch.unwrapped(x) for x in (routing.experts, *([] if counted_N is None else [counted_N]))]
    if any(x is None for x in known):
        mend = "Loop over the batch, or flatten it into the tokens."
        raise TransformError(message("cannot run under a vmap over tokens.", mend=mend))
    size = routing.scores.shape[-1]
    with _functorch.outside_transforms():
        experts_NK, *masks = known
        assert experts_NK is not None
        counts_X = count_choices(experts_NK, size, *(x.unsqueeze(-1) for x in masks if x is not None))
        along = [a for a in (DATA_AXES if axes is None else axes) if axis_size(a, mesh) > 1]
        return psum(counts_X, along, mesh=mesh) if along else counts_X


class _TellLoad(Function):
    """The identity of its first argument; the gradient of the second is the third, whatever comes back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bias_X: Tensor, load_X: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2].to(inputs[1].dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], ctx.saved_tensors[0], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].view_as(tangents[0])


_LOAD_UNIT = 2.0**-10
"""Of what counts of tokens are told in: float16, in which gradients may travel, then has room for 2**26 of them."""


def record_load(routing: Routing, bias_X: Tensor) -> Routing:
    """The same routing; its backward tells the bias, as its gradient, how much this call loads each expert.

    What is told is `X * count - all choices` of each expert, times 2**-10: above 0 for more than its share of tokens.
    The load of a step is a sum over tokens, ranks, microbatches and stages, and so are gradients: it takes their road,
    without collectives of its own. `Model.balanced` names the leaf, and a step then moves it as `next_bias` does.

    Args:
        routing: what `route` returned for this rank's tokens.
        bias_X: a leaf as `gather_unit` gives it, that `route` was called with.

    Raises:
        TransformError: the routing differs within a `vmap`.

    Example:
        >>> bias = torch.zeros(2, requires_grad=True)
        >>> routing = fs.ops.route(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), top_k=1, bias=bias)
        >>> fs.ops.record_load(routing, bias).weights.sum().backward()
        >>> bias.grad * 2**10  # both tokens go to the first expert
        tensor([ 2., -2.])
    """
    counts_X = expert_counts(routing, axes=())
    load_X = (counts_X * counts_X.numel() - counts_X.sum()).to(wide(bias_X.dtype)) * _LOAD_UNIT
    weights_NK = cast(Tensor, _functorch.apply(_TellLoad, routing.weights, bias_X, load_X))
    return routing._replace(weights=weights_NK)


def balance_loss(
    routing: Routing,
    *,
    counted_N: Tensor | None = None,
    axes: Sequence[str] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Tensor, Tensor]:
    """The auxiliary loss of Switch (Fedus et al. 2021, eq. 4 to 6): `X * sum_i f_i * P_i`, 1 when experts share alike.

    f_i is the part of all choices, on all ranks, that fell on expert i, and has no gradient; P_i is the mean score of
    expert i, divided by the sum of the token's scores as in DeepSeek-V3 (2024, eq. 17 to 20). Given f, the loss is a
    mean over tokens, so it adds up over ranks as token losses do. f is taken over one call: one microbatch.

    Args:
        routing: what `route` returned for this rank's tokens.
        counted_N: bool; tokens that count. By default all of them.
        axes: along which ranks have different tokens; by default the data axes.
        mesh: by default the mesh of `fs.set_mesh`.

    Returns:
        The sum over this rank's tokens, and how many they are: `loss + alpha * sum` goes with their number as weight.

    Example:
        >>> for logits in (torch.tensor([[9.0, 0.0], [0.0, 9.0]]), torch.tensor([[9.0, 0.0], [9.0, 0.0]])):
        ...     total, count = fs.ops.balance_loss(fs.ops.route(logits, top_k=1))
        ...     print(f"{total / count:.3f}")  # of two experts, first both have tokens, then one
        1.000
        2.000
    """
    counts_X = expert_counts(routing, counted_N=counted_N, axes=axes, mesh=mesh)
    scores_NX = routing.scores
    parts_X = (counts_X.double() / counts_X.sum().clamp(min=1)).to(scores_NX.dtype)
    shares_NX = scores_NX / scores_NX.sum(-1, keepdim=True).clamp(min=1e-20)
    each_N = shares_NX.shape[-1] * (shares_NX @ parts_X)
    return _sum_of(each_N, counted_N)


def z_loss(logits_NX: Tensor, *, counted_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The router z-loss (Zoph et al. 2022, eq. 5): squares of the logarithm of the sum of exponentials of the logits.

    Args:
        logits_NX: of the router.
        counted_N: bool; tokens that count. By default all of them.

    Returns:
        The sum over this rank's tokens, and how many they are.

    Example:
        >>> total, count = fs.ops.z_loss(torch.zeros(4, 2))
        >>> total / count  # the square of log 2
        tensor(0.4805)
    """
    return _sum_of(torch.logsumexp(logits_NX.to(wide(logits_NX.dtype)), -1).square(), counted_N)


def _sum_of(each_N: Tensor, counted_N: Tensor | None) -> tuple[Tensor, Tensor]:
    if counted_N is None:
        return each_N.sum(), torch.full((), float(each_N.shape[0]), device=each_N.device)
    return torch.where(counted_N, each_N, torch.zeros_like(each_N)).sum(), counted_N.sum()


def next_bias(bias_X: Tensor, counts_X: Tensor, rate: float) -> Tensor:
    """Balance without a loss (Wang et al. 2024, algorithm 1): `bias + rate * sign(mean count - count)`.

    Args:
        bias_X: what was added to the scores in `route`.
        counts_X: tokens of each expert in a step, of all ranks and microbatches: sums of `expert_counts`.
        rate: u in the paper, such as 0.001.

    Returns:
        The bias of the next step.

    Example:
        >>> fs.ops.next_bias(torch.zeros(3), torch.tensor([5, 3, 1]), rate=0.001)
        tensor([-0.0010,  0.0000,  0.0010])
    """
    counts = counts_X.to(bias_X.dtype)
    return bias_X + rate * torch.sign(counts.mean() - counts)
