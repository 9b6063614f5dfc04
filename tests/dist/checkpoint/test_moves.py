"""Runs that stop on one mesh and go on on another have the losses of one that never stopped: the model's own outputs."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

import fsharding as fs
from fsharding.models import Experts
from fsharding.testing import run_ranks
from tests.helpers import full, mesh_of
from tests.models import STEPS, alone, batches, optimizer

DENSE = fs.models.DecoderConfig(vocab_size=50, dim=16, layers=4, heads=4, kv_heads=2, intermediate_size=20, tied=True)
EXPERTS = Experts(4, 2, 12, shared=1, score="sigmoid", z=1e-2, bias_rate=1e-2)
MOVED = 2

FROM = {
    "pp2 zbv": ({"pp": 2}, {"schedule": "zbv", "microbatches": 4}, DENSE),
    "ep2": ({"ep": 2}, {}, replace(DENSE, experts=EXPERTS)),
}
TO = {
    "tp2": ({"tp": 2}, {}),
    "dp2 ep2": ({"dp": 2, "ep": 2}, {}),
    "pp4 1f1b": ({"pp": 4}, {"microbatches": 4}),
}


def made(axes, config, strategy, schedule="1f1b", microbatches=1):
    """Layout, optimizer and step on a mesh."""
    mesh, model, ranks = mesh_of(axes), fs.models.decoder(config), axes.get("pp", 1)
    stages = (
        fs.pipeline.stages_of(model, fs.pipeline.plan_schedule(schedule, ranks, microbatches)) if ranks > 1 else None
    )
    layout = fs.plan_layout(model, mesh, strategy=strategy, stages=stages)
    opt = optimizer()
    return layout, opt, fs.make_train_step(model, opt, microbatches=microbatches, schedule=schedule)


def steps(state, step, first, last):
    found = []
    for batch in islice(batches(state.layout.mesh, 50), first, last):
        state, metrics = step(state, batch)
        found.append((metrics.loss, metrics.grad_norm))
    return state, torch.tensor(found)


def begun(axes, how, config):
    layout, opt, step = made(axes, config, fs.zero(3), **how)
    return steps(fs.init_state(fs.models.decoder(config), opt, fs.random.key(0), layout), step, 0, MOVED)[0]


def saves(source, folder):
    fs.checkpoint.save(folder, begun(*source))


def loads(config, axes, how, folder):
    layout, opt, step = made(axes, config, fs.zero(1), **how)
    return steps(fs.checkpoint.load(folder, layout, opt=opt), step, MOVED, STEPS)[1]


def moves(source, axes, how):
    """In memory, on the same ranks."""
    layout, _, step = made(axes, source[2], fs.zero(1), **how)
    return steps(fs.reshard(begun(*source), layout), step, MOVED, STEPS)[1]


def close(runs, config):
    for found in runs:
        torch.testing.assert_close(found, alone(config)[MOVED:], rtol=1e-5, atol=0)


@pytest.mark.parametrize("target", [t if t == "tp2" else pytest.param(t, marks=full) for t in TO])
@pytest.mark.parametrize("source", FROM)
def test_a_checkpoint_of_one_mesh_goes_on_on_another(tmp_path, source, target):
    (axes, how), config = TO[target], FROM[source][2]
    run_ranks(saves, 2, FROM[source], tmp_path / "saved")
    close(run_ranks(loads, torch.tensor([*axes.values()]).prod().item(), config, axes, how, tmp_path / "saved"), config)


@pytest.mark.parametrize(
    ("source", "axes", "how"),
    [
        ("ep2", {"pp": 2}, {"schedule": "interleaved", "microbatches": 2}),
        pytest.param("pp2 zbv", {"tp": 2}, {}, marks=full),
        pytest.param("ep2", {"cp": 2}, {}, marks=full),
    ],
)
def test_a_state_goes_on_on_another_mesh(source, axes, how):
    close(run_ranks(moves, 2, FROM[source], axes, how), FROM[source][2])
