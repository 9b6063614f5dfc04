"""Laws of pipeline schedules: whatever can be planned is right, and whatever is changed in it is refused. No process group."""

from collections import defaultdict, deque
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import fsharding as fs
from fsharding.base.errors import ScheduleError
from fsharding.pipeline.actions import COMPUTES, MESSAGES, needs, partner
from fsharding.pipeline.lowering import late
from fsharding.pipeline.schedule import SCHEDULES
from tests.helpers import full

HOWS = st.sampled_from(["step", "microbatch"])
TIMES = st.tuples(*[st.integers(0, 7)] * 3).filter(any)


def can_have(name, ranks):
    """The numbers of microbatches up to 24 that a schedule can have."""
    if name == "dualpipev":
        return range(2 * ranks, 25)
    return [m for m in range(1, 25) if not name.startswith("interleaved") or m % max(1, m // ranks) == 0]


@st.composite
def schedules(draw, least_ranks=1, most_ahead=3):
    """Everything that can be planned, up to a size."""
    name, ranks = draw(st.sampled_from(SCHEDULES)), draw(st.integers(least_ranks, 8))
    microbatches, ahead = draw(st.sampled_from(can_have(name, ranks))), draw(st.integers(0, most_ahead))
    local = draw(st.integers(2, 3)) if name.startswith("interleaved") else None
    return fs.pipeline.plan_schedule(
        name, ranks, microbatches, stages_per_rank=local, gather=draw(HOWS), scatter=draw(HOWS), ahead=ahead
    )


def changed(schedule, rank, row):
    return replace(schedule, table=(*schedule.table[:rank], tuple(row), *schedule.table[rank + 1 :]))


def between(row):
    """What a row sends and receives before each of its computes; of one moment, the order is free but for each pair."""
    found = [[]]
    for entry in row:
        if entry.kind in COMPUTES:
            found += [entry, []]
        elif entry.kind in MESSAGES:
            found[-1].append(entry)
    return [sorted(part) if isinstance(part, list) else part for part in found]


def assert_refused(schedule):
    with pytest.raises(ScheduleError, match=f"fs.pipeline.check_schedule refuses {schedule.name}"):
        fs.pipeline.check_schedule(schedule)


@given(schedules())
def test_what_can_be_planned_is_right(schedule):
    assert fs.pipeline.check_schedule(schedule) is schedule
    for rank, row in enumerate(schedule.table):
        order = defaultdict(list)
        for action in row:
            if action.kind in "BW":
                order[action.stage].append(action.microbatch)
        assert order == {stage: [*range(schedule.microbatches)] for stage in schedule.stages_on(rank)}, (
            "sums of gradients have one order, whatever the schedule"
        )


@given(schedules(), st.data())
def test_an_action_that_is_left_out_or_doubled_is_noticed(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.table[rank])
    i = data.draw(st.integers(0, len(row) - 1))
    assert_refused(changed(schedule, rank, row[:i] + row[i + 1 :]))
    j = data.draw(st.integers(0, len(row)))
    assert_refused(changed(schedule, rank, [*row[:j], row[i], *row[j:]]))


def dependent(schedule, rank):
    """Pairs of places on a rank whose actions have to come in this order."""
    row = schedule.table[rank]
    place = {action: i for i, action in enumerate(row)}
    gathered, last = {}, {}
    for i, action in enumerate(row):
        yield from ((place[c], i) for choices in needs(action, schedule.owner) for c in choices if c in place)
        stage, m = action.stage, action.microbatch
        if action.kind == "GATHER":
            gathered[stage, m] = i
        elif action.uses_parameters:
            yield gathered.get((stage, m), gathered.get((stage, None))), i
        if action.kind in "BW":
            last[stage, m] = last[stage, None] = i
        elif action.kind == "SCATTER":
            yield last[stage, m], i


@given(schedules(), st.data())
def test_two_dependent_actions_in_the_wrong_order_are_noticed(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    i, j = data.draw(st.sampled_from(list(dependent(schedule, rank))))
    row = list(schedule.table[rank])
    row[i], row[j] = row[j], row[i]
    assert_refused(changed(schedule, rank, row))


@given(schedules(least_ranks=2), st.data())
def test_messages_in_another_order_than_their_receives_are_noticed(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    channels = defaultdict(list)
    for i, action in enumerate(schedule.table[rank]):
        if action.kind.startswith("SEND"):
            channels[schedule.peer(action)].append(i)
    pairs = [pair for places in channels.values() for pair in pairwise(places)]
    assume(pairs)
    i, j = data.draw(st.sampled_from(pairs))
    row = list(schedule.table[rank])
    row[i], row[j] = row[j], row[i]
    assert_refused(changed(schedule, rank, row))


@given(schedules(), TIMES, st.integers(0, 3))
def test_times_add_up(schedule, times, send):
    timeline = schedule.simulate(*times, send=send)
    forward, backward_input, backward_weight = times
    local, pairs = schedule.stages // schedule.ranks, schedule.microbatches
    assert timeline.busy == (local * pairs * sum(times),) * schedule.ranks
    hops = sum(not schedule.is_local(stage) for stage in range(schedule.stages - 1))
    path = schedule.stages * (forward + backward_input) + backward_weight + 2 * hops * send
    assert timeline.total >= max(path, *timeline.busy)
    assert 0 <= timeline.bubble_share < 1
    for row in timeline.spans:
        computes = [span for span in row if span.action.kind in COMPUTES]
        assert all(a.end <= b.begin for a, b in pairwise(computes))
        ends = {span.action: span.end for span in row}
        for span in computes:
            for choices in needs(span.action, schedule.owner):
                assert span.begin >= min(ends[choice] for choice in choices if choice in ends)


@given(schedules())
def test_a_rank_may_wait_at_each_receive_that_is_late(schedule):
    """Where nothing is posted ahead, receives may block and messages need no other order than that of each channel."""
    table = tuple(late(row, schedule.owner) for row in schedule.table)
    fs.pipeline.check_schedule(replace(schedule, table=table))
    computes = [[action for action in row if action.kind in COMPUTES] for row in table]
    for rank, (row, lowered) in enumerate(zip(table, fs.pipeline.make_schedule(computes, ahead=0).table, strict=True)):
        assert sorted(row, key=str) == sorted(schedule.table[rank], key=str)
        assert between(row) == between(lowered), "as if it had been planned so"
    channels, at = defaultdict(deque), [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table):
            while at[rank] < len(row):
                action = row[at[rank]]
                if action.kind.startswith("SEND"):
                    channels[rank, schedule.peer(action)].append(action)
                if action.kind.startswith("RECV"):
                    channel = channels[schedule.peer(action), rank]
                    if not channel:
                        break
                    assert channel.popleft() == partner(action)
                at[rank] += 1
                moved = True
    assert at == [len(row) for row in table]


@given(schedules(), st.integers(1, 3))
def test_a_receive_is_posted_before_the_compute_before_its_use(schedule, ahead):
    """Or right after an earlier message of the same two ranks, which name theirs in one order."""
    computes = [[action for action in row if action.kind in COMPUTES] for row in schedule.table]
    for row in fs.pipeline.make_schedule(computes, ahead=ahead).table:
        posted, since, last = {}, 0, {}
        for action in row:
            if action.kind in COMPUTES:
                needed = [c for choices in needs(action, schedule.owner) for c in choices]
                for choice in (c for c in needed if c in posted):
                    at, earlier = posted.pop(choice)
                    assert at == max(earlier, since - ahead, 0) or at < since - ahead
                since += 1
            elif action.kind in MESSAGES:
                other = schedule.peer(action)
                posted[action], last[other] = (since, last.get(other, 0)), since


@given(schedules(), st.integers(0, 80))
def test_every_layer_is_on_one_stage(schedule, more):
    layers = schedule.stages + more
    by_stage = fs.pipeline.layers_of(schedule, layers)
    assert [i for owned in by_stage for i in owned] == list(range(layers))
    assert max(map(len, by_stage)) - min(map(len, by_stage)) <= 1
    by_rank = fs.pipeline.stages_for(schedule, layers)
    assert [len(owned) for owned in by_rank] == [
        sum(len(by_stage[stage]) for stage in schedule.stages_on(rank)) for rank in range(schedule.ranks)
    ]
    assert sorted(i for owned in by_rank for i in owned) == list(range(layers))


@full
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_tables_up_to_eight_ranks(name):
    for ranks in range(1, 9):
        for local in (2, 3, 4) if name.startswith("interleaved") else (None,):
            for microbatches in can_have(name, ranks):
                fs.pipeline.plan_schedule(name, ranks, microbatches, stages_per_rank=local)
            for microbatches in {*range(1, 25)} - {*can_have(name, ranks)}:
                with pytest.raises(ScheduleError, match="microbatches is"):
                    fs.pipeline.plan_schedule(name, ranks, microbatches, stages_per_rank=local)
