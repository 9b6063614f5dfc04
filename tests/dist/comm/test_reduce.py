"""Sums are the same for every transport, whether terms are read where they were made or cut into rows that are sent."""

import operator

import pytest
import torch

import fsharding as fs
from fsharding.comm.counters import count_bytes
from fsharding.comm.reduce import plain_terms
from fsharding.comm.transport import transport_for
from fsharding.mesh.device_mesh import axis_group
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.helpers import TRANSPORTS

CPU = torch.device("cpu")
LEAVES = {
    "even": {(8, 6): 0, (4, 12): 1, (2, 3, 4): 2},
    "uneven": {(7, 5): 0, (3, 5, 2): 1},
    "empty": {(1, 9): 0, (2,): 0, (0, 4): 1},
}


def sums(ranks, leaves, scatter, wire_dtype, with_into, transport):
    """Sums of leaves, one of which has no term here; whether there were slots; and the bytes that were sent."""
    group = axis_group(fs.make_mesh(dp=ranks, transport=transport), ("dp",))
    cuts = tuple(leaves.items()) if scatter else tuple((shape, 0) for shape in (*leaves, ()))
    terms = plain_terms(cuts, (ranks,), wire_dtype, scatter=scatter)
    noise = torch.Generator().manual_seed(group.index)
    mine = [torch.randn(shape, generator=noise) if i else None for i, (shape, _) in enumerate(cuts)]
    into = None
    if with_into:
        member = group.index if scatter else 0
        into = [torch.full(slot.piece_shape(member), torch.nan) for slot in terms.bucket.slots]
    with count_bytes() as traffic:
        reduction = transport_for(group, CPU).reduction(terms, torch.float32, large=True)
        slots = reduction.slot(1, wire_dtype) is not None
        reduction.add([1], mine[1:2])
        reduction.add([0, *range(2, len(mine))], [mine[0], *mine[2:]])
        found = reduction.start(lambda: into).wait()
    assert slots == (transport == "shared_memory") and reduction.slot(1, torch.float64) is None
    assert into is None or not slots or all(map(operator.is_, found, into))
    return [x.clone() for x in found], traffic.bytes


@pytest.mark.parametrize("with_into", [False, True], ids=["fresh", "into"])
@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scatter", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("leaves", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_transport_gives_the_same_sums(ranks, leaves, scatter, wire_dtype, with_into):
    given = ranks, leaves, scatter, wire_dtype, with_into
    native, *others = (run_ranks(sums, ranks, *given, name) for name in TRANSPORTS)
    for results in others:
        for want, found in zip(native, results, strict=True):
            assert_bitwise_equal(found[0], want[0])
            assert found[1] == want[1], "bytes count alike"
