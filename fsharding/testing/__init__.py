"""Test sharded code: run ranks on this machine, describe cases as data, and compare trees leaf by leaf."""

from fsharding.testing.cases import Home, Leaf, Pair, ReshardCase, TrainCase, device_mesh, local_part, whole_tensors
from fsharding.testing.compare import assert_bitwise_equal, assert_trees_close
from fsharding.testing.failures import RankFailure
from fsharding.testing.laws import assert_adjoint, assert_capturable, assert_matches_reference, rank_values
from fsharding.testing.ranks import RankPool, run_ranks
from fsharding.train.operations import HostReads, counting_host_reads

__all__ = [
    "Home", "HostReads", "Leaf", "Pair", "RankFailure", "RankPool", "ReshardCase", "TrainCase", "assert_adjoint",
    "assert_bitwise_equal", "assert_capturable", "assert_matches_reference", "assert_trees_close",
    "counting_host_reads", "device_mesh", "local_part", "rank_values", "run_ranks", "whole_tensors",
]  # fmt: skip
