"""Vocabulary-parallel cross entropy: no rank holds the full logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fsharding.base.public import public
from fsharding.mesh.device_mesh import Mesh, axis_index, axis_size
from fsharding.ops.collectives import all_gather, psum
from fsharding.ops.embedding import checked_ids
from fsharding.sharding import boxes

__all__ = ["cross_entropy"]


@public
def cross_entropy(
    logits_V: Tensor,
    targets: Tensor,
    *,
    vocab: int | None = None,
    axis: str = "tp",
    ignore_index: int = -100,
    mesh: Mesh | None = None,
) -> Tensor:
    """Compute `log(sum(exp(logits))) - logits[target]` for each token, in float32, with V sharded over an axis.

    As `F.cross_entropy(..., reduction="none")`. Logits are never gathered (Megatron-LM, arXiv:1909.08053): ranks
    exchange one maximum, one sum and one target logit per token.

    Args:
        logits_V: Logits [..., V of this rank]: a ceil-chunk of the vocabulary, or all of it if nothing shards it.
        targets: Integer ids [...], the same on all ranks of the axis.
        vocab: V, the size of the full vocabulary; by default the last size of `logits_V`.
        axis: Mesh axis that shards V. Without a mesh, or on a mesh without it, it has one rank.
        ignore_index: Target of tokens whose loss is 0 and that get no gradient.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        float32[...], the same on all ranks of the axis.

    Raises:
        DataError: Targets aren't integers, or, on the CPU, are outside the vocabulary and not `ignore_index`.

    Example:
        >>> logits = torch.zeros(3, 4)
        >>> fs.ops.cross_entropy(logits, torch.tensor([1, 3, -100]))  # the last target does not count
        tensor([1.3863, 1.3863, 0.0000])
    """
    targets = checked_ids("targets", targets, vocab or logits_V.shape[-1], ignore_index=ignore_index)
    logits = logits_V.float()
    size = axis_size(axis, mesh)
    if size == 1 or vocab is None or logits.shape[-1] == vocab:
        losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=ignore_index)
        return losses.view(targets.shape)
    start, stop = boxes.chunk(vocab, size, axis_index(axis, mesh))
    if start == stop:
        # A rank without logits takes part in the sums: -inf adds exp(-inf) = 0 to each.
        logits = torch.full_like(targets, -torch.inf, dtype=torch.float32).unsqueeze(-1) + logits.sum()
    # The maximum only guards exp against overflow and has no gradient: the loss does not depend on it.
    peaks = all_gather(logits.detach().amax(-1).unsqueeze(0), axis, dim=0, mesh=mesh)
    shifted = logits - peaks.amax(0).unsqueeze(-1)
    total = psum(shifted.exp().sum(-1), axis, mesh=mesh)
    own = (targets >= start) & (targets < stop)
    result = shifted.gather(-1, (targets - start).where(own, 0).unsqueeze(-1)).squeeze(-1)
    hit = psum(result.where(own, 0.0), axis, mesh=mesh)
    return (total.log() - hit).where(targets != ignore_index, 0.0)
