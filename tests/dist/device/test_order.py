"""Streams of the simulated device: every wait that the library asks for is there for something, and delays change no bit.

Orders are checked in logs, where a missing wait is seen whether or not a stream is late.
"""

import itertools
import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import fsharding as fs
from bench.timelines import write_trace
from fsharding.base.errors import NonFiniteError
from fsharding.comm.streams import DeviceStreams
from fsharding.train.timeline import Rates, timeline_of
from tests.decoders import DecoderCase
from tests.helpers import full
from tests.odd_units import NAMES, SIZE, init, loss_of
from tests.on_device import (
    SIM,
    assert_as_on_cpu,
    device_ranks,
    needs_compiler,
    on_device,
    pipelines,
    same,
    small_windows,
    train,
)
from tests.stream_order import unjoined, violations

pytestmark = [pytest.mark.timeout(1300), needs_compiler]

CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=32, layers=3)
BF16 = replace(fs.BF16, sums="ordered")
BASE = DecoderCase(CONFIG, rows=8, length=8, steps=3, precision=BF16)
CASES = {
    f"zero{level}{'-donated' if donate else ''}": replace(
        BASE, mesh=fs.AbstractMesh(("dp",), (2,)), strategy=fs.zero(level), microbatches=1 + donate, donate=donate
    )
    for level in range(4)
    for donate in (False, True)
}
CASES |= pipelines(BASE)
CASES["offload"] = replace(CASES["zero3"], policy="offload")
CASES["ahead"] = replace(CASES["zero3"], config=replace(CONFIG, layers=6), precision=fs.BF16, steps=2)
CASES["moments"] = replace(CASES["zero3-donated"], strategy=fs.zero(3).with_memory(moments="host"))
CASES["moments-ahead"] = replace(CASES["moments"], length=64)  # activations leave room for all of them


@pytest.fixture(scope="module")
def pool():
    with device_ranks(2) as ranks:
        yield ranks


def trained(case, device, seed=None):
    """`train` with a constant rate: one that changes is a tensor, which the fused kernel rounds on a device alone."""
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.adamw(3e-3, eps=1e-3, weight_decay=0.1))
    how = {} if case.mesh.axis_size("pp") > 1 else {"prefetch_depth": 2}
    with small_windows():
        together = bool(case.strategy.memory)
        return train(
            case, device, seed, opt=opt, together=together, **how, **({"check": "async"} if device == SIM else {})
        )


# ---------------------------------------------------------------------------------------------------------------- delays
def races(case, seeds):
    """Seeds whose delays change a bit."""
    still, _ = trained(case, SIM)
    return [seed for seed in seeds if not same(still, trained(case, SIM, seed)[0])]


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 25), marks=full)], ids=["few", "many"])
@pytest.mark.parametrize("name", CASES)
def test_delays_change_no_bit(pool, name, seeds):
    """The many are 24 runs of each case."""
    for first in range(0, len(seeds), 6):  # a call has a minute
        assert pool.run(races, CASES[name], seeds[first : first + 6]) == [[], []]


@pytest.mark.parametrize("name", CASES)
def test_the_device_has_the_bits_of_the_cpu(pool, name):
    here, there = ([run for run, _ in pool.run(trained, CASES[name], *how)] for how in (("cpu",), (SIM, 1)))
    assert_as_on_cpu(here, there)


# ----------------------------------------------------------------------------------------- every wait is there for something
NEEDED = {
    ("buffer_pool.py:_borrowed", "gather"),  # what was in this memory has been reduced
    ("gathered_unit.py:wait", "gather"),  # the all-gather is done
    ("gathered_unit.py:wait", "compute"),  # the unit is there
    ("gathered_unit.py:_on_gather_stream", "gather"),  # the shards are written; the unit that had the memory is done
    ("grad_reducer.py:_hand_over", "reduce"),  # the exchange of gradients is done
    ("grad_reducer.py:_let_go", "compute"),  # the memory of a bucket is filled again
    ("grad_reducer.py:_after_compute", "reduce"),  # a bucket is filled; autograd has computed leaves in no unit
    ("bucket_queue.py:_finish_oldest", "compute"),  # parameters are gathered after the update
    ("host_memory.py:_send", "out"),  # activations have been computed
    ("host_memory.py:_free", "compute"),  # they are on the host
    ("host_memory.py:_fetch", "in"),  # there is memory for them, and they are on the host
    ("host_memory.py:_wait", "compute"),  # they are back
    ("windows.py:_copied", "in"),  # there is memory for a window
    ("windows.py:arrive", "compute"),  # it is on the device
    ("windows.py:send", "out"),  # it is updated
    ("windows.py:send", "compute"),  # it is where it rests: the next windows have its memory
    ("state_copies.py:forward", "compute"),  # or activations of the next step
    ("state_copies.py:backward", "compute"),  # or a window that is copied in
    ("ranks.py:_perform", "compute"),  # or what follows the last step, which the test waits for
    ("state_copies.py:_start", "in"),  # there is memory for a window, and what it was before is on the host
    ("state_copies.py:take", "compute"),  # it is on the device
    ("collectives.py:run", "compute"),  # a sum of gradients that are in no unit
    ("executor.py:_guard", "compute"),  # a stage has received what it computes with
    *((name, "compute") for name in ("clip.py:square_sums", "value_and_grad.py:global_sums")),
}
IMPLIED = {
    ("gather_context.py:__init__", "gather"),  # each gather waits for later work; it has the stream join a graph
    ("gather_context.py:__init__", "reduce"),  # as does `_start`
    ("gathered_unit.py:_end_gathers", "gather"),  # of units that nobody needed: `close` waits for more
    ("gathered_unit.py:_end_gathers", "compute"),
    ("gather_context.py:close", "compute"),  # the sums at the end are later on the communicator of gathers
}
"""What follows from other waits in these steps."""


def odd(**kinds):
    """The log of a step of units, with a leaf that is used as it lies or a gather that nobody needs."""
    with on_device(SIM) as watch:
        mesh, opt = fs.make_mesh(device=SIM, dp=2), fs.sgd(0.1)
        loss = loss_of(fs.policies.everything_saveable, **kinds)
        layout = fs.plan_layout(init(fs.random.key(0)), mesh, names=NAMES, strategy=fs.zero(3), precision=BF16)
        state, step = fs.init_state(init, opt, fs.random.key(0), layout), fs.make_train_step(loss, opt)
        batch = {"x": torch.ones(4, SIZE, device=SIM)}
        for number in range(2):
            with watch.step(number):
                state, _ = step(state, batch)
        return watch.logs[0].rows


def waits(rows):
    """The waits of streams for events of others that the library asks for: the function, and the stream."""
    recorded = {row.event: row.stream for row in rows if row.kind == "record"}
    return [
        (number, (row.text, row.stream))
        for number, row in enumerate(rows)
        if row.kind == "wait" and ":" in row.text and recorded.get(row.event) != row.stream
    ]


def fails(rows):
    return bool(violations(rows) or unjoined(rows))


def test_without_a_wait_the_order_is_refused(pool):
    seen, needed = set(), set()
    logs = [pool.run(trained, case, SIM)[0][1][0] for case in CASES.values()]
    logs += [pool.run(odd, **kind)[0] for kind in ({"direct": True}, {"in_vain": True})]
    for rows in logs:
        assert not fails(rows)
        seen |= {wait for _, wait in waits(rows)}
        for wait in {wait for _, wait in waits(rows)} - needed:
            gone = {number for number, other in waits(rows) if other == wait}
            if fails([row for number, row in enumerate(rows) if number not in gone]):
                needed.add(wait)
    assert needed == NEEDED
    assert seen - needed == IMPLIED


def test_a_log_is_a_timeline(pool, tmp_path):
    """What a device was given, placed in time at given rates: no stream does two things at once."""
    rates = Rates(flops=1e12, memory=1e9, link=1e8, latency=1e-5)
    line = timeline_of(pool.run(trained, CASES["zero3"], SIM)[0][1][:1], rates)
    for stream in {span.stream for span in line.spans}:
        own = [span for span in line.spans if span.stream == stream]
        assert all(before.end <= after.begin for before, after in itertools.pairwise(own))
    assert {"compute", "gather", "reduce"} <= {span.stream for span in line.spans}
    assert len({span.unit for span in line.spans if span.stream == "compute"}) >= 2 * CONFIG.layers
    assert 0 <= line.hidden <= 1 and line.seconds >= line.compute > 0
    write_trace(line, tmp_path / "step.json")
    assert len(json.loads((tmp_path / "step.json").read_text())["traceEvents"]) > len(line.spans)


# ---------------------------------------------------------------------------------------------------------- a late stream
def without(kind, seed):
    """A run in which no stream waits for events of a kind: its numbers; None where they were not finite."""
    kinds, record, wait = {}, DeviceStreams.record, DeviceStreams.wait

    def noted(self, of):
        event = record(self, of)
        kinds[event] = of
        return event

    def unless(self, event):
        if kinds.get(event) != kind:
            wait(self, event)

    try:
        with patch.multiple(DeviceStreams, record=noted, wait=unless):
            return trained(replace(CASES["zero3-donated"], steps=2), SIM, seed)[0]
    except NonFiniteError:
        return None


def test_a_wait_that_is_missing_changes_numbers(pool):
    right = pool.run(without, None, 1)
    assert None not in right
    runs = [found for seed in range(1, 4) for found in pool.run(without, "gathered", seed)]
    assert any(found is None or not same(right[0], found) for found in runs)
