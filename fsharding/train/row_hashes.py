"""Hashes of a rank's rows, computed on their device: ranks that must read the same rows compare them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from fsharding.base import _compat, tree
from fsharding.base.tree import Tree

__all__ = ["hash_of_all", "hash_rows"]

_WIDTH = 1 << 16
"""Elements hashed by one row of weights."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hash_rows(batch: Tree) -> dict[str, Tensor]:
    """Hash each leaf with values; return hashes by path (int64, 0-d, on the leaf's device)."""
    named = tree.named_leaves(batch)
    tensors = {path: x for path, x in named.items() if isinstance(x, Tensor)}
    return {path: _hash_of(x) for path, x in tensors.items() if not (x.is_meta or _compat.is_fake(x))}


@torch.no_grad()
def hash_of_all(hashes: Mapping[str, Tensor]) -> Tensor | None:
    """Combine hashes to one (int64, 0-d, on the device of the first); None without any."""
    if not hashes:
        return None
    device = next(iter(hashes.values())).device
    rows = torch.stack([x.to(device, non_blocking=True) for x in hashes.values()])
    return (rows * _weights_of(tuple(hashes), device)).sum()


@torch.no_grad()
def _hash_of(x: Tensor) -> Tensor:
    # Leaves that differ in an element, its position, shape or dtype have the same hash with probability 2^-64, unless
    # they were constructed to collide.
    bits = x.detach().contiguous().reshape(-1)
    bits = bits.view(_INTEGERS[min(bits.itemsize, 8)])
    # A sum of products with odd numbers, modulo 2^64: an odd factor is invertible, so a change of one element always
    # changes the sum. Only kernels that every device has, and exact in any order.
    while bits.numel() > _WIDTH:
        weights = _weights(_WIDTH, bits.device)
        if bits.device.type == "cpu":
            # One buffer for all parts, which stays in the last-level cache.
            buffer = torch.empty(_WIDTH, dtype=torch.int64)
            parts = bits.split(_WIDTH)
            bits = torch.stack([buffer[: len(p)].copy_(p).mul_(weights[: len(p)]).sum() for p in parts])
        else:
            full, rest = bits.split([bits.numel() // _WIDTH * _WIDTH, bits.numel() % _WIDTH])
            last = (rest * weights[: len(rest)]).sum()
            bits = torch.cat([(full.view(-1, _WIDTH) * weights).sum(1), last.reshape(1)])
    return (bits * _weights(bits.numel(), bits.device)).sum() * _odd(f"{x.dtype}{tuple(x.shape)}")


@functools.lru_cache(maxsize=64)
def _weights_of(paths: tuple[str, ...], device: torch.device) -> Tensor:
    """Return an odd number per path."""
    numbers = [torch.full((1,), _odd(path), dtype=torch.int64, device=device) for path in paths]
    return torch.cat(numbers)


@functools.lru_cache(maxsize=32)
def _weights(count: int, device: torch.device) -> Tensor:
    """Return odd numbers without a pattern (the mixer of splitmix64)."""
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return x | 1


@functools.lru_cache(maxsize=1024)
def _odd(text: str) -> int:
    return _signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") | 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
