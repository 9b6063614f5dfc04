"""Random bits for stochastic rounding: a function of key, stream and element index, computed on the tensor's device.

Guarantee: an element gets the same value on every rank and in every box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["coarse_uniform_at", "philox", "uniform_as_numpy", "uniform_at"]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_CHUNK = 1 << 16  # counters per pass, so that intermediate words stay in a core's cache


def philox(counter: Sequence[Tensor | int], key: Sequence[Tensor | int]) -> tuple[Tensor, ...]:
    """Compute Philox-4x32-10 (Salmon et al., SC 2011)."""
    words = list(counter)
    first, second = key
    for _ in range(10):
        # A product of two words can exceed 2^63; int64 wraps around to the bits of the unsigned product.
        a = words[0] * _MULTIPLIERS[0]
        b = words[2] * _MULTIPLIERS[1]
        words = [
            ((b >> 32) & _WORD) ^ words[1] ^ first,
            b & _WORD,
            ((a >> 32) & _WORD) ^ words[3] ^ second,
            a & _WORD,
        ]
        first = (first + _WEYL[0]) & _WORD
        second = (second + _WEYL[1]) & _WORD
    return tuple(words)  # pyright: ignore[reportReturnType]  # one tensor in the counter is in all words by then


def uniform_at(
    key: Tensor, stream: int, shape: tuple[int, ...], ranges: Sequence[Sequence[tuple[int, int]]], device: torch.device
) -> Tensor:
    """Draw uniform values in [0, 1), multiples of 2^-24, for part of a tensor.

    Args:
        key: Key, int64[2], on any device.
        stream: Id of the tensor, in [0, 2^32).
        shape: Full shape of the tensor, at least one dim.
        ranges: Half-open index ranges of the part, several for each dim; they are concatenated.
        device: Device of the result.

    Returns:
        float32, in the shape of the part.

    Example:
        >>> cpu = torch.device("cpu")
        >>> full = fs.formats.uniform_at(fs.random.key(0), 1, (4, 6), [[(0, 4)], [(0, 6)]], cpu)
        >>> part = fs.formats.uniform_at(fs.random.key(0), 1, (4, 6), [[(1, 3)], [(2, 6)]], cpu)
        >>> torch.equal(part, full[1:3, 2:6])
        True
    """
    held = [sum(stop - start for start, stop in runs) for runs in ranges]
    out = torch.empty(held, dtype=torch.float32, device=device)
    if out.numel() == 0:
        return out
    words = key.to(device, non_blocking=True).unbind(-1)
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for size, runs in zip(shape[:-1], ranges[:-1], strict=True):
        places = torch.cat([torch.arange(start, stop, device=device) for start, stop in runs])
        rows = (rows.unsqueeze(-1) * size + places) if rows.ndim else places
    rows = rows.reshape(-1)
    # Each counter gives four consecutive values of a row, so rows start on new counters: a box needs no other rows.
    flat = out.view(-1, held[-1])
    column = 0
    for start, stop in ranges[-1]:
        first = start // 4
        last = -(-stop // 4)
        counters = torch.arange(first, last, device=device)
        step = max(1, _CHUNK // max(1, last - first))
        for at in range(0, len(rows), step):
            of_row = rows[at : at + step, None]
            drawn = torch.stack(philox((counters, of_row & _WORD, (of_row >> 32) & _WORD, stream), words), -1)
            bits = drawn.view(len(of_row), -1)[:, start - 4 * first : stop - 4 * first]
            flat[at : at + step, column : column + stop - start] = (bits >> 8).to(torch.float32)
        column += stop - start
    return out.mul_(math.ldexp(1.0, -24))


def coarse_uniform_at(
    key: Tensor, stream: int, shape: tuple[int, ...], box: Sequence[tuple[int, int]], device: torch.device
) -> Tensor:
    """Draw like `uniform_at` for a box, in multiples of 2^-16: four values per SplitMix64 word, so much cheaper."""
    first, second = key.to(device, non_blocking=True).unbind(-1)
    (start, stop), size = box[-1], shape[-1]
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for length, (a, b) in zip(shape[:-1], box[:-1], strict=True):
        rows = rows.unsqueeze(-1) * length + torch.arange(a, b, device=device)
    words = torch.arange(start // 4, -(-stop // 4), device=device)
    counters = rows.unsqueeze(-1) * -(-size // 4) + words
    seed = _mix(_mix(first | (second << 32)) ^ stream)
    lanes = _mix(counters * _GOLDEN + seed).view(torch.int16)
    lanes = lanes[..., start - start // 4 * 4 :][..., : stop - start]
    return (lanes.to(torch.int32) & 0xFFFF).to(torch.float32).mul_(2.0**-16)


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64))


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 to int64, whose products wrap around like unsigned ones."""
    for shift, factor in _MIX:
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


# ------------------------------------------------------------------------------------------- the bits of NumPy's Philox
# int64 wraps around like uint64; only right shifts need a mask, and a constant above 2^63 becomes negative.
_WIDE_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WIDE_WEYL = (0x9E3779B97F4A7C15 - (1 << 64), 0xBB67AE8584CAA73B - (1 << 64))


def _product(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 64 bits of a product of two 64-bit words."""
    high = constant >> 32
    low = constant & _WORD
    x_high = (x >> 32) & _WORD
    x_low = x & _WORD
    first = x_high * low + (((x_low * low) >> 32) & _WORD)
    second = x_low * high + (first & _WORD)
    return x_high * high + ((first >> 32) & _WORD) + ((second >> 32) & _WORD), x * (constant - (1 << 64))


def uniform_as_numpy(key: Sequence[Tensor], first: int, blocks: int, count: int) -> Tensor:
    """Reproduce NumPy's `Generator(Philox(key=key, counter=[0, 0, i, 0])).random(count, float32)` for several i."""
    of_block = -(-count // 8)  # a counter gives four 64-bit words, eight float32 values
    at = torch.arange(blocks * of_block, device=key[0].device)
    zero = torch.zeros_like(at)
    words = [at % of_block + 1, zero, at // of_block + first, zero]
    k0, k1 = key
    for _ in range(10):
        (high0, low0), (high1, low1) = (_product(words[2 * i], m) for i, m in enumerate(_WIDE_MULTIPLIERS))
        words = [high1 ^ words[1] ^ k0, low1, high0 ^ words[3] ^ k1, low0]
        k0 = k0 + _WIDE_WEYL[0]
        k1 = k1 + _WIDE_WEYL[1]
    halves = torch.stack([half for word in words for half in (word & _WORD, (word >> 32) & _WORD)], -1)
    return (halves >> 8).to(torch.float32).view(blocks, -1)[:, :count].mul(math.ldexp(1.0, -24))
