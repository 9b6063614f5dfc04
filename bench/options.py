"""The options of each measurement, whose docstrings are the help of `python -m bench`. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "CheckpointConfig",
    "MemoryConfig",
    "OptimizerConfig",
    "OverheadConfig",
    "OverlapConfig",
    "PipelineConfig",
    "RanksConfig",
    "ReshardConfig",
    "ScalingConfig",
    "StepConfig",
    "wrong_numbers",
]

_FROM_ZERO = ("depths", "latency_us", "rest")

_USUAL = ("compute-only", "ddp", "fsdp2", "fsharding-zero0", "fsharding-zero1", "fsharding-zero2", "fsharding-zero3")


@dataclass(frozen=True)
class StepConfig:
    """A training step beside DDP, FSDP2 and others.

    Attributes:
        ranks: local ranks to start; left out, 2, or those that torchrun started.
        hosts: 2 has the ranks start on two hosts, half of them on each: namespaces of this machine, joined by a cable,
            in which no memory is shared between hosts. Needs root.
        preset: the decoder; see `fsharding train`.
        contenders: who takes part; left out, all but fsharding-hybrid, fsharding-zero3-first-dims (cut as FSDP2 cuts),
            fsharding-zero3-captured (one CUDA graph), fsdp2-default (without prefetches that its user asks for),
            fsdp2-bf16-sums, simple-fsdp, simple-fsdp-compiled, deepspeed-zero1 to 3, deepspeed-zero2-offload (Adam on
            the CPU), and fsharding-zero2-host and -disk (moments there).
        dtype: of compute.
        compiled: whether blocks go through torch.compile.
        batch: sequences of a rank.
        seq_len: tokens of a sequence.
        rounds: counted steps of each contender.
        json: print one JSON object instead of a table.
        plot: where to draw the bars, a PNG.
        trace: where to write a trace of one more step of the last contender, for Perfetto or chrome://tracing; what
            `fsharding` does in it has names: gather, scatter, norm, optimizer, spread.
    """

    ranks: int | None = None
    hosts: Literal[1, 2] = 1
    preset: str = "bench-34m"
    contenders: tuple[str, ...] = _USUAL
    dtype: Literal["float32", "bfloat16"] = "float32"
    compiled: bool = False
    batch: int = 2
    seq_len: int = 128
    rounds: int = 9
    json: bool = False
    plot: Path | None = None
    trace: Path | None = None


@dataclass(frozen=True)
class MemoryConfig:
    """Memory of a training step beside DDP's and FSDP2's, and beside what its strategy has to hold.

    Attributes:
        ranks: local ranks to start; left out, 2, or those that torchrun started.
        preset: the decoder; see `fsharding train`.
        contenders: who takes part.
        dtype: of compute.
        batch: sequences of a rank.
        seq_len: tokens of a sequence.
        json: print one JSON object instead of a table.
    """

    ranks: int | None = None
    preset: str = "bench-34m"
    contenders: tuple[str, ...] = ("ddp", "fsdp2", "fsharding-zero0", "fsharding-zero1", "fsharding-zero3")
    dtype: Literal["float32", "bfloat16"] = "float32"
    batch: int = 2
    seq_len: int = 128
    json: bool = False


@dataclass(frozen=True)
class ScalingConfig:
    """How a step grows with ranks, units and parameters.

    Attributes:
        ranks: numbers of local ranks, each started in turn; one rank has no peers that need a group.
        units: numbers of blocks.
        dims: widths of the decoder; a block has about 10 x dim^2 parameters.
        contenders: who takes part.
        batch: sequences of a rank.
        seq_len: tokens of a sequence.
        rounds: counted steps of each contender at each point.
        json: print one JSON object instead of a table.
    """

    ranks: tuple[int, ...] = (1, 2, 4, 8)
    units: tuple[int, ...] = (4, 16, 64)
    dims: tuple[int, ...] = (64, 256)
    contenders: tuple[str, ...] = ("fsdp2", "fsharding-zero3")
    batch: int = 1
    seq_len: int = 16
    rounds: int = 5
    json: bool = False


@dataclass(frozen=True)
class OverheadConfig:
    """Host overhead of a step of many tiny units, beside FSDP2's.

    Attributes:
        ranks: local ranks to start; left out, 2, or those that torchrun started.
        units: number of FSDP units.
        leaves: parameters of a unit, each of 8 x 8.
        rounds: counted steps of each contender.
        json: print one JSON object instead of a table.
    """

    ranks: int | None = None
    units: int = 50
    leaves: int = 12
    rounds: int = 15
    json: bool = False


@dataclass(frozen=True)
class OverlapConfig:
    """Which share of communication is hidden behind compute, from the order of a step and given rates; no device.

    Attributes:
        preset: the decoder; see `fsharding train`.
        ranks: along dp.
        stages: ranks along pp.
        strategies: by name.
        schedules: of pipelines, where `stages` is above 1.
        depths: how many units ahead parameters are gathered; a pipeline's schedule says that itself.
        batch: sequences of a rank.
        seq_len: tokens of a sequence.
        microbatches: pieces of a rank's batch; left out, 1, or two for each stage.
        tflops: of matrix products, in 10^12 a second; the defaults are about what an H100 reaches.
        memory_gbs: memory that is read and written, in 10^9 bytes a second.
        link_gbs: what a rank sends, in 10^9 bytes a second.
        latency_us: of a collective, in microseconds.
        json: print one JSON object instead of a table.
        plot: where to draw timelines, a PNG or SVG; strategy and depth or schedule are added to the name.
        trace: where to write them for Perfetto or chrome://tracing, likewise.
    """

    preset: str = "bench-1b"
    ranks: int = 8
    stages: int = 1
    strategies: tuple[str, ...] = ("zero1", "zero2", "zero3")
    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zbv")
    depths: tuple[int, ...] = (0, 1, 2)
    batch: int = 4
    seq_len: int = 1024
    microbatches: int | None = None
    tflops: float = 500.0
    memory_gbs: float = 2500.0
    link_gbs: float = 200.0
    latency_us: float = 20.0
    json: bool = False
    plot: Path | None = None
    trace: Path | None = None


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW beside torch's fused AdamW, on one process.

    Attributes:
        preset: the decoder whose leaves are updated; see `fsharding train`.
        leaves: how many small leaves are updated in the other case.
        size: elements of each of them.
        rounds: counted updates of each contender.
        json: print one JSON object instead of a table.
    """

    preset: str = "bench-34m"
    leaves: int = 2000
    size: int = 64
    rounds: int = 15
    json: bool = False


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading a state, beside torch.distributed.checkpoint.

    Attributes:
        ranks: local ranks to start; left out, 2, or those that torchrun started.
        mb: size of the state over all ranks, in millions of bytes.
        rounds: counted rounds of each contender.
        dir: where to write; by default a temporary directory.
        json: print one JSON object instead of a table.
    """

    ranks: int | None = None
    mb: int = 368
    rounds: int = 5
    dir: Path | None = None
    json: bool = False


@dataclass(frozen=True)
class ReshardConfig:
    """Resharding in memory on 4 ranks, beside a raw all-to-all of the same bytes, and a save and a load.

    Attributes:
        mb: size of the parameters over all ranks, in MiB.
        rounds: counted rounds of each contender.
        budget_mb: what `reshard` may use for buffers, in MiB a rank.
        dir: where to save; by default a temporary directory.
        json: print one JSON object instead of a table.
    """

    mb: int = 256
    rounds: int = 5
    budget_mb: int = 64
    dir: Path | None = None
    json: bool = False

    @property
    def ranks(self) -> int:
        """The cases are for 4."""
        return 4


@dataclass(frozen=True)
class PipelineConfig:
    """Schedules of a pipeline, one beside the other.

    Attributes:
        ranks: along pp; left out, 2, or those that torchrun started.
        schedules: who takes part; times are compared with the first.
        preset: the decoder; see `fsharding train`.
        microbatches: of a step.
        batch: sequences of a microbatch.
        seq_len: tokens of a sequence.
        rounds: counted steps of each schedule.
        rest: milliseconds that a forward, and each half of a backward, of one of 2 blocks a rank rests instead of
            computing, as if each rank had a device of its own; 0 computes the preset.
        json: print one JSON object instead of a table.
    """

    ranks: int | None = None
    schedules: tuple[str, ...] = ("1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev")
    preset: str = "bench-34m"
    microbatches: int = 8
    batch: int = 2
    seq_len: int = 128
    rounds: int = 5
    rest: float = 0.0
    json: bool = False


@dataclass(frozen=True)
class RanksConfig:
    """What one rank of many does by itself in forward and backward, in a fake process group.

    Attributes:
        ranks: numbers of data-parallel ranks.
        blocks: of the decoder, each a unit; its embedding and its head are two more.
        dim: width of the decoder.
        seq_len: tokens of the one sequence of this rank.
        rounds: counted calls of each contender.
        json: print one JSON object instead of a table.
    """

    ranks: tuple[int, ...] = (2, 128, 1024, 4096, 16384)
    blocks: int = 4
    dim: int = 256
    seq_len: int = 64
    rounds: int = 5
    json: bool = False


def wrong_numbers(config: Any) -> list[str]:
    """Return a row for each option with a number that is too small, or not finite."""
    rows: list[str] = []
    for name, value in vars(config).items():
        numbers = [x for x in (value if isinstance(value, tuple) else [value]) if type(x) in (int, float)]
        zero = name in _FROM_ZERO
        if not all((x >= 0 if zero else x > 0) and x < float("inf") for x in numbers):
            rows.append(f"{name}: {value} (must be {'at least 0' if zero else 'above 0'})")
    return rows
