"""Side-by-side measurements: every contender in the same processes, in interleaved rounds."""

from fsharding.bench.overhead import OverheadConfig, overhead

__all__ = ["OverheadConfig", "overhead"]
