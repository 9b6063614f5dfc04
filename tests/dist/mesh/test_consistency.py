"""Ranks that were set up differently all raise the same error at the start, which says who has what."""

from dataclasses import replace
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.train import _train
from fsharding.base import _compat
from fsharding.base.errors import BatchError, ConfigError
from fsharding.mesh.consistency import compare, gather_numbers
from fsharding.mesh.device_mesh import axis_group
from fsharding.testing import RankPool, run_ranks

CONFIG = fs.models.DecoderConfig(vocab_size=50, dim=16, layers=4, heads=4, kv_heads=2, intermediate_size=20)
DEFAULT = {
    "axes": {"dp": 2, "tp": 2}, "strategy": fs.zero(3), "rate": 1e-3, "microbatches": 2, "schedule": "1f1b", "dim": 16,
}  # fmt: skip


def new_mesh(axes):
    return fs.make_mesh(device="cpu", timeout=timedelta(seconds=20), **axes)


def step_of(how):
    """A step and its state, and this rank's part of a batch."""
    model = fs.models.decoder(replace(CONFIG, dim=how["dim"]))
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(how["rate"]))
    schedule, stages = how["schedule"], None
    if how["axes"].get("pp", 1) > 1:
        stages = fs.pipeline.stages_of(
            model, fs.pipeline.plan_schedule(schedule, how["axes"]["pp"], how["microbatches"])
        )
    layout = fs.plan_layout(model, new_mesh(how["axes"]), strategy=how["strategy"], stages=stages)
    state = fs.init_state(model, opt, fs.random.key(0), layout)
    step = fs.make_train_step(model, opt, microbatches=how["microbatches"], schedule=schedule)
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    return step, state, {"tokens": tokens, "targets": tokens}


def refused(make, odd, changes):
    """What a rank says when one of them has other settings."""
    how = {**DEFAULT, **(changes if dist.get_rank() == odd else {})}
    with pytest.raises(ConfigError) as refusal:
        make(how)
    return str(refusal.value)


def take_step(how):
    step, state, batch = step_of(how)
    step(state, batch)


def all_say(make, ranks, odd, **changes):
    # Of its own: ranks that went different ways have different groups in their caches.
    with RankPool(ranks) as pool:
        (text,) = {*pool.run(refused, make, odd, changes)}
    return text


def test_steps_that_differ_are_refused_on_every_rank():
    assert all_say(take_step, 4, 3, microbatches=4, rate=2e-3) == (
        "train step is set up differently on different ranks.\n"
        "  microbatches: rank 3 has 4, ranks 0, 1, 2 have 2\n"
        "  optimizer.change.members.1.update.change.rate.value: rank 3 has 0.002, ranks 0, 1, 2 have 0.001\n"
        "Start every rank with the same program and arguments."
    )
    text = all_say(take_step, 4, 0, strategy=fs.zero(1))
    assert "  strategy: rank 0 has zero1, ranks 1, 2, 3 have zero3\n" in text
    text = all_say(take_step, 4, 0, dim=32)
    assert text.startswith("fs.init_state got different first values on different ranks.\n")
    assert "  params.blocks.down: rank 0 has LazyTensor(shape=(4, 20, 32), dtype=torch.float32, kind='normal', " in text


def uneven(rows, pieces):
    """What ranks say of 7 rows in 2 microbatches, and that a batch that fits is taken then."""
    step, state, batch = step_of({**DEFAULT, "axes": {"dp": 2}, "microbatches": pieces})
    tokens = torch.zeros(rows, 8, dtype=torch.int64).chunk(2)[dist.get_rank()]
    with pytest.raises(BatchError) as refusal:
        step(state, {"tokens": tokens, "targets": tokens})
    _, metrics = step(state, batch)
    return str(refusal.value), float(metrics.count)


def test_a_batch_that_one_rank_cannot_cut_is_refused_on_every_rank():
    assert run_ranks(uneven, 2, 7, 2) == 2 * [(
        "train step cannot split the batches of all ranks into 2 microbatches.\n"
        "  rank 1: targets is int64[3, 8]\n"
        "  rank 1: tokens is int64[3, 8]\n"
        "Choose a number of microbatches that divides dim 0 of every leaf, or a different global batch.",
        64.0,
    )]  # fmt: skip
    texts = run_ranks(uneven, 2, 6, 2)
    assert texts[0] == texts[1] and texts[0][0].startswith("train step cannot split this rank's batch into 2 micro")


def scheduled(how):
    take_step({**how, "axes": {"pp": 2}, "strategy": fs.zero(0), "microbatches": 4})


def test_a_schedule_that_differs_is_named():
    text = all_say(scheduled, 2, 1, schedule="gpipe")
    assert "  schedule: rank 1 has gpipe, rank 0 has 1f1b\n" in text


def test_ranks_that_make_different_meshes_are_refused():
    assert all_say(make_mesh, 4, 2, axes={"dp": 4}) == (
        "fs.make_mesh is set up differently on different ranks.\n"
        "  mesh: rank 2 has {dp: 4} of cpu, ranks 0, 1, 3 have {dp: 2, tp: 2} of cpu\n"
        "Start every rank with the same program and arguments."
    )


def make_mesh(how):
    new_mesh(how["axes"])


def asked(compared):
    """How often ranks compare, over steps in one layout, in another, and in the first one again."""
    step, state, batch = step_of(DEFAULT)
    calls, found, real = [], [], _compat.all_gather_single
    with patch.object(_compat, "all_gather_single", lambda *args, **how: calls.append(1) or real(*args, **how)):
        for strategy in compared:
            state = fs.reshard(state, state.layout.with_strategy(strategy))
            calls.clear()
            for _ in range(2):
                state, _ = step(state, batch)
            found.append(len(calls))
    return found


def test_each_layout_is_compared_once():
    """The first step compares the setup, whether leaves were replaced, rows, each gather and reduction, the end of each
    forward and what the loss depends on, the end of all, loss and norm."""
    units, microbatches = CONFIG.layers + 2, DEFAULT["microbatches"]
    once = 5 + microbatches * (2 * units + 2)
    again = microbatches * (units - 2)  # backward gathers, but for the last unit and the embedding
    assert run_ranks(asked, 4, [fs.zero(3), fs.zero(1), fs.zero(3)]) == [[once + again, once, 0]] * 4


def started(folder):
    options = {"seed": 1} if dist.get_rank() == 1 else {}
    with pytest.raises(ConfigError) as refusal:
        _train(TrainConfig(folder / str(dist.get_rank()), steps=1, seq=8, mesh="dp=2", plot=False, **options))
    return str(refusal.value)


def test_ranks_that_were_started_with_different_options_are_refused(tmp_path):
    (text,) = {*run_ranks(started, 2, tmp_path)}
    assert text.startswith(
        "fsharding is set up differently on different ranks.\n  --seed: rank 1 has 1, rank 0 has 0\n"
    )
    assert not [*tmp_path.iterdir()], "nothing has been written"


def in_another_order():
    group = axis_group(fs.make_mesh(tp=2, ranks=(1, 0), device="cpu", timeout=timedelta(seconds=20)), ("tp",))
    rank = dist.get_rank()
    return group.ranks, gather_numbers(rank, group, "cpu"), compare({"rank": str(rank)}, group, "cpu")


def test_ranks_of_a_mesh_in_another_order_are_told_apart():
    for found in run_ranks(in_another_order, 2):
        assert found == ((1, 0), [1, 0], {1: {"rank": "1"}, 0: {"rank": "0"}})
