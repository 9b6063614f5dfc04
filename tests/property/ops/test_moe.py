"""Dispatch and combine on any number of ranks, tokens, experts and choices: every row arrives, and every result comes back.

Tokens and weights are small whole numbers, so sums are exact. Cases are drawn here and sent to ranks that wait.
"""

from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsharding import ops
from fsharding.mesh.device_mesh import coordinate
from fsharding.ops.moe import owned_experts
from fsharding.testing import run_ranks
from tests.helpers import examples, mesh_of


class Case(NamedTuple):
    tokens: tuple[int, ...]
    experts: int
    top_k: int
    favorites: int
    seed: int


@st.composite
def cases(draw):
    ranks, experts = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    return Case(
        tokens=tuple(draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks))),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        favorites=draw(st.integers(1, experts)),
        seed=draw(st.integers(0, 99)),
    )


def routed(case, place):
    """The tokens of a place, `[N, 2]` with their place and number, and where they go."""
    count, generator = case.tokens[place], torch.Generator().manual_seed(case.seed * 8 + place)
    order = torch.rand(count, case.experts, generator=generator)
    # The favorites go first, so that with few of them some experts get all tokens and others none.
    order[:, : case.favorites] += 1
    experts = order.argsort(-1, descending=True)[:, : case.top_k]
    weights = torch.randint(-3, 4, (count, case.top_k), generator=generator).float()
    x = torch.stack([torch.full((count,), float(place)), torch.arange(float(count))], 1)
    return x, ops.Routing(experts, weights, torch.zeros(count, case.experts))


def there_and_back(case):
    mesh = mesh_of({"ep": len(case.tokens)})
    place = coordinate(mesh).get("ep", 0)
    x, routing = routed(case, place)
    rows, counts, plan = ops.dispatch(x, routing, case.experts, mesh=mesh)
    start, stop = owned_experts(case.experts, (len(case.tokens),))[place]
    everyone = [routed(case, p) for p in range(len(case.tokens))]
    want = [[r.tolist() for x, to in everyone for r in x[(to.experts == e).any(1)]] for e in range(start, stop)]
    assert counts.tolist() == [len(group) for group in want]
    assert rows.tolist() == [row for group in want for row in group]
    assert torch.equal(ops.combine(rows, plan), x * routing.weights.sum(1, keepdim=True))
    assert ops.expert_counts(routing, mesh=mesh)[start:stop].tolist() == counts.tolist()


@examples(25, 100)
@given(cases())
def test_every_row_arrives_and_every_result_comes_back(case):
    run_ranks(there_and_back, len(case.tokens), case)
