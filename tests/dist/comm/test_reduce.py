"""Sums are the same, whether their terms are read where they were made or cut into rows that travel.

What the wire brings is the reference: `wire.algorithm` keeps everything out of shared memory.
"""

import operator

import pytest
import torch

import fsharding as fs
from fsharding.comm import process_group as wire
from fsharding.comm.bucket import plan_bucket
from fsharding.comm.counters import counting_bytes
from fsharding.comm.reduce import Shown, open_terms
from fsharding.mesh.device_mesh import axis_group
from fsharding.testing import assert_bitwise_equal, run_ranks

CPU = torch.device("cpu")
LEAVES = {
    "even": {(8, 6): 0, (4, 12): 1, (2, 3, 4): 2},
    "uneven": {(7, 5): 0, (3, 5, 2): 1},
    "empty": {(1, 9): 0, (2,): 0, (0, 4): 1},
}


def sums(ranks, leaves, cut, wire_dtype, at_home, way):
    """Sums of leaves, one of which has no term here, and the bytes that they took."""
    group = axis_group(fs.make_mesh(dp=ranks), ("dp",))
    shapes, dims = (list(leaves), list(leaves.values())) if cut else ([*leaves, ()], [])
    noise = torch.Generator().manual_seed(group.index)
    mine = [torch.randn(shape, generator=noise) if i else None for i, shape in enumerate(shapes)]
    into = None
    if at_home:
        slots = plan_bucket(tuple(leaves.items()), (ranks,)).slots
        here = [slot.piece_shape(group.index) for slot in slots] if cut else shapes
        into = [torch.full(shape, torch.nan) for shape in here]
    with wire.algorithm(way), counting_bytes() as traffic:
        terms = open_terms(
            shapes, dims, (ranks,), group,
            wire_dtype=wire_dtype, dtype=torch.float32, device=CPU, large=True, empty=None,
        )  # fmt: skip
        terms.fill([1], mine[1:2])
        terms.fill([0, *range(2, len(mine))], [mine[0], *mine[2:]])
        terms.start()
        found = terms.wait_each(into)
    assert into is None or not isinstance(terms, Shown) or all(map(operator.is_, found, into))
    return isinstance(terms, Shown), [x.clone() for x in found], traffic.bytes


@pytest.mark.parametrize("at_home", [False, True], ids=["fresh", "into"])
@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("leaves", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_of_what_is_shown_are_those_of_what_is_sent(ranks, leaves, cut, wire_dtype, at_home):
    shown, sent = (run_ranks(sums, ranks, ranks, leaves, cut, wire_dtype, at_home, way) for way in ("auto", "p2p"))
    for mine, other in zip(shown, sent, strict=True):
        assert (mine[0], other[0]) == (True, False)
        assert_bitwise_equal(mine[1], other[1])
        assert mine[2] == other[2], "bytes count alike"
