"""Pipelines on real ranks: what is where, and how much is alive."""

import hashlib
import re
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import fsharding as fs
from fsharding.base.errors import ScheduleError
from fsharding.comm import redistribute
from fsharding.comm.counters import following
from fsharding.pipeline import stage_state
from fsharding.pipeline.executor import _Run
from fsharding.pipeline.lowering import late
from fsharding.pipeline.schedule import SCHEDULES
from fsharding.sharding.named_sharding import Local, local_of
from fsharding.testing import run_ranks
from fsharding.transforms import policies
from fsharding.transforms.saved_tensors import SavedTensors
from tests.helpers import full, token_batch

CONFIG = fs.models.DecoderConfig(vocab_size=50, dim=32, layers=4, heads=4, kv_heads=2, intermediate_size=36)
MODEL = fs.models.decoder(CONFIG)


def started(schedule, model=MODEL, **axes):
    mesh = fs.make_mesh(device="cpu", timeout=timedelta(seconds=20), **axes)
    layout = fs.plan_layout(model, mesh, strategy=fs.zero(3), stages=fs.pipeline.stages_of(model, schedule))
    opt = fs.adamw(1e-3)
    return fs.init_state(model, opt, fs.random.key(0), layout), opt


def counted(gather, ahead):
    """Bytes of state, and for each microbatch of each stage the units that were gathered."""
    schedule = fs.pipeline.plan_schedule("1f1b", 2, 4, gather=gather, ahead=ahead)
    state, opt = started(schedule, pp=2, dp=2)
    memory, held = state.layout.memory(opt), fs.debug.state_bytes((state.params, state.main, state.opt_state))
    step = fs.make_train_step(MODEL, opt, microbatches=4, schedule=schedule)
    with fs.debug.record_collectives() as counts:
        step(state, {name: x.chunk(2)[0] for name, x in token_batch(0, vocab=50, rows=16).items()})
    return memory.state == held, [(len(c.gathers), c.peak_units) for c in counts]


def test_parameters_are_gathered_once_a_step_or_unit_by_unit():
    for equal, seen in run_ranks(counted, 4, "step", 1):
        assert equal and seen == [(0, 0)] * 4, "each microbatch finds them whole"
    for ahead in (0, 1):
        for rank, (equal, seen) in enumerate(run_ranks(counted, 4, "microbatch", ahead)):
            # A stage has two blocks and the embedding or the head; forward ends with all let go, backward begins anew.
            # The embedding's backward needs no weights.
            assert equal and [n for n, _ in seen] == [5 if rank < 2 else 6] * 4
            # And the first of what comes next, where it is begun; it takes no buffer while another rank's memory is read.
            assert max(peak for _, peak in seen) <= 2 + ahead


def followed(name, how, ahead):
    """What was gathered and reduced of each stage over the data axes, by the table and by what was sent."""
    schedule = fs.pipeline.plan_schedule(name, 2, 4, gather=how, ahead=ahead)
    model = fs.models.decoder(replace(CONFIG, layers=schedule.stages))
    state, opt = started(schedule, model, pp=2, dp=2)
    step = fs.make_train_step(model, opt, microbatches=4, schedule=schedule)
    done, calls = [], []
    tape, do = _Run._tape, _Run.do

    def noted(run, stage, m):
        made = tape(run, stage, m)
        calls.append((stage, made.context.counts))
        return made

    def watched(run, action):
        with fs.debug.count_bytes() as sent:
            do(run, action)
        done.append((action, sent.by_axes.get(("dp",), (0, 0))[0]))

    table = schedule.table[torch.distributed.get_rank() // 2]
    with patch.object(_Run, "_tape", noted), patch.object(_Run, "do", watched):
        for expected in (late(table, schedule.owner), table):
            done.clear()
            calls.clear()
            state, _ = step(state, {name: x.chunk(2)[0] for name, x in token_batch(0, vocab=50, rows=16).items()})
            assert tuple(action for action, _ in done) == expected, "only what looks as before is received ahead"
    wanted = Counter((a.kind, a.stage) for a in table if a.kind in ("GATHER", "SCATTER"))
    found = Counter()
    if how == "step":
        found.update((a.kind, a.stage) for a, calls in done if calls)
        return wanted, found
    for stage, counts in calls:
        found["GATHER", stage] += sum(unit.startswith("blocks") for unit in counts.gathers)
        found["SCATTER", stage] += sum(unit.startswith("blocks") for unit in counts.reductions)
    posted = Counter((a.kind, a.stage) for a, calls in done if a.kind == "GATHER" and calls)
    return wanted, found, posted


@pytest.mark.parametrize(
    ("name", "ahead"),
    [("zbv", 1), *(pytest.param(name, n, marks=full) for name in SCHEDULES for n in (0, 2))],
)
def test_gathers_and_scatters_are_those_of_the_table(name, ahead):
    """One block a stage: each GATHER of a microbatch is one of a block, and each SCATTER one reduction of it."""
    for wanted, found in run_ranks(followed, 4, name, "step", ahead):
        assert wanted == found, "once a step, nothing but these actions sends over dp"
    for wanted, found, posted in run_ranks(followed, 4, name, "microbatch", ahead):
        assert wanted == found
        assert posted == Counter({key: n for key, n in wanted.items() if key[0] == "GATHER"}), "where the table says"


# ------------------------------------------------------------------------------------------- communication beside computes
def digested(schedule, model, steps=2, policy=policies.save_except_gathered, **axes):
    """What a rank computes and sends in some steps, and the events of the last one."""
    state, opt = started(schedule, model, **axes)
    step = fs.make_train_step(model, opt, microbatches=4, schedule=schedule, policy=policy)
    digest, mesh = hashlib.sha256(), state.layout.mesh
    with fs.debug.count_bytes() as sent:
        for i in range(steps):
            with following() as events:
                state, metrics = step(state, fs.local_batch(token_batch(i, vocab=50, rows=16), mesh))
            digest.update(metrics.loss.numpy().tobytes() + metrics.grad_norm.numpy().tobytes())
    for leaf in fs.tree.leaves((state.main, state.opt_state)):
        digest.update(local_of(leaf).contiguous().numpy().tobytes() if isinstance(leaf, DTensor) else b"")
    return digest.hexdigest(), dict(sent.by_axes), [*map(str, events)]


def beside(events, name):
    """The computes that begin and end between the start of some communication and its wait."""
    part = events[events.index(f"start {name}") : events.index(f"wait {name}")]
    return [event.removeprefix("end ") for event in part if event.startswith("end ")]


def overlapped(how):
    schedule = fs.pipeline.plan_schedule("zbv", 2, 4, gather=how)
    _, _, events = digested(schedule, MODEL, pp=2, dp=2)
    names = {e.removeprefix("wait ") for e in events if e.startswith("wait ") and ("GATHER" in e or "SCATTER" in e)}
    return {name: beside(events, name) for name in names}, events


def test_gathers_and_scatters_of_a_stage_are_under_way_while_it_computes():
    for rank, (found, events) in enumerate(run_ranks(overlapped, 4, "step")):
        first, second = (0, 3) if rank < 2 else (1, 2)
        assert {*found} == {f"{stage}{kind}" for stage in (first, second) for kind in ("GATHER", "SCATTER")}
        assert found[f"{first}GATHER"] == [], "the first compute of all waits for it"
        assert len(found[f"{second}GATHER"]) == 1, "one compute ahead"
        assert found[f"{second}SCATTER"] == {0: ["0I2", "0W2", "0I3", "0W3"], 1: ["1W3"]}[rank // 2]
        begun = events.index(f"start {second}SCATTER")
        assert "start bucket" in events[begun : begun + 2], "and it is what goes over the wire then"
        assert events.count("start bucket") == events.count("wait bucket") > 2
    for found, events in run_ranks(overlapped, 4, "microbatch"):
        reduced = [e.removeprefix("start ") for e in events if re.match(r"start \d+SCATTER\d", e)]
        assert len(reduced) == 8 and sum(bool(found[name]) for name in reduced) >= 4
        waited = [e.removeprefix("wait ") for e in events if re.match(r"wait \d+SCATTER\d", e)]
        assert waited == reduced, "sums are added in the order of the table"


def windows(limits, how, **axes):
    schedule = fs.pipeline.plan_schedule("zbv", 2, 4, gather=how)
    model, seen = fs.models.decoder(replace(CONFIG, tied=True)), []
    for limit in limits:
        with patch.object(redistribute, "BUCKET_BYTES", 1 << 13), patch.object(stage_state, "IN_FLIGHT_BYTES", limit):
            digest, sent, events = digested(schedule, model, **axes)
        now, most = 0, 0
        for event in events:
            now += (event == "start bucket") - (event == "wait bucket")
            most = max(most, now)
        seen.append((digest, sent, most))
    return seen


@pytest.mark.parametrize(
    ("ranks", "axes"), [(4, {"pp": 2, "dp": 2}), pytest.param(8, {"pp": 2, "replica": 2, "dp": 2}, marks=full)]
)
@pytest.mark.parametrize("how", ["step", pytest.param("microbatch", marks=full)])
def test_however_much_is_in_flight_bits_calls_and_bytes_are_the_same(ranks, axes, how):
    for none, some, every in run_ranks(windows, ranks, (0, 1 << 14, 1 << 40), how, **axes):
        assert none[:2] == some[:2] == every[:2]
        if how == "step":
            assert 1 == none[2] < some[2] < every[2]


def order_of(name):
    """For each forward of the last stage, how many of its activations had been asked for before it began."""
    schedule = fs.pipeline.plan_schedule(name, 2, 4)
    state, opt = started(schedule, pp=2)
    step = fs.make_train_step(MODEL, opt, microbatches=4, schedule=name)
    state, _ = step(state, token_batch(0, vocab=50, rows=8))
    asked, seen, irecv, forward = 0, [], torch.distributed.irecv, _Run._f

    def counted(*args, **kwargs):
        nonlocal asked
        asked += 1
        return irecv(*args, **kwargs)

    def noted(run, stage, m):
        seen.append(asked)
        forward(run, stage, m)

    with patch.object(torch.distributed, "irecv", counted), patch.object(_Run, "_f", noted):
        step(state, token_batch(0, vocab=50, rows=8))
    return seen, seen[-1] // 4


def test_a_schedule_by_name_asks_for_activations_before_the_compute_before_their_use():
    seen, tensors = run_ranks(order_of, 2, "gpipe")[1]
    assert seen == [2 * tensors, 3 * tensors, 4 * tensors, 4 * tensors]


def refused(name, **numbers):
    state, opt = started(fs.pipeline.plan_schedule("1f1b", 2, 4), pp=2)
    step = fs.make_train_step(MODEL, opt, microbatches=4, schedule=fs.pipeline.plan_schedule(name, **numbers))
    with pytest.raises(ScheduleError) as refusal:
        step(state, token_batch(0, vocab=50, rows=8))
    return str(refusal.value)


def test_a_schedule_for_other_numbers_is_refused_on_all_ranks():
    assert {*run_ranks(refused, 2, "1f1b", ranks=2, microbatches=8)} == {
        "train step got Schedule(1f1b: 2 ranks, 2 stages, 8 microbatches, 68 actions) for pp=2 and microbatches=4.\n"
        "Plan it with fs.pipeline.plan_schedule for these numbers."
    }


# ------------------------------------------------------------------------------------------------ activations in flight
def held(name, ranks, microbatches):
    """The most bytes that backward holds at once, those of one microbatch of each stage, and what the table says."""
    schedule = fs.pipeline.plan_schedule(name, ranks, microbatches)
    model = fs.models.decoder(replace(CONFIG, layers=schedule.stages))
    state, opt = started(schedule, model, pp=ranks)
    step = fs.make_train_step(model, opt, microbatches=microbatches, schedule=schedule)
    saved, peak, by_stage, own = {}, 0, {}, set()
    pack, do = SavedTensors.pack, _Run.do

    def noted(context, x):
        storage = x.untyped_storage()
        kept = pack(context, x)
        if isinstance(kept, torch.Tensor) and storage.data_ptr() not in own:
            saved[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return kept

    def alive():
        return sum(size for reference, size in saved.values() if not reference.expired())

    def watched(run, action):
        nonlocal peak
        # Parameters and tokens are there before and after.
        parts = [
            leaf.value if isinstance(leaf, Local) else leaf
            for leaf in fs.tree.leaves((run.stage_state.work, run.pieces))
        ]
        own.update(local_of(x).untyped_storage().data_ptr() for x in parts if isinstance(x, torch.Tensor))
        before = alive()
        do(run, action)
        peak = max(peak, alive())
        if action.kind == "F":
            by_stage.setdefault(action.stage, alive() - before)

    with patch.object(SavedTensors, "pack", noted), patch.object(_Run, "do", watched):
        step(state, token_batch(0, vocab=50, rows=2 * microbatches))
    assert alive() == 0
    rank, now, most = torch.distributed.get_rank(), 0, 0
    for action in schedule.table[rank]:
        now += (
            by_stage[action.stage] * ((action.kind == "F") - (action.kind in ("B", "W"))) if action.kind in "FBW" else 0
        )
        most = max(most, now)
    return peak, most, by_stage, schedule.in_flight[rank]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=full)])
def test_activations_in_flight_are_those_of_the_table(name, ranks):
    seen = run_ranks(held, ranks, name, ranks, 8)
    stages = {stage: size for _, _, by_stage, _ in seen for stage, size in by_stage.items()}
    last = max(stages)
    # The embedding keeps indices only; the head keeps its own tensors.
    assert {*(stages[s] for s in stages if s < last)} == {stages[0]} and stages[last] > stages[0] > 0
    splits = name in ("interleaved_zero_bubble", "zbv", "dualpipev")
    for peak, most, by_stage, in_flight in seen:
        # From I to W a microbatch keeps what goes into products, and what comes back out of them, which is not counted.
        assert peak <= most if splits else peak == most
        if last not in by_stage and not splits:
            assert peak == in_flight * stages[0]


# ------------------------------------------------------------------------------------------------- the halves of backward
def work_of(name, gather, policy):
    """Floating point operations of a step on this rank, all-gathers included in none."""
    schedule = fs.pipeline.plan_schedule(name, 2, 4, gather=gather)
    model = fs.models.decoder(replace(CONFIG, layers=4))
    state, opt = started(schedule, model, pp=2)
    step = fs.make_train_step(model, opt, microbatches=4, schedule=schedule, policy=policy)
    with FlopCounterMode(display=False) as counter:
        step(state, token_batch(0, vocab=50, rows=8))
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("gather", "policy"),
    [
        ("step", policies.save_except_gathered),
        ("microbatch", policies.nothing_saveable),
        pytest.param("step", policies.nothing_saveable, marks=full),
        *(pytest.param(gather, policies.dots_saveable, marks=full) for gather in ("step", "microbatch")),
        pytest.param("microbatch", policies.save_except_gathered, marks=full),
    ],
)
def test_both_halves_of_a_backward_are_no_more_work_than_the_whole(gather, policy):
    """Of schedules with as many stages; which rank has the head differs, and so does what a rank computes."""
    whole, *halves = (
        sum(run_ranks(work_of, 2, name, gather, policy)) for name in ("interleaved", "interleaved_zero_bubble", "zbv")
    )
    if policy is policies.nothing_saveable:
        # A recomputation stops before the last product of a block, but not before one that may leave its gradient.
        assert whole < halves[0] == halves[1] < 1.05 * whole
    else:
        assert halves == [whole, whole]
