"""Cache of keys and values, or of MLA latents; a token's slot is its position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["at_each", "attend", "has_earlier", "store"]


def at_each(x_BTX: Tensor, index_B: Tensor) -> Tensor:
    """Select one token of each row: [B, 1, X]."""
    return x_BTX.gather(1, index_B[:, None, None].expand(-1, 1, x_BTX.shape[-1]))


def has_earlier(cache: dict[str, Tensor], length: int) -> bool:
    """Return whether a cache holds earlier tokens, and not only the new ones."""
    return next(iter(cache.values())).shape[1] > length


def store(slots_BSX: Tensor, new_BTX: Tensor, positions_BT: Tensor) -> None:
    """Write new tokens [B, T, ...] to the slots [B, S, ...] of their positions, in place."""
    # The generation loop owns the cache, so writing in place is safe. With as many slots as tokens, these are the
    # prompts, whose positions are 0 to T - 1.
    if slots_BSX.shape == new_BTX.shape:
        slots_BSX.copy_(new_BTX)
        return
    index = positions_BT.view(*positions_BT.shape, *[1] * (new_BTX.ndim - 2)).expand_as(new_BTX)
    slots_BSX.scatter_(1, index, new_BTX)


def attend(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, positions_BT: Tensor, scale: float) -> Tensor:
    """Attend from new tokens to all slots up to their own: [B, H, T, E], where E is the head dim of v."""
    # Later slots hold padding of shorter prompts, or nothing yet; the mask hides both.
    slots_S = torch.arange(k_BKSE.shape[2], device=q_BHTE.device)
    seen_B1TS = slots_S <= positions_BT[:, None, :, None]
    return F.scaled_dot_product_attention(q_BHTE, k_BKSE, v_BKSE, seen_B1TS, scale=scale, enable_gqa=True)
