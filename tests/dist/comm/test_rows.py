"""Rows and sums are the same for every transport, and memory that others read is not written before they have read it."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding.base.errors import RankError
from fsharding.comm.counters import count_bytes
from fsharding.comm.move import plan_move
from fsharding.comm.native import Message
from fsharding.comm.transport import choice_for, start_sum, transport_for
from fsharding.comm.wires import Plain
from fsharding.contrib.pairwise import SHORT
from fsharding.contrib.shared_memory import segments
from fsharding.mesh.device_mesh import Group, axis_group
from fsharding.testing import RankPool, assert_bitwise_equal, run_ranks
from tests.helpers import TRANSPORTS

CPU = torch.device("cpu")
LONG = 1 << 15  # float32 elements


def group_of(ranks, transport="shared_memory"):
    return axis_group(fs.make_mesh(dp=ranks, transport=transport), ("dp",))


def received(exchange, fill):
    exchange.own.copy_(fill)
    handle = exchange.start()
    rows = torch.stack([row.clone() for row in handle.wait()])
    handle.release()
    return rows


def gathered(group, fill):
    return received(transport_for(group, CPU).gather_rows(fill.numel(), fill.dtype), fill)


def exchanged(group, fill):
    return received(transport_for(group, CPU).all_to_all(fill.shape[1], fill.dtype), fill)


def rows_and_sum(ranks, width, dtype, transport):
    group = group_of(ranks, transport)
    noise = torch.Generator().manual_seed(dist.get_rank())
    row = torch.randn(ranks, width, generator=noise).to(dtype)
    with count_bytes() as traffic:
        rows, exchange = gathered(group, row[0]), exchanged(group, row)
        total = start_sum(row[0], group, torch.float32).wait()
    return transport_for(group, CPU).name, rows, exchange, total, traffic.bytes


@pytest.mark.parametrize(
    ("ranks", "width", "dtype"),
    [
        (2, LONG, torch.float32),
        (2, 2 * LONG + 3, torch.bfloat16),
        (4, LONG - 1, torch.float64),
        (4, SHORT // 4, torch.float32),
        (2, 1, torch.float32),
        (3, 100, torch.float32),
        (2, 0, torch.float32),
    ],
)
def test_every_transport_brings_the_same_rows_and_sums(ranks, width, dtype):
    native, *others = (run_ranks(rows_and_sum, ranks, ranks, width, dtype, name) for name in TRANSPORTS)
    for name, results in zip(TRANSPORTS[1:], others, strict=True):
        for want, found in zip(native, results, strict=True):
            assert (want[0], found[0]) == ("native", name)
            assert_bitwise_equal(found[1:4], want[1:4])
            assert found[4] == want[4], "bytes count alike"
    assert all(torch.equal(native[0][1], other[1]) for other in native), "a gather is the same everywhere"


def uneven_and_messages(ranks, transport):
    """Rows of which each member sends another number to each, and messages around a ring, among them an empty one."""
    group = group_of(ranks, transport)
    wire, mine = transport_for(group, CPU), group.index
    send, receive = [(mine + to) % ranks for to in range(ranks)], [(mine + of) % ranks for of in range(ranks)]
    with count_bytes() as traffic:
        x = torch.arange(float(2 * sum(send))).view(-1, 2) + 100 * mine
        rows = wire.all_to_all_v(x, send, receive).wait()
        after, before = group.ranks[(mine + 1) % ranks], group.ranks[mine - 1]
        data, out = [torch.full((n,), mine) for n in (3, 0, 5)], [torch.full((n,), -1) for n in (3, 0, 5)]
        sends = [Message(after, tag, x) for tag, x in enumerate(data)]
        wire.send_recv(sends, [Message(before, tag, x) for tag, x in enumerate(out)]).wait()
    return rows, out, traffic.bytes


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_transport_brings_the_same_uneven_rows_and_messages(ranks):
    native, *others = (run_ranks(uneven_and_messages, ranks, ranks, name) for name in TRANSPORTS)
    for results in others:
        assert_bitwise_equal(results, native)
    assert [out[0].tolist() for _, out, _ in native] == [[(rank - 1) % ranks] * 3 for rank in range(ranks)]


def sums_of(move, leaves, into=None):
    reduction = move.open(CPU)
    reduction.add(range(len(leaves)), leaves)
    return reduction.start(lambda: into).wait()


def sums_into(ranks, dtype, transport):
    """Sums that end where they were asked to, beside sums in memory of their own."""
    mesh, noise = fs.make_mesh(dp=ranks, transport=transport), torch.Generator().manual_seed(dist.get_rank())
    shapes = [(300, 201), (130, 257)]
    leaves = [torch.randn(shape, generator=noise).to(dtype) for shape in shapes]
    source, there = fs.NamedSharding(mesh, fs.P(), partial=("dp",)), []
    for dims in ((None, None), (0, 1), (1, 0)):
        cut = [fs.P(*("dp" if i == dim else None for i in range(2))) for dim in dims]
        targets = [fs.NamedSharding(mesh, spec) for spec in cut]
        move = plan_move([source, source], targets, shapes, Plain(dtype), torch.float32)

        plain = sums_of(move, leaves)
        into = [torch.full_like(x, torch.nan) for x in plain]
        found = sums_of(move, leaves, into)
        assert_bitwise_equal(found, plain)
        there.append(all(x is home for x, home in zip(found, into, strict=True)))
    return there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_of_long_rows_are_made_where_they_belong(ranks, dtype, transport):
    """But for a sum in two rounds: the result of the second is copied."""
    assert run_ranks(sums_into, ranks, ranks, dtype, transport) == [[ranks == 2, True, True]] * ranks


def in_both_orders(transport):
    mesh, found = fs.make_mesh(dp=2, cp=2, transport=transport), []
    for axes in (("dp", "cp"), ("cp", "dp"), ("dp", "cp")):
        group = axis_group(mesh, axes)
        rows = gathered(group, torch.full((LONG,), dist.get_rank()))
        found.append((rows[:, -1].tolist(), list(group.ranks)))
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_orders_of_the_axes_of_one_group(transport):
    for found in run_ranks(in_both_orders, 4, transport):
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
    groups = [
        Group((0, 1), dist.get_rank(), dist.new_group([0, 1]), (0, 1), transport="shared_memory") for _ in range(20)
    ]
    gathered(groups[0], torch.zeros(1))
    before = open_pipes()
    for group in groups:
        gathered(group, torch.zeros(1))
    in_flight = []
    # One rank posts in another order than it waits, and the other way round.
    for number, group in enumerate(groups if dist.get_rank() else reversed(groups)):
        exchange = transport_for(group, CPU).gather_rows(1, torch.float32)
        place = number if dist.get_rank() else len(groups) - 1 - number
        exchange.own.fill_(place)
        in_flight.append((place, exchange.start()))
    for place, handle in in_flight:
        assert [float(row) for row in handle.wait()] == [place, place]
        handle.release()
    return open_pipes() - before


def test_groups_of_the_same_processes_share_their_pipes():
    with RankPool(2) as pool:
        assert pool.run(meshes_again) == [0, 0]


def many_in_flight(ranks):
    """Starts some, keeps them, reads the last first, while other ranks are ahead or behind."""
    group, mine = group_of(ranks), dist.get_rank()
    for round_ in range(3):
        in_flight = []
        for number in range(5):
            exchange = transport_for(group, CPU).gather_rows(LONG, torch.float32)
            exchange.own.fill_(100 * round_ + 10 * number + mine)
            in_flight.append((number, exchange.start()))
            time.sleep(0.01 * mine)
        for number, handle in reversed(in_flight):
            rows = handle.wait()
            time.sleep(0.01 * (ranks - mine))
            for member in range(ranks):
                assert (rows[member] == 100 * round_ + 10 * number + member).all()
            handle.release()
        del in_flight, handle, exchange, rows
    return sum(block.size for block in segments.blocks())


def test_a_row_stays_until_all_have_read_it_and_its_memory_is_used_again():
    with RankPool(4) as pool:
        sizes = pool.run(many_in_flight, 4)
    # Five in flight, and a rank may be one round ahead of those that read.
    assert all(size <= 11 * 2 * LONG * 4 for size in sizes), sizes


def chosen(ranks, transport="auto"):
    if dist.get_rank() == 1:
        os.environ["FSHARDING_SHARED_MEMORY"] = "0"
    group = group_of(ranks, transport)
    rows = gathered(group, torch.full((LONG,), float(dist.get_rank())))
    choice = choice_for(group, CPU)
    return choice.kind.name, choice.reason, rows[:, -1].tolist()


def test_one_rank_that_cannot_share_is_enough_for_all_to_send():
    with RankPool(2) as pool:
        for name, reason, rows in pool.run(chosen, 2):
            assert (name, rows) == ("pairwise", [0.0, 1.0])
            assert reason.startswith("a rank does not share its memory (FSHARDING_SHARED_MEMORY=0")


@pytest.mark.parametrize("asked", TRANSPORTS)
def test_a_transport_that_is_asked_for_is_used(asked):
    with RankPool(2) as pool:
        for name, _, rows in pool.run(chosen, 2, asked):
            assert (name, rows) == (asked, [0.0, 1.0])


def printed():
    mesh = fs.make_mesh(dp=2, tp=2, transport="auto")
    before = repr(mesh)
    gathered(axis_group(mesh, ("dp",)), torch.zeros(1))
    return before, repr(mesh), repr(mesh["tp"])


@pytest.mark.skipif(os.environ.get("FSHARDING_SHARED_MEMORY") == "0", reason="the reason is another one")
def test_a_mesh_says_which_transport_is_used_and_why():
    for before, after, part in run_ranks(printed, 4):
        assert before.endswith(
            "dp by auto, chosen at the first collective; tp by auto, chosen at the first collective)"
        )
        assert "dp by shared_memory (its ranks are processes of one machine); tp by auto" in after
        assert part.startswith("DeviceMesh(") and "by auto" not in part


def unlike(transport):
    try:
        fs.make_mesh(dp=2, transport=transport if dist.get_rank() else "native")
    except fs.errors.FshardingError as error:
        return str(error)
    return ""


def test_ranks_that_ask_for_other_transports_are_told_so():
    for text in run_ranks(unlike, 2, "pairwise"):
        assert "\n  transport: rank 1 has pairwise, rank 0 has native\n" in text
    with pytest.raises(fs.errors.ArgumentError, match="auto, native, pairwise, shared_memory"):
        fs.make_mesh(transport="carrier pigeon")


def leaves_at_once(ranks):
    group = group_of(ranks)
    gathered(group, torch.zeros(LONG))
    exchange = transport_for(group, CPU).gather_rows(4 * LONG, torch.float32)
    exchange.own.fill_(dist.get_rank() + 1)
    handle = exchange.start()
    time.sleep(0.5 * dist.get_rank())
    total = sum(float(row[-1]) for row in handle.wait())
    handle.release()
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
    with RankPool(2) as pool, pytest.raises(RankError, match="rank 1"):
        pool.run(dies_before_the_second, 2)


def a_forked_process_begins_anew(ranks):
    group = group_of(ranks)
    gathered(group, torch.zeros(LONG))
    before = sum(block.size for block in segments.blocks())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(sum(block.size for block in segments.blocks())).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return before, int(os.read(read, 100))


def test_a_fork_has_no_block_of_its_parent():
    with RankPool(2) as pool:
        for before, after in pool.run(a_forked_process_begins_anew, 2):
            assert before > 0
            assert after == 0
