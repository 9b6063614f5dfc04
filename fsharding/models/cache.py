"""What a block keeps of tokens for those that come after: keys and values, or the narrow vectors that they are made of.

In: a cache, a dict of tensors [B, S, ...] with a slot for each position; new tokens and their positions. Out: the same
tensors, written to, and attention of the new tokens to all that are there. A slot is the position of its token: what
stands in the slots after it is never seen, so rows of unlike lengths are padded at their ends, and written over later.
Guarantee: logits through a cache equal those without one. Shapes: B rows, T new tokens, S slots, H query heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["at_each", "attend", "has_earlier", "store"]


def at_each(x_BTX: Tensor, index_B: Tensor) -> Tensor:
    """One token of each row, as a sequence of one: [B, 1, X]."""
    return x_BTX.gather(1, index_B[:, None, None].expand(-1, 1, x_BTX.shape[-1]))


def has_earlier(cache: dict[str, Tensor], length: int) -> bool:
    """Whether a cache has more slots than there are new tokens; if not, these are all, and begin at position 0.

    Args:
        cache: with the slots that are in use once the new tokens are stored, and no others.
    """
    return next(iter(cache.values())).shape[1] > length


def store(slots_BSX: Tensor, new_BTX: Tensor, positions_BT: Tensor) -> None:
    """Writes new tokens to the slots of their positions, in place: a cache belongs to the loop that has made it.

    Args:
        slots_BSX: a leaf of a cache, [B, S, ...].
        new_BTX: of the new tokens, [B, T, ...].
    """
    if slots_BSX.shape == new_BTX.shape:
        slots_BSX.copy_(new_BTX)
        return
    index = positions_BT.view(*positions_BT.shape, *[1] * (new_BTX.ndim - 2)).expand_as(new_BTX)
    slots_BSX.scatter_(1, index, new_BTX)


def attend(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, positions_BT: Tensor, scale: float) -> Tensor:
    """Attention of new tokens to the slots up to their own.

    Args:
        q_BHTE: of the new tokens; query head h sees key head h // (H / K).
        v_BKSE: of all slots, maybe of another head dim.

    Returns:
        [B, H, T, E], where E is the head dim of v.
    """
    slots_S = torch.arange(k_BKSE.shape[2], device=q_BHTE.device)
    seen_B1TS = slots_S <= positions_BT[:, None, :, None]
    return F.scaled_dot_product_attention(q_BHTE, k_BKSE, v_BKSE, seen_B1TS, scale=scale, enable_gqa=True)
