"""Side-by-side measurements: every contender in the same processes, in interleaved rounds."""

from fsharding.bench.checkpoint import CheckpointConfig, bench_checkpoint
from fsharding.bench.overhead import OverheadConfig, overhead

__all__ = ["CheckpointConfig", "OverheadConfig", "bench_checkpoint", "overhead"]
