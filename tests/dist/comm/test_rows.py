"""Rows come whole and in order whether they are sent or read where they were written, and no sooner written again.

What the wire brings is the reference: `wire.algorithm` keeps rows out of shared memory.
"""

import functools
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding.comm import process_group as wire
from fsharding.comm import steps as transition
from fsharding.comm.counters import counting_bytes
from fsharding.comm.shared_memory import segments as blocks
from fsharding.comm.transport import open_exchange, open_gather, start_sum
from fsharding.errors import RankError
from fsharding.mesh.device_mesh import Group, axis_group
from fsharding.testing import RankPool, assert_bitwise_equal, run_ranks

CPU = torch.device("cpu")
LONG = 1 << 15  # float32 elements
SENT = "_Sent"
SENT_ONLY = os.environ.get("FSHARDING_SHARED_MEMORY") == "0"
SHOWN = SENT if SENT_ONLY else "_Shown"  # in `make test-wire` nothing may be shown


def group_of(ranks):
    return axis_group(fs.make_mesh(dp=ranks), ("dp",))


def gathered(group, fill):
    delivery = open_gather(fill.numel(), fill.dtype, group, CPU)
    delivery.mine.copy_(fill)
    delivery.start()
    found = torch.stack([row.clone() for row in delivery.wait()])
    delivery.done()
    return type(delivery).__name__, found


def exchanged(group, fill):
    delivery = open_exchange(fill.shape[1], fill.dtype, group, CPU)
    delivery.mine.copy_(fill)
    delivery.start()
    found = torch.stack([row.clone() for row in delivery.wait()])
    delivery.done()
    return type(delivery).__name__, found


def both_ways(ranks, width, dtype, way):
    group = group_of(ranks)
    noise = torch.Generator().manual_seed(dist.get_rank())
    row = torch.randn(ranks, width, generator=noise).to(dtype)
    with wire.algorithm(way), counting_bytes() as traffic:
        how, rows = gathered(group, row[0])
        same, exchange = exchanged(group, row)
        assert same == how
        total = start_sum(row[0], group, torch.float32).wait()
    return how, rows, exchange, total, traffic.bytes


@pytest.mark.parametrize(
    ("ranks", "width", "dtype", "how"),
    [
        (2, LONG, torch.float32, SHOWN),
        (2, LONG + 3, torch.bfloat16, SHOWN),
        (4, LONG - 1, torch.float64, SHOWN),
        (2, 1, torch.float32, SHOWN),
        (3, 100, torch.float32, SHOWN),
        (2, 0, torch.float32, SENT),
    ],
)
def test_shown_rows_are_those_that_are_sent(ranks, width, dtype, how):
    shown, sent = (run_ranks(both_ways, ranks, ranks, width, dtype, way) for way in ("auto", "p2p"))
    for mine, other in zip(shown, sent, strict=True):
        assert (mine[0], other[0]) == (how, SENT)
        assert_bitwise_equal(mine[1:4], other[1:4])
        assert mine[4] == other[4], "bytes count alike"
    rows = [mine[1] for mine in shown]
    assert all(torch.equal(rows[0], other) for other in rows), "a gather is the same everywhere"


def landed(ranks, dtype):
    """Sums that end where they were asked to, beside sums in memory of their own."""
    mesh, noise = fs.make_mesh(dp=ranks), torch.Generator().manual_seed(dist.get_rank())
    shapes = [(300, 201), (130, 257)]
    leaves = [torch.randn(shape, generator=noise).to(dtype) for shape in shapes]
    source, there = fs.NamedSharding(mesh, fs.P(), partial=("dp",)), []
    for dims in ((None, None), (0, 1), (1, 0)):
        cut = [fs.P(*("dp" if i == dim else None for i in range(2))) for dim in dims]
        steps = [transition.plan_steps(source, fs.NamedSharding(mesh, spec)) for spec in cut]

        begin = functools.partial(
            transition.Departure, steps, shapes, mesh, wire_dtype=dtype, dtype=torch.float32, device=CPU
        )
        plain = begin().start(leaves).finish()
        into = [torch.full_like(x, torch.nan) for x in plain]
        found = begin().start(leaves).finish(into)
        assert_bitwise_equal(found, plain)
        there.append(all(x is home for x, home in zip(found, into, strict=True)))
    return there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_of_long_rows_are_made_where_they_belong(ranks, dtype):
    """But for a sum that goes in two rounds: what comes with the second is copied."""
    assert run_ranks(landed, ranks, ranks, dtype) == [[ranks == 2, True, True]] * ranks


def in_both_orders():
    mesh, found = fs.make_mesh(dp=2, cp=2), []
    for axes in (("dp", "cp"), ("cp", "dp"), ("dp", "cp")):
        group = axis_group(mesh, axes)
        _, rows = gathered(group, torch.full((LONG,), dist.get_rank()))
        found.append((rows[:, -1].tolist(), list(group.ranks)))
    return found


def test_two_orders_of_the_axes_of_one_group():
    for found in run_ranks(in_both_orders, 4):
        assert [ranks for _, ranks in found] == [[0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 2, 3]]
        assert all(rows == ranks for rows, ranks in found)


def open_pipes():
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the directory itself is open while it is listed
            count += link.readlink().name.startswith("pipe:")
    return count


def meshes_again():
    """Groups of the same processes share their pipes; a channel of each keeps their notes apart."""
    groups = [Group((0, 1), dist.get_rank(), dist.new_group([0, 1]), (0, 1)) for _ in range(20)]
    gathered(groups[0], torch.zeros(1))
    before = open_pipes()
    for group in groups:
        gathered(group, torch.zeros(1))
    under_way = []
    # One rank posts in another order than it waits, and the other way round.
    for number, group in enumerate(groups if dist.get_rank() else reversed(groups)):
        delivery = open_gather(1, torch.float32, group, CPU)
        place = number if dist.get_rank() else len(groups) - 1 - number
        delivery.mine.fill_(place)
        delivery.start()
        under_way.append((place, delivery))
    for place, delivery in under_way:
        assert [float(row) for row in delivery.wait()] == [place, place]
        delivery.done()
    return open_pipes() - before


def test_groups_of_the_same_processes_share_their_pipes():
    with RankPool(2) as pool:
        assert pool.run(meshes_again) == [0, 0]


def many_in_flight(ranks):
    """Starts some, keeps them, reads the last first, while other ranks are ahead or behind."""
    group, mine = group_of(ranks), dist.get_rank()
    for round_ in range(3):
        under_way = []
        for number in range(5):
            delivery = open_gather(LONG, torch.float32, group, CPU)
            delivery.mine.fill_(100 * round_ + 10 * number + mine)
            delivery.start()
            under_way.append((number, delivery))
            time.sleep(0.01 * mine)
        for number, delivery in reversed(under_way):
            rows = delivery.wait()
            time.sleep(0.01 * (ranks - mine))
            for member in range(ranks):
                assert (rows[member] == 100 * round_ + 10 * number + member).all()
            delivery.done()
        del under_way, delivery, rows
    return blocks.allocated_bytes()


def test_a_row_stays_until_all_have_read_it_and_its_memory_is_used_again():
    with RankPool(4) as pool:
        sizes = pool.run(many_in_flight, 4)
    # Five in flight, and a rank may be one round ahead of those that read.
    assert all(size <= 11 * 2 * LONG * 4 for size in sizes), sizes


def one_refuses(ranks):
    if dist.get_rank() == 1:
        os.environ["FSHARDING_SHARED_MEMORY"] = "0"
    return gathered(group_of(ranks), torch.full((LONG,), float(dist.get_rank())))


def test_ranks_that_start_with_the_switch_send(monkeypatch):
    monkeypatch.setenv("FSHARDING_SHARED_MEMORY", "0")
    with RankPool(2) as pool:
        for how, *_ in pool.run(both_ways, 2, LONG, torch.float32, "auto"):
            assert how == SENT


def test_one_rank_that_cannot_share_is_enough_for_all_to_send():
    with RankPool(2) as pool:
        for how, rows in pool.run(one_refuses, 2):
            assert how == SENT
            assert rows[:, -1].tolist() == [0.0, 1.0]


def leaves_at_once(ranks):
    group = group_of(ranks)
    gathered(group, torch.zeros(LONG))
    delivery = open_gather(4 * LONG, torch.float32, group, CPU)
    delivery.mine.fill_(dist.get_rank() + 1)
    delivery.start()
    time.sleep(0.5 * dist.get_rank())
    total = sum(float(row[-1]) for row in delivery.wait())
    delivery.done()
    return total


def test_a_rank_that_is_done_first_is_read_by_those_that_come_later():
    with RankPool(3) as pool:
        assert pool.run(leaves_at_once, 3) == [6.0, 6.0, 6.0]


def dies_before_the_second(ranks):
    group = group_of(ranks)
    gathered(group, torch.zeros(LONG))
    if dist.get_rank() == 1:
        os._exit(3)
    gathered(group, torch.zeros(LONG))


def test_a_rank_that_is_gone_is_an_error_at_once():
    began = time.monotonic()
    with RankPool(2) as pool, pytest.raises(RankError, match="rank 1"):
        pool.run(dies_before_the_second, 2)
    assert time.monotonic() - began < 15


def a_forked_process_begins_anew(ranks):
    group = group_of(ranks)
    gathered(group, torch.zeros(LONG))
    before = blocks.allocated_bytes()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(blocks.allocated_bytes()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return before, int(os.read(read, 100))


@pytest.mark.skipif(SENT_ONLY, reason="FSHARDING_SHARED_MEMORY=0: there are no blocks")
def test_a_fork_has_no_block_of_its_parent():
    with RankPool(2) as pool:
        for before, after in pool.run(a_forked_process_begins_anew, 2):
            assert before > 0
            assert after == 0
