"""Whom blame leads to, and what a rank says of itself."""

import json
import sys
import threading
from pathlib import Path

import torch.distributed as dist

from fsharding.mesh import call_stacks, failures, lost_ranks
from fsharding.mesh.lost_ranks import Cause, follow
from tests.helpers import until


def followed(peers, notes, me=0, function="step"):
    found = follow(peers, me, notes.get, function)
    return found.causes, found.silent


def test_blame_goes_on_to_those_who_are_silent():
    notes = {1: {"peers": [2]}, 2: {"peers": [1, 3]}, 4: {"peers": [5]}}
    assert followed([1], notes) == ({}, [3])
    assert followed([1, 4], notes) == ({}, [3, 5])
    assert followed([2], notes, me=1) == ({}, [3])


def test_a_rank_that_knows_or_has_raised_ends_the_search():
    assert followed([1, 5], {1: {"peers": [2], "causes": {"3": ["gone", "is gone"]}}}) == (
        {3: Cause("gone", "is gone")},
        [5],
    )
    raised = {1: {"peers": [2]}, 2: {"raised": "raised ValueError"}}
    assert followed([1], raised) == ({2: Cause("raised", "raised ValueError")}, [])
    assert followed([1], {1: {"peers": [0], "causes": {}}}) == ({}, []), "each has lost the other, both live"


def test_a_rank_that_ends_of_the_failure_of_others_is_not_blamed_for_it():
    lost = {"function": "step", "call": "step 3", "peers": [2], "causes": {"2": ["gone", "is gone"]}}
    ended = "has ended: RankError: step lost rank 2."
    assert followed([1, 2], {1: {**lost, "raised": ended}}) == ({2: Cause("gone", "is gone")}, [2])
    for note in ({**lost, "causes": {}}, {**lost, "function": "save"}, {}):
        assert followed([1], {1: {**note, "raised": ended}}) == ({1: Cause("raised", ended)}, [])


def test_a_rank_that_lives_is_followed_where_it_waits_in_the_same_function():
    here = {"function": "step", "call": "step 3 at a.py:1", "now": "a.py:9 (f)"}
    notes = {1: {**here, "waits": [0, 2]}, 2: here}
    found = follow([1], 0, notes.get, "step")
    assert found.causes == {2: Cause("busy", "is busy in step 3 at a.py:1: a.py:9 (f)")}
    assert found.met == {1: "step 3 at a.py:1"}


def test_a_rank_in_another_function_is_where_blame_ends_though_it_waits_or_has_failed():
    there = {"function": "save", "call": "save at b.py:2", "now": ""}
    for note in ({**there, "waits": [0]}, {**there, "peers": [0], "causes": {"0": ["elsewhere", "step", "step"]}}):
        assert followed([1], {1: note}) == ({1: Cause("elsewhere", "save at b.py:2", "save")}, [])


def test_a_rank_says_whom_it_waits_for_and_where_it_was_called():
    here = Path(__file__).relative_to(Path.cwd())
    assert failures._places()[0]["call"].startswith(f"in no collective, at {here}:")
    with failures.among((3, 4)):
        assert failures._places()[0]["waits"] == [3, 4]
    assert "waits" not in failures._places()[0]


def test_another_thread_is_found_by_its_stack():
    begun, go = threading.Event(), threading.Event()

    def wait():
        begun.set()
        go.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    try:
        call = str(call_stacks.loose_call(sys._current_frames()[thread.ident], thread.ident, waits=False))
    finally:
        go.set()
        thread.join()
    assert call.startswith(f"in no collective, at {Path(__file__).relative_to(Path.cwd())}:")


def test_the_listener_answers_takes_its_answer_back_and_says_when_the_process_ends():
    store = dist.HashStore()
    listener = lost_ranks.Listener(dist.group.WORLD, store, failures._places)
    listener.start()
    answer, note = lost_ranks.PLACE_KEY.format(0), lost_ranks.KEY.format(0)
    for question in ("1", "2"):
        store.set(lost_ranks.QUESTION, question)
        assert until(lambda asked=question: store.check([answer]) and json.loads(store.get(answer))["to"] == asked)
    assert json.loads(store.get(answer))["places"][0]["call"].startswith("in no collective, at ")
    store.delete_key(lost_ranks.QUESTION)
    assert until(lambda: not store.check([answer]))
    listener.end()
    assert not listener.is_alive() and json.loads(store.get(note)) == {"raised": "has ended"}


def test_what_a_rank_has_found_out_outlives_it(monkeypatch):
    store, found = dist.HashStore(), {"peers": [2], "causes": {"2": ["gone", "is gone"]}}
    monkeypatch.setattr(lost_ranks, "default_store", lambda: store)
    lost_ranks.post(found)
    for note in (found, {}):
        listener = lost_ranks.Listener(dist.group.WORLD, store, failures._places)
        listener.start()
        listener.end()
        assert json.loads(store.get(lost_ranks.KEY.format(0))) == {**note, "raised": "has ended"}
        lost_ranks.forget()
