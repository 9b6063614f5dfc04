"""Pipeline schedules: tables, formulas of the papers, times, texts, errors."""

import importlib.util
import pickle
from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import ConfigError, ScheduleError
from fsharding.pipeline.actions import KINDS, Action
from tests.helpers import refusal

SIZES = [(1, 3), (2, 4), (3, 4), (4, 8), (5, 5), (6, 12)]
TIMES = [(1, 1, 1), (1, 2, 1), (2, 2, 1), (3, 2, 1), (5, 4, 3)]


def rows(schedule):
    return [" ".join(map(str, row)) for row in schedule.table]


# --------------------------------------------------------------------------------------------------------------- tables
def test_one_forward_one_backward_in_full():
    assert rows(fs.pipeline.plan_schedule("1f1b", 2, 3)) == [
        "0GATHER 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0RECV_B2 0B1 0B2 0SCATTER",
        "1RECV_F0 1GATHER 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2 1SCATTER",
    ]
    assert rows(fs.pipeline.plan_schedule("1f1b", 2, 3, ahead=0)) == [
        "0GATHER 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2 0SCATTER",
        "1RECV_F0 1GATHER 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2 1SCATTER",
    ]


def test_each_microbatch_by_itself_and_ahead():
    assert rows(fs.pipeline.plan_schedule("1f1b", 2, 2, gather="microbatch", scatter="microbatch", ahead=1)) == [
        "0GATHER0 0GATHER1 0F0 0SEND_F0 0GATHER0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0GATHER1 0B0 0SCATTER0 0B1 0SCATTER1",
        "1RECV_F0 1GATHER0 1F0 1RECV_F1 1GATHER0 1GATHER1 1B0 1SEND_B0 1SCATTER0 1F1 1GATHER1 1B1 1SEND_B1 1SCATTER1",
    ]


def test_gradients_of_weights_need_no_parameters():
    assert rows(fs.pipeline.plan_schedule("zbv", 2, 1, gather="microbatch", ahead=0)) == [
        "0GATHER0 0F0 0SEND_F0 3RECV_F0 3GATHER0 3F0 3GATHER0 3I0 3SEND_B0 3W0 0RECV_B0 3SCATTER0 0GATHER0 0I0 0W0 0SCATTER0",
        "1RECV_F0 1GATHER0 1F0 2GATHER0 2F0 2SEND_F0 2RECV_B0 2GATHER0 2I0 2W0 2SCATTER0 1GATHER0 1I0 1SEND_B0 1W0 1SCATTER0",
    ]


def test_stages_on_one_rank_hand_over_without_messages():
    zbv = fs.pipeline.plan_schedule("zbv", 2, 1, ahead=0)
    assert zbv.owner == (0, 1, 1, 0) and [zbv.is_local(stage) for stage in range(4)] == [False, True, False, False]
    assert rows(zbv) == [
        "0GATHER 0F0 0SEND_F0 3RECV_F0 3GATHER 3F0 3I0 3SEND_B0 3W0 0RECV_B0 3SCATTER 0I0 0W0 0SCATTER",
        "1RECV_F0 1GATHER 1F0 2GATHER 2F0 2SEND_F0 2RECV_B0 2I0 2W0 2SCATTER 1I0 1SEND_B0 1W0 1SCATTER",
    ]
    alone = fs.pipeline.plan_schedule("interleaved", 1, 2, stages_per_rank=3)
    assert {action.kind for action in alone.table[0]} == {"F", "B", "GATHER", "SCATTER"}


def test_what_an_interpreter_asks():
    schedule = fs.pipeline.plan_schedule("interleaved", 3, 6)
    assert schedule.owner == (0, 1, 2, 0, 1, 2) and schedule.stages_on(1) == (1, 4)
    assert schedule.peer(Action.parse("2SEND_F0")) == 0 == schedule.peer(Action.parse("4RECV_F0")) == schedule.owner[3]
    assert fs.pipeline.plan_schedule("1f1b", 4, 8).in_flight == (4, 3, 2, 1)
    assert fs.pipeline.plan_schedule("gpipe", 4, 8).in_flight == (8, 8, 8, 8)


def test_schedules_are_values():
    a = fs.pipeline.plan_schedule("zbv", 2, 4)
    b = pickle.loads(pickle.dumps(a))
    assert a is fs.pipeline.plan_schedule("zbv", 2, 4, stages_per_rank=2) and a == b and hash(a) == hash(b)
    assert a != fs.pipeline.plan_schedule("zbv", 2, 4, gather="microbatch")
    assert repr(a) == str(a) == "Schedule(zbv: 2 ranks, 4 stages, 4 microbatches, 88 actions)"
    actions = [Action(kind, 3, 0) for kind in KINDS] + [Action("GATHER", 12)]
    assert [Action.parse(str(action)) for action in actions] == actions
    assert [str(action) for action in actions[:5]] == ["3F0", "3B0", "3I0", "3W0", "3SEND_F0"]


# ---------------------------------------------------------------------------------------------------------------- times
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("times", TIMES)
def test_idle_time_is_that_of_the_papers(ranks, microbatches, times):
    forward, backward_input, backward_weight = times
    both, p, m = sum(times), ranks, microbatches

    def of(name, **kwargs):
        timeline = fs.pipeline.plan_schedule(name, ranks, microbatches, **kwargs).simulate(*times)
        idle = {timeline.total - busy for busy in timeline.busy}
        assert len(idle) == 1, "every rank has the same work"
        local = kwargs.get("stages_per_rank", 1 if name in ("gpipe", "1f1b") else 2)
        assert timeline.bubble_share == pytest.approx(min(idle) / (min(idle) + local * m * both))
        return timeline.bubble_share, idle.pop()

    for name in ("gpipe", "1f1b"):
        assert of(name) == (pytest.approx((p - 1) / (m + p - 1)), (p - 1) * both)
    for v in (2, 3):
        share, idle = of("interleaved", stages_per_rank=v)
        assert idle == (p - 1) * both and share / (1 - share) == pytest.approx((p - 1) / (v * m))
        _, idle = of("interleaved_zero_bubble", stages_per_rank=v)
        assert idle == (p - 1) * (forward + backward_input - backward_weight)
    if times == (1, 1, 1) and m >= 2 * p - 1:
        assert of("zbv") == (pytest.approx((p - 1) / (6 * m + p - 1)), p - 1)
    if m >= 2 * p:
        published = (p - 1) * (forward + 2 * backward_input - backward_weight)
        _, idle = of("dualpipev")
        assert idle <= published
        assert times != (1, 1, 1) or idle == p - 1


def test_with_few_microbatches():
    for p, m, v in [(4, 1, 2), (4, 3, 3), (8, 2, 3)]:
        timeline = fs.pipeline.plan_schedule("interleaved", p, m, stages_per_rank=v).simulate()
        assert timeline.total - timeline.busy[0] == 3 * (p - 1 + (v - 1) * (p - m))
        for name in ("gpipe", "1f1b"):
            assert fs.pipeline.plan_schedule(name, p, m).simulate().bubble_share == pytest.approx((p - 1) / (m + p - 1))


def test_messages_take_their_time_on_the_way():
    schedule = fs.pipeline.plan_schedule("gpipe", 2, 1)
    timeline = schedule.simulate(1, 2, 3, send=10)
    assert timeline.total == 1 + 10 + 1 + 5 + 10 + 5
    ends = {str(span.action): (span.begin, span.end) for row in timeline.spans for span in row}
    assert ends["0SEND_F0"] == (1, 11) and ends["1RECV_F0"] == (0, 11) and ends["1F0"] == (11, 12)
    assert ends["0RECV_B0"] == (1, 27) and ends["0SCATTER"] == (32, 32)


def test_the_timeline_as_text():
    assert fs.pipeline.plan_schedule("1f1b", 2, 2).show() == (
        "Schedule(1f1b: 2 ranks, 2 stages, 2 microbatches, 20 actions)\n"
        "rank 0 | F0 F1 .  .  B0 -- .  B1 -- | idle 33.3%, 2 in flight\n"
        "rank 1 | .  F0 B0 -- F1 B1 -- .  .  | idle 33.3%, 1 in flight\n"
        "total 9, bubbles 33.3%"
    )
    assert fs.pipeline.plan_schedule("zbv", 2, 1).show(send=0.5).splitlines()[2:] == [
        "rank 1 | .   1F0 2F0 .   .   .   2I0 2W0 1I0 1W0 .   .   | idle 50.0%, 2 in flight",
        "total 12, bubbles 50.0%",
    ]


def test_a_picture(tmp_path, monkeypatch):
    schedule = fs.pipeline.plan_schedule("dualpipev", 2, 4)
    fs.pipeline.draw_schedule(schedule, tmp_path / "a.png", send=0.5)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and len(list(tmp_path.iterdir())) == 1
    for name in ("b.svg", "c.svg"):
        fs.pipeline.draw_schedule(schedule, tmp_path / name)
    assert (tmp_path / "b.svg").read_bytes() == (tmp_path / "c.svg").read_bytes()
    assert b"<svg" in (tmp_path / "b.svg").read_bytes()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal(fs.pipeline.draw_schedule, schedule, tmp_path / "b.png", kind=ConfigError) == (
        "fs.pipeline.draw_schedule needs matplotlib to draw a schedule.\n"
        "pip install 'fsharding[plot]', or print(schedule.show())."
    )


# --------------------------------------------------------------------------------------------------------------- layers
def test_layers_of_stages_and_of_ranks():
    zbv, loop = fs.pipeline.plan_schedule("zbv", 2, 3), fs.pipeline.plan_schedule("interleaved", 2, 2)
    assert fs.pipeline.layers_of(zbv, 6) == ((0,), (1, 2), (3, 4), (5,))
    assert fs.pipeline.stages_for(zbv, 6) == [[0, 5], [1, 2, 3, 4]]
    assert fs.pipeline.stages_for(loop, 6) == [[0, 3, 4], [1, 2, 5]]
    assert fs.pipeline.stages_for(loop, 3, counts=[0, 1, 1, 1]) == [[1], [0, 2]]


def test_a_layout_takes_them():
    schedule = fs.pipeline.plan_schedule("zbv", 2, 3)
    shapes = {"blocks": torch.empty(7, 4, 4, device="meta"), "embed": torch.empty(8, 4, device="meta")}
    names = {"blocks": ("layers", "embed", "mlp"), "embed": ("vocab", "embed")}
    mesh = fs.AbstractMesh(("pp", "dp"), (2, 2))
    stages = {"blocks": fs.pipeline.stages_for(schedule, 7), "embed": schedule.owner[0]}
    layout = fs.plan_layout(shapes, mesh, names=names, stages=stages)
    (blocks,) = layout.params["blocks"].assigned
    assert blocks.ranges == (((0, 2), (6, 7)), ((2, 6),)) and layout.params["embed"].assigned


# --------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (
            ("1fb1", 2, 4), {},
            "fs.pipeline.plan_schedule knows no schedule '1fb1'.\n"
            "Use one of gpipe, 1f1b, interleaved, interleaved_zero_bubble, zbv, dualpipev. Did you mean '1f1b'?",
        ),
        (
            ("gpipe", 0, 2.0), {"gather": "layer", "ahead": -1},
            "fs.pipeline.plan_schedule cannot plan gpipe with these numbers.\n"
            "  ranks is 0, not an integer from 1\n"
            "  microbatches is 2.0, not an integer from 1\n"
            "  gather is 'layer', not 'step' or 'microbatch'\n"
            "  ahead is -1, not an integer from 0\nPass integers from 1, and ahead from 0.",
        ),
        (
            ("1f1b", 2, 2), {"stages_per_rank": 2},
            "fs.pipeline.plan_schedule cannot plan 1f1b with these numbers.\n"
            "  stages_per_rank is 2, but 1f1b has 1",
        ),
        (
            ("interleaved", 4, 9), {"stages_per_rank": 1},
            "fs.pipeline.plan_schedule cannot plan interleaved with these numbers.\n"
            "  stages_per_rank is 1, but interleaved has at least 2\n"
            "  microbatches is 9, but interleaved on 4 ranks runs 2 equal rounds: use 8 or 10",
        ),
        (
            ("dualpipev", 4, 7), {"stages_per_rank": 3},
            "fs.pipeline.plan_schedule cannot plan dualpipev with these numbers.\n"
            "  stages_per_rank is 3, but dualpipev has 2\n"
            "  microbatches is 7, but dualpipev on 4 ranks needs at least 8",
        ),
    ],
)  # fmt: skip
def test_numbers_that_a_schedule_cannot_have(args, kwargs, text):
    assert refusal(fs.pipeline.plan_schedule, *args, **kwargs, kind=ScheduleError) == text


def test_layers_that_stages_cannot_have():
    schedule = fs.pipeline.plan_schedule("zbv", 2, 3)
    assert refusal(fs.pipeline.stages_for, schedule, 3, kind=ScheduleError) == (
        "fs.pipeline.layers_of cannot put 3 layers on the 4 stages of zbv.\n"
        "Use at most 3 stages, or pass counts= with 0 for the stages without layers."
    )
    assert refusal(fs.pipeline.layers_of, schedule, 6, counts=[1, 2], kind=ScheduleError) == (
        "fs.pipeline.layers_of cannot put 6 layers on the 4 stages of zbv as [1, 2].\nPass 4 counts that sum to 6."
    )


def edited(schedule, *edits):
    """A schedule with words of its rows replaced: (rank, old, new)."""
    texts = rows(schedule)
    for rank, old, new in edits:
        assert f" {old} " in f" {texts[rank]} "
        texts[rank] = f" {texts[rank]} ".replace(f" {old} ", f" {new} ").strip()
    table = tuple(tuple(Action.parse(word) for word in text.split()) for text in texts)
    return replace(schedule, table=table)


MEND = "Pass computes to fs.pipeline.make_schedule, which inserts messages, gathers and scatters."


@pytest.mark.parametrize(
    ("edits", "faults"),
    [
        ([(0, "0F1", "0F7"), (1, "1F0", "2F0"), (1, "1B0", "0B0")], [
            "rank 0: 0F7, but microbatches are 0 to 1",
            "rank 1: 2F0, but stages are 0 to 1",
            "rank 1: 0B0, but stage 0 is on rank 0",
        ]),
        ([(0, "0GATHER 0F0", "0F0 0GATHER"), (1, "1B0", "1I0"), (1, "1SCATTER", "1SCATTER1"), (0, "0SEND_F1", "0SEND_F0")], [
            "rank 0: 0SEND_F0 appears 2 times",
            "rank 1: 1I0 has no 1W0",
            "rank 0: 0SEND_F1 is missing",
            "rank 0: 0F0 has no 0GATHER or 0GATHER0 before it",
        ]),
        ([(0, "0RECV_B0 0B0", "0B0 0RECV_B0"), (1, "1SCATTER", ""), (1, "1GATHER", "1GATHER 1GATHER1")], [
            "rank 0: 0B0 comes before 0RECV_B0, which it needs",
            "rank 1: 1GATHER1 is not needed: the parameters of stage 1 are gathered already",
            "rank 1: 1SCATTER is missing",
        ]),
        ([(0, "0F0 0SEND_F0 0F1 0SEND_F1", "0F0 0F1 0SEND_F1 0SEND_F0")], [
            "rank 0 sends 0SEND_F1, but rank 1 receives 1RECV_F0",
        ]),
        ([(1, "1RECV_F1 1SEND_B0", "1SEND_B0 1RECV_F1")], [
            "rank 0 waits forever at 0B0",
            "rank 1 waits forever at 1F1",
            "ranks 0 and 1 are at 0SEND_F1 and 1SEND_B0, which don't match",
        ]),
    ],
)  # fmt: skip
def test_all_that_is_wrong_with_a_table_is_said(edits, faults):
    broken = edited(fs.pipeline.plan_schedule("1f1b", 2, 2, ahead=0), *edits)
    wanted = "\n".join(["fs.pipeline.check_schedule refuses 1f1b.", *(f"  {fault}" for fault in faults), MEND])
    assert refusal(fs.pipeline.check_schedule, broken, kind=ScheduleError) == wanted


def test_computes_without_an_end_are_refused():
    # 1F1 needs 0F1, which is after 0B0; and 0B0 needs 1B0, which is after 1F1.
    late = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    assert refusal(fs.pipeline.make_schedule, late, kind=ScheduleError) == (
        "fs.pipeline.make_schedule never ends: these ranks wait forever.\n"
        "  rank 0 waits at 0B0\n"
        "  rank 1 waits at 1F1\n"
        "Order F after F of the previous stage, B or I after B or I of the next stage, and W after I."
    )
    assert refusal(fs.pipeline.make_schedule, [["0F0", "0G1"]], kind=ScheduleError).startswith(
        "fs.pipeline.Action.parse cannot read '0G1'."
    )


def test_stages_of_a_rank_gather_and_scatter_alike():
    planned = fs.pipeline.plan_schedule("interleaved", 2, 2, ahead=0)
    each = fs.pipeline.plan_schedule("interleaved", 2, 2, ahead=0, gather="microbatch")
    other = [[a for a in row if a.stage == 2 or a.kind not in ("GATHER", "SCATTER")] for row in each.table]
    mine = [a for a in planned.table[0] if a.stage == 0 and a.kind in ("GATHER", "SCATTER")]
    mixed = replace(planned, table=((mine[0], *other[0], mine[1]), planned.table[1]))
    assert refusal(fs.pipeline.check_schedule, mixed, kind=ScheduleError).splitlines()[1:3] == [
        "  rank 0: stages [0] GATHER once per step, stages [2] per microbatch; all stages of a rank must do the same",
        "  rank 0: stages [0] SCATTER once per step, stages [2] per microbatch; all stages of a rank must do the same",
    ]
    late = edited(fs.pipeline.plan_schedule("1f1b", 2, 2, ahead=0), (0, "0GATHER 0F0", "0GATHER0 0F0 0GATHER"))
    assert "rank 0: 0GATHER is too late: 0GATHER0 comes before it" in refusal(
        fs.pipeline.check_schedule, late, kind=ScheduleError
    )


def test_a_schedule_of_ones_own():
    mine = fs.pipeline.make_schedule([["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1I1", "1W1", "1B0"]], name="mine")
    assert (mine.ranks, mine.stages, mine.microbatches, mine.owner) == (2, 2, 2, (0, 1)) and fs.pipeline.check_schedule(
        mine
    )
    ours = fs.pipeline.plan_schedule("interleaved_zero_bubble", 2, 4)
    computes = [[action for action in row if action.kind in "FIW"] for row in ours.table]
    assert fs.pipeline.make_schedule(computes, name=ours.name) == ours
    assert refusal(fs.pipeline.make_schedule, [["0F0", "0I0", "1B0"], ["1F0", "0SEND_F0"]], kind=ScheduleError) == (
        "fs.pipeline.make_schedule cannot use these computes.\n"
        "  rank 1: 0SEND_F0 isn't an F, B, I or W\n"
        "Pass F and B, or F, I and W, of every stage and microbatch once, each stage on one rank."
    )
    assert refusal(fs.pipeline.make_schedule, [["0B0", "0F0"], ["1F0", "1B0"]], kind=ScheduleError) == (
        "fs.pipeline.make_schedule never ends: these ranks wait forever.\n"
        "  rank 0 waits at 0B0\n"
        "  rank 1 waits at 1F0\n"
        "Order F after F of the previous stage, B or I after B or I of the next stage, and W after I."
    )


def test_other_refusals():
    schedule = fs.pipeline.plan_schedule("1f1b", 2, 2)
    assert refusal(fs.pipeline.check_schedule, replace(schedule, ranks=3, stages=1), kind=ScheduleError) == (
        "fs.pipeline.check_schedule refuses 1f1b.\n  ranks is 3, but the table has 2 rows\n  stages is 1, but owner has 2\n"
        + MEND
    )
    assert refusal(schedule.simulate, -1, send=float("nan"), kind=ScheduleError) == (
        "fs.pipeline.Schedule.simulate cannot use these durations.\n"
        "  forward is -1\n  send is nan\n"
        "Pass finite durations that aren't negative."
    )
    assert refusal(Action.parse, "F0", kind=ScheduleError) == (
        "fs.pipeline.Action.parse cannot read 'F0'.\n"
        "Write stage, kind, microbatch, such as '3F0'; kinds are F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, GATHER, SCATTER."
    )
