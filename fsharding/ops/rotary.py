"""Rotary position embeddings, and changes of their frequencies for longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from fsharding.base.errors import ConfigError, SpecError, message
from fsharding.base.public import public
from fsharding.sharding.leaf_plan import kind_text

__all__ = ["LlamaScaling", "Scaling", "YarnScaling", "rotary", "rotary_frequencies"]


@dataclass(frozen=True)
class LlamaScaling:
    """Frequencies of Llama 3.1 for a longer context: slow pairs rotate `factor` times slower, fast ones as before.

    A pair of frequency f rotates `r = length * f / (2 pi)` times within the original context. With `s = clamp((r -
    slow) / (fast - slow), 0, 1)` its frequency becomes `f * (s + (1 - s) / factor)`, as in Meta's `apply_scaling`
    (github.com/meta-llama/llama-models, models/llama3).

    Attributes:
        factor: Growth of the context, at least 1.
        length: Number of tokens of the original context.
        slow: Rotations in the original context below which a pair is slow.
        fast: Rotations above which a pair is fast.

    Example:
        >>> plain = fs.ops.rotary_frequencies(8, base=500_000.0)
        >>> longer = fs.ops.rotary_frequencies(8, base=500_000.0, scaling=fs.ops.LlamaScaling(factor=8.0, length=8192))
        >>> plain / longer  # the slowest pair rotates 8 times slower
        tensor([1.0000, 1.0000, 2.6945, 8.0000])
    """

    factor: float = 8.0
    length: int = 8192
    slow: float = 1.0
    fast: float = 4.0

    @public
    def __post_init__(self) -> None:
        _check(self.factor, self.length, self.slow, self.fast)

    @property
    def score_factor(self) -> float:
        """Factor of attention scores, in addition to 1 / sqrt(E)."""
        return 1.0

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        """Scale the plain frequencies `base**(-2e / E)`, float32[E/2]."""
        turns = self.length * plain / (2 * math.pi)
        share = ((turns - self.slow) / (self.fast - self.slow)).clamp(0, 1)
        return plain * (share + (1 - share) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """Frequencies of YaRN (Peng et al. 2023, arXiv:2309.00071, sec. 3.2 and 3.4), as DeepSeek-V3 uses them.

    As `LlamaScaling`, but s is linear in the number of a pair: pair `E ln(length / (2 pi n)) / (2 ln base)` rotates n
    times within the original context; for `fast` rounded down and for `slow` rounded up, these numbers are the ends of
    the ramp. Scores are multiplied by the square of `0.1 ln(factor) + 1` (eq. 22).

    Attributes:
        factor: Growth of the context, at least 1.
        length: Number of tokens of the original context.
        slow: Rotations in the original context below which a pair is slow.
        fast: Rotations above which a pair is fast.

    Example:
        >>> scaling = fs.ops.YarnScaling(factor=40.0, length=4096)
        >>> fs.ops.rotary_frequencies(8) / fs.ops.rotary_frequencies(8, scaling=scaling)
        tensor([ 1.0000,  1.0000,  1.9512, 40.0000])
        >>> round(scaling.score_factor, 4)
        1.8739
    """

    factor: float = 40.0
    length: int = 4096
    slow: float = 1.0
    fast: float = 32.0

    @public
    def __post_init__(self) -> None:
        _check(self.factor, self.length, self.slow, self.fast)

    @property
    def score_factor(self) -> float:
        """Factor of attention scores, in addition to 1 / sqrt(E)."""
        return (0.1 * math.log(self.factor) + 1) ** 2

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        """Scale the plain frequencies `base**(-2e / E)`, float32[E/2]."""
        pairs = plain.numel()
        turns = (self.length / (2 * math.pi * n) for n in (self.fast, self.slow))
        first, last = (pairs * math.log(t) / math.log(base) for t in turns)
        start = max(math.floor(first), 0)
        end = min(math.ceil(last), 2 * pairs - 1)
        numbers = torch.arange(pairs, dtype=torch.float32, device=plain.device)
        share = ((numbers - start) / max(end - start, 1e-3)).clamp(0, 1)
        return plain * (1 - share + share / self.factor)


Scaling: TypeAlias = LlamaScaling | YarnScaling


def _check(factor: float, length: int, slow: float, fast: float) -> None:
    wrong = [] if 1 <= factor < math.inf else [f"factor {factor}: at least 1, and finite"]
    wrong += [f"length {length}: at least 1"] if length < 1 else []
    wrong += [] if 0 < slow < fast < math.inf else [f"slow {slow}, fast {fast}: 0 < slow < fast"]
    if wrong:
        raise ConfigError(message("got numbers out of range.", wrong, "Pass numbers in these ranges."))


def rotary_frequencies(
    size: int, *, base: float = 10_000.0, scaling: Scaling | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Return the angle by which each pair of a head rotates from one position to the next: float32[E/2], in radians.

    Args:
        size: E, the even number of dims that rotate.
        base: Base of the frequencies: pair e has `base**(-2e / E)`.
        scaling: Change for a longer context, a `LlamaScaling` or a `YarnScaling`.
        device: Device of the result; by default torch's default device.

    Returns:
        float32[E/2].

    Example:
        >>> fs.ops.rotary_frequencies(8)
        tensor([1.0000, 0.1000, 0.0100, 0.0010])
    """
    powers = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    plain = base**-powers
    return plain if scaling is None else scaling.frequencies(plain, base)


@public
def rotary(x_BHTE: Tensor, positions_T: Tensor, *, base: float = 10_000.0, scaling: Scaling | None = None) -> Tensor:
    """Rotate queries or keys by their positions (RoFormer, Su et al. 2021, arXiv:2104.09864, eq. 34): [B, H, T, E].

    Entries e of the two halves of a head are a pair, which rotates by `position * frequency[e]`, in float32. Models
    with pairs of neighbors, such as DeepSeek's, need reordered rows of query and key weights.

    Args:
        x_BHTE: Floating point [B, H, T, E], E even.
        positions_T: Integer [T], or [B, T] if rows differ, such as packed documents that each start at 0. Under context
            parallelism these are global: `ops.positions`, `ops.document_positions`.
        base: Base of the frequencies, as in `rotary_frequencies`.
        scaling: Change of the frequencies for a longer context.

    Returns:
        [B, H, T, E] in the dtype of x.

    Raises:
        SpecError: Shapes do not match.

    Example:
        >>> q_BHTE = torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2)  # one pair, which rotates by a radian a position
        >>> fs.ops.rotary(q_BHTE, fs.ops.positions(3))[0, 0]
        tensor([[ 1.0000,  0.0000],
                [ 0.5403,  0.8415],
                [-0.4161,  0.9093]])
    """
    B, _, T, E = x_BHTE.shape if x_BHTE.ndim == 4 else (0, 0, 0, 1)
    if E % 2 or tuple(positions_T.shape) not in ((T,), (B, T)):
        rows = [f"x is {kind_text(x_BHTE)}", f"positions are {kind_text(positions_T)}"]
        mend = "Pass x as [B, H, T, E] with an even E, and positions as [T] or [B, T]."
        raise SpecError(message("got shapes that do not match.", rows, mend))
    frequencies = rotary_frequencies(E, base=base, scaling=scaling, device=x_BHTE.device)
    angles = positions_T.to(x_BHTE.device).float()[..., None] * frequencies
    angles = angles.unsqueeze(-3)  # the same for all heads: [1, T, E/2] or [B, 1, T, E/2]
    cos = angles.cos()
    sin = angles.sin()
    first, second = x_BHTE.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BHTE.dtype)
