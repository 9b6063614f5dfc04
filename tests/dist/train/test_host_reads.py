"""How often a step reads a device: the host waits there, and no graph of a device can go on past it."""

import pytest
import torch

import fsharding as fs
from fsharding.precision import LossScale, Precision
from fsharding.testing import counting_host_reads, run_ranks
from tests.helpers import full, mesh_of
from tests.training import DP, MODEL, OUTER, ZEROS, batches, optimizer

FP16 = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale(2.0**8))
PRECISIONS = {"fp32": fs.FP32, "bf16": fs.BF16, "fp16": FP16}


def reads(axes, strategy, precision, donate=False, schedule=None):
    """What a step in the steady state reads, the third."""
    mesh, opt, microbatches = mesh_of(axes), optimizer("adamw"), 1 if schedule is None else 2
    planned = None if schedule is None else fs.pipeline.plan_schedule(schedule, axes["pp"], microbatches)
    stages = None if planned is None else fs.pipeline.stages_of(MODEL, planned)
    layout = fs.plan_layout(MODEL, mesh, strategy=strategy, precision=precision, stages=stages)
    state = fs.init_state(MODEL, opt, fs.random.key(0), layout)
    step = fs.make_train_step(MODEL, opt, microbatches=microbatches, schedule=planned or "1f1b", donate=donate)
    first, second, third = batches(3, mesh)
    for batch in (first, second):
        state, _ = step(state, batch)
    with counting_host_reads() as seen:
        state, metrics = step(state, third)
    assert not metrics.skipped and int(state.step) == 3
    return seen.reads


def all_reads(axes, strategies, precisions, donate):
    return {
        (str(strategy), name): reads(axes, strategy, PRECISIONS[name], donate)
        for strategy in strategies
        for name in precisions
    }


@pytest.mark.parametrize("donate", [False, pytest.param(True, marks=full)])
def test_a_step_reads_the_mean_the_flag_the_clip_and_the_count(donate):
    for ranks, axes, strategies in ((2, DP, ZEROS), (4, OUTER, [fs.HSDP, fs.HFSDP])):
        for run in run_ranks(all_reads, ranks, axes, strategies, tuple(PRECISIONS), donate):
            for (strategy, precision), seen in run.items():
                assert len(seen) == (6 if precision == "fp16" else 4), (strategy, precision, seen)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=full)])
def test_a_pipeline_reads_as_often(schedule):
    for seen in run_ranks(reads, 2, {"pp": 2}, fs.zero(3), fs.FP32, False, schedule):
        assert len(seen) == 4, seen
