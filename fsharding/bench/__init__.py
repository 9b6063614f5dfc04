"""Side-by-side measurements: every contender in the same processes, in interleaved rounds."""

from fsharding.bench.checkpoint import CheckpointConfig, bench_checkpoint
from fsharding.bench.memory import MemoryConfig, bench_memory
from fsharding.bench.optimizer import OptimizerConfig, bench_optimizer
from fsharding.bench.overhead import OverheadConfig, overhead
from fsharding.bench.ranks import RanksConfig, bench_ranks
from fsharding.bench.reshard import ReshardBenchConfig, bench_reshard
from fsharding.bench.scaling import ScalingConfig, bench_scaling
from fsharding.bench.step import StepConfig, bench_step

__all__ = [
    "CheckpointConfig",
    "MemoryConfig",
    "OptimizerConfig",
    "OverheadConfig",
    "RanksConfig",
    "ReshardBenchConfig",
    "ScalingConfig",
    "StepConfig",
    "bench_checkpoint",
    "bench_memory",
    "bench_ranks",
    "bench_reshard",
    "bench_scaling",
    "bench_step",
    "bench_optimizer",
    "overhead",
]
