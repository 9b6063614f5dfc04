"""Timelines: when streams do what a log says, at given rates, and what `python -m bench overlap` makes of them."""

import json
from dataclasses import replace

import pytest

from bench.options import OverlapConfig
from bench.overlap import bench_overlap, step_timeline
from fsharding.comm.stream_log import Row
from fsharding.pipeline.schedule import SCHEDULES
from fsharding.train.timeline import Rates, timeline_of

RATES = Rates(flops=10.0, memory=100.0, link=2.0, latency=0.5)
TINY = OverlapConfig(preset="tiny", ranks=4, strategies=("zero3",), depths=(1,), batch=2, seq_len=64)


def run(stream, text="op", **cost):
    return Row(stream, "run", text, **cost)


def spans(*rows):
    return {span.text: (span.begin, span.end) for span in timeline_of([rows], RATES).spans}


def test_a_stream_does_one_operation_after_the_other_and_waits_for_events():
    rows = [
        run("compute", "a", flops=10),
        run("gather", "b", nbytes=200),
        Row("gather", "record", "gathered", event=0),
        Row("compute", "wait", "gathered on gather", event=0),
        run("compute", "c", flops=20, nbytes=100),
    ]
    assert spans(*rows) == {"a": (0, 1), "b": (0, 2), "c": (2, 4)}


def test_collectives_share_a_link():
    rows = [run("gather's collectives", "x", nbytes=1), run("reduce's collectives", "y", nbytes=3)]
    assert spans(*rows) == {"x": (0, 1), "y": (1, 3)}


def test_what_is_hidden_is_communication_during_compute():
    sent = run("gather's collectives", nbytes=3)
    hidden = timeline_of([[sent, run("compute", flops=20)]], RATES)
    assert (hidden.seconds, hidden.communication, hidden.hidden) == (2, 2, 1)
    waited = [Row("gather's collectives", "record", "done", event=0), Row("compute", "wait", "done", event=0)]
    assert timeline_of([[sent, *waited, run("compute", flops=20)]], RATES).hidden == 0
    half = [sent, run("compute", flops=10), *waited, run("compute", flops=20)]
    assert timeline_of([half], RATES).hidden == 0.5
    assert timeline_of([[run("compute", flops=10)]], RATES).hidden == 1


def test_copies_share_a_link_each_way():
    taken = [Row("compute", "take", kind, writes=(i,)) for i, kind in enumerate(("sim", "cpu"))]
    rows = [
        *taken,
        run("out", "x", reads=(0,), writes=(1,), nbytes=40),
        run("in", "y", reads=(1,), writes=(0,), nbytes=40),
        run("compute", "z", reads=(0,), writes=(1,), nbytes=40),
        run("compute", "w", reads=(0,), writes=(0,), nbytes=400),
    ]
    line = timeline_of([rows], replace(RATES, host=10.0))
    at = {span.text: (span.begin, span.end, span.link) for span in line.spans}
    assert at == {"x": (0, 2, "to host"), "y": (0, 2, "from host"), "z": (2, 4, "to host"), "w": (4, 8, "")}
    assert (line.compute, line.copies, line.copies_hidden, line.communication) == (4, 6, 0, 0)
    only_cpu = [row._replace(text="cpu") if row.kind == "take" else row for row in rows]
    assert timeline_of([only_cpu], RATES).copies == 0


def test_a_message_begins_when_both_ranks_have_come_to_it():
    sends = [
        run("compute", "forward", flops=20),
        Row("compute", "record", "issued", event=0),
        Row("messages to 1", "wait", "issued", event=0),
        run("messages to 1", "sent", nbytes=3, peer=1),
        run("compute", "more", flops=10),
    ]
    receives = [
        run("messages from 0", "received", nbytes=3, peer=0),
        Row("messages from 0", "record", "done", event=0),
        Row("compute", "wait", "done", event=0),
        run("compute", "next", flops=10),
    ]
    line = timeline_of([sends, receives], RATES)
    at = {(span.rank, span.text): (span.begin, span.end) for span in line.spans}
    assert at[0, "sent"] == at[1, "received"] == (2, 4) and at[0, "more"] == (2, 3) and at[1, "next"] == (4, 5)
    assert (line.seconds, line.compute, line.communication, line.hidden) == (5, 2, 2, 0.25)
    with pytest.raises(ValueError, match="wait for each other: rank 0, messages to 1"):
        timeline_of([sends, []], RATES)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_a_timeline(schedule):
    config = replace(TINY, stages=2, ranks=2, batch=8)
    line = step_timeline(config, "zero3", schedule)
    assert {span.rank for span in line.spans} == {0, 1}
    sent, received = (
        sorted((span.begin, span.end) for span in line.spans if span.stream.startswith(f"messages {way}"))
        for way in ("to", "from")
    )
    assert sent == received and len(sent) >= 8, "an activation and a gradient of each of four microbatches"
    assert 0 <= line.hidden <= 1 and line.seconds >= line.compute > 0


def test_a_faster_link_hides_no_less():
    slow, fast = (step_timeline(replace(TINY, link_gbs=rate), "zero3", 1) for rate in (1.0, 1000.0))
    assert slow.communication > fast.communication and slow.seconds > fast.seconds
    assert slow.compute == pytest.approx(fast.compute)
    assert {span.stream for span in fast.spans} >= {"compute", "gather", "reduce", "gather's collectives"}
    units = {span.unit for span in fast.spans if span.stream == "compute"}
    assert len(units) > 4, "embedding, blocks and head, forward and backward"


def test_the_command_prints_rows_and_writes_traces(capsys, tmp_path):
    bench_overlap(replace(TINY, depths=(0, 1), json=True, trace=tmp_path / "line.json", plot=tmp_path / "line.svg"))
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["depth"] for row in rows] == [0, 1]
    assert all(0 <= row["hidden"] <= 1 and row["step_ms"] >= row["compute_ms"] > 0 for row in rows)
    events = json.loads((tmp_path / "line-zero3-1.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert (tmp_path / "line-zero3-0.svg").read_text().count("<path") > 10
    bench_overlap(replace(TINY, stages=2, batch=8, schedules=("1f1b",), json=True, trace=tmp_path / "line.json"))
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["schedule"] == "1f1b" and 0 <= row["hidden"] <= 1
    events = json.loads((tmp_path / "line-zero3-1f1b.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
