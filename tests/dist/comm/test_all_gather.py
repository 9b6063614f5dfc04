"""Whole leaves are the same for every transport, and their memory is not written again while somebody views them."""

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding.base.errors import RankError
from fsharding.comm.bucket import plan_bucket, whole_views
from fsharding.comm.counters import count_bytes
from fsharding.comm.handles import Memory
from fsharding.comm.transport import transport_for
from fsharding.contrib.shared_memory import segments
from fsharding.mesh.device_mesh import axis_group
from fsharding.testing import RankPool, assert_bitwise_equal, run_ranks
from tests.helpers import TRANSPORTS

CPU = torch.device("cpu")
SIZES = {
    "even": (((8, 6), 0), ((4, 12), 1)),
    "uneven": (((7, 5), 0), ((3, 5, 2), 1)),
    "empty": (((1, 9), 0), ((2,), 0)),
    # The first and the third are gathered by a backend to where they are whole.
    "large": (((4096, 16), 0), ((7, 5), 0), ((1 << 16,), 0), ((8, 4096), 1)),
}
LONG = ((((1 << 14), 2), 0),)


def group_of(ranks, transport="shared_memory"):
    return axis_group(fs.make_mesh(dp=ranks, transport=transport), ("dp",))


class Garbage(Memory):
    def empty(self, size, dtype):
        return torch.full((size,), torch.nan, dtype=dtype)


def pieces_of(group, leaves, fill):
    """This rank's pieces of leaves that count up from `fill`."""
    bucket, pieces = plan_bucket(leaves, (group.size,)), []
    for slot in bucket.slots:
        whole = torch.arange(float(torch.Size(slot.shape).numel())).view(slot.shape) + fill
        first, stop = slot.piece(group.index)
        pieces.append(whole.narrow(slot.dim, first, stop - first).contiguous())
    return bucket, pieces


def start(group, leaves, fill, dtype=torch.float32):
    """The same, on their way."""
    bucket, pieces = pieces_of(group, leaves, fill)
    return bucket, transport_for(group, CPU).all_gather(bucket, pieces, dtype, Garbage(CPU))


def fills_of(bucket, flat):
    """What each leaf counts up from; fails where it does not count."""
    found = []
    for leaf in whole_views(flat, bucket):
        assert_bitwise_equal(leaf.flatten(), leaf[(0,) * leaf.ndim] + torch.arange(float(leaf.numel())))
        found.append(int(leaf[(0,) * leaf.ndim]))
    return found


def whole_leaves(ranks, leaves, dtype, transport):
    group = group_of(ranks, transport)
    with count_bytes() as traffic:
        bucket, handle = start(group, leaves, 3, dtype)
        flat = handle.wait()
        into = [torch.full(shape, torch.nan, dtype=dtype) for shape, _ in leaves]
        own = [piece.to(dtype) for piece in pieces_of(group, leaves, 3)[1]]
        transport_for(group, CPU).all_gather_into(bucket, own, into).wait()
    wholes = [leaf.clone() for leaf in whole_views(flat, bucket)]
    assert_bitwise_equal(into, wholes)
    return transport_for(group, CPU).name, wholes, traffic.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("leaves", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_transport_gathers_the_same_leaves(ranks, leaves, dtype):
    native, *others = (run_ranks(whole_leaves, ranks, ranks, leaves, dtype, name) for name in TRANSPORTS)
    for name, results in zip(TRANSPORTS[1:], others, strict=True):
        for want, found in zip(native, results, strict=True):
            assert (want[0], found[0]) == ("native", name)
            assert_bitwise_equal(found[1], want[1])
            assert found[2] == want[2], "bytes count alike"


def many_at_once(ranks):
    """Several sizes in flight, joined in another order than started, some kept, while ranks are ahead or behind."""
    group, mine, kept = group_of(ranks), dist.get_rank(), []
    for round_ in range(4):
        in_flight = []
        for number, leaves in enumerate((LONG, SIZES["even"], LONG, SIZES["uneven"], LONG)):
            fill = 100 * round_ + 10 * number
            in_flight.append((fill, *start(group, leaves, fill)))
            time.sleep(0.003 * mine)
        for fill, bucket, handle in reversed(in_flight):
            flat = handle.wait()
            time.sleep(0.003 * (ranks - mine))
            assert set(fills_of(bucket, flat)) == {fill}
            if fill % 40 == 0:
                kept.append((fill, bucket, flat))
    return all(set(fills_of(bucket, flat)) == {fill} for fill, bucket, flat in kept)


def test_what_somebody_views_is_not_written_again():
    with RankPool(4) as pool:
        assert pool.run(many_at_once, 4) == [True] * 4


def a_long_run(ranks, rounds):
    """One is joined while the next one is on its way; the fastest rank is never more than that ahead."""
    group, (bucket, handle) = group_of(ranks), start(group_of(ranks), LONG, 0)
    for round_ in range(1, rounds):
        flat = handle.wait()
        bucket, handle = start(group, LONG, round_)
        time.sleep(0.001 * dist.get_rank())
        assert fills_of(bucket, flat) == [round_ - 1]
        del flat
    handle.release()
    del handle
    gc.collect()
    return sum(block.size for block in segments.blocks())


@pytest.mark.parametrize("ranks", [2, 3])
def test_memory_is_given_in_turns_and_used_again(ranks):
    one = segments.size_of(4 << 15)
    with RankPool(ranks) as pool:
        sizes = pool.run(a_long_run, ranks, 40)
    # Of 40: two alive, one offered, up to three that slow ranks still read; and small blocks of the introduction.
    assert sum(sizes) < 7 * one, sizes
    assert all(size >= one for size in sizes), "everybody's turn comes"


def of_groups_that_end(ranks):
    """What is offered to a group that is gone is free for others."""
    found = []
    for _ in range(6):
        group = group_of(ranks)
        _, handle = start(group, LONG, 0)
        handle.wait()
        del group, handle
        gc.collect()
        found.append(sum(block.size for block in segments.blocks()))
    return found[2:]


def test_a_block_that_was_offered_to_nobody_any_more_is_free():
    with RankPool(2) as pool:
        for sizes in pool.run(of_groups_that_end, 2):
            assert len(set(sizes)) == 1, sizes


def ends_at_once(ranks):
    group = group_of(ranks)
    bucket, handle = start(group, LONG, 7)
    time.sleep(0.5 * dist.get_rank())
    return fills_of(bucket, handle.wait())


def test_a_rank_that_is_done_first_is_read_by_those_that_come_later():
    with RankPool(3) as pool:
        assert pool.run(ends_at_once, 3) == [[7]] * 3


def dies_before_the_second(ranks):
    group = group_of(ranks)
    start(group, LONG, 0)[1].wait()
    if dist.get_rank() == 1:
        os._exit(3)
    start(group, LONG, 1)[1].wait()


def test_a_rank_that_is_gone_is_an_error_at_once():
    with RankPool(2) as pool, pytest.raises(RankError, match="rank 1"):
        pool.run(dies_before_the_second, 2)


def forks(ranks):
    """A child drops what its parent views; the parent has not signed by that."""
    group = group_of(ranks)
    bucket, handle = start(group, LONG, 5)
    flat = handle.wait()
    child = os.fork()
    if child == 0:
        del flat
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier(group.process_group)
    for _ in range(2 * ranks + 2):
        start(group, LONG, 9)[1].release()
    return fills_of(bucket, flat)


def test_a_fork_signs_for_nothing():
    with RankPool(2) as pool:
        assert pool.run(forks, 2) == [[5], [5]]


def doubled(in_place):
    """Two blocks that use twice their weights; torch itself refuses what would have gradients."""
    mesh = fs.make_mesh(dp=2)
    sharding = fs.NamedSharding(mesh, fs.P(None, "dp"))
    params = {"w": sharding.to_dtensor(torch.ones(2, 32, 64), (2, 64, 64))}

    def block(p, x):
        weights = p["w"].detach()
        return x @ (weights.mul_(2) if in_place else weights * 2)

    with pytest.warns(UserWarning, match="does not depend on its parameters"):
        value, _ = fs.value_and_grad(lambda p, x: fs.scan_units(block, p["blocks"], x).sum())(
            {"blocks": params}, torch.ones(1, 64)
        )
    return float(value)


def test_weights_that_are_written_in_place_are_refused():
    assert run_ranks(doubled, 2, False) == [2.0**14 * 64] * 2
    with pytest.raises(RankError, match=r"weights of blocks\[0\] that were then written in place"):
        run_ranks(doubled, 2, True)
