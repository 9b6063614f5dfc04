"""Gathers and reductions on queues of their own, without a device that has any: who waits for whom, as a log that is checked.

The steps are those of one of four fake ranks; every operation is written down with the memory that it touches.
"""

import gc
import itertools
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.stream_log import Row, recording_streams
from fsharding.comm.streams import Streams, streams_for
from fsharding.testing import assert_bitwise_equal
from fsharding.transforms.unit_plan import large_from
from tests.helpers import bits, fake_groups_write, fake_ranks, full, slow
from tests.odd_units import NAMES, SIZE, init, loss_of
from tests.stream_order import unjoined, violations, waits_of, without
from tests.training import MODEL, ZEROS, optimizer

DP, OUTER = {"dp": 4}, {"replica": 2, "dp": 2}


def stepped(
    strategy, *, axes=DP, donate=False, microbatches=1, depth=1, precision=fs.BF16, sums="native", large=None,
    policy=fs.policies.save_except_gathered, steps=2, records=True, **kinds,
):  # fmt: skip
    """The log of some steps, and the state after them."""
    with fake_ranks(1, **axes) as mesh, large_from(large) if large else nullcontext():
        how = replace(precision, sums=sums)
        layout = fs.plan_layout(
            init(fs.random.key(0)), mesh, strategy=strategy, names=NAMES, precision=how, tp="replicate"
        )
        opt = optimizer("adamw")
        state = fs.init_state(init, opt, fs.random.key(0), layout)
        step = fs.make_train_step(
            loss_of(policy, **kinds), opt, microbatches=microbatches, donate=donate, prefetch_depth=depth, check="async"
        )
        batch = {"x": torch.linspace(-1, 1, 4 * SIZE).view(4, SIZE)}
        if not records:
            for _ in range(steps):
                state, _ = step(state, batch)
            return [], bits(state)
        with recording_streams() as streams:
            for _ in range(steps):
                state, _ = step(state, batch)
            del step
        return streams.rows, bits(state)


KINDS = {"donate": (False, True), "microbatches": (1, 2), "depth": (0, 1, 2)}
EVERY = [dict(zip(KINDS, values, strict=True)) for values in itertools.product(*KINDS.values())]
SOME = [EVERY[1], EVERY[5], EVERY[6], EVERY[10]]
ODD = {
    "ordered": {"sums": "ordered", "microbatches": 2},
    "float32": {"precision": fs.FP32, "sums": "ordered"},
    "large": {"large": 32},
    "large and ordered": {"large": 32, "sums": "ordered", "microbatches": 2},
    "kept": {"policy": fs.policies.everything_saveable},
    "remat": {"policy": fs.policies.nothing_saveable, "depth": 2},
    "direct": {"direct": True, "precision": fs.FP32},
    "fp8": {"precision": fs.FP8},
    "mxfp8": {"precision": fs.MXFP8, "microbatches": 2, "large": 32},
    "fp8 of whole weights": {"precision": fs.FP8, "axes": {"tp": 4}},
    "in vain": {"in_vain": True, "policy": fs.policies.everything_saveable},
}


@slow
@fake_groups_write
@pytest.mark.parametrize("cases", [SOME, pytest.param(EVERY, marks=full)], ids=["some", "every"])
@pytest.mark.parametrize("strategy", ZEROS, ids=str)
def test_nothing_is_read_before_it_is_written_nor_written_while_a_reader_is_due(strategy, cases):
    for case in cases:
        rows, _ = stepped(strategy, **case)
        assert violations(rows) == [] and unjoined(rows) == [], case


@slow
@fake_groups_write
@pytest.mark.parametrize("name", ODD)
def test_nor_in_odd_steps(name):
    for strategy, axes in ((fs.zero(3), DP), (fs.zero(0), DP), (fs.hybrid(opt_state=True), OUTER)):
        rows, _ = stepped(strategy, **{"axes": axes, **ODD[name]})
        assert violations(rows) == [] and unjoined(rows) == [], strategy


@fake_groups_write
@pytest.mark.parametrize("strategy", [fs.zero(3), fs.zero(1)], ids=str)
def test_queues_change_no_bit(strategy):
    for case in ({}, {"microbatches": 2, "donate": True, "sums": "ordered", "large": 32}):
        assert_bitwise_equal(stepped(strategy, **case)[1], stepped(strategy, records=False, **case)[1])


# -------------------------------------------------------------------------------------------- every wait is there for something
NEEDED = {
    ("gather's collectives", "issued on gather"),
    ("gather", "done on gather's collectives"),
    ("compute", "gathered on gather"),
    ("gather", "free on compute"),  # the optimizer has written the shards; the unit that had the memory before is done
    ("gather", "reduced on reduce"),  # it takes the memory of the last reduction
    ("reduce", "filled on compute"),
    ("reduce's collectives", "issued on reduce"),
    ("reduce", "done on reduce's collectives"),
    ("compute", "reduced on reduce"),  # the memory of a bucket is filled again
    ("compute's collectives", "issued on compute"),
    ("compute", "done on compute's collectives"),
    ("reduce", "computed on compute"),  # what autograd has computed of leaves that are in no unit
}


def logs():
    yield from (stepped(fs.zero(3), **ODD[name])[0] for name in ("direct", "in vain", "large and ordered"))
    yield stepped(fs.zero(3), microbatches=2, **ODD["float32"])[0]
    yield stepped(fs.zero(3), donate=True)[0]


def fails(rows):
    return bool(violations(rows) or unjoined(rows))


@slow
@fake_groups_write
def test_without_a_wait_the_order_is_refused():
    seen, needed, both = set(), set(), []
    for rows in logs():
        assert not fails(rows)
        seen |= waits_of(rows)
        needed |= {wait for wait in waits_of(rows) - needed if fails(without(rows, wait))}
        both.append(fails(without(rows, ("compute", "gradients on reduce"), ("compute", "all on reduce"))))
    assert needed == NEEDED
    assert any(both), "the end of the reducer and that of the call stand in for each other"
    # What is left follows from others in these steps. It has the queues join a graph, or is for steps of another shape.
    assert seen - needed == {
        ("gather", "begun on compute"),
        ("reduce", "begun on compute"),
        ("compute", "gradients on reduce"),
        ("compute", "all on reduce"),
        ("compute", "all on gather"),
    }


# ------------------------------------------------------------------------------------------------------------ the pool
CPU = torch.device("cpu")


@pytest.mark.parametrize(("streams", "allocations", "kept"), [(nullcontext, 1, 1), (recording_streams, 3, 0)])
def test_a_pool_keeps_memory_on_a_device_with_one_stream_only(streams, allocations, kept):
    made = []

    def allocate(shape, dtype, device):
        x = torch.empty(shape, dtype=dtype, device=device)
        made.append(weakref.ref(x.untyped_storage()))
        return x

    pool, owner = Pool(allocate), object()
    with streams():
        for _ in range(3):
            x = pool.take(64, torch.float32, CPU, owner)
            view = x[:8]
            del x
            assert [*pool.alive()] == [id(owner)]  # a view alone keeps the buffer
            del view
            assert pool.alive() == {}
        gc.collect()
        assert len(made) == allocations and sum(storage() is not None for storage in made) == kept
    assert (pool.peak_owners, pool.peak_bytes) == (1, 256)


def test_a_cpu_has_one_queue():
    streams = streams_for(CPU)
    assert type(streams) is Streams and not streams.several
    with streams.on("gather"):
        assert streams.record("nothing") is None
        streams.wait(None)
    streams.wait_all()


# --------------------------------------------------------------------------------------------------- the check itself
def run(stream, reads=(), writes=()):
    return Row(stream, "run", "op", tuple(reads), tuple(writes))


def event(stream, number):
    return Row(stream, "record", "e", event=number)


def wait(stream, number):
    return Row(stream, "wait", "e", event=number)


TAKEN = Row("a", "take", "storage 1", writes=(1,))


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([TAKEN, run("a", (), (1,)), event("a", 0), wait("b", 0), run("b", (1,))], 0),
        ([TAKEN, run("a", (), (1,)), run("b", (1,))], 1),
        ([TAKEN, event("a", 0), run("a", (), (1,)), wait("b", 0), run("b", (1,))], 1),  # too early an event
        ([TAKEN, run("a", (), (1,)), event("a", 0), wait("c", 0), event("c", 1), wait("b", 1), run("b", (1,))], 0),
        ([TAKEN, run("a", (), (1,)), event("a", 0), wait("b", 0), run("b", (1,)), run("a", (), (1,))], 1),
        ([TAKEN, run("a", (), (1,)), run("a", (1,)), run("a", (), (1,))], 0),
    ],
)  # fmt: skip
def test_reads_and_writes_need_events_between_them(rows, wrong):
    assert len(violations(rows)) == wrong


def test_memory_that_was_let_go_is_that_of_the_next_on_its_queue():
    freed = Row("a", "free", "storage 1", writes=(1,))
    again = [Row("a", "take", "storage 2", writes=(2,)), run("a", (), (2,))]
    read = [TAKEN, run("a", (), (1,)), event("a", 0), wait("b", 0), run("b", (1,)), event("b", 1)]
    assert violations([*read, freed, *again]) == ["a: run op writes [2]: storage 2 is still used by b"]
    assert violations([*read, freed, wait("a", 1), *again]) == []


@fake_groups_write
@full
def test_nor_in_a_decoder():
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    for strategy, axes in ((fs.zero(3), DP), (fs.hybrid(opt_state=True), OUTER), (fs.zero(2), {"dp": 2, "tp": 2})):
        with fake_ranks(1, **axes) as mesh:
            state = fs.init_state(
                MODEL, fs.adamw(1e-2), fs.random.key(0), fs.plan_layout(MODEL, mesh, strategy=strategy)
            )
            step = fs.make_train_step(MODEL, fs.adamw(1e-2), microbatches=2, check="async", prefetch_depth=2)
            with recording_streams() as streams:
                for _ in range(2):
                    state, _ = step(state, {"tokens": tokens, "targets": tokens})
        assert violations(streams.rows) == [] and unjoined(streams.rows) == []


@slow
@fake_groups_write
@pytest.mark.parametrize("sums", ["native", "ordered"])
def test_no_queue_waits_for_all_that_others_do_but_at_the_end_of_a_call(sums):
    for strategy, case in itertools.product(
        (fs.zero(3), fs.zero(0), fs.hybrid(opt_state=True)), ({}, {"large": 32}, {"depth": 2})
    ):
        rows, _ = stepped(strategy, axes=OUTER, sums=sums, microbatches=2, **case)
        at_ends = [row.stream for row in rows if row.kind == "wait" and row.text.startswith("all on")]
        assert at_ends == ["compute"] * 2 * 2 * 2, "two queues, two microbatches, two steps"
