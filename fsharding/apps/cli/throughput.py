"""How fast a run is: model FLOPs, the peak of the device, tokens a second, the most memory that a rank has used.

In: sizes of a decoder, the shapes of its leaves, tokens and seconds of a step. Out: numbers for the progress bar, the
metrics and the trackers. Guarantee: nothing is estimated of a device that is not known, and nothing is asked of other
ranks.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from fsharding.base import devices
from fsharding.models.decoder import DecoderConfig

__all__ = ["PEAK_TFLOPS", "Meter", "flops_per_token", "peak_flops", "peak_memory"]

PEAK_TFLOPS = {
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
    "A100": (312.0, 19.5),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.0, 67.0),
    "H200 NVL": (835.0, 60.0),
    "H200": (989.0, 67.0),
    "B200": (2250.0, 75.0),
    "MI300X": (1307.0, 163.4),
}
"""Peaks of devices by words of their name, the first that fits: TFLOP/s without sparsity from the makers' data sheets,
of 16 bit products, and of float32 without TF32. V100 and T4 have theirs for float16 only."""

_BFLOAT16_LACKING = ("V100", "T4")


class _Leaf(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def flops_per_token(config: DecoderConfig, leaves: Iterable[_Leaf], seq: int) -> float:
    """Model FLOPs of forward and backward of one token: `6 N + 12 L H Q T`.

    The formula is from PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). N counts the weights of products
    that a token meets: of the experts those that are active, of the embedding table nothing unless it is the head as
    well. In the second term, H heads of size Q in L layers meet T tokens, without a discount for the causal mask; where
    queries and values have sizes of their own, 12 Q is `6 (Q_query + Q_value)`. What remat computes again is not
    counted: this is model utilization, not hardware utilization.

    Args:
        leaves: all of its parameters, with their global shapes.
        seq: T, tokens of a sequence.
    """
    experts = {stack.name: stack.experts or config.experts for stack in config.stacks} or {"experts": config.experts}
    weights = 0.0
    for leaf in leaves:
        room, _, rest = leaf.path.partition(".")
        if room == "blocks":
            if len(leaf.shape) < 3:  # layers of vectors: norms and biases
                continue
            active = experts.get(rest.partition(".")[0]) if len(leaf.shape) == 4 else None
            share = active.active / active.count if active is not None else 1.0
            weights += share * math.prod(leaf.shape)
        elif len(leaf.shape) == 2 and (room == "head" or config.tied):
            weights += math.prod(leaf.shape)
    layers = [stack.layers for stack in config.stacks] or [config.layers]
    widths = 0
    for count, (attention, _) in zip(layers, config.kinds(), strict=True):
        widths += count * attention.heads * (attention.head_dim + attention.value_dim)
    return 6.0 * weights + 6.0 * widths * seq


def peak_flops(device: str, dtype: torch.dtype) -> float | None:
    """The peak of a device in FLOP/s for products of a dtype; None where it is not known, as on a CPU.

    Args:
        device: the name of its model.
    """
    words = {*device.replace("-", " ").split()}
    name = next((name for name in PEAK_TFLOPS if words.issuperset(name.split())), None)
    if name is None or (dtype == torch.bfloat16 and name in _BFLOAT16_LACKING):
        return None
    half, single = PEAK_TFLOPS[name]
    return 1e12 * (single if dtype == torch.float32 else half)


def peak_memory(device_type: str) -> int:
    """The most bytes that this process has used so far: allocated by torch on an accelerator, resident on a CPU."""
    if (allocated := devices.peak_memory(device_type)) is not None:
        return allocated
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


@dataclass(frozen=True)
class Meter:
    """Measures the steps of a run.

    Attributes:
        flops: model FLOPs of a token.
        ranks: how many compute.
        device_type: of the mesh.
        peak: FLOP/s of one rank's device; None where it is not known.
    """

    flops: float
    ranks: int
    device_type: str
    peak: float | None

    def rates(self, tokens: int, seconds: float) -> dict[str, float]:
        """Tokens a second of one rank, the most memory of this rank, and, where the peak is known, the MFU.

        Args:
            tokens: of a step, of all ranks.
        """
        rate = tokens / seconds
        result = {"tokens_per_s_rank": rate / self.ranks, "peak_memory_bytes": peak_memory(self.device_type)}
        return result if self.peak is None else {**result, "mfu": self.flops * rate / (self.ranks * self.peak)}
