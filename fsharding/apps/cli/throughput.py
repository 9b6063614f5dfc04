"""Throughput of a run: model FLOPs, tokens per second, and peak memory of a rank."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fsharding.base import devices
from fsharding.models.decoder import DecoderConfig

__all__ = ["PEAK_TFLOPS", "Meter", "flops_per_token", "peak_flops", "peak_memory"]

# TFLOP/s without sparsity from the makers' data sheets, of 16 bit products, and of float32 without TF32, by words of
# the device's name; the first that fits. V100 and T4 have theirs for float16 only.
PEAK_TFLOPS = {
    "V100": (125.0, 15.7), "T4": (65.0, 8.1), "A100": (312.0, 19.5), "A10": (125.0, 31.2), "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3), "H100 PCIe": (756.0, 51.0), "H100 NVL": (835.0, 60.0), "H100": (989.0, 67.0),
    "H200 NVL": (835.0, 60.0), "H200": (989.0, 67.0), "B200": (2250.0, 75.0), "MI300X": (1307.0, 163.4),
}  # fmt: skip
_BFLOAT16_LACKING = ("V100", "T4")


def flops_per_token(config: DecoderConfig, leaves: Iterable[Any], seq: int) -> float:
    """Return the model FLOPs of forward and backward of one token: `6 N + 12 L H Q T`."""
    # From PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). N counts the weights of products that a token
    # meets: only active experts, and the embedding table only if it is also the head. The second term is attention of
    # H heads of size Q in L layers over T tokens, without a discount for the causal mask; where queries and values
    # differ in size, 12 Q is 6 (Q_query + Q_value). Recomputation is not counted: this is model utilization.
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
    """Return the peak FLOP/s of a device, given by its name, for products of a dtype; None if it is unknown."""
    words = {*device.replace("-", " ").split()}
    name = next((name for name in PEAK_TFLOPS if words.issuperset(name.split())), None)
    if name is None or (dtype == torch.bfloat16 and name in _BFLOAT16_LACKING):
        return None
    half, single = PEAK_TFLOPS[name]
    return 1e12 * (single if dtype == torch.float32 else half)


def peak_memory(device_type: str) -> int:
    """Return the most bytes that this process has used: allocated on an accelerator, resident on a CPU."""
    if (allocated := devices.peak_memory(device_type)) is not None:
        return allocated
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


@dataclass(frozen=True)
class Meter:
    """Throughput of a run's steps."""

    flops: float  # model FLOPs of a token
    ranks: int
    device_type: str
    peak: float | None  # FLOP/s of one rank's device

    def rates(self, tokens: int, seconds: float) -> dict[str, float]:
        """Return tokens a second of one rank, this rank's peak memory and, if the peak is known, the utilization."""
        rate = tokens / seconds
        result = {"tokens_per_s_rank": rate / self.ranks, "peak_memory_bytes": peak_memory(self.device_type)}
        return result if self.peak is None else {**result, "mfu": self.flops * rate / (self.ranks * self.peak)}
