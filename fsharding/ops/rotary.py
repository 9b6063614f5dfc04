"""Rotary positions, and the changes of their frequencies for longer contexts."""

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
    """Frequencies of Llama 3.1: slow pairs turn `factor` times slower, fast ones as before, those between in between.

    A pair of frequency f turns `r = length * f / (2 pi)` times within the original context. With
    `s = clamp((r - slow) / (fast - slow), 0, 1)` its frequency becomes `f * (s + (1 - s) / factor)`. This is what
    `apply_scaling` of Meta's reference implementation does (github.com/meta-llama/llama-models, models/llama3).

    Attributes:
        factor: by how much the context grows.
        length: tokens of the original context.
        slow: turns below which a pair is slow.
        fast: turns above which it is fast.

    Example:
        >>> plain = fs.ops.rotary_frequencies(8, base=500_000.0)
        >>> longer = fs.ops.rotary_frequencies(8, base=500_000.0, scaling=fs.ops.LlamaScaling(factor=8.0, length=8192))
        >>> plain / longer  # the slowest pair turns 8 times slower
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
        """The factor of attention scores besides 1 / sqrt(E)."""
        return 1.0

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        """The frequencies in the place of the plain ones.

        Args:
            plain: float32[E/2], `base**(-2e / E)`.
            base: of them.
        """
        turns = self.length * plain / (2 * math.pi)
        share = ((turns - self.slow) / (self.fast - self.slow)).clamp(0, 1)
        return plain * (share + (1 - share) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """Frequencies of YaRN (Peng et al. 2023, arXiv:2309.00071, sec. 3.2 and 3.4) as DeepSeek-V3 has them.

    Like Llama's, but what is between slow and fast is found by the number of a pair: pair
    `E ln(length / (2 pi n)) / (2 ln base)` turns n times within the original context. Rounded down for `fast` and up
    for `slow`, these are the ends of a ramp that is straight in the number of the pair. Scores grow by the square of
    `0.1 ln(factor) + 1` (eq. 22).

    Attributes:
        factor: by how much the context grows.
        length: tokens of the original context.
        slow: turns below which a pair is slow.
        fast: turns above which it is fast.

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
        """The factor of attention scores besides 1 / sqrt(E)."""
        return (0.1 * math.log(self.factor) + 1) ** 2

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        """The frequencies in the place of the plain ones.

        Args:
            plain: float32[E/2], `base**(-2e / E)`.
            base: of them.
        """
        pairs = plain.numel()
        turns = (self.length / (2 * math.pi * n) for n in (self.fast, self.slow))
        first, last = (pairs * math.log(t) / math.log(base) for t in turns)
        start = max(math.floor(first), 0)
        end = min(math.ceil(last), 2 * pairs - 1)
        numbers = torch.arange(pairs, dtype=torch.float32, device=plain.device)
        share = ((numbers - start) / max(end - start, 1e-3)).clamp(0, 1)
        return plain * (1 - share + share / self.factor)


Scaling: TypeAlias = LlamaScaling | YarnScaling
"""How a longer context changes frequencies."""


def _check(factor: float, length: int, slow: float, fast: float) -> None:
    wrong = [] if 1 <= factor < math.inf else [f"factor {factor}: at least 1, and finite"]
    wrong += [f"length {length}: at least 1"] if length < 1 else []
    wrong += [] if 0 < slow < fast < math.inf else [f"slow {slow}, fast {fast}: 0 < slow < fast"]
    if wrong:
        raise ConfigError(message("got numbers out of range.", wrong))


def rotary_frequencies(
    size: int, *, base: float = 10_000.0, scaling: Scaling | None = None, device: torch.device | str | None = None
) -> Tensor:
    """By which angle each pair of a head turns from one position to the next: float32[E/2], in radians.

    Args:
        size: E, the even number of dims that are turned.
        base: of the frequencies: pair e has `base**(-2e / E)`.
        scaling: changes them for a longer context.
        device: where the result is; by default where torch makes tensors.

    Example:
        >>> fs.ops.rotary_frequencies(8)
        tensor([1.0000, 0.1000, 0.0100, 0.0010])
    """
    powers = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    plain = base**-powers
    return plain if scaling is None else scaling.frequencies(plain, base)


@public
def rotary(x_BHTE: Tensor, positions_T: Tensor, *, base: float = 10_000.0, scaling: Scaling | None = None) -> Tensor:
    """Rotates queries or keys by their positions (Su et al. 2021, "RoFormer", eq. 34).

    Entry e of the first half of a head and entry e of the second half are a pair, which turns by the angle
    `position * frequency[e]`; see `rotary_frequencies`. Computed in float32. Models whose pairs are neighbors, as
    DeepSeek's, are the same but for the order of rows in the weights that make queries and keys.

    Args:
        x_BHTE: floating point [B, H, T, E], E even.
        positions_T: integer [T], or [B, T] where rows differ, as where documents are packed and each begins at 0.
            Under context parallelism the global ones: `ops.positions`, `ops.document_positions`.
        base: the base of the frequencies, `base**(-2e / E)`.
        scaling: of the frequencies, for a longer context.

    Returns:
        [B, H, T, E] in the dtype of x.

    Raises:
        SpecError: the shapes do not fit.

    Example:
        >>> q_BHTE = torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2)  # one pair, which turns by a radian a position
        >>> fs.ops.rotary(q_BHTE, fs.ops.positions(3))[0, 0]
        tensor([[ 1.0000,  0.0000],
                [ 0.5403,  0.8415],
                [-0.4161,  0.9093]])
    """
    B, _, T, E = x_BHTE.shape if x_BHTE.ndim == 4 else (0, 0, 0, 1)
    if E % 2 or tuple(positions_T.shape) not in ((T,), (B, T)):
        rows = [f"x is {kind_text(x_BHTE)}", f"positions are {kind_text(positions_T)}"]
        mend = "Give x as [B, H, T, E] with an even E, and positions as [T] or [B, T]."
        raise SpecError(message("got shapes that do not fit.", rows, mend))
    frequencies = rotary_frequencies(E, base=base, scaling=scaling, device=x_BHTE.device)
    angles = positions_T.to(x_BHTE.device).float()[..., None] * frequencies
    angles = angles.unsqueeze(-3)  # one for all heads: [1, T, E/2] or [B, 1, T, E/2]
    cos = angles.cos()
    sin = angles.sin()
    first, second = x_BHTE.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BHTE.dtype)
