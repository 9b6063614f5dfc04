"""Top-k routing of tokens to experts, auxiliary losses that balance it, and balance without a loss."""

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
    """The experts of each token, and their weights.

    Attributes:
        experts: Chosen experts, best first: int64[N, k].
        weights: Factors of the experts' results: float32[N, k].
        scores: Scores of all experts, before any choice: float32[N, X].

    Example:
        >>> tokens = torch.tensor([[5], [2], [3]])  # a custom router: token ids modulo two experts
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
    """Choose the top k experts of each token: logits [N, X] -> experts and weights [N, k].

    Ties go to the lower expert, on every device. "softmax" is the gate of Switch (Fedus et al. 2021, arXiv:2101.03961,
    eq. 1 and 2; top_k=1, normalize=False) and of Mixtral (Jiang et al. 2024, arXiv:2401.04088, sec. 2.1: a softmax over
    the chosen logits is the normalized softmax over all). "sigmoid" with a bias is DeepSeek-V3's (2024,
    arXiv:2412.19437, eq. 13 to 16): score plus bias chooses, the score weighs.

    Args:
        logits_NX: Router logits, floating point [N, X]; scores are computed in float32 at least.
        top_k: k, the number of experts of each token.
        score: "softmax" over experts, or "sigmoid" of each.
        bias: Offsets [X] of the scores for the choice alone; they get no gradient.
        normalize: Whether the weights of a token are divided by their sum.
        scale: Factor of the weights, after normalization.
        groups: Number of equal groups of neighboring experts, some of which a token may choose from.
        kept_groups: Number of these: groups with the largest sum of two best scores (DeepSeek-V3, sec. 2.1.2).

    Returns:
        A `Routing`.

    Raises:
        ConfigError: Numbers of experts, groups and choices do not match, or the score is unknown.
        SpecError: Logits aren't `[N, X]`, or the bias isn't `[X]`.

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
        mend = "Change these arguments, or the number of experts in the router's logits."
        raise ConfigError(message(f"cannot choose among {logits_NX.shape[1]} experts.", rows, mend))
    logits_NX = logits_NX.to(wide(logits_NX.dtype))
    scores_NX = torch.softmax(logits_NX, -1) if score == "softmax" else torch.sigmoid(logits_NX)
    ranked_NX = scores_NX.detach() if bias is None else scores_NX.detach() + bias.detach().to(scores_NX.dtype)
    if groups > 1:
        ranked_NX = _without_worst_groups(ranked_NX, groups, kept_groups)
    # Not topk: its choice between equals depends on the device and on the number of tokens.
    experts_NK = torch.sort(ranked_NX, dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weights_NK = scores_NX.gather(-1, experts_NK)
    if normalize:
        # All sigmoids can be 0 in float32.
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts_NK, weights_NK * scale if scale != 1.0 else weights_NK, scores_NX)


def misfits(experts: int, top_k: int, score: str, groups: int, kept_groups: int) -> list[str]:
    """List objections to arguments of `route`, for an error."""
    wrong: list[str] = []
    if score not in ("softmax", "sigmoid"):
        wrong.append(f"score={score!r}: scores are 'softmax' and 'sigmoid'")
    if groups < 1 or experts % groups or not 1 <= kept_groups <= groups:
        wrong.append(f"groups={groups}, kept_groups={kept_groups}: {experts} experts are split into equal groups")
    elif not 1 <= top_k <= experts // groups * kept_groups:
        wrong.append(f"top_k={top_k}: a token chooses among {experts // groups * kept_groups} experts")
    return wrong


def _without_worst_groups(scores_NX: Tensor, groups: int, kept: int) -> Tensor:
    """Return the scores, with -inf in all but the best groups."""
    scores_NGE = scores_NX.unflatten(-1, (groups, -1))
    best_NG = scores_NGE.sort(-1, descending=True).values[..., :2].sum(-1)
    worst = torch.sort(best_NG, dim=-1, descending=True, stable=True).indices[:, kept:]
    dropped_NG = torch.zeros_like(best_NG, dtype=torch.bool).scatter(-1, worst, True)
    return scores_NGE.masked_fill(dropped_NG.unsqueeze(-1), float("-inf")).flatten(-2)


def count_choices(chosen: Tensor, experts: int, counted: Tensor | None = None) -> Tensor:
    """Count how often each expert is chosen, int64[X], without a read by the host; `counted` masks choices."""
    known = (chosen >= 0) & (chosen < experts)
    if counted is not None:
        known = known & counted
    numbers = chosen.clamp(0, experts - 1).reshape(-1)
    return numbers.new_zeros(experts).scatter_add_(0, numbers, known.reshape(-1).to(numbers.dtype))


@public
def expert_counts(
    routing: Routing, *, counted_N: Tensor | None = None, axes: Sequence[str] | None = None, mesh: Mesh | None = None
) -> Tensor:
    """Count the tokens of all ranks that go to each expert: int64[X], the same on all of them. Collective along `axes`.

    Args:
        routing: Result of `route` for this rank's tokens.
        counted_N: Mask of the tokens that count, bool[N]; by default all do.
        axes: Mesh axes along which ranks have different tokens; by default the data axes.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        int64[X]; without a mesh, the counts of this rank's tokens. The host reads nothing.

    Raises:
        TransformError: The routing differs within a `vmap`.

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


class _RecordLoad(Function):
    """Return the first argument; the gradient of the second is the third, whatever gradient comes in."""

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
"""Unit of the recorded loads: float16, in which gradients may be sent, then holds loads of up to 2**26 tokens."""


def record_load(routing: Routing, bias_X: Tensor) -> Routing:
    """Record the load of each expert as the gradient of the bias: `X * count - all choices`, times 2**-10.

    It is above 0 for an expert with more than its share of tokens, and summed over ranks and microbatches as gradients
    are. The train step updates the leaf that `Model.balanced` names as `next_bias` does (Wang et al. 2024,
    arXiv:2408.15664).

    Args:
        routing: Result of `route` for this rank's tokens.
        bias_X: The gathered bias leaf that `route` was called with, [X].

    Returns:
        The same routing, with weights whose backward also writes the gradient of `bias_X`.

    Raises:
        TransformError: The routing differs within a `vmap`.

    Example:
        >>> bias = torch.zeros(2, requires_grad=True)
        >>> routing = fs.ops.route(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), top_k=1, bias=bias)
        >>> fs.ops.record_load(routing, bias).weights.sum().backward()
        >>> bias.grad * 2**10  # both tokens go to the first expert
        tensor([ 2., -2.])
    """
    counts_X = expert_counts(routing, axes=())
    load_X = (counts_X * counts_X.numel() - counts_X.sum()).to(wide(bias_X.dtype)) * _LOAD_UNIT
    weights_NK = cast(Tensor, _functorch.apply(_RecordLoad, routing.weights, bias_X, load_X))
    return routing._replace(weights=weights_NK)


def balance_loss(
    routing: Routing, *, counted_N: Tensor | None = None, axes: Sequence[str] | None = None, mesh: Mesh | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the auxiliary loss of Switch (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6): `X * sum_i f_i * P_i`.

    It is 1 if experts have equal loads. f_i is the fraction of all choices, on all ranks, of expert i, without
    gradient; P_i is the mean score of expert i, divided by the sum of the token's scores as in DeepSeek-V3 (eq. 17 to
    20). For a given f it is a mean over tokens. f covers one call: one microbatch. Collective along `axes`.

    Args:
        routing: Result of `route` for this rank's tokens.
        counted_N: Mask of the tokens that count, bool[N]; by default all do.
        axes: Mesh axes along which ranks have different tokens; by default the data axes.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        (sum over this rank's tokens, their number), as a loss function returns them: `(loss + alpha * sum, number)`.

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
    """Compute the router z-loss (Zoph et al. 2022, arXiv:2202.08906, eq. 5): `logsumexp(logits)**2` for each token.

    Args:
        logits_NX: Router logits, floating point [N, X]; computed in float32 at least.
        counted_N: Mask of the tokens that count, bool[N]; by default all do.

    Returns:
        (sum over this rank's tokens, their number).

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
    """Balance experts without a loss: `bias + rate * sign(mean count - count)` (Wang et al. 2024, algorithm 1).

    Args:
        bias_X: Bias of the scores in `route`, [X].
        counts_X: Tokens of each expert in a step, [X], summed over ranks and microbatches: sums of `expert_counts`.
        rate: Step size, u in the paper (arXiv:2408.15664), such as 0.001.

    Returns:
        The bias of the next step, [X].

    Example:
        >>> fs.ops.next_bias(torch.zeros(3), torch.tensor([5, 3, 1]), rate=0.001)
        tensor([-0.0010,  0.0000,  0.0010])
    """
    counts = counts_X.to(bias_X.dtype)
    return bias_X + rate * torch.sign(counts.mean() - counts)
