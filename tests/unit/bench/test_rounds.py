"""Rounds of a benchmark treat everyone alike: who is first, and who comes after whom."""

import itertools
from collections import Counter

import pytest

from bench.options import MemoryConfig, ReshardConfig, ScalingConfig, StepConfig
from bench.peers import PEERS
from bench.rounds import counted_rounds, in_turn
from bench.step import OURS
from fsharding.comm.reshard_plan import BUDGET


@pytest.mark.parametrize("n", range(1, 10))
def test_everyone_comes_after_everyone_else_equally_often(n):
    names = [str(i) for i in range(n)]
    rounds = n if n % 2 == 0 else 2 * n
    orders = [in_turn(names, number) for number in range(rounds)]
    assert all(sorted(order) == names for order in orders)
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert pairs == dict.fromkeys(itertools.permutations(names, 2), rounds // n)
    assert Counter(order[0] for order in orders) == dict.fromkeys(names, rounds // n)


def test_a_measurement_says_how_long_it_will_take(capsys):
    assert [*counted_rounds(10, 2, "a, b")] == [*range(12)]
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["a, b: 2 rounds to warm up, then 10", "a, b: about 1 s"]
    assert lines[2:] == [f"a, b: round {n} of 10" for n in (2, 4, 6, 8)]
    assert [*counted_rounds(0, 1, "a")] == [0]


def test_options_have_the_defaults_of_what_they_are_for():
    """They stand apart from what measures, which imports torch."""
    assert ReshardConfig().budget_mb == BUDGET >> 20
    for config in (StepConfig(), MemoryConfig(), ScalingConfig()):
        assert {*config.contenders} <= {*PEERS, *OURS}
    assert StepConfig().contenders[-4:] == tuple(f"fsharding-zero{level}" for level in range(4))
