"""Pipelines on real ranks: what is where, how much is alive, and what happens when a stage is gone."""

import os
import signal
from datetime import timedelta

import pytest
import torch

import fsharding as fs
from fsharding.errors import RankError, ScheduleError
from fsharding.testing import run_ranks

CONFIG = fs.models.DecoderConfig(vocab=50, dim=32, layers=4, heads=4, kv_heads=2, hidden=36)
MODEL = fs.models.decoder(CONFIG)


def started(schedule, **axes):
    mesh = fs.make_mesh(device="cpu", timeout=timedelta(seconds=20), **axes)
    layout = fs.plan_layout(MODEL, mesh, strategy=fs.zero(3), stages=fs.stages_of(MODEL, schedule))
    opt = fs.adamw(1e-3)
    return fs.init_state(MODEL, opt, fs.random.key(0), layout), opt


def batch(rows=8):
    tokens = torch.randint(50, (rows, 9), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def counted(gather):
    """Bytes of state, and for each microbatch of each stage the units that were gathered."""
    schedule = fs.plan_schedule("1f1b", 2, 4, gather=gather)
    state, opt = started(schedule, pp=2, dp=2)
    memory, held = state.layout.memory(opt), fs.state_bytes((state.params, state.main, state.opt_state))
    step = fs.make_train_step(MODEL, opt, microbatches=4, schedule=schedule)
    with fs.recording() as counts:
        step(state, {name: x.chunk(2)[0] for name, x in batch(16).items()})
    return memory.state == held, [(len(c.gathers), c.peak_units) for c in counts]


def test_parameters_are_gathered_once_a_step_or_unit_by_unit():
    for equal, seen in run_ranks(counted, 4, "step"):
        assert equal and seen == [(0, 0)] * 4, "each microbatch finds them whole"
    for rank, (equal, seen) in enumerate(run_ranks(counted, 4, "microbatch")):
        # A stage has two blocks and the embedding or the head; forward ends with all let go, backward begins anew. The
        # embedding's backward needs no weights.
        assert equal and [n for n, _ in seen] == [5 if rank < 2 else 6] * 4
        assert all(peak <= 2 for _, peak in seen)


def refused(name, **numbers):
    state, opt = started(fs.plan_schedule("1f1b", 2, 4), pp=2)
    step = fs.make_train_step(MODEL, opt, microbatches=4, schedule=fs.plan_schedule(name, **numbers))
    with pytest.raises(ScheduleError) as refusal:
        step(state, batch())
    return str(refusal.value)


def test_a_schedule_for_other_numbers_is_refused_on_all_ranks():
    assert {*run_ranks(refused, 2, "1f1b", ranks=2, microbatches=8)} == {
        "train step got Schedule(1f1b: 2 ranks, 2 stages, 8 microbatches, 68 actions) for pp=2 and microbatches=4.\n"
        "Plan it with fs.plan_schedule for these numbers."
    }


def dies():
    schedule = fs.plan_schedule("1f1b", 2, 4)
    state, opt = started(schedule, pp=2)
    step = fs.make_train_step(MODEL, opt, microbatches=4, schedule=schedule)
    state, _ = step(state, batch())
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(state, batch())


def test_a_stage_that_dies_is_named():
    with pytest.raises(RankError) as failure:
        run_ranks(dies, 2)
    text = str(failure.value)
    assert "died of SIGKILL" in text
    assert "RankError: train step lost the stage at pp=1 (rank 1) while pp=0 was in 0" in text
