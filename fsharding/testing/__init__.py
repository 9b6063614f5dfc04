"""What a test of sharded code needs: ranks on this machine, and comparisons that name what differs.

`ranks` runs a function on real gloo processes; `compare` compares trees bit by bit or within a tolerance.
"""

from fsharding.testing.compare import assert_bitwise_equal, assert_trees_close
from fsharding.testing.ranks import RankFailure, RankPool, run_ranks

__all__ = ["RankFailure", "RankPool", "assert_bitwise_equal", "assert_trees_close", "run_ranks"]
