"""Side-by-side measurements: every contender in the same processes, in interleaved rounds."""

from fsharding.bench.checkpoint import CheckpointConfig, bench_checkpoint
from fsharding.bench.overhead import OverheadConfig, overhead
from fsharding.bench.reshard import ReshardBenchConfig, bench_reshard
from fsharding.bench.step import StepConfig, bench_step

__all__ = [
    "CheckpointConfig",
    "OverheadConfig",
    "ReshardBenchConfig",
    "StepConfig",
    "bench_checkpoint",
    "bench_reshard",
    "bench_step",
    "overhead",
]
