"""How often a step reads a device: the host waits there, and no graph of a device can go on past it."""

import itertools

import pytest
import torch

import fsharding as fs
from fsharding.formats.precision import LossScale, Precision
from fsharding.testing import counting_host_reads, run_ranks
from tests.helpers import full, mesh_of
from tests.training import DP, MODEL, OUTER, ZEROS, batches, optimizer

FP16 = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale(2.0**8))
PRECISIONS = {"fp32": fs.FP32, "bf16": fs.BF16, "fp16": FP16}
READS = {"sync": 1, "async": 0}


def reads(axes, strategy, precision, donate=False, schedule=None):
    """What the second call of a step reads, by `check`, while signals are watched for; it clips, and has a schedule."""
    mesh, opt, microbatches = mesh_of(axes), optimizer("adamw"), 1 if schedule is None else 2
    planned = None if schedule is None else fs.pipeline.plan_schedule(schedule, axes["pp"], microbatches)
    stages = None if planned is None else fs.pipeline.stages_of(MODEL, planned)
    layout = fs.plan_layout(MODEL, mesh, strategy=strategy, precision=PRECISIONS[precision], stages=stages)
    state, result = fs.init_state(MODEL, opt, fs.random.key(0), layout), {}
    for check in READS:
        how = {"microbatches": microbatches, "schedule": planned or "1f1b", "donate": donate, "check": check}
        step = fs.make_train_step(MODEL, opt, **how)
        first, second = batches(2, mesh)
        state, _ = step(state, first)
        with fs.preemption.watch(), counting_host_reads() as seen:
            state, metrics = step(state, second)
        assert not metrics.skipped
        result[check] = seen.reads
    assert int(state.step) == 4
    return result


def all_reads(axes, cases, donate):
    return {(str(strategy), name): reads(axes, strategy, name, donate) for strategy, name in cases}


ONE_MESH = [*itertools.product(ZEROS, PRECISIONS)]
TWO_AXES = [(fs.hybrid(), "fp16"), (fs.hybrid(opt_state=True), "fp32")]


@pytest.mark.parametrize("donate", [pytest.param(False, marks=full), True])
def test_a_step_reads_one_number_or_none(donate):
    for ranks, axes, cases in ((2, DP, ONE_MESH), (4, OUTER, TWO_AXES)):
        for run in run_ranks(all_reads, ranks, axes, cases, donate):
            for case, seen in run.items():
                assert {check: len(lines) for check, lines in seen.items()} == READS, (case, seen)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=full)])
def test_a_pipeline_reads_as_often(schedule):
    for seen in run_ranks(reads, 2, {"pp": 2}, fs.zero(3), "fp16", True, schedule):
        assert {check: len(lines) for check, lines in seen.items()} == READS, seen


def of_optimizers(names):
    """What steps of optimizers whose update is masked from outside read."""
    mesh, rates = mesh_of(DP), fs.optim.schedules.linear(1e-2, 1e-3, 5)
    matrices = {"matrix": fs.optim.muon(rates), "other": fs.optim.lion(rates)}
    made = {
        "sgd": fs.sgd(rates, momentum=0.9, dampening=0.1),
        "groups": fs.optim.multi_transform(matrices, fs.optim.label_matrices()),
        "ema": fs.optim.chain(fs.adamw(rates), fs.optim.ema(0.9)),
    }
    seen = {}
    for name in names:
        state = fs.init_state(MODEL, made[name], fs.random.key(0), fs.plan_layout(MODEL, mesh))
        step = fs.make_train_step(MODEL, made[name], check="async")
        first, second = batches(2, mesh)
        state, _ = step(state, first)
        with counting_host_reads() as counted:
            step(state, second)
        seen[name] = counted.reads
    return seen


def test_other_optimizers_read_nothing_either():
    for seen in run_ranks(of_optimizers, 2, ("sgd", "groups", "ema")):
        assert seen == {"sgd": [], "groups": [], "ema": []}
