"""Rounds of a benchmark treat everyone alike: who is first, and who comes after whom."""

import itertools
from collections import Counter

import pytest

from fsharding.bench.rounds import in_turn


@pytest.mark.parametrize("n", range(1, 10))
def test_everyone_comes_after_everyone_else_equally_often(n):
    names = [str(i) for i in range(n)]
    rounds = n if n % 2 == 0 else 2 * n
    orders = [in_turn(names, number) for number in range(rounds)]
    assert all(sorted(order) == names for order in orders)
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert pairs == dict.fromkeys(itertools.permutations(names, 2), rounds // n)
    assert Counter(order[0] for order in orders) == dict.fromkeys(names, rounds // n)
